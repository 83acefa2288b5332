//! The truth table of ranges (RFC 9110 section 14), every row cold and warm.

use reqwest::Method;

use crate::common::upstream::{Object, Upstream, computed};
use crate::common::{Halfopen, disk, field, store};

/// Object size, Range, status, Content-Range, the bytes of the body.
type Row = (u64, Option<&'static str>, u16, &'static str, std::ops::Range<u64>);

const TABLE: &[Row] = &[
    (10, None, 200, "", 0..10),
    (10, Some("bytes=0-3"), 206, "bytes 0-3/10", 0..4),
    (10, Some("bytes=0-0"), 206, "bytes 0-0/10", 0..1),
    (10, Some("bytes=9-9"), 206, "bytes 9-9/10", 9..10),
    (10, Some("bytes=0-9"), 206, "bytes 0-9/10", 0..10),
    (10, Some("bytes=0-"), 206, "bytes 0-9/10", 0..10),
    (10, Some("bytes=4-"), 206, "bytes 4-9/10", 4..10),
    (10, Some("bytes=-3"), 206, "bytes 7-9/10", 7..10),
    (10, Some("bytes=-10"), 206, "bytes 0-9/10", 0..10),
    (10, Some("bytes=-2000"), 206, "bytes 0-9/10", 0..10),
    (10, Some("BYTES=1-2"), 206, "bytes 1-2/10", 1..3),
    (10, Some("bytes=8-100"), 206, "bytes 8-9/10", 8..10),
    (2890, Some("bytes=2800-2147483647"), 206, "bytes 2800-2889/2890", 2800..2890),
    (2890, Some("bytes=2800-18446744073709551615"), 206, "bytes 2800-2889/2890", 2800..2890),
    (2890, Some("bytes=-9223372036854775807"), 206, "bytes 0-2889/2890", 0..2890),
    (2890, Some("bytes=-18446744073709551615"), 206, "bytes 0-2889/2890", 0..2890),
    (2890, Some("bytes=0-18446744073709551615"), 206, "bytes 0-2889/2890", 0..2890),
    (2890, Some("bytes=0-999999999999999999999999999999"), 206, "bytes 0-2889/2890", 0..2890),
    (10, Some("bytes=10-"), 416, "bytes */10", 0..0),
    (10, Some("bytes=10-20"), 416, "bytes */10", 0..0),
    (10, Some("bytes=18446744073709551615-"), 416, "bytes */10", 0..0),
    (10, Some("bytes=18446744073709551615-18446744073709551615"), 416, "bytes */10", 0..0),
    (10, Some("bytes=-0"), 416, "bytes */10", 0..0),
    (0, None, 200, "", 0..0),
    (0, Some("bytes=-5"), 200, "", 0..0),
    (0, Some("bytes=0-"), 416, "bytes */0", 0..0),
    (0, Some("bytes=0-0"), 416, "bytes */0", 0..0),
    (0, Some("bytes=-0"), 416, "bytes */0", 0..0),
    (10, Some("bytes=5-2"), 200, "", 0..10),
    (10, Some("bytes=10-9"), 200, "", 0..10),
    (10, Some("bytes=abc-def"), 200, "", 0..10),
    (10, Some("bytes=-"), 200, "", 0..10),
    (10, Some("bytes="), 200, "", 0..10),
    (10, Some("bytes=1-x"), 200, "", 0..10),
    (10, Some("bytes=+1-2"), 200, "", 0..10),
    (10, Some("bytes=0x1-2"), 200, "", 0..10),
    (10, Some("bytes 0-1"), 200, "", 0..10),
    (10, Some("items=0-1"), 200, "", 0..10),
    (10, Some("bytes=0-1111111111222222222233333333334"), 200, "", 0..10),
    (100, Some("bytes=0-50, 50-99"), 200, "", 0..100),
    (100, Some("bytes=0-1,5-6"), 200, "", 0..100),
];

