//! The one account of payload memory: who holds how many bytes, and who may take more.
//!
//! Every payload byte is charged from before it is allocated until after it is freed. A [`Grant`] is permission to fill
//! so many bytes; a [`Charge`] is a part of a grant turned into memory. The share that fills may use at once is fixed, so
//! a full cache never blocks a fill.
//!
//! What the cache lets go while responses still hold it stays charged. When cached, pinned and queued bytes together are
//! more than there is room for, so much of the in-flight share is withheld until they are not: all payload together never
//! passes the limit, whatever clients do. Each transition is one step under one lock.
//!
//! A small reserve stands beside the share, for reads that get no grant of it: they go on in small pieces, past the cache.
#![deny(clippy::arithmetic_side_effects)]

use std::time::Duration;

use crate::error::{Error, Kind};
use crate::sync::{Arc, AtomicBool, AtomicU8, Mutex, MutexGuard, Notify, Ordering, PoisonError, Semaphore, timeout};

/// What charged bytes are used for just now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Use {
    /// Being filled, or filled and not yet handed on.
    Filling = 0,
    /// Held by the cache (and perhaps by responses too).
    Cached = 1,
    /// Held by responses although not, or no longer, in the cache.
    Pinned = 2,
    /// Held by nobody but the queue of what is to be written to disk (and perhaps by responses).
    DiskQueue = 3,
}

impl Use {
    const ALL: [Self; 4] = [Self::Filling, Self::Cached, Self::Pinned, Self::DiskQueue];
}

/// The account itself.
#[derive(Debug)]
pub struct Ledger {
    account: Mutex<Account>,
    in_flight: Semaphore,
    in_flight_bytes: u32,
    reserve: Semaphore,
    patience: Duration,
    /// Told when bytes are withheld: the cache has to let go of some.
    cramped: Notify,
    /// Whether fills are refused for want of memory.
    shedding: AtomicBool,
}

/// What is held, and what that leaves.
#[derive(Debug)]
struct Account {
    held: Held,
    /// Bytes that have left the in-flight share and are not freed yet.
    landed: u64,
    /// What they may come to.
    room: u64,
    /// What is kept from the in-flight share because they are more.
    withheld: u64,
}

impl Account {
    /// Of `released` bytes of the in-flight share and those withheld, what goes back to it now.
    fn settle(&mut self, released: u64) -> u64 {
        let due = released.saturating_add(self.withheld);
        self.withheld = self.landed.saturating_sub(self.room).min(due);
        due.saturating_sub(self.withheld)
    }
}

/// Bytes held for each use, at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    /// See [`Use::Filling`].
    pub filling: u64,
    /// See [`Use::Cached`].
    pub cached: u64,
    /// See [`Use::Pinned`].
    pub pinned: u64,
    /// See [`Use::DiskQueue`].
    pub disk_queue: u64,
}

impl Held {
    /// All payload bytes.
    pub const fn live(self) -> u64 {
        self.filling.saturating_add(self.cached).saturating_add(self.pinned).saturating_add(self.disk_queue)
    }

    const fn of(&mut self, of: Use) -> &mut u64 {
        match of {
            Use::Filling => &mut self.filling,
            Use::Cached => &mut self.cached,
            Use::Pinned => &mut self.pinned,
            Use::DiskQueue => &mut self.disk_queue,
        }
    }

    const fn book(&mut self, from: Option<Use>, to: Option<Use>, bytes: u64) {
        if let Some(to) = to {
            let held = self.of(to);
            *held = held.saturating_add(bytes);
        }
        if let Some(from) = from {
            let held = self.of(from);
            *held = held.saturating_sub(bytes);
        }
    }
}

impl Ledger {
    /// An account of `room` bytes, beside which fills may hold `in_flight` bytes at once, a share of it in reserve, and
    /// wait up to `patience` for the reserve.
    pub fn new(room: u64, in_flight: u64, patience: Duration) -> Arc<Self> {
        let in_flight_bytes = u32::try_from(in_flight).unwrap_or(u32::MAX);
        let reserve = in_flight_bytes / RESERVE_SHARE;
        let in_flight_bytes = in_flight_bytes.saturating_sub(reserve);
        Arc::new(Self {
            account: Mutex::new(Account { held: Held::default(), landed: 0, room, withheld: 0 }),
            in_flight: Semaphore::new(usize::try_from(in_flight_bytes).unwrap_or(usize::MAX)),
            in_flight_bytes,
            reserve: Semaphore::new(usize::try_from(reserve).unwrap_or(usize::MAX)),
            patience,
            cramped: Notify::new(),
            shedding: AtomicBool::new(false),
        })
    }

