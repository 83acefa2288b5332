//! The configuration: [`Settings`] are what was written, [`Config`] is what is valid. All faults are told at once.

pub mod flags;
pub mod keys;
mod read;
pub mod settings;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use url::Url;

use crate::memory::Machine;
use crate::memory::sum::{Budget, Plan};
use crate::object::StoreName;
use read::Reader;
use settings::{Fault, Settings, Source};

/// A valid configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Listeners and their limits.
    pub server: ServerConfig,
    /// The memory limit and what it is divided into.
    pub memory: MemoryConfig,
    /// The disk tier, if there is one.
    pub disk: Option<DiskConfig>,
    /// How stores are read.
    pub fetch: FetchConfig,
    /// The stores.
    pub stores: Vec<StoreConfig>,
    /// The log.
    pub log: LogConfig,
    /// Every key with its effective value, secrets hidden.
    pub effective: BTreeMap<String, String>,
}

/// Listeners and their limits.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address of the data API.
    pub listen: SocketAddr,
    /// Address of the admin API.
    pub admin_listen: SocketAddr,
    /// Client connections at once.
    pub connections_max: usize,
    /// Longest request head, in bytes.
    pub header_bytes_max: usize,
    /// Longest wait for a whole request head.
    pub header_timeout: Duration,
    /// Longest time without a byte taken by a client.
    pub write_stall_timeout: Duration,
    /// Least bytes a second that a client takes while memory is short.
    pub write_rate_min: u64,
    /// Longest time for running requests to end after a signal.
    pub drain_timeout: Duration,
}

/// The memory limit and what it is divided into.
#[derive(Clone, Debug)]
pub struct MemoryConfig {
    /// The limit, in bytes.
    pub limit: u64,
    /// Where it was found.
    pub limit_source: LimitSource,
    /// What it is divided into.
    pub budget: Budget,
    /// Whether allocations are sampled.
    pub heap_profile: bool,
    /// What keeps memory below the limit.
    pub measures: Measures,
}

/// What keeps memory below the limit; each can be left out, so that its worth can be measured alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a measure of its own")]
pub struct Measures {
    /// Payloads have an arena of their own, which gives pages back by bytes freed.
    pub arena: bool,
    /// Near the limit the free pages of all arenas are given back.
    pub purge: bool,
    /// Near the limit, and when responses hold much, the cache is made smaller.
    pub resize: bool,
    /// At the limit fills are refused.
    pub shed: bool,
    /// While memory is short, clients that hardly read are cut off.
    pub least_rate: bool,
    /// Payload is held to its room.
    pub ledger: bool,
    /// Payload weighs what the allocator gives and what it costs to keep, not its length.
    pub weigher: bool,
}

impl Measures {
    const NAMES: [&'static str; 7] = ["arena", "purge", "resize", "shed", "least_rate", "ledger", "weigher"];

    fn without(words: &[String], governor: bool) -> Self {
        let on = |name: &str| !words.iter().any(|word| word == name);
        Self {
            arena: on("arena"),
            purge: governor && on("purge"),
            resize: governor && on("resize"),
            shed: governor && on("shed"),
            least_rate: governor && on("least_rate"),
            ledger: on("ledger"),
            weigher: on("weigher"),
        }
    }
}

/// The disk tier.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// Its directory.
    pub path: PathBuf,
    /// Bytes it may take there.
    pub capacity: u64,
    /// Whether a tmpfs will do, whose pages are memory too.
    pub allow_tmpfs: bool,
    /// Entries it may hold: what bounds its index in memory.
    pub entries_max: u64,
    /// Bytes of each of its buffers.
    pub buffer_bytes: u64,
}

/// Where the memory limit was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LimitSource {
    /// `--memory-limit`.
    Flag,
    /// `HALFOPEN_MEMORY_LIMIT`.
    Env,
    /// The configuration file.
    File,
    /// 75 % of the cgroup's limit, less where the kernel's share would not fit beside it.
    Cgroup,
    /// 25 % of RAM.
    Ram,
}

/// How stores are read.
#[derive(Clone, Debug)]
pub struct FetchConfig {
    /// Longest extent, in bytes.
    pub extent_max: NonZeroU64,
    /// Longest single GET, in bytes.
    pub run_max: NonZeroU64,
    /// Requests under way at once.
    pub concurrency: usize,
    /// Longest wait for memory or for a turn.
    pub queue_timeout: Duration,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest time without a byte from a store.
    pub stall_timeout: Duration,
    /// Further tries after a transient failure.
    pub retries: usize,
}

