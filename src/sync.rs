//! What the ledger synchronizes by, named in one place: its model check puts a scheduler's own in their stead
//! (`tests/ledger/`).

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use tokio::sync::{Notify, Semaphore};
pub(crate) use tokio::time::timeout;
