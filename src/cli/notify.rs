//! Tells systemd, or another manager of services, when the server is ready and when it ends.

use std::env;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The server answers requests.
pub const READY: &str = "READY=1";
/// It finishes what runs.
pub const STOPPING: &str = "STOPPING=1";

/// Sends a state to the manager that started this process, if one asked for it by `NOTIFY_SOCKET`.
pub fn notify(state: &str) {
    let Some(address) = env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send(address.as_bytes(), state) {
        tracing::warn!("the service manager cannot be told {state}: {error}");
    }
}

/// `address` is a path, or an abstract name after `@`.
fn send(address: &[u8], state: &str) -> io::Result<()> {
    let address = match address.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(address))?,
    };
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read is no reason to wait.
    socket.set_nonblocking(true)?;
    socket.send_to_addr(state.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_and_an_abstract_name_are_reached() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("colibri-notify-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        for (socket, address) in [
            (
                UnixDatagram::bind(&path).unwrap(),
                path.as_os_str().as_bytes().to_vec(),
            ),
            (
                UnixDatagram::bind_addr(&abstract_name).unwrap(),
                [b"@", name.as_bytes()].concat(),
            ),
        ] {
            send(&address, READY).unwrap();
            let mut text = [0; 32];
            let len = socket.recv(&mut text).unwrap();
            assert_eq!(&text[..len], b"READY=1");
        }
        assert!(send(b"/nothing/here", READY).is_err());
    }
}
