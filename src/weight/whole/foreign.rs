//! Recognises weights in formats of other software by the tensors around them.

use crate::arch::Shape;
use crate::quant::FP8_BLOCK;
use crate::shards::{Dtype, Finding, Kind, Severity, Shards};
use crate::weight::stored::owner_of_scales;

/// Names of tensors of other formats, after the name of the matrix without ".weight".
const MARKS: [(&str, &str); 14] = [
    (".weight_global_scale", "NVFP4 of compressed-tensors"),
    (".weight_packed", "packed integers of compressed-tensors"),
    (".weight_scale_2", "NVFP4 of ModelOpt"),
    (".weight.absmax", "4-bit codes of bitsandbytes"),
    (
        ".weight.quant_state.bitsandbytes__nf4",
        "4-bit codes of bitsandbytes",
    ),
    (
        ".weight.quant_state.bitsandbytes__fp4",
        "4-bit codes of bitsandbytes",
    ),
    (".SCB", "INT8 of bitsandbytes"),
    (".weight.SCB", "INT8 of bitsandbytes"),
    (".q_weight", "EXL2"),
    (".trellis", "EXL3"),
    (".W_q", "HQQ"),
    (".weight._data", "quanto"),
    (".weight_blocks", "MXFP4"),
    (".g_idx", "GPTQ"),
];

/// The finding about a matrix that could not be used, if its format is known.
pub(super) fn format(shards: &Shards, name: &str, shape: Shape) -> Option<Finding> {
    let (rows, cols) = match shape {
        Shape::Vector(_) => return None,
        Shape::Matrix(rows, cols) => (rows, cols),
        Shape::Stack(stack, rows, cols) => (stack.saturating_mul(rows), cols),
    };
    let weight = owner_of_scales(name).unwrap_or(name);
    let stem = weight.strip_suffix(".weight").unwrap_or(weight);
    let find = |mark: &str| shards.find(&format!("{stem}{mark}"));
    let known = MARKS
        .iter()
        .find_map(|(mark, what)| Some((find(mark)?, (*what).to_owned())));
    let (evidence, what) = known
        .or_else(|| {
            let codes = find(".qweight")?;
            // AWQ packs along the outputs, GPTQ along the inputs.
            let what = match codes.shape.first() == Some(&(cols as u64)) {
                true => "AWQ",
                false => "GPTQ",
            };
            Some((codes, what.to_owned()))
        })
        .or_else(|| {
            let scales = find(".weight_scale")?;
            let codes = match shards.find(weight)?.dtype {
                Dtype::F8E4M3 => "FP8",
                Dtype::I8 => "INT8",
                Dtype::U8 => "4-bit codes",
                _ => "codes",
            };
            let layout = match scales.elements() {
                1 => "one scale a tensor".to_owned(),
                n if n == rows as u64 => "one scale a row (per channel)".to_owned(),
                n => format!("{n} scales"),
            };
            Some((scales, format!("{codes} with {layout} in weight_scale")))
        })
        .or_else(|| {
            let scales = find(".weight_scale_inv")?;
            let blocks = [
                rows.div_ceil(FP8_BLOCK) as u64,
                cols.div_ceil(FP8_BLOCK) as u64,
            ];
            let what = match scales.dtype {
                Dtype::F32 | Dtype::Bf16 if scales.shape == blocks => return None,
                Dtype::F32 | Dtype::Bf16 => format!("FP8 with scales of shape {:?}", scales.shape),
                dtype => format!("FP8 with {dtype} scales"),
            };
            let is_fp8 = shards.find(weight)?.dtype == Dtype::F8E4M3;
            is_fp8.then_some((scales, what))
        })?;
    Some(Finding {
        kind: Kind::OtherFormat,
        severity: Severity::Error,
        tensor: Some(weight.to_owned()),
        file: None,
        problem: format!(
            "tensor {weight} is stored as {what} ({}), which cannot be read",
            evidence.name
        ),
        remedy: format!(
            "instead of {what}, take the model in BF16 or in FP8 with scales of 128 x 128 blocks (weight_scale_inv), and quantise \
             it with convert"
        ),
    })
}

/// A file with the tensor names of Mistral's own format.
pub(super) fn consolidated(shards: &Shards) -> Option<Finding> {
    let starts = |path: &&std::path::Path| {
        let name = path.file_name().and_then(std::ffi::OsStr::to_str);
        name.is_some_and(|name| name.starts_with("consolidated"))
    };
    let file = shards.files().iter().map(|file| file.path()).find(starts)?;
    let shown = file.display().to_string();
    Some(Finding {
        kind: Kind::OtherFormat,
        severity: Severity::Error,
        tensor: None,
        problem: format!("{shown} has the tensor names of another format"),
        file: Some(shown),
        remedy: "take the model in the Hugging Face format (model-*.safetensors)".into(),
    })
}
