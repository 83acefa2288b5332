//! The sum: what one memory limit is divided into, computed at start and printed.

use std::fmt;
use std::num::NonZeroU64;

use bytesize::ByteSize;
use serde::Serialize;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Resident when idle: program text and data, runtime, allocator structures, profiler. Measured 13 MiB idle and 18 MiB
/// after a first request of every kind, on x86-64.
const BASELINE_BYTES: u64 = 20 * MIB;

/// Touched stack of a thread: tokio's workers use under 64 KiB in the profile of a busy server.
const STACK_BYTES: u64 = 64 * KIB;

/// A client connection beside its read buffer, which grows to `server.header_bytes_max`: its task, hyper's state, the
/// queue of what is to be written, and one request. Measured 12 to 14 KiB over 600 connections.
const CONNECTION_BYTES: u64 = 14 * KIB;

/// Connections that there should be room for, if they take no more than a twelfth of the limit.
const CONNECTIONS: u64 = 1024;

/// Requests to stores that there should be room for, if their buffers take no more than a thirty-second of the limit.
const CONCURRENCY: u64 = 64;

/// A connection to a store: hyper's read buffer of 64 KiB, twice while a fill waits for its memory, and TLS.
const UPSTREAM_BYTES: u64 = 192 * KIB;

/// What an open connection of a client, and one to a store, take on the heap as a rule (measured).
pub const CLIENT_HEAP_BYTES: u64 = 18 * KIB;
/// See [`CLIENT_HEAP_BYTES`].
pub const UPSTREAM_HEAP_BYTES: u64 = 72 * KIB;

/// The smallest cache that is worth serving from.
const CACHE_BYTES_MIN: u64 = 16 * MIB;

/// The largest extent when nothing is said: one buffer of it is far below a shard even of a small cache.
const EXTENT_BYTES_MAX: u64 = MIB;

/// The smallest derived extent: below it the price per request outweighs the memory saved.
const EXTENT_BYTES_MIN: u64 = 64 * KIB;

/// The kernel's memory for this process that a cgroup counts beside its resident memory: slab and the binary's pages,
/// page tables (8 B for each 4 KiB) and what else grows with memory, and a socket's buffers while its client reads.
const KERNEL_BYTES: u64 = 16 * MIB;
const KERNEL_SHARE: u64 = 64;
const SOCKET_BYTES: u64 = 32 * KIB;

/// Extents of the longest run: each is a flight, and they begin under one lock.
const RUN_EXTENTS_MAX: u64 = 256;

/// Extents of the largest size that the cache must have room for: eight a shard, because foyer admits a value that is
/// heavier than its shard all the same.
const EXTENTS_MIN: u64 = 8 * CACHE_SHARDS;

/// Shards of the cache: 8 fill to 0.99 of its capacity, 64 to 0.92 (measured), and 8 locks are enough for 2 to 16 cores.
pub const CACHE_SHARDS: u64 = 8;

/// Pages are given back each time this share of the payload limit was freed (1 %), at most [`PURGE_BYTES_MAX`].
const PURGE_SHARE: u64 = 96;
const PURGE_BYTES_MAX: u64 = 64 * MIB;

/// Memory of the disk tier's index for one entry: foyer's takes 60 to 65 B at 200,000 entries, and 115 B at 50,000, when
/// its tables have just grown (measured).
pub const DISK_INDEX_ENTRY_BYTES: u64 = 115;

/// The same as a rule.
pub const DISK_INDEX_ENTRY_HEAP_BYTES: u64 = 64;

/// Connections of the admin API.
pub const ADMIN_CONNECTIONS_MAX: u64 = 64;

/// The disk tier's buffers: the flusher writes one while it fills the other, and a queue of the same size waits.
const DISK_BUFFERS: u64 = 3;

