//! A store that breaks its protocol: the client sees it, nothing wrong is stored, and the next read is right.

use std::time::Duration;

use crate::common::upstream::{Fault, Object, Upstream, computed};
use crate::common::{Halfopen, field, store};

const MIB: u64 = 1 << 20;
const ALWAYS: usize = usize::MAX;

#[tokio::test(flavor = "multi_thread")]
async fn wrong_answers_are_502_and_never_stored() {
    let upstream = Upstream::start().await;
    upstream.put_computed("aim", 10);
    let server = Halfopen::start(&format!("[fetch]\nstall_timeout = \"300ms\"\n{}", store(&upstream))).await;
    let mut entries = 0;
    let redirect = Fault::Redirects(format!("{}/bucket/aim", upstream.url()));
    for (index, (fault, status)) in [
        (Fault::IgnoresRange, 502),
        (Fault::OtherRange, 502),
        (Fault::Short(1), 502),
        (Fault::Long(1), 502),
        (Fault::Truncated(100), 502),
        (Fault::Hangs(100), 504),
        (Fault::NoContentRange, 502),
        (Fault::Status(500), 503),
        (Fault::Status(503), 503),
        (Fault::Status(403), 403),
        (redirect, 502),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("faulty-{index}");
        upstream.put_computed(&key, 100 << 10);
        upstream.fault(&key, fault.clone(), ALWAYS);
        let response = server.get(&key, Some("bytes=1000-1999")).await;
        assert_eq!(response.status(), status, "{fault:?}");
        assert_eq!(field(&response, "content-type"), "application/problem+json", "{fault:?}");
        if status == 503 {
            assert!(!field(&response, "retry-after").is_empty(), "{fault:?}");
        }
        assert!(!response.text().await.unwrap().contains("127.0.0.1"), "no internals");
        let memory = server.memory().await;
        assert_eq!(memory["cache"]["entries"], entries, "{fault:?}");
        assert_eq!(memory["buffers"]["filling_bytes"], 0, "{fault:?}");

        // The same once more, now for an object of which everything is known.
        upstream.fault(&key, Fault::None, ALWAYS);
        assert_eq!(server.get(&key, Some("bytes=0-0")).await.bytes().await.unwrap(), computed(0..1), "{fault:?}");
        upstream.fault(&key, fault.clone(), ALWAYS);
        assert_eq!(server.get(&key, Some("bytes=1000-1999")).await.status(), status, "{fault:?}");

        upstream.fault(&key, Fault::None, ALWAYS);
        let response = server.get(&key, Some("bytes=1000-1999")).await;
        assert_eq!(response.status(), 206, "after {fault:?}");
        assert_eq!(response.bytes().await.unwrap(), computed(1000..2000), "after {fault:?}");
        entries += 2;
        assert_eq!(server.memory().await["cache"]["entries"], entries, "after {fault:?}");
    }
    assert!(server.metric("halfopen_upstream_faults_total", "protocol").await > 0);
    assert!(server.metric("halfopen_upstream_faults_total", "timed_out").await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_body_is_resumed_from_where_it_broke() {
    let upstream = Upstream::start().await;
    let server = Halfopen::before(&upstream).await;
    for (index, fault) in [Fault::Truncated(MIB + 100), Fault::Short(1000)].into_iter().enumerate() {
        let key = format!("k{index}");
        upstream.put_computed(&key, 4 * MIB);
        upstream.fault(&key, fault.clone(), 1);
        let response = server.get(&key, Some("bytes=10-4194303")).await;
        assert_eq!(response.status(), 206, "{fault:?}");
        assert!(response.bytes().await.unwrap() == computed(10..4 * MIB), "{fault:?}");
        let asked = upstream.take_asked();
        assert_eq!(asked.len(), 2, "{fault:?}: {asked:?}");
        assert!(asked[1].if_match.is_some(), "{fault:?}: resumed at the same version: {asked:?}");
        // What the store had in its buffers when the connection broke it sends again.
        let twice = upstream.take_bytes_sent() - (4 * MIB - 10);
        let most = if matches!(fault, Fault::Truncated(_)) { 512 << 10 } else { 0 };
        assert!(twice <= most, "{fault:?}: {twice} bytes were fetched twice");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_break_after_the_first_byte_cuts_the_connection() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 32 * MIB);
    let server = Halfopen::start(&format!("[fetch]\nretries = 0\nrun_max = \"32MiB\"\n{}", store(&upstream))).await;
    // A broken connection loses what lies in the socket's buffers, some MiB: so it breaks late.
    upstream.fault("k", Fault::Truncated(32 * MIB - 1), 1);
    let response = server.get("k", None).await;
    assert_eq!(response.status(), 200);
    assert!(response.bytes().await.is_err(), "never a clean end");
    assert_eq!(server.metric("halfopen_reads_total", "error").await, 1);
    assert!(server.get("k", None).await.bytes().await.unwrap() == computed(0..32 * MIB));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stall_releases_all_who_wait() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", MIB);
    let configuration = format!("[fetch]\nstall_timeout = \"200ms\"\nretries = 0\n{}", store(&upstream));
    let server = Halfopen::start(&configuration).await;
    upstream.fault("k", Fault::Hangs(10), 1);
    let reads = (0..20).map(|_| server.get("k", Some("bytes=0-99999")));
    let statuses: Vec<u16> =
        futures::future::join_all(reads).await.iter().map(|response| response.status().as_u16()).collect();
    // One hangs for all who have come; whoever comes after it begins anew.
    assert!(statuses.contains(&504) && statuses.iter().all(|status| matches!(status, 504 | 206)), "{statuses:?}");
    assert_eq!(server.get("k", Some("bytes=0-99999")).await.bytes().await.unwrap(), computed(0..100_000));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_transfer_that_lives_is_not_killed() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 512 << 10);
    let configuration = format!("[fetch]\nstall_timeout = \"2s\"\n{}", store(&upstream));
    let server = Halfopen::start(&configuration).await;
    // Twice the stall timeout in all, with some bytes always within it.
    upstream.fault("k", Fault::Drips(Duration::from_millis(500)), ALWAYS);
    assert!(server.get("k", None).await.bytes().await.unwrap() == computed(0..512 << 10));
    assert_eq!(upstream.take_asked().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_shrank_unseen_is_unsatisfiable() {
    let upstream = Upstream::start().await;
    let server = Halfopen::before(&upstream).await;
    let object = |size: u64| Object { size, bytes: None, etag: None, modified: None, headers: Vec::new() };
    upstream.put_object("k", |_| object(100));
    assert_eq!(server.get("k", Some("bytes=0-9")).await.status(), 206);
    upstream.put_object("k", |_| object(10));
    let response = server.get("k", Some("bytes=50-59")).await;
    assert_eq!((response.status().as_u16(), field(&response, "content-range")), (416, "bytes */10"));
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_heads_do_not_make_an_object_unreadable() {
    let upstream = Upstream::start().await;
    let server = Halfopen::before(&upstream).await;
    upstream.put_object("k", |etag| Object {
        size: 10,
        bytes: None,
        etag: Some(etag),
        modified: Some("yesterday".to_owned()),
        headers: vec![
            ("x-amz-meta-title", "Zürich".to_owned()),
            ("content-disposition", "attachment; filename=\"ü\"".to_owned()),
            ("content-type", "text/plain".to_owned()),
        ],
    });
    let response = server.get("k", None).await;
    assert!(matches!(response.status().as_u16(), 200 | 502), "{}", response.status());
    assert_eq!(server.admin("/healthz").await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn versions_are_never_joined() {
    let upstream = Upstream::start().await;
    let server = Halfopen::before(&upstream).await;
    upstream.put("k", vec![b'a'; 20]);
    assert_eq!(server.get("k", Some("bytes=0-9")).await.bytes().await.unwrap(), vec![b'a'; 10]);
    upstream.put("k", vec![b'b'; 20]);
    // What is cached may be served within its freshness; what is not asks for the version known, and learns.
    assert_eq!(server.get("k", Some("bytes=10-19")).await.bytes().await.unwrap(), vec![b'b'; 10]);
    assert_eq!(server.get("k", Some("bytes=0-9")).await.bytes().await.unwrap(), vec![b'b'; 10]);
    assert_eq!(server.get("k", None).await.bytes().await.unwrap(), vec![b'b'; 20]);

    // Deleted: what is cached may be served, what is not is 404, and then everything is.
    upstream.delete("k");
    assert_eq!(server.get("k", Some("bytes=0-9")).await.status(), 206);
    assert_eq!(server.get("k", Some("bytes=3-4")).await.status(), 404);
    assert_eq!(server.get("k", Some("bytes=0-9")).await.status(), 404);

    // An object that never keeps still is an error, before the first byte and after it.
    upstream.put_computed("restless", 20 * MIB);
    upstream.fault("restless", Fault::ChangesAlways, ALWAYS);
    assert!(server.get("restless", None).await.bytes().await.is_err());
    // A total that disagrees with the one known is the store's fault.
    upstream.put_computed("liar", 20 * MIB);
    server.get("liar", Some("bytes=0-0")).await.bytes().await.unwrap();
    upstream.fault("liar", Fault::WrongTotal, ALWAYS);
    assert_eq!(server.get("liar", Some("bytes=5-9")).await.status(), 502);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_strong_tag_size_and_date_tell_versions_apart() {
    let upstream = Upstream::start().await;
    let server = Halfopen::before(&upstream).await;
    let object = |etag: Option<&str>, second: u8| Object {
        size: 20,
        bytes: Some(vec![second; 20].into()),
        etag: etag.map(str::to_owned),
        modified: Some(format!("Tue, 01 Dec 2026 00:00:{second:02} GMT")),
        headers: Vec::new(),
    };
    for etag in [None, Some("W/\"weak\"")] {
        upstream.put_object("k", |_| object(etag, 1));
        assert_eq!(server.get("k", Some("bytes=0-9")).await.bytes().await.unwrap(), vec![1; 10]);
        upstream.put_object("k", |_| object(etag, 2));
        assert_eq!(server.get("k", Some("bytes=10-19")).await.bytes().await.unwrap(), vec![2; 10]);
        assert_eq!(server.get("k", Some("bytes=0-9")).await.bytes().await.unwrap(), vec![2; 10]);
        assert!(upstream.take_asked().iter().all(|asked| asked.if_match.is_none()), "a weak tag is no If-Match");
        upstream.put_object("k", |_| object(etag, 1));
        server.get("k", Some("bytes=3-4")).await;
    }
}
