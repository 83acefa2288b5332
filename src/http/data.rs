//! The data API: `GET|HEAD /{store}/{key...}`.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use futures::stream;
use http::header::{ALLOW, HOST};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Version};
use percent_encoding::percent_decode_str;
use tokio::time::Instant;

use super::conditions::{Conditions, Verdict, wishes};
use super::headers;
use crate::error::{Error, Kind};
use crate::object::{KEY_BYTES_MAX, Metadata, ObjectKey, ObjectName, StoreName};
use crate::range::Resolved;
use crate::reader::{Outcome, Piece, Read, ReadBody, Reader, Wishes};
use crate::telemetry::{Metrics, ReadOutcome};

/// What the data API is made of.
#[derive(Debug)]
pub struct DataApi {
    /// The read path.
    pub reader: Reader,
    /// Where outcomes are recorded.
    pub metrics: Arc<Metrics>,
}

/// The routes of the data API. Every path is one: keys are not routes.
pub fn router(api: Arc<DataApi>) -> Router {
    Router::new().fallback(answer).with_state(api)
}

async fn answer(State(api): State<Arc<DataApi>>, request: Request) -> Response {
    let (method, response) = match *request.method() {
        _ if !names_one_host(&request) => {
            ("other", headers::problem(StatusCode::BAD_REQUEST, "a request has one Host"))
        }
        Method::GET => ("GET", get(&api, request.uri().path(), request.headers()).await),
        Method::HEAD => ("HEAD", head(&api, request.uri().path(), request.headers()).await),
        _ => ("other", not_allowed()),
    };
    api.metrics.response("data", method, response.status().as_u16());
    response
}

/// RFC 9112 section 3.2: without a Host, or with several, a request of HTTP/1.1 is refused.
fn names_one_host(request: &Request) -> bool {
    request.version() != Version::HTTP_11 || request.headers().get_all(HOST).iter().count() == 1
}

fn not_allowed() -> Response {
    let mut response = headers::problem(StatusCode::METHOD_NOT_ALLOWED, "objects can be read with GET and HEAD");
    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    response
}

async fn head(api: &DataApi, path: &str, request: &HeaderMap) -> Response {
    let name = match object_name(path) {
        Ok(name) => name,
        Err(response) => return *response,
    };
    let (metadata, age) = match api.reader.head(&name, &wishes(request)).await {
        Ok(known) => known,
        Err(error) => return refuse(api, &error),
    };
    if let Some(response) = refuse_by(Conditions::read(request).judge(&metadata), &metadata) {
        return response;
    }
    let (status, mut fields) = headers::opened(&metadata, Resolved::Whole);
    headers::add_age(&mut fields, age);
    with_head(Body::empty(), status, fields)
}

async fn get(api: &Arc<DataApi>, path: &str, request: &HeaderMap) -> Response {
    let begun = Instant::now();
    let name = match object_name(path) {
        Ok(name) => name,
        Err(response) => {
            api.metrics.read(None, ReadOutcome::ClientError, begun.elapsed().as_secs_f64());
            return *response;
        }
    };
    let opened = open(api, &name, request).await;
    let seconds = begun.elapsed().as_secs_f64();
    match opened {
        Ok(Opened::Refused(response, outcome)) => {
            api.metrics.read(Some(&name.store), outcome, seconds);
            *response
        }
        Ok(Opened::Read(read)) if read.resolved == Resolved::Unsatisfiable => {
            api.metrics.read(Some(&name.store), ReadOutcome::ClientError, seconds);
            headers::unsatisfiable(&read.metadata)
        }
        Ok(Opened::Read(read)) => deliver(api, &name.store, *read, seconds),
        Err(error) => {
            let store = api.reader.store(name.store.as_str()).ok().map(|store| store.name());
            api.metrics.read(store, outcome_of(&error), seconds);
            refuse(api, &error)
        }
    }
}

/// How often the conditions are judged anew when the object changes between the judgement and the read.
const JUDGEMENTS_MAX: usize = 3;

/// A GET that was opened, or answered by its conditions.
enum Opened {
    Read(Box<Read>),
    Refused(Box<Response>, ReadOutcome),
}

/// Judges the conditions, if there are any, and opens the read.
///
/// They are judged before anything is fetched, so that a 304 costs at most a HEAD; and again where the version that was
/// opened is another than the one that was judged.
async fn open(api: &DataApi, name: &ObjectName, request: &HeaderMap) -> Result<Opened, Error> {
    let (conditions, wishes) = (Conditions::read(request), wishes(request));
    let spec = headers::range_spec(request);
    if conditions.are_none() {
        return Ok(Opened::Read(Box::new(api.reader.open(name, spec, &wishes).await?)));
    }
    let (mut metadata, _) = api.reader.head(name, &wishes).await?;
    for _ in 0..JUDGEMENTS_MAX {
        let verdict = conditions.judge(&metadata);
        if let Some(response) = refuse_by(verdict, &metadata) {
            let not_modified = verdict == Verdict::NotModified;
            let outcome = if not_modified { ReadOutcome::NotModified } else { ReadOutcome::ClientError };
            return Ok(Opened::Refused(Box::new(response), outcome));
        }
        // The look above has asked the store if the client wished it; the read need not ask again.
        let wishes = Wishes { max_age: None, ..wishes };
        let read = api.reader.open(name, conditions.range_for(spec, &metadata), &wishes).await?;
        if read.metadata.id == metadata.id {
            return Ok(Opened::Read(Box::new(read)));
        }
        metadata = read.metadata;
    }
    Err(Error::new(Kind::Changed, "every look finds another version"))
}

