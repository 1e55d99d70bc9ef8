"""The reference for drafts. The library has no multi-token prediction, so this is written on top of its decoder layer.

Position t is given the token at t + 1 and the hidden state of t. Everything is computed anew for every draft, without a cache.
"""

import copy
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from reference import Margins, Rejected, load, watch

DEPTH = 4


class Mtp(nn.Module):
    """The prediction layer of a model, with the embedding, the head and the rotary angles of that model."""

    def __init__(self, model, spec, tensors: dict[str, torch.Tensor]):
        super().__init__()
        config = copy.deepcopy(model.config)
        index = config.num_hidden_layers
        self.indexed = spec.indexed and spec.mtp_indexer and spec.indexer
        config.num_hidden_layers += 1
        # Other families say by first_k_dense_replace which layers are sparse.
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        # Layers of these families pass choices on.
        self.chained = hasattr(config, "indexer_types")
        if self.chained:
            config.indexer_types = [*config.indexer_types, "full" if self.indexed else "shared"]
        self.share = bool(spec.text.get("index_share_for_mtp_iteration"))
        self.model = model
        self.layer = type(model.model.layers[0])(config, index)
        norm = lambda: type(model.model.norm)(config.hidden_size, config.rms_norm_eps)
        self.enorm, self.hnorm, self.head_norm = norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        own = {name.removeprefix(f"model.layers.{index}."): t.float() for name, t in tensors.items()}
        for part in ("enorm", "hnorm", "eh_proj"):
            getattr(self, part).weight.data = own.pop(f"{part}.weight")
        self.head_norm.weight.data = own.pop("shared_head.norm.weight")
        self.layer.load_state_dict(fuse(own))
        self.eval()

    def rows(self, tokens: list[int], hidden: torch.Tensor, kept: torch.Tensor | None = None):
        """Outputs [S, hidden] of the positions that `tokens` follow, and the positions chosen, [1, S, k]. `kept` is the choice of the first
        positions; those after them attend to what the last of them does."""
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))[None]
        count = x.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)[None, None]
        angles = self.model.model.rotary_emb(x, positions)
        if not self.chained:
            return self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)[0], None
        indexer = self.layer.self_attn.indexer
        choice = None
        if not self.indexed:
            choice = torch.arange(count).expand(1, count, count)
        elif kept is not None:
            choice = torch.cat([kept, kept[:, -1:].expand(1, count - kept.shape[1], -1)], dim=1)
            self.layer.self_attn.indexer = None
        out, chosen = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles, prev_topk_indices=choice)
        self.layer.self_attn.indexer = indexer
        return out[0], chosen

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(self.head_norm(out))

    @torch.no_grad()
    def first(self, ids: list[int], margins: Margins) -> list[int]:
        """The first draft after each position but the last: what follows the token after it."""
        hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        with watch(self.layer, margins):
            logits = self.logits(self.rows(ids[1:], hidden[:-1])[0])
        margins.on_logits(logits)
        return logits.argmax(-1).tolist()

    @torch.no_grad()
    def drafts(self, ids: list[int], margins: Margins) -> list[int]:
        """What is drafted after `ids`, of which the last is the token that was chosen from the logits after the others."""
        hidden = self.model.model(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state[0]
        tokens, drafts, kept = ids[1:], [], None
        while len(drafts) < DEPTH:
            with watch(self.layer, margins):
                out, chosen = self.rows(tokens + drafts, hidden, kept)
            if kept is None and self.share and self.indexed:
                kept = chosen
            logits = self.logits(out[-1])
            margins.on_logits(logits[None])
            drafts.append(logits.argmax().item())
            hidden = torch.cat([hidden, self.head_norm(out[-1:])])
        return drafts


def fuse(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that were stored one by one, as the layer class has them."""
    experts = {int(m[1]) for name in own if (m := re.match(r"mlp\.experts\.(\d+)\.", name))}
    if not experts:
        return own
    one = lambda e, part: own.pop(f"mlp.experts.{e}.{part}_proj.weight")
    ids = sorted(experts)
    gate_up = torch.stack([torch.cat([one(e, "gate"), one(e, "up")]) for e in ids])
    down = torch.stack([one(e, "down") for e in ids])
    return own | {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}


def record(source: Path, spec, expected: dict) -> dict:
    """What the model drafts on its way through the prompt and its greedy continuation."""
    prefix = f"model.layers.{spec.config['num_hidden_layers']}."
    tensors = {}
    for shard in sorted(source.rglob("*.safetensors")):
        tensors.update({name: t for name, t in load_file(shard).items() if name.startswith(prefix)})
    mtp = Mtp(load(source, spec, dense=not spec.indexer), spec, tensors)
    prompt, tokens = expected["prompt_ids"], expected["token_ids"]

    def everything(margins: Margins):
        ids = prompt + tokens
        ends = range(len(prompt) + 1, len(ids) + 1)
        return mtp.first(ids, margins), [mtp.drafts(ids[:end], margins) for end in ends]

    margins, wide = Margins(spec.family), Margins(spec.family)
    first, drafts = everything(margins)
    margins.require()
    mtp.double()
    if everything(wide) != (first, drafts):
        raise Rejected("a draft changes in f64")
    follow = [draft[0] == token for draft, token in zip(drafts, tokens[1:])]
    share = sum(follow) / max(len(follow), 1)
    low, high = spec.mtp_agrees or (0.0, 1.0)
    if not low <= share <= high:
        raise Rejected(f"{share:.2f} of the first drafts come true")
    return {"first": first, "drafts": drafts, "come_true": share}
