//! A stop ends what runs, within a deadline; a second one does not wait.

use std::time::Duration;

use crate::common::upstream::{Upstream, computed};
use crate::common::{Halfopen, store, until};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_lets_a_running_read_end() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 8 * MIB);
    for signal in ["TERM", "INT"] {
        let server = Halfopen::before(&upstream).await;
        upstream.take_asked();
        upstream.hold();
        let (url, admin) = (format!("{}/s/k", server.data), server.admin.clone());
        let read = tokio::spawn(async move { reqwest::get(url).await.unwrap().bytes().await.unwrap() });
        until(|| async { upstream.asked_count() > 0 }).await;
        server.signal(signal);
        // While it drains it is alive and not ready.
        until(|| async { reqwest::get(format!("{admin}/readyz")).await.is_ok_and(|r| r.status() == 503) }).await;
        assert_eq!(reqwest::get(format!("{admin}/healthz")).await.unwrap().status(), 200);
        upstream.release();
        assert!(read.await.unwrap() == computed(0..8 * MIB));
        let (status, log) = server.wait().await;
        assert!(status.success() && log.contains("stopped"), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_deadline_and_a_second_signal_cut_what_still_runs() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 8 * MIB);
    for (drain, second) in [("200ms", false), ("1h", true)] {
        let configuration = format!("[server]\ndrain_timeout = \"{drain}\"\n{}", store(&upstream));
        let server = Halfopen::start(&configuration).await;
        upstream.take_asked();
        upstream.hold();
        let url = format!("{}/s/k", server.data);
        let read = tokio::spawn(async move { reqwest::get(url).await?.bytes().await });
        until(|| async { upstream.asked_count() > 0 }).await;
        server.signal("TERM");
        if second {
            until(|| async { server.log().contains("draining") }).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            server.signal("TERM");
        }
        let (status, log) = server.wait().await;
        assert!(status.success(), "{log}");
        assert!(read.await.unwrap().is_err());
        upstream.release();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sighup_does_not_end_it() {
    let upstream = Upstream::start().await;
    let server = Halfopen::before(&upstream).await;
    server.signal("HUP");
    until(|| async { server.log().contains("SIGHUP") }).await;
    assert_eq!(server.admin("/healthz").await.status(), 200);
}
