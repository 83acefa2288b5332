//! The stores: what a URL mounts, and the two questions the read path asks of them, checked before they are believed.

mod connector;
mod demo;
mod dial;
mod fault;
mod mount;

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::StreamExt;
use futures::future::ready;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{Attribute, Attributes, GetOptions, GetRange, GetResult, ObjectStore};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use crate::config::settings::Fault;
use crate::config::{FetchConfig, Freshness, StoreConfig};
use crate::error::{Error, Kind};
use crate::object::{Fields, Metadata, ObjectKey, ObjectName, StoreName};
use crate::range::ByteRange;
use crate::telemetry::Metrics;

pub use dial::Connections;
pub use mount::DEMO;

/// An object that is asked for to see whether a store answers; it need not exist.
const PROBE_KEY: &str = "halfopen-probe";

/// Empty chunks in a row after which a body counts as ended.
const EMPTY_CHUNKS_MAX: usize = 16;

/// All mounted stores.
#[derive(Debug)]
pub struct Stores {
    stores: BTreeMap<StoreName, Arc<Store>>,
    connections: Connections,
}

impl Stores {
    /// Mounts every store; all faults are told.
    pub fn mount(configs: &[StoreConfig], fetch: &FetchConfig, metrics: &Arc<Metrics>) -> Result<Self, Vec<Fault>> {
        let turns = Arc::new(Semaphore::new(fetch.concurrency));
        let connections = Connections::default();
        let mut stores = BTreeMap::new();
        let mut faults = Vec::new();
        for config in configs {
            match mount::mount(config, fetch.connect_timeout, &connections) {
                Ok(objects) => {
                    let store = Store {
                        name: config.name.clone(),
                        objects,
                        freshness: config.freshness,
                        turns: Arc::clone(&turns),
                        queue_timeout: fetch.queue_timeout,
                        stall_timeout: fetch.stall_timeout,
                        lists: !matches!(config.url.scheme(), "http" | "https" | "demo"),
                        state: AtomicU8::new(StoreState::Unknown as u8),
                        metrics: Arc::clone(metrics),
                    };
                    stores.insert(config.name.clone(), Arc::new(store));
                }
                Err(fault) => faults.push(fault),
            }
        }
        if faults.is_empty() { Ok(Self { stores, connections }) } else { Err(faults) }
    }

    /// The store of that name.
    pub fn get(&self, name: &str) -> Option<&Arc<Store>> {
        self.stores.get(name)
    }

    /// Connections to all of them.
    pub const fn connections(&self) -> &Connections {
        &self.connections
    }

    /// All stores, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Store>> {
        self.stores.values()
    }
}

/// One mounted store.
#[derive(Debug)]
pub struct Store {
    name: StoreName,
    objects: Arc<dyn ObjectStore>,
    freshness: Freshness,
    turns: Arc<Semaphore>,
    queue_timeout: Duration,
    stall_timeout: Duration,
    /// Whether a listing tells if the store is there; plain HTTP servers have none.
    lists: bool,
    state: AtomicU8,
    metrics: Arc<Metrics>,
}

/// Whether a store answered when it was last asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum StoreState {
    /// It has not been asked yet.
    Unknown = 0,
    /// It answered.
    Up = 1,
    /// It did not, or not as it should.
    Down = 2,
}

/// What one GET asks for. An empty range or suffix cannot be said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Span {
    /// A range; the store may clamp its end to the object's size.
    Part(ByteRange),
    /// The last so many bytes.
    Suffix(NonZeroU64),
}

impl Span {
    fn to_get_range(self) -> GetRange {
        match self {
            Self::Part(range) => GetRange::Bounded(range.into()),
            Self::Suffix(length) => GetRange::Suffix(length.get()),
        }
    }

    /// The bytes it means in an object of `size` bytes.
    fn within(self, size: u64) -> Option<ByteRange> {
        match self {
            Self::Part(range) => range.within(size),
            Self::Suffix(length) => ByteRange::new(size.saturating_sub(length.get()), size),
        }
    }
}

/// A HEAD's answer.
#[derive(Clone, Debug)]
pub enum Head {
    /// The version asked about is still the current one.
    NotModified,
    /// The current version.
    Current(Metadata),
}

