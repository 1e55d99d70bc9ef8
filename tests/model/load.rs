//! Loading: the ranges of the experts in both layouts, and models whose tensors do not fit their config.

use colibri_uring::arch::{Architecture, Attention, IndexerKind, Mla};
use colibri_uring::model::{LoadOptions, Sparsity, Weights};
use colibri_uring::shards::{Cache, Shards};
use colibri_uring::stream::catalog::{Catalog, Projection};

use crate::common::shipped;
use crate::fixture::{Fixture, fixture, fixtures};

const SINGLE: &str = "bf16-shared";
const FUSED: &str = "f16-fused-pattern";

fn load_error(fixture: &Fixture, change: impl Fn(&mut Architecture)) -> String {
    let mut config = fixture.config.clone();
    change(&mut config);
    let model = Weights::load(&fixture.shards, config, LoadOptions::default());
    model.unwrap_err().to_string()
}

fn mla(arch: &mut Architecture) -> &mut Mla {
    match &mut arch.attention {
        Attention::Mla(mla) => mla,
        Attention::Gqa(_) => panic!("not an architecture with MLA"),
    }
}

fn catalog_error(fixture: &Fixture, change: impl Fn(&mut Architecture)) -> String {
    let mut config = fixture.config.clone();
    change(&mut config);
    let catalog = Catalog::new(&fixture.shards, &config);
    catalog.unwrap_err().to_string()
}

#[test]
fn every_expert_is_where_its_tensor_says() {
    for fixture in fixtures() {
        let catalog = Catalog::new(&fixture.shards, &fixture.config).unwrap();
        let sparse: Vec<_> = fixture.config.sparse_layers().collect();
        assert_eq!(catalog.layers().collect::<Vec<_>>(), sparse);
        for layer in sparse {
            for expert in 0..catalog.experts() as u32 {
                let places = catalog.expert(layer, expert).unwrap();
                for (projection, place) in Projection::ALL.into_iter().zip(places) {
                    if place.rows == 0 {
                        // The gate stands for both.
                        assert!(fixture.config.experts.in_pairs());
                        continue;
                    }
                    let name = catalog.tensor_name(layer, expert, projection);
                    let tensor = fixture.shards.get(&name).unwrap();
                    let whole = fixture.shards.read_raw(&name, Cache::Keep).unwrap();
                    let len = place.bytes as usize;
                    // Fused blocks hold `experts` times one matrix, or two: the gate, then the up.
                    let parts = whole.len() / len;
                    let start = match (parts / catalog.experts(), projection) {
                        (0, _) => 0,
                        (1, _) => expert as usize,
                        (_, Projection::Up) => 2 * expert as usize + 1,
                        _ => 2 * expert as usize,
                    };
                    let mut bytes = vec![0; len];
                    let file = &fixture.shards.files()[place.file];
                    file.read_at(&mut bytes, place.offset).unwrap();
                    assert!(bytes == whole[start * len..][..len], "{name} {expert}");
                    assert_eq!(
                        (place.file, tensor.shape.len() < 3),
                        (tensor.file, parts == 1)
                    );
                }
            }
            assert!(catalog.expert(layer, catalog.experts() as u32).is_none());
        }
        assert!(
            catalog
                .expert(fixture.config.num_hidden_layers(), 0)
                .is_none()
        );
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let single = fixture(SINGLE);
    let (layers, vocab) = (single.config.num_hidden_layers(), single.config.vocab_size);
    let hidden = single.config.hidden_size;
    let embedding = single.shards.get("model.embed_tokens.weight").unwrap();
    assert_eq!(
        load_error(&single, |c| c.vocab_size += 1),
        format!(
            "{}: tensor model.embed_tokens.weight has shape [{vocab}, {hidden}], the config needs [{}, {hidden}]",
            single.shards.files()[embedding.file].path().display(),
            vocab + 1
        )
    );
    let error = load_error(&single, |c| {
        c.mlp.push(c.mlp[layers - 1]);
        let kinds = &mut c.indexer.as_mut().unwrap().layers;
        kinds.push(kinds[layers - 1]);
    });
    assert!(
        error.contains(&format!("model.layers.{layers}.input_layernorm.weight")),
        "{error}"
    );
    let error = load_error(&single, |c| mla(c).bias = true);
    assert!(error.contains("self_attn.q_a_proj.bias"), "{error}");
    let error = load_error(&single, |c| mla(c).kv_rank += 2);
    assert!(
        error.contains("kv_a_proj_with_mqa.weight has shape"),
        "{error}"
    );
}

#[test]
fn experts_that_do_not_fit_are_named() {
    let (single, fused) = (fixture(SINGLE), fixture(FUSED));
    let more = |c: &mut Architecture| c.experts.count += 1;
    let wider = |c: &mut Architecture| c.experts.width += 1;
    let expert = format!(
        "experts.{}.gate_proj.weight is missing",
        single.config.experts.count
    );
    let error = catalog_error(&single, more);
    assert!(error.contains(&expert), "{error}");
    for (fixture, change, name) in [
        (
            &single,
            &wider as &dyn Fn(&mut Architecture),
            "experts.0.gate_proj.weight has shape",
        ),
        (&fused, &more, "experts.gate_up_proj has shape"),
        (&fused, &wider, "experts.gate_up_proj has shape"),
    ] {
        let error = catalog_error(fixture, change);
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn an_indexer_is_all_or_nothing() {
    let shared = fixture(SINGLE);
    assert_eq!(
        shared.model().sparsity(),
        Sparsity::Active(shared.config.indexer.as_ref().unwrap().top_k)
    );
    // Its shared layers have no indexer tensors: as full layers they lack them.
    let error = load_error(&shared, |c| {
        c.indexer.as_mut().unwrap().layers.fill(IndexerKind::Full);
    });
    assert!(
        error.contains("self_attn.indexer.wq_b.weight is missing"),
        "{error}"
    );
    assert_eq!(
        fixture("f32-no-indexer").model().sparsity(),
        Sparsity::Absent
    );
}

#[test]
fn experts_in_both_layouts_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(shipped().join(FUSED)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    // The index does not name the file that the test adds.
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    let fused = fixture(FUSED);
    let layer = fused.config.sparse_layers().next().unwrap();
    let name = format!("model.layers.{layer}.mlp.experts.0.gate_proj.weight");
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &[0; 4]);
    safetensors::serialize_to_file(
        [(&name, view.unwrap())],
        None,
        &dir.path().join("x.safetensors"),
    )
    .unwrap();
    let shards = Shards::open(&[dir.path().to_path_buf()]).unwrap();
    let error = Catalog::new(&shards, &fused.config)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("has its experts twice") && error.contains(&name),
        "{error}"
    );
}
