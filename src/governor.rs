//! The governor: watches resident memory and gives free pages back before the limit is reached.
//!
//! It is the slow loop; the payload arena purges itself by bytes freed (`buffer/arena.rs`), and the ledger bounds what
//! fills take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};

use crate::buffer::arena;
use crate::memory::resident_bytes;

/// How often it looks: reading `statm` takes 10 us.
const PERIOD: Duration = Duration::from_millis(100);

/// What the governor is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum MemoryState {
    /// Resident memory is where it should be.
    Normal = 0,
    /// It is near the limit: free pages of all arenas are given back each time it looks.
    Reclaiming = 1,
}

/// The control loop.
#[derive(Debug)]
pub struct Governor {
    reclaim_above: u64,
    state: AtomicU8,
}

impl Governor {
    /// A governor that begins to reclaim when resident memory is above so many bytes.
    pub fn new(reclaim_above: u64) -> Arc<Self> {
        Arc::new(Self { reclaim_above, state: AtomicU8::new(MemoryState::Normal as u8) })
    }

    /// What it is doing.
    pub fn state(&self) -> MemoryState {
        if self.state.load(Ordering::Relaxed) == MemoryState::Normal as u8 {
            MemoryState::Normal
        } else {
            MemoryState::Reclaiming
        }
    }

    /// Watches until it is dropped.
    pub async fn watch(self: Arc<Self>) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if self.look() == MemoryState::Reclaiming {
                // Giving pages back takes milliseconds, which are not the workers'.
                let _ = tokio::task::spawn_blocking(arena::purge_all).await;
            }
        }
    }

    fn look(&self) -> MemoryState {
        let resident = resident_bytes();
        let state = if resident > self.reclaim_above { MemoryState::Reclaiming } else { MemoryState::Normal };
        let before = self.state.swap(state as u8, Ordering::Relaxed);
        if before != state as u8 {
            tracing::info!(?state, resident_bytes = resident, "memory state changed");
        }
        state
    }
}
