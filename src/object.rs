//! Names and versions of objects, and the key of an extent. Pure data.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use crate::range::ByteRange;

/// The longest key in bytes, as decoded: the limit of S3, GCS and Azure.
pub const KEY_BYTES_MAX: usize = 1024;

/// The longest store name in bytes: that of an S3 bucket, since a store is a bucket to S3 clients.
pub const STORE_NAME_BYTES_MAX: usize = 63;

/// The name of a mounted store: letters, digits, `-`, `_` and `.`, beginning with a letter or digit.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreName(Arc<str>);

impl StoreName {
    /// The name, if it is one.
    pub fn new(name: &str) -> Option<Self> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let valid = name.len() <= STORE_NAME_BYTES_MAX
            && name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && name.chars().all(allowed);
        valid.then(|| Self(name.into()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::borrow::Borrow<str> for StoreName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for StoreName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for StoreName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The key of an object inside its store: any text that is not empty, at most [`KEY_BYTES_MAX`] bytes.
///
/// `/`, `//`, `.` and `..` mean nothing special here; what a store cannot express it refuses.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ObjectKey(Arc<str>);

impl ObjectKey {
    /// The key, if it is one.
    pub fn new(key: &str) -> Option<Self> {
        (!key.is_empty() && key.len() <= KEY_BYTES_MAX).then(|| Self(key.into()))
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// An object, whatever its version.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ObjectName {
    /// The store it lives in.
    pub store: StoreName,
    /// Its key there.
    pub key: ObjectKey,
}

/// What tells one version of an object from another.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Version {
    /// A strong entity tag, as the store writes it (RFC 9110 section 8.8.3).
    Strong(Arc<str>),
    /// No strong tag: size, date and weak tag together. An overwrite that leaves all three alike cannot be seen.
    Weak {
        /// The object's size in bytes.
        size: u64,
        /// When it was last modified.
        modified: Option<SystemTime>,
        /// A weak entity tag.
        tag: Option<Arc<str>>,
    },
}

/// One version of one object: what an extent is a part of.
#[derive(Debug)]
pub struct ObjectId {
    name: ObjectName,
    version: Version,
    /// Which of the object's purges it was learned after; see `purge.rs`.
    epoch: u64,
    /// Whether an entry of the cache carries the weight of this.
    weighed: AtomicBool,
    /// A hash of all, so that hashing an [`ExtentKey`] does not read its strings.
    fingerprint: u64,
}

impl ObjectId {
    /// The identity of a version of an object, in an epoch.
    pub fn new(name: ObjectName, version: Version, epoch: u64) -> Self {
        // Fixed keys: the same identity has the same fingerprint in every process, so it can be found on disk again.
        let mut hasher = DefaultHasher::new();
        (&name, &version, epoch).hash(&mut hasher);
        let fingerprint = hasher.finish();
        Self { name, version, epoch, weighed: AtomicBool::new(false), fingerprint }
    }

    /// The object.
    pub fn name(&self) -> &ObjectName {
        &self.name
    }

    /// Its version.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// Bytes that it takes on the heap, for the first who asks: the extents of a version share it, and one of them carries
    /// its weight.
    pub fn weight_once(&self) -> usize {
        if self.weighed.swap(true, Ordering::Relaxed) {
            return 0;
        }
        let tag = match &self.version {
            Version::Strong(tag) => tag.len(),
            Version::Weak { tag, .. } => tag.as_ref().map_or(0, |tag| tag.len()),
        };
        // Three shared allocations, each with its two counts.
        size_of::<Self>() + self.name.key.as_str().len() + tag + 6 * size_of::<usize>()
    }

    /// Its epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl PartialEq for ObjectId {
    fn eq(&self, other: &Self) -> bool {
        let whole = |of: &Self| (of.fingerprint, of.epoch);
        whole(self) == whole(other) && self.version == other.version && self.name == other.name
    }
}

impl Eq for ObjectId {}

/// The key of an extent: an exact range of one version of an object.
#[derive(Clone, Debug)]
pub struct ExtentKey {
    object: Arc<ObjectId>,
    range: ByteRange,
}

impl ExtentKey {
    /// The key of that range of that version.
    pub fn new(object: Arc<ObjectId>, range: ByteRange) -> Self {
        Self { object, range }
    }

    /// The version it is a part of.
    pub fn object(&self) -> &Arc<ObjectId> {
        &self.object
    }

    /// Which part.
    pub fn range(&self) -> ByteRange {
        self.range
    }
}

impl PartialEq for ExtentKey {
    fn eq(&self, other: &Self) -> bool {
        self.range == other.range && (Arc::ptr_eq(&self.object, &other.object) || self.object == other.object)
    }
}

impl Eq for ExtentKey {}

impl Hash for ExtentKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.object.fingerprint, self.range).hash(state);
    }
}