/// One store.
#[derive(Clone)]
pub struct StoreConfig {
    /// The name it is served under.
    pub name: StoreName,
    /// Where it is.
    pub url: Url,
    /// How long its metadata is believed.
    pub freshness: Freshness,
    /// `object_store`'s own keys. They may hold secrets.
    pub options: BTreeMap<String, String>,
}

impl fmt::Debug for StoreConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreConfig")
            .field("name", &self.name)
            .field("freshness", &self.freshness)
            .finish_non_exhaustive()
    }
}

/// How long an object's metadata is believed before the store is asked again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freshness {
    /// Objects are never overwritten.
    Immutable,
    /// For so long after the store last said it.
    For(Duration),
    /// Every read asks.
    Always,
}

/// The log.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// Directives of tracing's `EnvFilter`.
    pub level: String,
    /// JSON lines instead of text.
    pub json: bool,
}

/// A configuration with faults, and the stores of it that could be read, so that their own faults can be told too.
#[derive(Debug)]
pub struct Rejected {
    /// What is wrong.
    pub faults: Vec<Fault>,
    /// Stores that may still be tried.
    pub stores: Vec<StoreConfig>,
    /// With this.
    pub fetch: FetchConfig,
}

impl Config {
    /// Checks what was written; `faults` are those found while it was read.
    pub fn resolve(settings: Settings, faults: Vec<Fault>, machine: &Machine) -> Result<Self, Box<Rejected>> {
        let mut read = Reader::new(settings, faults);
        let server = ServerConfig {
            listen: read.address(keys::LISTEN),
            admin_listen: read.address(keys::ADMIN_LISTEN),
            connections_max: 0,
            header_bytes_max: to_usize(read.size(keys::HEADER_BYTES_MAX, HEADER_BYTES).unwrap_or_default()),
            header_timeout: read.duration(keys::HEADER_TIMEOUT),
            write_stall_timeout: read.duration(keys::WRITE_STALL_TIMEOUT),
            write_rate_min: read.size(keys::WRITE_RATE_MIN, RATE).unwrap_or_default(),
            drain_timeout: read.duration_or_none(keys::DRAIN_TIMEOUT),
        };
        let disk = read_disk(&mut read);
        let memory = read_memory(&mut read, machine, disk.is_some(), server.header_bytes_max as u64);
        let fetch = FetchConfig {
            extent_max: NonZeroU64::MIN,
            run_max: NonZeroU64::MIN,
            concurrency: 0,
            queue_timeout: read.duration(keys::QUEUE_TIMEOUT),
            connect_timeout: read.duration(keys::CONNECT_TIMEOUT),
            stall_timeout: read.duration(keys::STALL_TIMEOUT),
            retries: to_usize(read.count(keys::RETRIES, RETRIES).unwrap_or_default()),
        };
        let log = LogConfig {
            level: read.filter(keys::LOG_LEVEL),
            json: read.choice(keys::LOG_FORMAT, &["text", "json"]) == "json",
        };
        let stores = read.stores();
        let (faults, effective) = read.finish();
        match memory {
            Some(memory) if faults.is_empty() => {
                Ok(Self { server, memory, disk, fetch, stores, log, effective }.with_derived_limits())
            }
            _ => Err(Box::new(Rejected { faults, stores, fetch })),
        }
    }

    fn with_derived_limits(mut self) -> Self {
        let budget = self.memory.budget;
        self.server.connections_max = to_usize(budget.connections_max);
        self.fetch.concurrency = to_usize(budget.upstream_concurrency);
        if let Some(disk) = &mut self.disk {
            (disk.entries_max, disk.buffer_bytes) = (budget.disk_entries_max, budget.disk_buffer_bytes);
            self.effective.insert(keys::DISK_ENTRIES_MAX.name.to_owned(), disk.entries_max.to_string());
        }
        self.fetch.extent_max = budget.extent_max;
        self.fetch.run_max = budget.run_max;
        for (key, value) in [
            (keys::MEMORY_LIMIT, self.memory.limit),
            (keys::MEMORY_IN_FLIGHT, budget.sum.in_flight_bytes),
            (keys::CONNECTIONS_MAX, budget.connections_max),
            (keys::CONCURRENCY, budget.upstream_concurrency),
            (keys::EXTENT_MAX, budget.extent_max.get()),
            (keys::RUN_MAX, budget.run_max.get()),
        ] {
            self.effective.insert(key.name.to_owned(), value.to_string());
        }
        self
    }
}

/// The least and the most that may be configured, both allowed.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    least: u64,
    most: u64,
}

