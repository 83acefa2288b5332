//! The admin API: what it says is true.

use std::io::Read;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::upstream::Upstream;
use crate::common::{Halfopen, field};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn memory_adds_up_and_can_be_given_back() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 40 * MIB);
    let server = Halfopen::before(&upstream).await;
    server.get("k", None).await.bytes().await.unwrap();
    let memory = server.memory().await;
    let bytes = |path: &str| memory.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path}: {memory}"));
    assert_eq!((bytes("/limit_bytes"), &memory["limit_source"]), (256 * MIB, &"file".into()));
    let sum: u64 = memory["sum"].as_object().unwrap().values().map(|term| term.as_u64().unwrap()).sum();
    assert_eq!(sum, bytes("/limit_bytes"), "the terms are the limit");
    assert_eq!(bytes("/buffers/cached_bytes"), 40 * MIB);
    assert_eq!(bytes("/buffers/live_bytes"), 40 * MIB);
    assert_eq!(bytes("/cache/entries"), 80);
    assert!(bytes("/allocator/allocated_bytes") > 40 * MIB);
    assert!(bytes("/process/rss_bytes") > 40 * MIB && bytes("/process/peak_rss_bytes") < 256 * MIB);
    assert!(bytes("/process/uss_bytes") <= bytes("/process/pss_bytes"));
    assert!(bytes("/cache/usage_bytes") <= bytes("/cache/capacity_bytes"));
    let ratio = memory["accounted_ratio"].as_f64().unwrap();
    assert!((0.9..1.1).contains(&ratio), "{memory}");

    let url = format!("{}/debug/memory/release", server.admin);
    let release: Value = server.client.post(url).send().await.unwrap().json().await.unwrap();
    for part in ["before", "after"] {
        assert!(release[part]["process"]["rss_bytes"].as_u64().unwrap() > 40 * MIB);
    }
    assert!(release["released_bytes"].is_u64());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cache_is_full_and_never_more() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 400 * MIB);
    let server = Halfopen::before(&upstream).await;
    assert_eq!(server.get("k", None).await.bytes().await.unwrap().len() as u64, 400 * MIB);
    let memory = server.memory().await;
    let bytes = |path: &str| memory.pointer(path).and_then(Value::as_u64).unwrap();
    assert!(bytes("/cache/usage_bytes") <= bytes("/cache/capacity_bytes"), "{memory}");
    assert!(bytes("/cache/usage_bytes") * 10 > bytes("/cache/capacity_bytes") * 9, "{memory}");
    assert!(bytes("/process/peak_rss_bytes") < 256 * MIB, "{memory}");
    assert!(server.metric("halfopen_evictions_total", "capacity").await > 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_in_both_forms_and_config_hides_secrets() {
    let upstream = Upstream::start().await;
    upstream.put("k", "0123456789");
    let configuration = crate::common::store(&upstream)
        .replace("aws_region", "aws_access_key_id = \"me\", aws_secret_access_key = \"hush\", aws_region");
    let server = Halfopen::start(&configuration).await;
    server.get("k", None).await.bytes().await.unwrap();
    server.get("k", None).await.bytes().await.unwrap();
    assert_eq!(server.metric("halfopen_reads_total", "outcome=\"miss\"").await, 1);
    assert_eq!(server.metric("halfopen_reads_total", "outcome=\"memory\"").await, 1);
    assert_eq!(server.metric("halfopen_served_bytes_total", "source=\"upstream\"").await, 10);
    assert_eq!(server.metric("halfopen_served_bytes_total", "source=\"memory\"").await, 10);
    let url = format!("{}/metrics", server.admin);
    let request = server.client.get(url).header("accept", "application/openmetrics-text; version=1.0.0");
    let open = request.send().await.unwrap();
    assert!(field(&open, "content-type").starts_with("application/openmetrics-text"));
    assert!(open.text().await.unwrap().ends_with("# EOF\n"));

    let config = server.admin("/debug/config").await.text().await.unwrap();
    assert!(
        config.contains("\"stores.s.options.aws_secret_access_key\":\"***\"") && !config.contains("hush"),
        "{config}"
    );
    assert!(config.contains("\"memory.limit\":\"268435456\""), "{config}");

    let readiness: Value = server.admin("/readyz").await.json().await.unwrap();
    assert_eq!(readiness, serde_json::json!({"ready": true, "stores": {"s": "up"}}));
    assert_eq!(server.admin("/nothing").await.status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_heap_profile_names_fills_and_costs_this_process_nothing() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 64 * MIB);
    let server = Halfopen::before(&upstream).await;
    server.get("k", None).await.bytes().await.unwrap();
    let before = server.memory().await["process"]["peak_rss_bytes"].as_u64().unwrap();
    let response = server.admin("/debug/heap").await;
    assert_eq!(response.status(), 200);
    let profile = response.bytes().await.unwrap();
    let after = server.memory().await["process"]["peak_rss_bytes"].as_u64().unwrap();
    assert!(after < before + 8 * MIB, "{before} {after}");
    // Names are plain text in the protobuf's string table.
    let mut gunzip = Command::new("gzip").arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = gunzip.stdin.take().unwrap();
    std::thread::spawn(move || std::io::Write::write_all(&mut stdin, &profile).unwrap());
    let mut names = Vec::new();
    gunzip.stdout.take().unwrap().read_to_end(&mut names).unwrap();
    assert!(gunzip.wait().unwrap().success());
    assert!(String::from_utf8_lossy(&names).contains("allocate_for_fill"));
}

#[tokio::test(flavor = "multi_thread")]
async fn sampling_can_be_switched_off() {
    let server = Halfopen::start("[memory]\nlimit = \"256MiB\"\nheap_profile = false\n").await;
    let response = server.admin("/debug/heap").await;
    assert_eq!(response.status(), 503);
    assert!(response.text().await.unwrap().contains("memory.heap_profile"));
}
