//! The admin API: health, metrics, and where memory is.

mod memory;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use http::header::{ACCEPT, CONTENT_DISPOSITION, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use serde::Serialize;
use tokio::sync::{Mutex, Semaphore};

use self::memory::MemoryDocument;
use super::data::{DataApi, object_name};
use super::headers::problem;
use crate::buffer::arena;
use crate::cache::Cache;
use crate::config::Config;
use crate::governor::{Governor, MemoryState};
use crate::heap::{self, Format};
use crate::ledger::Ledger;
use crate::memory::AllocatorMemory;
use crate::store::StoreState;
use crate::telemetry::{Gauges, prometheus_text};

/// What the admin API looks at.
#[derive(Debug)]
pub struct AdminApi {
    /// The configuration in force.
    pub config: Config,
    /// The data API, for its metrics and stores.
    pub data: Arc<DataApi>,
    /// The cache.
    pub cache: Arc<Cache>,
    /// The account of payload memory.
    pub ledger: Arc<Ledger>,
    /// The governor.
    pub governor: Arc<Governor>,
    /// Places for client connections; those that are taken have memory of their own.
    pub places: Arc<Semaphore>,
    /// Bytes allocated when the server was built and idle.
    pub baseline_bytes: u64,
    /// Whether it serves: not before it listens, and not while it drains.
    pub ready: AtomicBool,
    /// Held while a heap profile is made: one at a time.
    pub profiling: Mutex<()>,
}

/// The routes of the admin API.
pub fn router(api: Arc<AdminApi>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route(
            "/debug/heap",
            get(|State(api): State<Arc<AdminApi>>| async move { heap_profile(&api, Format::Pprof).await }),
        )
        .route(
            "/debug/heap/flamegraph",
            get(|State(api): State<Arc<AdminApi>>| async move { heap_profile(&api, Format::Flamegraph).await }),
        )
        .route("/debug/memory", get(|State(api): State<Arc<AdminApi>>| async move { Json(MemoryDocument::of(&api)) }))
        .route("/debug/memory/release", post(release))
        .route(
            "/debug/config",
            get(|State(api): State<Arc<AdminApi>>| async move { Json(api.config.effective.clone()) }),
        )
        .route("/cache/{*object}", delete(purge))
        .fallback(|| async { problem(StatusCode::NOT_FOUND, "there is no such path") })
        .with_state(api)
}

#[derive(Serialize)]
struct Readiness<'a> {
    ready: bool,
    stores: BTreeMap<&'a str, StoreState>,
}

async fn readyz(State(api): State<Arc<AdminApi>>) -> Response {
    let ready = api.ready.load(Ordering::Acquire);
    let stores = api.data.reader.stores().iter().map(|store| (store.name().as_str(), store.state())).collect();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(Readiness { ready, stores })).into_response()
}

async fn metrics(State(api): State<Arc<AdminApi>>, request: HeaderMap) -> Response {
    let text = api.data.metrics.open_metrics(&api.gauges());
    let accepts = request.get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if accepts.contains("application/openmetrics-text") {
        ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response()
    } else {
        ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], prometheus_text(&text)).into_response()
    }
}

async fn heap_profile(api: &AdminApi, format: Format) -> Response {
    let later = |why| {
        let mut response = problem(StatusCode::SERVICE_UNAVAILABLE, why);
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        response
    };
    let Ok(_one_at_a_time) = api.profiling.try_lock() else {
        return later("another heap profile is being made");
    };
    let Some(_loan) = api.governor.lend(heap::SYMBOLIZER_BYTES).await else {
        return later("there is no memory for the process that puts names to addresses");
    };
    let (content_type, disposition) = match format {
        Format::Pprof => ("application/octet-stream", "attachment; filename=\"heap.pb.gz\""),
        Format::Flamegraph => ("image/svg+xml", "inline"),
    };
    match heap::profile(format).await {
        Ok(profile) => ([(CONTENT_TYPE, content_type), (CONTENT_DISPOSITION, disposition)], profile).into_response(),
        Err(error) => {
            tracing::warn!(%error, "no heap profile");
            problem(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
        }
    }
}

#[derive(Serialize)]
struct Purged {
    objects: u64,
}

/// Forgets one object: `/cache/{store}/{key...}`, the path as in the data API.
async fn purge(State(api): State<Arc<AdminApi>>, uri: Uri) -> Response {
    let path = uri.path().strip_prefix("/cache").unwrap_or_default();
    let name = match object_name(path) {
        Ok(name) => name,
        Err(response) => return *response,
    };
    if api.data.reader.store(name.store.as_str()).is_err() {
        return problem(StatusCode::NOT_FOUND, "there is no such store");
    }
    match api.cache.purge(&name).await {
        Ok(known) => Json(Purged { objects: u64::from(known) }).into_response(),
        Err(error) => {
            tracing::error!(%error, "a purge could not be written to disk and has not taken effect");
            problem(StatusCode::SERVICE_UNAVAILABLE, "the purge could not be written to disk and has not taken effect")
        }
    }
}

#[derive(Serialize)]
struct Release {
    before: MemoryDocument,
    after: MemoryDocument,
    released_bytes: u64,
}

async fn release(State(api): State<Arc<AdminApi>>) -> Json<Release> {
    let before = MemoryDocument::of(&api);
    arena::purge_all();
    let after = MemoryDocument::of(&api);
    let released_bytes = before.process.rss_bytes.saturating_sub(after.process.rss_bytes);
    Json(Release { before, after, released_bytes })
}

impl AdminApi {
    fn gauges(&self) -> Gauges {
        let (allocator, held, cache) = (AllocatorMemory::read(), self.ledger.held(), self.cache.usage());
        Gauges {
            memory: vec![
                ("limit", self.config.memory.limit),
                ("rss", crate::memory::resident_bytes()),
                ("allocated", allocator.allocated_bytes),
                ("active", allocator.active_bytes),
                ("resident", allocator.resident_bytes),
                ("cached", held.cached),
                ("filling", held.filling),
                ("pinned", held.pinned),
                ("disk_queue", held.disk_queue),
            ],
            states: MemoryState::ALL.map(|state| (state.label(), state == self.governor.state())).to_vec(),
            cache_entries: cache.entries,
            cache_bytes: cache.usage_bytes,
            disk_entries: cache.disk_entries,
        }
    }
}
