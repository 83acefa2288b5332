//! The HTTP client under `object_store`: follows no redirects, has no total timeout, and keeps what it would drop.

use std::time::Duration;

use async_trait::async_trait;
use http::header::{ACCEPT_ENCODING, RANGE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};

use crate::error::Kind;

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
#[derive(Clone, Copy, Debug)]
pub(super) struct Connector {
    pub(super) connect_timeout: Duration,
    /// Ask for bytes as they are stored: Google's store would inflate what is stored with gzip, and offsets would mean
    /// nothing. Nothing here inflates it either.
    pub(super) as_stored: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let is = |key| options.get_config_value(&key).is_some_and(|value| value == "true");
        let mut builder = reqwest::Client::builder()
            // A redirect would carry session tokens to wherever it points: reqwest strips Authorization alone.
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(self.connect_timeout)
            // One connection for each request: what `memory/sum.rs` counts, and what can be closed alone.
            .http1_only()
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .tcp_nodelay(true)
            .https_only(!is(ClientConfigKey::AllowHttp))
            .tls_danger_accept_invalid_certs(is(ClientConfigKey::AllowInvalidCertificates))
            .user_agent(concat!("halfopen/", env!("CARGO_PKG_VERSION")));
        if self.as_stored {
            builder =
                builder.default_headers(HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static("gzip"))]));
        }
        if let Some(agent) = options.get_config_value(&ClientConfigKey::UserAgent) {
            builder = builder.user_agent(agent);
        }
        let generic =
            |error: reqwest::Error| object_store::Error::Generic { store: "HTTP client", source: Box::new(error) };
        if let Some(proxy) = options.get_config_value(&ClientConfigKey::ProxyUrl) {
            builder = builder.proxy(reqwest::Proxy::all(proxy).map_err(generic)?);
        }
        Ok(HttpClient::new(Careful(builder.build().map_err(generic)?)))
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
struct Careful(reqwest::Client);

#[async_trait]
impl HttpService for Careful {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let ranged = request.headers().contains_key(RANGE);
        let response = self.0.call(request).await?;
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
