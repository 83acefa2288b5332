//! The cache: extents and objects' metadata in memory, each entry weighed as the allocator weighs it.

use std::sync::Arc;

use foyer::{CacheBuilder, Event, EventListener, S3FifoConfig};
use tokio::time::Instant;

use crate::buffer::Extent;
use crate::memory::sum::{Budget, CACHE_SHARDS};
use crate::object::{ExtentKey, Metadata, ObjectId, ObjectName};
use crate::telemetry::Metrics;

/// foyer's own heap for one entry: the record, its place in the hash table and in the eviction queue (140 measured;
/// hash tables are up to half empty after they grow).
const ENTRY_BYTES: usize = 200;

/// Whole extents and what is known of objects.
pub struct Cache {
    extents: foyer::Cache<ExtentKey, Resident>,
    records: foyer::Cache<ObjectName, Record>,
    metrics: Arc<Metrics>,
    extent_heap_max: usize,
}

/// What is known of an object, and since when.
#[derive(Clone, Debug)]
pub struct Record {
    /// What the store said.
    pub metadata: Arc<Metadata>,
    /// When it last said so.
    pub validated_at: Instant,
}

/// How full the memory tier is, in bytes.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct CacheUsage {
    /// Weight that it may hold.
    pub capacity_bytes: u64,
    /// Weight that it holds.
    pub usage_bytes: u64,
    /// Extents that it holds.
    pub entries: u64,
    /// Weight of the metadata records.
    pub metadata_bytes: u64,
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
    /// An empty cache of the size that the budget gives it.
    pub fn new(budget: &Budget, metrics: Arc<Metrics>) -> Self {
        let shards = usize::try_from(CACHE_SHARDS).unwrap_or(1);
        let capacity = usize::try_from(budget.sum.cache_bytes).unwrap_or(usize::MAX);
        let extents = CacheBuilder::new(capacity)
            .with_name("extents")
            .with_shards(shards)
            .with_eviction_config(S3FifoConfig::default())
            .with_weighter(|_: &ExtentKey, resident: &Resident| entry_weight(&resident.0))
            .with_event_listener(Arc::new(Departures(Arc::clone(&metrics))))
            .build();
        let records = CacheBuilder::new(usize::try_from(budget.sum.metadata_bytes).unwrap_or(usize::MAX))
            .with_name("metadata")
            .with_shards(shards)
            .with_eviction_config(S3FifoConfig::default())
            .with_weighter(|name: &ObjectName, record: &Record| {
                ENTRY_BYTES + size_of::<ObjectName>() + name.key.as_str().len() + record.metadata.heap_bytes()
            })
            .build();
        // A value heavier than its shard is admitted by foyer all the same.
        Self { extents, records, metrics, extent_heap_max: capacity / shards / 2 }
    }

    /// The extent, if it is in memory.
    pub fn get(&self, key: &ExtentKey) -> Option<Extent> {
        self.extents.get(key).map(|entry| entry.value().0.clone())
    }

    /// Whether the extent is in memory; asking does not count as a use of it.
    pub fn contains(&self, key: &ExtentKey) -> bool {
        self.extents.contains(key)
    }

    /// Keeps an extent, unless it is too large for this cache: then it stays with those who wait for it.
    pub fn insert(&self, key: ExtentKey, extent: Extent) {
        if entry_weight(&extent) > self.extent_heap_max {
            extent.charge().pinned();
            self.metrics.not_stored("too large");
            return;
        }
        drop(self.extents.insert(key, Resident::new(extent)));
    }

    /// What is known of an object.
    pub fn record(&self, name: &ObjectName) -> Option<Record> {
        self.records.get(name).map(|entry| entry.value().clone())
    }

    /// Remembers what a store said of an object, all of it together.
    pub fn remember(&self, metadata: Arc<Metadata>) {
        let name = metadata.id.name().clone();
        drop(self.records.insert(name, Record { metadata, validated_at: Instant::now() }));
    }

    /// Forgets what is known of an object, if it is still that version. Its extents cannot be reached without.
    pub fn forget(&self, id: &ObjectId) {
        if self.record(id.name()).is_some_and(|record| *record.metadata.id == *id) {
            drop(self.records.remove(id.name()));
        }
    }

    /// How full it is.
    pub fn usage(&self) -> CacheUsage {
        CacheUsage {
            capacity_bytes: self.extents.capacity() as u64,
            usage_bytes: self.extents.usage() as u64,
            entries: self.extents.entries() as u64,
            metadata_bytes: self.records.usage() as u64,
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

/// Counts extents that leave the cache.
struct Departures(Arc<Metrics>);

impl EventListener for Departures {
    type Key = ExtentKey;
    type Value = Resident;

    fn on_leave(&self, reason: Event, _: &ExtentKey, _: &Resident) {
        self.0.evicted(match reason {
            Event::Evict => "capacity",
            Event::Replace => "replaced",
            Event::Remove => "removed",
            Event::Clear => "cleared",
        });
    }
}
