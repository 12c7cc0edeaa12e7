"""`howsmooth bounds` and `howsmooth worst`: what tokens in a ball can do to one layer, in theory and in a search."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from howsmooth import verbs
from howsmooth.cli import Answer, show_table
from howsmooth.cli.options import read_matrices
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.paper.adversarial import TokenGrowth, grow, scan
from howsmooth.paper.ball import draw_ladder, draw_worst
from howsmooth.paper.drawing import check_figure
from howsmooth.search import Configured, WorstCase
from howsmooth.settings import whole

_WIDEST = 2**14  # of a layer made here: its weights take 2 GB
_LAYER = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """A layer by itself: one head made of a number, the layer of a file, or a random one."""

    gamma: float | None = None
    heads: int = 1
    weights: Path | None = None
    random: bool = False
    causal: bool = False
    seed: int = 0

    def attention(self, width: int) -> Attention:
        """The layer, for tokens of this width where that is free."""
        if (self.gamma is not None) + (self.weights is not None) + self.random != 1:
            raise BadInputError("expected one of --gamma, --weights and --random, got none or several; give one of them")
        width = whole(width, f"--width from 1 to {_WIDEST}", "correct it", least=1, below=_WIDEST + 1)
        heads = whole(self.heads, "--heads of at least 1", "correct it", least=1)
        if self.gamma is not None:
            eye = torch.eye(width, dtype=torch.float64)
            return Attention.from_matrices(self.gamma * eye, eye, causal=self.causal)
        if self.weights is not None:
            return _from_file(self.weights, heads, self.causal)
        draw = torch.Generator().manual_seed(self.seed)
        w_q, w_k, w_v, w_o = (0.02 * torch.randn(width, width, generator=draw) for _ in range(4))
        return Attention(w_q, w_k, w_v, w_o, heads=heads, causal=self.causal)


def bounds(
    *,
    radius: float,
    n: int = 1024,
    width: int = 1,
    layer: LayerOptions,
    figure: Path | None = None,
) -> Answer:
    """Print every upper bound on L over a ball of tokens.

    n: number of tokens
    figure: also draw the bounds for n = 1 … 10⁹ (.png, .pdf or .svg)

    Example: howsmooth bounds --gamma -1 --radius 2 --n 1024 --figure ladder.png
    """
    if figure is not None:
        check_figure(figure)
    attn = layer.attention(width)
    table = verbs.bounds(attn, n=n, radius=radius)
    return Answer(table.to_dict(), lambda: print(table), figure and (lambda: draw_ladder(figure, attn, radius)))


def worst(
    *,
    radius: float,
    n: int = 8,
    lengths: tuple[int, ...] | None = (8, 16, 32, 64, 128),
    width: int = 2,
    layer: LayerOptions,
    head: int | None = None,
    best: bool = False,
    steps: int | None = None,
    restarts: int | None = None,
    figure: Path | None = None,
) -> Answer:
    """Find the worst inputs of one layer.

    The paper's configurations of tokens show how L grows with their number. Gradient ascent looks for the worst tokens.

    n: number of tokens for the search; 0 skips it
    lengths: numbers of tokens of the growth curve, as in 8,16,32; an empty text skips it
    head: the head that builds the growth curve's tokens [default: the worst]
    best: also show the worst configuration of any family and head
    steps: steps of the search from each start [default: 100 for few numbers, else 30]
    restarts: number of starts of the search [default: 4 to 32]
    figure: also draw growth, tokens and climb (.png, .pdf or .svg)

    Example: howsmooth worst --gamma -1 --radius 2 --n 8 --figure worst.png
    """
    if figure is not None:
        check_figure(figure)
    attn = layer.attention(width)
    if not lengths and n == 0:
        raise BadInputError("expected --n or --lengths, got neither; ask for a search, a growth curve or both")
    growth = grow(attn, radius, lengths, head=head, seed=layer.seed) if lengths else None
    others = scan(attn, [radius], lengths, seed=layer.seed) if best and lengths else []
    case = verbs.worst_case(attn, n, radius, steps=steps, restarts=restarts, seed=layer.seed) if n else None
    parts = {"growth": growth and growth.to_dict(), "worst": case and case.to_dict(), "best": [row.to_dict() for row in others]}
    return Answer(parts, lambda: _show(growth, others, case), figure and (lambda: draw_worst(figure, growth, case)))


def _show(growth: TokenGrowth | None, others: list[Configured], worst: WorstCase | None) -> None:
    if growth is not None:
        lines = [
            {
                "n": row.n,
                "L": row.estimate.value,
                "at most": row.estimate.upper,
                "bound B7": bound,
                "L / B7": math.exp(math.log(row.estimate.value) - log),
            }
            for row, log, bound in zip(growth.rows, growth.log_bounds, growth.bounds, strict=True)
        ]
        show_table(f"{growth.configuration}: L grows like n^{growth.exponent:.3f}", lines, digits=5)
    for row in others:
        print(f"worst configuration of {row.n} tokens: L = {row.estimate.value:.5g}, {row.configuration}")
    if worst is not None:
        print(f"worst of {len(worst.tokens)} tokens: {worst}")
        print(f"certified: {worst.estimate}")


def _from_file(path: Path, heads: int, causal: bool) -> Attention:
    tensors = read_matrices(path, ("A", "V"), ("w_q", "w_k", "w_v"))
    if {"A", "V"} <= set(tensors):
        return Attention.from_matrices(tensors["A"].double(), tensors["V"].double(), causal=causal)
    if not set(tensors) <= set(_LAYER):
        raise BadInputError(f"expected tensors among {', '.join(_LAYER)}, got {', '.join(sorted(tensors))}; name them so")
    return Attention(**tensors, heads=heads, causal=causal)  # pyright: ignore[reportArgumentType]  named as its fields