/// What the sum is made from; all but the limit may be configured, and what is `None` is derived.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The limit for the whole process, in bytes.
    pub limit: u64,
    /// Threads that run at the same time.
    pub threads: u64,
    /// Client connections.
    pub connections_max: Option<u64>,
    /// Longest request head, in bytes.
    pub header_bytes_max: u64,
    /// Requests to stores under way at once.
    pub upstream_concurrency: Option<u64>,
    /// Bytes that fills may hold at once.
    pub in_flight: Option<u64>,
    /// Longest extent, that is the most one fill holds.
    pub extent_max: Option<NonZeroU64>,
    /// Longest run.
    pub run_max: Option<NonZeroU64>,
    /// Whether there is a disk tier.
    pub disk: bool,
    /// Entries of the disk tier.
    pub disk_entries_max: Option<u64>,
}

/// The terms, in bytes; together they are the limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Sum {
    /// Resident when idle.
    pub baseline_bytes: u64,
    /// Stacks of threads.
    pub stacks_bytes: u64,
    /// Client connections, all of them open.
    pub connections_bytes: u64,
    /// Connections to stores, all of them busy.
    pub upstream_bytes: u64,
    /// Records of objects' metadata.
    pub metadata_bytes: u64,
    /// The disk tier's buffers and queue.
    pub disk_buffers_bytes: u64,
    /// The disk tier's index, full.
    pub disk_index_bytes: u64,
    /// The share of payload that fills may use at once.
    pub in_flight_bytes: u64,
    /// The memory tier's capacity.
    pub cache_bytes: u64,
    /// Free pages not yet given back, and the allocator's rounding and fragmentation.
    pub slack_bytes: u64,
}

/// A sum, and the limits that were derived with it.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// The terms.
    pub sum: Sum,
    /// What a cgroup has to allow beside the limit, in bytes.
    pub kernel_bytes: u64,
    /// Client connections.
    pub connections_max: u64,
    /// Requests to stores under way at once.
    pub upstream_concurrency: u64,
    /// Longest extent, in bytes.
    pub extent_max: NonZeroU64,
    /// Longest run, in bytes; a multiple of the extent.
    pub run_max: NonZeroU64,
    /// Bytes freed after which the arena is purged.
    pub purge_every: u64,
    /// Bytes of each of the disk tier's buffers.
    pub disk_buffer_bytes: u64,
    /// Entries of the disk tier.
    pub disk_entries_max: u64,
}

/// Why a limit cannot be divided.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Indivisible {
    /// The terms leave too little for the cache.
    #[error(
        "{limit} bytes are too few: {sum} leaves too little for a cache ({CACHE_BYTES_MIN} bytes at least): \
         raise the limit by {short} bytes, or lower {largest}"
    )]
    TooSmall {
        /// The limit, in bytes.
        limit: u64,
        /// The terms without the cache.
        sum: Box<Sum>,
        /// Bytes that are missing.
        short: u64,
        /// The key behind the largest term that can be configured.
        largest: &'static str,
    },
    /// The in-flight share does not hold the extents it has to.
    #[error(
        "memory.in_flight is {in_flight_bytes} bytes, and extents of {extent_max} need {in_flight_min}: raise it, or lower fetch.extent_max"
    )]
    ShareTooSmall {
        /// Longest extent.
        extent_max: NonZeroU64,
        /// The share.
        in_flight_bytes: u64,
        /// What it has to be.
        in_flight_min: u64,
    },
    /// Extents are so long that the cache could not keep them.
    #[error(
        "extents of {extent_max} bytes are too long: {sum}; a cache of {} bytes keeps at most {} bytes in one",
        sum.cache_bytes,
        sum.cache_bytes / EXTENTS_MIN
    )]
    ExtentTooLong {
        /// What was configured, in bytes.
        extent_max: NonZeroU64,
        /// The terms.
        sum: Box<Sum>,
    },
}

