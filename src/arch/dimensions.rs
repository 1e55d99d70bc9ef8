//! Names the dimensions of a model that can be changed, and finds their keys in a config.

use serde_json::Value;

/// A dimension of a model to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dimension {
    /// Decoder layers.
    Layers,
    /// The first so many have a dense MLP.
    DenseLayers,
    /// Width of the residual.
    Hidden,
    /// Width of a dense layer's MLP.
    Intermediate,
    /// Width of an expert.
    MoeIntermediate,
    /// Routed experts of a layer.
    Experts,
    /// Experts that a token uses.
    TopK,
    /// Shared experts.
    SharedExperts,
    /// Attention heads.
    Heads,
    /// Heads of keys and values.
    KvHeads,
    /// Dimensions of a head.
    HeadDim,
    /// Rank of the queries.
    QueryRank,
    /// Rank of keys and values.
    KvRank,
    /// Dimensions of a head's key without position.
    NopeHeadDim,
    /// Dimensions of a head's key with position.
    RopeHeadDim,
    /// Dimensions of a head's value.
    ValueHeadDim,
    /// Tokens of the vocabulary.
    Vocab,
    /// Positions that sparse attention attends to; 0 for dense attention without an indexer.
    IndexTopK,
    /// Heads of the indexer.
    IndexHeads,
    /// Dimensions of the indexer's heads.
    IndexHeadDim,
}

impl Dimension {
    /// The keys that families have for it.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Dimension::Layers => &["num_hidden_layers"],
            Dimension::DenseLayers => &["first_k_dense_replace"],
            Dimension::Hidden => &["hidden_size"],
            Dimension::Intermediate => &["intermediate_size"],
            Dimension::MoeIntermediate => &["moe_intermediate_size"],
            Dimension::Experts => &["n_routed_experts", "num_experts", "num_local_experts"],
            Dimension::TopK => &["num_experts_per_tok"],
            Dimension::SharedExperts => &["n_shared_experts"],
            Dimension::Heads => &["num_attention_heads"],
            Dimension::KvHeads => &["num_key_value_heads"],
            Dimension::HeadDim => &["head_dim"],
            Dimension::QueryRank => &["q_lora_rank"],
            Dimension::KvRank => &["kv_lora_rank"],
            Dimension::NopeHeadDim => &["qk_nope_head_dim"],
            Dimension::RopeHeadDim => &["qk_rope_head_dim"],
            Dimension::ValueHeadDim => &["v_head_dim"],
            Dimension::Vocab => &["vocab_size"],
            Dimension::IndexTopK => &["index_topk"],
            Dimension::IndexHeads => &["index_n_heads"],
            Dimension::IndexHeadDim => &["index_head_dim"],
        }
    }

    /// Sets the key that `config` has for it. `None` where it has none.
    pub(super) fn set(self, config: &mut Value, value: u64) -> Option<()> {
        let key = self.keys().iter().find(|key| config.get(**key).is_some())?;
        let before = config[*key].take();
        config[*key] = value.into();
        // Where every head has its own keys and values, they stay as many.
        if self == Dimension::Heads && config["num_key_value_heads"] == before {
            config["num_key_value_heads"] = value.into();
        }
        // A list has an entry for each layer of the published model.
        if self == Dimension::Layers {
            for list in ["layer_types", "mlp_layer_types", "indexer_types"] {
                config.as_object_mut()?.remove(list);
            }
        }
        Some(())
    }
}
