//! `man` and `completions`: print manual pages and shell completions.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::cli::output::printer::to_stdout;

/// Print completions for a shell
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring completions bash > ~/.local/share/bash-completion/completions/colibri-uring\n  \
    colibri-uring completions zsh > ~/.zfunc/_colibri-uring       # with fpath+=~/.zfunc in .zshrc\n  \
    colibri-uring completions fish > ~/.config/fish/completions/colibri-uring.fish")]
pub struct CompletionsArgs {
    /// Shell to complete for
    shell: Shell,
}

/// Print the manual page, or write one for each command
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    colibri-uring man | man -l -\n  \
    colibri-uring man --dir ~/.local/share/man/man1       # then: man colibri-uring-decode")]
pub struct ManArgs {
    /// Directory to write one page per command to
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints the completions of `command`.
pub fn completions(args: &CompletionsArgs, mut command: Command) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "colibri-uring", &mut script);
    to_stdout(|out| out.write_all(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the main page of `command`, or writes all pages.
pub fn man(args: &ManArgs, mut command: Command) -> anyhow::Result<ExitCode> {
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

/// The command and all its subcommands that have a page.
pub fn pages(command: Command) -> Vec<Command> {
    let below: Vec<Command> = command
        .get_subcommands()
        .filter(|command| command.get_name() != "help")
        .cloned()
        .flat_map(pages)
        .collect();
    [vec![command], below].concat()
}
