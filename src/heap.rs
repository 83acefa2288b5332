//! Heap profiles: who holds memory, by call stack.
//!
//! The server dumps jemalloc's samples into an unnamed file, which takes a few milliseconds and next to no memory. Names
//! are put to addresses by a short-lived process of the same binary: line tables take some 80 MB, and those must not
//! stay in a process whose memory is bounded.

use std::fs::File;
use std::io::{self, BufRead, Cursor, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use jemalloc_pprof::PROF_CTL;
use pprof_util::FlamegraphOptions;
use procfs::process::{MMapPath, MemoryMap, Process};
use tokio::process::Command;
use tokio::time::timeout;

/// The hidden command that [`symbolize`] is run by.
pub const COMMAND: &str = "heap-profile";

/// Memory of that process, in bytes, beside the binary's own pages, which both share: 80 to 86 MiB measured. Room is made
/// for it before it starts.
pub const SYMBOLIZER_BYTES: u64 = 96 << 20;

/// Its allocator: no samples, one arena, nothing kept for later.
const SYMBOLIZER_MALLOC_CONF: (&str, &str) =
    ("_RJEM_MALLOC_CONF", "prof:false,narenas:1,dirty_decay_ms:0,muzzy_decay_ms:0");

/// How long naming may take: a second on a busy machine, as measured.
const SYMBOLIZE_TIMEOUT: Duration = Duration::from_mins(1);

/// The part of a dump that lists what was mapped where.
const MAPS: &str = "MAPPED_LIBRARIES:";

/// Why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum HeapError {
    /// Allocations are not sampled.
    #[error("allocations are not sampled: memory.heap_profile is off, or _RJEM_MALLOC_CONF says prof:false")]
    Off,
    /// The dump could not be written; it goes to `TMPDIR`.
    #[error("cannot dump the heap: {0}")]
    Dump(String),
    /// The process that names addresses failed.
    #[error("cannot put names to addresses: {0}")]
    Symbolize(String),
}

/// Stops sampling for the life of the process.
pub async fn switch_off() {
    jemalloc_pprof::deactivate_jemalloc_profiling().await;
}

/// What a profile is turned into.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Format {
    /// pprof's: a gzipped protocol buffer.
    Pprof,
    /// A flame graph, as SVG.
    Flamegraph,
}

impl Format {
    const fn argument(self) -> &'static str {
        match self {
            Self::Pprof => "pprof",
            Self::Flamegraph => "flamegraph",
        }
    }
}

/// A profile of live allocations, in bytes in use, with function names.
pub async fn profile(format: Format) -> Result<Vec<u8>, HeapError> {
    let dump = dump().await?;
    let failed = |error: io::Error| HeapError::Symbolize(error.to_string());
    let child = Command::new(own_binary())
        .args([COMMAND, format.argument()])
        .env(SYMBOLIZER_MALLOC_CONF.0, SYMBOLIZER_MALLOC_CONF.1)
        .stdin(Stdio::from(dump))
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    match timeout(SYMBOLIZE_TIMEOUT, child.wait_with_output()).await {
        Ok(Ok(output)) if output.status.success() => Ok(output.stdout),
        Ok(Ok(output)) => Err(HeapError::Symbolize(output.status.to_string())),
        Ok(Err(error)) => Err(failed(error)),
        Err(_) => Err(HeapError::Symbolize("it took too long".to_owned())),
    }
}

/// The binary that runs. By its own name where that still names it: pprof takes the name for a file of its own machine.
/// After an upgrade has replaced the file, by the link that stays right.
fn own_binary() -> PathBuf {
    let link = PathBuf::from("/proc/self/exe");
    let named = std::env::current_exe().ok().filter(|named| {
        let inode = |path: &Path| std::fs::metadata(path).map(|metadata| (metadata.dev(), metadata.ino())).ok();
        inode(named).is_some() && inode(named) == inode(&link)
    });
    named.unwrap_or(link)
}

async fn dump() -> Result<File, HeapError> {
    let control = PROF_CTL.as_ref().ok_or(HeapError::Off)?;
    let mut control = control.lock().await;
    if !control.activated() {
        return Err(HeapError::Off);
    }
    control.dump().map_err(|error| HeapError::Dump(error.to_string()))
}

