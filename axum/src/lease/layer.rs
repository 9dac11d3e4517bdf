//! The layer, and the service that it makes.

use std::{
    fmt,
    future::Future,
    marker::PhantomData,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum_core::{
    BoxError,
    body::Body,
    extract::FromRequestParts,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::Request;
use tower_layer::Layer;
use tower_service::Service;

use super::{grpc, held::Held, wanted::IntoLease};
use crate::error::LockError;

/// Takes a lease around the handling of each request.
///
/// The function gets an extractor of the request (or a tuple of several, or a [`Parts`](http::request::Parts)) and
/// returns the lease that the request needs, with its options: a [`LeaseRequest`](lockkit::LeaseRequest) of
/// [`Leases::lease`](lockkit::Leases::lease), [`semaphore`](lockkit::Leases::semaphore) or
/// [`rw`](lockkit::Leases::rw). It may also return an `Option` or a `Result` of it, see [`IntoLease`].
///
/// - A request waits for its lease for 10 s, unless the [`Leases`](lockkit::Leases) or the function set another
///   [`wait`](lockkit::LeaseRequest::wait), and is then answered with 409 and `Retry-After`. Set less than the timeout
///   of your clients.
/// - The lease is renewed while the handler runs. If it is lost, the handler is dropped at its next await point, and
///   the answer is 503, without `Retry-After`: a part of the work may be done, or all of it. The handler gets the
///   lease by the extractor [`Held`]. A commit of lockkit that is on its way is waited for first, for 30 s at most;
///   without its answer, the outcome is unknown, and the answer is 500.
/// - A handler whose client disconnects is dropped, too. In both cases, the lease is released in the background.
/// - Refusals are those of [`LockError`], and of the extractor, as answers. A request whose `content-type` is that of
///   gRPC or gRPC-Web is refused with the matching `grpc-status`, such as `ABORTED` for 409 and `UNAVAILABLE` for 503.
///
/// **The lease covers the handler, and not the body of its answer.** It is released when the handler has returned its
/// answer, whose body is sent after that. A body that is a stream, and does its work while it is being sent, does that
/// without the lease: finish the work in the handler, or acquire the lease there and move it into the stream. The same
/// holds for a connection that is upgraded: a handler of a WebSocket returns 101 at once, and what runs on the
/// connection after that has no lease.
///
/// Nor does the lease cover tasks that the handler spawns. They go on when the handler has returned, and when it is
/// dropped because the lease is lost or the client disconnects. Await them in the handler, in a `JoinSet`, which stops
/// them when the handler is dropped.
///
/// The body of the *request* is read by the handler, so under the lease. A client that sends slowly keeps the lease:
/// put a timeout below this layer.
///
/// # Where it can be used
/// With `Router::route_layer`, `Router::layer`, `MethodRouter::layer`, `tower::ServiceBuilder`, and in tonic's
/// `Server::layer`: around any service of HTTP requests that is `Clone`, whatever the types of its bodies. The answer's
/// body is that of axum. Extractors of path parameters need `route_layer`, because the path is not matched yet in a
/// layer around the whole router. An extractor gets no state of the router: capture what the function needs.
///
/// # Example
/// ```
/// use std::time::Duration;
///
/// use axum::{Router, extract::Path, http::{HeaderMap, StatusCode}, routing::post};
/// use lockkit::Leases;
/// use lockkit_axum::LeaseLayer;
///
/// # use sqlx::SqlitePool;
/// # async fn rebuild() {}
/// # async fn import() {}
/// fn app(leases: Leases<SqlitePool>) -> Router {
///     let by_path = {
///         let leases = leases.clone();
///         LeaseLayer::new(move |Path(id): Path<u64>| {
///             leases.lease(format!("report:{id}")).wait(Duration::from_secs(2)).ttl(Duration::from_secs(10))
///         })
///     };
///     let by_header = LeaseLayer::new(move |headers: HeaderMap| {
///         let tenant = headers.get("x-tenant").and_then(|it| it.to_str().ok()).ok_or(StatusCode::BAD_REQUEST)?;
///         Ok::<_, StatusCode>(leases.semaphore(format!("import:{tenant}"), 2)) // two at a time
///     });
///     Router::new()
///         .route("/reports/{id}/rebuild", post(rebuild).layer(by_path))
///         .route("/imports", post(import).layer(by_header))
/// }
/// ```
pub struct LeaseLayer<F, T> {
    wanted: Arc<F>,
    extracts: PhantomData<fn(T)>,
}

impl<F, T, L> LeaseLayer<F, T>
where
    F: Fn(T) -> L,
    T: FromRequestParts<()>,
    L: IntoLease,
{
    /// A layer that takes the lease that this function returns for a request.
    pub fn new(wanted: F) -> Self {
        Self { wanted: Arc::new(wanted), extracts: PhantomData }
    }
}

impl<F, T> Clone for LeaseLayer<F, T> {
    fn clone(&self) -> Self {
        Self { wanted: self.wanted.clone(), extracts: PhantomData }
    }
}

impl<F, T> fmt::Debug for LeaseLayer<F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseLayer").finish_non_exhaustive()
    }
}

