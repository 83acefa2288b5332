//! The disk tier: whole extents and objects' metadata on a local SSD, found again after a restart.
//!
//! The cache may fail; reads may not. Whatever goes wrong here is a miss, a counter and a log line.

mod census;
mod directory;
mod format;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, HybridCachePolicy, Load,
    PsyncIoEngineConfig, RecoverMode,
};
use futures::FutureExt;
use tokio::time::timeout;

use crate::buffer::Extent;
use crate::buffer::arena::Arena;
use crate::config::DiskConfig;
use crate::error::Error;
use crate::ledger::Ledger;
use crate::memory::AllocatorMemory;
use crate::memory::sum::DISK_INDEX_ENTRY_BYTES;
use crate::object::{ExtentKey, Metadata, ObjectName};
use crate::telemetry::Metrics;
use census::Census;
use directory::Directory;
pub use directory::DirectoryError;
use format::{DECODING, Decoding, Key, Ticket, Value};

/// A page of the device: entries are written at multiples of it.
const PAGE_BYTES: u64 = 4096;

/// foyer's header of an entry, and what the key and the value's own header take: an upper bound for the largest key.
const ENTRY_OVERHEAD_BYTES: u64 = 8 << 10;

/// The index at the start of each blob of a block.
const BLOB_INDEX_BYTES: u64 = 16 << 10;

/// Heap of an open engine that holds nothing, beside its buffers: 0.7 MB measured.
const ENGINE_BYTES: u64 = 1 << 20;

/// Blocks: large ones make few descriptors, small ones lose little when one is reclaimed.
const BLOCK_BYTES_MIN: u64 = 4 << 20;
const BLOCK_BYTES_MAX: u64 = 64 << 20;
const BLOCKS_MIN: u64 = 16; // `disk.capacity` is at least so many of the smallest

/// Extents and metadata on disk.
pub struct Disk {
    entries: HybridCache<Key, Value>,
    /// Held for its lock: a second process is refused.
    _directory: Directory,
    census: Census,
    queued: Arc<AtomicU64>,
    queue_max: u64,
    /// The largest entry that foyer writes; a larger one it would drop without a word.
    entry_max: u64,
    ledger: Arc<Ledger>,
    arena: Arc<Arena>,
    metrics: Arc<Metrics>,
}

/// What is known of an object, and when the store last said it.
#[derive(Clone, Debug)]
pub struct StoredRecord {
    /// What the store said.
    pub metadata: Metadata,
    /// When it last said so, by this machine's clock.
    pub validated_at: SystemTime,
}

/// How full the disk tier is.
#[derive(Clone, Copy, Default, Debug)]
pub struct DiskUsage {
    /// Bytes that it may take.
    pub capacity_bytes: u64,
    /// Entries that it holds, about: those in blocks that have not been reclaimed.
    pub entries: u64,
    /// Bytes that wait to be written.
    pub queued_bytes: u64,
}

