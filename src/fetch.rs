//! Misses: flights that others join, runs of neighbouring extents filled from one GET each, retries.

mod opening;
mod run;

use std::collections::VecDeque;
use std::iter::Peekable;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use backon::ExponentialBuilder;
use tokio_util::task::TaskTracker;

use crate::buffer::arena::Arena;
use crate::buffer::{ExactBuffer, Extent};
use crate::cache::Cache;
use crate::config::FetchConfig;
use crate::flight::{Flights, Interest, Tower, Waiter};
use crate::ledger::Ledger;
use crate::metadata::Directory;
use crate::object::{ExtentKey, Metadata, ObjectName};
use crate::range::{ByteRange, Cut, RangeSpec};
use crate::store::Store;
use crate::telemetry::{ByteSource, Metrics};
pub use opening::{Opened, Opening};
use run::Run;

/// The first pause before another try; it doubles, with jitter, up to [`RETRY_PAUSE_MAX`].
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Finds extents, in the cache or in flight, and fetches what is missing.
#[derive(Debug)]
pub struct Fetcher {
    cache: Arc<Cache>,
    directory: Arc<Directory>,
    arena: Arc<Arena>,
    ledger: Arc<Ledger>,
    extents: Arc<Flights<ExtentKey, Arrived>>,
    openings: Arc<Flights<(ObjectName, RangeSpec), Arc<Opening>>>,
    tracker: TaskTracker,
    metrics: Arc<Metrics>,
    config: FetchConfig,
}

/// What a read takes its extents from.
#[derive(Clone, Debug)]
pub struct Target {
    /// The store.
    pub store: Arc<Store>,
    /// The version.
    pub metadata: Arc<Metadata>,
    /// Nothing is taken from the cache and nothing is kept in it.
    pub past_the_cache: bool,
}

impl Target {
    fn key(&self, piece: ByteRange) -> ExtentKey {
        ExtentKey::new(Arc::clone(&self.metadata.id), piece)
    }
}

/// An extent that was not in memory, and where it came from.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The extent.
    pub extent: Extent,
    /// Disk, or a store.
    pub source: ByteSource,
}

/// Where an extent was found.
#[derive(Debug)]
pub enum Found {
    /// In memory.
    Hit(Extent),
    /// It is being fetched for another read.
    Joined(Waiter<Arrived>),
    /// It is being fetched for this read.
    Led(Waiter<Arrived>),
}

impl Fetcher {
    /// A fetcher that fills buffers of `arena`, charged to `ledger`, into `cache`.
    pub fn new(
        cache: Arc<Cache>,
        directory: Arc<Directory>,
        arena: Arc<Arena>,
        ledger: Arc<Ledger>,
        tracker: TaskTracker,
        metrics: Arc<Metrics>,
        config: FetchConfig,
    ) -> Self {
        Self {
            cache,
            directory,
            arena,
            ledger,
            extents: Arc::default(),
            openings: Arc::default(),
            tracker,
            metrics,
            config,
        }
    }

    /// Longest extent, in bytes.
    pub fn extent_max(&self) -> NonZeroU64 {
        self.config.extent_max
    }

    /// Finds the next extent of a read. When it is missing its missing neighbours are fetched with it, as one run; they
    /// are put into `neighbours` and taken from `pieces`.
    pub fn find(
        self: &Arc<Self>,
        target: &Target,
        pieces: &mut Peekable<Cut>,
        neighbours: &mut VecDeque<Found>,
    ) -> Option<Found> {
        let key = target.key(pieces.next()?);
        if target.past_the_cache {
            return Some(self.lead(&mut self.extents.look(), target, key, pieces, neighbours));
        }
        if let Some(extent) = self.cache.get(&key) {
            return Some(Found::Hit(extent));
        }
        let mut tower = self.extents.look();
        if let Some(waiter) = tower.join(&key) {
            // What follows in flight is joined too: its run would be given up when those it was begun for leave.
            let run_end = key.range().start().saturating_add(self.config.run_max.get());
            while let Some(piece) = pieces.next_if(|piece| piece.end() <= run_end && tower.has(&target.key(*piece))) {
                neighbours.extend(tower.join(&target.key(piece)).map(Found::Joined));
            }
            return Some(Found::Joined(waiter));
        }
        // A flight ends after its extent is in the cache: what was missing before the look may have landed since.
        if let Some(extent) = self.cache.get(&key) {
            return Some(Found::Hit(extent));
        }
        Some(self.lead(&mut tower, target, key, pieces, neighbours))
    }

