//! Sends bytes to a server and reads its answer, as clients that misbehave do.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// A connection whose reads end after two minutes.
pub fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(120)))
        .unwrap();
    stream
}

/// The bytes of a request. The connection ends with its answer.
pub fn post(path: &str, body: &[u8]) -> Vec<u8> {
    let len = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

/// Reads an answer to its end.
pub fn read(stream: &mut TcpStream) -> io::Result<Reply> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    reply(&bytes).ok_or_else(|| {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// Sends a request and reads the answer. A server may answer before it has read everything.
pub fn exchange(address: &str, request: &[u8]) -> io::Result<Reply> {
    let mut stream = connect(address);
    let sent = stream.write_all(request);
    let reply = read(&mut stream);
    if reply.is_err() {
        sent?;
    }
    reply
}

fn reply(bytes: &[u8]) -> Option<Reply> {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = String::from_utf8(bytes[..end].to_vec()).ok()?;
    let status = head.get(9..12)?.parse().ok()?;
    let rest = &bytes[end + 4..];
    let body = match head.to_lowercase().contains("transfer-encoding: chunked") {
        true => unchunked(rest)?,
        false => rest.to_vec(),
    };
    Some(Reply {
        status,
        head,
        body: String::from_utf8(body).ok()?,
    })
}

/// The content of chunks, which must end with the empty one.
fn unchunked(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|two| two == b"\r\n")?;
        let len = std::str::from_utf8(&rest[..line]).ok()?;
        let len = usize::from_str_radix(len, 16).ok()?;
        let chunk = &rest[line + 2..];
        if len == 0 {
            return Some(body);
        }
        body.extend_from_slice(chunk.get(..len)?);
        rest = chunk.get(len + 2..)?;
    }
}
