//! From a URL and options to a store of `object_store`.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};
use url::Url;

use super::connector::{CLIENT_OPTIONS, Connector};
use super::demo::Demo;
use super::dial::Connections;
use crate::config::StoreConfig;
use crate::config::settings::Fault;

/// Name and URL of the store that is mounted when none is configured.
pub const DEMO: (&str, &str) = ("demo", "demo://");

type Mounted = Result<Arc<dyn ObjectStore>, Fault>;

pub(super) fn mount(config: &StoreConfig, connect_timeout: Duration, connections: &Connections) -> Mounted {
    let as_stored = config.url.scheme() == "gs";
    let connector = Connector { connect_timeout, as_stored, connections: connections.clone() };
    match config.url.scheme() {
        "s3" | "s3a" => s3(config, connector),
        "gs" => gs(config, connector),
        "az" | "abfs" | "abfss" | "azure" => azure(config, connector),
        "http" | "https" => http(config, connector),
        "file" => no_options(config).and_then(|()| file(config)),
        "memory" => no_options(config).map(|()| Arc::new(InMemory::new()) as _),
        "demo" => no_options(config).map(|()| Arc::new(Demo) as _),
        scheme => Err(fault(
            config,
            "url",
            format!("has the scheme `{scheme}`; known are s3, gs, az, abfss, http, https, file and memory"),
        )),
    }
}

fn s3(config: &StoreConfig, connector: Connector) -> Mounted {
    let url = &config.url;
    if url.host_str().is_none_or(str::is_empty) {
        return Err(fault(config, "url", "names no bucket: s3://bucket/prefix"));
    }
    let mut builder = AmazonS3Builder::from_env().with_url(format!("s3://{}", url.host_str().unwrap_or_default()));
    for (name, value) in &config.options {
        let key = AmazonS3ConfigKey::from_str(name).map_err(|_| unknown_option(config, name))?;
        if let AmazonS3ConfigKey::Client(client) = key {
            check_client_option(config, name, client, value)?;
        }
        builder = builder.with_config(key, value);
    }
    let store = builder.with_http_connector(connector).with_retry(no_retries()).build();
    prefixed(config, store.map_err(|error| refused(config, &error))?)
}

fn gs(config: &StoreConfig, connector: Connector) -> Mounted {
    let bucket = config.url.host_str().filter(|bucket| !bucket.is_empty());
    let bucket = bucket.ok_or_else(|| fault(config, "url", "names no bucket: gs://bucket/prefix"))?;
    let mut builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
    for (name, value) in &config.options {
        let key = GoogleConfigKey::from_str(name).map_err(|_| unknown_option(config, name))?;
        if let GoogleConfigKey::Client(client) = key {
            check_client_option(config, name, client, value)?;
        }
        builder = builder.with_config(key, value);
    }
    let store = builder.with_http_connector(connector).with_retry(no_retries()).build();
    prefixed(config, store.map_err(|error| refused(config, &error))?)
}

/// `az://container/prefix`, or `abfss://container@account.dfs.core.windows.net/prefix`.
fn azure(config: &StoreConfig, connector: Connector) -> Mounted {
    let mut builder = MicrosoftAzureBuilder::from_env();
    for (name, value) in &config.options {
        let key = AzureConfigKey::from_str(name).map_err(|_| unknown_option(config, name))?;
        if let AzureConfigKey::Client(client) = key {
            check_client_option(config, name, client, value)?;
        }
        builder = builder.with_config(key, value);
    }
    let mut url = config.url.clone();
    url.set_path("");
    let store = builder.with_url(url).with_http_connector(connector).with_retry(no_retries()).build();
    prefixed(config, store.map_err(|error| refused(config, &error))?)
}

fn http(config: &StoreConfig, connector: Connector) -> Mounted {
    let mut options = ClientOptions::new().with_allow_http(config.url.scheme() == "http");
    for (name, value) in &config.options {
        let key = ClientConfigKey::from_str(name).map_err(|_| unknown_option(config, name))?;
        check_client_option(config, name, key, value)?;
        options = options.with_config(key, value);
    }
    let store = HttpBuilder::new()
        // With a slash at its end, every key would begin with one.
        .with_url(config.url.as_str().trim_end_matches('/'))
        .with_client_options(options)
        .with_http_connector(connector)
        .with_retry(no_retries())
        .build();
    Ok(Arc::new(store.map_err(|error| refused(config, &error))?))
}

fn file(config: &StoreConfig) -> Mounted {
    let no_path = || fault(config, "url", "is not a path of this machine: file:///dir");
    let directory = config.url.to_file_path().map_err(|()| no_path())?;
    match std::fs::metadata(&directory) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return Err(fault(config, "url", "is not a directory")),
        Err(error) => return Err(fault(config, "url", format!("cannot be read: {error}"))),
    }
    let store = LocalFileSystem::new_with_prefix(directory).map_err(|error| refused(config, &error))?;
    Ok(Arc::new(store))
}

fn prefixed(config: &StoreConfig, store: impl ObjectStore) -> Mounted {
    let prefix = Path::from_url_path(config.url.path());
    let prefix = prefix.map_err(|error| fault(config, "url", format!("has a prefix that cannot be used: {error}")))?;
    Ok(if prefix.as_ref().is_empty() { Arc::new(store) } else { Arc::new(PrefixStore::new(store, prefix)) })
}

/// The read path retries, resumes and counts; a second loop below it would multiply the attempts.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

fn check_client_option(config: &StoreConfig, name: &str, key: ClientConfigKey, value: &str) -> Result<(), Fault> {
    if !CLIENT_OPTIONS.contains(&key) {
        let instead = "is not used; the [fetch] section sets timeouts and limits";
        return Err(fault(config, &format!("options.{name}"), instead));
    }
    let is_switch = matches!(key, ClientConfigKey::AllowHttp | ClientConfigKey::AllowInvalidCertificates);
    if is_switch && !matches!(value, "true" | "false") {
        return Err(fault(config, &format!("options.{name}"), "must be true or false"));
    }
    if key == ClientConfigKey::ProxyUrl && Url::parse(value).map_or(true, |url| url.scheme() != "http") {
        return Err(fault(config, &format!("options.{name}"), "is not a URL of http://"));
    }
    Ok(())
}

fn no_options(config: &StoreConfig) -> Result<(), Fault> {
    config.options.keys().next().map_or(Ok(()), |name| Err(unknown_option(config, name)))
}

fn unknown_option(config: &StoreConfig, name: &str) -> Fault {
    fault(config, &format!("options.{name}"), format!("is not an option of a {} store", config.url.scheme()))
}

/// `object_store`'s own reason. It may repeat the value of an option, which may be a secret in the wrong place.
fn refused(config: &StoreConfig, error: &object_store::Error) -> Fault {
    let hide = |text: String, value: &String| if value.is_empty() { text } else { text.replace(value.as_str(), "***") };
    fault(config, "url", format!("cannot be mounted: {}", config.options.values().fold(error.to_string(), hide)))
}

fn fault(config: &StoreConfig, key: &str, problem: impl Into<String>) -> Fault {
    Fault::new(format!("stores.{}.{key}", config.name), problem)
}
