//! The HTTP client under `object_store`: follows no redirects, has no total timeout, and keeps what it would drop.

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::header::{ACCEPT_ENCODING, PROXY_AUTHORIZATION, RANGE, RETRY_AFTER, USER_AGENT};
use http::uri::Scheme;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpResponseBody, HttpService,
};

use super::dial::{Connections, Dialer, Route};
use crate::error::Kind;

/// Bytes read from a connection at once, and kept for it while it is open. By default hyper's buffers grow to 408 KiB,
/// which nobody could count.
const READ_BUFFER_BYTES: usize = 64 << 10;

/// How long an idle connection is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

const AGENT: &str = concat!("halfopen/", env!("CARGO_PKG_VERSION"));

/// How much of a refusal's body is kept for the log: S3's errors are a few hundred bytes.
const REFUSAL_BYTES_MAX: usize = 4096;

/// The longest Retry-After that is believed.
const RETRY_AFTER_MAX: Duration = Duration::from_hours(1);

/// Idle connections kept per host: what a burst opened is used by the next one.
const IDLE_CONNECTIONS_MAX: usize = 64;

/// A store's answer that is no success.
#[derive(Debug, thiserror::Error)]
#[error("the store answered {status}: {body}")]
pub(super) struct Refusal {
    status: StatusCode,
    body: String,
    pub(super) retry_after: Option<Duration>,
}

impl Refusal {
    pub(super) fn kind(&self) -> Kind {
        match self.status {
            // 416, or a success that is not the part asked for: the object's size tells what it means.
            StatusCode::RANGE_NOT_SATISFIABLE | StatusCode::OK => Kind::RangeRefused,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => Kind::Unavailable,
            status if status.is_server_error() => Kind::Unavailable,
            _ => Kind::Protocol,
        }
    }
}

/// Makes the HTTP client of a store.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    pub(super) connect_timeout: Duration,
    /// Ask for bytes as they are stored: Google's store would inflate what is stored with gzip, and offsets would mean
    /// nothing. Nothing here inflates it either.
    pub(super) as_stored: bool,
    pub(super) connections: Connections,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let option = |key| options.get_config_value(&key);
        let is = |key| option(key).is_some_and(|value| value == "true");
        let generic = |source| object_store::Error::Generic { store: "HTTP client", source };
        let proxies = option(ClientConfigKey::ProxyUrl).map(|proxy| Matcher::builder().all(proxy).build());
        let proxies = Arc::new(proxies.unwrap_or_else(Matcher::from_env));
        let route = Route {
            connect_timeout: self.connect_timeout,
            proxies: Arc::clone(&proxies),
            allow_http: is(ClientConfigKey::AllowHttp),
            allow_invalid_certificates: is(ClientConfigKey::AllowInvalidCertificates),
            connections: self.connections.clone(),
        };
        let connector = route.connector().map_err(|error| generic(error.into()))?;
        // HTTP/1.1: one connection for each request, which is what `memory/sum.rs` counts, and what can be closed alone.
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .http1_read_buf_exact_size(READ_BUFFER_BYTES)
            .build(connector);
        let agent = option(ClientConfigKey::UserAgent).unwrap_or_else(|| AGENT.to_owned());
        let mut fields = HeaderMap::new();
        fields.insert(USER_AGENT, HeaderValue::from_str(&agent).map_err(|error| generic(error.into()))?);
        if self.as_stored {
            fields.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
        Ok(HttpClient::new(Careful { client, fields, proxies }))
    }
}

/// The client's options that [`Connector`] heeds; others would be ignored, so they are refused.
pub(super) const CLIENT_OPTIONS: [ClientConfigKey; 4] = [
    ClientConfigKey::AllowHttp,
    ClientConfigKey::AllowInvalidCertificates,
    ClientConfigKey::ProxyUrl,
    ClientConfigKey::UserAgent,
];

/// Turns answers that `object_store` would make opaque into errors that say what they were.
#[derive(Debug)]
struct Careful {
    client: Client<HttpsConnector<Dialer>, HttpRequestBody>,
    /// What every request has, unless it says otherwise.
    fields: HeaderMap,
    proxies: Arc<Matcher>,
}

