//! Conditional requests (RFC 9110 section 13) and wishes (RFC 9111 section 5.2.1): cold, warm, from disk.

use reqwest::{Method, Response};

use crate::common::upstream::{Object, Upstream, computed};
use crate::common::{Halfopen, disk, field, store};

const DATE: &str = "Tue, 01 Dec 2026 00:00:00 GMT";
const BEFORE: &str = "Mon, 30 Nov 2026 00:00:00 GMT";
const AFTER: &str = "Tue, 01 Dec 2099 00:00:00 GMT";

async fn ask(server: &Halfopen, method: Method, key: &str, headers: &[(&'static str, &str)]) -> Response {
    let mut request = server.client.request(method, format!("{}/s/{key}", server.data));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.send().await.unwrap()
}

/// Conditions with a range of the first four of ten bytes; the status that follows. The tag is `"now"`.
const TABLE: &[(&[(&str, &str)], u16)] = &[
    (&[("if-match", "\"now\"")], 206),
    (&[("if-match", "\"old\", \"now\"")], 206),
    (&[("if-match", "*")], 206),
    (&[("if-match", "\"old\"")], 412),
    (&[("if-match", "W/\"now\"")], 412),
    (&[("if-none-match", "\"now\"")], 304),
    (&[("if-none-match", "\"old\", W/\"now\"")], 304),
    (&[("if-none-match", "*")], 304),
    (&[("if-none-match", "\"old\"")], 206),
    (&[("if-modified-since", DATE)], 304),
    (&[("if-modified-since", AFTER)], 304),
    (&[("if-modified-since", BEFORE)], 206),
    (&[("if-modified-since", "yesterday")], 206),
    (&[("if-unmodified-since", DATE)], 206),
    (&[("if-unmodified-since", BEFORE)], 412),
    // The order of 13.2.2: tags hide dates, and If-Match comes before If-None-Match.
    (&[("if-match", "\"now\""), ("if-unmodified-since", BEFORE)], 206),
    (&[("if-none-match", "\"old\""), ("if-modified-since", AFTER)], 206),
    (&[("if-match", "\"old\""), ("if-none-match", "\"now\"")], 412),
    (&[("if-match", "\"now\""), ("if-none-match", "\"now\"")], 304),
    // If-Range: 200 when the version is not the one named, and never for a weak tag.
    (&[("if-range", "\"now\"")], 206),
    (&[("if-range", "\"old\"")], 200),
    (&[("if-range", "W/\"now\"")], 200),
    (&[("if-range", DATE)], 206),
    (&[("if-range", BEFORE)], 200),
    (&[("if-range", AFTER)], 200),
    (&[("if-range", "nonsense")], 206),
    (&[("if-match", "\"now\""), ("if-range", "\"old\"")], 200),
];

#[tokio::test(flavor = "multi_thread")]
async fn every_condition_cold_warm_and_from_disk() {
    let upstream = Upstream::start().await;
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("{}{}", store(&upstream), disk(directory.path()));
    let mut server = Halfopen::start(&configuration).await;
    for (index, _) in TABLE.iter().enumerate() {
        upstream.put_object(&format!("row-{index}"), |_| object("\"now\""));
    }
    for temperature in ["cold", "warm", "disk"] {
        if temperature == "disk" {
            server.stop().await;
            server = Halfopen::start(&configuration).await;
            upstream.take_asked();
        }
        for (index, (conditions, status)) in TABLE.iter().enumerate() {
            let key = format!("row-{index}");
            let what = format!("{conditions:?}, {temperature}");
            let with_range = [conditions, &[("range", "bytes=0-3")][..]].concat();
            let response = ask(&server, Method::GET, &key, &with_range).await;
            assert_eq!(response.status(), *status, "{what}");
            if *status == 304 {
                assert_eq!(field(&response, "etag"), "\"now\"", "{what}");
                assert_eq!(field(&response, "cache-control"), "max-age=5", "{what}");
                assert_eq!(field(&response, "content-type"), "", "{what}");
                assert!(!field(&response, "date").is_empty(), "{what}");
            }
            let expected = match status {
                206 => computed(0..4),
                200 => computed(0..10),
                304 => Vec::new(),
                _ => continue,
            };
            assert_eq!(response.bytes().await.unwrap(), expected, "{what}");
            // HEAD knows no range: a condition on one is not judged.
            let head = ask(&server, Method::HEAD, &key, conditions).await;
            let expected = if matches!(status, 304 | 412) { *status } else { 200 };
            assert_eq!(head.status(), expected, "HEAD, {what}");
        }
        if temperature != "cold" {
            assert_eq!(upstream.take_asked(), [], "{temperature}: nothing is asked of the store");
        }
        upstream.take_asked();
    }
    assert_eq!(server.metric("halfopen_reads_total", "not_modified").await, 6);
}

fn object(etag: &str) -> Object {
    Object {
        size: 10,
        bytes: None,
        etag: Some(etag.to_owned()),
        modified: Some(DATE.to_owned()),
        headers: vec![("content-type", "text/plain".to_owned()), ("cache-control", "max-age=5".to_owned())],
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_condition_comes_before_an_unsatisfiable_range() {
    let upstream = Upstream::start().await;
    upstream.put_object("k", |_| object("\"now\""));
    let server = Halfopen::before(&upstream).await;
    let failed = ask(&server, Method::GET, "k", &[("range", "bytes=50-60"), ("if-match", "\"old\"")]).await;
    assert_eq!(failed.status(), 412);
    let unsatisfiable = ask(&server, Method::GET, "k", &[("range", "bytes=50-60"), ("if-match", "\"now\"")]).await;
    assert_eq!(unsatisfiable.status(), 416);
    assert!(upstream.take_asked().iter().all(|asked| asked.method == "HEAD"), "a 412 and a 416 fetch nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_young_date_is_no_strong_validator() {
    let upstream = Upstream::start().await;
    let now = httpdate::fmt_http_date(std::time::SystemTime::now() + std::time::Duration::from_hours(1));
    upstream.put_object("k", |etag| Object { modified: Some(now.clone()), ..object(&etag) });
    let server = Halfopen::before(&upstream).await;
    let response = ask(&server, Method::GET, "k", &[("range", "bytes=0-3"), ("if-range", &now)]).await;
    assert_eq!(response.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn wishes_of_the_request() {
    let upstream = Upstream::start().await;
    upstream.put("k", "0123456789");
    let server = Halfopen::before(&upstream).await;
    let wish = async |wish: &'static str| {
        ask(&server, Method::GET, "k", &[("cache-control", wish), ("range", "bytes=2-5")]).await
    };

    // Nothing is known: only-if-cached fetches nothing.
    assert_eq!(wish("only-if-cached").await.status(), 504);
    assert_eq!(upstream.take_asked(), []);

    // Past the cache: nothing is kept.
    for _ in 0..2 {
        let response = wish("no-store").await;
        assert_eq!(field(&response, "cache-status"), "halfopen; fwd=request");
        assert_eq!(response.text().await.unwrap(), "2345");
    }
    assert_eq!(upstream.take_asked().iter().filter(|asked| asked.method == "GET").count(), 2);
    assert_eq!(server.memory().await["cache"]["entries"], 0);

    // Without a wish: a miss, then a hit.
    for status in ["halfopen; fwd=miss; stored", "halfopen; hit; detail=memory; ttl=60"] {
        let response = wish("max-stale").await;
        assert_eq!(field(&response, "cache-status"), status);
        assert_eq!(field(&response, "age"), "0");
    }
    assert_eq!(wish("only-if-cached").await.text().await.unwrap(), "2345");
    assert_eq!(wish("max-age=60").await.text().await.unwrap(), "2345");
    upstream.take_asked();

    // no-cache and max-age=0 ask the store, and fetch nothing when it is the same.
    for text in ["no-cache", "max-age=0"] {
        let response = wish(text).await;
        assert_eq!(field(&response, "cache-status"), "halfopen; fwd=request", "{text}");
        assert_eq!(response.text().await.unwrap(), "2345");
        let asked: Vec<_> = upstream.take_asked().into_iter().map(|asked| asked.method).collect();
        assert_eq!(asked, ["HEAD"], "{text}");
    }
    upstream.put("k", "abcdefghij");
    assert_eq!(wish("max-age=60").await.text().await.unwrap(), "2345");
    assert_eq!(wish("no-cache").await.text().await.unwrap(), "cdef");
    let partly = ask(&server, Method::GET, "k", &[("cache-control", "only-if-cached")]).await;
    assert_eq!(partly.status(), 504, "a part of it is not all of it");
    let reads = server.metric("halfopen_reads_total", "").await;
    assert_eq!(reads, server.metric("halfopen_responses_total", "GET").await);
}
