//! Parses the lines of a conversation: messages and slash commands.

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    Message(String),
    Empty,
    Reset,
    Stats,
    Help,
    Quit,
    Unknown(String),
}

/// What `/help` says.
pub const HELP: &str = "\
/reset   forget the conversation and start a new one
/stats   print statistics of reads and compute
/help    print this
/quit    leave, like Ctrl-D
End a line with \\ to continue the message on the next one. Pasted text may have several lines. Ctrl-C stops an answer; the partial
answer stays in the conversation. To send a message that begins with /, type a space first.";

impl Line {
    /// Commands begin with a slash in the first column.
    pub fn parse(text: &str) -> Line {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Line::Empty;
        }
        if !text.starts_with('/') {
            // The space before a slash is not part of the message.
            let escaped = text.strip_prefix(' ').filter(|rest| rest.starts_with('/'));
            return Line::Message(escaped.unwrap_or(text).to_owned());
        }
        match trimmed {
            "/reset" => Line::Reset,
            "/stats" => Line::Stats,
            "/help" | "/?" => Line::Help,
            "/quit" | "/exit" => Line::Quit,
            other => {
                let word = other.split_whitespace().next().unwrap_or(other);
                Line::Unknown(word.chars().take(40).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_begin_with_a_slash() {
        assert_eq!(Line::parse("/reset"), Line::Reset);
        assert_eq!(Line::parse("/quit  "), Line::Quit);
        assert_eq!(
            Line::parse("/etc/fstab is?"),
            Line::Unknown("/etc/fstab".into())
        );
        assert_eq!(Line::parse("  "), Line::Empty);
        assert_eq!(Line::parse(" /reset"), Line::Message("/reset".into()));
        assert_eq!(Line::parse("  a /b"), Line::Message("  a /b".into()));
    }
}