/// What a store said about one version of an object, all of it from one answer.
#[derive(Clone, Debug)]
pub struct Metadata {
    /// The version it belongs to.
    pub id: Arc<ObjectId>,
    /// Size in bytes.
    pub size: u64,
    /// The entity tag as the store writes it, weak or strong.
    pub etag: Option<Arc<str>>,
    /// Last-Modified.
    pub modified: Option<SystemTime>,
    /// Header fields of the representation that are passed on as they are.
    pub fields: Fields,
    /// When the store said it, by this machine's clock.
    pub received_at: SystemTime,
}

/// Header fields of a representation; what the store does not give is not invented.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Fields {
    /// Content-Type.
    pub content_type: Option<Box<str>>,
    /// Content-Encoding.
    pub content_encoding: Option<Box<str>>,
    /// Content-Language.
    pub content_language: Option<Box<str>>,
    /// Content-Disposition.
    pub content_disposition: Option<Box<str>>,
    /// Cache-Control.
    pub cache_control: Option<Box<str>>,
}

impl Metadata {
    /// Reads the version off what a store said.
    pub fn new(
        name: ObjectName,
        size: u64,
        etag: Option<Arc<str>>,
        modified: Option<SystemTime>,
        fields: Fields,
    ) -> Self {
        let version = match &etag {
            Some(tag) if !tag.is_empty() && !tag.starts_with("W/") => Version::Strong(Arc::clone(tag)),
            _ => Version::Weak { size, modified, tag: etag.clone() },
        };
        let received_at = SystemTime::now();
        Self { id: Arc::new(ObjectId::new(name, version, 0)), size, etag, modified, fields, received_at }
    }

    /// The same, in an epoch of the object.
    #[must_use]
    pub fn in_epoch(mut self, epoch: u64) -> Self {
        if self.id.epoch != epoch {
            self.id = Arc::new(ObjectId::new(self.id.name.clone(), self.id.version.clone(), epoch));
        }
        self
    }

    /// Whether both say the same, whenever they were said.
    pub fn says_the_same(&self, other: &Self) -> bool {
        let tail = |of: &Self| (of.size, of.modified);
        self.id == other.id && tail(self) == tail(other) && self.etag == other.etag && self.fields == other.fields
    }

    /// The tag to send as If-Match, when the version has a strong one.
    pub fn strong_etag(&self) -> Option<&str> {
        match self.id.version() {
            Version::Strong(tag) => Some(tag),
            Version::Weak { .. } => None,
        }
    }

    /// Bytes it holds on the heap, for the weigher: an estimate that counts every string once.
    pub fn heap_bytes(&self) -> usize {
        let text = |field: &Option<Box<str>>| field.as_ref().map_or(0, |text| text.len());
        let fields = &self.fields;
        size_of::<Self>()
            + size_of::<ObjectId>()
            + self.etag.as_ref().map_or(0, |tag| tag.len())
            + self.id.name.key.as_str().len()
            + [
                &fields.content_type,
                &fields.content_encoding,
                &fields.content_language,
                &fields.content_disposition,
                &fields.cache_control,
            ]
            .into_iter()
            .map(text)
            .sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(etag: Option<&str>) -> Metadata {
        let name = ObjectName { store: StoreName::new("s").unwrap(), key: ObjectKey::new("k").unwrap() };
        Metadata::new(name, 10, etag.map(Into::into), None, Fields::default())
    }

    #[test]
    fn only_a_strong_tag_is_a_strong_version() {
        assert_eq!(metadata(Some("\"a\"")).strong_etag(), Some("\"a\""));
        assert_eq!(metadata(Some("W/\"a\"")).strong_etag(), None);
        assert_eq!(metadata(Some("")).strong_etag(), None);
        assert_eq!(metadata(None).strong_etag(), None);
        assert_ne!(metadata(Some("W/\"a\"")).id, metadata(Some("W/\"b\"")).id);
        assert_eq!(metadata(Some("\"a\"")).id, metadata(Some("\"a\"")).id);
    }

    #[test]
    fn names_are_checked() {
        for good in ["a", "my-bucket.1", "A_b"] {
            assert!(StoreName::new(good).is_some(), "{good}");
        }
        for bad in ["", ".hidden", "a/b", "ü", "a b", &"x".repeat(64)] {
            assert!(StoreName::new(bad).is_none(), "{bad}");
        }
        assert!(ObjectKey::new("").is_none());
        assert!(ObjectKey::new(&"k".repeat(KEY_BYTES_MAX)).is_some());
        assert!(ObjectKey::new(&"k".repeat(KEY_BYTES_MAX + 1)).is_none());
    }
}
