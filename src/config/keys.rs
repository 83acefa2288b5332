//! Every key of the configuration, its default and its meaning: what is read, and what the reference lists.

use std::fmt::Write as _;

/// A key of the configuration file.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// `section.key` as in the file.
    pub name: &'static str,
    /// The default as one would write it; empty when there is none or it is derived.
    pub default: &'static str,
    /// What it means, with its unit and where the default comes from.
    pub meaning: &'static str,
}

macro_rules! keys {
    ($($ident:ident = $name:literal, $default:literal, $meaning:literal;)*) => {
        $(#[doc = $meaning] pub const $ident: Key = Key { name: $name, default: $default, meaning: $meaning };)*
        /// All keys outside of `[stores.NAME]`, in the order of the reference.
        pub const ALL: &[Key] = &[$($ident),*];
    };
}

keys! {
    LISTEN = "server.listen", "127.0.0.1:8080",
        "Address of the data API.";
    ADMIN_LISTEN = "server.admin_listen", "127.0.0.1:9090",
        "Address of the admin API: health, metrics, debug.";
    CONNECTIONS_MAX = "server.connections_max", "",
        "Client connections at once; further ones are closed. Derived: a twelfth of the memory limit at 14 KiB and `header_bytes_max` each up to 1024, a ninety-sixth above; 64 to 16384.";
    HEADER_BYTES_MAX = "server.header_bytes_max", "8KiB",
        "Longest request head; a longer one is 431. At least 8 KiB.";
    HEADER_TIMEOUT = "server.header_timeout", "60s",
        "A connection that has not sent a whole request head for so long is closed, idle ones included.";
    WRITE_STALL_TIMEOUT = "server.write_stall_timeout", "30s",
        "A client that takes no byte for so long is cut off, and the memory its response holds is free.";
    WRITE_RATE_MIN = "server.write_rate_min", "16KiB",
        "While memory is short, a client that takes fewer bytes a second than this, over 30 s, is cut off.";
    DRAIN_TIMEOUT = "server.drain_timeout", "30s",
        "How long running requests may take to end after SIGTERM or SIGINT.";
    MEMORY_LIMIT = "memory.limit", "",
        "Limit for the resident memory of the whole process. Default: 75 % of the cgroup's limit, less where the kernel's own memory would not fit beside it, else 25 % of RAM.";
    MEMORY_IN_FLIGHT = "memory.in_flight", "",
        "The share of the limit that fills may hold at once. Derived: a sixteenth of the limit up to 32 MiB, a twenty-fourth above, at least eight extents. An eighth of it is the reserve for reads in small pieces.";
    GOVERNOR = "memory.governor", "true",
        "Watch resident memory: near the limit give free pages back, make the cache smaller, refuse fills. Off: the limit may be passed.";
    SWITCH_OFF = "memory.switch_off", "",
        "For measuring what each is worth, never in production: measures left out, some of `arena`, `purge`, `resize`, `shed`, `least_rate`, `ledger`, `weigher`, with commas between.";
    HEAP_PROFILE = "memory.heap_profile", "true",
        "Sample allocations for /debug/heap, one in 512 KiB. Off: no samples are taken and /debug/heap is 503.";
    DISK_PATH = "disk.path", "",
        "Directory of the disk tier. Without it and `disk.capacity` there is none; both or neither.";
    DISK_CAPACITY = "disk.capacity", "",
        "Bytes that the disk tier may take, reserved at start; at least 64 MiB.";
    DISK_ENTRIES_MAX = "disk.entries_max", "",
        "Entries of the disk tier: they bound its index in memory, 115 B each. Derived: a forty-eighth of the memory limit.";
    DISK_ALLOW_TMPFS = "disk.allow_tmpfs", "false",
        "Whether the directory may be on a tmpfs, whose pages are memory that the limit does not count.";
    EXTENT_MAX = "fetch.extent_max", "",
        "Longest extent: the unit of caching and of the first byte. Derived: 1 MiB, less when the cache is small.";
    RUN_MAX = "fetch.run_max", "",
        "Longest single GET to a store, rounded down to whole extents, at most 256. Derived: 8 extents.";
    CONCURRENCY = "fetch.concurrency", "",
        "Requests under way to all stores at once. Derived: a thirty-second of the memory limit at 192 KiB each up to 64, a sixty-fourth above; 16 to 256.";
    QUEUE_TIMEOUT = "fetch.queue_timeout", "10s",
        "How long a fill waits for memory or for its turn at the store before it is refused with 503.";
    CONNECT_TIMEOUT = "fetch.connect_timeout", "5s",
        "How long a connection to a store may take to open.";
    STALL_TIMEOUT = "fetch.stall_timeout", "20s",
        "A store that sends nothing for so long is given up, and tried again `retries` times; a slow one that sends is not.";
    RETRIES = "fetch.retries", "2",
        "Further tries of a fill after a transient failure, each from where the last one broke.";
    LOG_LEVEL = "log.level", "info",
        "What is logged: a level, or directives such as `info,halfopen::fetch=debug`.";
    LOG_FORMAT = "log.format", "text",
        "`text` or `json`, to standard error.";
}

/// Keys of `[stores.NAME]`.
pub const STORE: &[Key] = &[STORE_URL, STORE_FRESHNESS];

/// Where the store is.
pub const STORE_URL: Key = Key {
    name: "url",
    default: "",
    meaning: "`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `abfss://container@account.dfs.core.windows.net/prefix`, `http://` or `https://`, `file:///dir`, `memory://`.",
};

/// How long its metadata is believed.
pub const STORE_FRESHNESS: Key = Key {
    name: "freshness",
    default: "60s",
    meaning: "`immutable`, a duration after which an object is revalidated, or `always`.",
};

/// The reference as Markdown; `docs/configuration.md` is this, and a test compares them.
pub fn reference() -> String {
    let mut text = String::from(
        "# Configuration\n\n\
         Generated from `src/config/keys.rs`. A flag wins over the environment, the environment over the file, the file over\n\
         the default. Sizes: `512MiB`, `2GiB`, `100GB`, or plain bytes. Durations: `250ms`, `60s`, `5m`, `1h`.\n",
    );
    let mut section = "";
    for key in ALL {
        let (of, name) = key.name.split_once('.').unwrap_or(("", key.name));
        if of != section {
            section = of;
            let _ = write!(text, "\n## `[{section}]`\n\n| key | default | meaning |\n| --- | --- | --- |\n");
        }
        row(&mut text, name, key);
    }
    text.push_str("\n## `[stores.NAME]`\n\n| key | default | meaning |\n| --- | --- | --- |\n");
    for key in STORE {
        row(&mut text, key.name, key);
    }
    text.push_str(
        "| `options` | | A table of object_store's own keys: `aws_endpoint`, `aws_region`, `aws_allow_http`, \
         `aws_skip_signature`, `google_service_account`, `azure_storage_account_name`, ... `AWS_*`, `GOOGLE_*` and `AZURE_*` in the environment are honoured. |\n",
    );
    text
}

fn row(text: &mut String, name: &str, key: &Key) {
    let default = if key.default.is_empty() { String::new() } else { format!("`{}`", key.default) };
    let _ = writeln!(text, "| `{name}` | {default} | {} |", key.meaning);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_reference_in_docs_is_the_generated_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configuration.md");
        if std::env::var_os("UPDATE_REFERENCE").is_some() {
            std::fs::write(path, super::reference()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert_eq!(
            written,
            super::reference(),
            "run this test with UPDATE_REFERENCE=1 and commit docs/configuration.md"
        );
    }
}
