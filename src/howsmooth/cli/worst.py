"""`howsmooth worst`."""

import math
from pathlib import Path
from typing import Annotated

import torch
import typer

from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.cli.shared import lengths_of, one_head, print_json, read_matrices
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.paper import TokenGrowth, check_figure, draw_worst, grow, scan
from howsmooth.search import Configured, WorstCase
from howsmooth.verbs import worst_case

_LAYER = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")


@app.command()
def worst(
    radius: Annotated[float, typer.Option(help="radius of the ball the tokens live in")],
    n: Annotated[int, typer.Option(help="number of tokens for the search; 0 for none")] = 8,
    lengths: Annotated[str, typer.Option(help="lengths of the growth curve, as in 8,16,32; empty for none")] = "8,16,32,64,128",
    gamma: Annotated[float | None, typer.Option(help="one head with A = gamma · I and V = I")] = None,
    width: Annotated[int, typer.Option(help="width of the tokens for --gamma and of a random layer")] = 2,
    heads: Annotated[int, typer.Option(help="heads of a random layer, or of the layer in --weights")] = 1,
    weights: Annotated[Path | None, typer.Option(help="a safetensors file with A and V, or with w_q, w_k, w_v, w_o")] = None,
    random: Annotated[
        bool, typer.Option("--random", help="a random layer: normal weights of deviation 0.02, as in GPT-2")
    ] = False,
    causal: Annotated[bool, typer.Option(help="masked attention")] = False,
    head: Annotated[
        int | None, typer.Option(help="the head that builds the growth curve's tokens; the worst by default")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="beside them, the worst configuration of any family and head")] = False,
    steps: Annotated[int | None, typer.Option(help="measurements of every start")] = None,
    restarts: Annotated[int | None, typer.Option(help="starts of the search")] = None,
    seed: Annotated[int, typer.Option(help="of the random layer and the search")] = 0,
    figure: Annotated[Path | None, typer.Option(help="also draw growth, tokens and climb (.png, .pdf or .svg)")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find bad inputs: how far the paper's configurations grow, and the worst tokens that gradient ascent finds.

    Example: howsmooth worst --gamma -1 --radius 2 --n 8 --figure worst.png
    """
    with one_sentence(debug):
        if figure is not None:
            check_figure(figure)
        attn = _layer(gamma, width, heads, weights, random, causal, seed)
        counts = lengths_of(lengths or None)
        if counts is None and n == 0:
            raise BadInputError("expected --n or --lengths, got neither; ask for a search, a growth curve or both")
        growth = grow(attn, radius, counts, head=head, seed=seed) if counts else None
        others = scan(attn, [radius], counts, seed=seed) if best and counts else []
        case = worst_case(attn, n, radius, steps=steps, restarts=restarts, seed=seed) if n else None
        if as_json:
            parts = {"growth": growth and growth.to_dict(), "worst": case and case.to_dict()}
            print_json(parts | {"best": [row.to_dict() for row in others]})
        else:
            _show(growth, others, case)
        if figure is not None:
            path = draw_worst(figure, growth, case)
            if not as_json:
                print(path)


def _show(growth: TokenGrowth | None, others: list[Configured], worst: WorstCase | None) -> None:
    if growth is not None:
        print(f"{growth.configuration}: L grows like n^{growth.exponent:.3f}")
        print(f"{'n':>6}{'L':>12}{'at most':>12}{'bound B7':>12}{'L / B7':>9}")
        for row, log in zip(growth.rows, growth.log_bounds, strict=True):
            share = math.exp(math.log(row.estimate.value) - log)
            bound = math.exp(min(log, 700.0))
            print(f"{row.n:>6}{row.estimate.value:>12.5g}{row.estimate.upper:>12.5g}{bound:>12.5g}{share:>9.3g}")
    for row in others:
        print(f"worst configuration of {row.n} tokens: L = {row.estimate.value:.5g}, {row.configuration}")
    if worst is not None:
        print(f"worst of {len(worst.tokens)} tokens: {worst}")
        print(f"certified: {worst.estimate}")


def _layer(
    gamma: float | None, width: int, heads: int, weights: Path | None, random: bool, causal: bool, seed: int
) -> Attention:
    if (gamma is not None) + (weights is not None) + random != 1:
        raise BadInputError("expected one of --gamma, --weights and --random, got none or several; give one of them")
    if width < 1 or heads < 1:
        raise BadInputError(f"expected --width and --heads of at least 1, got {width} and {heads}; correct them")
    if gamma is not None:
        return one_head(gamma, width, causal)
    if weights is not None:
        return _from_file(weights, heads, causal)
    draw = torch.Generator().manual_seed(seed)
    w_q, w_k, w_v, w_o = (0.02 * torch.randn(width, width, generator=draw) for _ in range(4))
    return Attention(w_q, w_k, w_v, w_o, heads=heads, causal=causal)


def _from_file(path: Path, heads: int, causal: bool) -> Attention:
    tensors = read_matrices(path, ("A", "V"), ("w_q", "w_k", "w_v"))
    if {"A", "V"} <= set(tensors):
        return Attention.from_matrices(tensors["A"].double(), tensors["V"].double(), causal=causal)
    if not set(tensors) <= set(_LAYER):
        raise BadInputError(f"expected tensors among {', '.join(_LAYER)}, got {', '.join(sorted(tensors))}; name them so")
    return Attention(**tensors, heads=heads, causal=causal)  # pyright: ignore[reportArgumentType]  named as its fields
