//! Metadata is believed for as long as the store's freshness says, then asked for again: once, whoever wants it.

use std::time::Duration;

use futures::future::join_all;

use crate::common::upstream::Upstream;
use crate::common::{Halfopen, field, store};

fn with_freshness(upstream: &Upstream, freshness: &str) -> String {
    format!("{}freshness = \"{freshness}\"\n", store(upstream))
}

#[tokio::test(flavor = "multi_thread")]
async fn fresh_metadata_is_believed_and_stale_metadata_is_revalidated_once() {
    let upstream = Upstream::start().await;
    upstream.put("k", "first");
    let server = Halfopen::start(&with_freshness(&upstream, "1s")).await;
    assert_eq!(server.get("k", None).await.text().await.unwrap(), "first");
    upstream.take_asked();
    tokio::time::sleep(Duration::from_millis(1100)).await;

    upstream.hold();
    let reads = tokio::spawn(join_all((0..20).map(|_| {
        let request = server.client.get(format!("{}/s/k", server.data));
        async move { request.send().await.unwrap() }
    })));
    crate::common::until(|| async { upstream.asked_count() > 0 }).await;
    upstream.release();
    let mut revalidated = 0;
    for response in reads.await.unwrap() {
        // Whoever comes when it has been revalidated finds it fresh.
        match field(&response, "cache-status") {
            "halfopen; fwd=stale; fwd-status=304" => revalidated += 1,
            status => assert!(status.starts_with("halfopen; hit; detail=memory"), "{status}"),
        }
        assert_eq!(response.text().await.unwrap(), "first");
    }
    assert!(revalidated > 0);
    let asked = upstream.take_asked();
    assert_eq!(asked.iter().map(|asked| asked.method.as_str()).collect::<Vec<_>>(), ["HEAD"]);

    tokio::time::sleep(Duration::from_millis(1100)).await;
    upstream.put("k", "second");
    let response = server.get("k", None).await;
    assert_eq!(field(&response, "cache-status"), "halfopen; fwd=stale; fwd-status=200");
    assert_eq!(response.text().await.unwrap(), "second");

    tokio::time::sleep(Duration::from_millis(1100)).await;
    upstream.delete("k");
    assert_eq!(server.get("k", None).await.status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn always_asks_and_immutable_never_does() {
    let upstream = Upstream::start().await;
    upstream.put("k", "first");
    let server = Halfopen::start(&with_freshness(&upstream, "always")).await;
    for _ in 0..3 {
        assert_eq!(server.get("k", None).await.text().await.unwrap(), "first");
    }
    let methods: Vec<_> = upstream.take_asked().into_iter().map(|asked| asked.method).collect();
    assert_eq!(methods, ["GET", "HEAD", "HEAD"]);
    upstream.put("k", "second");
    assert_eq!(server.get("k", None).await.text().await.unwrap(), "second");

    let server = Halfopen::start(&with_freshness(&upstream, "immutable")).await;
    assert_eq!(server.get("k", None).await.text().await.unwrap(), "second");
    upstream.put("k", "third");
    upstream.take_asked();
    let response = server.get("k", None).await;
    assert_eq!(field(&response, "cache-status"), "halfopen; hit; detail=memory; ttl=31536000");
    assert_eq!(response.text().await.unwrap(), "second");
    assert_eq!(upstream.take_asked(), []);
}
