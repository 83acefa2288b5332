//! The one read path, for every API: open a range of an object, then take its bytes extent by extent.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::error::{Error, Kind};
use crate::fetch::{Arrived, Fetcher, Found, Opened, Opening, Passage, Target};
use crate::flight::{Waiter, Wanted};
use crate::ledger::{got_no_share, is_for_want_of_memory};
use crate::metadata::{Directory, Known, Life};
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

/// What a client wishes of the cache (RFC 9111 section 5.2.1).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Wishes {
    /// The metadata must be no older; zero asks the store in any case.
    pub max_age: Option<Duration>,
    /// Read past the cache: nothing is taken from it, and nothing is kept.
    pub no_store: bool,
    /// Nothing is fetched: what is not in the cache is an error.
    pub only_if_cached: bool,
}

/// How a read was opened: decided by its first extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// From memory; the metadata is fresh for so much longer.
    Memory(Duration),
    /// From disk, likewise.
    Disk(Duration),
    /// Fetched for this read.
    Miss,
    /// Fetched for another read, which this one joined.
    Collapsed,
    /// The metadata was stale; the store answered its revalidation with this status.
    Stale(u16),
    /// The store was asked because the client wished it.
    Requested,
    /// Read past the cache for want of memory.
    Bypass,
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
    /// How long ago the store said what the metadata says.
    pub age: Duration,
    /// The bytes: none when nothing is to be sent.
    pub body: ReadBody,
}

/// The bytes of a read, from its first extent on. The first is there; the others are found as they are asked for.
///
/// It holds no extent but that: what was fetched ahead for it is the cache's, and is looked up when its turn comes.
#[derive(Debug)]
pub struct ReadBody {
    first: Option<Piece>,
    pieces: Cut,
    ahead: Option<Ahead>,
    fetcher: Arc<Fetcher>,
    target: Target,
}

/// What is being fetched, or was fetched, ahead of a read.
#[derive(Debug)]
struct Ahead {
    /// Keeps the fetch going.
    _wanted: Wanted,
    /// Where it ends, at the furthest.
    end: u64,
    /// Whether it was begun for this read, and ends just there.
    led: bool,
    /// Where its bytes come from.
    source: ByteSource,
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

    /// The object's metadata and its age, asked of the store where it is not fresh.
    pub async fn head(&self, name: &ObjectName, wishes: &Wishes) -> Result<(Arc<Metadata>, Duration), Error> {
        let store = self.store(name.store.as_str())?;
        match self.directory.find(name, store.freshness(), wishes.max_age).await {
            Known::Fresh(metadata, life) => Ok((metadata, life.age)),
            _ if wishes.only_if_cached => Err(not_cached()),
            _ => Ok((self.directory.validate(store, name).await?.metadata, Duration::ZERO)),
        }
    }

    /// Opens a range of an object and waits for its first extent.
    ///
    /// A change of the object that is seen before the first byte opens the read once more, at the new version.
    pub async fn open(&self, name: &ObjectName, spec: RangeSpec, wishes: &Wishes) -> Result<Read, Error> {
        let asked = Asked { store: self.store(name.store.as_str())?, name, spec, wishes };
        match self.try_open(&asked).await {
            // A range that the store refuses although it lay inside the object: the object has become smaller.
            Err(error) if matches!(error.kind(), Kind::Changed | Kind::RangeRefused) => self.try_open(&asked).await,
            Err(error) if got_no_share(&error) => self.open_in_small_pieces(&asked).await,
            opened => opened,
        }
    }

    async fn try_open(&self, asked: &Asked<'_>) -> Result<Read, Error> {
        let wishes = asked.wishes;
        match self.directory.find(asked.name, asked.store.freshness(), wishes.max_age).await {
            Known::Fresh(metadata, life) if !wishes.no_store => self.read(asked, metadata, Freshened::Was(life)).await,
            _ if wishes.only_if_cached => Err(not_cached()),
            _ if wishes.no_store => self.revalidate(asked, |_| Freshened::ByWish).await,
            Known::Nothing => self.learn(asked).await,
            Known::Stale(_) => self.revalidate(asked, Freshened::By).await,
            Known::Fresh(..) | Known::TooOld(_) => self.revalidate(asked, |_| Freshened::ByWish).await,
        }
    }

