//! Clients that mean harm or are broken: each gets its status or loses its connection in time, and the next client is served.

use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{connect, exchange, post, read};
use crate::drawn::{endpoints, names};
use crate::server::Server;

const PATHS: [&str; 3] = ["/v1/completions", "/v1/chat/completions", "/v1/messages"];

/// The next client is served.
fn check_served(server: &Server) {
    let request = json!({"prompt": "a", "max_tokens": 1});
    let answer = server.json("/v1/completions", &request);
    assert_eq!(answer["usage"]["completion_tokens"], 1);
}

#[test]
fn every_field_takes_what_is_right_and_refuses_the_rest() {
    let server = Server::start(&["--context", "700"]);
    for endpoint in endpoints() {
        for field in &endpoint.fields {
            for (value, right) in (field.right.iter().map(|value| (value, true)))
                .chain(field.wrong.iter().map(|value| (value, false)))
            {
                let mut body = endpoint.least();
                body[field.name] = value.clone();
                let (status, text) = server.post(endpoint.path, body.to_string());
                if right {
                    assert_eq!(status, 200, "{body}: {text}");
                    continue;
                }
                assert_eq!(status, 400, "{body}: {text}");
                let error: Value = serde_json::from_str(&text).unwrap();
                let message = error["error"]["message"].as_str().unwrap();
                assert!(names(message, field.name), "{body}: {message}");
            }
        }
    }
    check_served(&server);
}

#[test]
fn bodies_that_are_no_request_get_400() {
    let server = Server::start(&[]);
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let bodies: [Vec<u8>; 12] = [
        b"".into(),
        b"\0\0\0\0".into(),
        b"GET / HTTP/1.1\r\n\r\n".into(),
        b"null".into(),
        b"{\"prompt\": \"a\"".into(),
        b"{\"prompt\": \"a\"}}".into(),
        b"\xef\xbb\xbf{\"prompt\": \"a\"}".into(),
        b"{\"prompt\": \"\xff\xfe\"}".into(),
        b"{\"prompt\": \"\\ud800\"}".into(),
        b"{'prompt': 'a'}".into(),
        format!("{{\"user\": {}}}", nested(1000)).into(),
        "{\"user\": ".repeat(200_000).into(),
    ];
    for path in PATHS {
        for body in &bodies {
            let reply = exchange(&server.address, &post(path, body)).unwrap();
            assert_eq!(reply.status, 400, "{path} {body:?}: {}", reply.body);
            assert!(reply.body.contains("\"error\""), "{}", reply.body);
        }
    }
    // What is ignored may be nested as deeply as JSON is read.
    let body = format!(
        "{{\"prompt\": \"a\", \"max_tokens\": 1, \"user\": {}}}",
        nested(100)
    );
    assert_eq!(server.post("/v1/completions", body).0, 200);
    check_served(&server);
}

#[test]
fn schemas_and_tools_cannot_exhaust_the_server() {
    let server = Server::start(&[]);
    let mut deep = json!({"type": "string"});
    for _ in 0..50 {
        deep = json!({"type": "object", "properties": {"a": deep}, "required": ["a"]});
    }
    let many: Vec<String> = (0..50_000).map(|i| format!("value {i}")).collect();
    let schemas = [
        deep,
        json!({"enum": many}),
        json!({"type": "string", "pattern": "(a{1000}){1000}"}),
        json!({"type": "string", "pattern": "("}),
        json!({"type": "array", "minItems": 1_000_000_000u64}),
        json!({"$ref": "#"}),
        json!({"$ref": "https://example.org/schema"}),
        json!({"allOf": vec![json!({"type": "object"}); 2000]}),
        json!(5),
    ];
    for schema in schemas {
        for path in &PATHS[..2] {
            let format =
                json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
            let body = json!({
                "prompt": "a",
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 4,
                "response_format": format,
            });
            let body = body.to_string();
            let (status, text) = server.post(path, &body);
            let start = &body[..body.len().min(200)];
            assert!([200, 400].contains(&status), "{start}: {status} {text}");
        }
    }
    check_served(&server);
}

/// The most memory that the server has had, in MiB.
fn peak(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<u64>().unwrap() >> 10
}

