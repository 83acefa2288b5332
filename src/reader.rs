//! The one read path, for every API: open a range of an object, then take its bytes extent by extent.

use std::collections::VecDeque;
use std::iter::Peekable;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::buffer::Extent;
use crate::error::{Error, Kind};
use crate::fetch::{Fetcher, Found, Opened, Opening};
use crate::metadata::{Directory, Known};
use crate::object::{Metadata, ObjectName};
use crate::range::{ByteRange, Cut, RangeSpec, Resolved};
use crate::store::{Store, Stores};
use crate::telemetry::ByteSource;

/// Opens reads.
#[derive(Debug)]
pub struct Reader {
    stores: Stores,
    directory: Arc<Directory>,
    fetcher: Arc<Fetcher>,
}

/// How a read was opened: decided by its first extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// From memory; the metadata is fresh for so much longer.
    Memory(Duration),
    /// Fetched for this read.
    Miss,
    /// Fetched for another read, which this one joined.
    Collapsed,
    /// The metadata was stale; the store answered its revalidation with this status.
    Stale(u16),
}

/// An opened read.
#[derive(Debug)]
pub struct Read {
    /// The version that is read.
    pub metadata: Arc<Metadata>,
    /// What the range asked for means in it.
    pub resolved: Resolved,
    /// How it was opened.
    pub outcome: Outcome,
    /// The bytes: none when nothing is to be sent.
    pub body: ReadBody,
}

/// The bytes of a read, from its first extent on. The first is there; the others are found as they are asked for.
#[derive(Debug)]
pub struct ReadBody {
    first: Option<Piece>,
    found: VecDeque<Found>,
    pieces: Peekable<Cut>,
    fetcher: Arc<Fetcher>,
    store: Arc<Store>,
    metadata: Arc<Metadata>,
}

/// Bytes of one extent.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The bytes.
    pub bytes: Bytes,
    /// Where they came from.
    pub source: ByteSource,
}

impl Reader {
    /// A reader of these stores.
    pub fn new(stores: Stores, directory: Arc<Directory>, fetcher: Arc<Fetcher>) -> Self {
        Self { stores, directory, fetcher }
    }

    /// The store of that name.
    pub fn store(&self, name: &str) -> Result<&Arc<Store>, Error> {
        self.stores.get(name).ok_or_else(|| Error::new(Kind::NotFound, "no such store"))
    }

    /// All stores.
    pub fn stores(&self) -> &Stores {
        &self.stores
    }

    /// The object's metadata, asked of the store where it is not fresh.
    pub async fn head(&self, name: &ObjectName) -> Result<Arc<Metadata>, Error> {
        let store = self.store(name.store.as_str())?;
        match self.directory.known(name, store.freshness()) {
            Known::Fresh(metadata, _) => Ok(metadata),
            Known::Stale(_) | Known::Nothing => Ok(self.directory.validate(store, name).await?.metadata),
        }
    }

    /// Opens a range of an object and waits for its first extent.
    ///
    /// A change of the object that is seen before the first byte opens the read once more, at the new version.
    pub async fn open(&self, name: &ObjectName, spec: RangeSpec) -> Result<Read, Error> {
        let store = self.store(name.store.as_str())?;
        match self.try_open(store, name, spec).await {
            Err(error) if error.kind() == Kind::Changed => self.try_open(store, name, spec).await,
            opened => opened,
        }
    }

    async fn try_open(&self, store: &Arc<Store>, name: &ObjectName, spec: RangeSpec) -> Result<Read, Error> {
        match self.directory.known(name, store.freshness()) {
            Known::Fresh(metadata, ttl) => self.read(store, metadata, spec, Freshened::Was(ttl)).await,
            Known::Stale(_) => self.revalidate(store, name, spec).await,
            Known::Nothing => match self.fetcher.open(store, name, spec).await {
                Ok(Opened::Led(opening)) => self.read_on(store, &opening, spec, Outcome::Miss).await,
                Ok(Opened::Joined(opening)) => self.read_on(store, &opening, spec, Outcome::Collapsed).await,
                Ok(Opened::Known) => self.revalidate_unless_fresh(store, name, spec).await,
                Err(error) if error.kind() == Kind::RangeRefused => self.explain(store, name, spec, error).await,
                Err(error) => Err(error),
            },
        }
    }

    async fn revalidate_unless_fresh(
        &self,
        store: &Arc<Store>,
        name: &ObjectName,
        spec: RangeSpec,
    ) -> Result<Read, Error> {
        match self.directory.known(name, store.freshness()) {
            Known::Fresh(metadata, ttl) => self.read(store, metadata, spec, Freshened::Was(ttl)).await,
            _ => self.revalidate(store, name, spec).await,
        }
    }

