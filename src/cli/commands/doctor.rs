//! `doctor`: checks what the machine allows, with advice for each failed check.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::ensure;
use clap::Args;
use colibri_ring::probe::{self, direct, huge};
use colibri_ring::{DirectMode, EngineKind, limits};
use colibri_uring::arch::Architecture;
use colibri_uring::runtime::plan::{self, PlanRequest};
use colibri_uring::shards::{Findings, Severity, Shards};
use colibri_uring::stream::{Catalog, ExpertFiles};
use colibri_uring::weight;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::args::drives::check_model;
use crate::cli::output::memory::Report;
use crate::cli::output::pluralize::pluralize;
use crate::cli::output::printer::{print_json, to_stdout};
use crate::cli::output::size::human;

mod text;

/// Check this machine: io_uring, huge pages, O_DIRECT, limits, CPU, memory
#[derive(Debug, Args)]
#[command(
    after_long_help = "Examples:\n  colibri-uring doctor\n  colibri-uring doctor /models/GLM-5.2 --json"
)]
pub struct DoctorArgs {
    /// Directories to try O_DIRECT in [default: the current one]
    #[arg(value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// Directory of a model to try O_DIRECT on, and to check that it is whole and fits
    #[arg(long, value_name = "DIR", num_args = 1.., env = "COLIBRI_MODEL", help_heading = "Model")]
    model: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Check {
    name: String,
    ok: bool,
    found: String,
    /// Whether a failed check fails the command.
    #[serde(skip)]
    fatal: bool,
    /// What to do if `ok` is false.
    advice: Option<String>,
    /// `found` in JSON.
    details: Value,
}

impl Check {
    fn new(name: impl Into<String>, found: impl Into<String>, details: Value) -> Check {
        Check {
            name: name.into(),
            ok: true,
            fatal: false,
            found: found.into(),
            advice: None,
            details,
        }
    }

    /// Fails the check if `wrong`, with this advice.
    fn unless(mut self, wrong: bool, advice: impl Into<String>) -> Check {
        if wrong {
            self.ok = false;
            self.advice = Some(advice.into());
        }
        self
    }
}

/// Runs all checks. A missing feature is a warning, because everything works without it, slower. A broken model is a
/// failure.
pub fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut dirs: Vec<&Path> = args
        .dirs
        .iter()
        .chain(&args.model)
        .map(PathBuf::as_path)
        .collect();
    if dirs.is_empty() {
        dirs.push(Path::new("."));
    }
    let mut checks = vec![kernel(), uring(), memlock(), huge_pages(), descriptors()];
    checks.extend(dirs.into_iter().map(direct_reads));
    checks.extend([cpu(), memory()]);
    let (mut models, mut failed) = (positional_models(&args.dirs), None);
    if !args.model.is_empty() {
        models.push(args.model.clone());
    }
    for dirs in models {
        checks.extend(text::checks(&dirs[0]));
        if let Err(error) = model(&dirs, &mut checks) {
            failed.get_or_insert(error);
        }
    }
    if args.json {
        let ok = failed.is_none() && checks.iter().all(|check| check.ok);
        print_json(&json!({ "ok": ok, "checks": checks }))?;
    } else {
        to_stdout(|out| print(out, &checks))?;
    }
    failed.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// The models among directories that are given without --model: each starts with one that has config.json, and the directories
/// after it that have none belong to it.
fn positional_models(dirs: &[PathBuf]) -> Vec<Vec<PathBuf>> {
    let here = [PathBuf::from(".")];
    let dirs = if dirs.is_empty() { &here[..] } else { dirs };
    let shards = |dir: &Path| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut names = entries.map(|entry| entry.file_name());
        names.any(|name| name.to_string_lossy().ends_with(".safetensors"))
    };
    let mut models: Vec<Vec<PathBuf>> = Vec::new();
    for dir in dirs.iter().filter(|dir| shards(dir)) {
        // A link to nothing counts: it is reported.
        if dir.join("config.json").symlink_metadata().is_ok() {
            models.push(vec![dir.clone()]);
        } else if let Some(model) = models.last_mut() {
            model.push(dir.clone());
        }
    }
    models
}

fn print(out: &mut dyn Write, checks: &[Check]) -> io::Result<()> {
    for check in checks {
        let verdict = match (check.ok, check.fatal) {
            (true, _) => "ok  ",
            (false, false) => "warn",
            (false, true) => "FAIL",
        };
        writeln!(out, "{verdict}  {:<12} {}", check.name, check.found)?;
        if let Some(advice) = &check.advice {
            writeln!(out, "{:19}-> {advice}", "")?;
        }
    }
    Ok(())
}

