//! Accepts connections, bounds how long their clients may be silent, and waits for them at the end.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tower_http::timeout::RequestBodyTimeoutLayer;

/// Connections at once; others wait to be accepted.
const CONNECTIONS: usize = 1024;
/// Time for the head of a request, also of the next one on a connection.
const HEAD: Duration = Duration::from_secs(30);
/// Time between two pieces of a request's body.
const BODY: Duration = Duration::from_secs(30);
/// Time until a client that does not take its answer loses its connection.
const UNREAD: Duration = Duration::from_secs(30);
/// Bytes of a head at most, and of what is read at once.
const BUFFER: usize = 64 << 10;

/// Serves `router` on `listener` until `end` becomes true, and then waits until the running requests are answered.
pub async fn serve(listener: TcpListener, router: Router, mut end: watch::Receiver<bool>) {
    let router = router.layer(RequestBodyTimeoutLayer::new(BODY));
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    let graceful = GracefulShutdown::new();
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(BUFFER);
    loop {
        let accepted = tokio::select! {
            _ = end.wait_for(|end| *end) => break,
            accepted = accept(&listener, &permits) => accepted,
        };
        let (stream, permit) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, for example: some will be free again.
                tracing::warn!("a connection cannot be accepted: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let unread = u32::try_from(UNREAD.as_millis()).unwrap_or(u32::MAX);
        let _ = sockopt::set_tcp_user_timeout(&stream, unread);
        let service = TowerToHyperService::new(router.clone());
        let connection = http.serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!("a connection ends: {error}");
            }
            drop(permit);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> std::io::Result<(
    tokio::net::TcpStream,
    Option<tokio::sync::OwnedSemaphorePermit>,
)> {
    let permit = Arc::clone(permits).acquire_owned().await.ok();
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}
