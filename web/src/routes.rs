//! The routes, and what they answer.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension, Json, Router,
    extract::{FromRequest, OriginalUri, Query, Request, State},
    http::{StatusCode, header},
    middleware::from_fn_with_state,
    response::{
        Html, IntoResponse, Response,
        sse::{Event, Sse},
    },
    routing::{get, post},
};
use futures_util::stream::{self, Stream};
use lockkit::{Fence, LeaseStore};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout_at};

use crate::{
    access::{Access, Gate, guard},
    looks::Looks,
    origin, page,
};

/// Pause between two events.
const PAUSE: Duration = Duration::from_secs(1);

/// How long one connection gets events, so that access is checked again.
const CONNECTED: Duration = Duration::from_secs(10);

/// Pause before the page connects again.
const RETRY: Duration = Duration::from_millis(100);

pub(crate) fn router<S: LeaseStore, T: Clone + Send + Sync + 'static>(looks: Arc<Looks<S>>, gate: Gate) -> Router<T> {
    let file = |kind: &'static str, text: &'static str| get(async move || ([(header::CONTENT_TYPE, kind)], text));
    Router::new()
        .route("/", get(page))
        .route("/inspector.css", file("text/css; charset=utf-8", page::STYLE))
        .route("/inspector.js", file("text/javascript; charset=utf-8", page::SCRIPT))
        .route("/leases.json", get(leases))
        .route("/events", get(events))
        .route("/steal", post(steal))
        .layer(from_fn_with_state(gate, guard))
        .with_state(looks)
}

/// What a viewer wants to see.
#[derive(Debug, Deserialize)]
struct Wanted {
    #[serde(default)]
    contains: String,
}

async fn page<S: LeaseStore>(
    State(looks): State<Arc<Looks<S>>>,
    Extension(access): Extension<Access>,
    OriginalUri(uri): OriginalUri,
    Query(Wanted { contains }): Query<Wanted>,
) -> Response {
    let view = looks.view(&contains).await;
    let status = if view.is_ok() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Html(page::html(&view, &contains, matches!(access, Access::Steal { .. }), uri.path()))).into_response()
}

async fn leases<S: LeaseStore>(
    State(looks): State<Arc<Looks<S>>>,
    Query(Wanted { contains }): Query<Wanted>,
) -> Response {
    match looks.view(&contains).await {
        Ok(view) => Json(view).into_response(),
        Err(problem) => refused(StatusCode::SERVICE_UNAVAILABLE, problem),
    }
}

async fn events<S: LeaseStore>(
    State(looks): State<Arc<Looks<S>>>,
    Query(Wanted { contains }): Query<Wanted>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let mut ticks = interval(PAUSE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let until = Instant::now() + CONNECTED;
    Sse::new(stream::unfold((looks, contains, ticks, until), async |(looks, contains, mut ticks, until)| {
        timeout_at(until, ticks.tick()).await.ok()?;
        let event = Event::default().retry(RETRY);
        let event = match timeout_at(until, looks.view(&contains)).await.ok()? {
            Ok(view) => event.event("leases").json_data(view),
            Err(problem) => event.event("problem").json_data(problem),
        };
        let event = event.unwrap_or_else(|err| Event::default().comment(err.to_string()));
        Some((Ok(event), (looks, contains, ticks, until)))
    }))
}

#[derive(Debug, Deserialize)]
struct Steal {
    key: String,
    /// As text, as the page has it.
    fence: String,
}

/// The holder from whom the lease was taken.
#[derive(Debug, Serialize)]
struct Stolen {
    holder: String,
}

async fn steal<S: LeaseStore>(
    State(looks): State<Arc<Looks<S>>>,
    Extension(access): Extension<Access>,
    request: Request,
) -> Response {
    let Access::Steal { by } = access else {
        return refused(StatusCode::FORBIDDEN, "You may look at the leases, and not steal them.");
    };
    if !origin::is_same(request.headers()) {
        return refused(StatusCode::FORBIDDEN, "This request does not come from the page.");
    }
    let Steal { key, fence } = match Json::from_request(request, &()).await {
        Ok(Json(asked)) => asked,
        Err(err) => return refused(err.status(), err.body_text()),
    };
    let Ok(number) = fence.parse::<u64>() else {
        return refused(StatusCode::BAD_REQUEST, "The fence is not a number.");
    };
    match looks.steal(&key, Fence::from(number)).await {
        Ok(Some(lease)) => {
            tracing::warn!(target: "lockkit", by, %key, fence, holder = lease.holder, "stolen");
            Json(Stolen { holder: lease.holder }).into_response()
        }
        Ok(None) => refused(StatusCode::CONFLICT, "That holder does not have the lease any more. Nothing was changed."),
        Err(err) if err.is_contended() => {
            refused(StatusCode::CONFLICT, "A transaction of the holder keeps the lease until it ends. Try again.")
        }
        Err(err @ lockkit::Error::InvalidKey { .. }) => refused(StatusCode::BAD_REQUEST, err.to_string()),
        Err(err) => refused(StatusCode::SERVICE_UNAVAILABLE, err.to_string()),
    }
}

fn refused(status: StatusCode, why: impl Into<String>) -> Response {
    #[derive(Serialize)]
    struct Refused {
        error: String,
    }
    (status, Json(Refused { error: why.into() })).into_response()
}
