//! A store over HTTP as S3 speaks it, whose objects may be computed, whose answers may be wrong, and that remembers what
//! it was asked.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::serve::ListenerExt;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream;
use percent_encoding::percent_decode_str;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// One request that it was asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asked {
    pub method: String,
    pub key: String,
    pub range: Option<String>,
    pub if_match: Option<String>,
    pub accept_encoding: Option<String>,
}

/// What goes wrong with the answers for a key.
#[derive(Clone, Default, Debug)]
pub enum Fault {
    #[default]
    None,
    /// 200 with everything, whatever the range.
    IgnoresRange,
    /// Another range than the one asked for, consistently.
    OtherRange,
    /// Content-Range says one thing, the body is shorter; its Content-Length agrees with the body.
    Short(u64),
    /// Likewise longer.
    Long(u64),
    /// The connection breaks after so many bytes.
    Truncated(u64),
    /// Nothing more comes after so many bytes.
    Hangs(u64),
    /// A pause before every 64 KiB.
    Drips(Duration),
    /// This status.
    Status(u16),
    /// Every GET has another ETag.
    ChangesAlways,
    /// A total that is too large.
    WrongTotal,
    /// No Content-Range.
    NoContentRange,
    /// A redirect to somewhere else.
    Redirects(String),
}

/// An object.
#[derive(Clone)]
pub struct Object {
    pub size: u64,
    /// The bytes, or `None` where they are computed.
    pub bytes: Option<Bytes>,
    pub etag: Option<String>,
    pub modified: Option<String>,
    pub headers: Vec<(&'static str, String)>,
}

#[derive(Default)]
struct Inner {
    objects: HashMap<String, Object>,
    faults: HashMap<String, (Fault, usize)>,
    asked: Vec<Asked>,
    bytes_sent: u64,
    generation: u64,
}

pub struct Upstream {
    address: String,
    inner: Arc<Mutex<Inner>>,
    /// Answers wait while this is false.
    gate: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

#[derive(Clone)]
struct Shared {
    inner: Arc<Mutex<Inner>>,
    gate: watch::Receiver<bool>,
}

/// The byte of a computed object at an offset.
pub fn byte_at(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53).to_le_bytes()[0]
}

/// The bytes of a computed object.
pub fn computed(range: Range<u64>) -> Vec<u8> {
    range.map(byte_at).collect()
}

impl Upstream {
    pub async fn start() -> Self {
        let inner = Arc::new(Mutex::new(Inner::default()));
        let (gate, open) = watch::channel(true);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let router = Router::new().fallback(answer).with_state(Shared { inner: Arc::clone(&inner), gate: open });
        // Else every answer waits 40 ms for an acknowledgement that is delayed.
        let listener = listener.tap_io(|stream| stream.set_nodelay(true).unwrap());
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, inner, gate, serving }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Puts an object with an ETag of its own; again is an overwrite.
    pub fn put(&self, key: &str, bytes: impl Into<Bytes>) {
        let bytes = bytes.into();
        self.put_object(key, |etag| Object {
            size: bytes.len() as u64,
            bytes: Some(bytes),
            etag: Some(etag),
            modified: Some("Tue, 01 Dec 2026 00:00:00 GMT".to_owned()),
            headers: vec![("content-type", "application/x-test".to_owned())],
        });
    }

    /// Puts an object of any size whose bytes are computed.
    pub fn put_computed(&self, key: &str, size: u64) {
        self.put_object(key, |etag| Object {
            size,
            bytes: None,
            etag: Some(etag),
            modified: Some("Tue, 01 Dec 2026 00:00:00 GMT".to_owned()),
            headers: Vec::new(),
        });
    }

    pub fn put_object(&self, key: &str, object: impl FnOnce(String) -> Object) {
        let mut inner = self.inner.lock().unwrap();
        inner.generation += 1;
        let etag = format!("\"v{}\"", inner.generation);
        inner.objects.insert(key.to_owned(), object(etag));
    }

    pub fn delete(&self, key: &str) {
        self.inner.lock().unwrap().objects.remove(key);
    }

    /// The next `times` answers to GETs of a key go wrong.
    pub fn fault(&self, key: &str, fault: Fault, times: usize) {
        self.inner.lock().unwrap().faults.insert(key.to_owned(), (fault, times));
    }

    /// Holds all answers back until [`Self::release`].
    pub fn hold(&self) {
        self.gate.send_replace(false);
    }

    pub fn release(&self) {
        self.gate.send_replace(true);
    }

