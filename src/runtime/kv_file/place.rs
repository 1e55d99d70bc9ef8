//! Chooses the default path of a model's conversation.

use std::env;
use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::fingerprint::Fingerprint;

/// `colibri-uring/NAME.kv` below `$XDG_STATE_HOME`, else below `~/.local/state`. Creates the directories with mode 0700.
///
/// # Errors
/// No home directory, or a directory that cannot be created.
pub fn default_path(fingerprint: &Fingerprint) -> io::Result<PathBuf> {
    let state = state_home(env::var_os("XDG_STATE_HOME"), env::var_os("HOME"))
        .ok_or_else(|| io::Error::other("neither XDG_STATE_HOME nor HOME is set"))?;
    let dir = state.join("colibri-uring");
    DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    Ok(dir.join(fingerprint.name() + ".kv"))
}

/// The XDG base directory specification ignores relative paths.
fn state_home(xdg: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    let absolute = |path: &OsString| Path::new(path).is_absolute();
    let xdg = xdg.filter(absolute).map(PathBuf::from);
    xdg.or_else(|| Some(Path::new(&home.filter(absolute)?).join(".local/state")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_directory_is_that_of_the_specification() {
        let at = |xdg: Option<&str>, home: Option<&str>| {
            let path = state_home(xdg.map(OsString::from), home.map(OsString::from));
            path.map(|path| path.to_str().unwrap().to_owned())
        };
        assert_eq!(at(Some("/s"), Some("/h")).unwrap(), "/s");
        assert_eq!(at(None, Some("/h")).unwrap(), "/h/.local/state");
        assert_eq!(at(Some("s"), Some("/h")).unwrap(), "/h/.local/state");
        assert_eq!(at(Some(""), None), None);
    }
}
