"""Trains the demo model for a given time.

    python train.py DATA OUT --minutes 60

DATA is what corpus.py wrote. The schedule is a function of the share of the time that has passed, so that a slower machine makes
a lesser model, and none runs late. OUT/checkpoint.pt is written every few minutes and continued from; OUT/log.jsonl has the losses.
The file OUT/minutes, if there is one, replaces --minutes while training runs.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from model import Context, Indexer, Model, Rounding, Router, Shape
from optim import Muon

BATCH = 4096  # tokens a step
WARMUP = 60  # steps
DECAY = 0.55  # share of the time after which the learning rate falls, linearly
LONG = 0.6  # ... after which sequences are as long as the context, before half as long
ROUND = 0.8  # ... after which weights are rounded in the forward pass
SPARSE = 0.85  # ... after which attention is sparse
INDEX_ROWS = 48  # rows of a sequence that the indexers learn from


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--f32", action="store_true")
    return parser.parse_args()


def optimizers(model: Model):
    """Muon for matrices, Adam for the embedding, norms, routers and indexers."""
    small = {id(p) for m in model.modules() if isinstance(m, (Indexer, Router)) for p in m.parameters()}
    small.add(id(model.embed_tokens.weight))
    matrices = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in small]
    indexers = [p for m in model.modules() if isinstance(m, Indexer) for p in m.parameters()]
    routers = [m.weight for m in model.modules() if isinstance(m, Router)]
    others = [p for p in model.parameters() if p.ndim < 2 and not any(p is q for q in indexers)]
    adam = [
        {"params": [model.embed_tokens.weight], "lr": 4e-3},
        {"params": routers, "lr": 2e-3},
        {"params": indexers, "lr": 2e-3},
        {"params": others, "lr": 2e-3},
    ]
    return [Muon(matrices), torch.optim.AdamW(adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def rate(step: int, share: float) -> float:
    """Of the learning rate."""
    decay = 1.0 if share < DECAY else max(0.02, (1 - share) / (1 - DECAY))
    return min(1.0, (step + 1) / WARMUP) * decay


def losses(model, batch, ctx_of, exact):
    """Cross entropy of the next token and of the draft, in nats, and the indexers' divergence."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not exact):
        ids, ahead, two = batch[:, :-2], batch[:, 1:-1], batch[:, 2:]
        ctx = ctx_of()
        hidden = model.hidden(ids, ctx)
        main = F.cross_entropy(model.logits(hidden).float().flatten(0, 1), ahead.flatten())
        drafted = model.draft(ahead, hidden, ctx)
        draft = F.cross_entropy(model.logits(drafted).float().flatten(0, 1), two.flatten())
        return main, draft, ctx.indexer_loss()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    shape = Shape()
    model = Model(shape)
    model.dropout = args.dropout
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    train, held = (torch.tensor(tokenizer.encode((args.data / f"{n}.txt").read_text()).ids) for n in ("train", "held-out"))
    bytes_a_token = len((args.data / "held-out.txt").read_bytes()) / len(held)
    optims = optimizers(model)
    bases = [group["lr"] for o in optims for group in o.param_groups]
    checkpoint, log = args.out / "checkpoint.pt", (args.out / "log.jsonl").open("a")
    step, spent, tokens = 0, 0.0, 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        [o.load_state_dict(s) for o, s in zip(optims, saved["optims"])]
        step, spent, tokens = saved["step"], saved["spent"], saved["tokens"]
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(train)} tokens, from step {step}", flush=True)

    def save():
        part = checkpoint.with_suffix(".part")
        state = {"model": model.state_dict(), "optims": [o.state_dict() for o in optims], "step": step, "spent": spent, "tokens": tokens}
        torch.save(state, part)
        part.rename(checkpoint)

    order, last_save, last = torch.Generator().manual_seed(args.seed + step), time.time(), time.time()
    share = 0.0
    while share < 1.0:
        minutes = float((args.out / "minutes").read_text()) if (args.out / "minutes").exists() else args.minutes
        share = spent / (60 * minutes)
        length = shape.max_position_embeddings // (1 if share >= LONG else 2)
        Rounding.on = share >= ROUND
        for group, base in zip((g for o in optims for g in o.param_groups), bases):
            group["lr"] = base * rate(step, share)
        starts = torch.randint(len(train) - length - 2, (BATCH // length,), generator=order)
        batch = torch.stack([train[i : i + length + 2] for i in starts])
        rows = torch.randint(shape.index_topk // 2, length, (INDEX_ROWS,), generator=order)
        model.train()
        main, draft, index = losses(model, batch, lambda: Context(shape, length, share >= SPARSE, rows), args.f32)
        balance = sum(m.balance for m in model.routers()) / len(model.routers())
        (main + 0.3 * draft + 0.1 * index + 0.002 * balance).backward()
        for o in optims:
            o.step()
            o.zero_grad()
        # An expert with less than its share is chosen a little more readily from now on.
        for moe in model.routers():
            shares = moe.counts / moe.counts.sum() * len(moe.counts)
            moe.gate.e_score_correction_bias += 0.004 * rate(step, share) * (1 - shares).clamp(-1, 1)
            moe.counts *= 0.9
        step, tokens = step + 1, tokens + BATCH
        now = time.time()
        spent, last = spent + now - last, now
        if step % 10 == 0:
            report = {"step": step, "seconds": round(spent), "share": round(share, 4), "tokens": tokens, "loss": main.item(),
                      "draft": draft.item(), "index": index.item(), "bits": main.item() / 0.693147 / bytes_a_token}
            if step % 100 == 0:
                report["held_out_bits"] = held_out(model, held, shape, share >= SPARSE) / 0.693147 / bytes_a_token
                report["shares"] = [round((m.counts.min() / m.counts.mean()).item(), 2) for m in model.routers()]
            print(json.dumps(report), file=log, flush=True)
        if now - last_save > 180:
            save()
            last_save = now
    save()


@torch.no_grad()
def held_out(model: Model, held, shape: Shape, sparse: bool) -> float:
    """Nats a token on the first 16 contexts of the held-out text."""
    model.eval()
    length = shape.max_position_embeddings
    total = 0.0
    with torch.autocast("cpu", torch.bfloat16):
        for i in range(0, 16 * length, 4 * length):
            batch = torch.stack([held[j : j + length + 1] for j in range(i, i + 4 * length, length)])
            logits = model.logits(model.hidden(batch[:, :-1], Context(shape, length, sparse)))
            total += F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()).item() / 4
    return total


if __name__ == "__main__":
    main()
