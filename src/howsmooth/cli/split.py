"""`howsmooth split`: does splitting a token pay, and the mean-field experiments."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from howsmooth import paper
from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.cli.shared import numbers_of, print_json, read_matrices, show_table
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.measures import Measure
from howsmooth.verbs import splitting

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
        tensors = read_matrices(weights, ("A", "V", "points"))
        attn = Attention.from_matrices(tensors["A"].double(), tensors["V"].double(), causal=causal)
        mu = Measure(tensors["points"].double(), tensors.get("masses"), tensors.get("positions"))
        answer = splitting(attn, mu)
        print(json.dumps(answer.to_dict(), indent=1) if as_json else answer)


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
        rows = paper.splitting_map(_numbers(alphas), _numbers(masses), extent, points)
        _finish(rows, paper.map_table(rows), out, "splitting-map", paper.draw_map, as_json)


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
        rows = paper.worst_measures(alpha, _numbers(radii))
        _finish(rows, rows, out, "meanfield-growth", paper.draw_worst_measures, as_json)


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
        if longest < 4 or seeds < 1 or not 0 < radius < 1e3:
            raise BadInputError(
                f"expected longest ≥ 4, seeds ≥ 1 and a radius up to 1000, got {longest}, {seeds} and {radius}; correct them"
            )
        lengths = [2**k for k in range(2, longest.bit_length())]
        rows = paper.gaussian_convergence(alpha, radius, lengths, seeds)
        rows += paper.worst_clusters(alpha, radius, [2**k for k in range(1, 21)])
        _finish(rows, paper.convergence_table(rows), out, "meanfield-convergence", paper.draw_convergence, as_json)


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
        sizes = [int(n) for n in _numbers(lengths)]
        if min(sizes) < 1:
            raise BadInputError(f"expected lengths of at least 1, got {lengths}; count tokens")
        cases = paper.frequency(paper.random_layers(count, sizes, _numbers(logits), width, heads, causal, seed))
        table = paper.shares(cases)
        _finish(cases, table, out, "splitting-frequency", lambda _, place: paper.draw_frequency(table, place), as_json)


Rows = list[dict[str, Any]]


def _finish(rows: Rows, table: Rows, out: Path, name: str, draw: Callable[[Rows, Path], list[Path]], as_json: bool) -> None:
    """Everything is computed by now: write the table and the figure, print."""
    place = paper.make_folder(out)
    files = [paper.save_rows(rows, place / f"{name}.csv"), *draw(rows, place)]
    if as_json:
        print_json({"rows": table, "files": [str(f) for f in files]})
        return
    show_table(name, [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in table])
    for file in files:
        print(file)


def _numbers(text: str) -> list[float]:
    return numbers_of(text, "numbers", "0.5,1,2")
