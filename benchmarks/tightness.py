"""How far each bound is from the constant it bounds: geometric mean of bound / L on random layers, and soundness counted."""

import math
from typing import Any

import torch

import howsmooth as hs
from benchmarks.harness import WrongAnswerError
from howsmooth.theory.at_point.table import point_bounds
from howsmooth.theory.bound import Bound
from howsmooth.theory.over_ball.table import ball_bounds

TITLE = "Bound / measured L, geometric mean (upper bounds at the point; ball bounds at R = max |x_i|)"


def run(quick: bool) -> list[dict[str, Any]]:
    logs: dict[tuple[str, str, str], list[float]] = {}
    for seed in range(20 if quick else 200):
        for kind in ("full", "causal", "two heads", "phases", "phases and norms"):
            layer, x = _random_layer(seed, kind)
            measured = hs.lipschitz(layer, x, solver=hs.DenseSVD()).value
            radius = x.norm(dim=-1).max().item()
            rows: list[Bound] = [*point_bounds(layer, x), *ball_bounds(layer, len(x), radius)]
            for b in rows:
                if b.side == "upper" and b.log_value is not None:
                    if b.log_value < math.log(measured):
                        raise WrongAnswerError(f"{b.id} is below a measured constant at seed {seed}; the bound is wrong")
                    logs.setdefault((b.id, b.name, kind), []).append(b.log_value - math.log(measured))
    return [
        {"bound": id, "name": name, "layer": kind, "cases": len(v), "geometric mean": math.exp(min(sum(v) / len(v), 700.0))}
        for (id, name, kind), v in logs.items()
    ]


def _random_layer(seed: int, kind: str) -> tuple[hs.Attention, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    d, n = 4 + seed % 5, 4 + 3 * (seed % 11)
    A, V = (torch.randn(d, d, generator=random, dtype=torch.float64) / d**0.5 for _ in range(2))
    x = torch.randn(n, d, generator=random, dtype=torch.float64) * (0.3 + 1.2 * (seed % 7) / 6)
    if kind in ("full", "causal"):
        return hs.Attention.from_matrices(A, V, causal=kind == "causal"), x
    if kind == "two heads":
        B, W = (torch.randn(d, d, generator=random, dtype=torch.float64) / d**0.5 for _ in range(2))
        return hs.Attention.from_matrices(torch.stack([A, B]), torch.stack([V, W])), x
    eye = torch.eye(d, dtype=torch.float64)
    norm = hs.RMSNorm(torch.ones(d, dtype=torch.float64)) if kind == "phases and norms" else None
    phases = hs.Rotary.from_base(d // 2 * 2, n)
    return hs.Attention(A, eye, V, scale=1.0, causal=True, q_norm=norm, k_norm=norm, rotary=phases), x
