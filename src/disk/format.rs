//! The records on disk.
//!
//! A key is JSON: the object's name, and for an extent its version and range. A value is a byte that says what it is, and
//! then the payload of an extent after its length (8 bytes, little-endian), or the metadata of an object as JSON. foyer
//! keeps a checksum over both; what is decoded is checked again, as all that comes from a disk is hostile.

use std::cell::RefCell;
use std::hash::{Hash, Hasher};
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use foyer::{Code, ErrorKind};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::task_local;

use super::StoredRecord;
use crate::buffer::arena::Arena;
use crate::buffer::{ExactBuffer, Extent};
use crate::ledger::Grant;
use crate::object::{ExtentKey, Fields, Metadata, ObjectId, ObjectKey, ObjectName, StoreName, Version};
use crate::range::ByteRange;

/// The first byte of a value.
const EXTENT: u8 = b'E';
const RECORD: u8 = b'R';

/// The longest JSON that is decoded: a key of 1,024 bytes, a tag and five header fields, escaped.
const JSON_BYTES_MAX: u64 = 256 << 10;

/// Bytes copied at a time from the read buffer.
const CHUNK: usize = 16 << 10;

task_local! {
    /// What the decoder may use: foyer's `decode` has no context of its own, and runs inside the read that asked for it.
    pub(super) static DECODING: RefCell<Option<Decoding>>;
}

/// What is expected of a read from disk, and the memory for it.
pub(super) struct Decoding {
    arena: Option<Arc<Arena>>,
    grant: Option<Grant>,
    length: u64,
}

impl Decoding {
    /// An extent of `length` bytes, its memory taken from the grant.
    pub(super) fn extent(arena: Arc<Arena>, grant: Grant, length: u64) -> RefCell<Option<Self>> {
        RefCell::new(Some(Self { arena: Some(arena), grant: Some(grant), length }))
    }

    /// Metadata.
    pub(super) fn record() -> RefCell<Option<Self>> {
        RefCell::new(Some(Self { arena: None, grant: None, length: 0 }))
    }
}

/// The key of an entry.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Key {
    Extent(ExtentKey),
    Record(ObjectName),
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self {
            Self::Extent(key) => key.hash(state),
            Self::Record(name) => name.hash(state),
        }
    }
}

/// A place in the queue of what is to be written; given back when the entry was written or dropped.
#[derive(Debug)]
pub(super) struct Ticket {
    queued: Arc<AtomicU64>,
    bytes: u64,
}

impl Ticket {
    /// A place for `bytes`, if the queue has room.
    pub(super) fn take(queued: &Arc<AtomicU64>, bytes: u64, most: u64) -> Option<Self> {
        let room = |queued: u64| Some(queued + bytes).filter(|queued| *queued <= most);
        queued.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).ok()?;
        Some(Self { queued: Arc::clone(queued), bytes })
    }

    /// The place of an extent.
    pub(super) fn of(self, extent: Extent) -> QueuedExtent {
        QueuedExtent { extent, ticket: Some(self) }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.queued.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// An extent on its way to the disk, or from it.
#[derive(Debug)]
pub(super) struct QueuedExtent {
    extent: Extent,
    ticket: Option<Ticket>,
}

impl QueuedExtent {
    pub(super) fn extent(&self) -> &Extent {
        &self.extent
    }
}

impl Drop for QueuedExtent {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            self.extent.charge().written();
        }
    }
}

/// The value of an entry.
#[derive(Debug)]
pub(super) enum Value {
    Extent(QueuedExtent),
    /// The ticket is `None` in what was read.
    Record {
        record: Box<StoredRecord>,
        _ticket: Option<Ticket>,
    },
}

#[derive(Serialize, Deserialize)]
enum KeyText {
    Extent { store: String, key: String, version: VersionText, epoch: u64, start: u64, end: u64 },
    Record { store: String, key: String },
}

#[derive(Serialize, Deserialize)]
enum VersionText {
    Strong(String),
    Weak { size: u64, modified: Option<SystemTime>, tag: Option<String> },
}

