"""Muon: momentum descent whose step, for a matrix, is the nearest orthogonal matrix.

The one idea: a gradient of a matrix is dominated by few directions; with all its singular values set to one,
the rare directions are learned as fast as the common ones.  On the story grammar it needs about half of the
steps of AdamW.  (Keller Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# A quintic whose iteration drives singular values in (0, 1] to about one.
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315


def orthogonal(matrix: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """The matrix with its singular values moved to about one, by Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=CUBIC, alpha=QUINTIC), x, beta=LINEAR)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, and scaled so that AdamW's learning rates fit."""

    def __init__(
        self, matrices: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                speed = self.state[weight].setdefault("speed", torch.zeros_like(weight))
                speed.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(speed, group["momentum"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * max(weight.shape) ** 0.5)
