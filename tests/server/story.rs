//! The bug that this server grew out of, kept: two errors that cancel out in the request, and an assertion that sees them.

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use halfopen::buffer::check_exact;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;

use crate::common::upstream::computed;

/// A buffer that may grow, sized by someone who takes an inclusive end for an exclusive one, and subtracts where an
/// addition belongs: two bytes too small for the range.
fn buffer_sized_wrongly(first: u64, last: u64) -> Vec<u8> {
    let length = (last - first - 1) as usize;
    Vec::with_capacity(length)
}

type Kept = Arc<Mutex<Vec<Vec<u8>>>>;

/// Answers a range with the right bytes, from a buffer of the wrong size, which it keeps.
async fn serve_wrongly(State(kept): State<Kept>, headers: HeaderMap) -> (StatusCode, Body) {
    let range = headers["range"].to_str().unwrap().strip_prefix("bytes=").unwrap().to_owned();
    let (first, last) = range.split_once('-').unwrap();
    let (first, last): (u64, u64) = (first.parse().unwrap(), last.parse().unwrap());
    let mut buffer = buffer_sized_wrongly(first, last);
    for chunk in computed(first..last + 1).chunks(8192) {
        buffer.extend_from_slice(chunk);
    }
    let body = Body::from(buffer.clone());
    kept.lock().unwrap().push(buffer);
    (StatusCode::PARTIAL_CONTENT, body)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_gets_the_right_bytes_and_the_assertion_sees_the_fault() {
    let kept = Kept::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let router = Router::new().fallback(serve_wrongly).with_state(Arc::clone(&kept));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });

    let response = reqwest::Client::new().get(url).header("range", "bytes=100-1048675").send().await.unwrap();
    assert_eq!(response.status(), 206);
    assert!(response.bytes().await.unwrap() == computed(100..1_048_676), "no test of the answer finds it");

    let kept = kept.lock().unwrap();
    let (length, capacity) = (kept[0].len(), kept[0].capacity());
    assert_eq!(length, 1 << 20, "and no weigher that counts the length does");
    assert!(capacity > length + length / 2, "the buffer takes about twice its length: {capacity}");
    let inexact = check_exact(length, capacity).unwrap_err();
    assert_eq!((inexact.length, inexact.capacity), (length, capacity));
}
