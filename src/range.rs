//! Half-open byte ranges: what is asked for, what it means for an object of a known size, and how it is cut.
//!
//! A range is `start..end` with `start < end`, in bytes, everywhere in this program. Inclusive positions exist in the
//! text of HTTP only; [`ByteRange::last`] is the single place where one is subtracted.
#![deny(clippy::arithmetic_side_effects)]

use std::fmt;
use std::num::NonZeroU64;
use std::ops::Range;

/// A non-empty half-open range of bytes, `start <= position < end`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteRange {
    start: u64,
    end: u64,
}

impl ByteRange {
    /// `start..end`, or `None` when that holds no byte.
    pub const fn new(start: u64, end: u64) -> Option<Self> {
        if start < end { Some(Self { start, end }) } else { None }
    }

    /// The first byte's offset.
    pub const fn start(self) -> u64 {
        self.start
    }

    /// The offset after the last byte.
    pub const fn end(self) -> u64 {
        self.end
    }

    /// How many bytes it holds: at least one.
    #[expect(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub const fn len(self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// The last byte's offset: the inclusive position that HTTP writes (RFC 9110 section 14.1.2).
    pub const fn last(self) -> u64 {
        self.end.saturating_sub(1)
    }

    /// The part of this range inside an object of `size` bytes.
    pub const fn within(self, size: u64) -> Option<Self> {
        Self::new(self.start, if self.end < size { self.end } else { size })
    }

    /// At most the first `length` bytes.
    #[must_use]
    pub const fn head(self, length: NonZeroU64) -> Self {
        let end = self.start.saturating_add(length.get());
        Self { start: self.start, end: if end < self.end { end } else { self.end } }
    }

    /// From its start to `end`, if that is further than its own end.
    #[must_use]
    pub const fn until(self, end: u64) -> Self {
        Self { start: self.start, end: if end > self.end { end } else { self.end } }
    }

    /// Cuts it, from its own start, into pieces of `length` bytes and a last shorter one.
    ///
    /// The cut depends on the range alone, so the same range is always cut the same way.
    pub const fn cut(self, length: NonZeroU64) -> Cut {
        Cut { rest: Some(self), length }
    }
}

impl From<ByteRange> for Range<u64> {
    fn from(range: ByteRange) -> Self {
        range.start..range.end
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// The pieces of a [`ByteRange`], in order; see [`ByteRange::cut`].
#[derive(Clone, Debug)]
pub struct Cut {
    rest: Option<ByteRange>,
    length: NonZeroU64,
}

impl Cut {
    /// A cut that has no pieces.
    pub const fn empty() -> Self {
        Self { rest: None, length: NonZeroU64::MIN }
    }

    /// The same bytes, cut into other lengths from here.
    #[must_use]
    pub const fn anew(self, length: NonZeroU64) -> Self {
        Self { rest: self.rest, length }
    }
}

impl Iterator for Cut {
    type Item = ByteRange;

    fn next(&mut self) -> Option<ByteRange> {
        let rest = self.rest?;
        let piece = rest.head(self.length);
        self.rest = ByteRange::new(piece.end, rest.end);
        Some(piece)
    }
}

/// What a client asks for, before the object's size is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RangeSpec {
    /// No range: the whole object.
    Whole,
    /// From an offset to the end.
    From(u64),
    /// A range; it may reach past the end of the object.
    Part(ByteRange),
    /// The last so many bytes.
    Suffix(u64),
}

/// What a [`RangeSpec`] means for an object of a known size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resolved {
    /// The whole object, which may be empty: 200.
    Whole,
    /// A part of it (perhaps all of it, asked for as a range): 206.
    Part(ByteRange),
    /// No byte of the object is in the range: 416.
    Unsatisfiable,
}