impl Disk {
    /// Opens the tier and recovers what it holds.
    pub async fn open(
        config: &DiskConfig,
        ledger: Arc<Ledger>,
        arena: Arc<Arena>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, DirectoryError> {
        let block_bytes = block_bytes(config.capacity);
        let directory = Directory::open(config, block_bytes)?;
        let failed = |error: foyer::Error| DirectoryError::Engine(error.to_string());
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let device =
            FsDeviceBuilder::new(directory.blocks()).with_capacity(size(config.capacity)).build().map_err(failed)?;
        let engine = BlockEngineConfig::new(device)
            .with_block_size(size(block_bytes))
            .with_blob_index_size(size(BLOB_INDEX_BYTES))
            .with_buffer_pool_size(size(config.buffer_bytes))
            // The queue is bounded here, by `queue_max`, where what does not fit is counted.
            .with_submit_queue_size_threshold(usize::MAX);
        let indexed_before = AllocatorMemory::read().allocated_bytes;
        let entries = HybridCacheBuilder::new()
            .with_name("disk")
            .with_policy(HybridCachePolicy::WriteOnInsertion)
            .with_flush_on_close(false)
            // Nothing is kept in this memory tier: entries pass through it on their way to the disk.
            .memory(1)
            .with_shards(1)
            .storage()
            .with_io_engine_config(PsyncIoEngineConfig::new())
            .with_engine_config(engine)
            .with_recover_mode(RecoverMode::Quiet)
            .build()
            .await
            .map_err(failed)?;
        let allocated = AllocatorMemory::read().allocated_bytes.saturating_sub(indexed_before);
        // foyer does not say how many entries it recovered; its index tells by what it takes.
        let index = allocated.saturating_sub(2 * config.buffer_bytes + ENGINE_BYTES);
        let recovered = index / DISK_INDEX_ENTRY_BYTES;
        Ok(Self {
            entries,
            _directory: directory,
            census: Census::new(config.capacity, config.entries_max, recovered),
            queued: Arc::default(),
            queue_max: config.buffer_bytes,
            entry_max: config.buffer_bytes.min(block_bytes - BLOB_INDEX_BYTES),
            ledger,
            arena,
            metrics,
        })
    }

    /// Queues an extent to be written; what cannot be is counted with its reason.
    pub fn write(&self, key: &ExtentKey, extent: &Extent) {
        let bytes = extent.len() as u64;
        let Some(ticket) = self.ticket(bytes) else { return };
        extent.charge().queued();
        let ticket = ticket.of(extent.clone());
        self.insert(Key::Extent(key.clone()), Value::Extent(ticket));
    }

    /// Queues what is known of an object to be written.
    pub fn write_record(&self, record: StoredRecord) {
        let Some(ticket) = self.ticket(PAGE_BYTES) else { return };
        let name = record.metadata.id.name().clone();
        self.insert(Key::Record(name), Value::Record { record: Box::new(record), _ticket: Some(ticket) });
    }

    /// Whether the extent may be on disk: a `no` is sure.
    pub fn may_hold(&self, key: &ExtentKey) -> bool {
        self.entries.storage().may_contains(&Key::Extent(key.clone()))
    }

    /// Reads an extent, if it is there and whole.
    ///
    /// The grant for it is taken before anything is read: the buffer that is read into, and the extent decoded from it.
    pub async fn load(&self, key: &ExtentKey) -> Result<Option<Extent>, Error> {
        let length = key.range().len();
        let grant = self.ledger.grant(self.read_bytes(length)).await?;
        let decoding = Decoding::extent(Arc::clone(&self.arena), grant, length);
        let key = Key::Extent(key.clone());
        let loaded = contained(DECODING.scope(decoding, self.entries.storage().load(&key))).await;
        Ok(match self.checked(loaded) {
            Some(Load::Entry { value: Value::Extent(ticket), .. }) => Some(ticket.extent().clone()),
            Some(Load::Piece { piece, .. }) => match piece.value() {
                Value::Extent(ticket) => Some(ticket.extent().clone()),
                Value::Record { .. } => None,
            },
            _ => None,
        })
    }

    /// Reads what is known of an object, if it is there.
    pub async fn load_record(&self, name: &ObjectName) -> Option<StoredRecord> {
        let key = Key::Record(name.clone());
        if !self.entries.storage().may_contains(&key) {
            return None;
        }
        let loaded = contained(DECODING.scope(Decoding::record(), self.entries.storage().load(&key))).await;
        match self.checked(loaded)? {
            Load::Entry { value: Value::Record { record, .. }, .. } => Some(*record),
            Load::Piece { piece, .. } => match piece.value() {
                Value::Record { record, .. } => Some(record.as_ref().clone()),
                Value::Extent(_) => None,
            },
            _ => None,
        }
    }

    /// Forgets what is known of an object. A restart may bring it back, within its freshness.
    pub fn forget_record(&self, name: &ObjectName) {
        let forget = || self.entries.storage().delete(&Key::Record(name.clone()));
        if std::panic::catch_unwind(AssertUnwindSafe(forget)).is_err() {
            self.metrics.not_stored("disk fault");
        }
    }

    /// Waits until all that was queued is written, at most for `patience`.
    pub async fn flush(&self, patience: Duration) {
        if timeout(patience, self.entries.close()).await.is_err() {
            tracing::warn!(bytes = self.queued.load(Ordering::Relaxed), "not all of the disk queue was written");
        }
    }

    /// How full it is.
    pub fn usage(&self) -> DiskUsage {
        DiskUsage {
            capacity_bytes: self.census.capacity(),
            entries: self.census.entries(),
            queued_bytes: self.queued.load(Ordering::Relaxed),
        }
    }

    fn insert(&self, key: Key, value: Value) {
        let insert = || drop(self.entries.storage_writer(key).force().insert(value));
        if std::panic::catch_unwind(AssertUnwindSafe(insert)).is_err() {
            self.metrics.not_stored("disk fault");
        }
    }

    /// A place in the queue, unless it or the index is full.
    fn ticket(&self, bytes: u64) -> Option<Ticket> {
        if aligned(bytes) > self.entry_max {
            self.metrics.not_stored("too large");
            return None;
        }
        let Some(ticket) = Ticket::take(&self.queued, bytes, self.queue_max) else {
            self.metrics.not_stored("queue full");
            return None;
        };
        if !self.census.admit(aligned(bytes)) {
            self.metrics.not_stored("index full");
            return None;
        }
        Some(ticket)
    }

    /// What reading an extent of `length` bytes holds at most.
    fn read_bytes(&self, length: u64) -> u64 {
        self.arena.weight_of(length).saturating_add(aligned(length))
    }

    fn checked<T>(&self, loaded: foyer::Result<T>) -> Option<T> {
        loaded
            .inspect_err(|error| {
                self.metrics.not_stored("disk fault");
                tracing::debug!(%error, "an entry could not be read from disk");
            })
            .ok()
    }
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Disk").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

/// A panic of the disk engine is a failed read like any other: the engine's locks may be poisoned, the process is not.
async fn contained<T>(work: impl Future<Output = foyer::Result<T>>) -> foyer::Result<T> {
    let panicked = |_| Err(foyer::Error::new(foyer::ErrorKind::External, "the disk engine panicked"));
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(panicked)
}

/// What an entry of `bytes` takes on the device.
fn aligned(bytes: u64) -> u64 {
    bytes.saturating_add(ENTRY_OVERHEAD_BYTES).next_multiple_of(PAGE_BYTES)
}

fn block_bytes(capacity: u64) -> u64 {
    let pages = (capacity / (8 * BLOCKS_MIN)).next_power_of_two();
    pages.clamp(BLOCK_BYTES_MIN, BLOCK_BYTES_MAX)
}
