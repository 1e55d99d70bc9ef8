"""Makes the model fixtures and what the reference says about them. See README.md."""

import argparse
import os
import tempfile
import zlib
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one reduction order, and kind to a shared machine

import torch
from transformers.utils import logging

import chat
import converted
import mtp
import quantise
import store
import text
import weights
from fixtures import FIXTURES
from reference import Margins, Rejected, blank, forward, greedy, greedy_cached, load, score, watch

FIXTURE_DIR = Path(__file__).parent.parent / "fixtures"


def stop_ids(*configs) -> set[int]:
    """The union of the configs' eos_token_id, each a number, a list or absent."""
    out = set()
    for cfg in configs:
        eos = (cfg or {}).get("eos_token_id", [])
        out |= {eos} if isinstance(eos, int) else set(eos)
    return out


def name_eos(spec, tokens: list[int]) -> None:
    """Declares the token generated at `eos_at` a stop token."""
    eos = tokens[spec.eos_at]
    if eos in tokens[: spec.eos_at]:
        raise Rejected("the token to stop at is generated earlier")
    if spec.eos_in == "generation":
        spec.generation_config = {"eos_token_id": [eos, 2]}
    else:
        spec.config["eos_token_id"] = [2, eos] if spec.eos_in == "list" else eos


def random_ids(count: int, vocab: int, seed: int) -> list[int]:
    return torch.randint(3 if vocab > 8 else 0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def attempt(spec, out: Path, seed: int) -> dict:
    """Writes the model drawn from `seed` and returns expected.json."""
    torch.manual_seed(seed)
    made = weights.make(blank(spec), spec, seed)
    formats = weights.formats(made, spec)
    stored, values = quantise.expand(made, formats)
    store.write_weights(out, stored, spec, quantise.stamps(formats) if spec.stamp else None)
    with tempfile.TemporaryDirectory() as temp:
        source = Path(temp) if formats else out
        if formats:  # the library reads the values that the codes stand for
            store.write_weights(source, values, spec)
        expected = record(spec, out, source, seed)
        if spec.mtp:
            expected["mtp"] = mtp.record(source, spec, expected)
        return expected


def record(spec, out: Path, source: Path, seed: int) -> dict:
    """What the library says about the weights in `source`: the contents of expected.json. A tokenizer goes to `out`."""
    model = load(source, spec, dense=not spec.indexer)

    expected = {}
    vocab = spec.text["vocab_size"]
    if spec.prompt == "chat":
        tokenizer = chat.write(out, vocab)
        expected["chat"] = chat.record(tokenizer)
        prompt = expected["chat"]["conversations"][1]["ids"]
    elif isinstance(spec.prompt, str):
        tokenizer = text.write(out, vocab)
        prompt = tokenizer.encode(spec.prompt).ids
        expected["prompt"] = spec.prompt
    else:
        tokenizer, prompt = None, random_ids(spec.prompt, vocab, seed + 1)
    early = Margins(spec.family)
    with watch(model, early):
        early.on_logits(forward(model, prompt)[-1])
    early.require()  # before the many forwards of the greedy continuation
    if spec.eos_at is not None:
        name_eos(spec, greedy(model, prompt, spec.new, set()))
    stop = stop_ids(spec.config, spec.generation_config)
    tokens = greedy(model, prompt, spec.new, stop)
    if greedy_cached(model, prompt, spec.new, stop) != tokens:
        raise Rejected("the library's cached decode differs from its full forward")
    finish = "stop" if tokens[-1] in stop else "length"
    if (finish == "stop") != (spec.eos_at is not None):
        raise Rejected("generation does not end as the fixture wants")

    margins = Margins(spec.family)
    scored = random_ids(spec.score, vocab, seed + 2) if spec.score else prompt + tokens
    with watch(model, margins):
        decoded = forward(model, prompt + tokens[:-1])
        logits = forward(model, scored)
    margins.on_logits(decoded[len(prompt) - 1:])
    margins.on_logits(logits)
    check(spec, model, margins, prompt + tokens[:-1], scored, [decoded, logits])

    expected.update(prompt_ids=prompt, token_ids=tokens, finish_reason=finish)
    if tokenizer:
        expected["text"] = tokenizer.decode(tokens, skip_special_tokens=True)
    expected["score"] = score(logits, scored)
    if spec.indexed and spec.indexer and spec.text["index_topk"] < len(scored):
        expected["dense_score"] = dense_score(spec, source, logits, scored)
    expected["about"] = {
        "seed": seed,
        "margins": {k: v for k in ("indexer", "router", "argmax") if (v := getattr(margins, k)) != float("inf")},
        "experts_used": {k.removeprefix("model.layers.").split(".")[0]: len(v) for k, v in margins.experts.items()},
    }
    return expected


def check(spec, model, margins: Margins, decoded: list[int], scored: list[int], logits: list[torch.Tensor]) -> None:
    """Rejects a model whose choices are close, or change when the same weights are run in f64."""
    margins.require()
    wide = Margins(spec.family)
    model.double()
    with watch(model, wide):
        again = [forward(model, decoded), forward(model, scored)]
    model.float()
    if any(not torch.equal(a, b) for a, b in zip(margins.choices, wide.choices, strict=True)):
        raise Rejected("a choice changes in f64")
    worst = max((a.double() - b).abs().max().item() for a, b in zip(logits, again))
    if worst > 1e-4:
        raise Rejected(f"logits move by {worst:.1e} in f64")


def dense_score(spec, source: Path, sparse: torch.Tensor, ids: list[int]) -> dict:
    """What the same model says with DSA switched off; it must differ, or the fixture would not notice a missing DSA."""
    margins, model = Margins(spec.family), load(source, spec, dense=True)
    with watch(model, margins):
        logits = forward(model, ids)
    margins.on_logits(logits)
    margins.require()
    if (logits - sparse).abs().max() < 0.1:
        raise Rejected("DSA makes no difference")
    result = score(logits, ids)
    return {k: result[k] for k in ("argmax", "nll", "last_logits")}


def make(spec, out: Path, tries: int = 400) -> None:
    """Writes one fixture from the first of a fixed series of seeds that is not rejected."""
    first = zlib.crc32(spec.name.encode()) % 1_000_000 * 1000
    for seed in range(first, first + tries):
        with tempfile.TemporaryDirectory() as temp:
            made = Path(temp)
            try:
                expected = attempt(spec, made, seed)
            except Rejected as why:
                print(f"{spec.name}: seed {seed} rejected: {why}", flush=True)
                continue
            home = made / spec.dirs[0]
            store.write_json(home / "config.json", spec.config)
            if spec.generation_config:
                store.write_json(home / "generation_config.json", spec.generation_config)
            store.write_expected(made / "expected.json", expected)
            store.replace(made, out)
        size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
        print(f"{spec.name}: seed {seed}, {size // 1024} KiB, {expected['finish_reason']}, {expected['about']}", flush=True)
        return
    raise SystemExit(f"{spec.name}: no seed of {tries} will do")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="fixtures to make (default: all)")
    parser.add_argument("--out", type=Path, default=FIXTURE_DIR, help="parent directory of the fixtures")
    parser.add_argument("--random", type=int, metavar="SEED", help="make one fixture of a random kind instead, in OUT itself")
    parser.add_argument("--family", help="with --random: the family (default: glm_moe_dsa)")
    parser.add_argument("--large", type=Path, metavar="DIR", help="write a model with 1.3 GB of experts instead")
    parser.add_argument("--drafts", type=Path, metavar="DIR", help="write a deep model whose drafts come true instead")
    parser.add_argument("--converted", action="store_true", help="write only what quantised versions of existing fixtures say")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if args.large or args.drafts:
        import large

        if args.large:
            large.write_large(args.large)
        if args.drafts:
            large.write_drafts(args.drafts)
    elif args.random is not None:
        from draw import random_spec

        if args.out == FIXTURE_DIR:
            parser.error("--random needs --out")
        make(random_spec(args.random, args.family), args.out)
    else:
        unknown = set(args.names) - {s.name for s in FIXTURES}
        if unknown:
            parser.error(f"unknown fixtures: {', '.join(sorted(unknown))}")
        for at, spec in enumerate(FIXTURES):
            if args.names and spec.name not in args.names:
                continue
            if not args.converted:
                make(spec, args.out / spec.name)
            if spec.family.converts and (not spec.packed or spec.name == "fp8-block") and spec.prompt != "chat":
                converted.write(spec, args.out / spec.name, record, at)


if __name__ == "__main__":
    main()
