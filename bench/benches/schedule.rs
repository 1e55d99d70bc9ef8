//! The hot pure parts of reading: from tensors' places to chunks, and the scheduler's work for each chunk.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use colibri_ring::extent::Chunk;
use colibri_ring::schedule::Completion;
use colibri_ring::schedule::Scheduler;
use colibri_ring::{DirectMode, File, Files, Priority, Range, Replica, SlabId, Window};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

const MIB: u64 = 1 << 20;
const FILE: u64 = 1 << 40;

/// An expert of GLM-5.2 in the int4-g64 container: down, gate, up, and their scales elsewhere in the file.
fn expert(n: u64) -> [Range; 6] {
    let weights = 2048 * 6144 / 2;
    let scales = 4 * 2048 * 6144 / 64;
    let base = n * 20 * MIB + 1234;
    let range = |offset, len, part| Range {
        file: 0,
        offset,
        len,
        part,
    };
    [
        range(base, weights, 1),
        range(base + weights, weights, 0),
        range(base + 2 * weights, weights, 0),
        range((1 << 39) + base, scales, 1),
        range((1 << 39) + base + scales, scales, 0),
        range((1 << 39) + base + 2 * scales, scales, 0),
    ]
}

/// One file with a copy on each of `drives` drives.
fn copies(drives: usize) -> Files {
    let temp = tempfile::NamedTempFile::new().expect("a temporary file");
    temp.as_file().set_len(FILE).expect("a sparse file");
    let file = Arc::new(File::open(temp.path()).expect("it was just made"));
    let copy = |i| Replica {
        drive: i as u64,
        ..Replica::new(file.clone(), i)
    };
    Files::new(vec![(0..drives).map(copy).collect()], DirectMode::Off).expect("buffered")
}

fn chunks(files: &Files, n: u64) -> Vec<Chunk> {
    let layout = files.layout(&expert(n)).expect("inside the file");
    layout.chunks(2 * MIB)
}

/// Pushes eight experts, and gives every chunk to a drive and takes it back.
fn drain(scheduler: &mut Scheduler, experts: &[Vec<Chunk>]) {
    let mut events = Vec::new();
    for (slab, chunks) in experts.iter().enumerate() {
        scheduler.push(SlabId(slab as u32), Priority::Demand, chunks, &mut events);
    }
    let mut now = Duration::ZERO;
    let mut ops = std::collections::VecDeque::new();
    loop {
        while let Some(op) = scheduler.next(now) {
            ops.push_back(op);
        }
        let Some(op) = ops.pop_front() else { return };
        now += Duration::from_micros(500);
        let ended = Completion {
            id: op.id,
            result: Ok(op.len),
        };
        scheduler.complete(ended, now, &mut events);
        black_box(&events);
        events.clear();
    }
}

fn benches(c: &mut Criterion) {
    let files = copies(1);
    let ranges = expert(7);
    c.bench_function("extents of an expert", |b| {
        b.iter(|| files.layout(black_box(&ranges)));
    });
    let layout = files.layout(&ranges).expect("inside the file");
    c.bench_function("chunks of an expert", |b| {
        b.iter(|| black_box(&layout).chunks(2 * MIB));
    });
    let experts: Vec<Vec<Chunk>> = (0..8).map(|n| chunks(&files, n)).collect();
    let count: usize = experts.iter().map(Vec::len).sum();
    for drives in [1, 4] {
        for pinned in [false, true] {
            let mut files = copies(drives);
            let how = if pinned {
                "pinned shares"
            } else {
                "by completion"
            };
            if pinned {
                files.set_weights(vec![1; drives]);
            }
            let name = format!("8 experts ({count} chunks) over {drives} drives, {how}");
            c.bench_function(&name, |b| {
                b.iter_batched_ref(
                    || Scheduler::new(experts.len(), &files, Window::default()),
                    |scheduler| drain(scheduler, &experts),
                    BatchSize::SmallInput,
                );
            });
        }
    }
}

criterion_group!(group, benches);
criterion_main!(group);