#[tokio::test(flavor = "multi_thread")]
async fn every_row_cold_warm_from_disk_and_warm_again() {
    let upstream = Upstream::start().await;
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("{}{}", store(&upstream), disk(directory.path()));
    let server = Halfopen::start(&configuration).await;
    for (index, (size, ..)) in TABLE.iter().enumerate() {
        upstream.put_computed(&format!("row-{index}"), *size);
    }
    for (index, row) in TABLE.iter().enumerate() {
        check_row(&server, index, row, "fwd=miss").await;
        check_row(&server, index, row, "detail=memory").await;
        // One request when cold and none when warm; what only the size can explain costs one HEAD more.
        let asked = upstream.take_asked().len();
        let most = if row.2 == 416 || row.0 == 0 { 2 } else { 1 };
        assert!((1..=most).contains(&asked), "{row:?} took {asked} requests");
    }
    server.stop().await;
    let server = Halfopen::start(&configuration).await;
    for (index, row) in TABLE.iter().enumerate() {
        // Of an empty object there is nothing to read from disk: its metadata says all.
        check_row(&server, index, row, if row.0 == 0 { "detail=memory" } else { "detail=disk" }).await;
        check_row(&server, index, row, "detail=memory").await;
    }
    assert_eq!(upstream.take_asked(), [], "nothing is asked of the store after a restart");
}

