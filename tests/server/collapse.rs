//! Concurrent misses: one request for all who want the same, whoever of them stays.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;

use crate::common::upstream::{Fault, Upstream, computed};
use crate::common::{Halfopen, field, until};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn a_herd_costs_one_request() {
    let upstream = Upstream::start().await;
    upstream.put_computed("hot", 64 * MIB);
    upstream.put_computed("known", 64 * MIB);
    let server = Halfopen::before(&upstream).await;
    server.get("known", Some("bytes=0-0")).await.bytes().await.unwrap();
    upstream.take_asked();
    // Once when nothing is known of the object, once when all but the extent is.
    for key in ["hot", "known"] {
        upstream.hold();
        let client = &server.client;
        let url = format!("{}/s/{key}", server.data);
        let reads = (0..100).map(|_| client.get(&url).header("range", "bytes=1048576-2097151").send());
        let reads = tokio::spawn(join_all(reads));
        until(|| async { upstream.asked_count() > 0 }).await;
        upstream.release();
        let mut how = BTreeMap::<String, usize>::new();
        for response in reads.await.unwrap() {
            let response = response.unwrap();
            *how.entry(field(&response, "cache-status").to_owned()).or_default() += 1;
            assert!(response.bytes().await.unwrap() == computed(MIB..2 * MIB));
        }
        assert_eq!(upstream.take_asked().len(), 1, "{key}: {how:?}");
        assert_eq!(how.get("halfopen; fwd=miss; stored"), Some(&1), "{key}: {how:?}");
    }
    assert_eq!(server.metric("halfopen_reads_total", "").await, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leaders_leaving_hurts_nobody() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", MIB);
    let server = Arc::new(Halfopen::before(&upstream).await);
    upstream.hold();
    let leader = tokio::spawn({
        let server = Arc::clone(&server);
        async move { server.get("k", Some("bytes=0-1048575")).await }
    });
    until(|| async { upstream.asked_count() == 1 }).await;
    let followers: Vec<_> = (0..9)
        .map(|_| {
            let server = Arc::clone(&server);
            tokio::spawn(async move { server.get("k", Some("bytes=0-1048575")).await.bytes().await.unwrap() })
        })
        .collect();
    leader.abort();
    upstream.release();
    for follower in followers {
        assert!(follower.await.unwrap() == computed(0..MIB));
    }
    assert_eq!(upstream.take_asked().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_joined_a_run_gets_all_of_it_although_its_leader_leaves() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 4 * MIB);
    let server = Halfopen::before(&upstream).await;
    server.get("k", Some("bytes=0-0")).await.bytes().await.unwrap();
    upstream.take_asked();
    upstream.fault("k", Fault::Drips(Duration::from_millis(20)), usize::MAX);
    let leader = server.get("k", None).await;
    let follower = server.get("k", None).await;
    assert_eq!(field(&leader, "cache-status"), "halfopen; fwd=miss; stored");
    drop(leader);
    // It is slow to read while the leader's run goes on.
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(follower.bytes().await.unwrap() == computed(0..4 * MIB));
    assert_eq!(upstream.take_asked().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_drips_does_not_keep_what_nobody_waits_for() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", MIB);
    let server = Halfopen::before(&upstream).await;
    // Two minutes for one extent.
    upstream.fault("k", Fault::Drips(Duration::from_secs(8)), usize::MAX);
    upstream.hold();
    let read = tokio::spawn(server.client.get(format!("{}/s/k", server.data)).send());
    until(|| async { upstream.asked_count() == 1 }).await;
    upstream.release();
    until(|| async { server.memory().await["buffers"]["filling_bytes"] != 0 }).await;
    read.abort();
    until(|| async { server.memory().await["buffers"]["filling_bytes"] == 0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_waits_for_is_given_up_and_gives_everything_back() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 1 << 40);
    let server = Halfopen::before(&upstream).await;
    for _ in 0..5 {
        let mut response = server.get("k", None).await;
        response.chunk().await.unwrap();
    }
    until(|| async {
        let buffers = &server.memory().await["buffers"];
        (&buffers["filling_bytes"], &buffers["pinned_bytes"]) == (&0.into(), &0.into())
    })
    .await;
    // Five clients read a little: each costs at most the runs that it had begun.
    assert!(upstream.take_bytes_sent() < 5 * 32 * MIB);
    assert_eq!(server.get("k", Some("bytes=5-9")).await.bytes().await.unwrap(), computed(5..10));
}

#[tokio::test(flavor = "multi_thread")]
async fn overlapping_reads_of_one_object_share_what_they_have_in_common() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 8 * MIB);
    let server = Arc::new(Halfopen::before(&upstream).await);
    server.get("k", Some("bytes=0-0")).await.bytes().await.unwrap();
    upstream.take_bytes_sent();
    let reads = (0..20).map(|_| {
        let server = Arc::clone(&server);
        tokio::spawn(async move { server.get("k", None).await.bytes().await.unwrap() })
    });
    for read in join_all(reads).await {
        assert!(read.unwrap() == computed(0..8 * MIB));
    }
    assert_eq!(upstream.take_bytes_sent(), 8 * MIB);
}
