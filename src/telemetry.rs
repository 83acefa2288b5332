//! The log, and every metric with its name, unit and labels.
//!
//! The logic returns what happened; the edge records it here, once.

use std::collections::HashSet;
use std::fmt::{self, Write as _};

use prometheus_client::encoding::{EncodeLabelValue, LabelValueEncoder, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::object::StoreName;

/// Whether `directives` can be used as the log's filter.
pub fn check_filter(directives: &str) -> Result<(), String> {
    directives.parse::<EnvFilter>().map(drop).map_err(|error| error.to_string())
}

/// Starts logging to standard error; a second call in the same process changes nothing.
pub fn start_log(directives: &str, json: bool) {
    let filter = directives.parse::<EnvFilter>().unwrap_or_default();
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let registry = tracing_subscriber::registry().with(filter);
    drop(if json { registry.with(lines.json()).try_init() } else { registry.with(lines).try_init() });
}

/// How a GET of the data API ended; exactly one each. The names are CONTRACT's labels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadOutcome {
    /// The first extent was in memory.
    Memory,
    /// It was on disk.
    Disk,
    /// It was fetched for this read.
    Miss,
    /// It was being fetched for another.
    Collapsed,
    /// The metadata was stale and was revalidated first.
    Stale,
    /// The client wished the store to be asked, or there was no memory to fill the cache with.
    Bypass,
    /// 304.
    NotModified,
    /// 404, 416 and the like.
    ClientError,
    /// The read failed, before or after its first byte.
    Error,
}

impl ReadOutcome {
    const fn label(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Miss => "miss",
            Self::Collapsed => "collapsed",
            Self::Stale => "stale",
            Self::Bypass => "bypass",
            Self::NotModified => "not_modified",
            Self::ClientError => "client_error",
            Self::Error => "error",
        }
    }
}

/// Where served bytes came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ByteSource {
    /// The memory tier.
    Memory,
    /// The disk tier.
    Disk,
    /// A store, for this read or for one it joined.
    Upstream,
}

impl ByteSource {
    const fn label(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Upstream => "upstream",
        }
    }
}

/// Labels of one sample: names and values.
type Labels<const N: usize> = [(&'static str, Label); N];

/// The value of a label: from a fixed set, or the name of a configured store. Never what a client sent.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Label {
    Fixed(&'static str),
    Store(StoreName),
    Status(u16),
}

impl EncodeLabelValue for Label {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        match self {
            Self::Fixed(text) => encoder.write_str(text),
            Self::Store(name) => encoder.write_str(name.as_str()),
            Self::Status(status) => write!(encoder, "{status}"),
        }
    }
}

/// What stands for a store that is not configured.
const NO_STORE: &str = "none";

fn store_label(store: Option<&StoreName>) -> (&'static str, Label) {
    ("store", store.map_or(Label::Fixed(NO_STORE), |name| Label::Store(name.clone())))
}

/// Every metric. Counters only grow; gauges are set when they are read.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    reads: Family<Labels<2>, Counter>,
    responses: Family<Labels<3>, Counter>,
    served_bytes: Family<Labels<2>, Counter>,
    upstream_requests: Family<Labels<3>, Counter>,
    upstream_bytes: Family<Labels<1>, Counter>,
    upstream_faults: Family<Labels<2>, Counter>,
    first_byte: Histograms<1>,
    upstream_seconds: Histograms<2>,
    memory: Family<Labels<1>, Gauge>,
    memory_state: Family<Labels<1>, Gauge>,
    cache_entries: Family<Labels<1>, Gauge>,
    cache_bytes: Family<Labels<1>, Gauge>,
    evictions: Family<Labels<2>, Counter>,
    not_stored: Family<Labels<1>, Counter>,
    refused: Family<Labels<1>, Counter>,
}

