//! The real server on real ports, in front of stores that are as real as the subject needs.

#![expect(unreachable_pub, reason = "the modules of a test are its only users")]

mod admin;
mod cli;
mod collapse;
mod common;
mod faults;
mod freshness;
mod keys;
mod model;
mod parquet;
mod ranges;
mod shutdown;
mod story;