    /// Opens a read that gets no memory to fill the cache with.
    async fn open_in_small_pieces(&self, asked: &Asked<'_>) -> Result<Read, Error> {
        match self.directory.find(asked.name, asked.store.freshness(), asked.wishes.max_age).await {
            Known::Fresh(metadata, _) => self.read(asked, metadata, Freshened::ForWantOfMemory).await,
            _ => self.revalidate(asked, |_| Freshened::ForWantOfMemory).await,
        }
    }

    /// Reads an object of which nothing is known: the first GET teaches what there is to know.
    async fn learn(&self, asked: &Asked<'_>) -> Result<Read, Error> {
        match self.fetcher.open(asked.store, asked.name, asked.spec).await {
            Ok(Opened::Led(opening)) => self.read_on(asked, &opening, Outcome::Miss).await,
            Ok(Opened::Joined(opening)) => self.read_on(asked, &opening, Outcome::Collapsed).await,
            Ok(Opened::Known) => match self.directory.known(asked.name, asked.store.freshness(), None) {
                Known::Fresh(metadata, life) => self.read(asked, metadata, Freshened::Was(life)).await,
                _ => self.revalidate(asked, Freshened::By).await,
            },
            Err(error) if error.kind() == Kind::RangeRefused => self.explain(asked, error).await,
            Err(error) => Err(error),
        }
    }

    async fn revalidate(&self, asked: &Asked<'_>, how: fn(u16) -> Freshened) -> Result<Read, Error> {
        let validated = self.directory.validate(asked.store, asked.name).await?;
        self.read(asked, validated.metadata, how(validated.status)).await
    }

    /// The store refused the range: the object's size tells whether the range or the store is at fault.
    async fn explain(&self, asked: &Asked<'_>, refusal: Error) -> Result<Read, Error> {
        let metadata = self.directory.validate(asked.store, asked.name).await?.metadata;
        if asked.spec.resolve(metadata.size).bytes(metadata.size).is_some() {
            return Err(Error::new(Kind::Protocol, format!("a range inside the object was refused: {refusal}")));
        }
        self.read(asked, metadata, Freshened::Now).await
    }

    /// Reads an object whose metadata is known.
    async fn read(&self, asked: &Asked<'_>, metadata: Arc<Metadata>, freshened: Freshened) -> Result<Read, Error> {
        let resolved = asked.spec.resolve(metadata.size);
        let bytes = resolved.bytes(metadata.size);
        if asked.wishes.only_if_cached && bytes.is_some_and(|bytes| !self.fetcher.holds(&metadata, bytes)) {
            return Err(not_cached());
        }
        let passage = match freshened {
            Freshened::ForWantOfMemory => Passage::InSmallPieces,
            _ if asked.wishes.no_store => Passage::Past,
            _ => Passage::Through,
        };
        let mut body = self.body(asked, &metadata, bytes, passage);
        let first = body.find_next();
        let joined = matches!(first, Some(Found::Joined(..)));
        body.first = match first {
            Some(first) => Some(body.take(first).await?),
            None => None,
        };
        let (outcome, age) = match (freshened, body.first.as_ref().map(|first| first.source)) {
            (Freshened::By(status), _) => (Outcome::Stale(status), Duration::ZERO),
            (Freshened::ByWish, _) => (Outcome::Requested, Duration::ZERO),
            (Freshened::ForWantOfMemory, _) => (Outcome::Bypass, Duration::ZERO),
            (Freshened::Was(life), Some(ByteSource::Memory) | None) => (Outcome::Memory(life.ttl), life.age),
            (Freshened::Was(life), Some(ByteSource::Disk)) => (Outcome::Disk(life.ttl), life.age),
            (_, Some(ByteSource::Upstream)) if joined => (Outcome::Collapsed, Duration::ZERO),
            _ => (Outcome::Miss, Duration::ZERO),
        };
        Ok(Read { metadata, resolved, outcome, age, body })
    }