/// Checks that a model is whole, and that it fits.
fn model(dirs: &[PathBuf], checks: &mut Vec<Check>) -> anyhow::Result<()> {
    check_model(dirs)?;
    let config = Architecture::load(&dirs[0])?;
    let shards = Shards::open_partial(dirs, &[], EngineKind::Auto)?;
    let findings = weight::findings(&shards, &config)?;
    checks.push(weights(&findings));
    if findings.errors().is_empty() {
        checks.push(model_memory(&config, &shards)?);
    }
    let lacks = findings.lacks();
    ensure!(lacks.is_empty(), "{lacks}");
    Ok(())
}

/// Whether all tensors and files of a model are usable.
fn weights(findings: &Findings) -> Check {
    let lacks = findings.lacks();
    let (warnings, notes) = (
        findings.only(&[Severity::Warning]),
        findings.only(&[Severity::Note]),
    );
    let mut found = match lacks.is_empty() {
        true => "every tensor that the model needs".to_owned(),
        false => "the model is not whole".to_owned(),
    };
    if !notes.is_empty() {
        found += &format!("; {notes}");
    }
    let mut check = Check::new("weights", found, json!({ "findings": findings }));
    check.fatal = !lacks.is_empty();
    let advice = if check.fatal { lacks } else { warnings };
    check.unless(!advice.is_empty(), advice.to_string())
}

/// Checks that a model fits with a context of 4096 tokens, or with its longest one if that is shorter.
fn model_memory(config: &Architecture, shards: &Shards) -> anyhow::Result<Check> {
    let context = config.max_position_embeddings.min(4096);
    let catalog = Catalog::new(shards, config)?;
    let files = ExpertFiles::new(shards, catalog, DirectMode::Auto)?;
    let ask = PlanRequest::usual(context);
    let survey = plan::survey(shards, config, &files, ask, &plan::Roots::default());
    let plan = survey.plan();
    let report = Report::new(&survey, plan.as_ref().ok(), false, config.experts.count);
    let details = serde_json::to_value(&report).unwrap_or_default();
    let total = human(report.total_bytes);
    let budget = report.budget_bytes.map_or("unknown".into(), human);
    let found = format!("{total} of {budget} for {context} tokens of context");
    let advice = plan.err().map(|error| error.to_string());
    Ok(Check::new("model", found, details).unless(advice.is_some(), advice.unwrap_or_default()))
}

fn kernel() -> Check {
    let release = probe::kernel();
    Check::new(
        "kernel",
        format!("Linux {release}"),
        json!({ "release": release }),
    )
}

fn uring() -> Check {
    match probe::uring() {
        Ok(features) => {
            let named = features.named();
            let list = |wanted: bool| -> Vec<&str> {
                named
                    .iter()
                    .filter(|(_, has)| *has == wanted)
                    .map(|(name, _)| *name)
                    .collect()
            };
            let missing = list(false).join(", ");
            let features: serde_json::Map<_, _> = named
                .iter()
                .map(|(name, has)| ((*name).to_owned(), json!(has)))
                .collect();
            Check::new(
                "io_uring",
                list(true).join(", "),
                json!({ "available": true, "features": features }),
            )
            .unless(
                !missing.is_empty(),
                format!("without {missing}; Linux 6.1 or later has them"),
            )
        }
        Err(denied) => Check::new(
            "io_uring",
            format!("{denied}; reads will use pread threads"),
            json!({ "available": false, "reason": denied.to_string() }),
        )
        .unless(true, denied.advice),
    }
}

fn memlock() -> Check {
    let (limit, exempt) = (limits::memlock(), limits::may_lock_any_memory());
    let found = match limit.hard {
        _ if exempt => "any amount of memory may be registered (CAP_IPC_LOCK)".to_owned(),
        None => "no limit on registered memory".to_owned(),
        Some(bytes) => format!("{} of memory may be registered with io_uring", human(bytes)),
    };
    let details = json!({ "soft": limit.soft, "hard": limit.hard, "cap_ipc_lock": exempt });
    // A few slabs of a large model. Below this limit most reads go to unregistered memory.
    const LITTLE: u64 = 1 << 30;
    let little = !exempt && limit.hard.is_some_and(|bytes| bytes < LITTLE);
    Check::new("memlock", found, details).unless(
        little,
        "ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, or docker run --ulimit memlock=-1; \
         slabs beyond the limit are read unregistered",
    )
}

