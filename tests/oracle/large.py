"""Models for measuring, without expected.json: one with more expert bytes than a cache holds, and one whose drafts come true."""

from pathlib import Path

import torch

import store
import weights
from reference import blank
from spec import Spec, config

LARGE = Spec(
    "large",
    config(
        vocab_size=512, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=576, num_hidden_layers=7,
        num_attention_heads=8, num_key_value_heads=8, n_routed_experts=64, num_experts_per_tok=4, q_lora_rank=256,
        kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, index_head_dim=32,
    ),
)

DRAFTS = Spec(
    "drafts",
    config(
        vocab_size=512, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=20,
        num_attention_heads=8, num_key_value_heads=8, n_routed_experts=16, num_experts_per_tok=4, q_lora_rank=128,
        kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, index_head_dim=32, num_nextn_predict_layers=1,
    ),
    mtp=True, mtp_agrees=(0.0, 1.0),
)


def write_large(out: Path) -> None:
    """Writes one shard a layer: six sparse layers of 64 experts of 3.5 MB each in BF16, 1.36 GB in all."""
    with torch.device("meta"):
        shapes = weights.shapes(blank(LARGE), LARGE)
    groups: dict[str, list] = {}
    for name in shapes:
        parts = name.split(".")
        groups.setdefault(parts[2] if parts[1] == "layers" else "rest", []).append(name)
    out.mkdir(parents=True, exist_ok=True)
    generator, weight_map = torch.Generator().manual_seed(1), {}
    for i, names in enumerate(groups.values()):
        file = f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
        shard = {
            part: tensor.to(weights.stored_dtype(part, LARGE)).contiguous()
            for name in names
            for part, tensor in weights.unfuse(name, weights.draw(name, shapes[name], generator, False), LARGE)
        }
        store.write_shard(out / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
        print(f"{out / file}: {sum(t.nbytes for t in shard.values()) >> 20} MiB", flush=True)
    store.write_json(out / store.INDEX, {"metadata": {}, "weight_map": weight_map})
    store.write_json(out / "config.json", LARGE.config)


def write_drafts(out: Path) -> None:
    """Writes 20 layers, of which 19 are sparse with 16 experts of 0.8 MB each in BF16, and an MTP layer that mostly agrees with them: 0.3 GB."""
    torch.manual_seed(1)
    out.mkdir(parents=True, exist_ok=True)
    store.write_weights(out, weights.make(blank(DRAFTS), DRAFTS, 1), DRAFTS)
    store.write_json(out / "config.json", DRAFTS.config)
