"""The largest singular values: whether their intervals hold, how wide they are, and what eight cost against one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import resources
from typing import Any
from unittest.mock import patch

import torch
from tests.problems.layers import random_layer
from torch import Tensor

import howsmooth as hs
from benchmarks.harness import WrongAnswerError
from howsmooth.maps import AttentionJacobian, AutodiffJacobian

TITLE = "Eight singular values with certify=0.02 against the dense float64 spectrum; products against those of one value"
K, CERTIFY = 8, 0.02
RANDOM, REAL = 1000, 200
Case = tuple[Callable[..., Any], Callable[[], Tensor] | None]  # of k, and the truth where it is at hand


def run(quick: bool, cases: int | None = None) -> list[dict[str, Any]]:
    random, real = (30, 6) if quick else (cases or RANDOM, max(1, cases // 5) if cases else REAL)
    rows = [_row("random layers", _random(random)), _row("demo, 3 or 4 tokens", _real(real))]
    for n in (32,) if quick else (32, 128):
        rows.append(_row(f"demo, {n} tokens", _demo(n)))
    if not quick:
        rows.append(_row("8B shape, 16 tokens", _wide()))
    return rows


def _row(what: str, cases: Iterator[Case]) -> dict[str, Any]:
    found: list[tuple[hs.Spectrum, Tensor | None]] = []
    steps, products = {1: 0, K: 0}, {1: 0, K: 0}
    for measure, truth in cases:
        for k in (1, K):
            with Counted() as counted:
                spectrum = measure(k)
            steps[k] += spectrum.steps
            products[k] += counted.count
        found.append((spectrum, None if truth is None else truth()[:K]))  # pyright: ignore[reportPossiblyUnboundVariable]
    missed = sum(int(((s.lower > t) | (s.upper < t)).sum()) for s, t in found if t is not None)
    if missed:
        raise WrongAnswerError(f"{what}: expected all intervals to hold, {missed} do not; nothing is reported")
    widths = torch.stack([s.widths for s, _ in found])
    return {
        "layers": what,
        "solved": len(found),
        "missed": missed if found[0][1] is not None else "–",
        "widest": float(widths.max()),
        "certified": sum(s.status == "certified" for s, _ in found),
        "pairs of one": steps[1] / len(found),
        "pairs of eight": steps[K] / len(found),
        "ratio": steps[K] / steps[1],
        "products of one": products[1] / len(found),
        "products of eight": products[K] / len(found),
        "products ratio": products[K] / products[1],
    }


class Counted:
    """Counts vectors that are multiplied with a Jacobian or its transpose, in any precision, a pair as two."""

    def __enter__(self) -> "Counted":
        self.count, self._stack = 0, ExitStack()
        for kind in (AttentionJacobian, AutodiffJacobian):
            for name, each in {"jvp": 1, "vjp": 1, "gram": 2, "rounded": 1}.items():
                if name in vars(kind):
                    self._stack.enter_context(patch.object(kind, name, self._counting(vars(kind)[name], each)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _counting(self, product: Callable[..., Any], each: int) -> Callable[..., Any]:
        def counting(operator: Any, v: Any) -> Any:
            before = self.count
            answer = product(operator, v)
            self.count = before + each * len(v if isinstance(v, Tensor) else v.vector)  # one that calls others is one
            return answer

        return counting


def _dense(layer: hs.Attention, x: Tensor) -> Tensor:
    J = hs.jacobian(layer.to(torch.float64), x.double()).dense()
    return torch.linalg.eigvalsh(J @ J.mT if len(J) < J.shape[1] else J.mT @ J).flip(0).clamp_min(0.0).sqrt()


def _random(count: int) -> Iterator[Case]:
    for seed in range(count):
        layer, x = random_layer(seed)

        def measure(k: int, layer: hs.Attention = layer, x: Tensor = x) -> hs.Spectrum:
            return hs.lipschitz(layer, x, k=k, certify=CERTIFY, solver=hs.GolubKahan())

        yield measure, lambda layer=layer, x=x: _dense(layer, x)


def _real(count: int) -> Iterator[Case]:
    model = hs.load("demo", device="cpu")
    words = resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8").split()
    for i in range(count):
        capture = model.capture(text=" ".join(words[40 * i : 40 * i + 40]), n=3 + i % 2)
        layer = i % capture.num_layers

        def measure(k: int, capture: hs.Capture = capture, layer: int = layer) -> Any:
            return capture.measure(layer, k=k, certify=CERTIFY).spectrum

        yield measure, lambda capture=capture, layer=layer: _dense(capture.attention(layer), capture.tokens(layer))


def _demo(n: int) -> Iterator[Case]:
    text = resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8")
    capture = hs.load("demo", device="cpu").capture(text=text, n=n)
    for layer in range(capture.num_layers):
        yield lambda k, layer=layer: capture.measure(layer, k=k, certify=CERTIFY).spectrum, None


def _wide() -> Iterator[Case]:
    """A layer of Llama-3-8B's shape, 4096 wide with 32 heads that share 8 keys, with random weights."""
    random, width, heads, shared = torch.Generator().manual_seed(0), 4096, 32, 8
    rows = (width, width // heads * shared, width // heads * shared, width)
    weights = [torch.randn(r, width, generator=random) / width**0.5 for r in rows]
    layer = hs.Attention(*weights, heads=heads, kv_heads=shared, causal=True)
    x = torch.randn(16, width, generator=random)
    yield lambda k: hs.lipschitz(layer, x, k=k, certify=CERTIFY), None
