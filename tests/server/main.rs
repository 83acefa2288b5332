//! The real server on real ports, in front of stores that are as real as the subject needs.

#![expect(unreachable_pub, reason = "the modules of a test are its only users")]
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test that cannot go on panics, and spawns what it likes"
)]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "the numbers of tests are small"
)]

mod admin;
mod cli;
mod collapse;
mod common;
mod conditions;
mod disk;
mod faults;
mod freshness;
mod keys;
mod memory;
mod model;
mod parquet;
mod purge;
mod ranges;
mod shutdown;
mod story;
