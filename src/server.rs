//! The server: built leaf first, bound, serving, drained.

mod connection;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use axum::Router;
use axum_server::Handle;
use tokio::runtime;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use crate::buffer::arena::Arena;
use crate::cache::Cache;
use crate::config::settings::Fault;
use crate::config::{Config, ServerConfig};
use crate::disk::{DirectoryError, Disk};
use crate::fetch::Fetcher;
use crate::governor::{Governor, Thresholds};
use crate::heap;
use crate::http::admin::{self, AdminApi};
use crate::http::data::{self, DataApi};
use crate::ledger::Ledger;
use crate::memory::sum::ADMIN_CONNECTIONS_MAX;
use crate::memory::{AllocatorMemory, Cgroup};
use crate::metadata::Directory;
use crate::purge::Purges;
use crate::reader::Reader;
use crate::store::{DEMO, Stores};
use crate::telemetry::Metrics;
use connection::{Gate, Patience};

/// How long fills that nobody waits for may take to end once the data API has drained.
const LAST_FILLS: Duration = Duration::from_secs(1);

/// The server, bound and not yet serving.
#[derive(Debug)]
pub struct Server {
    api: Arc<AdminApi>,
    data: TcpListener,
    admin: TcpListener,
    tracker: TaskTracker,
}

/// Why it cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration cannot be carried out.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Config(Vec<Fault>),
    /// A listener cannot be bound.
    #[error("{key}: cannot listen on {address}: {error}")]
    Listen {
        /// The key that names the address.
        key: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why not.
        error: io::Error,
    },
    /// The disk tier cannot be opened.
    #[error("disk.path: {0}")]
    Disk(#[from] DirectoryError),
    /// The system refuses memory or a thread.
    #[error("{0}")]
    System(String),
}

impl Server {
    /// Builds everything and binds the listeners.
    pub async fn bind(config: Config, metrics: Arc<Metrics>, stores: Stores) -> Result<Self, StartError> {
        if !config.memory.heap_profile {
            heap::switch_off().await;
        }
        let budget = config.memory.budget;
        let system = |error: &dyn std::error::Error| StartError::System(error.to_string());
        let measures = config.memory.measures;
        let purge_every = usize::try_from(budget.purge_every).unwrap_or(usize::MAX);
        let arena =
            if measures.arena { Arena::new(purge_every, measures.weigher) } else { Arena::shared(measures.weigher) };
        let arena = arena.map_err(|error| system(&error))?;
        let (room, in_flight) =
            if measures.ledger { (budget.sum.cache_bytes, budget.sum.in_flight_bytes) } else { (u64::MAX, u64::MAX) };
        let ledger = Ledger::new(room, in_flight, config.fetch.queue_timeout);
        let tracker = TaskTracker::new();
        let disk = match &config.disk {
            Some(disk) => Some(Disk::open(disk, Arc::clone(&ledger), Arc::clone(&arena), Arc::clone(&metrics)).await?),
            None => None,
        };
        let purges = match &config.disk {
            Some(disk) => Purges::open(&disk.path).map_err(|error| system(&error))?,
            None => Purges::in_memory(),
        };
        let cache = Arc::new(Cache::new(&budget, measures.weigher, disk, purges, Arc::clone(&metrics)));
        let directory = Arc::new(Directory::new(Arc::clone(&cache), tracker.clone()));
        let fetcher = Arc::new(Fetcher::new(
            Arc::clone(&cache),
            Arc::clone(&directory),
            arena,
            Arc::clone(&ledger),
            tracker.clone(),
            Arc::clone(&metrics),
            config.fetch.clone(),
        ));
        let reader = Reader::new(stores, directory, fetcher);
        let thresholds = Thresholds::new(config.memory.limit, budget.sum.slack_bytes);
        let capacity = budget.sum.cache_bytes;
        let governor = Governor::new(thresholds, capacity, Arc::clone(&cache), Arc::clone(&ledger), measures);
        let data = listen("server.listen", config.server.listen)?;
        let admin = listen("server.admin_listen", config.server.admin_listen)?;
        let places = config.server.connections_max;
        let api = AdminApi {
            config,
            data: Arc::new(DataApi { reader, metrics }),
            cache,
            ledger,
            governor,
            places: Arc::new(Semaphore::new(places)),
            baseline_bytes: AllocatorMemory::read().allocated_bytes,
            ready: AtomicBool::new(false),
            profiling: Mutex::new(()),
        };
        Ok(Self { api: Arc::new(api), data, admin, tracker })
    }

