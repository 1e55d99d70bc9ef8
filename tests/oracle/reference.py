"""The reference: the library's own model, in f32, with eager attention, on the weights as stored."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from families import Family
from store import assemble

# A choice closer than this could fall the other way under another, equally good, order of summation.
MIN_CUT = 1e-5
# Logits are promised to 1e-3 on either side, so an argmax must be clearer than twice that.
MIN_ARGMAX = 2e-3


class Rejected(Exception):
    """This seed makes a model whose choices are too close to call, or that would not notice a fault."""


class Margins:
    """Smallest gaps between what was chosen and what was not.

    Those of the indexer and the router are relative to max(1, the largest value of the row); those of the argmax, which
    must exceed the tolerance on logits, are absolute.
    """

    def __init__(self, family: Family):
        self.family = family
        self.indexer = self.router = self.argmax = float("inf")
        self.experts: dict[str, set] = {}
        self.choices: list[torch.Tensor] = []
        self.selecting = False

    def gap(self, values: torch.Tensor, k: int) -> float:
        """The gap between the k-th and the next value of each row; infinite if nothing is left out."""
        if k >= values.shape[-1]:
            return float("inf")
        top = values.double().topk(k + 1, dim=-1).values
        scale = values.double().abs().amax(dim=-1).clamp(min=1.0)
        return ((top[..., k - 1] - top[..., k]) / scale).min().item()

    def on_indexer(self, scores: torch.Tensor, k: int) -> None:
        """`scores` [1, S, T] after the causal mask; only rows with more than k causal positions have a cut."""
        _, queries, keys = scores.shape
        for row in range(queries):
            causal = keys - queries + row + 1
            if causal > k:
                self.indexer = min(self.indexer, self.gap(scores[0, row, :causal], k))
                self.choices.append(scores[0, row, :causal].topk(k).indices.sort().values)

    def on_router(self, name: str, module, args, output) -> None:
        for values, count in self.family.choice(module, args, output[0]):
            self.router = min(self.router, self.gap(values, count))
        self.experts.setdefault(name, set()).update(output[2].flatten().tolist())
        self.choices.append(output[2].sort(dim=-1).values)

    def on_logits(self, logits: torch.Tensor) -> None:
        top = logits.topk(2, dim=-1).values
        self.argmax = min(self.argmax, (top[..., 0] - top[..., 1]).min().item())

    def require(self) -> None:
        """Rejects a model with a choice that is too close to call."""
        if min(self.indexer, self.router) < MIN_CUT or self.argmax < MIN_ARGMAX:
            raise Rejected(f"margins: indexer {self.indexer:.1e}, router {self.router:.1e}, argmax {self.argmax:.1e}")


@contextmanager
def watch(model, margins: Margins):
    """Records every choice that the model makes. The indexer returns only indices, so its topk call is observed."""
    topk, handles = torch.Tensor.topk, []

    def observed(tensor, k, *args, **kwargs):
        if margins.selecting:
            margins.selecting = False
            margins.on_indexer(tensor, k)
        return topk(tensor, k, *args, **kwargs)

    def enter(*_):
        margins.selecting = True

    for name, module in model.named_modules():
        kind = type(module).__name__.lower()
        if kind.endswith("indexer"):
            handles.append(module.register_forward_pre_hook(enter))
        elif kind.endswith("topkrouter"):
            handles.append(module.register_forward_hook(lambda m, i, o, name=name: margins.on_router(name, m, i, o)))
    torch.Tensor.topk = observed
    try:
        yield
    finally:
        torch.Tensor.topk = topk
        for handle in handles:
            handle.remove()


def library_config(spec) -> dict:
    """The keys of the fixture's language model with the model type of the library's class."""
    config = spec.text | {"model_type": spec.family.library or spec.config["model_type"]}
    config.pop("quantization_config", None)  # the library gets values
    return config


def blank(spec):
    """The library's model of a fixture, without its weights."""
    config = dict(library_config(spec))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


def load(out: Path, spec, dense: bool):
    """Loads a fixture through the library's own checkpoint reader. `dense` attends to everything."""
    cfg = library_config(spec)
    if dense and spec.indexed:
        cfg["index_topk"] = 1 << 20
    with tempfile.TemporaryDirectory() as temp:
        assemble(out, spec, cfg, Path(temp))
        model, info = AutoModelForCausalLM.from_pretrained(
            temp, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True,
            key_mapping=spec.family.unwrap,
        )
    mtp = f"model.layers.{cfg['num_hidden_layers']}."
    wrong = [k for k in info["unexpected_keys"] if not (spec.mtp and k.startswith(mtp))]
    wrong += [k for k in info["missing_keys"] if not (".indexer." in k and not spec.indexer and dense)]
    wrong += list(info["mismatched_keys"])
    if wrong:
        raise RuntimeError(f"{spec.name}: the library does not load these tensors: {wrong[:5]}")
    return model.eval()


@torch.no_grad()
def forward(model, ids: list[int]) -> torch.Tensor:
    """Logits [S, vocab] of a whole sequence, without a cache."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@torch.no_grad()
def greedy(model, prompt: list[int], new: int, stop: set[int]) -> list[int]:
    """Greedy continuation, one full forward a token. A stop token ends it and is its last token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + new:
        ids.append(forward(model, ids)[-1].argmax().item())
        if ids[-1] in stop:
            break
    return ids[len(prompt):]


@torch.no_grad()
def greedy_cached(model, prompt: list[int], new: int, stop: set[int]) -> list[int]:
    """The same with the library's cache: prompt at once, then one token a step."""
    out, step, cache = [], prompt, None
    while len(out) < new:
        result = model(input_ids=torch.tensor([step]), cache=cache, use_cache=True)
        cache, step = result.cache, [result.logits[0, -1].argmax().item()]
        out += step
        if step[0] in stop:
            break
    return out


def numbers(values) -> list[float]:
    """f32 values as the shortest decimals that give them back."""
    return [float(str(v)) for v in np.asarray(values, dtype=np.float32)]


def score(logits: torch.Tensor, ids: list[int]) -> dict:
    """What `score` prints for `ids`."""
    logp = logits.double().log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "ids": ids,
        "argmax": logits.argmax(-1).tolist(),
        "logprobs": numbers(logp),
        "nll": float(-logp.mean()),
        "last_logits": numbers(logits[-1]),
    }