fn refuse_by(verdict: Verdict, metadata: &Metadata) -> Option<Response> {
    match verdict {
        Verdict::Proceed => None,
        Verdict::NotModified => Some(headers::not_modified(metadata)),
        Verdict::Failed => Some(headers::problem(StatusCode::PRECONDITION_FAILED, "the object is not the one named")),
    }
}

/// The response to an opened read. Its outcome is recorded when the body has ended, however it ends.
fn deliver(api: &Arc<DataApi>, store: &StoreName, read: Read, seconds: f64) -> Response {
    let Read { metadata, resolved, outcome, age, mut body } = read;
    let (status, mut fields) = headers::opened(&metadata, resolved);
    headers::add_cache_status(&mut fields, outcome);
    headers::add_age(&mut fields, age);
    let mut delivery =
        Delivery { api: Arc::clone(api), store: store.clone(), outcome: outcome.into(), seconds, body: None };
    let body = if let Some(piece) = body.take_only() {
        Body::from(delivery.count(piece))
    } else {
        delivery.body = Some(body);
        delivery.into_body()
    };
    with_head(body, status, fields)
}

fn with_head(body: Body, status: StatusCode, fields: HeaderMap) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = fields;
    response
}

/// One response's body on its way, and the record of how it went.
struct Delivery {
    api: Arc<DataApi>,
    store: StoreName,
    outcome: ReadOutcome,
    seconds: f64,
    body: Option<ReadBody>,
}

impl Delivery {
    fn count(&self, piece: Piece) -> Bytes {
        self.api.metrics.served(&self.store, piece.source, piece.bytes.len() as u64);
        piece.bytes
    }

    /// The bytes as a stream. An error ends it early: the connection is then cut, so that the client sees it.
    fn into_body(self) -> Body {
        Body::from_stream(stream::unfold(self, |mut delivery| async move {
            let piece = delivery.body.as_mut()?.next().await?;
            if let Err(error) = &piece {
                delivery.outcome = outcome_of(error);
            }
            Some((piece.map(|piece| delivery.count(piece)), delivery))
        }))
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.api.metrics.read(Some(&self.store), self.outcome, self.seconds);
    }
}

impl From<Outcome> for ReadOutcome {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Memory(_) => Self::Memory,
            Outcome::Miss => Self::Miss,
            Outcome::Collapsed => Self::Collapsed,
            Outcome::Disk(_) => Self::Disk,
            Outcome::Stale(_) => Self::Stale,
            Outcome::Requested | Outcome::Bypass => Self::Bypass,
        }
    }
}

fn outcome_of(error: &Error) -> ReadOutcome {
    match error.kind() {
        Kind::NotFound | Kind::Forbidden | Kind::NotCached => ReadOutcome::ClientError,
        _ => ReadOutcome::Error,
    }
}

fn refuse(api: &DataApi, error: &Error) -> Response {
    if let Kind::Overloaded(limit) = error.kind() {
        api.metrics.refused(limit);
    }
    if !matches!(error.kind(), Kind::NotFound | Kind::Forbidden | Kind::NotCached) {
        tracing::debug!(%error, "a request failed");
    }
    headers::failed(error)
}

/// The object that a path names: the key is what follows the store's name, percent-decoded once.
pub(super) fn object_name(path: &str) -> Result<ObjectName, Box<Response>> {
    let refused = |status, detail: &str| Box::new(headers::problem(status, detail));
    let nothing = || refused(StatusCode::NOT_FOUND, "a path is /{store}/{key}");
    let (store, key) = path.strip_prefix('/').and_then(|path| path.split_once('/')).ok_or_else(nothing)?;
    let key = decoded(key).ok_or_else(|| refused(StatusCode::BAD_REQUEST, "the path is not percent-encoded UTF-8"))?;
    let store = StoreName::new(store).ok_or_else(|| refused(StatusCode::NOT_FOUND, "there is no such store"))?;
    if key.len() > KEY_BYTES_MAX {
        return Err(refused(StatusCode::URI_TOO_LONG, "a key has at most 1024 bytes"));
    }
    let key = ObjectKey::new(&key).ok_or_else(nothing)?;
    Ok(ObjectName { store, key })
}

/// Decodes once. A `%` that begins no pair of hexadecimal digits is a fault of the client, not a character.
fn decoded(text: &str) -> Option<std::borrow::Cow<'_, str>> {
    let well_formed = text.split('%').skip(1).all(|rest| {
        let digits = rest.as_bytes().get(..2);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    });
    if well_formed { percent_decode_str(text).decode_utf8().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_decoded_once_and_mean_nothing_special() {
        for (path, key) in [
            ("/s/a+b", "a+b"),
            ("/s/a%2Bb", "a+b"),
            ("/s/a%252Fb", "a%2Fb"),
            ("/s/a%2Fb", "a/b"),
            ("/s/../b", "../b"),
            ("/s//b/", "/b/"),
            ("/s/%E6%97%A5%E6%9C%AC", "日本"),
        ] {
            assert_eq!(object_name(path).unwrap().key.as_str(), key, "{path}");
        }
        for (path, status) in [
            ("/", 404),
            ("/s", 404),
            ("/s/", 404),
            ("/%20/a", 404),
            ("/s/%ff", 400),
            ("/s/%2", 400),
            ("/s/100%", 400),
            ("/s/%zz", 400),
            (&format!("/s/{}", "k".repeat(1025)), 414),
        ] {
            assert_eq!(object_name(path).unwrap_err().status().as_u16(), status, "{path}");
        }
    }
}