    /// Serves until `stop` ends, then drains: running requests may end within `server.drain_timeout`.
    ///
    /// `halt` ending while it drains cuts what still runs.
    pub async fn run(self, stop: impl Future<Output = ()>, halt: impl Future<Output = ()>) -> Result<(), StartError> {
        let Self { api, data, admin, tracker } = self;
        let server = &api.config.server;
        log_addresses(&api, &data, &admin);
        let governor = tracker.spawn(Arc::clone(&api.governor).watch());
        let handle = Handle::new();
        let patience = Patience {
            stall_timeout: server.write_stall_timeout,
            rate_min: server.write_rate_min,
            governor: Arc::clone(&api.governor),
        };
        let gate = |places, limit| Gate::new(places, limit, patience.clone(), Arc::clone(&api.data.metrics));
        let admin_places = Arc::new(Semaphore::new(usize::try_from(ADMIN_CONNECTIONS_MAX).unwrap_or(1)));
        let admin =
            serve_admin(admin, server, gate(admin_places, "admin connections"), admin::router(Arc::clone(&api)))?;
        let gate = gate(Arc::clone(&api.places), "server.connections_max");
        let serving = serve(data, server, gate, data::router(Arc::clone(&api.data)), handle.clone());
        tokio::pin!(serving);

        api.ready.store(true, Ordering::Release);
        let failed = tokio::select! {
            ended = &mut serving => ended.err(),
            () = stop => None,
        };
        api.ready.store(false, Ordering::Release);
        if let Some(error) = failed {
            return Err(StartError::System(format!("the data API ended: {error}")));
        }
        tracing::info!(timeout = ?server.drain_timeout, "draining");
        handle.graceful_shutdown(Some(server.drain_timeout));
        governor.abort();
        tracker.close();
        let drain = async {
            let _ = serving.await;
            let _ = timeout(LAST_FILLS, tracker.wait()).await;
            api.cache.flush(server.drain_timeout).await;
        };
        tokio::select! {
            () = drain => {}
            () = halt => tracing::warn!("stopped at once: requests were cut"),
        }
        admin.shutdown();
        tracing::info!("stopped");
        Ok(())
    }
}

fn listen(key: &'static str, address: SocketAddr) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).map_err(|error| StartError::Listen { key, address, error })
}

async fn serve(
    listener: TcpListener,
    limits: &ServerConfig,
    gate: Gate,
    router: Router,
    handle: Handle<SocketAddr>,
) -> io::Result<()> {
    let mut server = axum_server::from_tcp(listener)?
        .acceptor(gate)
        .http1_only()
        .handle(handle)
        .first_request_timeout(limits.header_timeout);
    server.http_builder().http1().max_buf_size(limits.header_bytes_max).header_read_timeout(limits.header_timeout);
    server.serve(router.into_make_service()).await
}

/// Serves the admin API from a thread and runtime of its own: it answers while the data API is overwhelmed.
fn serve_admin(
    listener: TcpListener,
    limits: &ServerConfig,
    gate: Gate,
    router: Router,
) -> Result<Handle<SocketAddr>, StartError> {
    let system = |error: io::Error| StartError::System(format!("cannot start the admin API: {error}"));
    let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(system)?;
    let handle = Handle::new();
    let (serving, limits) = (handle.clone(), limits.clone());
    thread::Builder::new()
        .name("admin".into())
        .spawn(move || {
            let served = runtime.block_on(serve(listener, &limits, gate, router, serving));
            if let Err(error) = served {
                tracing::error!(%error, "the admin API ended");
            }
        })
        .map_err(system)?;
    Ok(handle)
}

/// Says where it listens, and with the embedded store what to try first.
fn log_addresses(api: &AdminApi, data: &TcpListener, admin: &TcpListener) {
    let (Ok(data), Ok(admin)) = (data.local_addr(), admin.local_addr()) else { return };
    let memory = &api.config.memory;
    let (limit, kernel) = (memory.limit, memory.budget.kernel_bytes);
    tracing::info!(limit, source = ?memory.limit_source, sum = %memory.budget.sum, kernel_share = kernel, "memory");
    let cgroup = Cgroup::find().and_then(|cgroup| cgroup.read().limit_bytes);
    if let Some(cgroup) = cgroup.filter(|cgroup| *cgroup < limit.saturating_add(kernel)) {
        tracing::warn!(
            cgroup,
            limit,
            kernel_share = kernel,
            "the cgroup's limit leaves no room for the kernel's share"
        );
    }
    tracing::info!(data = %data, admin = %admin, "listening");
    let (demo, url) = DEMO;
    if api.config.stores.iter().any(|store| store.name.as_str() == demo && store.url.as_str() == url) {
        tracing::info!("no store is configured: an embedded one is mounted. Try:");
        tracing::info!("curl -s http://{data}/{demo}/hello.txt");
        tracing::info!("curl -s -D - -o /dev/null -r 0-65535 http://{data}/{demo}/64MiB.bin");
        tracing::info!("curl -s http://{admin}/debug/memory");
    }
}
