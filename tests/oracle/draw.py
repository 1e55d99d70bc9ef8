"""Draws random fixture specifications of the kinds that the committed fixtures have."""

import random

from spec import Spec, config


def indexer_keys(r: random.Random, layers: int) -> dict:
    """One of the ways a config.json says which layers choose and which reuse a choice."""
    types = ["full"] + [r.choice(["full", "shared"]) for _ in range(layers - 1)]
    return r.choice([
        {},
        {"indexer_types": types},
        {"index_topk_pattern": "".join(t[0].upper() for t in types)},
        {"index_topk_freq": r.randint(1, 4), "index_skip_topk_offset": r.randint(1, 3)},
    ])


def mlp_keys(r: random.Random, layers: int) -> dict:
    """Which layers are sparse; at least one is."""
    if r.random() < 0.5:
        return {"first_k_dense_replace": r.randint(0, layers - 1)}
    types = [r.choice(["dense", "sparse"]) for _ in range(layers)]
    types[r.randrange(layers)] = "sparse"
    return {"mlp_layer_types": types}


def rope_keys(r: random.Random) -> dict:
    theta = r.choice([10000, 50000.0, 1000000])
    return r.choice([
        {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}},
        {"rope_parameters": None, "rope_theta": theta},
        {"rope_parameters": None},
    ])


def storage(r: random.Random, seed: int, cfg: dict, prompt: int, long: bool, **changes) -> Spec:
    """How a model is stored and what is asked of it."""
    new = r.randint(4, 28)
    names = ["bf16", "f16", "f32"]
    dtype_of = [(part, r.choice(names)) for part in (r"experts", r"self_attn", r"norm", r"") if r.random() < 0.25]
    dirs = r.choice([[""], [""], ["a", "b"]])
    stops = r.random() < 0.3
    spec = dict(
        dtype=r.choice(names), dtype_of=dtype_of, layout=r.choice(["per-expert", "fused"]), dirs=dirs, shards=r.randint(len(dirs), 5),
        scatter=r.random() < 0.5, prompt=prompt, new=new, score=0 if long else r.randint(2, 60),
        eos_at=r.randrange(new) if stops else None, eos_in=r.choice(["config", "list", "generation"]),
    )
    return Spec(f"random-{seed}", cfg, **spec | changes)


