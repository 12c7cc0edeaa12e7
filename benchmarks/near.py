"""Bounds around an input on real layers: how wide, beside what ascent attains, and what they cost in solves at the input."""

from typing import Any

from torch import Tensor

import howsmooth as hs
from benchmarks.harness import WrongAnswerError, side_by_side
from benchmarks.layers import gpt2_layer
from howsmooth.study import alice
from howsmooth.theory.around import AroundAttention, Neighbourhood
from howsmooth.theory.over_ball.table import ball_bounds

TITLE = "The largest constant near an input: the demo model at 32 tokens, and a layer of GPT-2's size at 256"
SHARES = (1e-5, 1e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)  # r over the mean length of a token


def run(quick: bool) -> list[dict[str, Any]]:
    rows = []
    capture = hs.load("demo", device="cpu").capture(text=alice()[2000:6000], n=32)
    for k in (2,) if quick else (0, 2, 4):
        rows += _demo(f"demo, layer {k}", capture.attention(k), capture.tokens(k), SHARES[1:3] if quick else SHARES)
    for causal in (False,) if quick else (False, True):
        rows.append(_cost(causal))
    return rows


def _demo(name: str, layer: hs.Attention, x: Tensor, shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Changes are relative to the constant at the input, which is measured to 1e-7."""
    x = x.double()
    at, size = hs.lipschitz(layer, x, tol=1e-7).value, float(x.norm(dim=-1).mean())
    bounds, rows = AroundAttention(layer, x), []
    for share in shares:
        area = Neighbourhood.of(x, share * size)
        certified = bounds.within(area).slope
        attained = hs.lipschitz(layer, x, within=share * size, tol=1e-7, steps=4).value
        if not attained <= certified:
            raise WrongAnswerError(f"{name}, r = {share:g}|x|: {attained} is attained above the bound {certified}")
        ball = min(b.value for b in ball_bounds(layer, len(x), area.reach) if b.side == "upper" and b.value is not None)
        rows.append(
            {
                "layer": name,
                "r/|x|": share,
                "upper/L": certified / at,
                "lower/L": attained / at,
                "change/attained": (certified - at) / (attained - at),
                "ball/upper": ball / certified,
                "solves": "",
            }
        )
    return rows


def _cost(causal: bool) -> dict[str, Any]:
    """What the upper end costs beside a solve at the input, itself included."""
    layer, x = gpt2_layer(256, causal)
    area = Neighbourhood.of(x, 1e-3 * float(x.norm(dim=-1).mean()))
    at = hs.lipschitz(layer, x)

    def upper() -> float:
        return AroundAttention(layer, area.point, norm=hs.lipschitz(layer, x).upper).within(area).slope

    solve, bound = side_by_side([lambda: hs.lipschitz(layer, x), upper], repeat=3)
    certified = upper()
    ball = min(b.value for b in ball_bounds(layer, 256, area.reach) if b.side == "upper" and b.value is not None)
    name = "GPT-2's size, causal" if causal else "GPT-2's size"
    return {
        "layer": name,
        "r/|x|": 1e-3,
        "upper/L": certified / at.value,
        "lower/L": "",
        "change/attained": "",
        "ball/upper": ball / certified,
        "solves": bound / solve,
    }
