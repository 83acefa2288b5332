//! How many entries the disk tier holds: foyer does not say, and its index is memory.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Steps of the count: entries are forgotten this share of the capacity at a time.
const STEPS: u64 = 64;

/// Counts entries by what was written last: blocks are reclaimed first in, first out, so what fits into the capacity
/// counted back from now is what is there.
#[derive(Debug)]
pub(super) struct Census {
    capacity: u64,
    entries_max: u64,
    /// Bytes and entries of each step, the oldest first.
    steps: Mutex<VecDeque<(u64, u64)>>,
}

impl Census {
    /// A census of a device that holds `recovered` entries somewhere.
    pub(super) fn new(capacity: u64, entries_max: u64, recovered: u64) -> Self {
        let each = (capacity / STEPS, recovered / STEPS);
        Self { capacity, entries_max, steps: Mutex::new((0..STEPS).map(|_| each).collect()) }
    }

    /// Counts an entry of `bytes`, unless there are as many as there may be.
    pub(super) fn admit(&self, bytes: u64) -> bool {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if steps.iter().map(|(_, entries)| entries).sum::<u64>() >= self.entries_max {
            return false;
        }
        let step = self.capacity / STEPS;
        match steps.back_mut().filter(|(written, _)| *written + bytes <= step) {
            Some((written, entries)) => (*written, *entries) = (*written + bytes, *entries + 1),
            None => steps.push_back((bytes, 1)),
        }
        while steps.iter().map(|(written, _)| written).sum::<u64>() > self.capacity {
            steps.pop_front();
        }
        true
    }

    pub(super) fn entries(&self) -> u64 {
        let steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.iter().map(|(_, entries)| entries).sum()
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_entries_make_room_and_too_many_are_refused() {
        let census = Census::new(64 * 1000, 200, 0);
        for _ in 0..1000 {
            assert!(census.admit(1000));
        }
        assert!((60..=64).contains(&census.entries()), "{}", census.entries());
        let census = Census::new(64 * 1000, 200, 128);
        assert_eq!(census.entries(), 128);
        let admitted = (0..1000).filter(|_| census.admit(1)).count();
        assert!((70..=76).contains(&admitted), "{admitted}");
    }
}
