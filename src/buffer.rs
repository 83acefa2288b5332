//! An extent's bytes: allocated once at their final size, weighed as the allocator weighs them, charged until freed.

pub mod arena;

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Kind};
use crate::ledger::{Charge, Grant};
use arena::{Arena, Block};

/// Heap bytes of an [`Extent`] beside its payload: the shared record that holds block and charge.
const RECORD_BYTES: usize = size_of::<Filled>() + 2 * size_of::<usize>();

/// A buffer that is being filled. It cannot grow.
#[derive(Debug)]
pub struct ExactBuffer {
    block: Block,
    charge: Charge,
}

/// The buffer's length is not its capacity: too few bytes, too many, or a capacity that was computed wrongly.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{length} bytes in a buffer of {capacity}")]
pub struct Inexact {
    /// Bytes there are (or would be).
    pub length: usize,
    /// Bytes the buffer was made for.
    pub capacity: usize,
}

/// Checks invariant 2: length equals capacity.
///
/// It is the check that the server's founding bug would have failed: each buffer was made two bytes too small, grew to
/// twice its size, and held the right bytes.
pub const fn check_exact(length: usize, capacity: usize) -> Result<(), Inexact> {
    if length == capacity { Ok(()) } else { Err(Inexact { length, capacity }) }
}

impl ExactBuffer {
    /// A buffer for exactly `length` bytes, its memory taken out of the grant. A failed allocation is an error.
    pub fn allocate(arena: &Arc<Arena>, length: u64, grant: &mut Grant) -> Result<Self, Error> {
        let weight = arena.weight_of(length);
        let charge = grant
            .charge(weight)
            .ok_or_else(|| Error::new(Kind::Internal, format!("a grant has no {weight} bytes left for a buffer")))?;
        let block = usize::try_from(length).ok().and_then(|length| Block::allocate(arena, length));
        let block = block
            .ok_or_else(|| Error::new(Kind::Overloaded("memory.limit"), format!("cannot allocate {length} bytes")))?;
        Ok(Self { block, charge })
    }

    /// Bytes still missing.
    pub fn missing(&self) -> usize {
        self.block.capacity() - self.block.as_slice().len()
    }

    /// Appends `bytes`; a surplus byte is refused and nothing is written.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), Inexact> {
        let length = self.block.as_slice().len() + bytes.len();
        self.block.append(bytes).map_err(|arena::Full| Inexact { length, capacity: self.block.capacity() })
    }

    /// Forgets what was written: it turned out not to be what was asked for.
    pub fn clear(&mut self) {
        self.block.clear();
    }

    /// Ends the fill. Callers ask [`Self::missing`] first; an inexact buffer here is a fault of this program.
    pub fn finish(self) -> Result<Extent, Inexact> {
        let (length, capacity) = (self.block.as_slice().len(), self.block.capacity());
        debug_assert_eq!(length, capacity, "a buffer's length is not its capacity");
        check_exact(length, capacity)?;
        Ok(Extent(Arc::new(Filled { block: self.block, charge: self.charge })))
    }
}

/// A whole extent's bytes, shared by the cache and any number of responses.
///
/// It cannot be a slice of something bigger, so the cache cannot keep a bigger parent alive.
#[derive(Clone, Debug)]
pub struct Extent(Arc<Filled>);

#[derive(Debug)]
struct Filled {
    block: Block,
    charge: Charge,
}

impl Extent {
    /// The payload. Memory and charge end when the last of these and the last `Extent` are dropped.
    pub fn bytes(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.as_ref().len()
    }

    /// Whether there are no bytes; an extent always has some.
    pub fn is_empty(&self) -> bool {
        self.as_ref().is_empty()
    }

    /// What the allocator gave for it, in bytes: payload and record.
    pub fn heap_bytes(&self) -> usize {
        usize::try_from(self.charge().bytes()).unwrap_or(usize::MAX).saturating_add(RECORD_BYTES)
    }

    /// The charge that its memory is booked under.
    pub fn charge(&self) -> &Charge {
        &self.0.charge
    }
}

impl AsRef<[u8]> for Extent {
    fn as_ref(&self) -> &[u8] {
        self.0.block.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;
    use std::time::Duration;

    struct Setup {
        arena: Arc<Arena>,
        ledger: Arc<Ledger>,
    }

    fn setup() -> Setup {
        Setup {
            arena: Arena::new(1 << 20, true).unwrap(),
            ledger: Ledger::new(1 << 20, 1 << 20, Duration::from_secs(1)),
        }
    }

    #[tokio::test]
    async fn a_buffer_is_charged_until_its_last_bytes_are_dropped() {
        let Setup { arena, ledger } = setup();
        let free = ledger.in_flight_free();
        let mut grant = ledger.grant(8192).await.unwrap();
        let mut buffer = ExactBuffer::allocate(&arena, 5000, &mut grant).unwrap();
        drop(grant);
        buffer.append(&[7; 4000]).unwrap();
        assert_eq!(buffer.missing(), 1000);
        buffer.append(&[8; 1000]).unwrap();
        let extent = buffer.finish().unwrap();
        let slice = extent.bytes().slice(3999..4001);
        drop(extent);
        assert_eq!(slice.as_ref(), [7, 8]);
        assert_eq!(ledger.held().live(), arena.weight_of(5000));
        drop(slice);
        assert_eq!(ledger.held().live(), 0);
        assert_eq!(ledger.in_flight_free(), free);
    }

    #[tokio::test]
    async fn a_surplus_byte_is_refused() {
        let Setup { arena, ledger } = setup();
        let mut grant = ledger.grant(4096).await.unwrap();
        let mut buffer = ExactBuffer::allocate(&arena, 10, &mut grant).unwrap();
        buffer.append(&[1; 10]).unwrap();
        assert_eq!(buffer.append(&[2]), Err(Inexact { length: 11, capacity: 10 }));
        assert_eq!(buffer.finish().unwrap().as_ref(), [1; 10]);
    }

    #[tokio::test]
    #[should_panic(expected = "length is not its capacity")]
    #[cfg(debug_assertions)]
    async fn an_unfinished_buffer_is_a_fault_of_this_program() {
        let Setup { arena, ledger } = setup();
        let mut grant = ledger.grant(4096).await.unwrap();
        let _ = ExactBuffer::allocate(&arena, 10, &mut grant).unwrap().finish();
    }

    #[tokio::test]
    async fn an_absurd_length_is_an_error() {
        let Setup { arena, ledger } = setup();
        let mut grant = ledger.grant(4096).await.unwrap();
        assert!(ExactBuffer::allocate(&arena, u64::MAX, &mut grant).is_err());
        assert!(Block::allocate(&arena, 1 << 60).is_none());
    }

    #[test]
    fn weight_is_what_the_allocator_gives() {
        let Setup { arena, .. } = setup();
        assert_eq!(arena.weight_of(1 << 20), 1 << 20);
        assert_eq!(arena.weight_of((1 << 20) + 1), (1 << 20) + 4096);
        assert_eq!(arena.weight_of(4097), 5120);
    }
}
