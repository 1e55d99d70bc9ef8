//! `man` and `completions`: what the command line says of itself, for the shell.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli::Cli;
use crate::cli::output::printer::to_stdout;

/// Print completions for a shell
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    colibri-uring completions bash > ~/.local/share/bash-completion/completions/colibri-uring\n  \
    colibri-uring completions zsh > ~/.zfunc/_colibri-uring       # with fpath+=~/.zfunc in .zshrc\n  \
    colibri-uring completions fish > ~/.config/fish/completions/colibri-uring.fish")]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Print the manual page, or write one for each command
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    colibri-uring man | man -l -\n  \
    colibri-uring man --dir ~/.local/share/man/man1       # then: man colibri-uring-decode")]
pub struct ManArgs {
    /// Directory in which a page for each command is written
    #[arg(long, value_name = "DIR", env = "COLIBRI_DIR")]
    dir: Option<PathBuf>,
}

/// Prints the completions.
pub fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(
        args.shell,
        &mut Cli::command(),
        "colibri-uring",
        &mut script,
    );
    to_stdout(|out| out.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the main page, or writes all of them.
pub fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command();
    command.build();
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        Man::new(command).render(&mut page)?;
        to_stdout(|out| out.write_all(&page))?;
        return Ok(ExitCode::SUCCESS);
    };
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let mut written = 0;
    for command in pages(command) {
        let mut page = Vec::new();
        let man = Man::new(command);
        let path = dir.join(man.get_filename());
        man.render(&mut page)?;
        fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
        written += 1;
    }
    to_stdout(|out| writeln!(out, "{written} pages in {}", dir.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// The command and all below it that have a page.
fn pages(command: Command) -> Vec<Command> {
    let below: Vec<Command> = command
        .get_subcommands()
        .filter(|command| command.get_name() != "help")
        .cloned()
        .flat_map(pages)
        .collect();
    [vec![command], below].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commands() -> Vec<Command> {
        let mut command = Cli::command();
        command.build();
        pages(command)
    }

    #[test]
    fn every_page_names_every_flag() {
        for command in commands() {
            let mut page = Vec::new();
            Man::new(command.clone()).render(&mut page).unwrap();
            let page = String::from_utf8(page).unwrap().replace("\\-", "-");
            assert!(page.contains(".TH "), "{}", command.get_name());
            for long in command.get_arguments().filter_map(|arg| arg.get_long()) {
                assert!(
                    page.contains(&format!("--{long}")),
                    "{} --{long}",
                    command.get_name()
                );
            }
        }
    }

    #[test]
    fn completions_know_every_flag() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "colibri-uring", &mut script);
            let script = String::from_utf8(script).unwrap();
            for command in commands() {
                for long in command.get_arguments().filter_map(|arg| arg.get_long()) {
                    assert!(
                        script.contains(long),
                        "{shell}: {} {long}",
                        command.get_name()
                    );
                }
            }
        }
    }

    #[test]
    fn every_command_that_does_something_has_examples() {
        let leaves = commands().into_iter().filter(|c| !c.has_subcommands());
        for command in leaves {
            let help = command.get_after_help().map(ToString::to_string);
            let help = help.unwrap_or_default();
            assert!(help.contains("Example"), "{}", command.get_name());
            assert!(help.contains("colibri-uring "), "{}", command.get_name());
        }
    }
}