impl Store {
    /// The name it is served under.
    pub fn name(&self) -> &StoreName {
        &self.name
    }

    /// How long its metadata is believed.
    pub fn freshness(&self) -> Freshness {
        self.freshness
    }

    /// Whether it answered when it was last asked.
    pub fn state(&self) -> StoreState {
        let state = self.state.load(Ordering::Relaxed);
        let known = [StoreState::Up, StoreState::Down];
        known.into_iter().find(|known| *known as u8 == state).unwrap_or(StoreState::Unknown)
    }

    /// Waits for a turn among all requests to stores.
    ///
    /// A fill takes it before its memory: whoever has memory can go on, and will give it back.
    pub async fn turn(&self) -> Result<Turn, Error> {
        match timeout(self.queue_timeout, Arc::clone(&self.turns).acquire_owned()).await {
            Ok(Ok(place)) => Ok(Turn { _place: place }),
            _ => Err(Error::new(
                Kind::Overloaded("fetch.concurrency"),
                "no turn at the store within fetch.queue_timeout",
            )),
        }
    }

    /// Asks for a part of an object, of the version with that strong tag if one is given.
    ///
    /// The answer's range, total and version have been checked against each other; its length is checked by whoever
    /// reads the body, because only then is it known.
    pub async fn get(
        self: &Arc<Self>,
        _turn: &Turn,
        key: &ObjectKey,
        span: Span,
        if_match: Option<&str>,
    ) -> Result<Answer, Error> {
        let options = GetOptions {
            range: Some(span.to_get_range()),
            if_match: if_match.map(str::to_owned),
            ..GetOptions::default()
        };
        let result = match self.ask("get", key, options).await {
            Err(error) if fault::is_not_modified(&error) => {
                return Err(self.fault(Error::new(Kind::Protocol, "not modified, which was no condition")));
            }
            answer => answer?,
        };
        if result.meta.size == 0 {
            // No range lies in an empty object: whoever asked has to look at the size.
            return Err(Error::new(Kind::RangeRefused, "the object is empty"));
        }
        let range = ByteRange::new(result.range.start, result.range.end);
        let range = range.filter(|range| Some(*range) == span.within(result.meta.size));
        let Some(range) = range else {
            return Err(self.fault(Error::new(
                Kind::Protocol,
                format!("asked for {span:?} and got {:?} of {}", result.range, result.meta.size),
            )));
        };
        let metadata = self.metadata(key, &result);
        Ok(Answer { metadata, range, body: result.into_stream(), store: Arc::clone(self) })
    }

    /// Asks for an object's metadata, or whether the version known is still current.
    pub async fn head(self: &Arc<Self>, key: &ObjectKey, known: Option<&Metadata>) -> Result<Head, Error> {
        let if_none_match = known.and_then(Metadata::strong_etag).map(str::to_owned);
        let options = GetOptions { head: true, if_none_match, ..GetOptions::default() };
        let _turn = self.turn().await?;
        match self.ask("head", key, options).await {
            Ok(result) => Ok(Head::Current(self.metadata(key, &result))),
            Err(error) if fault::is_not_modified(&error) => Ok(Head::NotModified),
            Err(error) => Err(error),
        }
    }

