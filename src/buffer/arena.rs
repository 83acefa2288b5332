//! The payload arena: a jemalloc arena for nothing but payloads, given back to the system as it is freed.
//!
//! The only file with `unsafe` beside the allocator's symbol in `main.rs`. The functions used exist whatever the global
//! allocator is.
#![expect(unsafe_code, reason = "jemalloc's extended interface is C; everything unsafe is behind `Arena` and `Block`")]

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, Thread};

use tikv_jemalloc_sys as je;

/// `MALLOCX_TCACHE_NONE` of jemalloc.h: no thread keeps freed payloads for itself.
const TCACHE_NONE: c_int = 1 << 8;

/// Stack of the purging thread. Its first allocation takes some 60 KiB of it inside a jemalloc built for debugging.
const PURGER_STACK_BYTES: usize = 512 << 10;

/// An arena whose free pages go back to the system each time `purge_every` more bytes were freed.
///
/// Allocated is not resident: with jemalloc's default decay a cache under churn was resident at 1.86 times its limit,
/// with this at 1.09 times, for a third of the price of decay 0 (measured; see ARCHITECTURE.md). The pages are given
/// back by a thread of the arena's own; a thread that frees purges itself only when that one has fallen behind.
#[derive(Debug)]
pub struct Arena {
    flags: c_int,
    weighs: bool,
    purge_name: CString,
    purge_every: usize,
    freed: AtomicUsize,
    purging: AtomicBool,
    purger: Thread,
}