    /// Whether all extents of a range are in the cache.
    pub fn holds(&self, metadata: &Arc<Metadata>, range: ByteRange) -> bool {
        let key = |piece| ExtentKey::new(Arc::clone(&metadata.id), piece);
        range
            .cut(self.config.extent_max)
            .map(key)
            .all(|key| self.cache.contains(&key) || self.cache.may_be_on_disk(&key))
    }

    /// Begins the flight of a missing extent, and with it those of its missing neighbours.
    ///
    /// What a store is asked for is one run, one GET; what is on disk is read side by side, each extent for itself.
    fn lead(
        self: &Arc<Self>,
        tower: &mut Tower<'_, ExtentKey, Arrived>,
        target: &Target,
        first: ExtentKey,
        pieces: &mut Peekable<Cut>,
        neighbours: &mut VecDeque<Found>,
    ) -> Found {
        let interest = Arc::new(Interest::default());
        let begin = |tower: &mut Tower<'_, ExtentKey, Arrived>, key| {
            if target.past_the_cache { tower.fly_alone(key, &interest) } else { tower.lead(key, &interest) }
        };
        let on_disk = |key: &ExtentKey| !target.past_the_cache && self.cache.may_be_on_disk(key);
        let from_disk = on_disk(&first);
        // Past the cache nothing leaves the in-flight share before it is sent: there, one extent is a run.
        let run_max = if target.past_the_cache { self.config.extent_max } else { self.config.run_max };
        let mut range = first.range();
        let (landing, waiter) = begin(tower, first);
        let mut landings = VecDeque::from([landing]);
        while let Some(piece) = pieces.next_if(|piece| {
            let key = target.key(*piece);
            piece.end() - range.start() <= run_max.get()
                && (target.past_the_cache || self.is_missing(tower, &key))
                && on_disk(&key) == from_disk
        }) {
            let (landing, waiter) = begin(tower, target.key(piece));
            landings.push_back(landing);
            neighbours.push_back(Found::Led(waiter));
            range = range.until(piece.end());
        }
        if from_disk {
            for landing in landings {
                let fetcher = Arc::clone(self);
                let run = Run::new(target, landing.key().range(), VecDeque::from([landing]), Arc::clone(&interest));
                self.tracker.spawn(async move { fetcher.read_from_disk(run).await });
            }
        } else {
            let fetcher = Arc::clone(self);
            let run = Run::new(target, range, landings, interest);
            self.tracker.spawn(async move { fetcher.fill(run).await });
        }
        Found::Led(waiter)
    }

    fn is_missing(&self, tower: &Tower<'_, ExtentKey, Arrived>, key: &ExtentKey) -> bool {
        !tower.has(key) && !self.cache.contains(key)
    }

    /// Pauses between tries; as many as there are retries.
    fn pauses(&self) -> ExponentialBuilder {
        ExponentialBuilder::default()
            .with_min_delay(RETRY_PAUSE_MIN)
            .with_max_delay(RETRY_PAUSE_MAX)
            .with_max_times(self.config.retries)
            .with_jitter()
    }
}

/// Bytes that the buffers of a range's extents will be charged for.
fn weight_of(range: ByteRange, extent_max: NonZeroU64) -> u64 {
    range.cut(extent_max).map(|piece| ExactBuffer::weight_of(piece.len())).fold(0, u64::saturating_add)
}