    async fn revalidate(&self, store: &Arc<Store>, name: &ObjectName, spec: RangeSpec) -> Result<Read, Error> {
        let validated = self.directory.validate(store, name).await?;
        self.read(store, validated.metadata, spec, Freshened::By(validated.status)).await
    }

    /// The store refused the range: the object's size tells whether the range or the store is at fault.
    async fn explain(
        &self,
        store: &Arc<Store>,
        name: &ObjectName,
        spec: RangeSpec,
        refusal: Error,
    ) -> Result<Read, Error> {
        let metadata = self.directory.validate(store, name).await?.metadata;
        if spec.resolve(metadata.size).bytes(metadata.size).is_some() {
            return Err(Error::new(Kind::Protocol, format!("a range inside the object was refused: {refusal}")));
        }
        self.read(store, metadata, spec, Freshened::Now).await
    }

    /// Reads an object whose metadata is known.
    async fn read(
        &self,
        store: &Arc<Store>,
        metadata: Arc<Metadata>,
        spec: RangeSpec,
        freshened: Freshened,
    ) -> Result<Read, Error> {
        let resolved = spec.resolve(metadata.size);
        let pieces =
            resolved.bytes(metadata.size).map_or_else(Cut::empty, |bytes| bytes.cut(self.fetcher.extent_max()));
        let mut body = self.body(store, &metadata, VecDeque::new(), pieces);
        let first = body.find_next();
        let outcome = match (freshened, &first) {
            (Freshened::By(status), _) => Outcome::Stale(status),
            (Freshened::Was(ttl), Some(Found::Hit(_)) | None) => Outcome::Memory(ttl),
            (_, Some(Found::Joined(_))) => Outcome::Collapsed,
            _ => Outcome::Miss,
        };
        body.first = body.wait(first).await?;
        Ok(Read { metadata, resolved, outcome, body })
    }

    /// Reads on from the extents that an opening is filling.
    async fn read_on(
        &self,
        store: &Arc<Store>,
        opening: &Opening,
        spec: RangeSpec,
        outcome: Outcome,
    ) -> Result<Read, Error> {
        let metadata = Arc::clone(&opening.metadata);
        let resolved = spec.resolve(metadata.size);
        let rest = resolved.bytes(metadata.size).and_then(|bytes| ByteRange::new(opening.range.end(), bytes.end()));
        let pieces = rest.map_or_else(Cut::empty, |rest| rest.cut(self.fetcher.extent_max()));
        let found = opening.extents.iter().cloned().map(Found::Led).collect();
        let mut body = self.body(store, &metadata, found, pieces);
        let first = body.find_next();
        body.first = body.wait(first).await?;
        Ok(Read { metadata, resolved, outcome, body })
    }

    fn body(&self, store: &Arc<Store>, metadata: &Arc<Metadata>, found: VecDeque<Found>, pieces: Cut) -> ReadBody {
        let (fetcher, store, metadata) = (Arc::clone(&self.fetcher), Arc::clone(store), Arc::clone(metadata));
        ReadBody { first: None, found, pieces: pieces.peekable(), fetcher, store, metadata }
    }
}

/// How the metadata of a read came to be fresh.
#[derive(Clone, Copy, Debug)]
enum Freshened {
    /// It was, and is for so much longer.
    Was(Duration),
    /// By a revalidation that was answered with this status.
    By(u16),
    /// It was learned for this read.
    Now,
}

impl ReadBody {
    /// The next bytes; `None` at the end. After an error there is nothing more: the response has to be cut off.
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let found = self.find_next()?;
        self.wait(Some(found)).await.transpose()
    }

    /// The bytes, when the first extent is all of them.
    pub fn take_only(&mut self) -> Option<Piece> {
        if self.found.is_empty() && self.pieces.peek().is_none() { self.first.take() } else { None }
    }

    fn find_next(&mut self) -> Option<Found> {
        self.found
            .pop_front()
            .or_else(|| self.fetcher.find(&self.store, &self.metadata, &mut self.pieces, &mut self.found))
    }

    async fn wait(&self, found: Option<Found>) -> Result<Option<Piece>, Error> {
        let piece = |extent: &Extent, source| Some(Piece { bytes: extent.bytes(), source });
        match found {
            None => Ok(None),
            Some(Found::Hit(extent)) => Ok(piece(&extent, ByteSource::Memory)),
            Some(Found::Joined(waiter) | Found::Led(waiter)) => Ok(piece(&waiter.wait().await?, ByteSource::Upstream)),
        }
    }
}
