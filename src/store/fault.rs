//! What an error of `object_store` means for a read.

use std::error::Error as StdError;
use std::io;

use object_store::client::{HttpError, HttpErrorKind};

use super::connector::Refusal;
use crate::error::{Error, Kind};

/// The detail of [`Kind::Changed`] when a conditional HEAD found the known version to be current.
const NOT_MODIFIED: &str = "not modified";

pub(super) fn classify(error: &object_store::Error) -> Error {
    use object_store::Error as E;
    match error {
        E::NotFound { .. } | E::InvalidPath { .. } => Error::new(Kind::NotFound, error.to_string()),
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Error::new(Kind::Forbidden, error.to_string()),
        E::Precondition { .. } | E::AlreadyExists { .. } => Error::new(Kind::Changed, error.to_string()),
        E::NotModified { .. } => Error::new(Kind::Changed, NOT_MODIFIED),
        _ => by_cause(error),
    }
}

/// What an error in the middle of a body means: the body is shorter than its head announced.
pub(super) fn of_body(error: &object_store::Error) -> Error {
    match classify(error) {
        error if error.kind() == Kind::Unavailable => Error::new(Kind::Protocol, error.detail().to_owned()),
        error => error,
    }
}

pub(super) fn is_not_modified(error: &Error) -> bool {
    error.kind() == Kind::Changed && error.detail() == NOT_MODIFIED
}

/// The error's label in metrics.
pub(super) fn label(error: &Error) -> &'static str {
    match error.kind() {
        Kind::NotFound => "not_found",
        Kind::Forbidden => "forbidden",
        Kind::Changed if is_not_modified(error) => "not_modified",
        Kind::Changed => "changed",
        Kind::RangeRefused => "range_refused",
        Kind::Protocol => "protocol",
        Kind::Unavailable => "unavailable",
        Kind::TimedOut => "timed_out",
        Kind::Overloaded(_) => "overloaded",
        Kind::NotCached => "not_cached",
        Kind::Abandoned => "abandoned",
        Kind::Internal => "internal",
    }
}

/// Whether the store is to blame, rather than the question.
pub(super) fn is_fault(error: &Error) -> bool {
    matches!(error.kind(), Kind::Protocol | Kind::Unavailable | Kind::TimedOut | Kind::Internal)
}

/// Looks for the deepest cause that says something: a refusal, a transport failure, an error of the file system.
fn by_cause(error: &object_store::Error) -> Error {
    let detail = error.to_string();
    let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(at) = cause {
        if let Some(refusal) = at.downcast_ref::<Refusal>() {
            return Error::with_retry_after(refusal.kind(), detail, refusal.retry_after);
        }
        if let Some(io) = at.downcast_ref::<io::Error>() {
            return Error::new(of_io(io.kind()), detail);
        }
        if let Some(http) = at.downcast_ref::<HttpError>() {
            // A refusal stands behind the transport error that carries it.
            if http.source().is_none_or(|source| !source.is::<Refusal>()) {
                return Error::new(of_transport(http.kind()), detail);
            }
        }
        cause = at.source();
    }
    // What is left has no type to tell it by: what a local store refuses, and answers that object_store could not read.
    let says = |text: &[&str]| text.iter().any(|text| detail.contains(text));
    let kind = if says(&["Wanted range starting at", "Requested range was invalid"]) {
        Kind::RangeRefused
    } else if says(&["Filenames containing trailing"]) {
        Kind::NotFound
    } else {
        Kind::Protocol
    };
    Error::new(kind, detail)
}

fn of_transport(kind: HttpErrorKind) -> Kind {
    match kind {
        HttpErrorKind::Timeout => Kind::TimedOut,
        HttpErrorKind::Connect | HttpErrorKind::Request | HttpErrorKind::Interrupted => Kind::Unavailable,
        // It answered, but not in HTTP.
        _ => Kind::Protocol,
    }
}

fn of_io(kind: io::ErrorKind) -> Kind {
    match kind {
        io::ErrorKind::NotFound
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::InvalidInput => Kind::NotFound,
        io::ErrorKind::PermissionDenied => Kind::Forbidden,
        io::ErrorKind::TimedOut => Kind::TimedOut,
        _ => Kind::Unavailable,
    }
}