#[test]
fn large_bodies_do_not_exhaust_memory() {
    let server = Server::start(&["--queue", "2"]);
    let text = format!("{{\"prompt\": \"{}\"}}", "hello, ".repeat(2 << 20));
    let chat = format!(
        "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{}\"}}]}}",
        "hello, ".repeat(2 << 20)
    );
    let bodies = [
        (PATHS[0], text),
        (PATHS[1], chat),
        (
            PATHS[0],
            format!("{{\"prompt\": [5{}]}}", ",5".repeat(7 << 20)),
        ),
        (
            PATHS[1],
            format!("{{\"user\": [[]{}]}}", ",[]".repeat(5 << 20)),
        ),
        (
            PATHS[2],
            format!("{{\"a\": {{\"0\": 0{}}}}}", ",\"\":0".repeat(3 << 20)),
        ),
        (
            PATHS[0],
            format!(
                "{{\"prompt\": [\"a\"{}], \"max_tokens\": 1}}",
                ",\"a\"".repeat(200_000)
            ),
        ),
    ];
    thread::scope(|scope| {
        for (path, body) in bodies.iter().chain(&bodies) {
            let server = &server;
            scope.spawn(move || {
                let reply = exchange(&server.address, &post(path, body.as_bytes())).unwrap();
                let refused = [400, 413, 429].contains(&reply.status);
                assert!(refused, "{}: {}", reply.status, reply.body);
            });
        }
    });
    assert!(peak(&server) < 600, "{} MiB", peak(&server));
    // Refused before they are sent.
    for length in ["16777217", "9223372036854775807", "18446744073709551615"] {
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n",
            PATHS[0]
        );
        let reply = exchange(&server.address, head.as_bytes()).unwrap();
        assert!(
            [400, 413, 431].contains(&reply.status),
            "{length}: {}",
            reply.status
        );
    }
    // Without a length, in chunks.
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n",
        PATHS[0]
    );
    let chunk = [b"100000\r\n", &*vec![b' '; 1 << 20], b"\r\n"].concat();
    let reply = exchange(
        &server.address,
        &[head.as_bytes(), &chunk.repeat(17)].concat(),
    );
    assert_eq!(reply.unwrap().status, 413);
    let broken = [head.as_bytes(), b"xyz\r\n"].concat();
    assert_eq!(exchange(&server.address, &broken).unwrap().status, 400);
    check_served(&server);
}

#[test]
fn heads_are_bounded() {
    let server = Server::start(&[]);
    let long = "a".repeat(1 << 20);
    let many: String = (0..500).map(|i| format!("x-{i}: a\r\n")).collect();
    for request in [
        format!("GET /{long} HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        format!("GET /health HTTP/1.1\r\nhost: localhost\r\nx: {long}\r\n\r\n"),
        format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{many}\r\n"),
        "\r\n\r\nnonsense\r\n\r\n".to_owned(),
        "GET /health HTTP/9.9\r\n\r\n".to_owned(),
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n".to_owned(),
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!".to_owned(),
    ] {
        // An answer that is an error, or none where the connection ends before the request is read.
        if let Ok(reply) = exchange(&server.address, request.as_bytes()) {
            assert!((400..500).contains(&reply.status), "{}: {}", &request[..40], reply.status);
        }
    }
    check_served(&server);
}

#[test]
fn other_sites_are_refused() {
    let server = Server::start(&[]);
    let status = |request: &str| {
        let request = format!("{request}connection: close\r\n\r\n");
        exchange(&server.address, request.as_bytes())
            .unwrap()
            .status
    };
    let own = "host: localhost\r\n";
    for (head, expected) in [
        (format!("GET /v1/models HTTP/1.1\r\n{own}"), 200),
        (
            format!("GET /v1/models HTTP/1.1\r\n{own}host: evil.example\r\n"),
            403,
        ),
        (
            format!("GET /v1/models HTTP/1.1\r\nhost: evil.example\r\n{own}"),
            403,
        ),
        (
            format!("GET /v1/models HTTP/1.1\r\n{own}origin: null\r\n"),
            403,
        ),
        (
            format!(
                "GET /v1/models HTTP/1.1\r\n{own}origin: http://localhost\r\norigin: https://evil.example\r\n"
            ),
            403,
        ),
        (
            format!("GET /v1/models HTTP/1.1\r\n{own}origin: http://localhost.evil.example\r\n"),
            403,
        ),
        (
            format!("GET /v1/models HTTP/1.1\r\n{own}origin: http://localhost@evil.example\r\n"),
            403,
        ),
        ("GET /v1/models HTTP/1.1\r\nhost: \x7f\r\n".to_owned(), 403),
        (
            format!("GET / HTTP/1.1\r\n{own}origin: https://evil.example\r\n"),
            403,
        ),
        (
            format!(
                "OPTIONS /v1/completions HTTP/1.1\r\n{own}origin: https://evil.example\r\naccess-control-request-method: POST\r\n"
            ),
            403,
        ),
    ] {
        let found = status(&head);
        // An invalid head may be refused as such.
        assert!(
            found == expected || (found == 400 && expected == 403),
            "{head}: {found}"
        );
    }
    let reply = exchange(
        &server.address,
        format!("OPTIONS /v1/completions HTTP/1.1\r\n{own}connection: close\r\norigin: http://localhost\r\n\r\n").as_bytes(),
    );
    let reply = reply.unwrap();
    assert_eq!(reply.status, 405);
    assert!(!reply.head.to_lowercase().contains("access-control"));
}

/// Reads until the server ends the connection; panics if it does not.
fn wait_for_end(stream: &mut TcpStream, deadline: Instant) {
    let mut some = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).unwrap();
        match stream.read(&mut some) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("the connection goes on: {error}"),
        }
    }
}

