"""Whether `converged` means it: how often a settled value is off by more than `tol`, and what settling costs.

Random layers of all scales, uniform attention whose values hide their top direction from a fixed start, and the demo model's
layers. What is right is the largest value that any run of the case attained, one of them to 1e-4 from another start.
"""

import math
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.models import MapName

TITLE = "Settled values: `converged` and off by more than `tol`"
TOLS = (1e-3, 1e-2)
FINE, OTHER = 1e-4, 12345  # accuracy and seed of the run that the others are held against

Solve = Callable[..., hs.Estimate]  # of tol and seed


def run(quick: bool) -> list[dict[str, Any]]:
    random, blinded = (60, 12) if quick else (1000, 48)
    kinds: dict[str, Iterator[Solve]] = {
        "random": (_asked(*random_layer(seed)) for seed in range(random)),
        "blinded": (_asked(*blinded_layer(case)) for case in range(blinded)),
        "demo": _demo([64] if quick else [64, 128, 256]),
    }
    return [row for kind, cases in kinds.items() for row in _rows(kind, cases)]


def _rows(kind: str, cases: Iterator[Solve]) -> list[dict[str, Any]]:
    found: dict[float, list[tuple[hs.Estimate, float]]] = {tol: [] for tol in TOLS}  # with what is right
    for solve in cases:
        coarse = {tol: solve(tol=tol) for tol in TOLS}
        truth = max(solve(tol=FINE, seed=OTHER).value, *(est.value for est in coarse.values()))
        for tol, est in coarse.items():
            found[tol].append((est, truth))
    return [_row(kind, tol, pairs) for tol, pairs in found.items()]


def _row(kind: str, tol: float, found: list[tuple[hs.Estimate, float]]) -> dict[str, Any]:
    errors = [1 - est.value / truth for est, truth in found]
    return {
        "layers": kind,
        "tol": tol,
        "solved": len(found),
        "converged": sum(est.status == "converged" for est, _ in found),
        "off": sum(est.status == "converged" and error > tol for (est, _), error in zip(found, errors, strict=True)),
        "worst error": max(errors),
        "interval missed": sum(est.upper < truth for est, truth in found),
        "mean steps": sum(est.steps for est, _ in found) / len(found),
    }


def _asked(layer: hs.Attention, x: Tensor) -> Solve:
    return lambda **how: hs.lipschitz(layer, x, solver=hs.GolubKahan(), **how)


def random_layer(seed: int) -> tuple[hs.Attention, Tensor]:
    """Width 64 to 512 and 100 to 1000 tokens, small ones more often; 1 to 8 heads, weights 0.5 to 4 times 1/√width, float32."""
    random = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=random))]

    width, heads, causal = pick(*[64] * 12, *[128] * 5, 256, 256, 512), pick(1, 2, 4, 8), pick(False, True)
    n = int(100 * 10 ** float(torch.rand((), generator=random) ** 2))
    scale = 0.5 * 8 ** float(torch.rand((), generator=random))
    weights = [scale * torch.randn(width, width, generator=random) / width**0.5 for _ in range(4)]
    biases = [scale * torch.randn(width, generator=random) if pick(False, True) else None for _ in range(3)]
    x = torch.randn(n, width, generator=random)
    return hs.Attention(*weights, heads=heads, causal=causal, b_q=biases[0], b_k=biases[1], b_v=biases[2]), x


def blinded_layer(case: int) -> tuple[hs.Attention, Tensor]:
    """`A = 0`, and values whose top input is orthogonal to `randn(d)` of seed 0; `σ₁/σ₂` from 1.002 to 1.17."""
    random = torch.Generator().manual_seed(case)
    d, n = (64, 128)[case % 2], (100, 300)[case // 2 % 2]
    ratio = math.exp(math.log(1.002) + (math.log(1.17) - math.log(1.002)) * (case % 12) / 11)
    fixed = torch.randn(d, generator=torch.Generator().manual_seed(0)).double()
    inputs = torch.randn(d, d, generator=random).double()
    inputs[:, 0] -= fixed * (fixed @ inputs[:, 0]) / fixed.square().sum()
    inputs = torch.linalg.qr(inputs)[0]  # the first column keeps its direction
    sigma = torch.cat([torch.tensor([ratio]), torch.linspace(1, 0.1, d - 1)]).double()
    values = torch.linalg.qr(torch.randn(d, d, generator=random).double())[0] * sigma @ inputs.mT
    return hs.Attention.from_matrices(torch.zeros(d, d), values.float()), torch.randn(n, d, generator=random)


def _demo(lengths: list[int]) -> Iterator[Solve]:
    """All layers: attention through the model and in closed form, and whole blocks."""
    model = hs.load("demo", device="cpu")
    text = resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8")
    for n in lengths:
        captured = model.capture(text=text, n=n)
        for layer in range(captured.num_layers):
            asked: list[tuple[MapName, bool]] = [("attention", False), ("attention", True), ("block", False)]
            for map, closed in asked:
                yield _measured(captured, layer, map, closed)


def _measured(captured: hs.Capture, layer: int, map: MapName, closed: bool) -> Solve:
    def solve(tol: float, seed: int | None = None) -> hs.Estimate:
        return captured.measure(layer, map, closed=closed, tol=tol, seed=seed).estimate

    return solve
