//! The header fields of HTTP: the only place where a range has an inclusive end, and where an error gets a status.

use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{
    ACCEPT_RANGES, AGE, CACHE_CONTROL, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH,
    CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderName, LAST_MODIFIED, RANGE, RETRY_AFTER,
};
use http::{HeaderMap, HeaderValue, StatusCode};
use http_range_header::{SyntacticallyCorrectRange, parse_range_header_with_max_ranges};
use serde::Serialize;

use crate::error::{Error, Kind};
use crate::object::Metadata;
use crate::range::{ByteRange, RangeSpec, Resolved};
use crate::reader::Outcome;

/// Cache-Status (RFC 9211).
const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

/// Seconds after which a client may come again when this server is out of a budget: about as long as a fill takes.
const RETRY_SECONDS: u64 = 1;

/// 9999-12-31T23:59:59Z in seconds since 1970: HTTP's dates have four digits for the year.
const LAST_DATE_SECONDS: u64 = 253_402_300_799;

/// The range that a request asks for (RFC 9110 section 14.2).
///
/// A malformed field, another unit, several ranges and several fields ask for the whole object: a server may ignore
/// the field, and clients that send such things expect 200.
pub fn range_spec(headers: &HeaderMap) -> RangeSpec {
    let mut fields = headers.get_all(RANGE).iter();
    let (Some(field), None) = (fields.next(), fields.next()) else { return RangeSpec::Whole };
    field.to_str().map_or(RangeSpec::Whole, parse_range)
}

fn parse_range(field: &str) -> RangeSpec {
    let Ok(ranges) = parse_range_header_with_max_ranges(field, NonZeroUsize::MIN) else { return RangeSpec::Whole };
    match ranges.into_ranges()[..] {
        // The inclusive last position becomes the end here. A number too large for 64 bits was read as the largest
        // one, and no object reaches there.
        [SyntacticallyCorrectRange::Indexed(first, last)] => {
            ByteRange::new(first, last.saturating_add(1)).map_or(RangeSpec::From(first), RangeSpec::Part)
        }
        [SyntacticallyCorrectRange::FromStart(first)] => RangeSpec::From(first),
        [SyntacticallyCorrectRange::FromLast(length)] => RangeSpec::Suffix(length),
        _ => RangeSpec::Whole,
    }
}

/// Content-Range of a part (RFC 9110 section 14.4).
fn content_range(range: ByteRange, size: u64) -> String {
    format!("bytes {}-{}/{size}", range.start(), range.last())
}

/// Status and header fields of a successful read. The body's length is in Content-Length.
pub fn opened(metadata: &Metadata, resolved: Resolved) -> (StatusCode, HeaderMap) {
    let mut headers = representation(metadata);
    let length = resolved.bytes(metadata.size).map_or(0, ByteRange::len);
    headers.insert(CONTENT_LENGTH, length.into());
    let Resolved::Part(range) = resolved else { return (StatusCode::OK, headers) };
    insert(&mut headers, CONTENT_RANGE, &content_range(range, metadata.size));
    (StatusCode::PARTIAL_CONTENT, headers)
}

/// The answer to a condition that found the client's version to be current (RFC 9110 section 15.4.5).
pub fn not_modified(metadata: &Metadata) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    let mut fields = representation(metadata);
    for unneeded in [ACCEPT_RANGES, CONTENT_TYPE, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_DISPOSITION] {
        fields.remove(unneeded);
    }
    *response.headers_mut() = fields;
    response
}

/// The answer to a range that holds no byte of the object (RFC 9110 section 15.5.17).
pub fn unsatisfiable(metadata: &Metadata) -> Response {
    let detail = format!("the object has {} bytes, and none of them is in the range", metadata.size);
    let mut response = problem(StatusCode::RANGE_NOT_SATISFIABLE, detail);
    insert(response.headers_mut(), CONTENT_RANGE, &format!("bytes */{}", metadata.size));
    response
}

