//! Flights: one piece of work that any number of callers wait for.
//!
//! Whoever finds a key in flight joins it; whoever does not leads. The leader's work belongs to nobody's connection: it
//! asks an [`Interest`] whether anybody still waits, and whatever happens to it, everyone who waits gets an answer.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::SetOnce;

use crate::error::{Error, Kind};

type Cell<V> = SetOnce<Result<V, Error>>;

/// The flights under way, by key.
#[derive(Debug)]
pub struct Flights<K, V> {
    flights: Mutex<HashMap<K, Flight<V>>>,
}

#[derive(Debug)]
struct Flight<V> {
    cell: Arc<Cell<V>>,
    interest: Arc<Interest>,
}

impl<K, V> Default for Flights<K, V> {
    fn default() -> Self {
        Self { flights: Mutex::default() }
    }
}

impl<K: Eq + Hash + Clone, V> Flights<K, V> {
    /// Looks at the flights, so that joining, beginning and giving up are single steps for everybody else.
    pub fn look(self: &Arc<Self>) -> Tower<'_, K, V> {
        Tower { of: self, flights: self.lock() }
    }
}

impl<K, V> Flights<K, V> {
    /// Flights under way.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Flight<V>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The flights while one caller looks at them. Not to be held across an await.
#[derive(Debug)]
pub struct Tower<'a, K, V> {
    of: &'a Arc<Flights<K, V>>,
    flights: MutexGuard<'a, HashMap<K, Flight<V>>>,
}

impl<K: Eq + Hash + Clone, V> Tower<'_, K, V> {
    /// Whether there is a flight of that key.
    pub fn has(&self, key: &K) -> bool {
        self.flights.contains_key(key)
    }

    /// Joins the flight of that key, if there is one.
    pub fn join(&self, key: &K) -> Option<Waiter<V>> {
        let Flight { cell, interest } = self.flights.get(key)?;
        Some(Waiter::new(cell, interest))
    }

    /// Begins a flight. Work on several flights shares one interest.
    pub fn lead(&mut self, key: K, interest: &Arc<Interest>) -> (Landing<K, V>, Waiter<V>) {
        let (landing, waiter) = self.fly_alone(key, interest);
        let flight = Flight { cell: Arc::clone(&landing.cell), interest: Arc::clone(interest) };
        self.flights.insert(landing.key.clone(), flight);
        (landing, waiter)
    }

    /// Begins a flight that nobody can join.
    pub fn fly_alone(&mut self, key: K, interest: &Arc<Interest>) -> (Landing<K, V>, Waiter<V>) {
        let cell = Arc::new(Cell::new());
        let waiter = Waiter::new(&cell, interest);
        (Landing { flights: Arc::clone(self.of), key, cell }, waiter)
    }

    /// Gives flights up if nobody waits for any of them; whoever wants their keys later leads.
    pub fn give_up<'l>(&mut self, landings: impl Iterator<Item = &'l Landing<K, V>>, interest: &Interest) -> bool
    where
        K: 'l,
        V: 'l,
    {
        // Joining takes this lock, so that nobody can have joined when it is found that nobody waits.
        if interest.is_wanted() {
            return false;
        }
        for Landing { key, cell, .. } in landings {
            if self.flights.get(key).is_some_and(|flight| Arc::ptr_eq(&flight.cell, cell)) {
                self.flights.remove(key);
            }
        }
        true
    }
}

/// Counts those who wait for the same work.
#[derive(Debug, Default)]
pub struct Interest {
    waiters: AtomicUsize,
}

impl Interest {
    /// Whether anybody waits. A `no` is final only in [`Tower::give_up`].
    pub fn is_wanted(&self) -> bool {
        self.waiters.load(Ordering::Acquire) > 0
    }
}

/// Says that somebody wants the work, whether he waits for it now or not; the work goes on while this lives.
#[derive(Debug)]
pub struct Wanted(Arc<Interest>);

