//! The layer around services that are not of axum.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::to_bytes;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderValue, Method, Request, Response, Uri};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use lockkit::testing::MemoryStore;
use lockkit::{LeaseRequest, Leases};
use lockkit_axum::{Held, LeaseLayer};
use tokio::net::TcpListener;
use tonic::server::NamedService;
use tonic::transport::{Channel, server::TcpIncoming};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};

fn leases() -> Leases<MemoryStore> {
    Leases::builder(MemoryStore::new()).wait(Duration::ZERO).build().unwrap()
}

fn by_uri(leases: &Leases<MemoryStore>) -> impl Fn(Uri) -> LeaseRequest<MemoryStore> + use<> {
    let leases = leases.clone();
    move |uri: Uri| leases.lease(format!("rpc:{}", uri.path()))
}

fn call(content_type: &str) -> Request<Full<Bytes>> {
    let request = Request::post("/billing.Invoices/Close").header("content-type", content_type);
    request.body(Full::from("ping")).unwrap()
}

/// Answers as a service of gRPC does: a message, and the status in the trailers.
async fn grpc(
    request: Request<Full<Bytes>>,
) -> Result<Response<impl http_body::Body<Data = Bytes, Error = Infallible>>, Infallible> {
    let held = request.extensions().get::<Held<MemoryStore>>().expect("a lease").clone();
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let message = Full::<Bytes>::from(held.key().to_string());
    Ok(Response::new(message.with_trailers(async { Some(Ok(trailers)) })))
}

#[tokio::test]
async fn a_service_of_grpc_is_called_under_its_lease_and_refused_in_its_own_way() {
    let leases = leases();
    let service = ServiceBuilder::new().layer(LeaseLayer::new(by_uri(&leases))).service_fn(grpc);
    let answer = service.clone().oneshot(call("application/grpc")).await.unwrap();
    let whole = answer.into_body().collect().await.unwrap();
    assert_eq!(whole.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(whole.to_bytes(), "rpc:/billing.Invoices/Close");

    let held = leases.lease("rpc:/billing.Invoices/Close").acquire().await.unwrap();
    for (content_type, answered) in [
        ("application/grpc", "application/grpc"),
        ("application/grpc+proto", "application/grpc"),
        ("application/grpc; charset=utf-8", "application/grpc"),
        ("application/grpc-web", "application/grpc-web"),
        ("application/grpc-web+proto", "application/grpc-web+proto"),
        ("application/grpc-web-text", "application/grpc-web-text"),
        ("application/grpc-web-text+proto", "application/grpc-web-text+proto"),
    ] {
        let refused = service.clone().oneshot(call(content_type)).await.unwrap();
        assert_eq!(refused.status(), 200);
        for (name, value) in [("grpc-status", "10"), ("grpc-message", "Conflict"), ("content-type", answered)] {
            assert_eq!(refused.headers()[name], value, "{content_type}");
        }
        assert!(to_bytes(refused.into_body(), 1).await.unwrap().is_empty());
    }
    for content_type in ["application/json", "application/grpcish", "application/grpc-other"] {
        let refused = service.clone().oneshot(call(content_type)).await.unwrap();
        assert_eq!((refused.status().as_u16(), refused.headers()["retry-after"].as_bytes()), (409, &b"1"[..]));
    }
    held.release().await.unwrap();
    leases.close().await.unwrap();
    let refused = service.oneshot(call("application/grpc")).await.unwrap();
    assert_eq!(refused.headers()["grpc-status"], "14");
}

/// A service of tonic, whose status names the lease of the call.
#[derive(Clone)]
struct Invoices;

impl NamedService for Invoices {
    const NAME: &'static str = "billing.Invoices";
}

impl Service<Request<tonic::body::Body>> for Invoices {
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let held = request.extensions().get::<Held<MemoryStore>>().expect("a lease");
        ready(Ok(Status::already_exists(held.key().to_string()).into_http()))
    }
}

#[tokio::test]
async fn a_service_of_tonic_is_called_under_its_lease_and_refused_with_a_status() {
    let leases = leases();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder().layer(LeaseLayer::new(by_uri(&leases))).add_service(Invoices);
    let serving = tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let call = async || {
        let mut client = tonic::client::Grpc::new(channel.clone());
        client.ready().await.unwrap();
        let path = PathAndQuery::from_static("/billing.Invoices/Close");
        client.unary(tonic::Request::new(()), path, ProstCodec::<(), ()>::default()).await.unwrap_err()
    };
    let status = call().await;
    assert_eq!((status.code(), status.message()), (Code::AlreadyExists, "rpc:/billing.Invoices/Close"));
    let held = leases.lease("rpc:/billing.Invoices/Close").acquire().await.unwrap();
    let refused = call().await;
    assert_eq!((refused.code(), refused.message()), (Code::Aborted, "Conflict"));
    held.release().await.unwrap();
    leases.close().await.unwrap();
    assert_eq!(call().await.code(), Code::Unavailable);
    serving.abort();
}

#[tokio::test]
async fn an_error_of_the_service_is_passed_on_and_the_lease_is_released() {
    let leases = leases();
    let fails = service_fn(async |_: Request<()>| Err::<Response<Full<Bytes>>, _>("out of order"));
    let service = ServiceBuilder::new().layer(LeaseLayer::new(by_uri(&leases))).service(fails);
    for _ in 0..2 {
        assert_eq!(service.clone().oneshot(Request::new(())).await.unwrap_err(), "out of order");
    }
    assert_eq!(leases.show("rpc:/").await.unwrap(), None);
}

/// A service that must be ready when it is called, as one with a limit of its own.
#[derive(Default)]
struct Limited {
    is_ready: bool,
}

impl Clone for Limited {
    fn clone(&self) -> Self {
        Self { is_ready: false }
    }
}

impl Service<Request<()>> for Limited {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "it was called before it was ready");
        ready(Ok(Response::new(Full::default())))
    }
}

#[tokio::test]
async fn the_service_that_is_called_is_the_one_that_was_ready() {
    let by_method = {
        let leases = leases();
        move |method: Method| (method == Method::POST).then(|| leases.lease("post"))
    };
    let mut service = ServiceBuilder::new().layer(LeaseLayer::new(by_method)).service(Limited::default());
    for method in [Method::POST, Method::GET, Method::POST] {
        let mut request = Request::new(());
        *request.method_mut() = method;
        let answer = service.ready().await.unwrap().call(request).await.unwrap();
        assert_eq!(answer.status(), 200);
    }
}
