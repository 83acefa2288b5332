//! The embedded store: three objects whose bytes are computed, so that a first start needs no store and no memory.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    Attribute, Attributes, CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

const HELLO: &[u8] = b"Hello from halfopen, which keeps the bytes you ask for and no others.\n";

/// Name, size in bytes, Content-Type.
const OBJECTS: [(&str, u64, &str); 3] = [
    ("hello.txt", HELLO.len() as u64, "text/plain; charset=utf-8"),
    ("1MiB.bin", 1 << 20, "application/octet-stream"),
    ("64MiB.bin", 64 << 20, "application/octet-stream"),
];

/// Bytes computed at a time.
const CHUNK: u64 = 64 << 10;

/// Last-Modified of all objects: 2026-01-01.
const MODIFIED: Duration = Duration::from_hours(490_896);

/// The store itself; it holds nothing.
#[derive(Debug)]
pub(super) struct Demo;

impl fmt::Display for Demo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("demo")
    }
}

fn bytes(key: &str, range: Range<u64>) -> Bytes {
    if key == OBJECTS[0].0 {
        return range.filter_map(|at| HELLO.get(usize::try_from(at).ok()?).copied()).collect();
    }
    range.map(byte_at).collect()
}

/// The byte at an offset: `SplitMix64`'s output function, so that neighbouring bytes differ and no shift maps onto itself.
fn byte_at(offset: u64) -> u8 {
    let mixed = (offset ^ (offset >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed >> 56).to_le_bytes()[0]
}

fn read_only<T>() -> Result<T> {
    Err(Error::NotSupported { source: "the demo store can only be read".into() })
}

#[async_trait]
impl ObjectStore for Demo {
    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let object = OBJECTS.into_iter().find(|(name, ..)| *name == location.as_ref());
        let Some((name, size, content_type)) = object else {
            return Err(Error::NotFound { path: location.to_string(), source: "no such object".into() });
        };
        let meta = ObjectMeta {
            location: location.clone(),
            last_modified: (SystemTime::UNIX_EPOCH + MODIFIED).into(),
            size,
            e_tag: Some(format!("\"demo-{size}\"")),
            version: None,
        };
        options.check_preconditions(&meta)?;
        let generic = |error| Error::Generic { store: "demo", source: Box::new(error) };
        let range = options.range.map_or(Ok(0..size), |range| range.as_range(size).map_err(generic))?;
        let end = range.end;
        let chunks = (range.start..end).step_by(usize::try_from(CHUNK).unwrap_or(usize::MAX));
        let body = stream::iter(chunks).map(move |at| Ok(bytes(name, at..end.min(at + CHUNK)))).boxed();
        let attributes = Attributes::from_iter([(Attribute::ContentType, content_type)]);
        let payload = GetResultPayload::Stream(body);
        Ok(GetResult { payload, meta, range, attributes, extensions: http::Extensions::default() })
    }

    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        read_only()
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        read_only()
    }

    fn delete_stream(&self, _: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        stream::once(async { read_only() }).boxed()
    }

    fn list(&self, _: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        stream::once(async { read_only() }).boxed()
    }

    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        read_only()
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        read_only()
    }
}
