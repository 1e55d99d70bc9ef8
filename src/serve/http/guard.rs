//! Decides who may use the server: clients with the key, or clients of this machine.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

use super::{ApiError, App};

/// Who may use the server.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Digest of the key; without a key, only what a loopback name is asked for is served.
    key: Option<[u8; 32]>,
}

impl Access {
    /// Clients that have `key`.
    pub fn with_key(key: &str) -> Access {
        Access {
            key: Some(Sha256::digest(key).into()),
        }
    }

    fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(key) = &self.key else {
            // A page of another site may reach a server on this machine, but has its own name in these.
            let host = is_loopback;
            let origin = |value: &str| {
                value
                    .split_once("://")
                    .is_some_and(|(_, host)| is_loopback(host))
            };
            let all = |name, is_own: fn(&str) -> bool| {
                let mut values = headers.get_all(name).iter();
                values.all(|value| value.to_str().is_ok_and(is_own))
            };
            for (name, are_own) in [
                ("Host", all(header::HOST, host)),
                ("Origin", all(header::ORIGIN, origin)),
            ] {
                if !are_own {
                    return Err(ApiError::forbidden(format!(
                        "{name}: without --api-key-file, only localhost is served"
                    )));
                }
            }
            return Ok(());
        };
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let bearer = text("authorization").and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
        let Some(given) = bearer.or_else(|| text("x-api-key")) else {
            return Err(ApiError::unauthorized(
                "a key is needed: Authorization: Bearer KEY",
            ));
        };
        // Digests of equal length; the time of the comparison tells nothing of the key.
        let given: [u8; 32] = Sha256::digest(given).into();
        let differ = key.iter().zip(&given).fold(0, |all, (a, b)| all | (a ^ b));
        match differ {
            0 => Ok(()),
            _ => Err(ApiError::unauthorized("the key is wrong")),
        }
    }
}

/// Whether an authority names this machine, with any port.
fn is_loopback(authority: &str) -> bool {
    let name = match authority.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => authority,
    };
    let name = (name
        .strip_prefix('[')
        .and_then(|name| name.strip_suffix(']')))
    .unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// Answers 401 or 403 to those who may not. Health, and the page with its question for the key, are open to all with a key in use.
pub async fn check(State(app): State<&'static App>, request: Request, next: Next) -> Response {
    let open = app.access.key.is_some() && ["/", "/health"].contains(&request.uri().path());
    match app.access.check(request.headers()) {
        Err(error) if !open => error.into_response(),
        _ => next.run(request).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(access: &Access, headers: &[(&'static str, &str)]) -> bool {
        let headers = headers.iter().map(|(name, value)| {
            (
                header::HeaderName::from_static(name),
                value.parse().unwrap(),
            )
        });
        access.check(&headers.collect()).is_ok()
    }

    #[test]
    fn without_a_key_only_loopback_names_are_served() {
        let access = Access::default();
        for name in ["localhost", "127.0.0.1", "[::1]", "LocalHost", "127.1.2.3"] {
            assert!(allowed(&access, &[("host", name)]), "{name}");
            let port = format!("{name}:8080");
            assert!(allowed(&access, &[("host", &port)]), "{port}");
            let origin = format!("http://{port}");
            assert!(allowed(&access, &[("host", &port), ("origin", &origin)]));
        }
        for name in [
            "example.org",
            "localhost.example.org",
            "10.0.0.1:80",
            "[::2]",
            "",
            "127.0.0.1.nip.io",
            "localhost:80@example.org",
            "[::1]example.org",
        ] {
            assert!(!allowed(&access, &[("host", name)]), "{name}");
            let origin = format!("https://{name}");
            assert!(!allowed(
                &access,
                &[("host", "localhost"), ("origin", &origin)]
            ));
        }
        assert!(!allowed(
            &access,
            &[("host", "localhost"), ("origin", "null")]
        ));
    }

    #[test]
    fn a_key_is_compared_whole() {
        let access = Access::with_key("secret");
        for (header, value, right) in [
            ("authorization", "Bearer secret", true),
            ("authorization", "bearer secret", true),
            ("x-api-key", "secret", true),
            ("authorization", "secret", false),
            ("authorization", "Bearer secre", false),
            ("authorization", "Bearer secrets", false),
            ("x-api-key", "", false),
        ] {
            assert_eq!(
                allowed(&access, &[(header, value), ("host", "example.org")]),
                right,
                "{value}"
            );
        }
        assert!(!allowed(&access, &[("host", "localhost")]));
    }
}