/// Should memory end all the same, the kernel takes this process and not the server.
pub fn go_first() {
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

/// Reads a dump of another process of this binary and returns the profile.
pub fn symbolize(mut dump: impl Read, format: Format) -> Result<Vec<u8>, HeapError> {
    let failed = |error: &dyn std::fmt::Display| HeapError::Symbolize(error.to_string());
    let mut text = String::new();
    dump.read_to_string(&mut text).map_err(|error| failed(&error))?;
    let here = Process::myself().and_then(|process| process.maps()).map_err(|error| failed(&error))?.0;
    let text = translate(&text, &here);
    let profile = pprof_util::parse_jeheap(Cursor::new(text), mappings::MAPPINGS.as_deref());
    let profile = profile.map_err(|error| failed(&error))?;
    match format {
        Format::Pprof => Ok(profile.to_pprof(("inuse_space", "bytes"), ("space", "bytes"), None)),
        Format::Flamegraph => {
            let mut options = FlamegraphOptions::default();
            "live heap".clone_into(&mut options.title);
            "bytes".clone_into(&mut options.count_name);
            profile.to_flamegraph(&mut options).map_err(|error| failed(&error))
        }
    }
}

/// Rewrites the addresses of a dump to where the same code lies in this process.
fn translate(dump: &str, here: &[MemoryMap]) -> String {
    let there = mapped_files(dump);
    let mut text = String::with_capacity(dump.len());
    for line in Cursor::new(dump).lines().map_while(Result::ok).take_while(|line| line != MAPS) {
        match line.strip_prefix('@') {
            Some(addresses) => {
                text.push('@');
                for address in addresses.split_ascii_whitespace() {
                    text.push(' ');
                    let moved = parse_hex(address).and_then(|address| moved(address, &there, here));
                    text.push_str(&moved.map_or_else(|| address.to_owned(), |moved| format!("{moved:#x}")));
                }
            }
            None => text.push_str(&line),
        }
        text.push('\n');
    }
    text
}

/// A file mapped by the process that dumped.
struct Mapped {
    start: u64,
    end: u64,
    offset: u64,
    path: PathBuf,
}

/// The mappings at the end of a dump, in the format of `/proc/self/maps`.
fn mapped_files(dump: &str) -> Vec<Mapped> {
    let maps = dump.lines().skip_while(|line| *line != MAPS).skip(1);
    maps.filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let offset = words.nth(1)?;
        let path = words.nth(2).filter(|path| path.starts_with('/'))?;
        Some(Mapped { start: parse_hex(start)?, end: parse_hex(end)?, offset: parse_hex(offset)?, path: path.into() })
    })
    .collect()
}

fn moved(address: u64, there: &[Mapped], here: &[MemoryMap]) -> Option<u64> {
    let from = there.iter().find(|mapped| mapped.start <= address && address < mapped.end)?;
    // The same file is mapped in the same segments; neighbouring ones may share a page of it.
    let same = |map: &&MemoryMap| {
        map.offset == from.offset && matches!(&map.pathname, MMapPath::Path(path) if *path == from.path)
    };
    Some(here.iter().find(same)?.address.0 + (address - from.start))
}

fn parse_hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_another_process_are_found_in_this_one() {
        let here = Process::myself().unwrap().maps().unwrap().0;
        let code = here.iter().find(|map| matches!(&map.pathname, MMapPath::Path(_)) && map.offset > 0).unwrap();
        let MMapPath::Path(path) = &code.pathname else { unreachable!() };
        let dump = format!(
            "heap_v2/524288\n@ 0x1010 0x99999999\n  t*: 1: 524288 [0: 0]\n{MAPS}\n1000-2000 r-xp {:x} 00:00 1  {}\n",
            code.offset,
            path.display()
        );
        let text = translate(&dump, &here);
        assert!(text.contains(&format!("@ {:#x} 0x99999999\n", code.address.0 + 0x10)), "{text}");
        assert!(symbolize(Cursor::new(dump), Format::Pprof).is_ok());
        assert!(symbolize(Cursor::new("not a dump"), Format::Flamegraph).is_err());
    }
}
