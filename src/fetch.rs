//! Misses: flights that others join, runs of neighbouring extents filled from one GET each, retries.

mod opening;
mod run;

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use backon::ExponentialBuilder;
use tokio_util::task::TaskTracker;

use crate::buffer::Extent;
use crate::buffer::arena::Arena;
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
    /// Whether the cache is used.
    pub passage: Passage,
    /// Longest run, in bytes. Past the cache it is one extent: nothing leaves its share of memory before it is sent.
    pub run_max: NonZeroU64,
}

/// Whether a read uses the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Passage {
    /// It is looked into, and keeps what is fetched.
    Through,
    /// Nothing is taken from it and nothing is kept in it: the client's wish.
    Past,
    /// Likewise, for want of memory, and in pieces that the reserve has room for.
    InSmallPieces,
}

impl Passage {
    /// Whether nothing is taken from the cache and nothing kept.
    pub const fn is_past_the_cache(self) -> bool {
        !matches!(self, Self::Through)
    }
}

/// The extents of a read in small pieces: at the smallest limit the reserve holds eight of them.
const SMALL_PIECE: NonZeroU64 = NonZeroU64::new(64 << 10).unwrap();

impl Target {
    /// After what was fetched ahead was lost before it was read: less is fetched ahead from now on.
    pub fn shorten_runs(&mut self, extent_max: NonZeroU64) {
        self.run_max = NonZeroU64::new(self.run_max.get() / 2).map_or(extent_max, |half| half.max(extent_max));
    }

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
    /// It is being fetched for another read; what follows it in flight ends here at the furthest.
    Joined(Waiter<Arrived>, u64),
    /// It is being fetched for this read, with what follows it up to here.
    Led(Waiter<Arrived>, u64),
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

    /// Longest extent of a read, in bytes.
    pub fn extent_max(&self, passage: Passage) -> NonZeroU64 {
        match passage {
            Passage::Through | Passage::Past => self.config.extent_max,
            Passage::InSmallPieces => self.config.extent_max.min(SMALL_PIECE),
        }
    }

    /// What to read of a version.
    pub fn target(&self, store: &Arc<Store>, metadata: &Arc<Metadata>, passage: Passage) -> Target {
        let run_max = if passage.is_past_the_cache() { self.extent_max(passage) } else { self.config.run_max };
        Target { store: Arc::clone(store), metadata: Arc::clone(metadata), passage, run_max }
    }

    /// Finds an extent. When it is missing, those missing after it, the `rest` of the read, are fetched with it as one run.
    pub fn find(self: &Arc<Self>, target: &Target, piece: ByteRange, rest: Cut) -> Found {
        let key = target.key(piece);
        if target.passage.is_past_the_cache() {
            return self.lead(&mut self.extents.look(), target, key, rest);
        }
        if let Some(extent) = self.cache.get(&key) {
            return Found::Hit(extent);
        }
        let mut tower = self.extents.look();
        if let Some(waiter) = tower.join(&key) {
            return Found::Joined(waiter, piece.start().saturating_add(self.config.run_max.get()));
        }
        // A flight ends after its extent is in the cache: what was missing before the look may have landed since.
        if let Some(extent) = self.cache.get(&key) {
            return Found::Hit(extent);
        }
        self.lead(&mut tower, target, key, rest)
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
        rest: Cut,
    ) -> Found {
        let interest = Arc::new(Interest::default());
        let begin = |tower: &mut Tower<'_, ExtentKey, Arrived>, key| {
            if target.passage.is_past_the_cache() {
                tower.fly_alone(key, &interest)
            } else {
                tower.lead(key, &interest)
            }
        };
        let on_disk = |key: &ExtentKey| !target.passage.is_past_the_cache() && self.cache.may_be_on_disk(key);
        let from_disk = on_disk(&first);
        let mut range = first.range();
        let (landing, waiter) = begin(tower, first);
        let mut landings = VecDeque::from([landing]);
        let belongs = |tower: &Tower<'_, ExtentKey, Arrived>, key: &ExtentKey| {
            (target.passage.is_past_the_cache() || self.is_missing(tower, key)) && on_disk(key) == from_disk
        };
        for piece in rest {
            let key = target.key(piece);
            if piece.end() - range.start() > target.run_max.get() || !belongs(tower, &key) {
                break;
            }
            landings.push_back(begin(tower, key).0);
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
        Found::Led(waiter, range.end())
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
