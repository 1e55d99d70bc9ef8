//! Runs a program on a pseudo-terminal.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(30);

/// A program and its terminal.
pub struct Terminal {
    child: Child,
    master: File,
    output: Receiver<Vec<u8>>,
    /// Everything that it wrote.
    pub seen: String,
    /// Bytes of `seen` that earlier calls matched.
    at: usize,
}

impl Terminal {
    /// Starts it on a terminal of 24 lines and 200 columns.
    pub fn start(mut command: Command) -> Terminal {
        let (mut master, mut slave) = (-1, -1);
        let size = libc::winsize {
            ws_row: 24,
            ws_col: 200,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        // SAFETY: the pointers are to locals, or null where the call allows it.
        let result = unsafe {
            libc::openpty(
                &raw mut master,
                &raw mut slave,
                std::ptr::null_mut(),
                std::ptr::null(),
                &raw const size,
            )
        };
        assert_eq!(result, 0, "no terminal can be made");
        // SAFETY: the call has given both descriptors to us.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        let fd = slave.as_raw_fd();
        let take = move || {
            // SAFETY: system calls on integers.
            match unsafe { libc::setsid() >= 0 && libc::ioctl(fd, libc::TIOCSCTTY, 0) >= 0 } {
                true => Ok(()),
                false => Err(std::io::Error::last_os_error()),
            }
        };
        // SAFETY: the closure makes system calls only, and allocates nothing.
        unsafe { command.pre_exec(take) };
        command
            .stdin(slave.try_clone().unwrap())
            .stdout(slave.try_clone().unwrap())
            .stderr(slave.try_clone().unwrap());
        let child = command.spawn().unwrap();
        drop((slave, command));
        let mut reader = master.try_clone().unwrap();
        let (send, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // An error, once the last process has closed the terminal.
            while let Ok(n @ 1..) = reader.read(&mut buffer) {
                let _ = send.send(buffer[..n].to_vec());
            }
        });
        Terminal {
            child,
            master,
            output,
            seen: String::new(),
            at: 0,
        }
    }

    /// Types `keys`.
    pub fn write(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for `text` after the previous match, and returns the output between them.
    #[track_caller]
    pub fn expect(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            if let Some(found) = self.seen[self.at..].find(text) {
                let between = self.seen[self.at..self.at + found].to_owned();
                self.at += found + text.len();
                return between;
            }
            match self
                .output
                .recv_timeout(TIMEOUT.saturating_sub(start.elapsed()))
            {
                Ok(bytes) => self.seen += &String::from_utf8_lossy(&bytes),
                Err(_) => {
                    let _ = self.child.kill();
                    panic!("{text:?} does not come after {:?}", &self.seen[self.at..]);
                }
            }
        }
    }

    /// Waits for `prompt`, and for raw mode, which comes a little later.
    #[track_caller]
    pub fn expect_line(&mut self, prompt: &str) {
        self.expect(prompt);
        while self.is_cooked() && self.child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a system call on integers; the child has not been waited for, so its id is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Whether echo and line mode are on.
    pub fn is_cooked(&self) -> bool {
        // SAFETY: all zeros is a value of the structure, and the call fills it.
        let mode = unsafe {
            let mut mode = std::mem::zeroed();
            assert_eq!(libc::tcgetattr(self.master.as_raw_fd(), &raw mut mode), 0);
            mode
        };
        mode.c_lflag & (libc::ECHO | libc::ICANON) == libc::ECHO | libc::ICANON
    }

    /// Waits for the program to exit.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                while let Ok(bytes) = self.output.recv_timeout(Duration::from_millis(100)) {
                    self.seen += &String::from_utf8_lossy(&bytes);
                }
                return status;
            }
            if start.elapsed() > TIMEOUT {
                let _ = self.child.kill();
                panic!("it does not end: {:?}", self.seen);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