async fn check_row(server: &Halfopen, index: usize, row: &Row, cache_status: &str) {
    let (_, range, status, content_range, bytes) = row;
    let what = format!("{row:?}, {cache_status}");
    let response = server.get(&format!("row-{index}"), *range).await;
    assert_eq!(response.status(), *status, "{what}");
    assert_eq!(field(&response, "content-range"), *content_range, "{what}");
    if *status == 416 {
        assert_eq!(field(&response, "content-type"), "application/problem+json", "{what}");
        let length: usize = field(&response, "content-length").parse().unwrap();
        assert_eq!(response.bytes().await.unwrap().len(), length, "{what}");
        return;
    }
    assert_eq!(field(&response, "content-length"), (bytes.end - bytes.start).to_string(), "{what}");
    assert_eq!(field(&response, "accept-ranges"), "bytes", "{what}");
    assert_eq!(field(&response, "last-modified"), "Tue, 01 Dec 2026 00:00:00 GMT", "{what}");
    assert!(field(&response, "etag").starts_with("\"v"), "{what}");
    assert!(field(&response, "cache-status").contains(cache_status), "{what}: {}", field(&response, "cache-status"));
    assert_eq!(response.bytes().await.unwrap(), computed(bytes.clone()), "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_and_wholes_do_not_swap() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 10);
    let server = Halfopen::before(&upstream).await;
    for (range, status) in [(Some("bytes=0-9"), 206), (None, 200), (Some("bytes=0-9"), 206)] {
        let response = server.get("k", range).await;
        assert_eq!(response.status(), status);
        assert_eq!(field(&response, "content-range").is_empty(), status == 200);
        assert_eq!(response.bytes().await.unwrap(), computed(0..10));
    }
    // The whole object as a range is the same extent as the whole object.
    assert_eq!(upstream.asked_count(), 1);
    assert_eq!(server.get("k", Some("bytes=8-9")).await.bytes().await.unwrap(), computed(8..10));
    assert!(field(&server.get("k", Some("bytes=8-100")).await, "cache-status").contains("hit"));
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_beyond_5_tib() {
    const SIZE: u64 = 6 << 40;
    let upstream = Upstream::start().await;
    upstream.put_computed("huge", SIZE);
    let server = Halfopen::before(&upstream).await;
    for (range, bytes) in [
        ("bytes=4294967295-4294967297".to_owned(), 4_294_967_295..4_294_967_298),
        (format!("bytes={}-", SIZE - 10), SIZE - 10..SIZE),
        ("bytes=-10".to_owned(), SIZE - 10..SIZE),
    ] {
        let response = server.get("huge", Some(&range)).await;
        assert_eq!(response.status(), 206);
        assert!(field(&response, "content-range").ends_with(&format!("/{SIZE}")));
        assert_eq!(response.bytes().await.unwrap(), computed(bytes), "{range}");
    }
    // Opened, read a little, and closed: it costs what it reads, not what it names.
    let mut response = server.get("huge", Some("bytes=0-")).await;
    assert_eq!(field(&response, "content-length"), SIZE.to_string());
    let chunk = response.chunk().await.unwrap().unwrap();
    assert_eq!(chunk, computed(0..chunk.len() as u64));
    drop(response);
    assert!(server.memory().await["process"]["peak_rss_bytes"].as_u64().unwrap() < 256 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn head_ignores_ranges() {
    let upstream = Upstream::start().await;
    upstream.put("k", computed(0..10));
    let server = Halfopen::before(&upstream).await;
    for range in [None, Some("bytes=0-3"), Some("bytes=10-")] {
        let request = server.client.request(Method::HEAD, format!("{}/s/k", server.data));
        let request = if let Some(range) = range { request.header("range", range) } else { request };
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        for (name, value) in [
            ("content-length", "10"),
            ("accept-ranges", "bytes"),
            ("content-type", "application/x-test"),
            ("last-modified", "Tue, 01 Dec 2026 00:00:00 GMT"),
            ("content-range", ""),
        ] {
            assert_eq!(field(&response, name), value, "{name}");
        }
        assert_eq!(response.bytes().await.unwrap().len(), 0);
    }
    assert_eq!(upstream.take_asked().len(), 1, "one HEAD within the freshness");
    assert_eq!(server.get("k", Some("bytes=1-2")).await.bytes().await.unwrap(), computed(1..3));
    let missing = server.client.head(format!("{}/s/missing", server.data)).send().await.unwrap();
    assert_eq!(missing.status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn long_ranges_are_extents_and_runs() {
    // Not a multiple of anything: six extents of 512 KiB and a rest, from an odd offset.
    const SIZE: u64 = (20 << 20) + 4321;
    let upstream = Upstream::start().await;
    upstream.put_computed("long", SIZE);
    let server = Halfopen::before(&upstream).await;
    let range = "bytes=1000-3500000";
    let cold = server.get("long", Some(range)).await.bytes().await.unwrap();
    assert!(cold == computed(1000..3_500_001));
    assert_eq!(upstream.take_asked().len(), 1, "neighbouring extents are one run");
    assert_eq!(upstream.take_bytes_sent(), 3_499_001);
    let warm = server.get("long", Some(range)).await;
    assert!(field(&warm, "cache-status").contains("detail=memory"));
    assert!(warm.bytes().await.unwrap() == cold);
    assert_eq!(upstream.take_asked(), []);

    let whole = server.get("long", None).await;
    assert_eq!((whole.status().as_u16(), field(&whole, "content-length")), (200, SIZE.to_string().as_str()));
    assert!(whole.bytes().await.unwrap() == computed(0..SIZE));
    let asked = upstream.take_asked();
    assert!(asked.len() == 6 && asked.iter().skip(1).all(|asked| asked.if_match.is_some()), "{asked:?}");
    assert_eq!(upstream.take_bytes_sent(), SIZE);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_does_not_say_is_not_invented() {
    let upstream = Upstream::start().await;
    upstream.put_object("bare", |_| Object {
        size: 10,
        bytes: None,
        etag: None,
        modified: None,
        headers: vec![("content-encoding", "gzip".to_owned()), ("cache-control", "max-age=60".to_owned())],
    });
    let server = Halfopen::before(&upstream).await;
    for _ in 0..2 {
        let response = server.get("bare", Some("bytes=1-3")).await;
        for (name, value) in
            [("etag", ""), ("last-modified", ""), ("content-encoding", "gzip"), ("cache-control", "max-age=60")]
        {
            assert_eq!(field(&response, name), value, "{name}");
        }
        assert_eq!(response.bytes().await.unwrap(), computed(1..4));
    }
    assert_eq!(upstream.asked_count(), 1);
}