impl<I, F, T> Layer<I> for LeaseLayer<F, T> {
    type Service = LeaseService<I, F, T>;

    fn layer(&self, inner: I) -> Self::Service {
        LeaseService { inner, layer: self.clone() }
    }
}

/// The service around which a [`LeaseLayer`] takes leases.
pub struct LeaseService<I, F, T> {
    inner: I,
    layer: LeaseLayer<F, T>,
}

impl<I: Clone, F, T> Clone for LeaseService<I, F, T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: self.layer.clone() }
    }
}

impl<I: fmt::Debug, F, T> fmt::Debug for LeaseService<I, F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<I, F, T, L, ReqBody, ResBody> Service<Request<ReqBody>> for LeaseService<I, F, T>
where
    I: Service<Request<ReqBody>, Response = http::Response<ResBody>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send,
    F: Fn(T) -> L + Send + Sync + 'static,
    T: FromRequestParts<()> + 'static,
    L: IntoLease,
    ReqBody: Send + 'static,
    ResBody: http_body::Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    type Response = Response;
    type Error = I::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response, I::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        // The service that was ready is called; its clone may not be.
        let next = self.inner.clone();
        let inner = mem::replace(&mut self.inner, next);
        let wanted = self.layer.wanted.clone();
        Box::pin(async move {
            let of_grpc = grpc::answered_as(request.headers());
            match handle(inner, &*wanted, request).await {
                Ok(answer) => Ok(answer.map(Body::new)),
                Err(Ended::Failed(err)) => Err(err),
                Err(Ended::Refused(refusal)) => Ok(match of_grpc {
                    Some(content_type) => grpc::trailers_only(&refusal, content_type),
                    None => *refusal,
                }),
            }
        })
    }
}

/// Why the service has not answered.
enum Ended<E> {
    Refused(Box<Response>),
    Failed(E),
}

impl<E> From<lockkit::Error> for Ended<E> {
    fn from(err: lockkit::Error) -> Self {
        Self::Refused(Box::new(LockError(err).into_response()))
    }
}

/// Calls the service under the lease that the request needs.
async fn handle<I, F, T, L, ReqBody, Answer>(
    mut inner: I,
    wanted: &F,
    request: Request<ReqBody>,
) -> Result<Answer, Ended<I::Error>>
where
    I: Service<Request<ReqBody>, Response = Answer>,
    F: Fn(T) -> L,
    T: FromRequestParts<()>,
    L: IntoLease,
{
    let (mut parts, body) = request.into_parts();
    let refused = |answer: Response| Ended::Refused(Box::new(answer));
    let extracted = T::from_request_parts(&mut parts, &()).await.map_err(|it| refused(it.into_response()))?;
    let Some(lease) = wanted(extracted).into_lease().map_err(refused)? else {
        return inner.call(Request::from_parts(parts, body)).await.map_err(Ended::Failed);
    };
    let handled = lease.run(|lease| {
        parts.extensions.insert(Held(lease));
        let answering = inner.call(Request::from_parts(parts, body));
        async move { answering.await.map_err(Ended::Failed) }
    });
    handled.await
}
