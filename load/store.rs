//! The store that load is measured against: S3-like, read-only, with computed objects of any size.
//! `store ADDRESS [LATENCY_MS [BYTES_PER_SECOND]]`
//!
//! Every key `/bucket/size-N/...` is an object of N bytes. Its byte at an offset is `(offset + sum of the key's bytes) % 251`,
//! the key without the bucket, so that bytes of another place or object are seen to be wrong.
use std::convert::Infallible;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{StreamExt, stream};

/// The period of the bytes, a prime: no shift by a power of two maps them onto themselves.
const PERIOD: u64 = 251;

/// Bytes sent at a time.
const CHUNK: u64 = 64 << 10;

const ETAG: &str = "\"1\"";
const MODIFIED: &str = "Tue, 01 Dec 2026 00:00:00 GMT";

#[derive(Clone, Copy)]
struct Pace {
    latency: Duration,
    per_chunk: Duration,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:9700".to_owned());
    let latency = arguments.next().map_or(Ok(0), |milliseconds| milliseconds.parse())?;
    let rate: u64 = arguments.next().map_or(Ok(0), |rate| rate.parse())?;
    let per_chunk = Duration::from_micros((CHUNK * 1_000_000).checked_div(rate).unwrap_or(0));
    let pace = Pace { latency: Duration::from_millis(latency), per_chunk };
    axum_server::from_tcp(TcpListener::bind(address)?)?
        .acceptor(axum_server::accept::NoDelayAcceptor::new())
        .http1_only()
        .serve(Router::new().fallback(answer).with_state(pace).into_make_service())
        .await?;
    Ok(())
}

async fn answer(State(pace): State<Pace>, method: Method, uri: Uri, headers: HeaderMap) -> Response {
    if !pace.latency.is_zero() {
        tokio::time::sleep(pace.latency).await;
    }
    let key = uri.path().strip_prefix("/bucket/").unwrap_or_default().to_owned();
    let Some(size) = size_of_object(&key) else { return StatusCode::NOT_FOUND.into_response() };
    let field = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if field(header::IF_MATCH).is_some_and(|tag| tag != ETAG) {
        return StatusCode::PRECONDITION_FAILED.into_response();
    }
    if field(header::IF_NONE_MATCH) == Some(ETAG) {
        return StatusCode::NOT_MODIFIED.into_response();
    }
    let response = Response::builder().header(header::ETAG, ETAG).header(header::LAST_MODIFIED, MODIFIED);
    let (response, bytes) = match field(header::RANGE).map(|range| parse(range, size)) {
        None => (response, 0..size),
        Some(None) => return StatusCode::RANGE_NOT_SATISFIABLE.into_response(),
        Some(Some(range)) => {
            let announced = format!("bytes {}-{}/{size}", range.start, range.end - 1);
            (response.status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, announced), range)
        }
    };
    let response = response.header(header::CONTENT_LENGTH, bytes.end - bytes.start);
    let body = if method == Method::HEAD { Body::empty() } else { body(&key, bytes, pace.per_chunk) };
    response.body(body).unwrap_or_default()
}

fn size_of_object(key: &str) -> Option<u64> {
    key.split('/').next()?.strip_prefix("size-")?.parse().ok()
}

fn parse(range: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let range = if first.is_empty() {
        size.saturating_sub(last.parse().ok()?)..size
    } else {
        let last = if last.is_empty() { u64::MAX } else { last.parse().ok()? };
        first.parse().ok()?..last.saturating_add(1).min(size)
    };
    (range.start < range.end).then_some(range)
}

fn body(key: &str, bytes: Range<u64>, per_chunk: Duration) -> Body {
    static BYTES: OnceLock<Bytes> = OnceLock::new();
    let all = BYTES.get_or_init(|| (0..CHUNK + PERIOD).map(|n| u8::try_from(n % PERIOD).unwrap_or(0)).collect());
    let shift: u64 = key.bytes().map(u64::from).sum();
    let chunks = stream::unfold(bytes.start, move |at| async move {
        if at >= bytes.end {
            return None;
        }
        if !per_chunk.is_zero() {
            tokio::time::sleep(per_chunk).await;
        }
        let (from, length) = ((at + shift) % PERIOD, CHUNK.min(bytes.end - at));
        let chunk = usize::try_from(from).ok().zip(usize::try_from(from + length).ok());
        Some((chunk.map_or_else(Bytes::new, |(from, to)| all.slice(from..to)), at + length))
    });
    Body::from_stream(chunks.map(Ok::<_, Infallible>))
}