impl Careful {
    async fn send(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        for (name, value) in &self.fields {
            request.headers_mut().entry(name).or_insert_with(|| value.clone());
        }
        // A tunnel's password is in its own request; without a tunnel the proxy reads this one.
        if request.uri().scheme() == Some(&Scheme::HTTP)
            && let Some(proxy) = self.proxies.intercept(request.uri())
            && let Some(auth) = proxy.basic_auth()
        {
            request.headers_mut().insert(PROXY_AUTHORIZATION, auth.clone());
        }
        let response = self.client.request(request).await.map_err(transport)?;
        Ok(response.map(|body| HttpResponseBody::new(body.map_err(transport))))
    }
}

/// What kind of failure it was: the deepest cause that says something.
fn transport(error: impl StdError + Send + Sync + 'static) -> HttpError {
    let mut kind = HttpErrorKind::Unknown;
    let mut cause: Option<&(dyn StdError + 'static)> = Some(&error);
    while let Some(at) = cause {
        if at.downcast_ref::<ClientError>().is_some_and(ClientError::is_connect) {
            kind = HttpErrorKind::Connect;
        }
        if let Some(hyper) = at.downcast_ref::<hyper::Error>() {
            match () {
                () if hyper.is_timeout() => kind = HttpErrorKind::Timeout,
                () if hyper.is_closed() || hyper.is_incomplete_message() || hyper.is_body_write_aborted() => {
                    kind = HttpErrorKind::Request;
                }
                () => {}
            }
        }
        if let Some(io) = at.downcast_ref::<io::Error>() {
            kind = match io.kind() {
                io::ErrorKind::TimedOut => HttpErrorKind::Timeout,
                io::ErrorKind::ConnectionAborted
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::UnexpectedEof => HttpErrorKind::Interrupted,
                _ => kind,
            };
        }
        cause = at.source();
    }
    HttpError::new(kind, error)
}

#[async_trait]
impl HttpService for Careful {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let ranged = request.headers().contains_key(RANGE);
        let response = self.send(request).await?;
        let status = response.status();
        match status {
            // An answer of 200 to a range is the whole object: its body is not read, its connection is closed.
            StatusCode::OK if ranged => Err(refusal(status, String::new(), response.headers())),
            status if status.is_success() => Ok(without_unreadable_fields(response)),
            status => {
                let (parts, body) = response.into_parts();
                let body = Limited::new(body, REFUSAL_BYTES_MAX).collect().await;
                let body = body.map(|body| String::from_utf8_lossy(&body.to_bytes()).into_owned());
                let body = body.unwrap_or_default();
                if is_understood(status) {
                    return Ok(HttpResponse::from_parts(parts, body.into()));
                }
                Err(refusal(status, body, &parts.headers))
            }
        }
    }
}

/// Leaves out what `object_store` would refuse a whole answer for: fields in other alphabets, and the user's metadata,
/// which is not used.
fn without_unreadable_fields(mut response: HttpResponse) -> HttpResponse {
    let headers = response.headers_mut();
    let unreadable = |(name, value): (&HeaderName, &HeaderValue)| {
        let unused = name.as_str().starts_with("x-amz-meta-") || name.as_str().starts_with("x-goog-meta-");
        (unused || value.to_str().is_err()).then(|| name.clone())
    };
    let names: Vec<HeaderName> = headers.iter().filter_map(unreadable).collect();
    for name in names {
        headers.remove(name);
    }
    response
}

/// Statuses that `object_store` has a name for.
fn is_understood(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::NOT_MODIFIED
            | StatusCode::NOT_FOUND
            | StatusCode::PRECONDITION_FAILED
            | StatusCode::FORBIDDEN
            | StatusCode::UNAUTHORIZED
    )
}

fn refusal(status: StatusCode, body: String, headers: &HeaderMap) -> HttpError {
    let seconds = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    let retry_after = seconds.map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
    HttpError::new(HttpErrorKind::Unknown, Refusal { status, body, retry_after })
}