/// Header fields of a representation; what the store did not give is not invented.
fn representation(metadata: &Metadata) -> HeaderMap {
    // Eleven fields with those of the read: one table, allocated once.
    let mut headers = HeaderMap::with_capacity(12);
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(etag) = metadata.etag.as_deref().filter(|etag| !etag.is_empty()) {
        insert(&mut headers, ETAG, &quoted(etag));
    }
    if let Some(date) = metadata.modified.and_then(http_date) {
        insert(&mut headers, LAST_MODIFIED, &date);
    }
    let fields = &metadata.fields;
    for (name, value) in [
        (CONTENT_TYPE, &fields.content_type),
        (CONTENT_ENCODING, &fields.content_encoding),
        (CONTENT_LANGUAGE, &fields.content_language),
        (CONTENT_DISPOSITION, &fields.content_disposition),
        (CACHE_CONTROL, &fields.cache_control),
    ] {
        if let Some(value) = value {
            insert(&mut headers, name, value);
        }
    }
    headers
}

/// Some stores (file, memory) give tags without the quotes that HTTP asks for.
pub(super) fn quoted(etag: &str) -> Cow<'_, str> {
    if etag.starts_with('"') || etag.starts_with("W/\"") { etag.into() } else { format!("\"{etag}\"").into() }
}

pub(super) fn http_date(date: SystemTime) -> Option<String> {
    let since = date.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    (since.as_secs() <= LAST_DATE_SECONDS).then(|| httpdate::fmt_http_date(date))
}

/// Inserts a field, unless a store gave something that no header field can hold.
fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

/// Adds the Age of what was known (RFC 9111 section 5.1).
pub fn add_age(headers: &mut HeaderMap, age: Duration) {
    headers.insert(AGE, age.as_secs().into());
}

/// Adds Cache-Status (RFC 9211 section 2): how the read was opened.
pub fn add_cache_status(headers: &mut HeaderMap, outcome: Outcome) {
    let status: Cow<'static, str> = match outcome {
        Outcome::Memory(ttl) => format!("halfopen; hit; detail=memory; ttl={}", seconds(ttl)).into(),
        Outcome::Miss => "halfopen; fwd=miss; stored".into(),
        Outcome::Collapsed => "halfopen; fwd=miss; collapsed".into(),
        Outcome::Disk(ttl) => format!("halfopen; hit; detail=disk; ttl={}", seconds(ttl)).into(),
        Outcome::Requested => "halfopen; fwd=request".into(),
        Outcome::Bypass => "halfopen; fwd=bypass".into(),
        Outcome::Stale(status) => format!("halfopen; fwd=stale; fwd-status={status}").into(),
    };
    insert(headers, CACHE_STATUS, &status);
}

/// Whole seconds that are left; a part of a second counts as fresh.
fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

/// The answer to a request that failed before its first byte.
pub fn failed(error: &Error) -> Response {
    let (status, detail) = match error.kind() {
        Kind::NotFound => (StatusCode::NOT_FOUND, "there is no such object"),
        Kind::Forbidden => (StatusCode::FORBIDDEN, "the store refuses access to this object"),
        Kind::Changed => (StatusCode::SERVICE_UNAVAILABLE, "the object keeps changing while it is read"),
        Kind::Protocol | Kind::RangeRefused => {
            (StatusCode::BAD_GATEWAY, "the store's answer was not the one asked for")
        }
        Kind::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "the store is not available"),
        Kind::TimedOut => (StatusCode::GATEWAY_TIMEOUT, "the store did not answer in time"),
        Kind::NotCached => {
            (StatusCode::GATEWAY_TIMEOUT, "this is not in the cache, and the request asks for nothing else")
        }
        Kind::Overloaded(_) | Kind::Abandoned => {
            (StatusCode::SERVICE_UNAVAILABLE, "this server is at one of its limits")
        }
        Kind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "this server failed; its log says why"),
    };
    let mut response = problem(status, detail);
    if status == StatusCode::SERVICE_UNAVAILABLE {
        let after = error.retry_after().map_or(RETRY_SECONDS, seconds);
        response.headers_mut().insert(RETRY_AFTER, after.into());
    }
    response
}