fn huge_pages() -> Check {
    let huge = huge::huge_pages();
    let setting = huge.setting.as_deref().unwrap_or("not in this kernel");
    let found = match &huge.backed {
        Ok(bytes) => format!(
            "transparent huge pages: {setting}; {} of a test allocation of {} are on them",
            human(*bytes),
            human(huge.tested)
        ),
        Err(error) => format!("transparent huge pages: {setting}; the test failed: {error}"),
    };
    let details = json!({
        "setting": huge.setting, "tested_bytes": huge.tested, "huge_bytes": huge.backed.as_ref().ok(),
    });
    let advice = match setting {
        "never" => {
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: large reads are much faster"
        }
        _ => "memory may be fragmented: echo 1 > /proc/sys/vm/compact_memory, then try again",
    };
    Check::new("huge pages", found, details).unless(!huge.granted(), advice)
}

fn descriptors() -> Check {
    let limit = limits::descriptors();
    let found = match limit.hard {
        Some(hard) => format!("{} may be open", pluralize(hard, "file")),
        None => "any number of files may be open".to_owned(),
    };
    // Two for each of some 156 shards and its four mirrors, with a margin.
    const ENOUGH: u64 = 2048;
    Check::new(
        "descriptors",
        found,
        json!({ "soft": limit.soft, "hard": limit.hard }),
    )
    .unless(
        limit.hard.is_some_and(|hard| hard < ENOUGH),
        "ulimit -Hn 65536, or LimitNOFILE= in a systemd unit: large models have hundreds of files",
    )
}

fn direct_reads(dir: &Path) -> Check {
    let name = "O_DIRECT";
    let shown = dir.display();
    let report = match direct::direct(dir) {
        Ok(report) => report,
        Err(error) => {
            let details = json!({ "dir": dir.to_string_lossy(), "direct": null, "reason": error.to_string() });
            return Check::new(name, format!("{shown}: {error}"), details)
                .unless(true, "give a directory that can be read");
        }
    };
    let file_system = &report.file_system;
    let mut details = json!({ "dir": dir.to_string_lossy(), "file": report.file.as_deref().map(|file| file.to_string_lossy()), "file_system": file_system });
    match (&report.direct, &report.file) {
        (Ok(align), _) => {
            details["direct"] = json!(true);
            details["offset_align"] = json!(align.offset);
            details["memory_align"] = json!(align.memory);
            let found = format!(
                "{shown} ({file_system}): yes; offsets aligned to {} bytes, memory to {}",
                align.offset, align.memory
            );
            Check::new(name, found, details)
        }
        (Err(reason), None) => {
            details["direct"] = json!(null);
            details["reason"] = json!(reason);
            Check::new(
                name,
                format!("{shown} ({file_system}): not tried, {reason}"),
                details,
            )
            .unless(true, "give the directory of a model")
        }
        (Err(reason), Some(_)) => {
            details["direct"] = json!(false);
            details["reason"] = json!(reason);
            Check::new(
                name,
                format!("{shown} ({file_system}): {reason}; reads go through the page cache"),
                details,
            )
            .unless(
                true,
                "keep the model on a local ext4, xfs or btrfs file system on an SSD",
            )
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<(&'static str, bool)> {
    vec![
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
    ]
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_features() -> Vec<(&'static str, bool)> {
    Vec::new()
}

fn cpu() -> Check {
    let features = cpu_features();
    let threads = colibri_uring::cpus::default_threads();
    let has = |name| features.contains(&(name, true));
    let names: Vec<&str> = features
        .iter()
        .filter(|(_, has)| *has)
        .map(|(name, _)| *name)
        .collect();
    let details: serde_json::Map<_, _> = features
        .iter()
        .map(|(name, has)| ((*name).to_owned(), json!(has)))
        .collect();
    Check::new(
        "cpu",
        format!("{}; {}", pluralize(threads, "thread"), names.join(", ")),
        json!({ "threads": threads, "features": details }),
    )
    .unless(
        !(has("avx2") && has("fma") && has("f16c")),
        "no AVX2, FMA and F16C: the portable kernels are used, which are slower",
    )
}

fn memory() -> Check {
    let available = match plan::available(&plan::Roots::default()) {
        Ok(available) => available,
        Err(error) => {
            return Check::new("memory", error.to_string(), Value::Null)
                .unless(true, "give --ram when running a model");
        }
    };
    let mut found = format!(
        "{} available of {}",
        human(available.mem_available),
        human(available.mem_total)
    );
    if let Some(cgroup) = &available.cgroup {
        found += &format!(
            "; the cgroup limits it to {}, of which {} are left",
            human(cgroup.limit),
            human(cgroup.left)
        );
    }
    found += &format!("; a model may use {}", human(available.budget()));
    let details = json!({
        "total": available.mem_total,
        "available": available.mem_available,
        "cgroup": available.cgroup.as_ref().map(|c| json!({ "path": c.path, "limit": c.limit, "left": c.left })),
        "budget": available.budget(),
    });
    Check::new("memory", found, details).unless(
        available.budget() == 0,
        "free memory, or raise the limit of the cgroup",
    )
}