impl Plan {
    /// Divides the limit.
    pub fn divide(self) -> Result<Budget, Indivisible> {
        let limit = self.limit;
        let (connection_bytes, connections_max) = (self.connection_bytes(), self.connections());
        let concurrency = (limit / 32 / UPSTREAM_BYTES).min(CONCURRENCY).max(limit / 64 / UPSTREAM_BYTES);
        let upstream_concurrency = self.upstream_concurrency.unwrap_or(concurrency.clamp(16, 256));
        let derived_extent = EXTENT_BYTES_MAX.min(previous_power_of_two(limit / 8 / EXTENTS_MIN));
        let extent_max = self.extent_max.unwrap_or(nonzero(derived_extent.max(EXTENT_BYTES_MIN)));
        let run_max = self.run_max.map_or(8 * extent_max.get(), |run| run.get().max(extent_max.get()));
        let run_max = nonzero((run_max - run_max % extent_max.get()).min(RUN_EXTENTS_MAX * extent_max.get()));
        // A fill holds one extent; a read from disk two and a little. An eighth is the reserve.
        let in_flight_min = 4 * extent_max.get();
        let derived_in_flight = (limit / 32).max((limit / 16).min(32 * MIB)).min(1 << 30).max(8 * extent_max.get());
        let in_flight_bytes = self.in_flight.unwrap_or(derived_in_flight);
        if in_flight_bytes < in_flight_min {
            return Err(Indivisible::ShareTooSmall { extent_max, in_flight_bytes, in_flight_min });
        }

        let (disk_buffer_bytes, disk_entries_max) = if self.disk {
            let buffer = (limit / 128).clamp(2 * MIB, 16 * MIB).max(2 * extent_max.get()).next_multiple_of(MIB);
            (buffer, self.disk_entries_max.unwrap_or(limit / 48 / DISK_INDEX_ENTRY_BYTES))
        } else {
            (0, 0)
        };
        let mut sum = Sum {
            baseline_bytes: BASELINE_BYTES,
            stacks_bytes: self.threads * STACK_BYTES,
            connections_bytes: (connections_max + ADMIN_CONNECTIONS_MAX).saturating_mul(connection_bytes),
            upstream_bytes: upstream_concurrency.saturating_mul(UPSTREAM_BYTES),
            metadata_bytes: limit / 64,
            disk_buffers_bytes: disk_buffer_bytes * DISK_BUFFERS,
            disk_index_bytes: disk_entries_max.saturating_mul(DISK_INDEX_ENTRY_BYTES),
            in_flight_bytes,
            cache_bytes: 0,
            slack_bytes: 0,
        };
        let payload = limit.saturating_sub(sum.total());
        let purge_every = (payload / PURGE_SHARE).clamp(MIB, PURGE_BYTES_MAX);
        // Two purges' worth can be free at once, and 1 % of payload is lost to runs of pages that fit nothing.
        sum.slack_bytes = 2 * purge_every + payload / 100;
        let needed = sum.total().saturating_add(CACHE_BYTES_MIN);
        if needed > limit {
            let largest = sum.largest_key();
            return Err(Indivisible::TooSmall { limit, sum: Box::new(sum), short: needed - limit, largest });
        }
        sum.cache_bytes = limit - sum.total();
        if extent_max.get() > sum.cache_bytes / EXTENTS_MIN {
            return Err(Indivisible::ExtentTooLong { extent_max, sum: Box::new(sum) });
        }
        Ok(Budget {
            sum,
            kernel_bytes: self.kernel_bytes(),
            connections_max,
            upstream_concurrency,
            extent_max,
            run_max,
            purge_every,
            disk_buffer_bytes,
            disk_entries_max,
        })
    }

    /// What a cgroup has to allow beside the limit, in bytes.
    pub fn kernel_bytes(&self) -> u64 {
        let sockets = self.connections().saturating_mul(SOCKET_BYTES);
        KERNEL_BYTES.saturating_add(self.limit / KERNEL_SHARE).saturating_add(sockets)
    }

    const fn connection_bytes(&self) -> u64 {
        CONNECTION_BYTES + self.header_bytes_max
    }

    fn connections(&self) -> u64 {
        let (limit, each) = (self.limit, self.connection_bytes());
        let derived = (limit / 12 / each).min(CONNECTIONS).max(limit / 96 / each);
        self.connections_max.unwrap_or(derived.clamp(64, 16 << 10))
    }
}

