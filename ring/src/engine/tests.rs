//! Tests that borrowed bytes are never written meanwhile, with threads that write memory instead of reading files: for Miri, which has
//! no system calls.

use std::io;
use std::sync::Arc;

use super::*;
use crate::arena::Arena;
use crate::device::Op;
use crate::file::File;
use crate::pread::Pread;
use crate::replica::{DirectMode, Replica};

const FILE_BYTES: u64 = 200_000;

/// The byte of every file at this offset.
fn byte(offset: u64) -> u8 {
    (offset / 512 * 7 + offset % 251) as u8
}

/// Fills the bytes of an op.
#[allow(clippy::unnecessary_wraps, reason = "the signature of a read")]
fn fill(arena: &Arena, _: &[Replicas], op: &Op) -> io::Result<u64> {
    let len = op.len.min(FILE_BYTES - op.offset);
    let address = arena.address(op.slab, op.slab_offset, len);
    for i in 0..len {
        // SAFETY: `address` has checked the bounds; by the contract of `submit` nothing else uses these bytes.
        unsafe { address.add(i as usize).write(byte(op.offset + i)) };
    }
    Ok(len)
}

fn engines(files: &Files, classes: &[Class], options: Options) -> [Engine; 2] {
    let replicas = files.replicas.clone();
    let threaded = Engine::with_link(files, classes, options, |arena, scheduler| {
        let open = move |_: &Scheduler| -> Result<(_, Box<dyn crate::device::Device>), _> {
            Ok((
                "memory",
                Box::new(Pread::with(fill, &arena, &replicas, 2, None).unwrap()) as _,
            ))
        };
        Ok(Box::new(RingThread::start(
            open,
            scheduler,
            options.batch_bytes,
        )?))
    });
    let on_caller = Engine::with_link(files, classes, options, |arena, scheduler| {
        let device = Box::new(Pread::with(fill, &arena, &files.replicas, 2, None).unwrap());
        let batch = options.batch_bytes;
        Ok(Box::new(Inline::new(
            "memory", device, scheduler, batch, false,
        )))
    });
    [threaded.unwrap(), on_caller.unwrap()]
}

#[test]
fn a_complete_part_keeps_its_bytes_while_the_rest_is_read() {
    let file = Arc::new(File::unread(FILE_BYTES));
    let files = Files::new(vec![vec![Replica::new(file, 0)]], DirectMode::Off).unwrap();
    let class = Class {
        bytes: 64 << 10,
        count: 3,
    };
    let options = Options {
        chunk_bytes: 4096,
        ..Options::default()
    };
    let rounds = if cfg!(miri) { 2 } else { 200 };
    for mut engine in engines(&files, &[class], options) {
        let ranges = |n: u64| {
            let range = |offset, len, part| Range {
                file: 0,
                offset,
                len,
                part,
            };
            // Both parts share a chunk.
            [
                range(n, 5000, 0),
                range(n + 5000, 5000, 1),
                range(100_000 + n, 9000, 1),
            ]
        };
        let check = |engine: &Engine, slab, n: u64, range: usize| {
            let (expected, payload) = (ranges(n)[range], engine.payload(slab, range));
            assert_eq!(payload.len() as u64, expected.len);
            for (i, got) in payload.iter().enumerate().step_by(97) {
                assert_eq!(*got, byte(expected.offset + i as u64));
            }
        };
        for round in 0..rounds {
            let n = |slab: SlabId| round * 300 + u64::from(slab.0);
            for slab in (0..3).map(SlabId) {
                let priority = Priority::ALL[slab.index()];
                let layout = files.layout(&ranges(n(slab))).unwrap();
                engine.read(slab, priority, layout);
            }
            engine.promote(SlabId(1));
            if round % 2 == 1 {
                engine.flush();
                engine.abandon(SlabId(2));
            }
            let mut ended = 0;
            while ended < 3 {
                match engine.wait().unwrap() {
                    Event::Part(slab, 0) => check(&engine, slab, n(slab), 0),
                    Event::Part(slab, _) => {
                        (1..3).for_each(|range| check(&engine, slab, n(slab), range))
                    }
                    Event::Full(slab) => {
                        (0..3).for_each(|range| check(&engine, slab, n(slab), range));
                        engine.release(slab);
                        ended += 1;
                    }
                    Event::Dropped(_) => ended += 1,
                    Event::Failed(_, error) => panic!("{error}"),
                }
            }
            assert!(matches!(engine.wait(), Err(EngineError::NothingPending)));
        }
        // One is dropped while it reads.
        let layout = files.layout(&ranges(7)).unwrap();
        engine.read(SlabId(0), Priority::Demand, layout);
        engine.flush();
    }
}
