//! The last layers of a trace, drawn to scale: the chunks at the drives above, the compute thread below.
//!
//! Everything of one layer has one colour, so that a read that goes on under the arithmetic of the layer before it is seen.

use std::fmt::Write as _;

use super::escape;
use crate::model::Phase;
use crate::tools::trace::{Chunk, Slice, Trace, phase_name, priority_name};

use colibri_ring::Priority;

const WIDTH: f64 = 1140.0;
const LEFT: f64 = 92.0;
const TOP: f64 = 8.0;
const LANE: f64 = 9.0;
/// More layers or things are not told apart.
const MOST_LAYERS: usize = 14;
const MOST_THINGS: usize = 2500;
/// Colours that take turns from layer to layer.
pub(super) const COLOURS: [usize; 4] = [0, 2, 6, 4];

/// The time that is drawn.
#[derive(Clone, Copy)]
struct View {
    begin: u64,
    end: u64,
}

impl View {
    /// The last layers up to the end of the trace.
    fn last(trace: &Trace) -> Option<View> {
        let end = trace.slices.last()?.end;
        let layers: Vec<u64> = (trace.slices)
            .chunk_by(|a, b| (a.pass, a.layer) == (b.pass, b.layer))
            .filter(|of_layer| of_layer[0].layer.is_some())
            .map(|of_layer| of_layer[0].begin)
            .collect();
        let few = |begin: &u64| {
            let chunks = trace
                .chunks
                .iter()
                .filter(|c| c.end > *begin && c.begin < end);
            let slices = trace.slices.iter().filter(|s| s.end > *begin);
            chunks.count() + slices.count() <= MOST_THINGS
        };
        let last = layers.iter().rev().take(MOST_LAYERS);
        let begin = last.take_while(|begin| few(begin)).last();
        let begin = *begin.or(layers.last())?;
        (begin < end).then_some(View { begin, end })
    }

    fn x(self, at: u64) -> f64 {
        let at = at.clamp(self.begin, self.end) - self.begin;
        LEFT + (WIDTH - LEFT - 4.0) * at as f64 / (self.end - self.begin) as f64
    }

    fn shows(self, begin: u64, end: u64) -> bool {
        end > self.begin && begin < self.end
    }
}

/// Appends the picture as a figure; nothing if nothing was computed.
pub(super) fn draw(trace: &Trace, out: &mut String) {
    let Some(view) = View::last(trace) else {
        return;
    };
    let (lane_of, _) = trace.lanes();
    // Only lanes that are used in this view.
    let mut lanes = vec![0; trace.sources.len()];
    let shown = || (trace.chunks.iter().zip(&lane_of)).filter(|(c, _)| view.shows(c.begin, c.end));
    for (chunk, lane) in shown() {
        if let Some(lanes) = lanes.get_mut(chunk.source) {
            *lanes = (*lanes).max(lane + 1);
        }
    }
    let mut tops = Vec::new();
    let mut y = TOP;
    for lanes in &lanes {
        tops.push(y);
        y += LANE * (*lanes).max(1) as f64 + 10.0;
    }
    let compute = y + 8.0;
    let bottom = compute + 62.0;
    let title = "The last layers: reads at the drives, and what is computed meanwhile";
    let _ = writeln!(
        out,
        "<figure class=\"wide\" id=\"pipeline\"><figcaption>{title}</figcaption>\n<div class=\"scroll\">\
         <svg class=\"plot\" viewBox=\"0 0 {WIDTH} {:.0}\" role=\"img\" aria-label=\"{title}\">",
        bottom + 40.0
    );
    for (source, top) in tops.iter().enumerate() {
        let _ = write!(
            out,
            "<text class=\"name\" x=\"0\" y=\"{:.1}\">drive {}<title>{}</title></text>",
            top + 12.0,
            source + 1,
            escape(&trace.source(source))
        );
    }
    let _ = writeln!(
        out,
        "<text class=\"name\" x=\"0\" y=\"{:.1}\">layer</text><text class=\"name\" x=\"0\" y=\"{:.1}\">computing</text>",
        compute + 14.0,
        compute + 44.0
    );
    draw_layers(trace, view, compute, out);
    for (chunk, lane) in shown() {
        if let Some(top) = tops.get(chunk.source) {
            draw_chunk(trace, chunk, view, top + LANE * *lane as f64, out);
        }
    }
    for slice in trace.slices.iter().filter(|s| view.shows(s.begin, s.end)) {
        draw_slice(slice, view, compute + 28.0, out);
    }
    draw_axis(view, bottom, out);
    out.push_str("</svg></div>\n<ul class=\"legend\">");
    for (class, name) in [
        (
            "s0 c",
            "a read that is waited for, in the colour of its layer",
        ),
        ("s0 c ahead", "a read ahead of its layer, on a guess"),
        ("p-experts", "experts"),
        ("p-attention", "attention and other arithmetic"),
        ("p-waiting", "waiting for a read"),
    ] {
        let _ = write!(out, "<li><i class=\"box {class}\"></i>{name}</li>");
    }
    out.push_str("</ul></figure>\n");
}

