//! The cache: extents and objects' metadata in memory, each entry weighed as the allocator weighs it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use foyer::{CacheBuilder, Event, EventListener, S3FifoConfig};
use tokio::time::Instant;

use crate::buffer::Extent;
use crate::disk::{Disk, StoredRecord};
use crate::error::Error;
use crate::memory::sum::{Budget, CACHE_SHARDS};
use crate::object::{ExtentKey, Metadata, ObjectId, ObjectName};
use crate::purge::Purges;
use crate::telemetry::Metrics;

/// foyer's own heap for one entry, at most: its record, and its places in the index at their largest. What it is at the
/// moment [`foyer_heap_bytes`] tells.
const ENTRY_BYTES: usize = RECORD_BYTES + 2 * BUCKET_BYTES_MAX + GHOST_BYTES_MAX + 8;

/// foyer's record of an entry beside its key, in the allocator's size class of 112 bytes.
const RECORD_BYTES: usize = 88;

/// A bucket of a hash table of words; tables grow by doubling when they are seven eighths full.
const BUCKET_BYTES: usize = 9;
const BUCKET_BYTES_MAX: usize = BUCKET_BYTES * 2 * 8 / 7 + 1;

/// What the eviction remembers of an entry that has gone: a bucket, and this in a queue that grows by doubling.
const GHOST_BYTES: usize = 16;
const GHOST_BYTES_MAX: usize = 2 * GHOST_BYTES;

/// A record that says nothing new is written to disk again only when the one there is so old: an object that is opened by
/// many reads at once is one record.
const RECORD_REWRITE_AGE: Duration = Duration::from_secs(1);

/// Whole extents and what is known of objects.
pub struct Cache {
    extents: foyer::Cache<ExtentKey, Resident>,
    records: foyer::Cache<ObjectName, Record>,
    disk: Option<Disk>,
    purges: Purges,
    metrics: Arc<Metrics>,
    extent_heap_max: usize,
    /// What the memory tier may weigh now: foyer goes on telling what it was built with.
    capacity: AtomicU64,
    /// The most entries seen: tables do not shrink.
    entries_peak: AtomicU64,
    /// Extents that were evicted.
    evicted: Arc<AtomicU64>,
}

/// What is known of an object, and since when.
#[derive(Clone, Debug)]
pub struct Record {
    /// What the store said.
    pub metadata: Arc<Metadata>,
    /// When it was asked; what it answers is at least as young.
    pub validated_at: Instant,
    /// It has been seen since that this is not so any more.
    pub disproved: bool,
}

impl Record {
    /// Whether the disk should have the new one: it is another version, or this one was validated a while ago.
    fn is_outdated_by(&self, new: &Self) -> bool {
        let age = new.validated_at.saturating_duration_since(self.validated_at);
        !self.metadata.says_the_same(&new.metadata) || age >= RECORD_REWRITE_AGE
    }
}

/// How full the cache is.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct CacheUsage {
    /// Weight that it may hold.
    pub capacity_bytes: u64,
    /// Weight that it holds.
    pub usage_bytes: u64,
    /// Extents that it holds.
    pub entries: u64,
    /// What they take on the heap, with all that it costs to keep them: at most their weight.
    pub heap_bytes: u64,
    /// Weight of the metadata records.
    pub metadata_bytes: u64,
    /// What they take on the heap.
    pub metadata_heap_bytes: u64,
    /// Bytes that the disk tier may take.
    pub disk_capacity_bytes: u64,
    /// Entries that it holds, about.
    pub disk_entries: u64,
}

/// An extent while the cache holds it. When the cache lets go, what is left of its bytes is held by responses alone.
struct Resident(Extent);

impl Resident {
    fn new(extent: Extent) -> Self {
        extent.charge().cached();
        Self(extent)
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.0.charge().pinned();
    }
}