    /// Permission to fill `bytes`; waits its turn for a while. Who gets none can go on with [`Self::grant_small`].
    ///
    /// Never wait for a second grant while holding a first: all holders could then be waiting, and none would release.
    pub async fn grant(self: &Arc<Self>, bytes: u64) -> Result<Grant, Error> {
        if self.shedding.load(Ordering::Relaxed) {
            return Err(Error::new(Kind::Overloaded(LIMIT), "resident memory is at its limit"));
        }
        let bytes = u32::try_from(bytes).ok().filter(|bytes| *bytes <= self.in_flight_bytes);
        let bytes = bytes.ok_or_else(|| overloaded("memory.in_flight is smaller than one extent"))?;
        self.wait(Share::InFlight, bytes, self.patience.min(GRANT_PATIENCE)).await
    }

    /// Permission to fill a small piece, out of the reserve.
    pub async fn grant_small(self: &Arc<Self>, bytes: u64) -> Result<Grant, Error> {
        let bytes = u32::try_from(bytes).map_err(|_| overloaded("a piece is too large for the reserve"))?;
        self.wait(Share::Reserve, bytes, self.patience).await
    }

    async fn wait(self: &Arc<Self>, share: Share, bytes: u32, patience: Duration) -> Result<Grant, Error> {
        match timeout(patience, self.semaphore(share).acquire_many(bytes)).await {
            Ok(Ok(permit)) => {
                permit.forget();
                Ok(Grant { ledger: Arc::clone(self), share, bytes: u64::from(bytes) })
            }
            Ok(Err(_)) => Err(Error::new(Kind::Internal, "the ledger is closed")),
            Err(_) => Err(overloaded("no memory for a fill in bounded time")),
        }
    }

    const fn semaphore(&self, share: Share) -> &Semaphore {
        match share {
            Share::InFlight => &self.in_flight,
            Share::Reserve => &self.reserve,
        }
    }

    /// Bytes held for each use, now.
    pub fn held(&self) -> Held {
        self.lock().held
    }

    /// Bytes of the in-flight share that are free.
    pub fn in_flight_free(&self) -> u64 {
        self.in_flight.available_permits() as u64
    }

    /// Bytes kept from the in-flight share because more has landed than there is room for.
    pub fn withheld(&self) -> u64 {
        self.lock().withheld
    }

    /// What is left for the cache: the room, less what has landed and is not, or no longer, the cache's.
    pub fn room_for_cache(&self) -> u64 {
        let account = self.lock();
        account.room.saturating_sub(account.landed.saturating_sub(account.held.cached))
    }

    /// Waits until bytes are withheld.
    pub async fn cramped(&self) {
        self.cramped.notified().await;
    }

    /// Refuses fills from now on, or grants them again.
    pub fn shed(&self, shedding: bool) {
        self.shedding.store(shedding, Ordering::Relaxed);
    }

    /// Allows what has landed to come to so many bytes from now on.
    pub fn set_room(&self, room: u64) {
        let mut account = self.lock();
        account.room = room;
        let over = account.landed.saturating_sub(room).saturating_sub(account.withheld);
        account.withheld = account.withheld.saturating_add(self.withdraw(over));
        self.release(account, 0);
    }

