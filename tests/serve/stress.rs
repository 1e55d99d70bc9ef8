//! Sends random requests, valid and invalid, from clients that go away at random, and checks that nothing is left behind.
//!
//! `COLIBRI_STRESS=N` sends N requests instead of [`REQUESTS`]. `COLIBRI_SOAK=SECONDS` goes on for so long, with pauses, and checks that
//! memory and descriptors stay as they are: `COLIBRI_SOAK=3600 cargo test --test serve soak -- --nocapture`.

use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{connect, exchange, post, read};
use crate::drawn::{Drawn, Endpoint, endpoints, names};
use crate::rng::Rng;
use crate::server::Server;

const REQUESTS: usize = 250;
const CLIENTS: u64 = 6;

fn number(variable: &str) -> Option<usize> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().expect("a number"))
}

/// A server whose sequences are swapped now and then.
fn start() -> Server {
    Server::start(&[
        "--parallel",
        "3",
        "--context",
        "700",
        "--queue",
        "100000",
        "--cache-slots",
        "4",
        "--max-stall",
        "20",
    ])
}

/// Requests whose answers are known.
struct Known(Vec<(Vec<u8>, String)>);

impl Known {
    fn of(server: &Server) -> Known {
        let request = |i: usize| {
            let body = json!({
                "prompt": "She was not at all surprised. ".repeat(1 + 3 * i),
                "max_tokens": 12 + i,
                "temperature": 1,
                "seed": i,
            });
            post("/v1/completions", body.to_string().as_bytes())
        };
        let requests = (0..6).map(request);
        let answers = requests.map(|request| {
            let text = text(server, &request);
            (request, text)
        });
        Known(answers.collect())
    }

    fn check(&self, server: &Server, which: usize) {
        let (request, expected) = &self.0[which % self.0.len()];
        assert_eq!(&text(server, request), expected);
    }
}

fn text(server: &Server, request: &[u8]) -> String {
    let reply = exchange(&server.address, request).unwrap();
    assert_eq!(reply.status, 200, "{}", reply.body);
    let answer: Value = serde_json::from_str(&reply.body).unwrap();
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Sends a request; the client may go away. An answer must be the one that the fields deserve.
fn send(server: &Server, drawn: &Drawn, rng: &mut Rng) {
    let body = drawn.body.to_string();
    let request = post(drawn.path, body.as_bytes());
    let mut stream = connect(&server.address);
    match rng.below(12) {
        0 => return,
        1 => {
            let part = rng.below(request.len());
            let _ = stream.write_all(&request[..part]);
            return;
        }
        2 => {
            let _ = stream.write_all(&request);
            return;
        }
        3 => {
            let _ = stream.write_all(&request);
            let mut some = vec![0; 1 + rng.below(3000)];
            let _ = stream.read(&mut some);
            return;
        }
        4 => {
            // An answer may come or not: only that it ends counts.
            let _ = stream.write_all(&request);
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
            return;
        }
        5 => {
            let (first, second) = request.split_at(rng.below(request.len()));
            stream.write_all(first).unwrap();
            thread::sleep(Duration::from_millis(rng.below(20) as u64));
            stream.write_all(second).unwrap();
        }
        _ => stream.write_all(&request).unwrap(),
    }
    let reply = read(&mut stream).unwrap_or_else(|error| panic!("{error}: {body}"));
    check(drawn, reply.status, &reply.body, &body);
}

fn check(drawn: &Drawn, status: u16, answer: &str, body: &str) {
    if drawn.wrong.is_empty() {
        assert_eq!(status, 200, "{body}: {answer}");
        let streamed = answer.starts_with("data: ")
            || answer.starts_with("event: ")
            || answer.starts_with(':');
        if streamed {
            assert!(!answer.contains("\"error\""), "{body}: {answer}");
            let ends =
                answer.ends_with("data: [DONE]\n\n") || answer.contains("event: message_stop");
            assert!(ends, "{body}: {answer}");
        } else {
            serde_json::from_str::<Value>(answer).unwrap();
        }
        return;
    }
    assert_eq!(status, 400, "{body}: {answer}");
    let error: Value = serde_json::from_str(answer).unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    let named = drawn.wrong.iter().any(|name| names(message, name));
    assert!(named, "{body}: {message}");
}

fn drawn(endpoints: &[Endpoint], rng: &mut Rng) -> Drawn {
    let endpoint = &endpoints[rng.below(endpoints.len())];
    // Half of the requests are right.
    let wrong = rng.pick(&[usize::MAX, 8]);
    endpoint.draw(rng, wrong)
}

/// Waits until nothing runs or waits, and checks that all pages are free.
fn check_idle(server: &Server) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let busy = || {
        server.metric("colibri_requests_running") + server.metric("colibri_requests_waiting") > 0.0
    };
    while busy() {
        assert!(
            Instant::now() < deadline,
            "requests of clients that are gone go on"
        );
        thread::sleep(Duration::from_millis(20));
    }
    let pages = server.metric("colibri_kv_pages");
    assert!(pages > 0.0);
    assert_eq!(server.metric("colibri_kv_pages_free"), pages);
    assert_eq!(server.metric("colibri_requests_swapped"), 0.0);
}