impl Wanted {
    fn new(interest: &Arc<Interest>) -> Self {
        interest.waiters.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(interest))
    }
}

impl Clone for Wanted {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits for a flight, and keeps it going. It holds what has landed: whoever does not wait now keeps a [`Wanted`] instead.
#[derive(Clone, Debug)]
pub struct Waiter<V> {
    cell: Arc<Cell<V>>,
    wanted: Wanted,
}

impl<V> Waiter<V> {
    fn new(cell: &Arc<Cell<V>>, interest: &Arc<Interest>) -> Self {
        Self { cell: Arc::clone(cell), wanted: Wanted::new(interest) }
    }

    /// The wish for all the work that this flight is a part of.
    pub fn wanted(&self) -> Wanted {
        self.wanted.clone()
    }
}

impl<V: Clone> Waiter<V> {
    /// What the flight brought.
    pub async fn wait(&self) -> Result<V, Error> {
        self.cell.wait().await.clone()
    }
}

/// The leader's end of a flight. Dropped without landing, it lands as an internal error, so that nobody waits for ever.
#[derive(Debug)]
pub struct Landing<K: Eq + Hash, V> {
    flights: Arc<Flights<K, V>>,
    key: K,
    cell: Arc<Cell<V>>,
}

impl<K: Eq + Hash, V> Landing<K, V> {
    /// The key of the flight.
    pub fn key(&self) -> &K {
        &self.key
    }

    /// Ends the flight: those who wait get the answer, those who come later begin anew.
    pub fn land(self, answer: Result<V, Error>) {
        // A cell is set once: by its only landing, here or in `drop`.
        let _ = self.cell.set(answer);
    }
}

impl<K: Eq + Hash, V> Drop for Landing<K, V> {
    fn drop(&mut self) {
        if !self.cell.initialized() {
            let _ = self.cell.set(Err(Error::new(Kind::Internal, "a fill ended without an answer")));
        }
        let mut flights = self.flights.lock();
        // Another flight may have taken the place of one that was given up.
        if flights.get(&self.key).is_some_and(|flight| Arc::ptr_eq(&flight.cell, &self.cell)) {
            flights.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flights() -> Arc<Flights<u8, u32>> {
        Arc::default()
    }

    #[tokio::test]
    async fn all_get_what_the_leader_lands() {
        let flights = flights();
        let (landing, first) = flights.look().lead(1, &Arc::default());
        let second = flights.look().join(&1).unwrap();
        assert!(flights.look().join(&2).is_none());
        landing.land(Ok(7));
        assert_eq!((first.wait().await.unwrap(), second.wait().await.unwrap()), (7, 7));
        assert!(!flights.look().has(&1));
        assert_eq!(flights.count(), 0);
    }

    #[tokio::test]
    async fn a_leader_that_vanishes_releases_those_who_wait() {
        let flights = flights();
        let (landing, waiter) = flights.look().lead(1, &Arc::default());
        drop(landing);
        assert_eq!(waiter.wait().await.unwrap_err().kind(), Kind::Internal);
    }

    #[tokio::test]
    async fn work_is_given_up_only_when_nobody_waits() {
        let flights = flights();
        let interest = Arc::default();
        let (old, first) = flights.look().lead(1, &interest);
        let second = first.clone();
        drop(first);
        assert!(!flights.look().give_up([&old].into_iter(), &interest));
        drop(second);
        assert!(!interest.is_wanted());

        let revived = flights.look().join(&1).unwrap();
        assert!(!flights.look().give_up([&old].into_iter(), &interest), "it was joined before it was given up");
        drop(revived);
        assert!(flights.look().give_up([&old].into_iter(), &interest));
        assert!(!flights.look().has(&1));

        let (new, waiter) = flights.look().lead(1, &Arc::default());
        drop(old);
        assert!(flights.look().has(&1), "the end of the old flight leaves the new one alone");
        new.land(Ok(1));
        assert_eq!(waiter.wait().await.unwrap(), 1);
    }
}
