//! halfopen: a cache of exact byte ranges between data-plane services and an object store, whose resident memory stays
//! under one limit.
//!
//! A read goes down once and comes up once:
//!
//! ```text
//! http::data          route, then headers
//!   http::headers       Range -> RangeSpec                       (the only place with inclusive numbers)
//!   reader              open(object, spec): the one read path, for every API
//!     metadata            current version and size: fresh, revalidated, or learned from the first GET
//!     range               spec.resolve(size) -> Whole | Part(ByteRange) | Unsatisfiable; cut into extents
//!     cache               memory, then disk
//!     fetch               flights (join or lead), missing runs -> store -> exact buffers; retries, If-Match
//!       ledger              one grant for an extent, before it is allocated
//!       store               what the upstream answered, checked
//!       buffer              allocated once, charged, handed on as it is
//!     cache               insert; the response does not wait for it
//!   http::headers       status, Content-Range, ETag, Cache-Status from what was opened
//! http::data          streams the body; one record of the outcome, at the edge
//! ```
//!
//! The modules below are in the order of their dependencies: each uses only those above it.
//! `tests/architecture.rs` keeps that true, and `ARCHITECTURE.md` gives the reasons.

pub mod error;
pub mod object;
pub mod range;

mod sync;

pub mod telemetry;

pub mod buffer;
pub mod ledger;
pub mod memory;

pub mod config;
pub mod heap;

pub mod disk;
pub mod flight;
pub mod governor;
pub mod purge;
pub mod store;

pub mod cache;

pub mod metadata;

pub mod fetch;

pub mod reader;

pub mod http;

pub mod check;
pub mod server;
