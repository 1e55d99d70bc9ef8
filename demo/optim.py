"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations. For all matrices but the embedding and routers."""

import torch


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """U V^T of [N, R, C], roughly: singular values come out between 0.7 and 1.2."""
    x = g.bfloat16()
    if tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in ((3.4445, -4.7750, 2.0315),) * 5:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.05):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            # Matrices of one shape are handled together: experts are many and small.
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape[-2:], []).append(p)
            for (rows, cols), params in shapes.items():
                updates = []
                for p in params:
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]).reshape(-1, rows, cols))
                sizes = [len(u) for u in updates]
                whole = orthogonal(torch.cat(updates)).float() * max(1, rows / cols) ** 0.5
                for p, update in zip(params, whole.split(sizes)):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.view_as(p), alpha=-group["lr"])
