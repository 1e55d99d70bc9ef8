//! Prints a memory plan.

use std::io::{self, Write};

use colibri_uring::runtime::plan::{Available, MemoryInputs, Plan};
use serde::Serialize;

use super::pluralize::pluralize;
use super::size::human;

/// The JSON object. Sizes are in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub fits: bool,
    /// Routed experts per layer.
    experts_per_layer: usize,
    /// Experts that each layer caches; `null` if the model does not fit.
    cache_slots_per_layer: Option<usize>,
    dense_bytes: u64,
    kv_bytes: u64,
    scratch_bytes: u64,
    scores_bytes: u64,
    drafts_bytes: u64,
    index_bytes: u64,
    program_bytes: u64,
    record_bytes: u64,
    /// Slabs that one token needs at once.
    working_slab_bytes: u64,
    /// The other slabs, which cache experts.
    cache_slab_bytes: u64,
    /// The sum of the above.
    pub total_bytes: u64,
    /// Memory that the process may use; `null` if unknown.
    pub budget_bytes: Option<u64>,
    /// Source of the budget: "ram" or "available".
    budget_source: &'static str,
    mem_total_bytes: Option<u64>,
    mem_available_bytes: Option<u64>,
    reserve_bytes: Option<u64>,
    cgroup: Option<Cgroup>,
    /// Slabs by size.
    slabs: Vec<Slabs>,
}

#[derive(Clone, Debug, Serialize)]
struct Cgroup {
    path: String,
    limit_bytes: u64,
    left_bytes: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Slabs {
    bytes: usize,
    count: usize,
}

impl Report {
    /// `plan` is `None` if the model does not fit.
    pub fn new(survey: &MemoryInputs, plan: Option<&Plan>, ram: bool, experts: usize) -> Report {
        let needs = plan.map_or(&survey.needs, |plan| &plan.needs);
        let slabs = plan.map_or(survey.working_bytes(), |plan| plan.slots.bytes());
        let working = survey.working_bytes().min(slabs);
        let available = survey.available.as_ref().ok();
        let cgroup = |available: &Available| {
            available.cgroup.as_ref().map(|bound| Cgroup {
                path: bound.path.display().to_string(),
                limit_bytes: bound.limit,
                left_bytes: bound.left,
            })
        };
        Report {
            fits: plan.is_some(),
            experts_per_layer: experts,
            cache_slots_per_layer: plan.map(|plan| plan.slots.per_layer_quota),
            dense_bytes: needs.dense,
            kv_bytes: needs.kv,
            scratch_bytes: needs.scratch,
            scores_bytes: needs.scores,
            drafts_bytes: needs.drafts,
            index_bytes: needs.index,
            program_bytes: needs.program,
            record_bytes: needs.record,
            working_slab_bytes: working,
            cache_slab_bytes: slabs - working,
            total_bytes: needs.sum().saturating_add(slabs),
            budget_bytes: survey.budget(),
            budget_source: if ram { "ram" } else { "available" },
            mem_total_bytes: available.map(|a| a.mem_total),
            mem_available_bytes: available.map(|a| a.mem_available),
            reserve_bytes: available.map(|a| a.reserve),
            cgroup: available.and_then(cgroup),
            slabs: plan.map_or_else(Vec::new, |plan| {
                let class = |class: &colibri_ring::Class| Slabs {
                    bytes: class.bytes,
                    count: class.count,
                };
                plan.slots.classes.iter().map(class).collect()
            }),
        }
    }
}

/// Prints the plan as a table.
pub fn print(out: &mut dyn Write, report: &Report, context: usize) -> io::Result<()> {
    let mut line = |name: &str, bytes: Option<u64>, note: &str| {
        let bytes = bytes.map_or("unknown".to_owned(), human);
        let text = format!("{name:<28}{bytes:>12}  {note}");
        writeln!(out, "{}", text.trim_end())
    };
    let context = format!("for {}", pluralize(context, "token"));
    line("resident weights", Some(report.dense_bytes), "")?;
    line("KV cache", Some(report.kv_bytes), &context)?;
    line("scratch", Some(report.scratch_bytes), "")?;
    line("attention scores", Some(report.scores_bytes), "")?;
    line("drafts", Some(report.drafts_bytes), "")?;
    line("index", Some(report.index_bytes), "")?;
    line("program", Some(report.program_bytes), "")?;
    if report.record_bytes > 0 {
        line(
            "record",
            Some(report.record_bytes),
            "for a trace or a report",
        )?;
    }
    let working = "what a token needs at once";
    line(
        "expert slabs, working",
        Some(report.working_slab_bytes),
        working,
    )?;
    let slots = match report.cache_slots_per_layer {
        Some(slots) => format!(
            "{slots} of {} kept in each layer",
            pluralize(report.experts_per_layer, "expert")
        ),
        None => "nothing is left".to_owned(),
    };
    line("expert slabs, cache", Some(report.cache_slab_bytes), &slots)?;
    line("in all", Some(report.total_bytes), "")?;
    let source = match report.budget_source {
        "ram" => "from --ram",
        _ => "available memory minus the reserve",
    };
    line("budget", report.budget_bytes, source)?;
    line("memory of the machine", report.mem_total_bytes, "")?;
    line("available there", report.mem_available_bytes, "")?;
    if let Some(cgroup) = &report.cgroup {
        line(
            "limit of the cgroup",
            Some(cgroup.limit_bytes),
            &cgroup.path,
        )?;
        line("left of it", Some(cgroup.left_bytes), "")?;
    }
    line("reserve", report.reserve_bytes, "for everything else")?;
    let verdict = if report.fits {
        "it fits"
    } else {
        "it does not fit"
    };
    writeln!(out, "{verdict}")
}
