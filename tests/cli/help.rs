//! `-h` fits a screen, `--help` has the rest, and every flag is under its heading.

use std::collections::BTreeMap;

use crate::process::{colibri, finish};

const COMMANDS: [&str; 19] = [
    "",
    "decode",
    "chat",
    "score",
    "tokenize",
    "detokenize",
    "serve",
    "plan",
    "profile",
    "simulate",
    "inspect",
    "convert",
    "doctor",
    "synth",
    "mirror",
    "mirror bench",
    "mirror verify",
    "mirror stage",
    "man",
];

fn help(command: &str, flag: &str) -> String {
    let mut colibri = colibri();
    colibri.args(command.split_whitespace()).arg(flag);
    let output = finish(colibri);
    assert!(output.status.success() && output.stderr.is_empty());
    String::from_utf8(output.stdout).unwrap()
}

/// The flags under each heading, by their long names or else their short ones.
fn headings(text: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut headings: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut heading = "";
    for line in text.lines() {
        if let Some(title) = line.strip_suffix(':').filter(|t| !t.starts_with(' ')) {
            heading = title;
        } else if line.trim_start().starts_with('-') && !line.trim_start().starts_with("- ") {
            let mut words = line.split([' ', ',']).filter(|word| word.starts_with('-'));
            let short = words.next().unwrap();
            let name = match short.starts_with("--") {
                true => short,
                false => words
                    .next()
                    .filter(|w| w.starts_with("--"))
                    .unwrap_or(short),
            };
            let name = name.trim_end_matches('.');
            headings.entry(heading).or_default().push(name);
        }
    }
    headings
}

#[test]
fn short_help_fits_a_screen() {
    const LINES: usize = 45;
    for command in COMMANDS {
        let text = help(command, "-h");
        assert!(text.lines().count() <= LINES, "{command}: {text}");
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{command}: {line}");
        }
        for part in ["[env:", "possible values", "Examples:"] {
            assert!(!text.contains(part), "{command}: {part}");
        }
        assert!(text.contains("--help"), "{command}");
    }
}

#[test]
fn long_help_has_variables_values_and_examples() {
    for command in COMMANDS {
        let text = help(command, "--help");
        for line in text.lines() {
            let fits = line.chars().count() <= 100 || line.contains("  colibri-uring ");
            assert!(fits, "{command}: {line}");
        }
        if !["", "mirror"].contains(&command) {
            assert!(text.contains("Example"), "{command}");
        }
    }
    let decode = help("decode", "--help");
    for part in [
        "[env: COLIBRI_MODEL=",
        "Possible values:",
        "--expert-bits",
        "colibri-uring decode --model",
    ] {
        assert!(decode.contains(part), "{decode}");
    }
}

#[test]
fn flags_are_under_their_headings() {
    let text = help("decode", "--help");
    let decode = headings(&text);
    let expected: [(&str, &[&str]); 8] = [
        (
            "Prompt",
            &[
                "--prompt",
                "--prompt-file",
                "--prompt-ids",
                "--replay",
                "--chat",
                "--system",
                "--chat-template",
                "--template-var",
            ],
        ),
        (
            "Model",
            &[
                "--model",
                "--dense-bits",
                "--expert-bits",
                "--activations",
                "--dsa",
                "--threads",
                "--mtp",
            ],
        ),
        (
            "Memory",
            &[
                "--ram",
                "--cache-slots",
                "--pin-share",
                "--no-usage",
                "--prefill-slice",
            ],
        ),
        (
            "Drives",
            &[
                "--mirror",
                "--mirror-weights",
                "--engine",
                "--direct",
                "--lookahead",
            ],
        ),
        (
            "Sampling",
            &[
                "-n",
                "--temperature",
                "--top-p",
                "--top-k",
                "--min-p",
                "--repetition-penalty",
                "--repetition-window",
                "--seed",
                "--json-schema",
            ],
        ),
        ("Saved context", &["--kv", "--kv-append", "--kv-reset"]),
        (
            "Output",
            &["--json", "--trace", "--report", "--save-routing"],
        ),
        ("Options", &["--verbose", "--help"]),
    ];
    assert_eq!(
        decode,
        expected
            .into_iter()
            .map(|(heading, flags)| (heading, flags.to_vec()))
            .collect()
    );
    // No heading leaks: flags without one are the two that every command has.
    for command in COMMANDS {
        let text = help(command, "--help");
        let general: &[&str] = match command {
            "" => &["--verbose", "--help", "--version"],
            "man" => &["--dir", "--verbose", "--help"],
            _ => &["--verbose", "--help"],
        };
        let mut options = headings(&text)["Options"].clone();
        options.sort_by_key(|flag| general.iter().position(|g| g == flag));
        assert_eq!(options, general, "{command}");
    }
}
