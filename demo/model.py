"""The demo model: glm_moe_dsa in torch, written for training on a few CPU cores.

Parameters have the names of the checkpoint, but for the routed experts, which are stacked: [E, 2, I, H] (gate, then up) and
[E, H, I]. measure.py compares it with the transformers library.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from fast import Gated, Grouped, Norm, Permute


@dataclass
class Shape:
    """Hyperparameters; the names that config.json has."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    n_routed_experts: int = 16
    num_experts_per_tok: int = 3
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 48
    qk_rope_head_dim: int = 16
    v_head_dim: int = 64
    index_n_heads: int = 8
    index_head_dim: int = 32
    index_topk: int = 256
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    routed_scaling_factor: float = 1.0
    # Which layers have an indexer of their own; the others use the choice of the one before. The last is the MTP layer's.
    indexer_types: list[str] = field(default_factory=lambda: ["full", "full", "shared", "full", "shared", "shared", "full"])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return Norm.apply(x, self.weight, self.eps)


def round_to(weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """What the container keeps of a weight: codes of `bits`, one scale for `group` columns (0: for a row)."""
    top = 2 ** (bits - 1) - 1
    cols = weight.shape[-1]
    group = group or cols
    padded = F.pad(weight, (0, -cols % group)).unflatten(-1, (-1, group))
    scale = padded.abs().amax(-1, keepdim=True) / top
    scale = torch.where(scale == 0, 1.0, scale)
    return ((padded / scale).round().clamp(-top, top) * scale).flatten(-2)[..., :cols]


class Rounding:
    """Whether the forward pass sees rounded weights; the gradient passes through."""

    on = False

    @classmethod
    def of(cls, weight, bits=4, group=64):
        return weight + (round_to(weight.detach(), bits, group) - weight.detach()) if cls.on else weight


class Linear(nn.Linear):
    def __init__(self, i: int, o: int, std: float | None = None):
        super().__init__(i, o, bias=False)
        nn.init.normal_(self.weight, std=i**-0.5 if std is None else std)

    def forward(self, x):
        return F.linear(x, Rounding.of(self.weight))


class Mlp(nn.Module):
    def __init__(self, hidden: int, inter: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, inter), Linear(hidden, inter)
        self.down_proj = Linear(inter, hidden, std=0.0)

    def forward(self, x):
        return self.down_proj(Gated.apply(torch.cat([self.gate_proj(x), self.up_proj(x)], -1)))


class Router(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(s.n_routed_experts, s.hidden_size) * s.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(s.n_routed_experts))
        self.top_k, self.scaling = s.num_experts_per_tok, s.routed_scaling_factor

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling, scores


class Experts(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        e, i, h = s.n_routed_experts, s.moe_intermediate_size, s.hidden_size
        self.gate_up = nn.Parameter(torch.randn(e, 2, i, h) * h**-0.5)
        self.down = nn.Parameter(torch.zeros(e, h, i))


class Moe(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.gate, self.experts = Router(s), Experts(s)
        self.shared_experts = Mlp(s.hidden_size, s.moe_intermediate_size)
        self.counts = torch.zeros(s.n_routed_experts)
        self.balance = None

    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        chosen, weights, scores = self.gate(x)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = torch.bincount(flat, minlength=len(self.counts))
        self.counts += counts
        if self.training:
            # A small pull towards even shares; the bias does the rest.
            share = counts / len(flat)
            self.balance = len(counts) * (share * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
        kind = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        rows = Permute.apply(x.to(kind).unsqueeze(1).expand(-1, chosen.shape[1], -1).reshape(len(flat), -1), order, inverse)
        gate_up = Rounding.of(self.experts.gate_up).flatten(1, 2).to(kind)
        down = Rounding.of(self.experts.down).to(kind)
        out = Grouped.apply(rows, gate_up, down, counts.tolist())
        out = Permute.apply(out, inverse, order).view(*chosen.shape, -1)
        routed = (weights.unsqueeze(1).to(kind) @ out).squeeze(1)
        return (routed + self.shared_experts(x)).view(shape)


def rotate(x, cos, sin):
    """Interleaved pairs (2i, 2i+1) of [..., T, D]; the result has the evens first, which no scalar product notices."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Indexer(nn.Module):
    def __init__(self, s: Shape):
        super().__init__()
        self.s = s
        self.wq_b = Linear(s.q_lora_rank, s.index_n_heads * s.index_head_dim)
        self.wk = Linear(s.hidden_size, s.index_head_dim)
        self.k_norm = nn.LayerNorm(s.index_head_dim, eps=1e-6)
        self.weights_proj = Linear(s.hidden_size, s.index_n_heads)

    def forward(self, x, q_resid, cos, sin, rows=None):
        """Scores [B, R, T] of every position for the given rows; later positions are not masked."""
        s, d = self.s, self.s.qk_rope_head_dim
        with torch.autocast("cpu", enabled=False):
            x, q_resid = x.float(), q_resid.float()
            k = self.k_norm(self.wk(x))
            k = torch.cat([rotate(k[..., :d], cos, sin), k[..., d:]], -1)
            if rows is not None:
                x, q_resid, cos, sin = x[:, rows], q_resid[:, rows], cos[rows], sin[rows]
            q = self.wq_b(q_resid).unflatten(-1, (s.index_n_heads, -1)).transpose(1, 2)
            q = torch.cat([rotate(q[..., :d], cos, sin), q[..., d:]], -1)
            scores = F.relu(q @ k.transpose(-1, -2).unsqueeze(1) * s.index_head_dim**-0.5)
            weights = F.linear(x, self.weights_proj.weight) * s.index_n_heads**-0.5
            return torch.einsum("bhrt,brh->brt", scores, weights)


class Context:
    """What the layers of one pass share: rotations, sparse masks, and what the indexers learn from."""

    def __init__(self, s: Shape, length: int, sparse: bool, rows=None):
        angles = torch.arange(length)[:, None] * s.rope_theta ** (-torch.arange(0, s.qk_rope_head_dim, 2) / s.qk_rope_head_dim)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.sparse, self.rows = sparse and length > s.index_topk, rows
        self.topk = s.index_topk
        self.allowed = None  # [B, 1, T, T], chosen by the last full layer
        self.scores = None  # [B, R, T], of the last full layer
        self.groups = []  # (scores, attention of every layer that uses them)
        self.causal = torch.ones(length, length, dtype=torch.bool).tril()

    def choose(self, scores):
        scores = scores.masked_fill(~self.causal, -math.inf)
        chosen = scores.topk(self.topk, -1).indices
        self.allowed = (torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True) & self.causal).unsqueeze(1)

    def indexer_loss(self):
        """Mean KL divergence from the attention of the layers to what the indexer makes of it, on the sampled rows."""
        mask = ~self.causal[self.rows]
        total = 0.0
        for scores, attentions in self.groups:
            target = sum(attentions) / len(attentions)
            log = scores.masked_fill(mask, -1e30).log_softmax(-1)
            total = total + (target * (target.clamp_min(1e-9).log() - log)).sum(-1).mean()
        return total / len(self.groups)


class Attention(nn.Module):
    def __init__(self, s: Shape, full: bool):
        super().__init__()
        self.s = s
        self.q_a_proj = Linear(s.hidden_size, s.q_lora_rank)
        self.q_a_layernorm = RMSNorm(s.q_lora_rank, 1e-6)
        self.q_b_proj = Linear(s.q_lora_rank, s.num_attention_heads * (s.qk_nope_head_dim + s.qk_rope_head_dim))
        self.kv_a_proj_with_mqa = Linear(s.hidden_size, s.kv_lora_rank + s.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(s.kv_lora_rank, 1e-6)
        self.kv_b_proj = Linear(s.kv_lora_rank, s.num_attention_heads * (s.qk_nope_head_dim + s.v_head_dim))
        self.o_proj = Linear(s.num_attention_heads * s.v_head_dim, s.hidden_size, std=0.0)
        if full:
            self.indexer = Indexer(s)

    def forward(self, x, ctx: Context):
        s = self.s
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid).unflatten(-1, (s.num_attention_heads, -1)).transpose(1, 2)
        c, k_rope = self.kv_a_proj_with_mqa(x).split([s.kv_lora_rank, s.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c)).unflatten(-1, (s.num_attention_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([s.qk_nope_head_dim, s.v_head_dim], -1)
        cos, sin = ctx.cos.to(q.dtype), ctx.sin.to(q.dtype)
        q = torch.cat([q[..., : s.qk_nope_head_dim], rotate(q[..., s.qk_nope_head_dim :], cos, sin)], -1)
        k_rope = rotate(k_rope, cos, sin).unsqueeze(1).expand(-1, s.num_attention_heads, -1, -1)
        k = torch.cat([k_nope, k_rope], -1)
        if hasattr(self, "indexer"):
            if ctx.sparse:
                with torch.no_grad():
                    ctx.choose(self.indexer(x, q_resid, ctx.cos, ctx.sin))
            if ctx.rows is not None:
                ctx.groups.append((self.indexer(x.detach(), q_resid.detach(), ctx.cos, ctx.sin, ctx.rows), []))
        if ctx.rows is not None:
            with torch.no_grad():
                logits = (q[:, :, ctx.rows] @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
                ctx.groups[-1][1].append(logits.masked_fill(~ctx.causal[ctx.rows], -math.inf).softmax(-1).mean(1))
        if ctx.sparse:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=ctx.allowed)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, s: Shape, full: bool, sparse: bool):
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s, full)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = Moe(s) if sparse else Mlp(s.hidden_size, s.intermediate_size)

    def forward(self, x, ctx: Context, dropout: float):
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), ctx), dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class MtpLayer(Layer):
    """Predicts token t+2 from the embedding of t+1 and the hidden state of t."""

    def __init__(self, s: Shape):
        super().__init__(s, full=True, sparse=True)
        self.enorm, self.hnorm = RMSNorm(s.hidden_size, s.rms_norm_eps), RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.eh_proj = Linear(2 * s.hidden_size, s.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(s.hidden_size, s.rms_norm_eps)})

    def forward(self, embedded, hidden, ctx: Context, dropout: float = 0.0):
        """`hidden` [B, T, H] comes after `model.norm`, or is this layer's own result; so does the result."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return self.shared_head["norm"](super().forward(x, ctx, dropout))


class Model(nn.Module):
    """The layers; the one at index num_hidden_layers is the MTP layer. The head is the embedding."""

    def __init__(self, s: Shape):
        super().__init__()
        self.s, self.dropout = s, 0.0
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        full = [kind == "full" for kind in s.indexer_types]
        layers = [Layer(s, full[i], i > 0) for i in range(s.num_hidden_layers)]
        self.layers = nn.ModuleList([*layers, MtpLayer(s)])
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)

    def table(self):
        """The embedding as the container has it."""
        return Rounding.of(self.embed_tokens.weight, 8, 0)

    def hidden(self, ids, ctx: Context):
        """[B, T] -> [B, T, H] after the last norm."""
        x = F.embedding(ids, self.table())
        for layer in self.layers[:-1]:
            x = layer(x, ctx, self.dropout)
        return self.norm(x)

    def draft(self, ids, hidden, ctx: Context):
        """`ids` [B, T] are one ahead of `hidden` [B, T, H]."""
        return self.layers[-1](F.embedding(ids, self.table()), hidden, ctx, self.dropout)

    def logits(self, hidden):
        return F.linear(hidden, self.table())

    def routers(self):
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Moe)]
