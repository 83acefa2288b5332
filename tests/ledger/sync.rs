//! The primitives of `src/sync.rs`, each step of which is a choice of the scheduler.

pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU8, Ordering};
pub(crate) use shuttle::sync::{Arc, Mutex, MutexGuard};
pub(crate) use std::sync::PoisonError;

pub(crate) use shuttle_tokio::sync::{Notify, Semaphore};

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};

/// Patience that never ends: then a wait that nobody ends is a deadlock, which the scheduler reports.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(1);

/// The time is up.
pub(crate) struct Elapsed;

/// The time is up at any poll, or never.
pub(crate) async fn timeout<F: Future>(patience: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Ok(done)),
        Poll::Pending if patience < FOR_EVER && thread_rng().gen_bool(0.5) => Poll::Ready(Err(Elapsed)),
        Poll::Pending => Poll::Pending,
    })
    .await
}