/// Runs clients, each until `goes_on` says no before one of its requests.
fn run(server: &Server, known: &Known, seed: u64, goes_on: impl Fn(&mut Rng) -> bool + Sync) {
    let endpoints = endpoints();
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (endpoints, goes_on) = (&endpoints, &goes_on);
            scope.spawn(move || {
                let mut rng = Rng(seed * 1000 + client + 1);
                while goes_on(&mut rng) {
                    match rng.one_in(5) {
                        true => known.check(server, rng.below(64)),
                        false => send(server, &drawn(endpoints, &mut rng), &mut rng),
                    }
                }
            });
        }
    });
}

#[test]
fn random_requests_leave_nothing_behind() {
    let n = number("COLIBRI_STRESS").unwrap_or(REQUESTS);
    let server = start();
    let known = Known::of(&server);
    let next = AtomicUsize::new(0);
    run(&server, &known, 1, |_| {
        next.fetch_add(1, Ordering::Relaxed) < n
    });
    check_idle(&server);
    (0..6).for_each(|which| known.check(&server, which));
    let (_, metrics) = server.get("/metrics");
    assert!(!metrics.contains("outcome=\"failed\""), "{metrics}");
}

/// Resident bytes and descriptors of the server.
fn resources(server: &Server) -> (u64, usize) {
    let process = format!("/proc/{}", server.child.id());
    let status = fs::read_to_string(format!("{process}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = resident.unwrap().trim().trim_end_matches(" kB");
    let descriptors = fs::read_dir(format!("{process}/fd")).unwrap().count();
    (kib.parse::<u64>().unwrap() << 10, descriptors)
}

#[test]
fn soak() {
    let Some(seconds) = number("COLIBRI_SOAK") else {
        return;
    };
    let end = Instant::now() + Duration::from_secs(seconds as u64);
    let server = start();
    let known = Known::of(&server);
    // Every tenth of the time, all clients pause: then descriptors are those of an idle server.
    let mut samples = Vec::new();
    for round in 1..=10 {
        let left = end.saturating_duration_since(Instant::now());
        let until = Instant::now() + left / (11 - round);
        run(&server, &known, u64::from(round) + 1, |rng| {
            thread::sleep(Duration::from_millis(rng.below(400) as u64));
            Instant::now() < until
        });
        check_idle(&server);
        // The connection of the last look at the metrics ends.
        thread::sleep(Duration::from_millis(500));
        let (resident, descriptors) = resources(&server);
        let requests = server.get("/metrics").1;
        let requests: f64 = requests
            .lines()
            .filter(|line| line.starts_with("colibri_requests_total{"))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum();
        println!(
            "{:5} s: {requests} requests, {:.1} MiB resident, {descriptors} descriptors",
            seconds as u64 - end.saturating_duration_since(Instant::now()).as_secs(),
            resident as f64 / f64::from(1 << 20)
        );
        samples.push((resident, descriptors));
    }
    let (first, last) = (samples[1], samples[9]);
    assert!(last.0 < first.0 + (8 << 20), "memory grows: {samples:?}");
    assert_eq!(last.1, first.1, "descriptors are lost: {samples:?}");
}
