//! Tests how chunks are divided between drives.

use super::*;

/// Reads batches one after the other from drives of these speeds (MiB/s), each of which does one read at a time and has a copy
/// of everything, and returns how long the last batch took, as a multiple of the shortest possible time.
fn batches(speeds: &[f64], chunk: u64, chunks_in_batch: u64, batches: usize) -> f64 {
    let window = Window::default();
    let mut s = Scheduler::new(1, &files(1, speeds.len()), window);
    let drives = (0..speeds.len() as u64).map(|n| Drive::new(n, window));
    for (drive, route) in s.files[0].iter_mut().enumerate() {
        route.drive = drive;
    }
    s.fleet = Fleet::new(drives.collect(), &s.files, None);
    let mut now = 0.0;
    let mut batch_time = 0.0;
    // Of each drive: when it will have done everything that it has, and what that is.
    let mut free_at = vec![0.0; speeds.len()];
    let mut at_drives: Vec<(f64, Op)> = Vec::new();
    let chunks: Vec<Chunk> = (0..chunks_in_batch)
        .map(|n| Chunk {
            file: 0,
            offset: n * chunk,
            len: chunk,
            slab_offset: n * chunk,
            payload: [chunk, 0],
        })
        .collect();
    for _ in 0..batches {
        let begin = now;
        let mut events = Vec::new();
        s.push(SlabId(0), Priority::Demand, &chunks, &mut events);
        loop {
            while let Some(op) = s.next(Duration::from_secs_f64(now)) {
                let drive = op.copy as usize;
                let took = op.len as f64 / speeds[drive] / f64::from(1 << 20);
                free_at[drive] = now.max(free_at[drive]) + took;
                at_drives.push((free_at[drive], op));
            }
            let Some(i) =
                (0..at_drives.len()).min_by(|&a, &b| at_drives[a].0.total_cmp(&at_drives[b].0))
            else {
                break;
            };
            let (end, op) = at_drives.swap_remove(i);
            now = end;
            let ended = Completion {
                id: op.id,
                result: Ok(op.len),
            };
            s.complete(ended, Duration::from_secs_f64(now), &mut events);
        }
        assert!(s.is_idle() && s.fleet.waiting_bytes == [0; 3]);
        batch_time = now - begin;
    }
    let mib = (chunk * chunks_in_batch) as f64 / f64::from(1 << 20);
    batch_time / (mib / speeds.iter().sum::<f64>())
}

#[test]
#[cfg_attr(miri, ignore = "slow, and free of unsafe code")]
fn a_batch_of_one_window_is_spread_over_all_drives() {
    const MIB: u64 = 1 << 20;
    assert!(batches(&[400.0, 400.0], 2 * MIB, 8, 1) < 1.01);
    assert!(batches(&[400.0; 4], 2 * MIB, 12, 1) < 1.01);
    // Small reads, far from any window.
    assert!(batches(&[400.0; 4], 16 << 10, 12, 1) < 1.01);
}

#[test]
#[cfg_attr(miri, ignore = "slow, and free of unsafe code")]
fn a_slow_drive_does_not_hold_the_end_of_a_batch() {
    const MIB: u64 = 1 << 20;
    // Two experts' chunks and eight experts', once the speeds are known. A chunk is 10 ms of the slow drive.
    for (chunks, most) in [(20, 1.25), (80, 1.1)] {
        for speeds in [&[600.0, 200.0][..], &[200.0, 600.0], &[400.0, 50.0, 400.0]] {
            let ratio = batches(speeds, 2 * MIB, chunks, 12);
            assert!(ratio < most, "{speeds:?} {chunks}: {ratio}");
        }
    }
}
