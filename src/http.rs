//! The HTTP APIs. Nothing below this module knows axum.

pub mod admin;
mod conditions;
pub mod data;
pub mod headers;
