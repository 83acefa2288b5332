//! What is known of objects, and whether it may still be believed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::cache::{Cache, Record};
use crate::config::Freshness;
use crate::error::{Error, Kind};
use crate::flight::Flights;
use crate::object::{Metadata, ObjectName};
use crate::store::{Head, Store};

/// How long `immutable` is said to be fresh: a year, the longest that HTTP caches honour by convention.
const IMMUTABLE_TTL: Duration = Duration::from_hours(8760);

/// The objects known.
#[derive(Debug)]
pub struct Directory {
    cache: Arc<Cache>,
    validations: Arc<Flights<ObjectName, Validated>>,
    tracker: TaskTracker,
}

/// What is known of an object.
#[derive(Clone, Debug)]
pub enum Known {
    /// It may be used.
    Fresh(Arc<Metadata>, Life),
    /// The store must be asked first: its freshness has run out.
    Stale(Arc<Metadata>),
    /// The store must be asked first, because the client wants it younger than it is.
    TooOld(Arc<Metadata>),
    /// Nothing.
    Nothing,
}

/// How old what is known is, and how much longer it is fresh.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Life {
    /// Since the store last said it.
    pub age: Duration,
    /// Until the store must be asked again.
    pub ttl: Duration,
}

/// What a store said when it was asked for an object's metadata.
#[derive(Clone, Debug)]
pub struct Validated {
    /// The current version.
    pub metadata: Arc<Metadata>,
    /// The status that said so: 304 when the version known is still the current one.
    pub status: u16,
}

impl Directory {
    /// A directory over what the cache remembers.
    pub fn new(cache: Arc<Cache>, tracker: TaskTracker) -> Self {
        Self { cache, validations: Arc::default(), tracker }
    }

    /// What is known of an object, under a store's freshness and the age that the client accepts.
    pub fn known(&self, name: &ObjectName, freshness: Freshness, max_age: Option<Duration>) -> Known {
        let Some(record) = self.cache.record(name) else { return Known::Nothing };
        let Record { metadata, validated_at, disproved } = record;
        if disproved {
            return Known::Stale(metadata);
        }
        let age = validated_at.elapsed();
        let lifetime = match freshness {
            Freshness::Immutable => IMMUTABLE_TTL,
            Freshness::For(lifetime) => lifetime,
            Freshness::Always => Duration::ZERO,
        };
        // What is known for no time at all is not fresh, however young it is.
        match lifetime.checked_sub(age).filter(|ttl| !ttl.is_zero()) {
            None if freshness != Freshness::Immutable => Known::Stale(metadata),
            _ if max_age.is_some_and(|max_age| max_age.is_zero() || age > max_age) => Known::TooOld(metadata),
            ttl => Known::Fresh(metadata, Life { age, ttl: ttl.unwrap_or(IMMUTABLE_TTL) }),
        }
    }

    /// The same, with what the disk remembers.
    pub async fn find(&self, name: &ObjectName, freshness: Freshness, max_age: Option<Duration>) -> Known {
        match self.known(name, freshness, max_age) {
            Known::Nothing if self.cache.recall(name).await.is_some() => self.known(name, freshness, max_age),
            known => known,
        }
    }

    /// What a store said, in the epoch that the object is in now.
    pub fn dated(&self, metadata: Metadata) -> Metadata {
        let epoch = self.cache.epoch_of(metadata.id.name());
        metadata.in_epoch(epoch)
    }

    /// Remembers what a store said.
    pub fn learned(&self, metadata: &Arc<Metadata>, asked_at: Instant) {
        self.cache.remember(Arc::clone(metadata), asked_at);
    }

    /// Forgets a version that has been seen not to be current.
    pub fn disproved(&self, metadata: &Metadata) {
        self.cache.disprove(&metadata.id);
    }

    /// Asks the store for an object's metadata: once, however many wait for it.
    pub async fn validate(self: &Arc<Self>, store: &Arc<Store>, name: &ObjectName) -> Result<Validated, Error> {
        let waiter = {
            let mut tower = self.validations.look();
            if let Some(waiter) = tower.join(name) {
                waiter
            } else {
                let (landing, waiter) = tower.lead(name.clone(), &Arc::default());
                let (directory, store, name) = (Arc::clone(self), Arc::clone(store), name.clone());
                self.tracker.spawn(async move { landing.land(directory.ask(&store, &name).await) });
                waiter
            }
        };
        waiter.wait().await
    }

    async fn ask(&self, store: &Arc<Store>, name: &ObjectName) -> Result<Validated, Error> {
        let asked_at = Instant::now();
        let known = self.cache.record(name).map(|record| record.metadata);
        let answer = store.head(&name.key, known.as_deref()).await;
        let (metadata, status) = match (answer, known) {
            (Ok(Head::NotModified), Some(known)) => (known, 304),
            (Ok(Head::NotModified), None) => {
                return Err(Error::new(Kind::Protocol, "the store says not modified to an unconditional HEAD"));
            }
            (Ok(Head::Current(current)), known) => {
                let current = self.dated(current);
                // The same version again: its identity is kept, and with it the extents that share it.
                let same = known.filter(|known| known.says_the_same(&current));
                (same.unwrap_or_else(|| Arc::new(current)), 200)
            }
            (Err(error), Some(known)) => {
                if error.kind() == Kind::NotFound {
                    self.disproved(&known);
                }
                return Err(error);
            }
            (Err(error), None) => return Err(error),
        };
        self.learned(&metadata, asked_at);
        Ok(Validated { metadata, status })
    }
}