/// Gauges, read when metrics are asked for; all in bytes but the entries.
#[derive(Clone, Debug, Default)]
pub struct Gauges {
    /// `halfopen_memory_bytes` by kind.
    pub memory: Vec<(&'static str, u64)>,
    /// Every state of memory, and whether it is the one.
    pub states: Vec<(&'static str, bool)>,
    /// Extents in the memory tier.
    pub cache_entries: u64,
    /// Their weight.
    pub cache_bytes: u64,
    /// Entries in the disk tier, about.
    pub disk_entries: u64,
}

type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// The buckets of every duration: 100 us to 52 s, each twice the one before.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(100e-6, 2.0, 20))
}

impl Metrics {
    /// All metrics at zero.
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let build = [
            ("version", env!("CARGO_PKG_VERSION")),
            ("revision", option_env!("HALFOPEN_REVISION").unwrap_or("unknown")),
        ];
        registry.register("halfopen_build", "The build that runs", Info::new(build.to_vec()));
        let mut metrics = Registrar(registry);
        Self {
            reads: metrics.add("reads", "GETs of the data API by outcome, exactly one each"),
            responses: metrics.add("responses", "Responses by API, method and status"),
            served_bytes: metrics.add("served_bytes", "Payload bytes given to clients, by where they came from"),
            upstream_requests: metrics.add("upstream_requests", "Requests to stores"),
            upstream_bytes: metrics.add("upstream_bytes", "Payload bytes received from stores"),
            upstream_faults: metrics.add("upstream_faults", "Requests to stores that failed, by kind"),
            first_byte: metrics.histograms("first_byte_seconds", "From the request to the head of its answer"),
            upstream_seconds: metrics
                .histograms("upstream_seconds", "From a request to a store to the head of its answer"),
            memory: metrics.add("memory_bytes", "Memory by kind"),
            memory_state: metrics.add("memory_state", "What the governor is doing: 1 for the state it is in"),
            cache_entries: metrics.add("cache_entries", "Extents in the cache"),
            cache_bytes: metrics.add("cache_bytes", "Weight of the extents in the cache"),
            evictions: metrics.add("evictions", "Extents that left the cache"),
            not_stored: metrics.add("not_stored", "Extents that were fetched and not stored, by reason"),
            refused: metrics.add("refused", "Requests and connections refused, by the limit that was hit"),
            registry: metrics.0,
        }
    }

    /// A GET was answered, or its answer failed. `seconds` until the head was ready.
    pub fn read(&self, store: Option<&StoreName>, outcome: ReadOutcome, seconds: f64) {
        let outcome = ("outcome", Label::Fixed(outcome.label()));
        self.reads.get_or_create(&[store_label(store), outcome.clone()]).inc();
        self.first_byte.get_or_create(&[outcome]).observe(seconds);
    }

    /// An API gave an answer.
    pub fn response(&self, api: &'static str, method: &'static str, status: u16) {
        let labels = [("api", Label::Fixed(api)), ("method", Label::Fixed(method)), ("status", Label::Status(status))];
        self.responses.get_or_create(&labels).inc();
    }

    /// Bytes were given to a client.
    pub fn served(&self, store: &StoreName, source: ByteSource, bytes: u64) {
        self.served_bytes
            .get_or_create(&[store_label(Some(store)), ("source", Label::Fixed(source.label()))])
            .inc_by(bytes);
    }

    /// A store answered a request, or failed to. `seconds` until the head of the answer.
    pub fn upstream(&self, store: &StoreName, operation: &'static str, result: &'static str, seconds: f64) {
        let (store, operation) = (store_label(Some(store)), ("operation", Label::Fixed(operation)));
        self.upstream_seconds.get_or_create(&[store.clone(), operation.clone()]).observe(seconds);
        self.upstream_requests.get_or_create(&[store, operation, ("result", Label::Fixed(result))]).inc();
    }

    /// Bytes came from a store.
    pub fn upstream_bytes(&self, store: &StoreName, bytes: u64) {
        self.upstream_bytes.get_or_create(&[store_label(Some(store))]).inc_by(bytes);
    }

    /// A request to a store failed.
    pub fn upstream_fault(&self, store: &StoreName, kind: &'static str) {
        self.upstream_faults.get_or_create(&[store_label(Some(store)), ("kind", Label::Fixed(kind))]).inc();
    }

