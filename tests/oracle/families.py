"""The families: a small config.json of each, the library's class, and how published names differ from the library's.

A family is one entry of FAMILIES. Sizes are odd wherever the architecture lets them be, so that no kernel can lean on a multiple of its lane
count.
"""

import re
from dataclasses import dataclass, field
from typing import Callable

import torch


def sigmoid_choice(router, args, logits: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Sigmoid scores with a selection bias; with groups, the groups are a choice too, and the experts one among those kept."""
    scores = logits.sigmoid() + router.e_score_correction_bias
    groups, keep = router.num_group, router.topk_group
    if groups == 1:
        return [(scores, router.top_k)]
    by_group = scores.view(len(scores), groups, -1)
    of_group = by_group.topk(2, dim=-1).values.sum(-1)
    kept = of_group.topk(keep, dim=-1).indices
    among = by_group.gather(1, kept[..., None].expand(-1, -1, by_group.shape[-1])).flatten(1)
    return [(of_group, keep), (among, router.top_k)]


def logit_choice(router, args, logits: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """The largest logits: the order of softmax probabilities."""
    return [(logits, router.top_k)]


def biased_choice(router, args, logits: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Sigmoid scores with a selection bias that the router is given."""
    return [(logits.sigmoid() + args[1], router.top_k)]


@dataclass(frozen=True)
class Family:
    """One family.

    base: a small config.json. library: `model_type` of the class that the library loads it with, if it is another.
    choice: what a router chooses among, as (values [tokens, candidates], how many); `args` are those of its forward, `logits` its first output.
    experts: names of gate, up and down below `experts.N.` in published checkpoints.
    unwrap: what takes the published name's prefix off for the library, as (regular expression: replacement).
    converts: whether `convert` takes its experts.
    rename: (regular expression, replacement) pairs that make a published name of the library's (experts are single by then).
    """

    base: dict
    library: str | None = None
    choice: Callable = sigmoid_choice
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    rename: list = field(default_factory=list)
    unwrap: dict | None = None
    converts: bool = True

    def published(self, name: str) -> str:
        """The name in a published checkpoint."""
        for pattern, replacement in self.rename:
            name = re.sub(pattern, replacement, name)
        return name


# Sizes that all families share.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 45,
    "intermediate_size": 77,
    "moe_intermediate_size": 27,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}

# Routing, and multi-head latent attention.
MLA = SIZES | {
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 29,
    "kv_lora_rank": 23,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "v_head_dim": 13,
}

# Grouped-query attention with the keys of Qwen3.
GQA = SIZES | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}

GLM4 = GQA | {
    "num_experts": None,
    "head_dim": 20,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
}

# Heads follow from hidden_size, and all layers are sparse.
OLMOE = GQA | {"num_experts": 9, "hidden_size": 54, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None, "moe_intermediate_size": None, "intermediate_size": 27}

MINIMAX = GQA | {"num_experts": None, "num_local_experts": 9, "moe_intermediate_size": None, "intermediate_size": 27, "norm_topk_prob": None, "rotary_dim": 6}

# Multiples of 32, as groups of MXFP4 are. The limit is one that values reach.
GPT_OSS = GQA | {
    "num_experts": None,
    "num_local_experts": 7,
    "moe_intermediate_size": None,
    "norm_topk_prob": None,
    "hidden_size": 96,
    "intermediate_size": 64,
    "sliding_window": 5,
    "swiglu_limit": 1.5,
    "rope_theta": 150000,
    "rope_parameters": None,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 64, "rope_type": "yarn", "truncate": False},
}

INDEXER = {"index_n_heads": 32, "index_head_dim": 14, "index_topk": 2048}

REST = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def base(model_type: str, architecture: str, *parts: dict) -> dict:
    out = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        out |= part
    return {key: value for key, value in out.items() if value is not None}


KIMI = base("kimi_k2", "DeepseekV3ForCausalLM", MLA, REST)

FAMILIES = {
    "glm_moe_dsa": Family(base("glm_moe_dsa", "GlmMoeDsaForCausalLM", MLA, INDEXER, REST)),
    "deepseek_v3": Family(base("deepseek_v3", "DeepseekV3ForCausalLM", MLA, {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}, REST)),
    "deepseek_v32": Family(
        base("deepseek_v32", "DeepseekV32ForCausalLM", MLA, INDEXER, {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}, REST)
    ),
    "kimi_k2": Family(KIMI, library="deepseek_v3"),
    # The language model of a multimodal checkpoint: keys in an object, names with a prefix.
    "kimi_k25": Family(
        {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": KIMI, "tie_word_embeddings": False,
         "eos_token_id": 1},
        library="deepseek_v3", rename=[(r"^(?=model\.|lm_head)", "language_model.")], unwrap={r"^language_model\.": ""},
    ),
    "glm4_moe_lite": Family(base("glm4_moe_lite", "Glm4MoeLiteForCausalLM", MLA, REST)),
    "glm4_moe": Family(base("glm4_moe", "Glm4MoeForCausalLM", GLM4, REST)),
    "gpt_oss": Family(base("gpt_oss", "GptOssForCausalLM", REST, GPT_OSS, {"attention_bias": True}), choice=logit_choice, converts=False),
    "minimax_m2": Family(
        base("minimax_m2", "MiniMaxM2ForCausalLM", MINIMAX, REST), choice=biased_choice, experts=("w1", "w3", "w2"),
        rename=[(r"\.mlp\.", ".block_sparse_moe.")],
    ),
    "olmoe": Family(base("olmoe", "OlmoeForCausalLM", OLMOE, REST), choice=logit_choice),
    "qwen3_moe": Family(base("qwen3_moe", "Qwen3MoeForCausalLM", GQA, REST), choice=logit_choice),
}


def of(config: dict) -> Family:
    """The family of a config.json."""
    return FAMILIES[config["model_type"]]