    /// What it was asked since the last call.
    pub fn take_asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.inner.lock().unwrap().asked)
    }

    pub fn asked_count(&self) -> usize {
        self.inner.lock().unwrap().asked.len()
    }

    /// Body bytes it has put on the wire since the last call.
    pub fn take_bytes_sent(&self) -> u64 {
        std::mem::take(&mut self.inner.lock().unwrap().bytes_sent)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn answer(State(mut shared): State<Shared>, request: Request) -> Response {
    let (request, _) = request.into_parts();
    let path = request.uri.path().strip_prefix("/bucket/").unwrap_or_default();
    let key = percent_decode_str(path).decode_utf8().unwrap().into_owned();
    let header = |name| request.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let method = request.method.as_str().to_owned();
    let asked = Asked {
        method,
        key: key.clone(),
        range: header("range"),
        if_match: header("if-match"),
        accept_encoding: header("accept-encoding"),
    };
    let if_none_match = header("if-none-match");
    shared.inner.lock().unwrap().asked.push(asked.clone());
    let _ = shared.gate.wait_for(|open| *open).await;
    let mut inner = shared.inner.lock().unwrap();
    let Some(mut object) = inner.objects.get(&key).cloned() else { return status(404) };
    let mut fault = Fault::None;
    if let Some((named, times)) = inner.faults.get_mut(&key).filter(|(_, times)| asked.method == "GET" && *times > 0) {
        *times -= 1;
        fault = named.clone();
    }
    if matches!(fault, Fault::ChangesAlways) {
        inner.generation += 1;
        object.etag = Some(format!("\"v{}\"", inner.generation));
    }
    drop(inner);
    if asked.if_match.as_ref().is_some_and(|tag| Some(tag) != object.etag.as_ref()) {
        return status(412);
    }
    if if_none_match.is_some() && if_none_match == object.etag {
        return status(304);
    }
    respond(&shared, &asked, &object, &fault)
}

fn status(code: u16) -> Response {
    Response::builder().status(code).header("content-length", 0).body(Body::empty()).unwrap()
}

fn respond(shared: &Shared, asked: &Asked, object: &Object, fault: &Fault) -> Response {
    let size = object.size;
    let mut response = Response::builder().header("accept-ranges", "bytes");
    for (name, value) in [("etag", &object.etag), ("last-modified", &object.modified)] {
        if let Some(value) = value {
            response = response.header(name, value);
        }
    }
    for (name, value) in &object.headers {
        response = response.header(*name, value);
    }
    if asked.method == "HEAD" {
        return response.header("content-length", size).body(Body::empty()).unwrap();
    }
    let range = match asked.range.as_deref().map(|range| parse(range, size)) {
        None => None,
        Some(None) => return status(416),
        Some(range) => range,
    };
    let range = range.filter(|_| !matches!(fault, Fault::IgnoresRange));
    let mut bytes = range.clone().unwrap_or(0..size);
    let mut announced = range;
    let mut total = size;
    match fault {
        Fault::Status(code) => return status(*code),
        Fault::Redirects(to) => {
            return Response::builder().status(307).header("location", to).body(Body::empty()).unwrap();
        }
        Fault::OtherRange => {
            bytes = bytes.start + 1..bytes.end + 1;
            announced = Some(bytes.clone());
        }
        Fault::Short(by) => bytes.end -= by,
        Fault::Long(by) => bytes.end += by,
        Fault::WrongTotal => total += 10,
        _ => {}
    }
    let length = bytes.end - bytes.start;
    if let Some(range) = announced {
        response = response.status(206);
        if !matches!(fault, Fault::NoContentRange) {
            response = response.header("content-range", format!("bytes {}-{}/{total}", range.start, range.end - 1));
        }
    }
    let body = body(shared, object, bytes, fault);
    response.header("content-length", length).body(body).unwrap()
}

/// `None` where it is unsatisfiable.
fn parse(range: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    if first.is_empty() {
        let length: u64 = last.parse().unwrap();
        return (length > 0 && size > 0).then(|| size.saturating_sub(length)..size);
    }
    let first: u64 = first.parse().unwrap();
    let end = if last.is_empty() { size } else { last.parse::<u64>().unwrap().saturating_add(1).min(size) };
    (first < size).then_some(first..end)
}

fn body(shared: &Shared, object: &Object, bytes: Range<u64>, fault: &Fault) -> Body {
    const CHUNK: u64 = 64 << 10;
    let (stop, hangs) = match fault {
        Fault::Truncated(after) => (bytes.start + after, false),
        Fault::Hangs(after) => (bytes.start + after, true),
        _ => (u64::MAX, false),
    };
    let end = bytes.end.min(stop);
    let (inner, content) = (Arc::clone(&shared.inner), object.bytes.clone());
    let chunks = (bytes.start..end).step_by(CHUNK as usize).map(move |at| {
        let range = at..end.min(at + CHUNK);
        let chunk = match &content {
            Some(content) => {
                let mut chunk = content[range.start as usize..content.len().min(range.end as usize)].to_vec();
                chunk.resize((range.end - range.start) as usize, b'?');
                chunk
            }
            None => computed(range),
        };
        inner.lock().unwrap().bytes_sent += chunk.len() as u64;
        Ok::<_, Infallible>(chunk)
    });
    let rest = stream::once(async move {
        match (stop < bytes.end, hangs) {
            (false, _) => Ok(Vec::new()),
            (true, false) => Err(std::io::Error::other("cut")),
            (true, true) => {
                tokio::time::sleep(Duration::from_hours(1)).await;
                Ok(Vec::new())
            }
        }
    });
    let pause = if let Fault::Drips(pause) = fault { *pause } else { Duration::ZERO };
    let chunks = stream::iter(chunks).then(move |chunk| async move {
        tokio::time::sleep(pause).await;
        chunk
    });
    Body::from_stream(chunks.map(|chunk| Ok::<_, std::io::Error>(chunk.unwrap())).chain(rest))
}
