//! `halfopen check`: what a configuration comes to, and whether its stores can be reached.

use std::fmt::Write as _;

use bytesize::ByteSize;
use futures::future::join_all;

use crate::config::Config;
use crate::error::Kind;
use crate::store::{Store, Stores};

/// What was found.
#[derive(Debug)]
pub struct Report {
    /// For people, line by line.
    pub text: String,
    /// Whether every store answered.
    pub all_reached: bool,
}

/// Reaches every store, side by side, and describes the limits in force.
pub async fn check(config: &Config, stores: &Stores) -> Report {
    let memory = &config.memory;
    let budget = &memory.budget;
    let mut text = String::new();
    // Writing into a string cannot fail.
    let _ = writeln!(text, "memory limit   {} ({:?})", ByteSize::b(memory.limit), memory.limit_source);
    let _ = writeln!(text, "divided into   {}", budget.sum);
    let needed = memory.limit.saturating_add(budget.kernel_bytes);
    let kernel = ByteSize::b(budget.kernel_bytes);
    let _ = writeln!(text, "cgroup         at least {needed} bytes: {kernel} for page tables, sockets, slab");
    let _ = writeln!(
        text,
        "limits         {} connections, {} requests to stores, extents of {}, runs of {}",
        budget.connections_max,
        budget.upstream_concurrency,
        ByteSize::b(budget.extent_max.get()),
        ByteSize::b(budget.run_max.get())
    );
    match &config.disk {
        Some(disk) => {
            let (capacity, path) = (ByteSize::b(disk.capacity), disk.path.display());
            let _ = writeln!(text, "disk           {capacity} in {path}, at most {} entries", disk.entries_max);
        }
        None => text.push_str("disk           none\n"),
    }
    let reached = join_all(stores.iter().map(|store| async move { (store, reach(store).await) })).await;
    for (store, problem) in &reached {
        let state = problem.as_deref().unwrap_or("reached");
        let _ = writeln!(text, "store {:<8} {state}", store.name().as_str());
    }
    Report { text, all_reached: reached.iter().all(|(_, problem)| problem.is_none()) }
}

/// Why a store cannot be used, if it cannot.
async fn reach(store: &Store) -> Option<String> {
    let error = store.probe().await.err()?;
    let advice = match error.kind() {
        Kind::NotFound => "the bucket or container does not exist, or the endpoint is another one",
        Kind::Forbidden => "the credentials are refused, or missing, or for another region",
        Kind::TimedOut => "it does not answer within fetch.stall_timeout",
        Kind::Unavailable => {
            "it cannot be connected to, or fails: is the endpoint right, and http allowed if it is http?"
        }
        _ => "its answer is not that of such a store",
    };
    Some(format!("NOT reached: {advice} ({})", error.detail()))
}