#[derive(Serialize)]
struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
}

/// A problem document (RFC 9457). The detail is for clients: no internals, no credentials.
pub fn problem(status: StatusCode, detail: impl AsRef<str>) -> Response {
    let title = status.canonical_reason().unwrap_or("Error");
    let document = Problem { r#type: "about:blank", title, status: status.as_u16(), detail: detail.as_ref() };
    let mut response = (status, Json(document)).into_response();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spec(field: &str) -> RangeSpec {
        range_spec(&HeaderMap::from_iter([(RANGE, HeaderValue::from_str(field).unwrap())]))
    }

    fn part(start: u64, end: u64) -> RangeSpec {
        RangeSpec::Part(ByteRange::new(start, end).unwrap())
    }

    #[test]
    fn ranges_are_read_as_rfc_9110_says() {
        for (field, expected) in [
            ("bytes=0-0", part(0, 1)),
            ("bytes=8-100", part(8, 101)),
            ("BYTES=1-2", part(1, 3)),
            ("bytes=10-", RangeSpec::From(10)),
            ("bytes=-8", RangeSpec::Suffix(8)),
            ("bytes=-0", RangeSpec::Suffix(0)),
            ("bytes=0-18446744073709551615", part(0, u64::MAX)),
            ("bytes=0-99999999999999999999999", part(0, u64::MAX)),
            ("bytes=-18446744073709551616", RangeSpec::Suffix(u64::MAX)),
            ("bytes=99999999999999999999-", RangeSpec::From(u64::MAX)),
            ("bytes=18446744073709551615-18446744073709551615", RangeSpec::From(u64::MAX)),
            ("bytes=5-2", RangeSpec::Whole),
            ("bytes=10-9", RangeSpec::Whole),
            ("bytes=abc-def", RangeSpec::Whole),
            ("bytes=-", RangeSpec::Whole),
            ("bytes=", RangeSpec::Whole),
            ("bytes=1-x", RangeSpec::Whole),
            ("bytes=+1-2", RangeSpec::Whole),
            ("bytes=0x1-2", RangeSpec::Whole),
            ("bytes 0-1", RangeSpec::Whole),
            ("items=0-1", RangeSpec::Whole),
            ("bytes=0-50, 50-99", RangeSpec::Whole),
            ("bytes=0-1,5-6", RangeSpec::Whole),
            ("bytes=0-1111111111222222222233333333334", RangeSpec::Whole),
            ("bytes=1111111111222222222233333333334-", RangeSpec::Whole),
        ] {
            assert_eq!(spec(field), expected, "{field}");
        }
        let two = HeaderMap::from_iter([(RANGE, HeaderValue::from_static("bytes=0-1"))]);
        let mut two_fields = two.clone();
        two_fields.append(RANGE, HeaderValue::from_static("bytes=2-3"));
        assert_eq!((range_spec(&two), range_spec(&two_fields)), (part(0, 2), RangeSpec::Whole));
        assert_eq!(range_spec(&HeaderMap::new()), RangeSpec::Whole);
    }

    #[test]
    fn dates_that_http_cannot_write_are_left_out() {
        let at = |seconds| http_date(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(784_111_777).unwrap(), "Sun, 06 Nov 1994 08:49:37 GMT");
        assert!(at(LAST_DATE_SECONDS).is_some() && at(LAST_DATE_SECONDS + 1).is_none());
        assert!(http_date(SystemTime::UNIX_EPOCH - Duration::from_secs(1)).is_none());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(start in 0..u64::MAX - 1, length in 1..u64::MAX) {
            let range = ByteRange::new(start, start.saturating_add(length)).unwrap();
            let text = content_range(range, u64::MAX).replace("bytes ", "bytes=").replace(&format!("/{}", u64::MAX), "");
            prop_assert_eq!(parse_range(&text), RangeSpec::Part(range));
        }

        #[test]
        fn no_text_makes_it_panic(text in "(bytes=)?[ 0-9,+x\\-]{0,70}") {
            let _ = parse_range(&text).resolve(10);
        }
    }
}
