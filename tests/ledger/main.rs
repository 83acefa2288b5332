//! The ledger: what it promises step by step, and that it keeps it in whatever order threads take their steps.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod behaviour;
mod model;

/// What `src/ledger.rs` finds at its crate's root when it is compiled here: the errors as they are, and the primitives of
/// the model's scheduler.
mod error {
    pub(crate) use halfopen::error::{Error, Kind};
}
mod sync;

#[path = "../../src/ledger.rs"]
#[expect(dead_code, unreachable_pub, reason = "the model uses a part of it")]
mod ledger;
