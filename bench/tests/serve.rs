//! Serving while drives fail. Skipped where there is no root or there are no loop devices.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use common::{colibri, fixture, lab};

mod common;

const MIB: u64 = 1 << 20;

struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(mut command: Command) -> Server {
        command
            // It would be looked for on the drive that breaks.
            .env("COLIBRI_NO_USAGE", "1")
            .env_remove("RUST_LOG")
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let address = loop {
            let line = lines.next().expect("the server does not start").unwrap();
            if let Some(address) = line.strip_prefix("listening on http://") {
                break address.to_owned();
            }
        };
        thread::spawn(move || lines.for_each(drop));
        Server { child, address }
    }

    /// Status and answer of a request without a cache of earlier ones.
    fn complete(&self, first: u32) -> (u16, Value) {
        let body = json!({"prompt": [first, 2, 3], "max_tokens": 30, "temperature": 0});
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .build()
            .new_agent();
        let url = format!("http://{}/v1/completions", self.address);
        let mut answer = agent.post(url).send(body.to_string()).unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        (
            answer.status().as_u16(),
            serde_json::from_str(&text).unwrap(),
        )
    }

    fn get(&self, path: &str) -> (u16, String) {
        let url = format!("http://{}{path}", self.address);
        let mut answer = ureq::get(url).call().unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        (answer.status().as_u16(), text)
    }

    /// Bytes of experts read so far.
    fn read(&self) -> f64 {
        let (_, text) = self.get("/metrics");
        let values = text.lines().filter_map(|line| {
            let rest = line.strip_prefix("colibri_read_bytes_total{")?;
            rest.rsplit_once(' ')?.1.parse::<f64>().ok()
        });
        values.sum()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `breaks` as soon as the request reads, and returns the answer.
fn while_it_reads(server: &Server, first: u32, breaks: impl FnOnce()) -> (u16, Value) {
    let before = server.read();
    thread::scope(|scope| {
        let answer = scope.spawn(|| server.complete(first));
        let deadline = Instant::now() + Duration::from_secs(60);
        while server.read() <= before {
            assert!(Instant::now() < deadline, "nothing is read");
            thread::sleep(Duration::from_millis(5));
        }
        breaks();
        answer.join().unwrap()
    })
}

#[test]
fn drives_that_break_in_the_middle() {
    let (Some(mut lab), Some(program)) = (lab(), colibri()) else {
        return;
    };
    let mut drive = || {
        let drive = lab.add(48 * MIB, Some(2 * MIB)).unwrap();
        lab.copy_to(drive, &fixture()).unwrap();
        drive
    };
    let [primary, mirror] = [drive(), drive()];
    let flags = ["--port", "0", "--cache-slots", "0"];
    let mut command = Command::new(&program);
    command
        .arg("serve")
        .arg("--model")
        .arg(fixture())
        .args(flags);
    let quiet = Server::start(command);
    let mut command = lab.command(&program);
    command.arg("serve").arg("--model").arg(lab.path(primary));
    command.arg("--mirror").arg(lab.path(mirror)).args(flags);
    let server = Server::start(command);

    // One copy is left: the same text, now and later.
    let (status, answer) = while_it_reads(&server, 1, || lab.break_drive(mirror).unwrap());
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"], quiet.complete(1).1["choices"]);
    let (status, answer) = server.complete(4);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"], quiet.complete(4).1["choices"]);

    // None is left: the request ends, the server does not.
    let (status, answer) = while_it_reads(&server, 5, || lab.break_drive(primary).unwrap());
    assert_eq!(status, 503, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("experts"), "{message}");
    assert_eq!(server.complete(6).0, 503);
    assert_eq!(server.get("/health").0, 200);
    let (_, metrics) = server.get("/metrics");
    assert!(metrics.contains("outcome=\"failed\"} 2"), "{metrics}");
    let value = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap().trim().parse::<f64>().unwrap()
    };
    assert_eq!(value("colibri_kv_pages "), value("colibri_kv_pages_free "));
}
