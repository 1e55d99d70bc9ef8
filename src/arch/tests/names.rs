//! Names and ids of tensors, in both directions.

use crate::arch::tests::example;
use crate::arch::{Part, Prediction, Projection, Shape, TensorId, parse_any};

#[test]
fn every_tensor_is_found_again_by_its_name() {
    let mut arch = example();
    arch.prediction = Some(Prediction { indexer: true });
    let mut ids = vec![TensorId::Embedding, TensorId::Norm, TensorId::Head];
    for layer in 0..arch.layers() {
        let parts = arch.parts(layer).into_iter();
        ids.extend(parts.map(|part| TensorId::Layer(layer, part)));
        ids.extend([TensorId::FusedGateUp(layer), TensorId::FusedDown(layer)]);
        for expert in 0..arch.experts.count as u32 {
            ids.extend(Projection::ALL.map(|p| TensorId::Expert(layer, expert, p)));
        }
    }
    for id in ids {
        let name = arch.name(id);
        assert_eq!(arch.find(&name).map(|(found, _)| found), Some(id), "{name}");
        assert_eq!(parse_any(&name), Some(id));
    }
}

#[test]
fn names_that_are_not_the_family_s_are_unknown() {
    let arch = example();
    for name in [
        "",
        "model",
        "model.",
        "model.layers.0",
        "model.layers.00.input_layernorm.weight",
        "model.layers.+1.input_layernorm.weight",
        "model.layers.99999999999999999999.input_layernorm.weight",
        "model.layers.3.mlp.experts.1.gate_proj",
        "model.layers.3.mlp.experts.01.gate_proj.weight",
        "model.layers.3.mlp.experts.4294967296.gate_proj.weight",
        "model.layers.0.self_attn.q_b_proj",
        "model.layers.0.input_layernorm.weight.qs",
        "other.norm.weight",
    ] {
        assert_eq!(arch.names.parse(name), None, "{name}");
    }
    let beyond = [
        TensorId::Layer(6 + 16, Part::AttentionNorm),
        TensorId::Layer(0, Part::DraftInput),
        TensorId::Expert(3, 8, Projection::Up),
    ];
    for id in beyond {
        assert_eq!(arch.shape(id), None, "{id:?}");
    }
}

#[test]
fn shapes_are_those_of_the_checkpoint() {
    let arch = example();
    let shape = |name: &str| arch.find(name).unwrap().1;
    let layer = |name: &str| shape(&format!("model.layers.3.{name}"));
    assert_eq!(shape("lm_head.weight"), Shape::Matrix(64, 48));
    assert_eq!(layer("self_attn.q_b_proj.weight"), Shape::Matrix(32, 16));
    assert_eq!(layer("self_attn.kv_b_proj.weight"), Shape::Matrix(48, 16));
    assert_eq!(layer("self_attn.kv_a_layernorm.weight"), Shape::Vector(16));
    assert_eq!(layer("mlp.experts.gate_up_proj"), Shape::Stack(8, 48, 48));
    assert_eq!(
        layer("mlp.experts.7.down_proj.weight"),
        Shape::Matrix(48, 24)
    );
}