    /// Reads on from the extents that an opening is filling.
    async fn read_on(&self, asked: &Asked<'_>, opening: &Opening, outcome: Outcome) -> Result<Read, Error> {
        let metadata = Arc::clone(&opening.metadata);
        let resolved = asked.spec.resolve(metadata.size);
        let mut body = self.body(asked, &metadata, resolved.bytes(metadata.size), Passage::Through);
        body.pieces.next();
        body.first = Some(body.wait(opening.first.clone(), opening.range.end(), outcome == Outcome::Miss).await?);
        Ok(Read { metadata, resolved, outcome, age: Duration::ZERO, body })
    }

    fn body(
        &self,
        asked: &Asked<'_>,
        metadata: &Arc<Metadata>,
        bytes: Option<ByteRange>,
        passage: Passage,
    ) -> ReadBody {
        let target = self.fetcher.target(asked.store, metadata, passage);
        let pieces = bytes.map_or_else(Cut::empty, |bytes| bytes.cut(self.fetcher.extent_max(passage)));
        ReadBody { first: None, pieces, ahead: None, fetcher: Arc::clone(&self.fetcher), target }
    }
}

/// One read, as it was asked for.
struct Asked<'a> {
    store: &'a Arc<Store>,
    name: &'a ObjectName,
    spec: RangeSpec,
    wishes: &'a Wishes,
}

/// How the metadata of a read came to be fresh.
#[derive(Clone, Copy, Debug)]
enum Freshened {
    /// It was.
    Was(Life),
    /// By a revalidation that was answered with this status.
    By(u16),
    /// The client wished the store to be asked.
    ByWish,
    /// It was learned for this read.
    Now,
    /// It is, and there is no memory to fill the cache with.
    ForWantOfMemory,
}

fn not_cached() -> Error {
    Error::new(Kind::NotCached, "only-if-cached")
}

impl ReadBody {
    /// The next bytes; `None` at the end. After an error there is nothing more: the response has to be cut off.
    pub async fn next(&mut self) -> Option<Result<Piece, Error>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        let before = self.pieces.clone();
        let found = self.find_next()?;
        match self.take(found).await {
            Err(error) if self.can_go_on_without(&error) => {
                // From here on, past the cache and in small pieces.
                let passage = Passage::InSmallPieces;
                self.target = self.fetcher.target(&self.target.store, &self.target.metadata, passage);
                self.pieces = before.anew(self.fetcher.extent_max(passage));
                self.ahead = None;
                let found = self.find_next()?;
                Some(self.take(found).await)
            }
            taken => Some(taken),
        }
    }

    fn can_go_on_without(&self, error: &Error) -> bool {
        is_for_want_of_memory(error) && self.target.passage != Passage::InSmallPieces
    }

    /// The bytes, when the first extent is all of them.
    pub fn take_only(&mut self) -> Option<Piece> {
        if self.pieces.clone().next().is_none() { self.first.take() } else { None }
    }

    fn find_next(&mut self) -> Option<Found> {
        let piece = self.pieces.next()?;
        // Before what is ahead is let go: else its run could be given up in between.
        let found = self.fetcher.find(&self.target, piece, self.pieces.clone());
        self.ahead.take_if(|ahead| ahead.end < piece.end());
        if self.ahead.as_ref().is_some_and(|ahead| ahead.led) && matches!(found, Found::Led(..)) {
            self.target.shorten_runs(self.fetcher.extent_max(self.target.passage));
        }
        Some(found)
    }

    async fn take(&mut self, found: Found) -> Result<Piece, Error> {
        match found {
            Found::Hit(extent) => {
                let source = self.ahead.as_ref().map_or(ByteSource::Memory, |ahead| ahead.source);
                Ok(Piece { bytes: extent.bytes(), source })
            }
            Found::Joined(waiter, end) => self.wait(waiter, end, false).await,
            Found::Led(waiter, end) => self.wait(waiter, end, true).await,
        }
    }

    async fn wait(&mut self, waiter: Waiter<Arrived>, end: u64, led: bool) -> Result<Piece, Error> {
        let Arrived { extent, source } = waiter.wait().await?;
        self.ahead = Some(Ahead { _wanted: waiter.wanted(), end, led, source });
        Ok(Piece { bytes: extent.bytes(), source })
    }
}
