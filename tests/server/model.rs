//! A model: random reads and overwrites, compared with plain vectors.

use std::collections::HashMap;

use proptest::test_runner::{RngAlgorithm, TestRng};
use rand::RngExt as _;

use crate::common::upstream::{Object, Upstream};
use crate::common::{Halfopen, store};

/// Reads and overwrites in all. Bounded by the time that a test may take in a debug build.
const STEPS: usize = 3000;

/// Objects; few, so that they are overwritten while they are cached.
const OBJECTS: usize = 6;

/// Sizes: none, one byte, around an extent, several extents.
const SIZES: [usize; 6] = [0, 1, 100, 65_535, 65_536 * 3, 300_001];

#[tokio::test(flavor = "multi_thread")]
async fn every_read_is_one_version_exactly() {
    let upstream = Upstream::start().await;
    // Small extents and runs, so that reads are made of many, and a small cache, so that they are evicted.
    let server = Halfopen::start(&format!(
        "[memory]\nlimit = \"128MiB\"\n[fetch]\nextent_max = \"64KiB\"\nrun_max = \"128KiB\"\n{}freshness = \"always\"\n",
        store(&upstream)
    ))
    .await;
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut model = HashMap::new();
    let mut overwritten = 0;
    for step in 0..STEPS {
        let key = format!("object-{}", random.random_range(0..OBJECTS));
        if !model.contains_key(&key) || random.random_range(0..20) == 0 {
            overwritten += usize::from(model.contains_key(&key));
            let mut bytes = vec![0; SIZES[random.random_range(0..SIZES.len())]];
            random.fill(&mut bytes[..]);
            // Every third object has no tag: its date tells its versions apart.
            let date = format!("Tue, 01 Dec 2026 {:02}:{:02}:{:02} GMT", step / 3600, step / 60 % 60, step % 60);
            let content = bytes.clone();
            upstream.put_object(&key, |etag| Object {
                size: content.len() as u64,
                bytes: Some(content.into()),
                etag: (!key.ends_with(['0', '3'])).then_some(etag),
                modified: Some(date),
                headers: Vec::new(),
            });
            model.insert(key, bytes);
            continue;
        }
        let bytes = &model[&key];
        let size = bytes.len();
        let (start, length) = (random.random_range(0..=size), random.random_range(1..=150_000));
        let (range, expected) = match random.random_range(0..4) {
            0 => (None, Some(&bytes[..])),
            1 => (Some(format!("bytes={start}-")), bytes.get(start..).filter(|bytes| !bytes.is_empty())),
            2 => (Some(format!("bytes=-{length}")), Some(&bytes[size.saturating_sub(length)..])),
            _ => {
                let end = (start + length).min(size);
                let last = start + length - 1;
                (Some(format!("bytes={start}-{last}")), bytes.get(start..end).filter(|bytes| !bytes.is_empty()))
            }
        };
        let response = server.get(&key, range.as_deref()).await;
        let status = response.status().as_u16();
        match expected {
            None => assert_eq!(status, 416, "step {step}: {range:?} of {key}, {size} bytes"),
            Some(expected) => {
                assert!(matches!(status, 200 | 206), "step {step}: {range:?} of {key}: {status}");
                let body = response.bytes().await.unwrap();
                assert!(body == expected, "step {step}: {range:?} of {key}, {size} bytes, got {}", body.len());
            }
        }
    }
    assert!(overwritten > STEPS / 50);
    let reads = server.metric("halfopen_reads_total", "").await;
    assert_eq!(reads, server.metric("halfopen_responses_total", "GET").await, "outcomes add up");
}