def grouped_query(seed: int, family: str) -> Spec:
    """A random model of a family with grouped-query attention."""
    r = random.Random(f"{family} {seed}")
    layers, experts, kv = r.randint(1, 5), r.randint(2, 20), r.randint(1, 4)
    heads, width = kv * r.randint(1, 5), 2 * r.randint(1, 12)
    long = r.random() < 0.2
    prompt = r.randint(150, 260) if long else r.randint(1, 40)
    expert = r.randint(3, 60)
    keys = dict(
        vocab_size=r.randint(20, 300), hidden_size=r.randint(9, 90), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=width, num_experts_per_tok=r.randint(1, min(experts, 6)),
        rms_norm_eps=r.choice([1e-5, 1e-6, 0.02]), tie_word_embeddings=r.random() < 0.25, eos_token_id=r.choice([2, [1, 2]]),
    )
    normalised, biases = {"norm_topk_prob": r.random() < 0.6}, {"attention_bias": r.random() < 0.4}
    more, theta = {}, r.choice([10000, 50000.0, 1000000])
    share = r.choice([1.0, 0.5])
    if int(width * share) % 2:
        share = 1.0
    rope = {"rope_theta": theta, "rope_type": "default"}
    if r.random() < 0.3:
        rope = {"rope_theta": theta, "rope_type": "yarn", "factor": r.choice([4.0, 16.0]), "original_max_position_embeddings": r.choice([32, 256])}
    partial = {"rope_parameters": rope | {"partial_rotary_factor": share}}
    whole = {"rope_parameters": rope}
    if family == "qwen3_moe":
        dense = [i for i in range(layers) if r.random() < 0.3][:layers - 1]
        keys |= normalised | biases | whole | {
            "num_experts": experts, "moe_intermediate_size": expert, "intermediate_size": r.randint(5, 120), "mlp_only_layers": dense}
    elif family == "olmoe":
        width = r.randint(1, 12)
        keys |= normalised | biases | whole | {
            "num_experts": experts, "intermediate_size": expert, "hidden_size": heads * 2 * width, "head_dim": None}
    elif family == "glm4_moe":
        keys |= normalised | biases | partial | {
            "n_routed_experts": experts, "moe_intermediate_size": expert, "intermediate_size": r.randint(5, 120),
            "first_k_dense_replace": r.randint(0, layers - 1), "n_shared_experts": r.randint(1, 3), "use_qk_norm": r.random() < 0.5,
            "routed_scaling_factor": r.choice([1.0, 2.5]), "partial_rotary_factor": None}
        more["mtp"] = r.random() < 0.3
    elif family == "minimax_m2":
        keys |= partial | {"num_local_experts": experts, "intermediate_size": expert, "rotary_dim": None}
        if rope["rope_type"] == "default" and r.random() < 0.5:
            keys |= {"rope_parameters": None, "rope_theta": theta, "rotary_dim": 2 * r.randint(1, width // 2)}
    else:
        keys |= biases | whole | {
            "rope_theta": None, "rope_scaling": None, "num_local_experts": experts, "hidden_size": 32 * r.randint(1, 3),
            "intermediate_size": 32 * r.randint(1, 3), "sliding_window": r.choice([1, 3, 64, 100]), "swiglu_limit": r.choice([0.7, 7.0]),
            "layer_types": [r.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]}
        packed = [(r"experts\.(gate_up|down)_proj$", "mxfp4")] if r.random() < 0.7 else []
        more |= {"layout": "fused", "packed": packed}
    return storage(r, seed, config(family, **keys), prompt, long, **more)


GROUPED_QUERY = ["qwen3_moe", "olmoe", "glm4_moe", "minimax_m2", "gpt_oss"]


def random_spec(seed: int, family: str | None = None) -> Spec:
    """The specification of fixture `random-SEED`, by default of the family with sparse attention."""
    if family in GROUPED_QUERY:
        return grouped_query(seed, family)
    r = random.Random(seed)
    layers, heads, rope = r.randint(1, 5), r.randint(1, 6), 2 * r.randint(1, 6)
    experts = r.randint(2, 20)
    long = r.random() < 0.2
    prompt = r.randint(150, 260) if long else r.randint(1, 40)
    eos_in = r.choice(["config", "list", "generation"])
    indexer = r.random() < 0.85
    eos = r.choice([2, [1, 2]])
    cfg = config(
        vocab_size=r.randint(20, 300), hidden_size=r.randint(9, 90), intermediate_size=r.randint(5, 120),
        moe_intermediate_size=r.randint(3, 60), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, n_routed_experts=experts, num_experts_per_tok=r.randint(1, min(experts, 6)),
        n_shared_experts=r.randint(1, 3), norm_topk_prob=r.random() < 0.6,
        routed_scaling_factor=r.choice([1.0, 2.5, round(r.uniform(0.5, 3.0), 3)]), q_lora_rank=r.randint(4, 48),
        kv_lora_rank=r.randint(4, 48), qk_nope_head_dim=r.randint(3, 24), qk_rope_head_dim=rope,
        v_head_dim=r.randint(3, 24), index_n_heads=r.randint(32, 48), index_head_dim=rope + r.randint(0, 14),
        index_topk=r.choice([2048, r.randint(2, 40) if not long else r.randint(30, 80)]),
        rms_norm_eps=r.choice([1e-5, 1e-6, 0.02]), attention_bias=r.random() < 0.3, tie_word_embeddings=r.random() < 0.25,
        eos_token_id=eos, **indexer_keys(r, layers), **mlp_keys(r, layers), **rope_keys(r),
    )
    new = r.randint(4, 28)
    names = ["bf16", "f16", "f32"]
    dtype_of = [(part, r.choice(names)) for part in (r"experts", r"self_attn", r"norm", r"") if r.random() < 0.25]
    dirs = r.choice([[""], [""], ["a", "b"]])
    stops = r.random() < 0.3
    return Spec(
        f"random-{seed}", cfg, dtype=r.choice(names), dtype_of=dtype_of, layout=r.choice(["per-expert", "fused"]),
        dirs=dirs, shards=r.randint(len(dirs), 5), scatter=r.random() < 0.5, prompt=prompt, new=new,
        score=0 if long else r.randint(2, 60), eos_at=r.randrange(new) if stops else None, eos_in=eos_in,
        indexer=indexer, mtp=r.random() < 0.2, mtp_indexer=r.random() < 0.6,
    )