#[derive(Serialize, Deserialize)]
struct RecordText {
    store: String,
    key: String,
    epoch: u64,
    size: u64,
    etag: Option<String>,
    modified: Option<SystemTime>,
    received_at: SystemTime,
    validated_at: SystemTime,
    content_type: Option<Box<str>>,
    content_encoding: Option<Box<str>>,
    content_language: Option<Box<str>>,
    content_disposition: Option<Box<str>>,
    cache_control: Option<Box<str>>,
}

/// An entry that cannot be decoded. Of this kind foyer forgets the entry; others it would try for ever.
fn invalid(what: impl Into<String>) -> foyer::Error {
    foyer::Error::new(ErrorKind::OutOfRange, what.into())
}

fn write_json(value: &impl Serialize, writer: &mut impl Write) -> foyer::Result<()> {
    let text = serde_json::to_vec(value).map_err(|error| invalid(error.to_string()))?;
    writer.write_all(&text).map_err(foyer::Error::io_error)
}

fn read_json<T: DeserializeOwned>(reader: &mut impl Read) -> foyer::Result<T> {
    let mut text = Vec::new();
    reader.take(JSON_BYTES_MAX).read_to_end(&mut text).map_err(|error| invalid(error.to_string()))?;
    serde_json::from_slice(&text).map_err(|error| invalid(error.to_string()))
}

fn json_bytes(value: &impl Serialize) -> usize {
    serde_json::to_vec(value).map_or(0, |text| text.len())
}

fn name(store: &str, key: &str) -> foyer::Result<ObjectName> {
    let name = StoreName::new(store).zip(ObjectKey::new(key));
    name.map(|(store, key)| ObjectName { store, key }).ok_or_else(|| invalid("not an object's name"))
}

impl Key {
    fn to_text(&self) -> KeyText {
        let words = |name: &ObjectName| (name.store.as_str().to_owned(), name.key.as_str().to_owned());
        match self {
            Self::Record(object) => {
                let (store, key) = words(object);
                KeyText::Record { store, key }
            }
            Self::Extent(extent) => {
                let (store, key) = words(extent.object().name());
                let version = match extent.object().version() {
                    Version::Strong(tag) => VersionText::Strong(tag.to_string()),
                    Version::Weak { size, modified, tag } => {
                        VersionText::Weak { size: *size, modified: *modified, tag: tag.as_deref().map(str::to_owned) }
                    }
                };
                let range = extent.range();
                KeyText::Extent {
                    store,
                    key,
                    version,
                    epoch: extent.object().epoch(),
                    start: range.start(),
                    end: range.end(),
                }
            }
        }
    }

    fn from_text(text: KeyText) -> foyer::Result<Self> {
        match text {
            KeyText::Record { store, key } => Ok(Self::Record(name(&store, &key)?)),
            KeyText::Extent { store, key, version, epoch, start, end } => {
                let version = match version {
                    VersionText::Strong(tag) => Version::Strong(tag.into()),
                    VersionText::Weak { size, modified, tag } => {
                        Version::Weak { size, modified, tag: tag.map(Into::into) }
                    }
                };
                let range = ByteRange::new(start, end).ok_or_else(|| invalid("an empty range"))?;
                Ok(Self::Extent(ExtentKey::new(Arc::new(ObjectId::new(name(&store, &key)?, version, epoch)), range)))
            }
        }
    }
}

impl Code for Key {
    fn encode(&self, writer: &mut impl Write) -> foyer::Result<()> {
        write_json(&self.to_text(), writer)
    }

    fn decode(reader: &mut impl Read) -> foyer::Result<Self> {
        Self::from_text(read_json(reader)?)
    }

    fn estimated_size(&self) -> usize {
        json_bytes(&self.to_text())
    }
}

impl Code for Value {
    fn encode(&self, writer: &mut impl Write) -> foyer::Result<()> {
        let mut write = |bytes: &[u8]| writer.write_all(bytes).map_err(foyer::Error::io_error);
        match self {
            Self::Extent(queued) => {
                let bytes = queued.extent.as_ref();
                write(&[EXTENT])?;
                write(&(bytes.len() as u64).to_le_bytes())?;
                write(bytes)
            }
            Self::Record { record, .. } => {
                write(&[RECORD])?;
                write_json(&RecordText::from(record.as_ref()), writer)
            }
        }
    }