    /// Takes up to so many bytes of the in-flight share that nobody has; says how many.
    fn withdraw(&self, bytes: u64) -> u64 {
        loop {
            let free = u32::try_from(self.in_flight_free().min(bytes)).unwrap_or(u32::MAX);
            if free == 0 {
                return 0;
            }
            // A fill may have been faster than these two steps.
            if let Ok(permits) = self.in_flight.try_acquire_many(free) {
                permits.forget();
                return u64::from(free);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives bytes back to their share: to the in-flight share as far as none have to be withheld.
    fn give_back(&self, account: MutexGuard<'_, Account>, share: Share, bytes: u64) {
        match share {
            Share::InFlight => self.release(account, bytes),
            Share::Reserve => {
                drop(account);
                self.reserve.add_permits(usize::try_from(bytes).unwrap_or(usize::MAX));
            }
        }
    }

    fn release(&self, mut account: MutexGuard<'_, Account>, bytes: u64) {
        let free = account.settle(bytes);
        let cramped = account.withheld > 0;
        drop(account);
        self.in_flight.add_permits(usize::try_from(free).unwrap_or(usize::MAX));
        if cramped {
            self.cramped.notify_one();
        }
    }
}

/// What fills draw on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Share {
    InFlight,
    Reserve,
}

/// The part of the in-flight bytes that is kept in reserve.
const RESERVE_SHARE: u32 = 8;

/// How long a fill waits for the share before its read goes on in small pieces.
const GRANT_PATIENCE: Duration = Duration::from_secs(1);

const IN_FLIGHT: &str = "memory.in_flight";
const LIMIT: &str = "memory.limit";

fn overloaded(detail: &'static str) -> Error {
    Error::new(Kind::Overloaded(IN_FLIGHT), detail)
}

/// Whether a fill got no share: then a read can be opened in small pieces, out of the reserve.
pub fn got_no_share(error: &Error) -> bool {
    error.kind() == Kind::Overloaded(IN_FLIGHT)
}

/// Whether a fill failed for want of memory of any kind: a read that is open can go on in small pieces.
pub fn is_for_want_of_memory(error: &Error) -> bool {
    matches!(error.kind(), Kind::Overloaded(IN_FLIGHT | LIMIT))
}

/// Permission to fill some bytes; what is not used is given back on drop.
#[derive(Debug)]
pub struct Grant {
    ledger: Arc<Ledger>,
    share: Share,
    bytes: u64,
}

impl Grant {
    /// Turns `bytes` of it into a charge; `None` when it has not so many left.
    pub fn charge(&mut self, bytes: u64) -> Option<Charge> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        self.ledger.lock().held.book(None, Some(Use::Filling), bytes);
        Some(Charge { ledger: Arc::clone(&self.ledger), share: self.share, bytes, state: AtomicU8::new(GRANTED) })
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.ledger.give_back(self.ledger.lock(), self.share, self.bytes);
    }
}

/// Set while the charge still holds its part of the in-flight share; the lower bits are the [`Use`].
const GRANTED: u8 = 0x80;

/// Set while the bytes wait to be written to disk, whoever else holds them.
const QUEUED: u8 = 0x40;

/// Bytes that are in memory. Held by the buffer itself, so that it ends when the last reader of the buffer does.
#[derive(Debug)]
pub struct Charge {
    ledger: Arc<Ledger>,
    share: Share,
    bytes: u64,
    state: AtomicU8,
}

impl Charge {
    /// Bytes charged.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The cache has taken the bytes: they leave the in-flight share.
    pub fn cached(&self) {
        self.shift(|state| Use::Cached as u8 | state & QUEUED);
    }

    /// The cache does not hold the bytes. Those that it never held stay in the in-flight share.
    pub fn pinned(&self) {
        self.shift(|state| {
            let of = if state & QUEUED == 0 { Use::Pinned } else { Use::DiskQueue };
            of as u8 | state & (GRANTED | QUEUED)
        });
    }

    /// The bytes wait to be written to disk.
    pub fn queued(&self) {
        self.shift(|state| state | QUEUED);
    }

    /// They no longer do.
    pub fn written(&self) {
        self.shift(|state| match use_of(state) {
            Use::DiskQueue => Use::Pinned as u8 | state & GRANTED,
            _ => state & !QUEUED,
        });
    }

    fn shift(&self, to: impl Fn(u8) -> u8) {
        let mut account = self.ledger.lock();
        let before = self.state.load(Ordering::Relaxed);
        let after = to(before);
        self.state.store(after, Ordering::Relaxed);
        account.held.book(Some(use_of(before)), Some(use_of(after)), self.bytes);
        if before & GRANTED > after & GRANTED {
            account.landed = account.landed.saturating_add(self.bytes);
            self.ledger.give_back(account, self.share, self.bytes);
        }
    }
}

fn use_of(state: u8) -> Use {
    Use::ALL.into_iter().find(|of| *of as u8 == state & !(GRANTED | QUEUED)).unwrap_or(Use::Filling)
}

impl Drop for Charge {
    fn drop(&mut self) {
        let state = *self.state.get_mut();
        let mut account = self.ledger.lock();
        account.held.book(Some(use_of(state)), None, self.bytes);
        if state & GRANTED == 0 {
            account.landed = account.landed.saturating_sub(self.bytes);
            self.ledger.release(account, 0);
        } else {
            self.ledger.give_back(account, self.share, self.bytes);
        }
    }
}