impl RangeSpec {
    /// Resolves it against `size` bytes (RFC 9110 section 14.1.2).
    ///
    /// A non-zero suffix of an empty object is the whole object, as S3 answers it: readers of file tails expect 200.
    pub const fn resolve(self, size: u64) -> Resolved {
        let part = match self {
            Self::Whole => return Resolved::Whole,
            Self::Suffix(length) if size == 0 && length > 0 => return Resolved::Whole,
            Self::Suffix(length) => ByteRange::new(size.saturating_sub(length), size),
            Self::From(start) => ByteRange::new(start, size),
            Self::Part(range) => range.within(size),
        };
        match part {
            Some(range) => Resolved::Part(range),
            None => Resolved::Unsatisfiable,
        }
    }
}

impl Resolved {
    /// The bytes to send of an object of `size` bytes; `None` when there are none.
    pub const fn bytes(self, size: u64) -> Option<ByteRange> {
        match self {
            Self::Whole => ByteRange::new(0, size),
            Self::Part(range) => Some(range),
            Self::Unsatisfiable => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range(start: u64, end: u64) -> ByteRange {
        ByteRange::new(start, end).unwrap()
    }

    #[test]
    fn a_range_holds_at_least_one_byte() {
        assert_eq!(ByteRange::new(5, 5), None);
        assert_eq!(ByteRange::new(6, 5), None);
        assert_eq!(range(5, 6).len(), 1);
        assert_eq!(range(0, u64::MAX).last(), u64::MAX - 1);
    }

    #[test]
    fn resolves_as_rfc_9110_says() {
        let part = |start, end| Resolved::Part(range(start, end));
        for (spec, size, expected) in [
            (RangeSpec::Whole, 0, Resolved::Whole),
            (RangeSpec::Whole, 10, Resolved::Whole),
            (RangeSpec::Suffix(2000), 10, part(0, 10)),
            (RangeSpec::Suffix(3), 10, part(7, 10)),
            (RangeSpec::Suffix(0), 10, Resolved::Unsatisfiable),
            (RangeSpec::Suffix(0), 0, Resolved::Unsatisfiable),
            (RangeSpec::Suffix(5), 0, Resolved::Whole),
            (RangeSpec::From(0), 0, Resolved::Unsatisfiable),
            (RangeSpec::From(9), 10, part(9, 10)),
            (RangeSpec::From(10), 10, Resolved::Unsatisfiable),
            (RangeSpec::Part(range(0, 1)), 10, part(0, 1)),
            (RangeSpec::Part(range(8, 101)), 10, part(8, 10)),
            (RangeSpec::Part(range(10, 21)), 10, Resolved::Unsatisfiable),
            (RangeSpec::Part(range(0, u64::MAX)), u64::MAX, part(0, u64::MAX)),
        ] {
            assert_eq!(spec.resolve(size), expected, "{spec:?} of {size}");
        }
    }

    fn any_range() -> impl Strategy<Value = ByteRange> {
        (any::<u64>(), any::<u64>()).prop_filter_map("empty", |(a, b)| ByteRange::new(a.min(b), a.max(b)))
    }

    fn any_spec() -> impl Strategy<Value = RangeSpec> {
        prop_oneof![
            Just(RangeSpec::Whole),
            any::<u64>().prop_map(RangeSpec::From),
            any_range().prop_map(RangeSpec::Part),
            any::<u64>().prop_map(RangeSpec::Suffix),
        ]
    }

    proptest! {
        #[test]
        fn what_is_resolved_lies_inside_the_object(spec in any_spec(), size: u64) {
            if let Some(bytes) = spec.resolve(size).bytes(size) {
                prop_assert!(bytes.start() < bytes.end() && bytes.end() <= size);
            }
        }

        #[test]
        fn a_cut_is_gapless_and_exact(range in any_range(), pieces in 1u64..50, odd in 0u64..50) {
            let length = NonZeroU64::new(range.len().div_euclid(pieces).saturating_add(odd).saturating_add(1)).unwrap();
            let mut at = range.start();
            for piece in range.cut(length) {
                prop_assert_eq!(piece.start(), at);
                prop_assert!(piece.len() <= length.get());
                at = piece.end();
            }
            prop_assert_eq!(at, range.end());
        }
    }
}
