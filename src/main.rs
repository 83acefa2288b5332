//! The program: allocator, arguments, configuration, server, exit code.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use halfopen::config::flags::Invocation;
use halfopen::config::settings::{Fault, Settings, Source};
use halfopen::config::{Config, Rejected};
use halfopen::heap;
use halfopen::memory::Machine;
use halfopen::server::{Server, StartError};
use halfopen::store::{DEMO, Stores};
use halfopen::telemetry::{self, Metrics};
use tikv_jemallocator::Jemalloc;
use tokio::runtime::{self, Runtime};
use tokio::signal::unix::{SignalKind, signal};

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Options of the allocator; `_RJEM_MALLOC_CONF` in the environment overrides them.
///
/// * `prof`, `prof_active`, `lg_prof_sample:19`: one allocation in 512 KiB is sampled for /debug/heap. It costs about
///   5 % of the requests per second of hot 64 KiB reads (see ARCHITECTURE.md). `prof:false` switches it off altogether,
///   `memory.heap_profile = false` at start.
/// * `cache_oblivious:false`: else every allocation of 16 KiB and more costs an uncounted page (6 % at 64 KiB).
/// * `dirty_decay_ms`, `muzzy_decay_ms`, `background_thread`: free pages outside of the payload arena go back within a
///   second, by a thread of the allocator's. The payload arena has its own rule (`buffer/arena.rs`).
#[expect(unsafe_code, reason = "the allocator reads its options from a symbol of this name")]
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static ALLOCATOR_OPTIONS: &[u8] = b"prof:true,prof_active:true,lg_prof_sample:19,cache_oblivious:false,\
    background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0\0";

/// Exit status for a command line that makes no sense, and for a configuration that does not (sysexits.h).
const EXIT_USAGE: u8 = 64;
const EXIT_CONFIG: u8 = 78;

/// Threads for the disk tier, file stores and name resolution; their stacks are a term of the memory sum.
const BLOCKING_THREADS_MAX: usize = 16;

fn main() -> ExitCode {
    match Invocation::from_args() {
        Ok(Invocation::Serve(settings, faults)) => serve(settings, faults),
        Ok(Invocation::Check(settings, faults)) => check(settings, faults),
        Ok(Invocation::HeapProfile(format)) => print_heap_profile(format),
        Err(error) => {
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { EXIT_USAGE } else { 0 })
        }
    }
}

fn print_heap_profile(format: heap::Format) -> ExitCode {
    heap::go_first();
    match heap::symbolize(io::stdin().lock(), format) {
        Ok(profile) if io::stdout().lock().write_all(&profile).is_ok() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => complain(&[error.to_string()], ExitCode::FAILURE),
    }
}

fn serve(mut settings: Settings, faults: Vec<Fault>) -> ExitCode {
    if settings.stores.is_empty() && faults.is_empty() {
        settings.set_store(DEMO.0, "url", DEMO.1.into(), Source::File);
    }
    let metrics = Arc::new(Metrics::new());
    let (config, stores) = match resolve(settings, faults, &metrics) {
        Ok(valid) => valid,
        Err(faults) => return complain(&faults, ExitCode::from(EXIT_CONFIG)),
    };
    telemetry::start_log(&config.log.level, config.log.json);
    let served = match runtime() {
        Ok(runtime) => {
            let served = runtime.block_on(run(config, metrics, stores));
            // A read of a file system that hangs would hold the end up for ever.
            runtime.shutdown_background();
            served
        }
        Err(error) => Err(StartError::System(error.to_string())),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&[error.to_string()], ExitCode::FAILURE),
    }
}

fn check(settings: Settings, faults: Vec<Fault>) -> ExitCode {
    let (config, stores) = match resolve(settings, faults, &Arc::new(Metrics::new())) {
        Ok(valid) => valid,
        Err(faults) => return complain(&faults, ExitCode::from(EXIT_CONFIG)),
    };
    let report = match runtime() {
        Ok(runtime) => runtime.block_on(halfopen::check::check(&config, &stores)),
        Err(error) => return complain(&[error.to_string()], ExitCode::FAILURE),
    };
    let printed = io::stdout().lock().write_all(report.text.as_bytes());
    ExitCode::from(if report.all_reached && printed.is_ok() { 0 } else { EXIT_CONFIG })
}

fn runtime() -> io::Result<Runtime> {
    runtime::Builder::new_multi_thread().max_blocking_threads(BLOCKING_THREADS_MAX).enable_all().build()
}

/// Checks the configuration and mounts its stores; the faults of both are told together.
fn resolve(settings: Settings, faults: Vec<Fault>, metrics: &Arc<Metrics>) -> Result<(Config, Stores), Vec<String>> {
    let lines = |faults: Vec<Fault>| faults.iter().map(ToString::to_string).collect();
    match Config::resolve(settings, faults, &Machine::read()) {
        Ok(config) => match Stores::mount(&config.stores, &config.fetch, metrics) {
            Ok(stores) => Ok((config, stores)),
            Err(faults) => Err(lines(faults)),
        },
        Err(rejected) => {
            let Rejected { mut faults, stores, fetch } = *rejected;
            faults.extend(Stores::mount(&stores, &fetch, metrics).err().unwrap_or_default());
            Err(lines(faults))
        }
    }
}

async fn run(config: Config, metrics: Arc<Metrics>, stores: Stores) -> Result<(), StartError> {
    let system = |error: io::Error| StartError::System(error.to_string());
    let mut terminate = signal(SignalKind::terminate()).map_err(system)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(system)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(system)?;
    let server = Server::bind(config, metrics, stores).await?;
    let signals = tokio::sync::Semaphore::new(0);
    let listen = async {
        loop {
            tokio::select! {
                _ = terminate.recv() => signals.add_permits(1),
                _ = interrupt.recv() => signals.add_permits(1),
                _ = hangup.recv() => tracing::warn!("SIGHUP: nothing of the configuration can be reloaded yet"),
            }
        }
    };
    // The first signal stops, the second halts.
    let next = || async { signals.acquire().await.map_or((), tokio::sync::SemaphorePermit::forget) };
    tokio::select! {
        ended = server.run(next(), next()) => ended,
        () = listen => Ok(()),
    }
}

/// Tells all that is wrong, on standard error and without a log's decoration: it may not have started.
fn complain(lines: &[String], code: ExitCode) -> ExitCode {
    let mut out = io::stderr().lock();
    for line in lines {
        let _ = writeln!(out, "halfopen: {line}");
    }
    code
}
