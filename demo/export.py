"""Writes a trained model as a Hugging Face checkpoint: one tensor an expert and matrix, the MTP layer included.

    python export.py DATA RUN OUT

`colibri-uring convert OUT CONTAINER --experts int4-g64 --dense int4-g64 --mtp int4-g64` makes the container of it.
"""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from model import Model, Shape


def config(s: Shape) -> dict:
    own = {k: v for k, v in asdict(s).items() if k not in ("rope_theta", "indexer_types")}
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", **own,
        "num_key_value_heads": s.num_attention_heads, "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": s.rope_theta, "rope_type": "default"}, "eos_token_id": 0,
        "num_nextn_predict_layers": 1, "indexer_types": s.indexer_types[: s.num_hidden_layers],
    }


def tensors(model: Model) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.float()
        base = "model." + name
        if name.endswith("experts.gate_up"):
            for e, (gate, up) in enumerate(tensor):
                prefix = f"{base.removesuffix('gate_up')}{e}."
                out[prefix + "gate_proj.weight"], out[prefix + "up_proj.weight"] = gate.contiguous(), up.contiguous()
        elif name.endswith("experts.down"):
            for e, down in enumerate(tensor):
                out[f"{base.removesuffix('down')}{e}.down_proj.weight"] = down.contiguous()
        else:
            out[base] = tensor.contiguous()
    return out


def load(run: Path) -> Model:
    """The model of the last checkpoint."""
    model = Model(Shape())
    model.load_state_dict(torch.load(run / "checkpoint.pt")["model"])
    return model.eval()


def main() -> None:
    data, run, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    model = load(run)
    save_file(tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(model.s), indent=1) + "\n")
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [0], "do_sample": True, "temperature": 0.7, "top_p": 0.95}) + "\n")
    shutil.copy(data / "tokenizer.json", out)


if __name__ == "__main__":
    main()
