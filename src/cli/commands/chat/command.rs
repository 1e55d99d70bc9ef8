//! What a person may say that is not for the model.

/// A line of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Line {
    /// For the model.
    Message(String),
    /// Nothing.
    Empty,
    /// Forget the conversation.
    Reset,
    /// Say what was measured.
    Stats,
    /// Say what can be said.
    Help,
    /// End.
    Quit,
    /// A command that there is not.
    Unknown(String),
}

/// What `/help` says.
pub const HELP: &str = "\
/reset   forget the conversation, and begin a new one
/stats   what reading and computing has cost so far
/help    this
/quit    end, like Ctrl-D
A line that ends with \\ goes on in the next one, and pasted text may have several. Ctrl-C stops an answer; what there is of it stays in
the conversation. A message that begins with / is written with a space before it.";

impl Line {
    /// Commands begin with a slash in the first column.
    pub fn parse(text: &str) -> Line {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Line::Empty;
        }
        if !text.starts_with('/') {
            // The space before a slash is no part of the message.
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
