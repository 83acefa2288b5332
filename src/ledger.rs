//! The one account of payload memory: who holds how many bytes, and who may take more.
//!
//! Every payload byte is charged from before it is allocated until after it is freed. A [`Grant`] is permission to fill
//! so many bytes; a [`Charge`] is a part of a grant turned into memory. The share that fills may use at once is fixed, so
//! a full cache never blocks a fill.
#![deny(clippy::arithmetic_side_effects)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::error::{Error, Kind};

/// What charged bytes are used for just now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Use {
    /// Being filled, or filled and not yet handed on.
    Filling = 0,
    /// Held by the cache (and perhaps by responses too).
    Cached = 1,
    /// Held by responses although not, or no longer, in the cache.
    Pinned = 2,
    /// Held by nobody but the queue of what is to be written to disk (and perhaps by responses).
    DiskQueue = 3,
}

impl Use {
    const ALL: [Self; 4] = [Self::Filling, Self::Cached, Self::Pinned, Self::DiskQueue];
}

/// The account itself.
#[derive(Debug)]
pub struct Ledger {
    held: [AtomicU64; Use::ALL.len()],
    in_flight: Semaphore,
    in_flight_bytes: u32,
    patience: Duration,
}

/// Bytes held for each use, at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// See [`Use::Filling`].
    pub filling: u64,
    /// See [`Use::Cached`].
    pub cached: u64,
    /// See [`Use::Pinned`].
    pub pinned: u64,
    /// See [`Use::DiskQueue`].
    pub disk_queue: u64,
}

impl Held {
    /// All payload bytes.
    pub const fn live(self) -> u64 {
        self.filling.saturating_add(self.cached).saturating_add(self.pinned).saturating_add(self.disk_queue)
    }
}

impl Ledger {
    /// An account whose fills may hold `in_flight` bytes at once, and wait up to `patience` for their share of it.
    pub fn new(in_flight: u64, patience: Duration) -> Arc<Self> {
        let in_flight_bytes = u32::try_from(in_flight).unwrap_or(u32::MAX);
        Arc::new(Self {
            held: Default::default(),
            in_flight: Semaphore::new(usize::try_from(in_flight_bytes).unwrap_or(usize::MAX)),
            in_flight_bytes,
            patience,
        })
    }

    /// Permission to fill `bytes`; waits its turn.
    ///
    /// Never wait for a second grant while holding a first: all holders could then be waiting, and none would release.
    pub async fn grant(self: &Arc<Self>, bytes: u64) -> Result<Grant, Error> {
        let bytes = u32::try_from(bytes).ok().filter(|bytes| *bytes <= self.in_flight_bytes);
        let bytes = bytes.ok_or_else(|| overloaded("memory.in_flight is smaller than one read"))?;
        match timeout(self.patience, self.in_flight.acquire_many(bytes)).await {
            Ok(Ok(permit)) => {
                permit.forget();
                Ok(Grant { ledger: Arc::clone(self), bytes: u64::from(bytes) })
            }
            Ok(Err(_)) => Err(Error::new(Kind::Internal, "the ledger is closed")),
            Err(_) => Err(overloaded("no memory for a fill within fetch.queue_timeout")),
        }
    }

    /// Bytes held for each use, now.
    pub fn held(&self) -> Held {
        let read = |of: Use| self.account(of).load(Ordering::Relaxed);
        Held {
            filling: read(Use::Filling),
            cached: read(Use::Cached),
            pinned: read(Use::Pinned),
            disk_queue: read(Use::DiskQueue),
        }
    }

    /// Bytes of the in-flight share that are free.
    pub fn in_flight_free(&self) -> u64 {
        self.in_flight.available_permits() as u64
    }

    fn account(&self, of: Use) -> &AtomicU64 {
        let [filling, cached, pinned, disk_queue] = &self.held;
        match of {
            Use::Filling => filling,
            Use::Cached => cached,
            Use::Pinned => pinned,
            Use::DiskQueue => disk_queue,
        }
    }

    fn release_in_flight(&self, bytes: u64) {
        self.in_flight.add_permits(usize::try_from(bytes).unwrap_or(usize::MAX));
    }
}

fn overloaded(detail: &'static str) -> Error {
    Error::new(Kind::Overloaded("memory.in_flight"), detail)
}

/// Permission to fill some bytes; what is not used is given back on drop.
#[derive(Debug)]
pub struct Grant {
    ledger: Arc<Ledger>,
    bytes: u64,
}

impl Grant {
    /// Turns `bytes` of it into a charge; `None` when it has not so many left.
    pub fn charge(&mut self, bytes: u64) -> Option<Charge> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        self.ledger.account(Use::Filling).fetch_add(bytes, Ordering::Relaxed);
        Some(Charge { ledger: Arc::clone(&self.ledger), bytes, state: AtomicU8::new(GRANTED) })
    }

    /// Makes it as large as `bytes` if that can be had at once: waiting here would be waiting for a second grant.
    pub fn try_grow_to(&mut self, bytes: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let permit = u32::try_from(more).ok().and_then(|more| self.ledger.in_flight.try_acquire_many(more).ok());
        let Some(permit) = permit else { return false };
        permit.forget();
        self.bytes = self.bytes.saturating_add(more);
        true
    }

    /// Bytes of it that are not charged yet.
    pub const fn left(&self) -> u64 {
        self.bytes
    }

    /// Gives back all but `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) {
        let surplus = self.bytes.saturating_sub(bytes);
        self.bytes = self.bytes.saturating_sub(surplus);
        self.ledger.release_in_flight(surplus);
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.ledger.release_in_flight(self.bytes);
    }
}