// Limits of what may be configured, each with its reason.
const HEADER_BYTES: Allowed = Allowed { least: 8 << 10, most: 1 << 20 }; // hyper's own minimum; 64 x what clients send
const RATE: Allowed = Allowed { least: 0, most: 1 << 30 };
const RETRIES: Allowed = Allowed { least: 0, most: 10 }; // with backoff, more is longer than any client waits
const CONNECTIONS: Allowed = Allowed { least: 1, most: 1 << 20 };
const CONCURRENCY: Allowed = Allowed { least: 1, most: 1 << 16 };
const EXTENT_BYTES: Allowed = Allowed { least: 4 << 10, most: 32 << 20 }; // a page; half a block of the disk tier
const RUN_BYTES: Allowed = Allowed { least: 4 << 10, most: 1 << 30 }; // grants are counted in 32 bits
const IN_FLIGHT_BYTES: Allowed = Allowed { least: 1 << 20, most: 2 << 30 };
const DISK_BYTES: Allowed = Allowed { least: 64 << 20, most: 1 << 50 }; // sixteen of the smallest blocks
const DISK_ENTRIES: Allowed = Allowed { least: 1000, most: 1 << 36 };
const LIMIT_BYTES: Allowed = Allowed { least: 1 << 20, most: 1 << 50 };

/// Threads beside the workers: admin, purge, blocking I/O (file stores, name resolution) as a rule.
const OTHER_THREADS: u64 = 20;

fn read_disk(read: &mut Reader) -> Option<DiskConfig> {
    let (path, capacity) = (read.path(keys::DISK_PATH), read.size(keys::DISK_CAPACITY, DISK_BYTES));
    let allow_tmpfs = read.flag(keys::DISK_ALLOW_TMPFS);
    match (path, read.was_written(keys::DISK_CAPACITY)) {
        (Some(path), true) => {
            Some(DiskConfig { path, capacity: capacity?, allow_tmpfs, entries_max: 0, buffer_bytes: 0 })
        }
        (Some(_), false) => {
            read.fault(keys::DISK_CAPACITY, "is missing: disk.path is set, and the tier needs both");
            None
        }
        (None, true) => {
            read.fault(keys::DISK_PATH, "is missing: disk.capacity is set, and the tier needs both");
            None
        }
        (None, false) => None,
    }
}

fn read_memory(read: &mut Reader, machine: &Machine, disk: bool, header_bytes_max: u64) -> Option<MemoryConfig> {
    let source = read.source(keys::MEMORY_LIMIT);
    let configured = read.size(keys::MEMORY_LIMIT, LIMIT_BYTES);
    let plan = Plan {
        limit: 0,
        threads: machine.cores as u64 + OTHER_THREADS,
        connections_max: read.count(keys::CONNECTIONS_MAX, CONNECTIONS),
        header_bytes_max,
        upstream_concurrency: read.count(keys::CONCURRENCY, CONCURRENCY),
        in_flight: read.size(keys::MEMORY_IN_FLIGHT, IN_FLIGHT_BYTES),
        extent_max: read.size(keys::EXTENT_MAX, EXTENT_BYTES).and_then(NonZeroU64::new),
        run_max: read.size(keys::RUN_MAX, RUN_BYTES).and_then(NonZeroU64::new),
        disk,
        disk_entries_max: read.count(keys::DISK_ENTRIES_MAX, DISK_ENTRIES),
    };
    let heap_profile = read.flag(keys::HEAP_PROFILE);
    let governor = read.flag(keys::GOVERNOR);
    let measures = Measures::without(&read.words(keys::SWITCH_OFF, &Measures::NAMES), governor);
    let (limit, limit_source) = match (configured, source, machine.cgroup_limit) {
        (Some(limit), Some(Source::Flag), _) => (limit, LimitSource::Flag),
        (Some(limit), Some(Source::Env), _) => (limit, LimitSource::Env),
        (Some(limit), _, _) => (limit, LimitSource::File),
        // It was written, and is wrong: the fault is told, and nothing is derived from something else.
        (None, Some(_), _) => return None,
        (None, None, Some(cgroup)) if cgroup < machine.ram => {
            let limit = cgroup / 4 * 3;
            let left = cgroup.saturating_sub(Plan { limit, ..plan }.kernel_bytes());
            (limit.min(left), LimitSource::Cgroup)
        }
        (None, None, _) => (machine.ram / 4, LimitSource::Ram),
    };
    match (Plan { limit, ..plan }).divide() {
        Ok(budget) => Some(MemoryConfig { limit, limit_source, budget, heap_profile, measures }),
        Err(error) => {
            read.fault(keys::MEMORY_LIMIT, error.to_string());
            None
        }
    }
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests;
