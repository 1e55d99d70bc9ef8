//! Runs mixture-of-experts language models far larger than memory. Dense weights stay resident; routed experts are streamed from SSD
//! through io_uring just before they are needed.
//!
//! ```
//! # use colibri_uring::{Demo, Sampling};
//! # let demo = Demo::open(|_| ())?;
//! # let dir = demo.dir();
//! let model = colibri_uring::Model::open(dir, &Default::default())?;
//! let mut runner = model.runner(&Default::default())?;
//! let mut seq = runner.sequence();
//! for token in runner.generate(&mut seq, &model.tokenizer()?.encode("The hummingbird")?, &Sampling::greedy(), 64) {
//!     print!("{}", token?.text);
//! }
//! # assert!(seq.len() > 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Model`] is a directory of safetensors files. [`ModelOptions`] say how it is read, [`RunOptions`] how a runner plans its memory. The
//! weights are loaded for the first runner and shared by later ones. The expert store belongs to a runner, and serves all of its sequences.
//!
//! # Several requests
//!
//! A [`Sequence`] is the state of one request. [`Runner::forward`] takes steps of any number of them through the layers together, and reads
//! each expert once for all rows that use it. What else is in a pass never changes a bit of a sequence's logits.
//!
//! ```
//! # use colibri_uring::Demo;
//! use colibri_uring::{Logits, Model, RunOptions, Sampler, Sampling, Step};
//!
//! # let demo = Demo::open(|_| ())?;
//! # let dir = demo.dir();
//! let model = Model::open(dir, &Default::default())?;
//! let tokenizer = model.tokenizer()?;
//! let options = RunOptions { context: Some(256), sequences: 2, ..RunOptions::default() };
//! let mut runner = model.runner(&options)?;
//!
//! let mut sequences = [runner.sequence(), runner.sequence()];
//! let mut texts = [tokenizer.encode("She was")?, tokenizer.encode("The weather")?];
//! let mut sampler = Sampler::new(Sampling::greedy());
//! for _ in 0..8 {
//!     let steps = sequences.iter_mut().zip(&texts);
//!     let mut steps: Vec<Step> = steps
//!         .map(|(sequence, text)| Step { ids: &text[sequence.len()..], sequence, logits: Logits::Last })
//!         .collect();
//!     let logits = runner.forward(&mut steps)?;
//!     let next = [sampler.sample(logits.of(0))?, sampler.sample(logits.of(1))?];
//!     texts.iter_mut().zip(next).for_each(|(text, id)| text.push(id));
//! }
//! for text in &texts {
//!     println!("{}", tokenizer.decode(text)?);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Modules
//!
//! What a program needs to run a model is at the root. The modules below it, from the bottom up, are [`shards`] (safetensors
//! files), [`quant`] (formats and kernels), [`stream`] (the expert store), [`model`] (the layers), [`runtime`] (from a directory to text)
//! and [`tools`] (what measures and makes models). Imports point down. The reads themselves are in the crate [`colibri_ring`].
//!
//! The feature `cli`, on by default, adds the dependencies of the `colibri-uring` program. The library needs none of them.

pub mod arch;
#[doc(hidden)]
pub mod atomic_file;
mod cgroup;
mod checksum;
#[doc(hidden)]
pub mod cpus;
#[doc(hidden)]
pub mod memory;
pub mod model;
#[doc(hidden)]
pub mod pool;
pub mod quant;
pub mod runtime;
#[cfg(feature = "serve")]
pub mod serve;
pub mod shards;
#[doc(hidden)]
pub mod stand_in;
pub mod stream;
pub mod tools;
#[doc(hidden)]
pub mod weight;

pub use arch::{Architecture, ConfigError};
pub use model::draft::Mode as Drafts;
pub use model::{Logits, ModelError, PassLogits, Runner, Sequence, Step};
pub use runtime::demo::{Demo, DemoError};
pub use runtime::generate::GenerateError;
pub use runtime::kv_file::{Fingerprint, KvFile, KvFileError};
pub use runtime::plan::{MemoryInputs, PlanError};
pub use runtime::sample::{SampleError, Sampler, Sampling};
pub use runtime::tokenizer::{TextStream, Tokenizer, TokenizerError};
pub use runtime::{
    LoadProgress, LoadStage, Model, ModelOptions, OpenError, RunOptions, TextGeneration,
    TextRunner, Token,
};
pub use stream::Lookahead;