impl Cache {
    /// An empty memory tier of the size that the budget gives it, before a disk tier if there is one. One that does not weigh
    /// takes extents at their length, to measure by.
    pub fn new(budget: &Budget, weighs: bool, disk: Option<Disk>, purges: Purges, metrics: Arc<Metrics>) -> Self {
        let shards = usize::try_from(CACHE_SHARDS).unwrap_or(1);
        let capacity = usize::try_from(budget.sum.cache_bytes).unwrap_or(usize::MAX);
        let evicted = Arc::new(AtomicU64::new(0));
        let extents = CacheBuilder::new(capacity)
            .with_name("extents")
            .with_shards(shards)
            .with_eviction_config(S3FifoConfig::default())
            .with_weighter(move |key: &ExtentKey, resident: &Resident| {
                if weighs { entry_weight(&resident.0) + key.object().weight_once() } else { resident.0.len() }
            })
            .with_event_listener(Arc::new(Departures { metrics: Arc::clone(&metrics), evicted: Arc::clone(&evicted) }))
            .build();
        let records = CacheBuilder::new(usize::try_from(budget.sum.metadata_bytes).unwrap_or(usize::MAX))
            .with_name("metadata")
            .with_shards(shards)
            .with_eviction_config(S3FifoConfig::default())
            .with_weighter(|name: &ObjectName, record: &Record| {
                ENTRY_BYTES + size_of::<ObjectName>() + name.key.as_str().len() + record.metadata.heap_bytes()
            })
            .build();
        // A value heavier than its shard is admitted by foyer all the same. The configuration keeps extents to an eighth of
        // a shard; this is the last line, should anything else come here.
        let extent_heap_max = capacity / shards / 2;
        let capacity = AtomicU64::new(budget.sum.cache_bytes);
        let entries_peak = AtomicU64::new(0);
        Self { extents, records, disk, purges, metrics, extent_heap_max, capacity, entries_peak, evicted }
    }

    /// The extent, if it is in memory.
    pub fn get(&self, key: &ExtentKey) -> Option<Extent> {
        self.extents.get(key).map(|entry| entry.value().0.clone())
    }

    /// Whether the extent is in memory; asking does not count as a use of it.
    pub fn contains(&self, key: &ExtentKey) -> bool {
        self.extents.contains(key)
    }

    /// Keeps an extent, in memory and on disk.
    pub fn insert(&self, key: ExtentKey, extent: Extent) {
        if let Some(disk) = &self.disk {
            disk.write(&key, &extent);
        }
        self.insert_in_memory(key, extent);
    }