    /// An extent left the cache.
    pub fn evicted(&self, reason: &'static str) {
        self.evictions.get_or_create(&[("tier", Label::Fixed("memory")), ("reason", Label::Fixed(reason))]).inc();
    }

    /// An extent was fetched and not stored.
    pub fn not_stored(&self, reason: &'static str) {
        self.not_stored.get_or_create(&[("reason", Label::Fixed(reason))]).inc();
    }

    /// A limit was hit.
    pub fn refused(&self, limit: &'static str) {
        self.refused.get_or_create(&[("limit", Label::Fixed(limit))]).inc();
    }

    /// All metrics as `OpenMetrics` text.
    pub fn open_metrics(&self, gauges: &Gauges) -> String {
        let gauge = |family: &Family<Labels<1>, Gauge>, label, of, value: u64| {
            family.get_or_create(&[(label, Label::Fixed(of))]).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        for (kind, bytes) in &gauges.memory {
            gauge(&self.memory, "kind", kind, *bytes);
        }
        for (state, is) in &gauges.states {
            gauge(&self.memory_state, "state", state, u64::from(*is));
        }
        gauge(&self.cache_entries, "tier", "memory", gauges.cache_entries);
        gauge(&self.cache_entries, "tier", "disk", gauges.disk_entries);
        gauge(&self.cache_bytes, "tier", "memory", gauges.cache_bytes);
        let mut text = String::new();
        // Writing into a string cannot fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Registers metrics under the common prefix.
struct Registrar(Registry);

impl Registrar {
    fn add<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        let metric = M::default();
        self.0.register(format!("halfopen_{name}"), help, metric.clone());
        metric
    }

    fn histograms<const N: usize>(&mut self, name: &str, help: &str) -> Histograms<N> {
        let family: Histograms<N> = Family::new_with_constructor(seconds as fn() -> Histogram);
        self.0.register(format!("halfopen_{name}"), help, family.clone());
        family
    }
}

/// `OpenMetrics` text in the older Prometheus form: metric families carry the name of their samples.
pub fn prometheus_text(open_metrics: &str) -> String {
    let counters: HashSet<&str> =
        open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines().filter(|line| !line.starts_with("# EOF")) {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(word), Some(name), Some(rest)) if counters.contains(name) => {
                let _ = writeln!(text, "# {word} {name}_total {rest}");
            }
            (Some("#"), Some(word), Some(name), Some("info")) => {
                let _ = writeln!(text, "# {word} {name}_info gauge");
            }
            (Some("#"), Some("HELP"), Some(name @ "halfopen_build"), Some(rest)) => {
                let _ = writeln!(text, "# HELP {name}_info {rest}");
            }
            _ => {
                let _ = writeln!(text, "{line}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_text_forms_carry_the_contracts_names() {
        let metrics = Metrics::new();
        let store = StoreName::new("s").unwrap();
        metrics.read(Some(&store), ReadOutcome::Miss, 0.01);
        metrics.read(None, ReadOutcome::ClientError, 0.01);
        metrics.response("data", "GET", 206);
        let gauges = Gauges { memory: vec![("limit", 7)], ..Gauges::default() };
        let open = metrics.open_metrics(&gauges);
        assert!(open.contains("# TYPE halfopen_reads counter\n") && open.ends_with("# EOF\n"), "{open}");
        let text = prometheus_text(&open);
        for line in [
            "# TYPE halfopen_reads_total counter",
            "halfopen_reads_total{store=\"s\",outcome=\"miss\"} 1",
            "halfopen_reads_total{store=\"none\",outcome=\"client_error\"} 1",
            "halfopen_responses_total{api=\"data\",method=\"GET\",status=\"206\"} 1",
            "halfopen_memory_bytes{kind=\"limit\"} 7",
            "# TYPE halfopen_build_info gauge",
        ] {
            assert!(text.lines().any(|have| have == line), "{line} in:\n{text}");
        }
        assert!(!text.contains("# EOF"));
    }
}
