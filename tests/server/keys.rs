//! Keys with any characters name just what they say, in every kind of store.

use crate::common::upstream::Upstream;
use crate::common::{Halfopen, field};

/// The path as a client sends it, and the key that it names.
const KEYS: &[(&str, &str)] = &[
    ("a%20b", "a b"),
    ("a+b", "a+b"),
    ("a%252Bb", "a%2Bb"),
    ("a/b", "a/b"),
    ("x%2Fy", "x/y"),
    ("a%252Fb", "a%2Fb"),
    ("%C3%BC", "ü"),
    ("%E6%97%A5%E6%9C%AC", "日本"),
    ("!'()*", "!'()*"),
    ("a&b=c", "a&b=c"),
    ("a%23b", "a#b"),
    ("a%3Fb", "a?b"),
    ("a:b@c;d,e$f~g", "a:b@c;d,e$f~g"),
    ("%5B%5D%7B%7D%5E%60%7C%3C%3E%22", "[]{}^`|<>\""),
    ("...", "..."),
    ("a..b/.c", "a..b/.c"),
];

#[tokio::test(flavor = "multi_thread")]
async fn s3_keys() {
    let upstream = Upstream::start().await;
    for (_, key) in KEYS {
        upstream.put(key, format!("the object {key}"));
    }
    let server = Halfopen::before(&upstream).await;
    for (path, key) in KEYS {
        for _ in 0..2 {
            let response = server.get(path, None).await;
            assert_eq!(response.status(), 200, "{path}");
            assert_eq!(response.text().await.unwrap(), format!("the object {key}"), "{path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn file_keys() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("root")).unwrap();
    std::fs::write(directory.path().join("secret"), "outside").unwrap();
    for (_, key) in KEYS {
        let path = directory.path().join("root").join(key);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("the object {key}")).unwrap();
    }
    let url = format!("[stores.s]\nurl = \"file://{}/root\"", directory.path().display());
    let server = Halfopen::start(&url).await;
    for (path, key) in KEYS {
        let response = server.get(path, Some("bytes=0-")).await;
        assert_eq!(response.status(), 206, "{path}");
        assert_eq!(response.text().await.unwrap(), format!("the object {key}"), "{path}");
    }
    for outside in ["../secret", "%2e%2e/secret", "a/../../secret", "/etc/passwd", "a", "a/", "missing", "a%00b"] {
        // reqwest would resolve the dots itself.
        let response = raw_get(&server, &format!("/s/{outside}")).await;
        assert!(response.starts_with("HTTP/1.1 404 "), "{outside}: {response}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_store_answers_ranges_like_any_other() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("empty"), "").unwrap();
    std::fs::write(directory.path().join("ten"), "0123456789").unwrap();
    // It says that it has 4096 bytes, and has fewer: as a file that was cut short while it was read.
    std::os::unix::fs::symlink("/sys/class/net/lo/mtu", directory.path().join("short")).unwrap();
    let url = format!("[fetch]\nretries = 0\n[stores.s]\nurl = \"file://{}\"", directory.path().display());
    for (key, range, status) in [
        ("empty", None, 200),
        ("empty", Some("bytes=-5"), 200),
        ("empty", Some("bytes=0-"), 416),
        ("ten", Some("bytes=10-"), 416),
        ("ten", Some("bytes=2000-2001"), 416),
        ("ten", Some("bytes=-3"), 206),
        ("short", None, 502),
        ("a%231", None, 404),
    ] {
        // A server of its own for each, so that nothing is known.
        let server = Halfopen::start(&url).await;
        for temperature in ["cold", "warm"] {
            assert_eq!(server.get(key, range).await.status(), status, "{key} {range:?} {temperature}");
        }
        assert_eq!(server.memory().await["buffers"]["filling_bytes"], 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_store_cannot_express_is_not_found() {
    let upstream = Upstream::start().await;
    upstream.put("a", "another object");
    let server = Halfopen::before(&upstream).await;
    for path in ["a/", "/a", "a//b", "./a", "../a", "a/.", "%0Aa"] {
        let response = raw_get(&server, &format!("/s/{path}")).await;
        assert!(response.starts_with("HTTP/1.1 404 "), "{path}: {response}");
    }
    assert_eq!(upstream.take_asked(), [], "the store is not asked for another object");
    for (path, status) in [("/s/%ff", 400), ("/s/a%2", 400), ("/", 404), ("/s", 404), ("/none/a", 404)] {
        let response = server.client.get(format!("{}{path}", server.data)).send().await.unwrap();
        assert_eq!(response.status(), status, "{path}");
        assert_eq!(field(&response, "content-type"), "application/problem+json");
    }
    let long = server.client.get(format!("{}/s/{}", server.data, "k".repeat(1025))).send().await.unwrap();
    assert_eq!(long.status(), 414);
    let longest = raw_get(&server, &format!("/s/a?{}", "q".repeat(70_000))).await;
    assert!(longest.starts_with("HTTP/1.1 414 ") || longest.starts_with("HTTP/1.1 431 "), "{longest}");
    let put = server.client.put(format!("{}/s/a", server.data)).body("x").send().await.unwrap();
    assert_eq!((put.status().as_u16(), field(&put, "allow")), (405, "GET, HEAD"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_with_a_prefix_serves_what_lies_below_it() {
    let upstream = Upstream::start().await;
    upstream.put("deep/down/k", "below");
    upstream.put("k", "above");
    let configuration = crate::common::store(&upstream).replace("s3://bucket", "s3://bucket/deep/down");
    let server = Halfopen::start(&configuration).await;
    assert_eq!(server.get("k", None).await.text().await.unwrap(), "below");
    assert_eq!(server.get("missing", None).await.status(), 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_google_store() {
    let upstream = Upstream::start().await;
    upstream.put("dir/a b", "in the other cloud");
    let account = serde_json::json!({
        "gcs_base_url": upstream.url(), "disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": "",
    });
    let options = format!("google_service_account_key = '{account}', allow_http = true");
    let server = Halfopen::start(&format!("[stores.s]\nurl = \"gs://bucket/dir\"\noptions = {{ {options} }}")).await;
    for _ in 0..2 {
        assert_eq!(server.get("a%20b", Some("bytes=-5")).await.text().await.unwrap(), "cloud");
        assert_eq!(server.get("a%20b", None).await.text().await.unwrap(), "in the other cloud");
        assert_eq!(server.get("a%20b", Some("bytes=99-")).await.status(), 416);
    }
    assert_eq!(server.get("missing", None).await.status(), 404);
    let asked = upstream.take_asked();
    assert!(asked.iter().all(|asked| asked.accept_encoding.as_deref() == Some("gzip")), "{asked:?}");
    assert_eq!(asked.iter().filter(|asked| asked.key == "dir/a b").count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_store() {
    let upstream = Upstream::start().await;
    upstream.put("dir/a b", "over http");
    let server = Halfopen::start(&format!("[stores.s]\nurl = \"{}/bucket/dir/\"", upstream.url())).await;
    assert_eq!(server.get("a%20b", Some("bytes=5-8")).await.text().await.unwrap(), "http");
    assert_eq!(server.get("missing", None).await.status(), 404);
}

/// The status line and what follows, for a path that no client library would send as it is.
async fn raw_get(server: &Halfopen, path: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let address = server.data.strip_prefix("http://").unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).await.unwrap();
    String::from_utf8_lossy(&response).into_owned()
}
