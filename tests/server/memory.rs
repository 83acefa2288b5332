//! Memory: payload is bounded whatever clients and stores do, and reads go on.

use reqwest::Response;
use serde_json::Value;

use crate::common::upstream::{Fault, Upstream, computed};
use crate::common::{Halfopen, field, store, until};

const MIB: u64 = 1 << 20;
const ALWAYS: usize = usize::MAX;

fn bytes(memory: &Value, path: &str) -> u64 {
    memory.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path}: {memory}"))
}

/// What payload may come to.
fn payload_max(memory: &Value) -> u64 {
    bytes(memory, "/sum/cache_bytes") + bytes(memory, "/sum/in_flight_bytes")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_gets_no_share_goes_on_in_small_pieces() {
    let upstream = Upstream::start().await;
    // A share of 7 extents of 256 KiB, all of them taken by fills that hang.
    let memory = "[memory]\nlimit = \"128MiB\"\nin_flight = \"2MiB\"\n[fetch]\nconcurrency = 64\n";
    let server = Halfopen::start(&format!("{memory}{}", store(&upstream))).await;
    let mut hanging = Vec::new();
    for n in 0..7 {
        let key = format!("hangs-{n}");
        upstream.put_computed(&key, MIB);
        upstream.fault(&key, Fault::Hangs(100), ALWAYS);
        let (client, url) = (server.client.clone(), format!("{}/s/{key}", server.data));
        hanging.push(tokio::spawn(async move { client.get(url).send().await }));
    }
    until(|| async { bytes(&server.memory().await, "/buffers/filling_bytes") >= 7 * MIB / 4 }).await;

    upstream.put_computed("k", MIB);
    let response = server.get("k", Some("bytes=1000-1000000")).await;
    assert_eq!((response.status().as_u16(), field(&response, "cache-status")), (206, "halfopen; fwd=bypass"));
    assert!(response.bytes().await.unwrap() == computed(1000..1_000_001));
    assert_eq!(server.metric("halfopen_reads_total", "outcome=\"bypass\"").await, 1);
    for read in hanging {
        read.abort();
    }
}

/// A client that has sent its request and takes what fits into its socket.
async fn read_nothing(server: &Halfopen, key: String) -> Response {
    server.get(&key, None).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_slow_clients_hold_is_taken_from_the_cache() {
    let upstream = Upstream::start().await;
    let server = Halfopen::start(&format!("[memory]\nlimit = \"128MiB\"\n{}", store(&upstream))).await;
    let mut slow = Vec::new();
    for n in 0..40 {
        upstream.put_computed(&format!("slow-{n}"), 64 * MIB);
        slow.push(read_nothing(&server, format!("slow-{n}")).await);
    }
    upstream.put_computed("fast", 200 * MIB);
    let mut fast = server.get("fast", None).await;
    let (mut received, mut pinned) = (0, 0);
    while let Some(chunk) = fast.chunk().await.unwrap() {
        if received / MIB != (received + chunk.len() as u64) / MIB {
            let memory = server.memory().await;
            pinned = pinned.max(bytes(&memory, "/buffers/pinned_bytes"));
            assert!(bytes(&memory, "/buffers/live_bytes") <= payload_max(&memory), "{memory}");
            assert!(bytes(&memory, "/process/peak_rss_bytes") <= 128 * MIB, "{memory}");
        }
        received += chunk.len() as u64;
    }
    assert_eq!(received, 200 * MIB);
    assert!(pinned > 2 * MIB, "the cache let go of what clients still held: {pinned}");
    drop(slow);
    until(|| async {
        let memory = server.memory().await;
        bytes(&memory, "/buffers/pinned_bytes") == 0 && memory["state"] == "normal"
    })
    .await;
    let memory = server.memory().await;
    assert_eq!(bytes(&memory, "/cache/capacity_bytes"), bytes(&memory, "/sum/cache_bytes"), "it is given back");
}

#[tokio::test(flavor = "multi_thread")]
async fn gaps_have_names_and_the_kernel_has_its_share() {
    let upstream = Upstream::start().await;
    let server = Halfopen::before(&upstream).await;
    let memory = server.memory().await;
    for gap in ["unnamed", "fragmentation", "free_pages", "outside_allocator", "shared", "withheld"] {
        assert!(memory["gaps"][format!("{gap}_bytes")].is_u64(), "{gap}: {memory}");
    }
    assert!(bytes(&memory, "/kernel_reserve_bytes") > 16 * MIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn measures_can_be_left_out_one_by_one() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 300 * MIB);
    let measures = "arena, purge, resize, shed, least_rate, ledger";
    let server = Halfopen::start(&format!(
        "[memory]\nlimit = \"256MiB\"\ngovernor = false\nswitch_off = \"{measures}\"\n{}",
        store(&upstream)
    ))
    .await;
    assert!(server.get("k", None).await.bytes().await.unwrap() == computed(0..300 * MIB));
    let memory = server.memory().await;
    assert_eq!(memory["state"], "normal");
    assert!(bytes(&memory, "/cache/usage_bytes") <= bytes(&memory, "/cache/capacity_bytes"), "{memory}");
}
