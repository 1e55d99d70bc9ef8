"""Gradients written by hand, where autograd's own pass over memory many times: norms, gated units, and experts."""

import torch
import torch.nn.functional as F


class Norm(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension; `x` of any float type, the result as `x`, sums in f32."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        y = x.float()
        inverse = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (y * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, inverse = ctx.saved_tensors
        y, grad = x.float() * inverse, grad.float()
        scaled = grad * y
        by_weight = scaled.flatten(0, -2).sum(0)
        along = (scaled @ weight).unsqueeze_(-1).div_(x.shape[-1])
        out = (grad * weight).sub_(y.mul_(along)).mul_(inverse)
        return out.to(x.dtype), by_weight, None


def gated(gate_up):
    """silu(gate) * up of [N, 2 I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gated_backward(gate_up, grad):
    """The gradient of `gated`, [N, 2 I]."""
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate_up)
    by_gate, by_up = out.chunk(2, -1)
    sigmoid = gate.sigmoid()
    torch.mul(gate, sigmoid, out=by_up)
    # silu' = s + silu (1 - s) = s (1 + gate (1 - s)) = s + silu - silu s
    torch.addcmul(by_up, by_up, sigmoid, value=-1, out=by_gate)
    by_gate.add_(sigmoid).mul_(up).mul_(grad)
    by_up.mul_(grad)
    return out


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return gated(gate_up)

    @staticmethod
    def backward(ctx, grad):
        return gated_backward(ctx.saved_tensors[0], grad)


class Grouped(torch.autograd.Function):
    """Experts on rows [N, H] that are sorted by expert, `counts` of them each; `gate_up` [E, 2 I, H], `down` [E, H, I]."""

    @staticmethod
    def forward(ctx, rows, gate_up, down, counts):
        inner = rows.new_empty(len(rows), gate_up.shape[1])
        for part, weight, out in zip(rows.split(counts), gate_up, inner.split(counts)):
            torch.mm(part, weight.T, out=out)
        units, result = gated(inner), torch.empty_like(rows)
        for part, weight, out in zip(units.split(counts), down, result.split(counts)):
            torch.mm(part, weight.T, out=out)
        ctx.save_for_backward(rows, gate_up, down, inner, units)
        ctx.counts = counts
        return result

    @staticmethod
    def backward(ctx, grad):
        rows, gate_up, down, inner, units = ctx.saved_tensors
        counts = ctx.counts
        grad = grad.contiguous()
        by_units, by_down = torch.empty_like(units), torch.empty_like(down)
        for part, unit, weight, out, by_weight in zip(grad.split(counts), units.split(counts), down, by_units.split(counts), by_down):
            torch.mm(part, weight, out=out)
            torch.mm(part.T, unit, out=by_weight)
        by_inner = gated_backward(inner, by_units)
        by_rows, by_gate_up = torch.empty_like(rows), torch.empty_like(gate_up)
        for part, row, weight, out, by_weight in zip(by_inner.split(counts), rows.split(counts), gate_up, by_rows.split(counts), by_gate_up):
            torch.mm(part, weight, out=out)
            torch.mm(part.T, row, out=by_weight)
        return by_rows, by_gate_up, by_down, None


class Permute(torch.autograd.Function):
    """Rows in another order. Autograd's own backward of an index adds row by row."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