    /// Asks whether the store is there at all: for the first name that it lists, or where it does not list, for an
    /// object that need not exist.
    pub async fn probe(&self) -> Result<(), Error> {
        let listed = async { self.objects.list(None).next().await.transpose() };
        match timeout(self.stall_timeout, listed).await {
            Err(_) => return Err(Error::new(Kind::TimedOut, "no answer within fetch.stall_timeout")),
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(object_store::Error::NotFound { .. })) if !self.lists => {}
            Ok(Err(error)) => match fault::classify(&error) {
                error if error.kind() == Kind::Forbidden || !self.lists => {}
                error => return Err(error),
            },
        }
        let options = GetOptions { head: true, ..GetOptions::default() };
        let path = Path::from(PROBE_KEY);
        match timeout(self.stall_timeout, self.objects.get_opts(&path, options)).await {
            Err(_) => Err(Error::new(Kind::TimedOut, "no answer within fetch.stall_timeout")),
            Ok(Ok(_) | Err(object_store::Error::NotFound { .. })) => Ok(()),
            Ok(Err(error)) => Err(fault::classify(&error)),
        }
    }

    async fn ask(&self, operation: &'static str, key: &ObjectKey, options: GetOptions) -> Result<GetResult, Error> {
        let path = exact_path(key)?;
        let begun = Instant::now();
        let result = match timeout(self.stall_timeout, self.objects.get_opts(&path, options)).await {
            Ok(result) => result.map_err(|error| fault::classify(&error)),
            Err(_) => Err(Error::new(Kind::TimedOut, "no answer within fetch.stall_timeout")),
        };
        let label = result.as_ref().err().map_or("ok", |error| fault::label(error));
        self.metrics.upstream(&self.name, operation, label, begun.elapsed().as_secs_f64());
        match result {
            Err(error) if fault::is_fault(&error) => Err(self.fault(error)),
            result => {
                self.state.store(StoreState::Up as u8, Ordering::Relaxed);
                result
            }
        }
    }

    fn metadata(&self, key: &ObjectKey, result: &GetResult) -> Metadata {
        let name = ObjectName { store: self.name.clone(), key: key.clone() };
        let etag = result.meta.e_tag.as_deref().map(Arc::from);
        // object_store says 1970 where the store said nothing.
        let modified = Some(SystemTime::from(result.meta.last_modified)).filter(|date| *date != SystemTime::UNIX_EPOCH);
        Metadata::new(name, result.meta.size, etag, modified, fields(&result.attributes))
    }

    /// Counts a fault of the store.
    fn fault(&self, error: Error) -> Error {
        self.state.store(StoreState::Down as u8, Ordering::Relaxed);
        self.metrics.upstream_fault(&self.name, fault::label(&error));
        error
    }
}

/// A GET's answer: the head, checked, and the body, as it comes.
pub struct Answer {
    /// What the store said of the object.
    pub metadata: Metadata,
    /// The bytes that the body should hold.
    pub range: ByteRange,
    body: BoxStream<'static, object_store::Result<Bytes>>,
    store: Arc<Store>,
}

/// One of the requests to stores that may be under way at once.
#[derive(Debug)]
pub struct Turn {
    _place: OwnedSemaphorePermit,
}

impl Answer {
    /// The next bytes of the body; `None` at its end. A body that makes no progress for the stall timeout is an error.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        let store = &self.store;
        // An empty chunk is no progress: object_store gives them without end for a file that was cut short.
        let body = self.body.by_ref();
        let progress = async { body.take(EMPTY_CHUNKS_MAX).skip_while(|chunk| ready(is_empty(chunk))).next().await };
        match timeout(store.stall_timeout, progress).await {
            Ok(Some(Ok(bytes))) => {
                store.metrics.upstream_bytes(&store.name, bytes.len() as u64);
                Some(Ok(bytes))
            }
            Ok(Some(Err(error))) => Some(Err(store.fault(fault::of_body(&error)))),
            Ok(None) => None,
            Err(_) => Some(Err(store.fault(Error::new(Kind::TimedOut, "no byte within fetch.stall_timeout")))),
        }
    }

    /// The error of a body that is not the one its head announced, counted.
    pub fn broke_protocol(&self, detail: String) -> Error {
        self.store.fault(Error::new(Kind::Protocol, detail))
    }
}

/// The path that names exactly this key, if the store can express it.
///
/// `object_store` drops a leading and a trailing `/`, and refuses empty and relative segments: such a key would name
/// another object or none, so for us it names none.
fn exact_path(key: &ObjectKey) -> Result<Path, Error> {
    Path::parse(key.as_str())
        .ok()
        .filter(|path| path.as_ref() == key.as_str())
        .ok_or_else(|| Error::new(Kind::NotFound, "the store cannot express this key"))
}

fn is_empty(chunk: &object_store::Result<Bytes>) -> bool {
    chunk.as_ref().is_ok_and(Bytes::is_empty)
}

fn fields(attributes: &Attributes) -> Fields {
    let field = |attribute| attributes.get(&attribute).map(|value| Box::from(value.as_ref()));
    Fields {
        content_type: field(Attribute::ContentType),
        content_encoding: field(Attribute::ContentEncoding),
        content_language: field(Attribute::ContentLanguage),
        content_disposition: field(Attribute::ContentDisposition),
        cache_control: field(Attribute::CacheControl),
    }
}
