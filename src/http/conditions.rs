//! Conditions of a request (RFC 9110 section 13) and what its Cache-Control wishes for (RFC 9111 section 5.2.1).

use std::time::{Duration, SystemTime};

use headers::{CacheControl, ETag, HeaderMapExt, IfMatch, IfModifiedSince, IfNoneMatch, IfRange, IfUnmodifiedSince};
use http::HeaderMap;
use http::header::IF_RANGE;

use super::headers::{http_date, quoted};
use crate::object::Metadata;
use crate::range::RangeSpec;
use crate::reader::Wishes;

/// How long after its Last-Modified a date must have been received to be a strong validator (section 8.8.2.2).
const STRONG_DATE_AGE: Duration = Duration::from_secs(1);

/// The conditions of one request. A field that cannot be read is as good as absent.
#[derive(Debug)]
#[expect(clippy::struct_field_names, reason = "the names are those of the header fields")]
pub(super) struct Conditions {
    if_match: Option<IfMatch>,
    if_none_match: Option<IfNoneMatch>,
    if_modified_since: Option<IfModifiedSince>,
    if_unmodified_since: Option<IfUnmodifiedSince>,
    if_range: Option<Validator>,
}

/// What If-Range names.
#[derive(Debug)]
enum Validator {
    Tag(IfRange),
    Date(String),
}

/// What the conditions mean for a version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    /// The request is carried out.
    Proceed,
    /// 304.
    NotModified,
    /// 412.
    Failed,
}

impl Conditions {
    pub(super) fn read(request: &HeaderMap) -> Self {
        Self {
            if_match: request.typed_get(),
            if_none_match: request.typed_get(),
            if_modified_since: request.typed_get(),
            if_unmodified_since: request.typed_get(),
            if_range: if_range(request),
        }
    }

    /// Whether there is nothing to judge before the read is opened.
    pub(super) fn are_none(&self) -> bool {
        self.if_match.is_none()
            && self.if_none_match.is_none()
            && self.if_modified_since.is_none()
            && self.if_unmodified_since.is_none()
            && self.if_range.is_none()
    }

    /// Judges a version, in the order of section 13.2.2.
    pub(super) fn judge(&self, metadata: &Metadata) -> Verdict {
        let etag = etag(metadata);
        let holds = match (&self.if_match, &self.if_unmodified_since, metadata.modified) {
            (Some(tags), _, _) => tags.is_any() || etag.as_ref().is_some_and(|etag| tags.precondition_passes(etag)),
            (None, Some(date), Some(modified)) => date.precondition_passes(modified),
            _ => true,
        };
        if !holds {
            return Verdict::Failed;
        }
        let modified = match (&self.if_none_match, &self.if_modified_since, metadata.modified) {
            (Some(tags), _, _) => match &etag {
                Some(etag) => tags.precondition_passes(etag),
                // `*` asks whether there is any version at all, and there is.
                None => *tags != IfNoneMatch::any(),
            },
            (None, Some(date), Some(modified)) => date.is_modified(modified),
            _ => true,
        };
        if modified { Verdict::Proceed } else { Verdict::NotModified }
    }

    /// The range to serve: If-Range turns it into the whole object when the version is not the one named (13.1.5).
    ///
    /// A weak tag never matches. A date matches only if it is Last-Modified exactly, and a strong validator.
    pub(super) fn range_for(&self, spec: RangeSpec, metadata: &Metadata) -> RangeSpec {
        let matches = match &self.if_range {
            None => true,
            Some(Validator::Tag(tag)) => !tag.is_modified(etag(metadata).as_ref(), None),
            Some(Validator::Date(date)) => {
                let strong = metadata.modified.is_some_and(|modified| {
                    metadata.received_at.duration_since(modified).is_ok_and(|age| age >= STRONG_DATE_AGE)
                });
                strong && metadata.modified.and_then(http_date).is_some_and(|modified| modified == *date)
            }
        };
        if matches { spec } else { RangeSpec::Whole }
    }
}

fn if_range(request: &HeaderMap) -> Option<Validator> {
    let text = request.get(IF_RANGE)?.to_str().ok()?.trim();
    if text.starts_with('"') || text.starts_with("W/") {
        return request.typed_get().map(Validator::Tag);
    }
    // All three forms of a date are read, and compared as one.
    let date: SystemTime = httpdate::parse_http_date(text).ok()?;
    http_date(date).map(Validator::Date)
}

fn etag(metadata: &Metadata) -> Option<ETag> {
    quoted(metadata.etag.as_deref()?).parse().ok()
}

/// What the request's Cache-Control wishes for.
pub(super) fn wishes(request: &HeaderMap) -> Wishes {
    let Some(control) = request.typed_get::<CacheControl>() else { return Wishes::default() };
    Wishes {
        max_age: if control.no_cache() { Some(Duration::ZERO) } else { control.max_age() },
        no_store: control.no_store(),
        only_if_cached: control.only_if_cached(),
    }
}
