//! Starts the server's binary and a store for it to read.

pub mod upstream;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use reqwest::{Client, Response};
use serde_json::Value;
use tempfile::TempDir;

/// How long anything may take before a test gives up on it. Never waited for when all is well.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// A running server. Killed when dropped.
pub struct Halfopen {
    child: Child,
    /// Made once: a client reads all certificates of the machine when it is made.
    pub client: Client,
    pub data: String,
    pub admin: String,
    log: Arc<Mutex<Vec<String>>>,
    _directory: TempDir,
}

/// The binary under test.
pub fn binary() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halfopen"));
    // What the machine that runs the tests has in its environment says nothing about the server.
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("HALFOPEN_") || name.starts_with("AWS_")) {
        command.env_remove(name);
    }
    command
}

/// A store `s` over the upstream's bucket.
pub fn store(upstream: &upstream::Upstream) -> String {
    format!(
        "[stores.s]\nurl = \"s3://bucket\"\n\
         options = {{ aws_endpoint = \"{}\", aws_allow_http = true, aws_skip_signature = true, aws_region = \"x\" }}\n",
        upstream.url()
    )
}

/// A disk tier in that directory; the machine that runs the tests may have its temporary files in memory.
pub fn disk(directory: &Path) -> String {
    format!("[disk]\npath = \"{}\"\ncapacity = \"128MiB\"\nallow_tmpfs = true\n", directory.display())
}

impl Halfopen {
    /// Starts it with this configuration, on free ports, and waits until it is ready.
    pub async fn start(configuration: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("halfopen.toml");
        let limit = if configuration.contains("[memory]") { "" } else { "[memory]\nlimit = \"256MiB\"\n" };
        let server = if configuration.contains("[server]") { "" } else { "[server]\n" };
        std::fs::write(&file, format!("{server}{limit}[log]\nformat = \"json\"\n{configuration}")).unwrap();
        let mut child = binary()
            .args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--config"])
            .arg(&file)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let addresses = follow(BufReader::new(child.stderr.take().unwrap()), Arc::clone(&log));
        let listening = tokio::task::spawn_blocking(move || addresses.recv_timeout(PATIENCE)).await.unwrap();
        let Ok((data, admin)) = listening else {
            panic!("it does not listen: {:?}; its log: {:#?}", child.try_wait(), log.lock().unwrap());
        };
        let server = Self {
            child,
            client: Client::new(),
            data: format!("http://{data}"),
            admin: format!("http://{admin}"),
            log,
            _directory: directory,
        };
        until(|| async { server.admin("/readyz").await.status() == 200 }).await;
        server
    }

    /// The same for a store of the upstream, under the name `s`.
    pub async fn before(upstream: &upstream::Upstream) -> Self {
        Self::start(&store(upstream)).await
    }

    /// GET of a key of the store `s`.
    pub async fn get(&self, key: &str, range: Option<&str>) -> Response {
        let request = self.client.get(format!("{}/s/{key}", self.data));
        let request = range.map_or(request.try_clone().unwrap(), |range| request.header("range", range));
        request.send().await.unwrap()
    }

    /// GET of the admin API.
    pub async fn admin(&self, path: &str) -> Response {
        let sent = self.client.get(format!("{}{path}", self.admin)).send().await;
        sent.unwrap_or_else(|error| panic!("{error:?}; its log: {}", self.log()))
    }

    /// `/debug/memory`.
    pub async fn memory(&self) -> Value {
        self.admin("/debug/memory").await.json().await.unwrap()
    }

    /// The sum of all samples of a metric whose labels contain `labels`.
    pub async fn metric(&self, name: &str, labels: &str) -> u64 {
        let text = self.admin("/metrics").await.text().await.unwrap();
        let samples = text.lines().filter(|line| line.starts_with(name) && line.contains(labels));
        samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>() as u64
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([&format!("-{signal}"), &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Stops it as an operator would; what it has in its disk queue is written.
    pub async fn stop(self) {
        self.signal("TERM");
        let (status, log) = self.wait().await;
        assert!(status.success(), "{log}");
    }

    /// Waits for its end.
    pub async fn wait(mut self) -> (ExitStatus, String) {
        let mut status = None;
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while status.is_none() {
            assert!(tokio::time::Instant::now() < deadline, "it does not end; its log: {}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
            status = self.child.try_wait().unwrap();
        }
        (status.unwrap(), self.log())
    }
}

impl Drop for Halfopen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let panicked = self.log.lock().unwrap().iter().any(|line| line.contains("panicked"));
        assert!(!panicked || thread::panicking(), "the server panicked: {}", self.log());
    }
}

/// Keeps the log, and sends the addresses when they are in it.
fn follow(stderr: impl BufRead + Send + 'static, log: Arc<Mutex<Vec<String>>>) -> Receiver<(String, String)> {
    let (sender, receiver) = sync_channel(1);
    thread::spawn(move || {
        for line in stderr.lines().map_while(Result::ok) {
            let fields = serde_json::from_str::<Value>(&line).unwrap_or_default()["fields"].take();
            if fields["message"] == "listening" {
                let address = |name| fields[name].as_str().unwrap_or_default().to_owned();
                let _ = sender.send((address("data"), address("admin")));
            }
            log.lock().unwrap().push(line);
        }
    });
    receiver
}

/// Asks again until the answer is yes.
pub async fn until<F: Future<Output = bool>>(mut ask: impl FnMut() -> F) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !ask().await {
        assert!(tokio::time::Instant::now() < deadline, "it does not come to pass");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A header field of a response, or "".
pub fn field<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}
