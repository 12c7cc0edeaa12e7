"""`howsmooth split`: does splitting a token pay, and the mean-field experiments."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.measures.measure import Measure

split = typer.Typer(no_args_is_help=True, help="Does splitting a token do more than moving it? The mean-field experiments.")
app.add_typer(split, name="split")

Out = Annotated[Path, typer.Option(help="folder for the table (CSV) and the figure (PNG, PDF)")]
OUT = Path("split-report")


@split.command()
def ask(
    weights: Annotated[Path, typer.Option(help="a safetensors file with A, V, points, and perhaps masses and positions")],
    causal: Annotated[bool, typer.Option(help="masked attention; needs positions")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Does splitting pay for one head at one measure? Prints the gain, the token and both constants.

    Example: howsmooth split ask --weights head.safetensors
    """
    with one_sentence(debug):
        from howsmooth.verbs import splitting

        attn, mu = _problem(weights, causal)
        found = splitting(attn, mu)
        print(json.dumps(found.to_dict(), indent=1) if as_json else found)


@split.command("map")
def map_(
    alphas: Annotated[str, typer.Option(help="numbers A, separated by commas")] = "-1,1",
    masses: Annotated[str, typer.Option(help="masses of the first atom, separated by commas")] = "0.5,0.9,0.99",
    extent: Annotated[float, typer.Option(help="half the side of the map")] = 12.0,
    points: Annotated[int, typer.Option(help="grid points along a side")] = 121,
    out: Out = OUT,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Map where two atoms on a line split, for several A.

    Example: howsmooth split map --alphas=-1,1 --out figures
    """
    with one_sentence(debug):
        from howsmooth.paper.meanfield_figures import draw_map
        from howsmooth.paper.splitting_maps import splitting_map

        rows = splitting_map(_numbers(alphas), _numbers(masses), extent, points)
        best = {}
        for r in rows:
            key = f"A = {r.alpha:g}, mass {r.mass:g}"
            part = best.setdefault(key, {"case": key, "points": 0, "pays": 0, "largest gain": 0.0, "x": 0.0, "y": 0.0})
            part["points"] += 1
            part["pays"] += r.gain > 1
            if r.gain > part["largest gain"]:
                part.update({"largest gain": r.gain, "x": r.x, "y": r.y})
        _finish(rows, list(best.values()), out, "splitting-map", draw_map, as_json)


@split.command()
def growth(
    alpha: Annotated[float, typer.Option(help="the number A")] = -1.0,
    radii: Annotated[
        str, typer.Option(help="radii, separated by commas")
    ] = "0.5,0.75,1,1.25,1.5,1.75,2,2.25,2.5,2.75,3,3.25,3.5",
    out: Out = OUT,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The worst two Diracs against the radius, beside the mean-field bounds.

    Example: howsmooth split growth --alpha=-1 --out figures
    """
    with one_sentence(debug):
        from howsmooth.paper import meanfield
        from howsmooth.paper.meanfield_figures import draw_growth

        rows = meanfield.growth(alpha, _numbers(radii))
        _finish(rows, [r.to_dict() for r in rows], out, "meanfield-growth", draw_growth, as_json)


@split.command()
def convergence(
    alpha: Annotated[float, typer.Option(help="the number A")] = -1.0,
    radius: Annotated[float, typer.Option(help="the density is a Gaussian cut to [-radius, radius]")] = 2.0,
    longest: Annotated[int, typer.Option(help="most atoms; powers of two up to it")] = 512,
    seeds: Annotated[int, typer.Option(help="samples of every length")] = 8,
    out: Out = OUT,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How constants of n tokens reach the mean-field constant, for a density and in the worst case.

    Example: howsmooth split convergence --radius 2 --out figures
    """
    with one_sentence(debug):
        from howsmooth.paper import meanfield
        from howsmooth.paper.meanfield_figures import draw_convergence

        if longest < 4 or seeds < 1 or not 0 < radius < 1e3:
            raise BadInputError(
                f"expected longest ≥ 4, seeds ≥ 1 and a radius up to 1000, got {longest}, {seeds} and {radius}; correct them"
            )
        lengths = [2**k for k in range(2, longest.bit_length()) if 2**k <= longest]
        one = torch.ones(1, 1, dtype=torch.float64)
        attn = Attention.from_matrices(alpha * one, one)
        worst = meanfield.worst_clusters(alpha, radius, [2**k for k in range(1, 21)])
        rows = meanfield.convergence(
            attn, lambda x: torch.exp(-x[:, 0].square() / 2), radius, lengths, seeds, fine=max(1024, 4 * lengths[-1])
        )
        table = []
        for kind in ("grid", "samples"):
            for n in lengths:
                errors = [r.error for r in rows if r.kind == kind and r.n == n]
                table.append({"kind": kind, "n": n, "mean error": sum(errors) / len(errors), "limit": rows[0].limit})
        table += [{"kind": "worst", "n": r.n, "mean error": r.error, "limit": r.limit} for r in worst]
        _finish([*rows, *worst], table, out, "meanfield-convergence", draw_convergence, as_json)


@split.command()
def frequency(
    count: Annotated[int, typer.Option(help="random layers and inputs for every length and size of logits")] = 100,
    width: Annotated[int, typer.Option(help="width of the tokens")] = 4,
    heads: Annotated[int, typer.Option(help="heads of the layers")] = 1,
    causal: Annotated[bool, typer.Option(help="masked attention")] = False,
    lengths: Annotated[str, typer.Option(help="numbers of tokens, separated by commas")] = "2,4,8,16",
    logits: Annotated[str, typer.Option(help="sizes of logits, separated by commas")] = "0.5,1,2,4,8",
    seed: Annotated[int, typer.Option(help="of the random layers")] = 0,
    out: Out = OUT,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """How often inputs of random layers split.

    Example: howsmooth split frequency --count 100 --out figures
    """
    with one_sentence(debug):
        from howsmooth.paper import splitting_maps as study
        from howsmooth.paper.meanfield_figures import draw_frequency

        sizes = [int(n) for n in _numbers(lengths)]
        if min(sizes) < 1:
            raise BadInputError(f"expected lengths of at least 1, got {lengths}; count tokens")
        cases = study.frequency(study.random_layers(count, sizes, _numbers(logits), width, heads, causal, seed))
        rows = study.shares(cases)
        _finish(cases, [r.to_dict() for r in rows], out, "splitting-frequency", lambda _, o: draw_frequency(rows, o), as_json)


def _finish(rows: Sequence[Any], table: list[dict[str, Any]], out: Path, name: str, draw: Any, as_json: bool) -> None:
    """Everything is computed by now: write the table and the figure, print."""
    from howsmooth.paper.meanfield_figures import folder, save_rows

    place = folder(out)
    files = [save_rows(rows, place / f"{name}.csv"), *draw(rows, place)]
    if as_json:
        finite = [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in table]
        print(json.dumps({"rows": finite, "files": [str(f) for f in files]}, indent=1))
        return
    heads = list(table[0])
    cells = [[f"{v:.6g}" if isinstance(v, float) else str(v) for v in row.values()] for row in table]
    widths = [max(len(h), *(len(c[i]) for c in cells)) for i, h in enumerate(heads)]
    for line in (heads, *cells):
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))
    for file in files:
        print(file)


def _numbers(text: str) -> list[float]:
    try:
        return [float(t) for t in text.split(",")]
    except ValueError:
        raise BadInputError(f"expected numbers separated by commas, got {text!r}; write them like 0.5,1,2") from None


def _problem(weights: Path, causal: bool) -> tuple[Attention, Measure]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise BadInputError(
            f"expected a safetensors file, got {weights} ({error}); save A, V and points with safetensors"
        ) from None
    if not {"A", "V", "points"} <= set(tensors):
        got = ", ".join(sorted(tensors)) or "none"
        raise BadInputError(f"expected tensors A, V and points in {weights}, got {got}; name them so")
    attn = Attention.from_matrices(tensors["A"].double(), tensors["V"].double(), causal=causal)
    return attn, Measure(tensors["points"].double(), tensors.get("masses"), tensors.get("positions"))
