//! Flights: one piece of work that any number of callers wait for.
//!
//! Whoever finds a key in flight joins it; whoever does not leads. The leader's work belongs to nobody's connection: it
//! learns that all have left from an [`Interest`], and whatever happens to it, everyone who waits gets an answer.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::SetOnce;
use tokio_util::sync::{CancellationToken, DropGuard};

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
    interest: Weak<DropGuard>,
}

impl<K, V> Default for Flights<K, V> {
    fn default() -> Self {
        Self { flights: Mutex::default() }
    }
}

impl<K: Eq + Hash + Clone, V> Flights<K, V> {
    /// Looks at the flights, so that joining one and beginning one are a single step for everybody else.
    pub fn look(self: &Arc<Self>) -> Tower<'_, K, V> {
        Tower { of: self, flights: self.flights.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Flights under way.
    pub fn count(&self) -> usize {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

/// The flights while one caller looks at them. Not to be held across an await.
#[derive(Debug)]
pub struct Tower<'a, K, V> {
    of: &'a Arc<Flights<K, V>>,
    flights: MutexGuard<'a, HashMap<K, Flight<V>>>,
}

impl<K: Eq + Hash + Clone, V> Tower<'_, K, V> {
    /// Joins the flight of that key, if there is one that has not been given up.
    pub fn join(&self, key: &K) -> Option<Waiter<V>> {
        let flight = self.flights.get(key)?;
        Some(Waiter { cell: Arc::clone(&flight.cell), interest: flight.interest.upgrade()? })
    }

    /// Begins a flight; one that was given up makes room.
    pub fn lead(&mut self, key: K, interest: &Interest) -> (Landing<K, V>, Waiter<V>) {
        let cell = Arc::new(Cell::new());
        let flight = Flight { cell: Arc::clone(&cell), interest: Arc::downgrade(&interest.guard) };
        self.flights.insert(key.clone(), flight);
        let landing = Landing { flights: Arc::clone(self.of), key, cell: Arc::clone(&cell) };
        (landing, Waiter { cell, interest: Arc::clone(&interest.guard) })
    }
}

/// Shared by all who wait for the same work: when the last of them leaves, its token is cancelled.
#[derive(Debug)]
pub struct Interest {
    token: CancellationToken,
    guard: Arc<DropGuard>,
}

impl Interest {
    /// The interest of the caller who leads.
    pub fn new() -> Self {
        let token = CancellationToken::new();
        let guard = Arc::new(token.clone().drop_guard());
        Self { token, guard }
    }

    /// For the work: cancelled when nobody waits for it any more.
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }
}

impl Default for Interest {
    fn default() -> Self {
        Self::new()
    }
}

/// Waits for a flight, and keeps it going.
#[derive(Debug)]
pub struct Waiter<V> {
    cell: Arc<Cell<V>>,
    interest: Arc<DropGuard>,
}

impl<V> Clone for Waiter<V> {
    fn clone(&self) -> Self {
        Self { cell: Arc::clone(&self.cell), interest: Arc::clone(&self.interest) }
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
        let mut flights = self.flights.flights.lock().unwrap_or_else(PoisonError::into_inner);
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
        let interest = Interest::new();
        let (landing, first) = flights.look().lead(1, &interest);
        let second = flights.look().join(&1).unwrap();
        assert!(flights.look().join(&2).is_none());
        landing.land(Ok(7));
        assert_eq!((first.wait().await.unwrap(), second.wait().await.unwrap()), (7, 7));
        assert!(flights.look().join(&1).is_none());
        assert_eq!(flights.count(), 0);
    }

    #[tokio::test]
    async fn a_leader_that_vanishes_releases_those_who_wait() {
        let flights = flights();
        let (landing, waiter) = flights.look().lead(1, &Interest::new());
        drop(landing);
        assert_eq!(waiter.wait().await.unwrap_err().kind(), Kind::Internal);
    }

    #[tokio::test]
    async fn work_is_given_up_when_the_last_one_leaves() {
        let flights = flights();
        let interest = Interest::new();
        let token = interest.token();
        let (old, first) = flights.look().lead(1, &interest);
        drop(interest);
        let second = flights.look().join(&1).unwrap();
        drop(first);
        assert!(!token.is_cancelled());
        drop(second);
        assert!(token.is_cancelled());

        assert!(flights.look().join(&1).is_none(), "nobody joins what was given up");
        let interest = Interest::new();
        let (new, waiter) = flights.look().lead(1, &interest);
        drop(old);
        assert!(flights.look().join(&1).is_some(), "the end of the old flight leaves the new one alone");
        new.land(Ok(1));
        assert_eq!(waiter.wait().await.unwrap(), 1);
    }
}
