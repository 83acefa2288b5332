//! The governor: keeps resident memory below the limit while the ledger keeps payload below its own.
//!
//! It is the slow loop; the payload arena purges itself by bytes freed (`buffer/arena.rs`), and the ledger bounds what
//! fills take. Near the limit it gives free pages back, then allows payload less room and has the cache let go, and sheds
//! last: fills are refused until there is memory again. What it took it gives back slowly.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep, timeout};

use crate::buffer::arena;
use crate::cache::Cache;
use crate::config::Measures;
use crate::ledger::Ledger;
use crate::memory::resident_bytes;

/// How often it looks: reading `statm` takes 10 us.
const PERIOD: Duration = Duration::from_millis(100);

/// How soon it looks again when the ledger is cramped: a resize of the cache starts a thread for each shard.
const PERIOD_CRAMPED: Duration = Duration::from_millis(5);

/// The cache grows again only when there is room for this share of its capacity more; less than this is not told.
const GROW_SHARE: u64 = 32;

/// The share of its capacity that is given back each time it looks, once resident memory is well below the limit.
const RECOVER_SHARE: u64 = 64;

/// How long a loan is waited for: a step of the loop makes the room, the next one sees it.
const LOAN_PATIENCE: Duration = Duration::from_secs(3);

/// The cache is never made smaller than this share of its capacity: what is hot stays.
const LEAST_SHARE: u64 = 8;

/// What the governor is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum MemoryState {
    /// Memory is where it should be.
    Normal = 0,
    /// Resident memory is near the limit, or responses hold what the cache has let go: the cache is smaller than it may be.
    Reclaiming = 1,
    /// Resident memory is at the limit: fills are refused.
    Shedding = 2,
}

impl MemoryState {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Normal, Self::Reclaiming, Self::Shedding];

    /// Its name in metrics and documents.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Reclaiming => "reclaiming",
            Self::Shedding => "shedding",
        }
    }
}

/// Resident memory, in bytes, above which each measure is taken.
#[derive(Clone, Copy, Debug)]
pub struct Thresholds {
    /// Free pages are given back, and the cache is made smaller.
    pub reclaim: u64,
    /// Fills are refused.
    pub shed: u64,
    /// What free pages and the like may come to: so far below the second the first is kept while memory is lent.
    slack: u64,
}

impl Thresholds {
    /// For a limit of which `slack` bytes are for free pages: half of it is what the arena may hold free between two
    /// purges of its own.
    pub const fn new(limit: u64, slack: u64) -> Self {
        Self { reclaim: limit.saturating_sub(slack / 2), shed: limit.saturating_sub(slack / 8), slack }
    }
}

/// The control loop.
#[derive(Debug)]
pub struct Governor {
    thresholds: Thresholds,
    /// What the cache may weigh when nothing presses.
    capacity: u64,
    /// What payload is denied of it because resident memory is too near the limit.
    denied: AtomicU64,
    /// What is wanted of the limit for something beside the server.
    wanted: AtomicU64,
    /// What of it was lent.
    lent: AtomicU64,
    state: AtomicU8,
    cache: Arc<Cache>,
    ledger: Arc<Ledger>,
    measures: Measures,
}

impl Governor {
    /// A governor of a cache that may weigh `capacity` bytes.
    pub fn new(
        thresholds: Thresholds,
        capacity: u64,
        cache: Arc<Cache>,
        ledger: Arc<Ledger>,
        measures: Measures,
    ) -> Arc<Self> {
        let [denied, wanted, lent] = [0, 0, 0].map(AtomicU64::new);
        let state = AtomicU8::new(MemoryState::Normal as u8);
        Arc::new(Self { thresholds, capacity, denied, wanted, lent, state, cache, ledger, measures })
    }

    /// What it is doing.
    pub fn state(&self) -> MemoryState {
        let state = self.state.load(Ordering::Relaxed);
        MemoryState::ALL.into_iter().find(|known| *known as u8 == state).unwrap_or(MemoryState::Normal)
    }

    /// Whether memory is so short that clients that hardly read are not waited for.
    pub fn is_pressed(&self) -> bool {
        self.measures.least_rate && self.state() != MemoryState::Normal
    }

