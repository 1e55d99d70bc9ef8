"""The committed fixtures. Each covers an odd combination of features; README.md has the table."""

from spec import Spec, config

# Everything but the norms, the router and what is no matrix.
EVERY_MATRIX = r"^(?!.*(norm|mlp\.gate\.)).*weight$"
TEXT_PROMPT = "The hummingbird drinks while it hovers, and"

FIXTURES = [
    Spec(
        "tiny-text",
        config(
            vocab_size=360, hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=4, n_routed_experts=16, num_experts_per_tok=4, q_lora_rank=32,
            kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, index_head_dim=16, index_topk=24,
            indexer_types=["full", "full", "shared", "full"], eos_token_id=[0, 2],
        ),
        prompt=TEXT_PROMPT, new=32, score=48, generation_config={"eos_token_id": [0, 2]},
    ),
    # Explicit indexer_types; three shards dealt out at random, so that an expert's matrices straddle files.
    Spec(
        "bf16-shared",
        config(num_hidden_layers=5, index_topk=9, index_n_heads=33,
               indexer_types=["full", "shared", "shared", "full", "shared"], eos_token_id=[1, 7]),
        shards=3, scatter=True, prompt=21,
    ),
    # Fused blocks in two shards; the choice of indexer layers as a pattern; an epsilon that is seen.
    Spec(
        "f16-fused-pattern",
        config(num_hidden_layers=5, index_topk=7, index_topk_pattern="FSSFS", index_n_heads=35, index_head_dim=17,
               first_k_dense_replace=2, rope_parameters=None, rope_theta=500000.0, rms_norm_eps=0.05),
        dtype="f16", layout="fused", shards=2, prompt=18,
    ),
    # Fused blocks; full layers by frequency and offset; tied embeddings; no rope settings at all.
    Spec(
        "f32-fused-freq-tied",
        config(num_hidden_layers=5, index_topk=10, index_topk_freq=2, index_skip_topk_offset=1, tie_word_embeddings=True,
               rope_parameters=None, hidden_size=39, moe_intermediate_size=19, n_routed_experts=7,
               num_experts_per_tok=2, intermediate_size=41, q_lora_rank=21),
        dtype="f32", layout="fused", prompt=16,
    ),
    # One model over two directories, experts straddling them; the context never reaches index_topk.
    Spec(
        "bf16-split",
        config(index_topk=2048, n_routed_experts=9),
        dirs=["a", "b"], shards=4, scatter=True,
    ),
    # Every expert is chosen for every token, with unnormalised weights.
    Spec(
        "f32-all-experts",
        config(n_routed_experts=5, num_experts_per_tok=5, norm_topk_prob=False, routed_scaling_factor=0.7,
               moe_intermediate_size=33, hidden_size=41, index_topk=64, rms_norm_eps=0.02),
        dtype="f32",
    ),
    # Two shared experts, biases in attention, sparse from layer 0 on, fused blocks.
    Spec(
        "bf16-fused-bias",
        config(first_k_dense_replace=0, n_shared_experts=2, attention_bias=True, index_topk=11, num_attention_heads=5,
               num_key_value_heads=5, indexer_types=["full", "full", "shared"]),
        layout="fused", shards=2, prompt=25,
    ),
    # Several hundred tokens of prompt, DSA active from token 65 on.
    Spec(
        "f16-long",
        config(num_hidden_layers=4, index_topk=64, index_n_heads=32, indexer_types=["full", "shared", "full", "shared"],
               n_routed_experts=12, hidden_size=51, rope_parameters={"rope_theta": 1000000, "rope_type": "default"}),
        dtype="f16", prompt=300, new=16, score=0,
    ),
    # mlp_layer_types contradicts first_k_dense_replace and wins; generation stops at one eos of a list.
    Spec(
        "bf16-mlp-types",
        config(num_hidden_layers=4, mlp_layer_types=["sparse", "dense", "sparse", "dense"], first_k_dense_replace=3,
               index_topk=8, norm_topk_prob=False, routed_scaling_factor=1.3),
        prompt=14, new=24, eos_at=9, eos_in="list",
    ),
    # No indexer tensors: dense attention however long the context is.
    Spec(
        "f32-no-indexer",
        config(index_topk=8, first_k_dense_replace=0, kv_lora_rank=31, qk_rope_head_dim=10, index_head_dim=12, n_routed_experts=7,
               moe_intermediate_size=21),
        dtype="f32", shards=2, indexer=False, prompt=20,
    ),
    # The stop token is named by generation_config.json alone.
    Spec(
        "bf16-generation-eos",
        config(index_topk=6, indexer_types=["full", "shared", "full"], eos_token_id=3, num_experts_per_tok=1),
        prompt=15, new=24, eos_at=6, eos_in="generation",
    ),
    # Dtypes change from tensor to tensor and from expert to expert; an MTP layer with its own indexer; many indexer heads.
    Spec(
        "mixed-mtp",
        config(num_hidden_layers=3, index_topk=10, index_n_heads=64, num_nextn_predict_layers=1, eos_token_id=[1, 2, 5],
               indexer_types=["full", "full", "shared"]),
        dtype_of=[(r"layers\.1\.mlp\.experts\.[02468]\.", "f32"), (r"layers\.2\.mlp\.experts.*down_proj", "f16"),
                  (r"norm|mlp\.gate\.|lm_head", "f32"), (r"self_attn", "f16")],
        mtp=True, shards=2,
    ),
    # Like the public container with its MTP layer: int4 in groups of 64, that layer int8 and without an indexer. Its context is attended whole
    # while the others choose.
    Spec(
        "mtp-container",
        config(index_topk=12, hidden_size=70, moe_intermediate_size=34, kv_lora_rank=36, q_lora_rank=34, num_hidden_layers=2,
               n_routed_experts=5, indexer_types=["full", "shared"], vocab_size=97, num_nextn_predict_layers=1),
        dtype="f32",
        packed=[(r"mlp\.gate\.|norm", None), (r"embed_tokens|lm_head|layers\.2\.", "int8"), (r"proj|wq_b|wk", "int4-g64")],
        mtp=True, mtp_indexer=False, prompt=16,
    ),
    # Later drafts attend to what the first one chose; fused experts in the MTP layer, biases, tied embeddings. The context passes
    # index_topk in the prompt.
    Spec(
        "mtp-share",
        config(num_hidden_layers=2, index_topk=9, index_share_for_mtp_iteration=True, num_nextn_predict_layers=1,
               indexer_types=["full", "full"], attention_bias=True, tie_word_embeddings=True, n_routed_experts=6,
               vocab_size=83, first_k_dense_replace=1),
        dtype="f16", layout="fused", mtp=True, prompt=7,
    ),
    # Constructed: most drafts come true.
    Spec(
        "mtp-agrees",
        config(num_hidden_layers=2, index_topk=16, indexer_types=["full", "shared"], num_nextn_predict_layers=1, n_routed_experts=6,
               vocab_size=101, index_share_for_mtp_iteration=True),
        mtp=True, mtp_agrees=(0.7, 0.95), prompt=8, new=64, score=24,
    ),
    # The context passes index_topk while decoding, not in the prompt.
    Spec(
        "f16-crossing",
        config(num_hidden_layers=4, index_topk=16, index_n_heads=34, indexer_types=["full", "shared", "full", "full"],
               num_attention_heads=1, num_key_value_heads=1, qk_rope_head_dim=2, index_head_dim=3),
        dtype="f16", prompt=10, new=22, score=33,
    ),
    # As small as it gets: one layer, two experts, one chosen, one attended position, a prompt of one token.
    Spec(
        "f32-smallest",
        config(vocab_size=17, hidden_size=7, moe_intermediate_size=1, num_hidden_layers=1, num_attention_heads=1,
               num_key_value_heads=1, n_routed_experts=2, num_experts_per_tok=1, first_k_dense_replace=0, q_lora_rank=3,
               kv_lora_rank=1, qk_nope_head_dim=1, qk_rope_head_dim=2, v_head_dim=1, index_head_dim=2, index_topk=1,
               intermediate_size=1),
        dtype="f32", layout="fused", prompt=1, new=8, score=12,
    ),
    # The packed formats. Rows end in a short group, and mid-byte; a dense model's worth of each.
    Spec(
        "int8-row",
        config(index_topk=12, indexer_types=["full", "shared", "full"]),
        packed=[(EVERY_MATRIX, "int8")], shards=2, scatter=True, prompt=18,
    ),
    Spec(
        "int4-row",
        config(index_topk=11, hidden_size=71, q_lora_rank=37, n_shared_experts=2),
        packed=[(EVERY_MATRIX, "int4")], stamp=True, prompt=16,
    ),
    # 75 columns are groups of 64 and 11; 27 and 33 of 16, the last one short.
    Spec(
        "int4-grouped",
        config(index_topk=12, hidden_size=75, kv_lora_rank=33, moe_intermediate_size=90, q_lora_rank=70, n_routed_experts=7),
        packed=[(r"kv_b_proj|layers\.1\.mlp\.experts\.[135]\.", "int4-g16"), (EVERY_MATRIX, "int4-g64")], prompt=16,
    ),
    # Groups that are no power of two: 45 columns in 5 groups of 9, 27 in 3.
    Spec(
        "int4-odd-groups",
        config(index_topk=2048),
        packed=[(r"experts.*(gate|up|down)_proj", "int4-g9"), (EVERY_MATRIX, "int8")],
    ),
    Spec(
        "int2-row",
        config(index_topk=10, hidden_size=83, indexer_types=["full", "full", "shared"]),
        packed=[(EVERY_MATRIX, "int2")], prompt=16,
    ),
    # Like the public container: int8 embeddings and head, F32 norms, router and bias, the rest int4 with groups of 64; the
    # experts of one layer are int8, and one expert mixes formats.
    Spec(
        "container-mixed",
        config(index_topk=12, hidden_size=70, moe_intermediate_size=74, kv_lora_rank=36, q_lora_rank=66, num_hidden_layers=4,
               n_routed_experts=5, indexer_types=["full", "shared", "shared", "full"], vocab_size=97),
        dtype="f32",
        packed=[(r"mlp\.gate\.|norm", None), (r"embed_tokens|lm_head", "int8"), (r"layers\.3\.mlp\.experts", "int8"),
                (r"layers\.2\.mlp\.experts\.4\.down_proj", "int2"), (r"proj|wq_b|wk", "int4-g64")],
        shards=3, scatter=True, prompt=20,
    ),
    # Like the official FP8 checkpoint: more than one block each way, and blocks that heads and bands of rows cut.
    Spec(
        "fp8-block",
        config(index_topk=12, hidden_size=133, intermediate_size=140, moe_intermediate_size=27, num_hidden_layers=2,
               num_attention_heads=6, num_key_value_heads=6, n_routed_experts=6, indexer_types=["full", "full"], vocab_size=97),
        packed=[(r"embed_tokens|lm_head|norm|mlp\.gate\.|eh_proj|weights_proj", None), (r"proj|wq_b|wk", "fp8")],
        prompt=18,
    ),
    # Grouped-query attention: three query heads a key head, sparse from layer 0, older rope keys.
    Spec(
        "qwen3-bf16",
        config("qwen3_moe", num_hidden_layers=4, rope_parameters=None, rope_theta=1000000.0, rope_scaling=None, mlp_only_layers=[],
               decoder_sparse_step=1, sliding_window=None, use_sliding_window=False, max_window_layers=4),
        shards=2, scatter=True, prompt=21,
    ),
    # Biases, one head of keys, dense layers by both keys, unnormalised weights, fused and tied, a prompt of several pages.
    Spec(
        "qwen3-f16-dense-bias",
        config("qwen3_moe", num_hidden_layers=5, mlp_only_layers=[3], decoder_sparse_step=2, attention_bias=True, norm_topk_prob=False,
               num_attention_heads=5, num_key_value_heads=1, head_dim=18, tie_word_embeddings=True, num_experts=7, eos_token_id=[1, 3],
               rms_norm_eps=0.02),
        dtype="f16", layout="fused", prompt=150, new=16, score=0,
    ),
    # Packed experts and attention; as many heads of keys as of queries, whose width follows from hidden_size.
    Spec(
        "qwen3-int4",
        config("qwen3_moe", hidden_size=72, num_attention_heads=4, num_key_value_heads=4, head_dim=None, num_experts=6, moe_intermediate_size=34),
        dtype="f32", packed=[(r"mlp\.gate\.|norm", None), (r"embed_tokens|lm_head", "int8"), (r"proj", "int4-g64")], prompt=16,
    ),
    # Half of each head rotated by default, biases, no norms of queries; unfused, several shards.
    Spec(
        "glm4-bf16",
        config("glm4_moe", num_hidden_layers=4, attention_bias=True, partial_rotary_factor=None, rope_parameters=None, rope_theta=1000000,
               num_nextn_predict_layers=1),
        shards=2, prompt=20,
    ),
    # Norms of queries, twelve query heads a key head, two shared experts, fused; a layer for drafts.
    Spec(
        "glm4-mtp",
        config("glm4_moe", num_hidden_layers=3, use_qk_norm=True, num_attention_heads=12, num_key_value_heads=1, head_dim=12, n_shared_experts=2,
               norm_topk_prob=False, n_routed_experts=6, num_nextn_predict_layers=1,
               rope_parameters={"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.34}),
        dtype="f16", layout="fused", mtp=True, prompt=70,
    ),
    # A norm over all heads, unnormalised weights; as many heads of keys as of queries.
    Spec("olmoe-bf16", config("olmoe", norm_topk_prob=False, clip_qkv=None, eos_token_id=[1, 4]), shards=2, scatter=True, prompt=19),
    # The same with shared heads of keys, biases and normalised weights, fused.
    Spec(
        "olmoe-f32-fused",
        config("olmoe", hidden_size=60, num_attention_heads=6, num_key_value_heads=2, attention_bias=True, num_experts=7),
        dtype="f32", layout="fused", prompt=75, new=12,
    ),
    # Experts named w1, w2 and w3, a part of each head rotated by the older key, a norm over all heads.
    Spec("minimax-bf16", config("minimax_m2", num_hidden_layers=4), shards=2, scatter=True, prompt=22),
    # As published: FP8 with blocks that heads cut.
    Spec(
        "minimax-fp8",
        config("minimax_m2", hidden_size=133, num_attention_heads=6, num_key_value_heads=3, head_dim=20, rotary_dim=None, num_hidden_layers=2,
               num_local_experts=6, vocab_size=97,
               rope_parameters={"rope_theta": 5000000, "rope_type": "default", "partial_rotary_factor": 0.5}),
        packed=[(r"embed_tokens|lm_head|norm|block_sparse_moe\.gate\.", None), (r"proj|w[123]\.weight", "fp8")],
        prompt=18,
    ),
    # As published: MXFP4 experts in pairs of gate and up, biases, sinks, windows in every other layer, YaRN.
    Spec(
        "gpt-oss-mxfp4",
        config("gpt_oss", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
               quantization_config={"quant_method": "mxfp4"}),
        layout="fused", packed=[(r"experts\.(gate_up|down)_proj$", "mxfp4")], shards=2, prompt=90, new=16, score=0,
    ),
    # Fine-tuned models are in BF16, with matrices by inputs.
    Spec("gpt-oss-bf16", config("gpt_oss", num_hidden_layers=2, swiglu_alpha=1.3, sliding_window=9), layout="fused", prompt=30),
    # Windows by default, one head of keys, a short last block of codes, other biases.
    Spec(
        "gpt-oss-window",
        config("gpt_oss", num_hidden_layers=3, hidden_size=64, intermediate_size=32, num_attention_heads=5, num_key_value_heads=1, head_dim=18,
               num_local_experts=4, num_experts_per_tok=1, sliding_window=70, tie_word_embeddings=True),
        layout="fused", packed=[(r"experts\.(gate_up|down)_proj$", "mxfp4")], prompt=140, new=12, score=0,
    ),
    # A chat template and a tokenizer for many scripts; the answer ends at a token that generation_config.json alone names.
    Spec(
        "chat",
        config(vocab_size=700, num_hidden_layers=2, index_topk=32, eos_token_id=0, n_routed_experts=6, indexer_types=["full", "full"]),
        prompt="chat", new=24, eos_at=12, eos_in="generation",
    ),
    # Other families. DeepSeek-V3 as published: older rope keys, YaRN, groups of experts, an MTP layer.
    Spec(
        "deepseek-v3",
        config("deepseek_v3", num_nextn_predict_layers=1, rope_parameters=None, rope_theta=10000,
               rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
                             "mscale": 1.0, "mscale_all_dim": 1.0},
               qk_rope_head_dim=12, max_position_embeddings=2560, rms_norm_eps=1e-6),
        shards=2, mtp=True, prompt=100, new=16, score=0,
    ),
    # The same family with whole queries and newer rope keys: YaRN that changes amplitudes and blends fractions of pairs; groups of two.
    Spec(
        "deepseek-v3-whole-queries",
        config("deepseek_v3", q_lora_rank=None, qk_rope_head_dim=10, n_routed_experts=10, n_group=5, topk_group=2, num_experts_per_tok=3,
               rope_parameters={"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 32,
                                "beta_fast": 4, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.2},
               max_position_embeddings=128, attention_bias=True, tie_word_embeddings=True, first_k_dense_replace=0, num_hidden_layers=2,
               norm_topk_prob=False, routed_scaling_factor=1.1, vocab_size=89) | {"q_lora_rank": None},
        dtype="f16", layout="fused", shards=2, prompt=40,
    ),
    # As published: YaRN whose range is one pair wide, all experts in one group, more sparse layers than dense ones.
    Spec(
        "kimi-k2",
        config("kimi_k2", rope_parameters=None, rope_theta=50000.0, n_routed_experts=11, num_experts_per_tok=4, routed_scaling_factor=2.827,
               rope_scaling={"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 48, "beta_fast": 1.0, "beta_slow": 1.0,
                             "mscale": 1.0, "mscale_all_dim": 1.0},
               qk_rope_head_dim=8, max_position_embeddings=3072, num_nextn_predict_layers=0, rms_norm_eps=1e-6, eos_token_id=2),
        shards=3, scatter=True, prompt=60, new=12, score=0,
    ),
    # The language model of a multimodal checkpoint.
    Spec(
        "kimi-k25-text",
        config("kimi_k25", num_hidden_layers=2, vocab_size=83, n_routed_experts=6, hidden_size=39, rope_parameters=None, rope_theta=50000.0),
        dtype="f32", prompt=9, new=12, score=20,
    ),
    # Kinds of layers by their list, newer rope keys, an MTP layer.
    Spec(
        "glm4-moe-lite",
        config("glm4_moe_lite", first_k_dense_replace=None, mlp_layer_types=["dense", "sparse", "sparse"], num_nextn_predict_layers=1,
               num_experts_per_tok=4, routed_scaling_factor=1.8, rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
               eos_token_id=[1, 7]),
        shards=2, mtp=True, prompt=20, new=16, score=30,
    ),
    # As published: an indexer in every layer, rotated in halves, and in the MTP layer; the indexer's pairs are scaled by YaRN too.
    Spec(
        "deepseek-v32",
        config("deepseek_v32", index_topk=14, index_n_heads=33, index_head_dim=17, num_nextn_predict_layers=1, rope_parameters=None,
               rope_theta=10000,
               rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
                             "mscale": 1.0, "mscale_all_dim": 1.0},
               qk_rope_head_dim=10, max_position_embeddings=1280, rms_norm_eps=1e-6),
        shards=2, mtp=True, prompt=40, new=12, score=0,
    ),
]
