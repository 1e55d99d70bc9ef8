"""Random weights under the checkpoint's names, scaled so that every part of the model matters to the logits."""

import math
import re

import torch

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def gain(name: str) -> float:
    """Standard deviation of a matrix's output for a unit-variance input.

    Chosen so that attention is neither flat nor one-hot, sigmoid scores of the router spread over (0.1, 0.9),
    each block adds about as much as the residual stream holds, and logits are of order 1 to 10. The indexer's keys
    are tiny before their norm, so that its epsilon shows.
    """
    for part, value in [
        ("indexer.wk.", 0.003), ("lm_head", 3.0), ("mlp.gate.weight", 1.5), ("mlp.router.weight", 1.5), ("weights_proj", 2.0), ("q_b_proj", 2.0),
        ("kv_b_proj", 1.5), ("experts", 1.6), ("mlp.", 1.3), ("o_proj", 1.5),
    ]:
        if part in name:
            return value
    return 1.0


def draw(name: str, shape: torch.Size, generator: torch.Generator, tied: bool) -> torch.Tensor:
    """One tensor in f32."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.15 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if len(shape) == 1:
        return 1.0 + 0.25 * noise
    if name.endswith("embed_tokens.weight"):
        return noise * (3.0 / math.sqrt(shape[-1]) if tied else 1.0)
    return noise * gain(name) / math.sqrt(shape[-1])


def stored_dtype(name: str, spec) -> torch.dtype:
    """The dtype a tensor is stored in."""
    if name.endswith("e_score_correction_bias"):
        return torch.float32
    for pattern, dtype in spec.dtype_of:
        if re.search(pattern, name):
            return DTYPES[dtype]
    return DTYPES[spec.dtype]


def formats(tensors: dict[str, torch.Tensor], spec) -> dict[str, str]:
    """The packed formats of a checkpoint's matrices, by name."""
    out = {}
    for name, tensor in tensors.items():
        found = next((format for pattern, format in spec.packed if re.search(pattern, name)), None)
        if found and (tensor.dim() == 2 or found == "mxfp4"):
            out[name] = found
    return out


def shapes(model: torch.nn.Module, spec) -> dict[str, torch.Size]:
    """Names and shapes as stored, from the library's own state_dict (so experts are fused there)."""
    out = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and spec.text.get("tie_word_embeddings"):
            continue
        if ".indexer." in name and not spec.indexer:
            continue
        out[name] = tensor.shape
    if spec.mtp:
        out.update(mtp_shapes(out, spec))
    return out


def mtp_shapes(main: dict[str, torch.Size], spec) -> dict[str, torch.Size]:
    """The MTP layer: attention like layer 0, experts like the first sparse layer, and its own norms and projection."""
    cfg = spec.text
    layer, hidden = cfg["num_hidden_layers"], cfg["hidden_size"]
    sparse = next(i for i in range(layer) if f"model.layers.{i}.mlp.gate.weight" in main)
    own, out = f"model.layers.{layer}.", {}
    for name, shape in main.items():
        for i, part in ((0, "self_attn."), (0, "input_layernorm."), (0, "post_attention_layernorm."), (sparse, "mlp.")):
            prefix = f"model.layers.{i}."
            if name.startswith(prefix + part) and (spec.mtp_indexer or ".indexer." not in name):
                out[own + name[len(prefix):]] = shape
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        out[f"{own}{norm}.weight"] = torch.Size([hidden])
    out[f"{own}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    return out


def make(model: torch.nn.Module, spec, seed: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, in their stored layout and dtype."""
    generator = torch.Generator().manual_seed(seed)
    tied = bool(spec.text.get("tie_word_embeddings"))
    out = {}
    drawn = {name: draw(name, shape, generator, tied) for name, shape in shapes(model, spec).items()}
    if spec.mtp_agrees:
        make_predictable(drawn, spec, generator)
    for name, tensor in drawn.items():
        for part, tensor in unfuse(name, tensor, spec):
            out[part] = tensor.to(stored_dtype(part, spec)).contiguous()
    return out


def make_predictable(drawn: dict[str, torch.Tensor], spec, generator: torch.Generator) -> None:
    """Makes the head name the successor of the token whose embedding it sees, lets every block add little to that embedding, and makes the MTP
    layer pass it on. Successors are a circle through all tokens from 3 on, so that no stop token is due."""
    embed, head = drawn["model.embed_tokens.weight"], drawn["lm_head.weight"]
    vocab, hidden = embed.shape
    circle = 3 + torch.randperm(vocab - 3, generator=generator)
    head *= 0.2
    head[circle.roll(-1)] += embed[circle] * (3.0 / math.sqrt(hidden))
    for name, tensor in drawn.items():
        if re.search(r"o_proj|down_proj", name):
            tensor *= 0.2
    own = f"model.layers.{spec.config['num_hidden_layers']}."
    drawn[f"{own}eh_proj.weight"] *= 0.2
    drawn[f"{own}eh_proj.weight"][:, :hidden] += torch.eye(hidden)


def unfuse(name: str, tensor: torch.Tensor, spec, layout: str | None = None):
    """Yields a tensor of the library under its published name, and a fused expert block as the tensors of single experts."""
    family = spec.family
    if (layout or spec.layout) == "fused" or not re.search(r"\.experts\.(gate_up|down)_proj$", name):
        yield family.published(name), tensor
        return
    base, kind = name.rsplit(".", 1)
    gate, up, down = family.experts
    for e, block in enumerate(tensor):
        if kind == "down_proj":
            parts = [(down, block)]
        else:
            parts = zip((gate, up), block.chunk(2))
        for part, matrix in parts:
            yield family.published(f"{base}.{e}.{part}.weight"), matrix