    fn decode(reader: &mut impl Read) -> foyer::Result<Self> {
        let mut kind = [0];
        reader.read_exact(&mut kind).map_err(|error| invalid(error.to_string()))?;
        match kind {
            [EXTENT] => Ok(Self::Extent(QueuedExtent { extent: decode_extent(reader)?, ticket: None })),
            [RECORD] => {
                Ok(Self::Record { record: Box::new(read_json::<RecordText>(reader)?.try_into()?), _ticket: None })
            }
            _ => Err(invalid("neither an extent nor a record")),
        }
    }

    fn estimated_size(&self) -> usize {
        1 + match self {
            Self::Extent(queued) => size_of::<u64>() + queued.extent.len(),
            Self::Record { record, .. } => json_bytes(&RecordText::from(record.as_ref())),
        }
    }
}

/// The allocation of every read from disk: a name of its own in heap profiles, so that they stand apart from fills.
#[inline(never)]
fn allocate_for_decode(decoding: &mut Decoding) -> foyer::Result<ExactBuffer> {
    let (Some(arena), Some(grant)) = (&decoding.arena, &mut decoding.grant) else {
        return Err(invalid("an extent where none was asked for"));
    };
    let buffer = ExactBuffer::allocate(arena, decoding.length, grant).map_err(|error| invalid(error.to_string()));
    // Else the call above takes the place of this frame, and its name with it.
    std::hint::black_box(buffer)
}

/// Decodes an extent of exactly the length that its key says; nothing is allocated for any other.
fn decode_extent(reader: &mut impl Read) -> foyer::Result<Extent> {
    let mut length = [0; size_of::<u64>()];
    reader.read_exact(&mut length).map_err(|error| invalid(error.to_string()))?;
    let decoding = DECODING.try_with(RefCell::take).ok().flatten();
    let mut decoding = decoding.ok_or_else(|| invalid("a decode outside of a read"))?;
    if u64::from_le_bytes(length) != decoding.length {
        return Err(invalid("the length is not that of the key"));
    }
    let mut buffer = allocate_for_decode(&mut decoding)?;
    let mut chunk = [0; CHUNK];
    while buffer.missing() > 0 {
        let part = chunk.len().min(buffer.missing());
        let part = chunk.get_mut(..part).unwrap_or_default();
        reader.read_exact(part).map_err(|error| invalid(error.to_string()))?;
        buffer.append(part).map_err(|inexact| invalid(inexact.to_string()))?;
    }
    buffer.finish().map_err(|inexact| invalid(inexact.to_string()))
}

impl From<&StoredRecord> for RecordText {
    fn from(record: &StoredRecord) -> Self {
        let metadata = &record.metadata;
        let (name, fields) = (metadata.id.name(), metadata.fields.clone());
        Self {
            store: name.store.as_str().to_owned(),
            key: name.key.as_str().to_owned(),
            epoch: metadata.id.epoch(),
            size: metadata.size,
            etag: metadata.etag.as_deref().map(str::to_owned),
            modified: metadata.modified,
            received_at: metadata.received_at,
            validated_at: record.validated_at,
            content_type: fields.content_type,
            content_encoding: fields.content_encoding,
            content_language: fields.content_language,
            content_disposition: fields.content_disposition,
            cache_control: fields.cache_control,
        }
    }
}

impl TryFrom<RecordText> for StoredRecord {
    type Error = foyer::Error;

    fn try_from(text: RecordText) -> foyer::Result<Self> {
        let fields = Fields {
            content_type: text.content_type,
            content_encoding: text.content_encoding,
            content_language: text.content_language,
            content_disposition: text.content_disposition,
            cache_control: text.cache_control,
        };
        let name = name(&text.store, &text.key)?;
        let mut metadata = Metadata::new(name, text.size, text.etag.map(Into::into), text.modified, fields);
        metadata.received_at = text.received_at;
        let metadata = metadata.in_epoch(text.epoch);
        Ok(Self { metadata, validated_at: text.validated_at })
    }
}
