//! Reads groups of blocks with all slabs busy, and hands the groups out in order.

use std::collections::VecDeque;

use colibri_ring::{
    Class, Engine, EngineError, Event, Files, Options, Priority, Range, ReadError, SlabId,
};

use crate::memory::{MemoryError, slabs_that_fit};

/// Blocks that are read together.
#[derive(Debug)]
struct Group<T> {
    tag: T,
    slabs: Vec<SlabId>,
    /// By block: the slab once it is full, or why it cannot be read.
    ended: Vec<Option<Result<SlabId, ReadError>>>,
}

/// A group whose blocks have all been read, or have failed.
#[derive(Debug)]
pub struct ReadGroup<T> {
    /// As pushed.
    pub tag: T,
    /// In the order of the ranges. Slabs are to be given to [`OrderedReads::release`].
    pub blocks: Vec<Result<SlabId, ReadError>>,
}

/// A queue of reads.
#[derive(Debug)]
pub struct OrderedReads<T> {
    engine: Engine,
    files: Files,
    free: Vec<SlabId>,
    groups: VecDeque<Group<T>>,
}

/// Why a queue cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// There is no memory for the slabs.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The engine does not run.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl<T> OrderedReads<T> {
    /// A queue for blocks of up to `block` bytes, `wanted` of them at once or as many as memory has room for, which must be at least
    /// `least`.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn new(
        files: Files,
        block: u64,
        (wanted, least): (usize, usize),
        options: Options,
    ) -> Result<OrderedReads<T>, StartError> {
        let slab_bytes = block + 2 * files.align();
        let class = Class {
            bytes: slab_bytes as usize,
            count: slabs_that_fit(wanted, least, slab_bytes)?,
        };
        let engine = Engine::new(&files, &[class], options)?;
        Ok(OrderedReads {
            free: (0..engine.slabs() as u32).map(SlabId).collect(),
            engine,
            files,
            groups: VecDeque::new(),
        })
    }

    /// How many blocks can be pushed now.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Queues the reads of `ranges`, which lie inside their files and are at most [`OrderedReads::free`].
    pub fn push(&mut self, tag: T, ranges: &[Range]) {
        let mut read = |range: &Range| {
            let slab = self
                .free
                .pop()
                .expect("the caller has asked for free slabs");
            let layout = self.files.layout(std::slice::from_ref(range));
            let layout = layout.expect("inside a file");
            self.engine.read(slab, Priority::Demand, layout);
            slab
        };
        self.groups.push_back(Group {
            tag,
            slabs: ranges.iter().map(&mut read).collect(),
            ended: ranges.iter().map(|_| None).collect(),
        });
    }

    /// The oldest group, once its reads have ended; `None` when the queue is empty.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub fn next(&mut self) -> Result<Option<ReadGroup<T>>, EngineError> {
        self.engine.flush();
        let ended = |group: &Group<T>| group.ended.iter().all(Option::is_some);
        while self.groups.front().is_some_and(|group| !ended(group)) {
            match self.engine.wait()? {
                Event::Full(slab) => self.end(slab, Ok(slab)),
                Event::Failed(slab, error) => {
                    self.free.push(slab);
                    self.end(slab, Err(error));
                }
                Event::Part(..) | Event::Dropped(_) => {}
            }
        }
        Ok(self.groups.pop_front().map(|group| ReadGroup {
            tag: group.tag,
            blocks: group.ended.into_iter().flatten().collect(),
        }))
    }

    fn end(&mut self, slab: SlabId, result: Result<SlabId, ReadError>) {
        let mut groups = self.groups.iter_mut();
        let block = groups.find_map(|group| {
            let reading = |(at, s): (usize, &SlabId)| *s == slab && group.ended[at].is_none();
            let at = group.slabs.iter().enumerate().position(reading)?;
            Some(&mut group.ended[at])
        });
        *block.expect("every read belongs to a group") = Some(result);
    }

    /// The bytes of a block.
    pub fn bytes(&self, slab: SlabId) -> &[u8] {
        self.engine.payload(slab, 0)
    }

    /// Frees the slab of a block.
    pub fn release(&mut self, slab: SlabId) {
        self.engine.release(slab);
        self.free.push(slab);
    }
}