/// jemalloc refused to make an arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The number that `mallctl` returned.
    #[error("jemalloc: mallctl {0} failed with {1}")]
    Control(&'static str, c_int),
    /// The thread that purges could not be started.
    #[error("cannot start the purging thread: {0}")]
    Thread(#[from] std::io::Error),
}

impl Arena {
    /// No arena of its own: payloads lie among all else, and their pages go back by the allocator's clock. To measure by.
    pub fn shared(weighs: bool) -> Result<Arc<Self>, ArenaError> {
        let (purger, _) = thread_waiting_for_its_arena()?;
        let (purge_name, purge_every) = (CString::default(), usize::MAX);
        Ok(Arc::new(Self { flags: 0, weighs, purge_name, purge_every, freed: 0.into(), purging: false.into(), purger }))
    }

    /// A new arena. `purge_every` is in bytes. One that does not weigh takes bytes at their length, to measure by.
    pub fn new(purge_every: usize, weighs: bool) -> Result<Arc<Self>, ArenaError> {
        let index = create()?;
        for (option, value) in [("dirty_decay_ms", -1), ("muzzy_decay_ms", 0)] {
            // Never by time: pages go back by bytes freed, whatever the clock says.
            set_decay(index, option, value)?;
        }
        let (thread, receive) = thread_waiting_for_its_arena()?;
        let arena = Arc::new(Self {
            flags: c_int::try_from((index + 1) << 20).unwrap_or(0) | TCACHE_NONE,
            weighs,
            purge_name: CString::new(format!("arena.{index}.purge")).unwrap_or_default(),
            purge_every: purge_every.max(1),
            freed: AtomicUsize::new(0),
            purging: AtomicBool::new(false),
            purger: thread,
        });
        // The thread only fails to receive when it is gone; then whoever frees purges.
        let _ = receive.send(Arc::downgrade(&arena));
        Ok(arena)
    }

    /// What `length` bytes weigh: what the allocator gives for them.
    pub fn weight_of(&self, length: u64) -> u64 {
        let bytes = usize::try_from(length).unwrap_or(usize::MAX);
        if self.weighs { Self::allocated_size(bytes) as u64 } else { length }
    }

    /// What the allocator gives for `length` bytes.
    fn allocated_size(length: usize) -> usize {
        if length == 0 || length > isize::MAX as usize {
            return length;
        }
        // SAFETY: `nallocx` only computes; a length of zero is excluded above. Flags do not change the size class.
        unsafe { je::nallocx(length, 0) }
    }

    /// Gives all free pages of the arena back to the system, now.
    pub fn purge(&self) {
        self.freed.store(0, Ordering::Relaxed);
        // SAFETY: `purge_name` is a nul-terminated name of a control that takes and returns nothing.
        let status =
            unsafe { je::mallctl(self.purge_name.as_ptr(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0) };
        debug_assert_eq!(status, 0, "jemalloc cannot purge the payload arena");
    }

    fn was_freed(&self, bytes: usize) {
        if self.purge_every == usize::MAX {
            return;
        }
        let freed = self.freed.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if freed >= self.purge_every.saturating_mul(2) {
            self.purge();
        } else if freed >= self.purge_every && !self.purging.swap(true, Ordering::AcqRel) {
            self.purger.unpark();
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // The thread finds its `Weak` dead and ends. The jemalloc arena stays, empty: there is one per process.
        self.purger.unpark();
    }
}

/// Gives the free pages of all arenas back to the system, now.
pub fn purge_all() {
    // SAFETY: a nul-terminated name of a control that takes and returns nothing; 4096 is `MALLCTL_ARENAS_ALL`.
    let status =
        unsafe { je::mallctl(c"arena.4096.purge".as_ptr(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), 0) };
    debug_assert_eq!(status, 0, "jemalloc cannot purge its arenas");
}

/// Starts the thread that purges. It is told its arena afterwards, since the arena holds the thread's handle.
fn thread_waiting_for_its_arena() -> std::io::Result<(Thread, std::sync::mpsc::SyncSender<Weak<Arena>>)> {
    let (sender, receiver) = std::sync::mpsc::sync_channel::<Weak<Arena>>(1);
    let thread = thread::Builder::new().name("purge".into()).stack_size(PURGER_STACK_BYTES).spawn(move || {
        let Ok(arena) = receiver.recv() else { return };
        loop {
            thread::park();
            let Some(arena) = arena.upgrade() else { return };
            if arena.purging.swap(false, Ordering::AcqRel) {
                arena.purge();
            }
        }
    })?;
    Ok((thread.thread().clone(), sender))
}

fn create() -> Result<c_uint, ArenaError> {
    let mut index: c_uint = 0;
    let mut size = size_of::<c_uint>();
    // SAFETY: `arenas.create` writes one `unsigned`; `index` and `size` live until it returns.
    let status =
        unsafe { je::mallctl(c"arenas.create".as_ptr(), (&raw mut index).cast(), &raw mut size, ptr::null_mut(), 0) };
    check("arenas.create", status)?;
    Ok(index)
}

fn set_decay(index: c_uint, option: &'static str, mut milliseconds: isize) -> Result<(), ArenaError> {
    let name = CString::new(format!("arena.{index}.{option}")).unwrap_or_default();
    let name: &CStr = &name;
    // SAFETY: the control reads one `ssize_t`; `milliseconds` and `name` live until it returns.
    let status = unsafe {
        je::mallctl(
            name.as_ptr(),
            ptr::null_mut(),
            ptr::null_mut(),
            (&raw mut milliseconds).cast::<c_void>(),
            size_of::<isize>(),
        )
    };
    check(option, status)
}

fn check(control: &'static str, status: c_int) -> Result<(), ArenaError> {
    if status == 0 { Ok(()) } else { Err(ArenaError::Control(control, status)) }
}

/// The block has no room for what was to be appended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Full;

/// One allocation of exactly the size asked for, written once from its start.
#[derive(Debug)]
pub struct Block {
    start: NonNull<u8>,
    written: usize,
    capacity: usize,
    arena: Arc<Arena>,
}

// SAFETY: the block owns its memory; it is written through `&mut` and read through `&` alone.
unsafe impl Send for Block {}
// SAFETY: as above; `&Block` only reads.
unsafe impl Sync for Block {}

impl Block {
    /// Memory for `capacity` bytes; `None` when there is none to be had, or for no bytes at all.
    pub fn allocate(arena: &Arc<Arena>, capacity: usize) -> Option<Self> {
        if capacity == 0 || capacity > isize::MAX as usize {
            return None;
        }
        // SAFETY: the capacity is neither zero nor above what a Rust object may have; the flags name a live arena.
        let start = unsafe { je::mallocx(capacity, arena.flags) };
        let start = NonNull::new(start.cast::<u8>())?;
        Some(Self { start, written: 0, capacity, arena: Arc::clone(arena) })
    }

    /// Bytes it was made for.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Appends bytes, if all of them fit.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), Full> {
        if bytes.len() > self.capacity - self.written {
            return Err(Full);
        }
        // SAFETY: `written + bytes.len() <= capacity` was just checked, and a new `&mut` block cannot overlap `bytes`.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(self.written), bytes.len()) };
        self.written += bytes.len();
        Ok(())
    }

    /// Forgets what was written.
    pub const fn clear(&mut self) {
        self.written = 0;
    }

    /// What has been written.
    pub const fn as_slice(&self) -> &[u8] {
        // SAFETY: the first `written` bytes are initialised and stay so while the block is borrowed.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.written) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: `start` came from `mallocx` with the same size and flags, and nothing refers to it any more.
        unsafe { je::sdallocx(self.start.as_ptr().cast(), self.capacity, self.arena.flags) };
        self.arena.was_freed(Arena::allocated_size(self.capacity));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_holds_what_was_appended_and_no_more() {
        let arena = Arena::new(1 << 20, true).unwrap();
        let mut block = Block::allocate(&arena, 3).unwrap();
        assert_eq!(block.append(b"ab"), Ok(()));
        assert_eq!(block.append(b"cd"), Err(Full));
        assert_eq!(block.append(b"c"), Ok(()));
        assert_eq!(block.as_slice(), b"abc");
        assert!(Block::allocate(&arena, 0).is_none());
    }

    #[test]
    fn freed_pages_leave_the_process() {
        let arena = Arena::new(usize::MAX, true).unwrap();
        let resident = || procfs::process::Process::myself().unwrap().statm().unwrap().resident * procfs::page_size();
        let blocks: Vec<Block> = (0..64)
            .map(|_| {
                let mut block = Block::allocate(&arena, 1 << 20).unwrap();
                block.append(&vec![1; 1 << 20]).unwrap();
                block
            })
            .collect();
        drop(blocks);
        let before = resident();
        arena.purge();
        assert!(resident() + (48 << 20) < before, "of 64 MiB that were freed, less than 48 MiB went back");
    }
}
