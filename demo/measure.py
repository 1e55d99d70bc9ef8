"""Measures a trained model on the held-out text, and compares it with the transformers library and with the engine.

    python measure.py DATA RUN CHECKPOINT CONTAINER COLIBRI [CONTEXTS]

CHECKPOINT is what export.py wrote, CONTAINER what `convert` made of it, COLIBRI the program. Prints one JSON object.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from export import load
from model import Context, Rounding

LN2 = 0.6931471805599453


@torch.no_grad()
def bits(model, tokenizer, pieces, sparse: bool) -> dict:
    """Bits per byte, the smallest and largest share of an expert in each layer, and how often the draft is right."""
    nats = count = size = agree = drafts = 0
    for moe in model.routers():
        moe.counts.zero_()
    for ids in pieces:
        batch = ids[None]
        ctx = Context(model.s, len(ids), sparse)
        hidden = model.hidden(batch, ctx)
        logits = model.logits(hidden)[0]
        nats += F.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()
        count += len(ids) - 1
        size += len(tokenizer.decode(ids[1:].tolist(), skip_special_tokens=False).encode())
        # The draft for t + 2, made where t + 1 is the model's own choice: what greedy decoding would see.
        own = logits.argmax(-1)
        same = own[:-1] == ids[1:]
        drafted = model.logits(model.draft(batch[:, 1:], hidden[:, :-1], Context(model.s, len(ids) - 1, sparse)))[0].argmax(-1)
        agree += ((drafted == own[1:]) & same).sum().item()
        drafts += same.sum().item()
    shares = [moe.counts / moe.counts.sum() * len(moe.counts) for moe in model.routers()]
    return {"bits_per_byte": nats / LN2 / size, "tokens": count, "bytes": size,
            "share_min": [round(s.min().item(), 3) for s in shares], "share_max": [round(s.max().item(), 3) for s in shares],
            "draft_agreement": agree / max(drafts, 1)}


@torch.no_grad()
def against_library(model, checkpoint: Path, ids) -> float:
    """Largest difference of a logit from the library's, in f32, attention sparse."""
    from transformers import GlmMoeDsaForCausalLM

    theirs = GlmMoeDsaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    ours = model.logits(model.hidden(ids[None], Context(model.s, len(ids), True)))
    return (theirs(input_ids=ids[None], use_cache=False).logits - ours).abs().max().item()


def engine(program: str, container: Path, tokenizer, pieces) -> dict:
    nats = size = 0
    for ids in pieces:
        command = [program, "score", "--no-usage", "--json", "--model", container, "--ids", ",".join(map(str, ids.tolist()))]
        report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        nats -= sum(report["logprobs"])
        size += len(tokenizer.decode(ids[1:].tolist(), skip_special_tokens=False).encode())
    return {"bits_per_byte": nats / LN2 / size, "bytes": size}


def main() -> None:
    data, run, checkpoint, container, program = map(Path, sys.argv[1:6])
    contexts = int(sys.argv[6]) if len(sys.argv) > 6 else 44
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    held = torch.tensor(tokenizer.encode((data / "held-out.txt").read_text()).ids)
    model = load(run)
    pieces = held.split(model.s.max_position_embeddings)[:contexts]
    pieces = [p for p in pieces if len(p) > 1]
    report = {"parameters": sum(p.numel() for p in model.parameters())}
    report["library_difference"] = against_library(model, checkpoint, pieces[0])
    report["f32_dense"] = bits(model, tokenizer, pieces, False)
    report["f32_sparse"] = bits(model, tokenizer, pieces, True)
    Rounding.on = True
    report["rounded_sparse"] = bits(model, tokenizer, pieces, True)
    report["engine"] = engine(str(program), container, tokenizer, pieces)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
