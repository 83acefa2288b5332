//! The disk tier: found again after any kind of end, exact, and never trusted.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::common::upstream::{Upstream, computed};
use crate::common::{Halfopen, binary, disk, field, store};

const MIB: u64 = 1 << 20;

/// The block files of a tier.
fn blocks(directory: &std::path::Path) -> Vec<PathBuf> {
    let blocks: Vec<_> = fs::read_dir(directory.join("blocks")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(blocks.len() >= 16);
    blocks
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_back_is_exact_and_weighs_what_the_allocator_gives() {
    let upstream = Upstream::start().await;
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("{}{}", store(&upstream), disk(directory.path()));
    for (length, count) in [(64 << 10, 900), (100_000, 600), (MIB, 60)] {
        let key = format!("of-{length}");
        upstream.put_computed(&key, length * count);
        let read = async |server: &Halfopen, indices: std::ops::Range<u64>, detail: &str| {
            for index in indices {
                let (start, end) = (index * length, (index + 1) * length);
                let response = server.get(&key, Some(&format!("bytes={start}-{}", end - 1))).await;
                assert!(field(&response, "cache-status").contains(detail), "{}", field(&response, "cache-status"));
                assert!(response.bytes().await.unwrap() == computed(start..end));
                // The queue before the disk is bounded: what comes too fast for it is not written.
                if index * length % (4 * MIB) < length {
                    settled(server).await;
                }
            }
        };
        let mut server = Halfopen::start(&configuration).await;
        for detail in ["fwd=miss", "detail=disk"] {
            // What the first reads of a kind allocate, and free after a recovery, is not the cache's.
            read(&server, 0..count / 6, detail).await;
            let heap_before = settled(&server).await;
            let usage_before = server.memory().await["cache"]["usage_bytes"].as_u64().unwrap();
            read(&server, count / 6..count, detail).await;
            let heap = settled(&server).await - heap_before;
            let usage = server.memory().await["cache"]["usage_bytes"].as_u64().unwrap() - usage_before;
            let per_mille = heap * 1000 / usage;
            assert!((980..=1020).contains(&per_mille), "{length} bytes, {detail}: heap {heap}, usage {usage}");
            if detail == "fwd=miss" {
                server.stop().await;
                server = Halfopen::start(&configuration).await;
                upstream.take_asked();
            }
        }
        assert_eq!(upstream.take_asked(), [], "not even a HEAD");
        server.stop().await;
    }
}

/// Bytes allocated when nothing is being read or written.
async fn settled(server: &Halfopen) -> u64 {
    crate::common::until(|| async {
        let buffers = &server.memory().await["buffers"];
        (&buffers["filling_bytes"], &buffers["disk_queue_bytes"]) == (&0.into(), &0.into())
    })
    .await;
    let memory = server.memory().await;
    let bytes = |path: &str| memory.pointer(path).and_then(Value::as_u64).unwrap();
    bytes("/allocator/allocated_bytes")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_working_set_larger_than_memory_is_served_from_disk() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 100 * MIB);
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("[memory]\nlimit = \"128MiB\"\n{}{}", store(&upstream), disk(directory.path()));
    let server = Halfopen::start(&configuration).await;
    for pass in 0..2 {
        assert!(server.get("k", None).await.bytes().await.unwrap() == computed(0..100 * MIB));
        if pass == 0 {
            assert!(upstream.take_bytes_sent() >= 100 * MIB);
            settled(&server).await;
        }
    }
    // The queue is bounded, and what came too fast for it was not written: a few extents are fetched again.
    let again = upstream.take_bytes_sent();
    let not_stored = server.metric("halfopen_not_stored_total", "queue full").await;
    assert!(again <= not_stored * MIB, "{again} bytes fetched again, {not_stored} extents not stored");
    assert!(server.metric("halfopen_served_bytes_total", "disk").await > 20 * MIB);
    assert!(server.memory().await["process"]["peak_rss_bytes"].as_u64().unwrap() < 128 * MIB);
}

#[tokio::test(flavor = "multi_thread")]
async fn corrupt_blocks_are_misses() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 40 * MIB);
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("{}{}", store(&upstream), disk(directory.path()));
    let server = Halfopen::start(&configuration).await;
    let read_all = async |server: &Halfopen| {
        for index in 0..400_u64 {
            let start = index * 100_000;
            let response = server.get("k", Some(&format!("bytes={start}-{}", start + 99_999))).await;
            assert_eq!(response.status(), 206);
            assert!(response.bytes().await.unwrap() == computed(start..start + 100_000));
        }
    };
    read_all(&server).await;
    server.stop().await;
    // One bit in every 37th page, and one block cut short.
    let mut blocks = blocks(directory.path());
    blocks.sort();
    for block in &blocks {
        let mut bytes = fs::read(block).unwrap();
        for page in bytes.chunks_mut(4096).skip(5).step_by(37) {
            page[77] ^= 1;
        }
        fs::write(block, bytes).unwrap();
    }
    fs::File::options().write(true).open(&blocks[1]).unwrap().set_len(12_345).unwrap();
    let server = Halfopen::start(&configuration).await;
    upstream.take_asked();
    read_all(&server).await;
    let asked = upstream.take_asked().len();
    assert!((10..400).contains(&asked), "{asked} of 400 were fetched again");
    read_all(&server).await;
    assert_eq!(server.metric("halfopen_reads_total", "error").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_loses_nothing_that_was_written_and_serves_nothing_wrong() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 100 * MIB);
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("{}{}", store(&upstream), disk(directory.path()));
    for round in 0..4_u64 {
        let server = Halfopen::start(&configuration).await;
        // What earlier rounds have read, and something new; the kill comes in the middle of fills.
        for index in 0..=round {
            let start = index * 20 * MIB + 17;
            let range = format!("bytes={start}-{}", start + 5 * MIB - 1);
            assert!(server.get("k", Some(&range)).await.bytes().await.unwrap() == computed(start..start + 5 * MIB));
        }
        let url = format!("{}/s/k", server.data);
        let cut = tokio::spawn(server.client.get(url).send());
        server.signal("KILL");
        server.wait().await;
        drop(cut);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_process_is_refused_and_the_first_unharmed() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 1000);
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("{}{}", store(&upstream), disk(directory.path()));
    let server = Halfopen::start(&configuration).await;
    let path = directory.path().to_str().unwrap();
    let second = |allow: &str| {
        let file = directory.path().join("second.toml");
        fs::write(&file, format!("[disk]\nallow_tmpfs = {allow}\n")).unwrap();
        let mut command = binary();
        command.args([
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--admin-listen",
            "127.0.0.1:0",
            "--disk-capacity",
            "128MiB",
        ]);
        let output = command.args(["--disk-path", path, "--config", file.to_str().unwrap()]).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = second("true");
    assert!(code == Some(1) && text.contains("in use by another process"), "{code:?} {text}");
    assert_eq!(server.get("k", None).await.bytes().await.unwrap(), computed(0..1000));
    // The lock does not outlive its holder.
    server.signal("KILL");
    server.wait().await;
    Halfopen::start(&configuration).await.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_layout_wipes_and_half_a_configuration_is_refused() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 1000);
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("{}{}", store(&upstream), disk(directory.path()));
    let server = Halfopen::start(&configuration).await;
    server.get("k", None).await.bytes().await.unwrap();
    server.stop().await;
    let server = Halfopen::start(&configuration.replace("128MiB", "256MiB")).await;
    assert!(server.log().contains("has another layout and is wiped"), "{}", server.log());
    assert!(field(&server.get("k", None).await, "cache-status").contains("fwd=miss"));
    let taken: u64 = blocks(directory.path()).iter().map(|block| fs::metadata(block).unwrap().len()).sum();
    assert_eq!(taken, 256 * MIB, "reserved, and no more");
    for flags in [["--disk-path", "/tmp/x"], ["--disk-capacity", "1GiB"]] {
        let output = binary().arg("serve").args(flags).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(78) && text.contains("needs both"), "{text}");
    }
}

#[test]
fn a_tmpfs_is_refused() {
    if !std::path::Path::new("/dev/shm").is_dir() {
        return;
    }
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut command = binary();
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--disk-capacity", "64MiB"]);
    let output = command.arg("--disk-path").arg(directory.path()).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("disk.allow_tmpfs"), "{text}");
}