    /// Whether the extent may be on disk: a `no` is sure.
    pub fn may_be_on_disk(&self, key: &ExtentKey) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.may_hold(key))
    }

    /// Reads an extent from disk into memory, if it is there and whole.
    pub async fn load(&self, key: &ExtentKey) -> Result<Option<Extent>, Error> {
        let Some(disk) = &self.disk else { return Ok(None) };
        let extent = disk.load(key).await?;
        if let Some(extent) = &extent {
            self.insert_in_memory(key.clone(), extent.clone());
        }
        Ok(extent)
    }

    /// An extent that is too large for this cache stays with those who wait for it.
    fn insert_in_memory(&self, key: ExtentKey, extent: Extent) {
        if entry_weight(&extent) > self.extent_heap_max {
            extent.charge().pinned();
            self.metrics.not_stored("too large");
            return;
        }
        drop(self.extents.insert(key, Resident::new(extent)));
    }

    /// What is known of an object, in the epoch that it is in now.
    pub fn record(&self, name: &ObjectName) -> Option<Record> {
        let record = self.records.get(name).map(|entry| entry.value().clone())?;
        Some(record).filter(|record| record.metadata.id.epoch() == self.purges.epoch_of(name))
    }

    /// The epoch that an object is in now.
    pub fn epoch_of(&self, name: &ObjectName) -> u64 {
        self.purges.epoch_of(name)
    }

    /// Forgets an object and all its extents, in memory and on disk; whether it was known.
    ///
    /// It has taken effect on disk too when this returns: what is there belongs to an epoch that is over.
    pub async fn purge(&self, name: &ObjectName) -> std::io::Result<bool> {
        let known = self.record(name).is_some() || self.recall(name).await.is_some();
        self.purges.purge(name)?;
        drop(self.records.remove(name));
        self.extents.flush_if(|key, _| key.object().name() == name).await;
        Ok(known)
    }

    /// Remembers what a store said of an object, all of it together, in memory and on disk.
    ///
    /// An answer to a question that was asked before the one that is remembered comes too late.
    pub fn remember(&self, metadata: Arc<Metadata>, asked_at: Instant) {
        let record = Record { metadata, validated_at: asked_at, disproved: false };
        let name = record.metadata.id.name().clone();
        let before = self.records.get(&name);
        if before.as_ref().is_some_and(|before| before.value().validated_at > asked_at) {
            return;
        }
        if let Some(disk) = &self.disk
            && before.is_none_or(|before| before.value().is_outdated_by(&record))
        {
            let metadata = record.metadata.as_ref().clone();
            disk.write_record(StoredRecord { metadata, validated_at: SystemTime::now() });
        }
        drop(self.records.insert(name, record));
    }

    /// Reads what is known of an object from disk into memory, if it is there.
    pub async fn recall(&self, name: &ObjectName) -> Option<Record> {
        let stored = self.disk.as_ref()?.load_record(name).await?;
        // A record from the future was written by a clock that was wrong: nothing can be said about its age.
        let age = SystemTime::now().duration_since(stored.validated_at).ok()?;
        if stored.metadata.id.epoch() != self.purges.epoch_of(name) {
            return None;
        }
        let validated_at = Instant::now().checked_sub(age)?;
        let record = Record { metadata: Arc::new(stored.metadata), validated_at, disproved: false };
        drop(self.records.insert(name.clone(), record.clone()));
        Some(record)
    }

    /// Waits until what is to be written to disk is written, at most for `patience`.
    pub async fn flush(&self, patience: Duration) {
        if let Some(disk) = &self.disk {
            disk.flush(patience).await;
        }
    }

    /// What is known of an object was seen not to be so any more, if it is still that version: the store is asked before
    /// it is used again, and the disk does not bring it back.
    pub fn disprove(&self, id: &ObjectId) {
        let Some(record) = self.record(id.name()).filter(|record| *record.metadata.id == *id) else { return };
        if let Some(disk) = &self.disk {
            disk.forget_record(id.name());
        }
        let disproved = Record { validated_at: Instant::now(), disproved: true, ..record };
        drop(self.records.insert(id.name().clone(), disproved));
    }

    /// Makes the memory tier hold no more than so many bytes. It starts threads and waits for them: not for async workers.
    pub fn resize(&self, capacity: u64) {
        self.capacity.store(capacity, Ordering::Relaxed);
        if let Err(error) = self.extents.resize(usize::try_from(capacity).unwrap_or(usize::MAX)) {
            tracing::error!(%error, capacity, "the memory tier cannot be resized");
        }
    }

    /// What the memory tier may weigh now.
    pub fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// How full it is.
    pub fn usage(&self) -> CacheUsage {
        let disk = self.disk.as_ref().map(Disk::usage).unwrap_or_default();
        let (entries, usage_bytes) = (self.extents.entries() as u64, self.extents.usage() as u64);
        let (records, metadata_bytes) = (self.records.entries() as u64, self.records.usage() as u64);
        let peak = self.entries_peak.fetch_max(entries, Ordering::Relaxed).max(entries);
        let ghosts = self.evicted.load(Ordering::Relaxed).min(peak);
        CacheUsage {
            capacity_bytes: self.capacity(),
            usage_bytes,
            entries,
            heap_bytes: usage_bytes.saturating_sub(entries * ENTRY_BYTES as u64)
                + foyer_heap_bytes(entries, peak, ghosts),
            metadata_bytes,
            metadata_heap_bytes: metadata_bytes.saturating_sub(records * ENTRY_BYTES as u64)
                + foyer_heap_bytes(records, records, 0),
            disk_capacity_bytes: disk.capacity_bytes,
            disk_entries: disk.entries,
        }
    }
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

fn entry_weight(extent: &Extent) -> usize {
    extent.heap_bytes() + size_of::<ExtentKey>() + ENTRY_BYTES
}

/// foyer's own heap for so many entries, of once `peak`, with so many ghosts: records, the hash tables of entries and of
/// ghosts, and the queue of ghosts.
fn foyer_heap_bytes(entries: u64, peak: u64, ghosts: u64) -> u64 {
    let table = |entries: u64| match entries.div_ceil(CACHE_SHARDS) {
        0 => 0,
        entries => (entries * 8 / 7).next_power_of_two() * CACHE_SHARDS,
    };
    let queue = ghosts.div_ceil(CACHE_SHARDS).next_power_of_two() * CACHE_SHARDS;
    let queue = if ghosts == 0 { 0 } else { queue };
    entries * RECORD_BYTES as u64 + (table(peak) + table(ghosts)) * BUCKET_BYTES as u64 + queue * GHOST_BYTES as u64
}

/// Counts extents that leave the cache.
struct Departures {
    metrics: Arc<Metrics>,
    evicted: Arc<AtomicU64>,
}

impl EventListener for Departures {
    type Key = ExtentKey;
    type Value = Resident;

    fn on_leave(&self, reason: Event, _: &ExtentKey, _: &Resident) {
        if reason == Event::Evict {
            self.evicted.fetch_add(1, Ordering::Relaxed);
        }
        self.metrics.evicted(match reason {
            Event::Evict => "capacity",
            Event::Replace => "replaced",
            Event::Remove => "removed",
            Event::Clear => "cleared",
        });
    }
}
