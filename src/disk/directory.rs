//! The directory of the disk tier: locked, of a known format, its space reserved before anything is written.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statfs};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

use crate::config::DiskConfig;

/// The format of the records. Another number on disk means that nothing there can be read: it is wiped.
const FORMAT: u32 = 1;

/// Never deleted: whoever holds a deleted lock file would hold nothing.
const LOCK_FILE: &str = "halfopen.lock";
const LAYOUT_FILE: &str = "layout.json";
const BLOCKS_DIRECTORY: &str = "blocks";

/// foyer's names of its block files.
const BLOCK_FILE_PREFIX: &str = "foyer-storage-direct-fs-";

/// `TMPFS_MAGIC` of linux/magic.h.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Descriptors beside one per block.
const OTHER_DESCRIPTORS: u64 = 512;

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Another process uses it.
    #[error("{0} is in use by another process")]
    InUse(PathBuf),
    /// Its pages are memory, which the memory limit does not count.
    #[error("{0} is on a tmpfs, whose pages are memory; say disk.allow_tmpfs = true to use it all the same")]
    Tmpfs(PathBuf),
    /// The system refuses.
    #[error("{what} {path}: {error}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// The disk engine cannot be opened.
    #[error("the disk tier cannot be opened: {0}")]
    Engine(String),
}

/// What the blocks were laid out for; blocks of another layout cannot be read.
#[derive(PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Layout {
    format: u32,
    capacity: u64,
    block_bytes: u64,
}

/// The directory, while it is locked.
#[derive(Debug)]
pub(super) struct Directory {
    blocks: PathBuf,
    _lock: File,
}

impl Directory {
    /// Locks it, wipes what cannot be read, and reserves its space.
    pub(super) fn open(config: &DiskConfig, block_bytes: u64) -> Result<Self, DirectoryError> {
        let path = &config.path;
        fs::create_dir_all(path).map_err(io_error("cannot create", path))?;
        if !config.allow_tmpfs && is_tmpfs(path)? {
            return Err(DirectoryError::Tmpfs(path.clone()));
        }
        let lock = lock(path)?;
        let layout = Layout { format: FORMAT, capacity: config.capacity, block_bytes };
        let blocks = path.join(BLOCKS_DIRECTORY);
        prepare(path, &blocks, &layout)?;
        raise_descriptor_limit(config.capacity / block_bytes);
        reserve(&blocks, config.capacity, block_bytes)?;
        Ok(Self { blocks, _lock: lock })
    }

    /// Where the blocks are.
    pub(super) fn blocks(&self) -> &Path {
        &self.blocks
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DirectoryError {
    let path = path.to_owned();
    move |error| DirectoryError::Io { what, path, error }
}

fn is_tmpfs(path: &Path) -> Result<bool, DirectoryError> {
    let statistics = statfs(path).map_err(|error| io_error("cannot look at the file system of", path)(error.into()))?;
    Ok(statistics.f_type == TMPFS_MAGIC)
}

/// The kernel lets go of the lock when the process ends, however it ends.
fn lock(path: &Path) -> Result<File, DirectoryError> {
    let file_path = path.join(LOCK_FILE);
    let open = OpenOptions::new().create(true).truncate(false).write(true).open(&file_path);
    let file = open.map_err(io_error("cannot open", &file_path))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DirectoryError::InUse(path.to_owned())),
        Err(TryLockError::Error(error)) => Err(io_error("cannot lock", &file_path)(error)),
    }
}

fn prepare(path: &Path, blocks: &Path, layout: &Layout) -> Result<(), DirectoryError> {
    let layout_path = path.join(LAYOUT_FILE);
    let found = fs::read(&layout_path).ok().and_then(|text| serde_json::from_slice::<Layout>(&text).ok());
    if found.as_ref() == Some(layout) {
        return Ok(());
    }
    if blocks.exists() {
        tracing::warn!(?found, wanted = ?layout, "the disk tier has another layout and is wiped");
        fs::remove_dir_all(blocks).map_err(io_error("cannot wipe", blocks))?;
    }
    fs::create_dir_all(blocks).map_err(io_error("cannot create", blocks))?;
    let text = serde_json::to_vec(layout).unwrap_or_default();
    fs::write(&layout_path, text).map_err(io_error("cannot write", &layout_path))
}

/// One descriptor is open for each block.
fn raise_descriptor_limit(blocks: u64) {
    let limit = getrlimit(Resource::Nofile);
    let needed = blocks + OTHER_DESCRIPTORS;
    if limit.current.is_some_and(|current| current < needed) {
        let raised = Rlimit { current: limit.maximum.map(|most| most.min(needed)).or(Some(needed)), ..limit };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, needed, "cannot raise the limit of open files");
        }
    }
}

/// Reserves all blocks: a disk that fills up from outside cannot fail a write into them.
fn reserve(blocks: &Path, capacity: u64, block_bytes: u64) -> Result<(), DirectoryError> {
    for index in 0..capacity / block_bytes {
        let path = blocks.join(format!("{BLOCK_FILE_PREFIX}{index:08}"));
        let reserve = || -> io::Result<()> {
            let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
            if file.metadata()?.len() != block_bytes {
                fallocate(&file, FallocateFlags::empty(), 0, block_bytes)?;
            }
            Ok(())
        };
        reserve().map_err(io_error("cannot reserve", &path))?;
    }
    Ok(())
}