    /// Makes room for `bytes` beside the server, by so much less for the server until the loan is dropped; `None` when
    /// there is no room in bounded time.
    pub async fn lend(self: &Arc<Self>, bytes: u64) -> Option<Loan> {
        // With all that the cache can let go it would still not fit: then nothing is let go.
        let least =
            resident_bytes().saturating_sub(self.ledger.held().cached).saturating_add(self.capacity / LEAST_SHARE);
        let wanted = bytes.saturating_add(self.thresholds.slack);
        if least.saturating_add(wanted) > self.thresholds.shed {
            return None;
        }
        self.wanted.fetch_add(wanted, Ordering::Relaxed);
        let mut loan = Loan { governor: Arc::clone(self), wanted, lent: 0 };
        let deadline = Instant::now() + LOAN_PATIENCE;
        loop {
            let resident = resident_bytes().saturating_add(self.lent.load(Ordering::Relaxed));
            if resident.saturating_add(bytes).saturating_add(self.thresholds.slack / 2) < self.thresholds.shed {
                self.lent.fetch_add(bytes, Ordering::Relaxed);
                loan.lent = bytes;
                return Some(loan);
            }
            if Instant::now() >= deadline {
                return None;
            }
            sleep(PERIOD / 2).await;
        }
    }

    /// Watches until it is dropped.
    pub async fn watch(self: Arc<Self>) {
        loop {
            // A wish that comes while it works is kept, so that it looks again at once.
            let _ = timeout(PERIOD, self.ledger.cramped()).await;
            let governor = Arc::clone(&self);
            // Giving pages back and resizing take milliseconds, which are not the workers'.
            let _ = tokio::task::spawn_blocking(move || governor.look()).await;
            sleep(PERIOD_CRAMPED).await;
        }
    }

    fn look(&self) {
        let Measures { purge, resize, shed, .. } = self.measures;
        let reclaim = self.thresholds.reclaim.saturating_sub(self.wanted.load(Ordering::Relaxed));
        let mut resident = resident_bytes();
        if purge && resident > reclaim {
            arena::purge_all();
            resident = resident_bytes();
        }
        if resize {
            self.ledger.set_room(self.capacity.saturating_sub(self.deny(resident, reclaim)));
            self.fit_cache();
        }
        let is_over = resident > self.thresholds.shed.saturating_sub(self.lent.load(Ordering::Relaxed));
        self.ledger.shed(shed && is_over);
        self.enter(match () {
            () if is_over => MemoryState::Shedding,
            () if resident > reclaim => MemoryState::Reclaiming,
            () if self.is_cramped() => MemoryState::Reclaiming,
            () => MemoryState::Normal,
        });
    }

    /// Whether the cache is smaller than it may be by more than what comes and goes with each read.
    fn is_cramped(&self) -> bool {
        self.cache.capacity() < self.capacity - self.capacity / GROW_SHARE
    }

    /// Makes the cache as large as there is room for: smaller at once, larger when it is worth it.
    fn fit_cache(&self) {
        let room = self.ledger.room_for_cache().clamp(self.capacity / LEAST_SHARE, self.capacity);
        let now = self.cache.capacity();
        let is_worth_it = room == self.capacity || room > now.saturating_add(self.capacity / GROW_SHARE);
        if room < now || (room > now && is_worth_it) {
            self.cache.resize(room);
        }
    }

    /// What payload is denied from now on: as much more as memory is resident above the threshold, or a little less.
    fn deny(&self, resident: u64, reclaim: u64) -> u64 {
        let before = self.denied.load(Ordering::Relaxed);
        let over = resident.saturating_sub(reclaim);
        let step = self.capacity / RECOVER_SHARE;
        let denied = if over > 0 {
            before.saturating_add(over).min(self.capacity - self.capacity / LEAST_SHARE)
        } else if resident.saturating_add(2 * step) < reclaim {
            before.saturating_sub(step)
        } else {
            before
        };
        self.denied.store(denied, Ordering::Relaxed);
        denied
    }

    fn enter(&self, state: MemoryState) {
        let before = self.state.swap(state as u8, Ordering::Relaxed);
        if before != state as u8 {
            let (held, capacity) = (self.ledger.held(), self.cache.capacity());
            let (pinned, denied) = (held.pinned, self.denied.load(Ordering::Relaxed));
            tracing::info!(?state, resident_bytes = resident_bytes(), pinned, denied, capacity, "memory state changed");
        }
    }
}

/// Memory lent to something beside the server.
#[derive(Debug)]
pub struct Loan {
    governor: Arc<Governor>,
    wanted: u64,
    lent: u64,
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.governor.wanted.fetch_sub(self.wanted, Ordering::Relaxed);
        self.governor.lent.fetch_sub(self.lent, Ordering::Relaxed);
    }
}
