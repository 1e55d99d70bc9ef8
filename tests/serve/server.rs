//! Runs the program's server, and sends it requests.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

use serde_json::{Value, json};

/// A server with the demo model, which is killed when it is dropped.
pub struct Server {
    pub child: Child,
    pub address: String,
    pub key: Option<&'static str>,
}

impl Server {
    pub fn start(flags: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_colibri-uring"));
        command.args(["serve", "--no-usage", "--threads", "2"]);
        if !flags.contains(&"--port") {
            command.args(["--port", "0"]);
        }
        Server::run(command.args(flags))
    }

    /// Waits until the server of `command` is ready.
    pub fn run(command: &mut Command) -> Server {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let said = lines.by_ref().map(Result::unwrap);
        let ready =
            said.filter_map(|line| Some(line.strip_prefix("listening on http://")?.to_owned()));
        let address = ready.take(1).next().expect("the server does not start");
        // Nothing may wait for the reader of its log.
        thread::spawn(move || lines.for_each(drop));
        let key = None;
        Server {
            child,
            address,
            key,
        }
    }

    /// Status and body of a request.
    pub fn post(&self, path: &str, body: impl AsRef<[u8]>) -> (u16, String) {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .build()
            .new_agent();
        let mut request = agent.post(format!("http://{}{path}", self.address));
        if let Some(key) = self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut answer = request.send(body.as_ref()).unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        (answer.status().as_u16(), text)
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .build()
            .new_agent();
        let mut answer = agent
            .get(format!("http://{}{path}", self.address))
            .call()
            .unwrap();
        (
            answer.status().as_u16(),
            answer.body_mut().read_to_string().unwrap(),
        )
    }

    #[track_caller]
    pub fn json(&self, path: &str, body: &Value) -> Value {
        let (status, text) = self.post(path, body.to_string());
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// The chunks of a streamed answer.
    #[track_caller]
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut body = body.clone();
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let (status, text) = self.post(path, body.to_string());
        assert_eq!(status, 200, "{text}");
        let mut data: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.iter()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    pub fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is missing"))
            .parse()
            .unwrap()
    }

    pub fn signal(&self, signal: i32) {
        let killed = Command::new("kill")
            .arg(format!("-{signal}"))
            .arg(self.child.id().to_string())
            .status();
        assert!(killed.unwrap().success());
    }

    pub fn wait(mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
