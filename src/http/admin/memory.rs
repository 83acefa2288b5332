//! `/debug/memory`: where memory is, and what cannot be named.

use serde::Serialize;

use super::AdminApi;
use crate::cache::CacheUsage;
use crate::config::LimitSource;
use crate::governor::MemoryState;
use crate::ledger::Held;
use crate::memory::sum::{CLIENT_HEAP_BYTES, DISK_INDEX_ENTRY_HEAP_BYTES, Sum, UPSTREAM_HEAP_BYTES};
use crate::memory::{AllocatorMemory, Cgroup, CgroupMemory, ProcessMemory};

/// Where memory is; bytes throughout.
#[derive(Debug, Serialize)]
pub(super) struct MemoryDocument {
    limit_bytes: u64,
    limit_source: LimitSource,
    state: MemoryState,
    pub(super) process: ProcessMemory,
    cgroup: Option<CgroupMemory>,
    allocator: AllocatorMemory,
    buffers: Buffers,
    cache: CacheUsage,
    sum: Sum,
    /// What a cgroup has to allow beside the limit.
    kernel_reserve_bytes: u64,
    gaps: Gaps,
    /// What the server can name of what is allocated; together `accounted_bytes`.
    accounted: Accounted,
    accounted_bytes: u64,
    accounted_ratio: Option<f64>,
}

/// What no heap profile shows: each is the difference of two of the numbers above, so that growth without an allocation
/// has a name.
#[derive(Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the contract's, and say their unit")]
struct Gaps {
    /// Allocated and not accounted for: what the server cannot name.
    unnamed_bytes: u64,
    /// Active and not allocated: room in pages that hold live allocations.
    fragmentation_bytes: u64,
    /// Resident as the allocator believes, and neither active nor its own structures: free pages not given back yet.
    free_pages_bytes: u64,
    /// Resident and not the allocator's: program, stacks, what others mapped.
    outside_allocator_bytes: u64,
    /// Resident and shared with other processes.
    shared_bytes: u64,
    /// What fills may not use because more has landed than there is room for.
    withheld_bytes: u64,
}

impl Gaps {
    const fn between(process: ProcessMemory, allocator: AllocatorMemory, accounted: u64, withheld_bytes: u64) -> Self {
        let in_use = allocator.active_bytes.saturating_add(allocator.metadata_bytes);
        Self {
            unnamed_bytes: allocator.allocated_bytes.saturating_sub(accounted),
            fragmentation_bytes: allocator.active_bytes.saturating_sub(allocator.allocated_bytes),
            free_pages_bytes: allocator.resident_bytes.saturating_sub(in_use),
            outside_allocator_bytes: process.rss_bytes.saturating_sub(allocator.resident_bytes),
            shared_bytes: process.rss_bytes.saturating_sub(process.uss_bytes),
            withheld_bytes,
        }
    }
}

#[derive(Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the contract's, and say their unit")]
struct Buffers {
    live_bytes: u64,
    cached_bytes: u64,
    filling_bytes: u64,
    pinned_bytes: u64,
    disk_queue_bytes: u64,
}

impl From<Held> for Buffers {
    fn from(held: Held) -> Self {
        Self {
            live_bytes: held.live(),
            cached_bytes: held.cached,
            filling_bytes: held.filling,
            pinned_bytes: held.pinned,
            disk_queue_bytes: held.disk_queue,
        }
    }
}

/// Heap bytes by what they are for: payload as it is charged, the rest by count and measured size.
#[derive(Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the contract's, and say their unit")]
struct Accounted {
    /// Allocated when the server was built and idle.
    baseline_bytes: u64,
    /// Extents in memory, with what it costs to keep them.
    cache_bytes: u64,
    /// Records of objects' metadata, likewise.
    metadata_bytes: u64,
    /// Payload that is not the cache's.
    buffers_bytes: u64,
    /// Client connections that are open.
    connections_bytes: u64,
    /// Connections to stores that are open.
    upstream_bytes: u64,
    /// The disk tier's index.
    disk_index_bytes: u64,
}

impl Accounted {
    fn of(api: &AdminApi, cache: &CacheUsage, held: Held) -> Self {
        let connections = (api.config.server.connections_max.saturating_sub(api.places.available_permits())) as u64;
        let upstream = api.data.reader.stores().connections().open();
        Self {
            baseline_bytes: api.baseline_bytes,
            cache_bytes: cache.heap_bytes,
            metadata_bytes: cache.metadata_heap_bytes,
            buffers_bytes: held.live().saturating_sub(held.cached),
            connections_bytes: connections.saturating_mul(CLIENT_HEAP_BYTES),
            upstream_bytes: upstream.saturating_mul(UPSTREAM_HEAP_BYTES),
            disk_index_bytes: cache.disk_entries.saturating_mul(DISK_INDEX_ENTRY_HEAP_BYTES),
        }
    }

    fn total(&self) -> u64 {
        let terms = [
            self.baseline_bytes,
            self.cache_bytes,
            self.metadata_bytes,
            self.buffers_bytes,
            self.connections_bytes,
            self.upstream_bytes,
            self.disk_index_bytes,
        ];
        terms.into_iter().fold(0, u64::saturating_add)
    }
}

impl MemoryDocument {
    pub(super) fn of(api: &AdminApi) -> Self {
        let (allocator, held, cache) = (AllocatorMemory::read(), api.ledger.held(), api.cache.usage());
        let accounted = Accounted::of(api, &cache, held);
        let accounted_bytes = accounted.total();
        let (memory, process) = (&api.config.memory, ProcessMemory::read());
        Self {
            limit_bytes: memory.limit,
            limit_source: memory.limit_source,
            state: api.governor.state(),
            process,
            cgroup: Cgroup::find().map(|cgroup| cgroup.read()),
            allocator,
            buffers: held.into(),
            cache,
            sum: memory.budget.sum,
            kernel_reserve_bytes: memory.budget.kernel_bytes,
            gaps: Gaps::between(process, allocator, accounted_bytes, api.ledger.withheld()),
            accounted,
            accounted_bytes,
            accounted_ratio: ratio(allocator.allocated_bytes, accounted_bytes),
        }
    }
}

/// `a / b` to four places; `None` where there is no ratio.
fn ratio(a: u64, b: u64) -> Option<f64> {
    let ten_thousandths = u128::from(a) * 10_000 / u128::from(b.max(1));
    u32::try_from(ten_thousandths).ok().map(|n| f64::from(n) / 10_000.0)
}
