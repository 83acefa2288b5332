//! The admin API: health, metrics, and where memory is.

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
use tokio::sync::Mutex;

use super::data::{DataApi, object_name};
use super::headers::problem;
use crate::buffer::arena;
use crate::cache::{Cache, CacheUsage};
use crate::config::{Config, LimitSource};
use crate::governor::{Governor, MemoryState};
use crate::heap::{self, Format};
use crate::ledger::{Held, Ledger};
use crate::memory::sum::Sum;
use crate::memory::{AllocatorMemory, Cgroup, CgroupMemory, ProcessMemory};
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
        .route("/debug/memory", get(|State(api): State<Arc<AdminApi>>| async move { Json(api.memory()) }))
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
    let Ok(_one_at_a_time) = api.profiling.try_lock() else {
        let mut response = problem(StatusCode::SERVICE_UNAVAILABLE, "another heap profile is being made");
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        return response;
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
    let before = api.memory();
    arena::purge_all();
    let after = api.memory();
    let released_bytes = before.process.rss_bytes.saturating_sub(after.process.rss_bytes);
    Json(Release { before, after, released_bytes })
}

/// Where memory is; bytes throughout.
#[derive(Debug, Serialize)]
struct MemoryDocument {
    limit_bytes: u64,
    limit_source: LimitSource,
    state: MemoryState,
    process: ProcessMemory,
    cgroup: Option<CgroupMemory>,
    allocator: AllocatorMemory,
    buffers: Buffers,
    cache: CacheUsage,
    sum: Sum,
    /// What a cgroup has to allow beside the limit.
    kernel_reserve_bytes: u64,
    gaps: Gaps,
    accounted_bytes: u64,
    accounted_ratio: Option<f64>,
}

/// What no heap profile shows: each is the difference of two of the numbers above, so that growth without an allocation
/// has a name.
#[derive(Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the contract's, and say their unit")]
struct Gaps {
    /// Allocated and not accounted for: what the server cannot name.
    unnamed_bytes: u64,
    /// Active and not allocated: room in pages that hold live allocations.
    fragmentation_bytes: u64,
    /// Resident as the allocator believes, and neither active nor its own structures: free pages not given back yet.
    free_pages_bytes: u64,
    /// Resident and not the allocator's: program, stacks, what others mapped.
    outside_allocator_bytes: u64,
    /// Resident and shared with other processes.
    shared_bytes: u64,
    /// What fills may not use because more has landed than there is room for.
    withheld_bytes: u64,
}

impl Gaps {
    const fn between(process: ProcessMemory, allocator: AllocatorMemory, accounted: u64, withheld_bytes: u64) -> Self {
        let in_use = allocator.active_bytes.saturating_add(allocator.metadata_bytes);
        Self {
            unnamed_bytes: allocator.allocated_bytes.saturating_sub(accounted),
            fragmentation_bytes: allocator.active_bytes.saturating_sub(allocator.allocated_bytes),
            free_pages_bytes: allocator.resident_bytes.saturating_sub(in_use),
            outside_allocator_bytes: process.rss_bytes.saturating_sub(allocator.resident_bytes),
            shared_bytes: process.rss_bytes.saturating_sub(process.uss_bytes),
            withheld_bytes,
        }
    }
}

#[derive(Debug, Serialize)]
#[expect(clippy::struct_field_names, reason = "the names are the contract's, and say their unit")]
struct Buffers {
    live_bytes: u64,
    cached_bytes: u64,
    filling_bytes: u64,
    pinned_bytes: u64,
    disk_queue_bytes: u64,
}

impl From<Held> for Buffers {
    fn from(held: Held) -> Self {
        Self {
            live_bytes: held.live(),
            cached_bytes: held.cached,
            filling_bytes: held.filling,
            pinned_bytes: held.pinned,
            disk_queue_bytes: held.disk_queue,
        }
    }
}

impl AdminApi {
    fn memory(&self) -> MemoryDocument {
        let (allocator, held, cache) = (AllocatorMemory::read(), self.ledger.held(), self.cache.usage());
        // The cache's usage counts its payload and what it costs to keep it; other payload is counted by the ledger.
        let terms =
            [self.baseline_bytes, cache.usage_bytes, cache.metadata_bytes, held.filling, held.pinned, held.disk_queue];
        let accounted_bytes = terms.into_iter().fold(0, u64::saturating_add);
        let process = ProcessMemory::read();
        MemoryDocument {
            limit_bytes: self.config.memory.limit,
            limit_source: self.config.memory.limit_source,
            state: self.governor.state(),
            process,
            cgroup: Cgroup::find().map(|cgroup| cgroup.read()),
            allocator,
            buffers: held.into(),
            cache,
            sum: self.config.memory.budget.sum,
            kernel_reserve_bytes: self.config.memory.budget.kernel_bytes,
            gaps: Gaps::between(process, allocator, accounted_bytes, self.ledger.withheld()),
            accounted_bytes,
            accounted_ratio: ratio(allocator.allocated_bytes, accounted_bytes),
        }
    }

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

/// `a / b` to four places; `None` where there is no ratio.
fn ratio(a: u64, b: u64) -> Option<f64> {
    let ten_thousandths = u128::from(a) * 10_000 / u128::from(b.max(1));
    u32::try_from(ten_thousandths).ok().map(|n| f64::from(n) / 10_000.0)
}