impl Sum {
    fn terms(&self) -> [(&'static str, u64); 10] {
        [
            ("baseline", self.baseline_bytes),
            ("stacks", self.stacks_bytes),
            ("connections", self.connections_bytes),
            ("upstream", self.upstream_bytes),
            ("metadata", self.metadata_bytes),
            ("disk buffers", self.disk_buffers_bytes),
            ("disk index", self.disk_index_bytes),
            ("in_flight", self.in_flight_bytes),
            ("cache", self.cache_bytes),
            ("slack", self.slack_bytes),
        ]
    }

    /// All terms together.
    pub fn total(&self) -> u64 {
        self.terms().iter().fold(0, |total, (_, bytes)| total.saturating_add(*bytes))
    }

    /// The configuration key behind the largest term that has one.
    fn largest_key(&self) -> &'static str {
        let keys = [
            ("server.connections_max", self.connections_bytes),
            ("fetch.concurrency", self.upstream_bytes),
            ("disk.entries_max", self.disk_index_bytes),
            ("memory.in_flight", self.in_flight_bytes),
        ];
        keys.into_iter().max_by_key(|(_, bytes)| *bytes).map_or("", |(key, _)| key)
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, bytes)) in self.terms().into_iter().filter(|(_, bytes)| *bytes > 0).enumerate() {
            let plus = if index == 0 { "" } else { " + " };
            write!(f, "{plus}{name} {}", ByteSize::b(bytes))?;
        }
        Ok(())
    }
}

const fn previous_power_of_two(n: u64) -> u64 {
    if n == 0 { 0 } else { 1 << n.ilog2() }
}

const fn nonzero(n: u64) -> NonZeroU64 {
    match NonZeroU64::new(n) {
        Some(n) => n,
        None => NonZeroU64::MIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(limit: u64) -> Plan {
        Plan {
            limit,
            threads: 4,
            connections_max: None,
            header_bytes_max: 16 << 10,
            upstream_concurrency: None,
            in_flight: None,
            extent_max: None,
            run_max: None,
            disk: false,
            disk_entries_max: None,
        }
    }

    #[test]
    fn the_terms_add_up_to_the_limit() {
        for limit in [128 * MIB, 256 * MIB, 1 << 30, 4 << 30, 1 << 40] {
            let budget = plan(limit).divide().unwrap();
            assert_eq!(budget.sum.total(), limit);
            assert_eq!(budget.run_max.get() % budget.extent_max.get(), 0);
            assert!(budget.sum.in_flight_bytes >= 8 * budget.extent_max.get());
            let with_disk = Plan { disk: true, ..plan(limit) }.divide().unwrap();
            assert_eq!(with_disk.sum.total(), limit);
            assert!(
                with_disk.disk_buffer_bytes >= 2 * with_disk.extent_max.get() && with_disk.sum.disk_index_bytes > 0
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let error = plan(40 * MIB).divide().unwrap_err().to_string();
        assert!(error.contains("baseline") && error.contains("server.connections_max"), "{error}");
        let error = Plan { connections_max: Some(1 << 20), ..plan(1 << 30) }.divide().unwrap_err().to_string();
        assert!(error.contains("server.connections_max"), "{error}");
        let error = Plan { extent_max: NonZeroU64::new(16 * MIB), ..plan(1 << 30) }.divide().unwrap_err().to_string();
        assert!(error.contains("too long"), "{error}");
        let error = Plan { in_flight: Some(MIB), ..plan(1 << 30) }.divide().unwrap_err().to_string();
        assert!(error.contains("memory.in_flight") && error.contains("fetch.extent_max"), "{error}");
        let budget = Plan { run_max: NonZeroU64::new(1 << 30), ..plan(8 << 30) }.divide().unwrap();
        assert_eq!(budget.run_max.get(), 256 * MIB, "a run has at most 256 extents");
        assert!(plan(0).divide().is_err());
        assert!(Plan { upstream_concurrency: Some(u64::MAX), ..plan(1 << 30) }.divide().is_err());
    }
}
