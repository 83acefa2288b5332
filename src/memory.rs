//! Readings of memory from the kernel, the cgroup and the allocator; giving free pages back; the sum.

pub mod sum;

use std::path::{Path, PathBuf};

use procfs::Current;
use procfs::process::Process;
use serde::Serialize;
use tikv_jemalloc_ctl::{epoch, stats};

/// This process as the kernel sees it, in bytes.
///
/// RSS counts every resident page; PSS divides shared pages by their sharers; USS counts only what would be freed if the
/// process ended.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct ProcessMemory {
    /// Resident set size now.
    pub rss_bytes: u64,
    /// Its peak (`VmHWM`).
    pub peak_rss_bytes: u64,
    /// Proportional set size.
    pub pss_bytes: u64,
    /// Unique set size.
    pub uss_bytes: u64,
    /// Swapped out.
    pub swap_bytes: u64,
}

impl ProcessMemory {
    /// Reads `status` and `smaps_rollup`; what cannot be read is 0.
    pub fn read() -> Self {
        let Ok(process) = Process::myself() else { return Self::default() };
        let kib = |value: Option<u64>| value.unwrap_or(0).saturating_mul(1024);
        let mut memory = Self::default();
        if let Ok(status) = process.status() {
            memory.rss_bytes = kib(status.vmrss);
            memory.peak_rss_bytes = kib(status.vmhwm);
            memory.swap_bytes = kib(status.vmswap);
        }
        // The kernel walks every mapping for this file: it is read on request, never in a loop.
        if let Ok(rollup) = process.smaps_rollup() {
            let maps = rollup.memory_map_rollup;
            let sum = |name: &str| maps.iter().filter_map(|map| map.extension.map.get(name)).sum::<u64>();
            memory.pss_bytes = sum("Pss");
            memory.uss_bytes = sum("Private_Clean") + sum("Private_Dirty");
        }
        memory
    }
}

/// Resident bytes of this process now; 0 when they cannot be read. Cheap enough for a loop.
pub fn resident_bytes() -> u64 {
    let statm = Process::myself().and_then(|process| process.statm());
    statm.map_or(0, |statm| statm.resident.saturating_mul(procfs::page_size()))
}

/// jemalloc's own numbers, in bytes.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub struct AllocatorMemory {
    /// In live allocations.
    pub allocated_bytes: u64,
    /// In pages that hold live allocations.
    pub active_bytes: u64,
    /// The allocator's own structures.
    pub metadata_bytes: u64,
    /// Physically resident, as the allocator believes.
    pub resident_bytes: u64,
    /// Address space kept without pages behind it.
    pub retained_bytes: u64,
}

impl AllocatorMemory {
    /// Reads the counters, brought up to date first.
    pub fn read() -> Self {
        let number = |read: tikv_jemalloc_ctl::Result<usize>| read.map_or(0, |bytes| bytes as u64);
        let _ = epoch::advance();
        Self {
            allocated_bytes: number(stats::allocated::read()),
            active_bytes: number(stats::active::read()),
            metadata_bytes: number(stats::metadata::read()),
            resident_bytes: number(stats::resident::read()),
            retained_bytes: number(stats::retained::read()),
        }
    }
}

/// The memory cgroup this process runs in, version 1 or 2.
#[derive(Clone, Debug)]
pub struct Cgroup {
    directory: PathBuf,
    files: &'static CgroupFiles,
}

#[derive(Debug)]
struct CgroupFiles {
    limit: &'static str,
    current: &'static str,
    events: &'static str,
}

const VERSION_1: CgroupFiles =
    CgroupFiles { limit: "memory.limit_in_bytes", current: "memory.usage_in_bytes", events: "memory.oom_control" };
const VERSION_2: CgroupFiles = CgroupFiles { limit: "memory.max", current: "memory.current", events: "memory.events" };

/// What the cgroup says, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CgroupMemory {
    /// The lowest limit of this group and those above it; `None` when there is none.
    pub limit_bytes: Option<u64>,
    /// Charged to the group now: more than RSS (page tables, sockets, slab, page cache).
    pub current_bytes: u64,
    /// Processes that the kernel has killed in it for want of memory.
    pub oom_kills: u64,
}

impl Cgroup {
    /// The memory cgroup of this process, if there is one to be seen.
    pub fn find() -> Option<Self> {
        let process = Process::myself().ok()?;
        let groups = process.cgroups().ok()?;
        let mounts = process.mountinfo().ok()?;
        let v1 = groups.into_iter().map(|group| (group.controllers.iter().any(|c| c == "memory"), group));
        let (v1, v2): (Vec<_>, Vec<_>) = v1.partition(|(memory, _)| *memory);
        let v2 = v2.into_iter().filter(|(_, group)| group.hierarchy == 0);
        for (is_v1, group) in v1.into_iter().chain(v2) {
            let files = if is_v1 { &VERSION_1 } else { &VERSION_2 };
            let mount = mounts.0.iter().find(|mount| {
                if is_v1 {
                    mount.fs_type == "cgroup" && mount.super_options.contains_key("memory")
                } else {
                    mount.fs_type == "cgroup2"
                }
            });
            let Some(mount) = mount else { continue };
            // Inside a container the group's path can lie outside the mount: then the mount itself is the group.
            let inside = Path::new(&group.pathname).strip_prefix(&mount.root).unwrap_or_else(|_| Path::new(""));
            for directory in [mount.mount_point.join(inside), mount.mount_point.clone()] {
                if directory.join(files.current).exists() {
                    return Some(Self { directory, files });
                }
            }
        }
        None
    }

    /// Reads limit, use and kills.
    pub fn read(&self) -> CgroupMemory {
        let number = |directory: &Path, file| {
            let text = std::fs::read_to_string(directory.join(file)).ok()?;
            text.trim().parse::<u64>().ok()
        };
        // Version 1 writes "no limit" as the largest multiple of a page, version 2 as `max`, which is no number.
        let limits = self.directory.ancestors().filter_map(|directory| number(directory, self.files.limit));
        let events = std::fs::read_to_string(self.directory.join(self.files.events)).unwrap_or_default();
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        CgroupMemory {
            limit_bytes: limits.filter(|limit| *limit < i64::MAX as u64 / 2).min(),
            current_bytes: number(&self.directory, self.files.current).unwrap_or(0),
            oom_kills: kills.and_then(|kills| kills.trim().parse().ok()).unwrap_or(0),
        }
    }
}

/// What a machine whose `/proc/meminfo` cannot be read is taken to have.
const RAM_UNKNOWN_BYTES: u64 = 1 << 30;

/// The machine that the limits are derived from.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Limit of the memory cgroup, in bytes.
    pub cgroup_limit: Option<u64>,
    /// RAM, in bytes.
    pub ram: u64,
    /// Cores this process may use.
    pub cores: usize,
}

impl Machine {
    /// Reads it.
    pub fn read() -> Self {
        let ram = procfs::Meminfo::current().map_or(RAM_UNKNOWN_BYTES, |meminfo| meminfo.mem_total);
        Self {
            cgroup_limit: Cgroup::find().and_then(|cgroup| cgroup.read().limit_bytes),
            ram,
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readings_are_plausible() {
        let process = ProcessMemory::read();
        assert!(process.rss_bytes > 1 << 20);
        assert!(process.peak_rss_bytes >= process.rss_bytes);
        assert!(process.uss_bytes <= process.pss_bytes && process.pss_bytes <= process.peak_rss_bytes);
        assert!(resident_bytes() > 1 << 20);
        let machine = Machine::read();
        assert!(machine.ram > 1 << 28 && machine.cores > 0);
    }
}
