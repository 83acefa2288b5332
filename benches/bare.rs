//! The yardstick of the hot path: a bare axum handler that returns the same bytes from a static buffer, whatever is
//! asked. `bare ADDRESS BYTES`
use std::net::TcpListener;

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use bytes::Bytes;
use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:8081".to_owned());
    let length: usize = arguments.next().map_or(Ok(65536), |length| length.parse())?;
    let body = Bytes::from(vec![7; length]);
    let handler = move || {
        let body = body.clone();
        async move {
            let headers = HeaderMap::from_iter([(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"))]);
            (StatusCode::PARTIAL_CONTENT, headers, Body::from(body))
        }
    };
    axum_server::from_tcp(TcpListener::bind(address)?)?
        .acceptor(axum_server::accept::NoDelayAcceptor::new())
        .http1_only()
        .serve(Router::new().fallback(handler).into_make_service())
        .await?;
    Ok(())
}
