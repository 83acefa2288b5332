//! The HTTP APIs. Nothing below this module knows axum.

pub mod admin;
pub mod data;
pub mod headers;