/// Takes half a minute, in which little is computed.
#[test]
fn clients_that_do_nothing_lose_their_connection() {
    let server = Server::start(&["--parallel", "2"]);
    let open = |bytes: &[u8]| {
        let mut stream = connect(&server.address);
        stream.write_all(bytes).unwrap();
        stream
    };
    // Takes nothing of an answer that is longer than what connections hold.
    let body = json!({
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 900, "n": 6, "logprobs": true, "top_logprobs": 20, "stream": true, "temperature": 1,
        "logit_bias": {"0": -100},
    });
    let unread = open(&post(PATHS[1], body.to_string().as_bytes()));
    let mut silent: Vec<TcpStream> = (0..200).map(|_| open(b"")).collect();
    silent.extend((0..20).map(|_| open(b"POST /v1/completions HTTP/1.1\r\nhost: loc")));
    silent.extend((0..20).map(|_| open(&post(PATHS[0], &[b' '; 5000])[..3000])));
    // An answer, and then nothing.
    silent.extend((0..5).map(|_| open(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")));
    // A head that comes too slowly.
    let mut slow = open(b"POST /v1/completions HTTP/1.1\r\n");
    let end = Instant::now() + Duration::from_secs(50);
    let slowly = thread::spawn(move || {
        while Instant::now() < end && slow.write_all(b"x: y\r\n").is_ok() {
            thread::sleep(Duration::from_secs(2));
        }
        Instant::now() < end
    });
    check_served(&server);
    for mut stream in silent {
        wait_for_end(&mut stream, end);
    }
    assert!(slowly.join().unwrap(), "the slow head is read");
    let cancelled = r#"colibri_requests_total{endpoint="chat",outcome="cancelled"} 1"#;
    while !server.get("/metrics").1.contains(cancelled) {
        let running = server.metric("colibri_requests_running");
        assert!(Instant::now() < end, "the unread answer goes on: {running}");
        thread::sleep(Duration::from_millis(200));
    }
    drop(unread);
    assert_eq!(
        server.metric("colibri_kv_pages"),
        server.metric("colibri_kv_pages_free")
    );
    check_served(&server);
}

#[test]
fn half_closed_connections_end() {
    let server = Server::start(&["--parallel", "1"]);
    let body = json!({"prompt": "a", "max_tokens": 800, "temperature": 0, "stream": true});
    let request = post(PATHS[0], body.to_string().as_bytes());
    for part in [0, 20, request.len() - 5, request.len()] {
        let mut stream = connect(&server.address);
        stream.write_all(&request[..part]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        wait_for_end(&mut stream, Instant::now() + Duration::from_secs(60));
    }
    check_served(&server);
}

#[test]
fn two_signals_end_the_server_at_once_and_killing_it_loses_nothing() {
    let body = json!({"prompt": "It is", "max_tokens": 900, "temperature": 1, "seed": 3, "stream": true, "logit_bias": {"0": -100}});
    let request = post(PATHS[0], body.to_string().as_bytes());
    let begin = |server: &Server| {
        let mut stream = connect(&server.address);
        stream.write_all(&request).unwrap();
        let mut some = [0; 600];
        stream.read_exact(&mut some).unwrap();
        stream
    };
    let server = Server::start(&[]);
    let mut stream = begin(&server);
    server.signal(15);
    // The first signal is handled.
    while TcpStream::connect(&server.address).is_ok() {
        thread::sleep(Duration::from_millis(2));
    }
    server.signal(15);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    let rest = String::from_utf8_lossy(&rest);
    assert!(!rest.contains("[DONE]"), "{rest}");
    assert_eq!(server.wait().signal(), Some(15));

    let server = Server::start(&[]);
    let mut stream = begin(&server);
    let port = server.address.rsplit_once(':').unwrap().1.to_owned();
    server.signal(9);
    let _ = stream.read_to_end(&mut Vec::new());
    drop(stream);
    server.wait();
    // The same port, at once.
    let server = Server::start(&["--port", &port]);
    let mut stream = connect(&server.address);
    stream.write_all(&request).unwrap();
    let reply = read(&mut stream).unwrap();
    assert!(reply.body.ends_with("data: [DONE]\n\n"));
}
