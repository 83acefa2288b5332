//! The one error of the read path: few kinds, each of which tells the caller what to do.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What kind of failure it was. A new kind is added only where a caller would act differently.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// No such store or object.
    NotFound,
    /// The store refuses these credentials.
    Forbidden,
    /// The object's version is no longer the one the read began with.
    Changed,
    /// The store refuses the range or answers something else than a range. Its size tells which.
    RangeRefused,
    /// The store broke its protocol: a short or long body, another range, a wrong total.
    Protocol,
    /// The store is unreachable, broke the connection, fails or throttles.
    Unavailable,
    /// The store made no progress for the configured time.
    TimedOut,
    /// This server is out of a budget: the key of the configuration that limits it.
    Overloaded(&'static str),
    /// It is not in the cache, and the client wants it from nowhere else.
    NotCached,
    /// Nobody waited for the fill any longer.
    Abandoned,
    /// A fault of this program.
    Internal,
}

impl Kind {
    /// Whether the same request to the store may succeed when it is made again.
    ///
    /// A broken body is worth another try as well: the connection it came on is not used again.
    pub const fn is_transient(self) -> bool {
        matches!(self, Self::Protocol | Self::Unavailable | Self::TimedOut)
    }
}

/// A failure, shared by all who waited for the same fill.
#[derive(Clone)]
pub struct Error(Arc<Inner>);

struct Inner {
    kind: Kind,
    /// For the log, never for a client: it may name hosts, paths and headers of the store.
    detail: Cow<'static, str>,
    retry_after: Option<Duration>,
}

impl Error {
    /// An error of a kind, with a detail for the log.
    pub fn new(kind: Kind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self(Arc::new(Inner { kind, detail: detail.into(), retry_after: None }))
    }

    /// The same, with the time after which the store asked to be tried again.
    pub fn with_retry_after(kind: Kind, detail: impl Into<Cow<'static, str>>, retry_after: Option<Duration>) -> Self {
        Self(Arc::new(Inner { kind, detail: detail.into(), retry_after }))
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The detail for the log.
    pub fn detail(&self) -> &str {
        &self.0.detail
    }

    /// When the store asked to be tried again.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.kind, self.0.detail)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}