fn colour(layer: usize) -> usize {
    COLOURS[layer % COLOURS.len()]
}

/// A band for each layer, and a line through the picture where it begins.
fn draw_layers(trace: &Trace, view: View, y: f64, out: &mut String) {
    let layers = (trace.slices).chunk_by(|a, b| (a.pass, a.layer) == (b.pass, b.layer));
    for of_layer in layers {
        let (begin, end) = (of_layer[0].begin, of_layer[of_layer.len() - 1].end);
        if !view.shows(begin, end) {
            continue;
        }
        let (x, to) = (view.x(begin), view.x(end));
        let Some(layer) = of_layer[0].layer else {
            continue;
        };
        let _ = write!(
            out,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{:.1}\"/>\
             <g class=\"s{}\"><rect class=\"c\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"20\"/></g>",
            y + 62.0,
            colour(layer as usize),
            (to - x - 1.0).max(0.5)
        );
        if to - x > 18.0 {
            let _ = writeln!(
                out,
                "<text class=\"on\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{layer}</text>",
                (x + to) / 2.0,
                y + 14.0
            );
        }
    }
}

fn draw_chunk(trace: &Trace, chunk: &Chunk, view: View, y: f64, out: &mut String) {
    let (x, to) = (view.x(chunk.begin), view.x(chunk.end));
    let (colour, what) = match chunk.key {
        Some(key) => (
            colour(key.layer),
            format!("layer {}, expert {}", key.layer, key.expert),
        ),
        None => (7, "expert unknown".to_owned()),
    };
    let ahead = match chunk.priority {
        Priority::Demand => "",
        Priority::Prefetch | Priority::Preload => " ahead",
    };
    let _ = writeln!(
        out,
        "<g class=\"s{colour}\"><rect class=\"c{ahead}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\">\
         <title>{what}, {}: {} KiB in {:.2} ms from {}</title></rect></g>",
        (to - x - 0.6).max(0.6),
        LANE - 1.5,
        priority_name(chunk.priority),
        chunk.bytes / 1024,
        (chunk.end - chunk.begin) as f64 / 1e6,
        escape(&trace.source(chunk.source))
    );
}

fn draw_slice(slice: &Slice, view: View, y: f64, out: &mut String) {
    let (x, to) = (view.x(slice.begin), view.x(slice.end));
    let class = match slice.phase {
        Phase::Experts => "p-experts",
        Phase::IoWait => "p-waiting",
        _ => "p-attention",
    };
    let what = match slice.expert {
        Some((expert, true)) => format!("expert {expert}, down"),
        Some((expert, false)) => format!("expert {expert}, gate and up"),
        None => phase_name(slice.phase).to_owned(),
    };
    let _ = writeln!(
        out,
        "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"24\"><title>{what}: {:.3} ms</title></rect>",
        (to - x).max(0.3),
        (slice.end - slice.begin) as f64 / 1e6
    );
}

fn draw_axis(view: View, y: f64, out: &mut String) {
    let span = (view.end - view.begin) as f64 / 1e6;
    let step = super::chart::round_step(span / 8.0);
    let _ = write!(
        out,
        "<path class=\"frame\" d=\"M{LEFT} {y:.1}H{:.1}\"/>",
        WIDTH - 4.0
    );
    for i in 0..=(span / step).floor().min(20.0) as u32 {
        let at = f64::from(i) * step;
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            view.x(view.begin + (at * 1e6) as u64),
            y + 16.0,
            super::chart::short(at)
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">milliseconds</text>",
        (LEFT + WIDTH) / 2.0,
        y + 34.0
    );
}
