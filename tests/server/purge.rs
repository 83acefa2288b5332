//! A purge forgets an object in memory and on disk, at once and for good.

use reqwest::Response;

use crate::common::upstream::{Upstream, computed};
use crate::common::{Halfopen, disk, field, store};

async fn purge(server: &Halfopen, path: &str) -> Response {
    server.client.delete(format!("{}/cache/{path}", server.admin)).send().await.unwrap()
}

async fn how(server: &Halfopen, key: &str) -> String {
    let response = server.get(key, Some("bytes=0-99")).await;
    let status = field(&response, "cache-status").to_owned();
    assert_eq!(response.bytes().await.unwrap(), computed(0..100));
    status
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purged_object_is_fetched_again_also_after_a_restart() {
    let upstream = Upstream::start().await;
    for key in ["a/b c", "other"] {
        upstream.put_computed(key, 1000);
    }
    let directory = tempfile::tempdir().unwrap();
    let configuration = format!("{}{}", store(&upstream), disk(directory.path()));
    let mut server = Halfopen::start(&configuration).await;
    for round in 0..3 {
        for key in ["a/b%20c", "other"] {
            how(&server, key).await;
            assert!(how(&server, key).await.contains("detail=memory"));
        }
        let purged = purge(&server, "s/a/b%20c").await;
        assert_eq!(purged.text().await.unwrap(), "{\"objects\":1}", "round {round}");
        // Once at once, once after a clean stop, once after a kill.
        match round {
            1 => {
                server.stop().await;
                server = Halfopen::start(&configuration).await;
            }
            2 => {
                server.signal("KILL");
                server.wait().await;
                server = Halfopen::start(&configuration).await;
            }
            _ => {}
        }
        assert_eq!(how(&server, "a/b%20c").await, "halfopen; fwd=miss; stored", "round {round}");
        assert!(how(&server, "other").await.contains("hit"), "round {round}");
    }
    assert_eq!(purge(&server, "s/unknown").await.text().await.unwrap(), "{\"objects\":0}");
    for (path, status) in [("none/a", 404), ("s", 404), ("s/%ff", 400)] {
        assert_eq!(purge(&server, path).await.status(), status, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fill_that_is_under_way_does_not_bring_a_purged_object_back() {
    let upstream = Upstream::start().await;
    upstream.put_computed("k", 1000);
    let server = Halfopen::before(&upstream).await;
    how(&server, "k").await;
    upstream.take_asked();
    upstream.hold();
    let url = format!("{}/s/k", server.data);
    let read = tokio::spawn(server.client.get(url).header("range", "bytes=100-199").send());
    crate::common::until(|| async { upstream.asked_count() == 1 }).await;
    purge(&server, "s/k").await;
    upstream.release();
    assert_eq!(read.await.unwrap().unwrap().bytes().await.unwrap(), computed(100..200));
    assert_eq!(how(&server, "k").await, "halfopen; fwd=miss; stored");
}
