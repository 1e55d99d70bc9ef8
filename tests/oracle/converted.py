"""What the library says about fixtures after they were quantised: the record that `convert` is tested with.

Written independently of the converter: the tensors of a committed float or FP8 fixture are rounded by quantise.py, and the library
runs on the values that codes and scales stand for.
"""

import json
import re
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

import quantise
import store
import weights
from reference import Rejected

NAME = "converted.json"

ROUTER = r"\.(mlp|block_sparse_moe)\.(gate|router)\."

# As the flags of `convert`. The first is its default, and every fixture has one of the others too.
RECIPES = [
    {"experts": "int4-g64", "dense": "int4-g64", "embed": "int8", "mtp": "int8"},
    {"experts": "int8", "dense": "int8", "embed": "int8", "mtp": "int4"},
    {"experts": "int4-g16", "dense": "int8", "embed": "keep", "mtp": "keep"},
    {"experts": "int4", "dense": "int4", "embed": "int4", "mtp": "int8"},
    {"experts": "int2", "dense": "int8", "embed": "int8", "mtp": "int2"},
]


def stored(spec, fixture: Path) -> dict:
    """The tensors of a fixture as values: FP8 with its scales applied, experts one by one."""
    raw, out = {}, {}
    for shard in sorted(fixture.rglob("*.safetensors")):
        raw.update(load_file(shard))
    for name, tensor in raw.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scales = raw[f"{name}_scale_inv"]
            rows, cols = tensor.shape
            block = quantise.FP8_BLOCK
            spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :cols]
            tensor = tensor.float() * spread
        out.update(weights.unfuse(name, tensor, spec, "per-expert"))
    return out


def format_of(name: str, tensor: torch.Tensor, recipe: dict, layers: int) -> str:
    """The part of the recipe that a tensor falls under, or "f32" or "keep"."""
    if tensor.dim() != 2 or re.search(ROUTER, name):
        return "f32"
    name = name.removeprefix("language_model.")  # of multimodal checkpoints
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and int(layer[1]) >= layers:
        return recipe["mtp"]
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return recipe["embed"]
    return recipe["experts" if ".experts." in name else "dense"]


def crc(packed: dict) -> int:
    """CRC-32 of the bytes of all packed tensors and their scales, in the order of their names."""
    value = 0
    for _, tensor in sorted(packed.items()):
        value = zlib.crc32(tensor.contiguous().numpy().tobytes(), value)
    return value


def one(spec, fixture: Path, recipe: dict, seed: int, record) -> dict:
    """The record of one fixture and recipe."""
    packed, values = {}, {}
    for name, tensor in stored(spec, fixture).items():
        format = format_of(name, tensor, recipe, spec.text["num_hidden_layers"])
        if format in ("f32", "keep"):
            values[name] = tensor
        else:
            parts, values[name] = quantise.quantise(name, tensor.float(), format)
            packed.update(parts)
    with tempfile.TemporaryDirectory() as source, tempfile.TemporaryDirectory() as out:
        store.write_weights(Path(source), values, spec)
        said = record(spec, Path(out), Path(source), seed)
    keys = ("prompt_ids", "token_ids", "finish_reason")
    scored = {key: said["score"][key] for key in ("ids", "argmax", "last_logits")}
    return {"recipe": recipe, "packed_crc32": crc(packed)} | {key: said[key] for key in keys} | {"score": scored}


def write(spec, fixture: Path, record, at: int) -> None:
    """Writes converted.json with the default recipe and one of the others, as far as the choices of the model are clear."""
    home = fixture / spec.dirs[0]
    generation = home / "generation_config.json"
    spec = replace(
        spec, config=json.loads((home / "config.json").read_text()), eos_at=None,
        generation_config=json.loads(generation.read_text()) if generation.exists() else None,
    )
    seed = json.loads((fixture / "expected.json").read_text())["about"]["seed"]
    others = RECIPES[1:]
    order = [RECIPES[0]] + others[at % len(others):] + others[:at % len(others)]
    records = []
    for recipe in order:
        try:
            records.append(one(spec, fixture, recipe, seed, record))
        except Rejected as why:
            print(f"{spec.name}: {recipe} rejected: {why}", flush=True)
        if len(records) == 2:
            break
    if records:
        lines = ",\n".join(json.dumps(record) for record in records)
        (fixture / NAME).write_text(f"[\n{lines}\n]\n")
        print(f"{spec.name}: {[record['recipe']['experts'] for record in records]}", flush=True)