/// Set while the charge still holds its part of the in-flight share; the lower bits are the [`Use`].
const GRANTED: u8 = 0x80;

/// Set while the bytes wait to be written to disk, whoever else holds them.
const QUEUED: u8 = 0x40;

/// Bytes that are in memory. Held by the buffer itself, so that it ends when the last reader of the buffer does.
#[derive(Debug)]
pub struct Charge {
    ledger: Arc<Ledger>,
    bytes: u64,
    state: AtomicU8,
}

impl Charge {
    /// Bytes charged.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The cache has taken the bytes: they leave the in-flight share.
    pub fn cached(&self) {
        self.shift(|state| Use::Cached as u8 | state & QUEUED);
    }

    /// The cache does not hold the bytes. Those that it never held stay in the in-flight share.
    pub fn pinned(&self) {
        self.shift(|state| {
            let of = if state & QUEUED == 0 { Use::Pinned } else { Use::DiskQueue };
            of as u8 | state & (GRANTED | QUEUED)
        });
    }

    /// The bytes wait to be written to disk.
    pub fn queued(&self) {
        self.shift(|state| state | QUEUED);
    }

    /// They no longer do.
    pub fn written(&self) {
        self.shift(|state| match use_of(state) {
            Use::DiskQueue => Use::Pinned as u8 | state & GRANTED,
            _ => state & !QUEUED,
        });
    }

    fn shift(&self, to: impl Fn(u8) -> u8) {
        let before = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| Some(to(state)));
        let Ok(before) = before else { return };
        let after = to(before);
        if use_of(before) != use_of(after) {
            self.ledger.account(use_of(after)).fetch_add(self.bytes, Ordering::Relaxed);
            self.ledger.account(use_of(before)).fetch_sub(self.bytes, Ordering::Relaxed);
        }
        if before & GRANTED > after & GRANTED {
            self.ledger.release_in_flight(self.bytes);
        }
    }
}

fn use_of(state: u8) -> Use {
    Use::ALL.into_iter().find(|of| *of as u8 == state & !(GRANTED | QUEUED)).unwrap_or(Use::Filling)
}

impl Drop for Charge {
    fn drop(&mut self) {
        let state = *self.state.get_mut();
        self.ledger.account(use_of(state)).fetch_sub(self.bytes, Ordering::Relaxed);
        if state & GRANTED != 0 {
            self.ledger.release_in_flight(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Arc<Ledger> {
        Ledger::new(100, Duration::from_millis(1))
    }

    #[tokio::test(start_paused = true)]
    async fn a_grant_comes_back_whole_however_it_was_used() {
        let ledger = ledger();
        let mut grant = ledger.grant(80).await.unwrap();
        assert_eq!(ledger.in_flight_free(), 20);
        grant.shrink_to(60);
        assert_eq!(ledger.in_flight_free(), 40);
        let stored = grant.charge(30).unwrap();
        let passed_on = grant.charge(20).unwrap();
        assert!(grant.charge(11).is_none());
        drop(grant);
        assert_eq!(ledger.in_flight_free(), 50);
        assert_eq!(ledger.held().filling, 50);

        stored.cached();
        assert_eq!((ledger.held().cached, ledger.in_flight_free()), (30, 80));
        stored.pinned();
        assert_eq!((ledger.held().pinned, ledger.in_flight_free()), (30, 80));
        stored.queued();
        assert_eq!(ledger.held().pinned, 30);
        stored.cached();
        stored.pinned();
        assert_eq!((ledger.held().disk_queue, ledger.held().pinned), (30, 0));
        stored.written();
        assert_eq!((ledger.held().disk_queue, ledger.held().pinned), (0, 30));
        passed_on.pinned();
        assert_eq!((ledger.held().pinned, ledger.in_flight_free()), (50, 80));

        drop(stored);
        drop(passed_on);
        assert_eq!((ledger.held().live(), ledger.in_flight_free()), (0, 100));
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_granted_is_refused() {
        let ledger = ledger();
        let mut some = ledger.grant(10).await.unwrap();
        assert!(!some.try_grow_to(101) && some.try_grow_to(60) && some.try_grow_to(5));
        assert_eq!((some.left(), ledger.in_flight_free()), (60, 40));
        drop(some);
        let all = ledger.grant(100).await.unwrap();
        assert_eq!(ledger.grant(1).await.unwrap_err().kind(), Kind::Overloaded("memory.in_flight"));
        drop(all);
        assert_eq!(ledger.grant(101).await.unwrap_err().kind(), Kind::Overloaded("memory.in_flight"));
        assert!(ledger.grant(100).await.is_ok());
    }
}
