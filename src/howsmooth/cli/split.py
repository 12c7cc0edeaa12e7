"""`howsmooth split`: does splitting a token pay, and the mean-field experiments."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from howsmooth.cli import options
from howsmooth.cli.root import Told, app, command, show_table
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.measures import Measure
from howsmooth.paper import drawing, meanfield
from howsmooth.run import check_writable
from howsmooth.settings import number, whole
from howsmooth.verbs import splitting

split = typer.Typer(no_args_is_help=True, help="Does splitting a token do more than moving it? The mean-field experiments.")
app.add_typer(split, name="split")

Rows = list[dict[str, Any]]
Alpha = Annotated[float, typer.Option(help="the number A")]
Out = Annotated[Path, typer.Option(help="folder for the table (CSV) and the figure (PNG, PDF)")]
OUT = Path("split-report")


@command("ask", split)
def ask(
    weights: Annotated[Path, typer.Option(help="a safetensors file with A, V, points, and perhaps masses and positions")],
    causal: Annotated[bool, typer.Option(help="masked attention; needs positions")] = False,
) -> Told:
    """Does splitting pay for one head at one measure? Prints the gain, the token and both constants.

    Example: howsmooth split ask --weights head.safetensors
    """
    tensors = options.read_matrices(weights, ("A", "V", "points"))
    attn = Attention.from_matrices(tensors["A"].double(), tensors["V"].double(), causal=causal)
    mu = Measure(tensors["points"].double(), tensors.get("masses"), tensors.get("positions"))
    answer = splitting(attn, mu)
    return Told(answer.to_dict(), lambda: print(answer))


@command("map", split)
def draw_map(
    alphas: Annotated[str, typer.Option(help="numbers A, separated by commas")] = "-1,1",
    masses: Annotated[str, typer.Option(help="masses of the first atom, separated by commas")] = "0.5,0.9,0.99",
    extent: Annotated[float, typer.Option(help="half the side of the map")] = 12.0,
    points: Annotated[int, typer.Option(help="grid points along a side")] = 121,
    out: Out = OUT,
) -> Told:
    """Map where two atoms on a line split, for several A.

    Example: howsmooth split map --alphas=-1,1 --out figures
    """
    check_writable(out / "splitting-map.csv")
    numbers, shares = options.numbers_of(alphas, "--alphas", "-1,1"), options.numbers_of(masses, "--masses", "0.5,0.9")
    rows = meanfield.splitting_map(numbers, shares, extent, points)
    return _write(rows, meanfield.map_table(rows), out, "splitting-map", meanfield.draw_map)


@command("growth", split)
def growth(
    alpha: Alpha = -1.0,
    radii: Annotated[
        str, typer.Option(help="radii, separated by commas")
    ] = "0.5,0.75,1,1.25,1.5,1.75,2,2.25,2.5,2.75,3,3.25,3.5",
    out: Out = OUT,
) -> Told:
    """The worst two Diracs against the radius, beside the mean-field bounds.

    Example: howsmooth split growth --alpha=-1 --out figures
    """
    check_writable(out / "meanfield-growth.csv")
    rows = meanfield.worst_measures(alpha, options.numbers_of(radii, "--radii", "0.5,1,2"))
    return _write(rows, rows, out, "meanfield-growth", meanfield.draw_worst_measures)


@command("convergence", split)
def convergence(
    alpha: Alpha = -1.0,
    radius: Annotated[float, typer.Option(help="the density is a Gaussian cut to [-radius, radius]")] = 2.0,
    longest: Annotated[int, typer.Option(help="most atoms; powers of two up to it")] = 512,
    seeds: Annotated[int, typer.Option(help="samples of every length")] = 8,
    out: Out = OUT,
) -> Told:
    """How constants of n tokens reach the mean-field constant, for a density and in the worst case.

    Example: howsmooth split convergence --radius 2 --out figures
    """
    longest = whole(longest, "--longest from 4 to 65536", "correct it", least=4, below=2**16 + 1)
    seeds = whole(seeds, "--seeds of at least 1", "correct it", least=1)
    radius = number(radius, "a --radius above 0 and below 1000", "correct it", above=0.0, below=1e3)
    check_writable(out / "meanfield-convergence.csv")
    lengths = [2**k for k in range(2, longest.bit_length())]
    rows = meanfield.gaussian_convergence(alpha, radius, lengths, seeds)
    rows += meanfield.worst_clusters(alpha, radius, [2**k for k in range(1, 21)])
    return _write(rows, meanfield.convergence_table(rows), out, "meanfield-convergence", meanfield.draw_convergence)


@command("frequency", split)
def frequency(
    count: Annotated[int, typer.Option(help="random layers and inputs for every length and size of logits")] = 100,
    width: Annotated[int, typer.Option(help="width of the tokens")] = 4,
    heads: Annotated[int, typer.Option(help="heads of the layers")] = 1,
    causal: options.Causal = False,
    lengths: Annotated[str, typer.Option(help="numbers of tokens, separated by commas")] = "2,4,8,16",
    logits: Annotated[str, typer.Option(help="sizes of logits, separated by commas")] = "0.5,1,2,4,8",
    seed: options.Seed = 0,
    out: Out = OUT,
) -> Told:
    """How often inputs of random layers split.

    Example: howsmooth split frequency --count 100 --out figures
    """
    counts = options.numbers_of(lengths, "--lengths", "2,4,8", int)
    if min(counts) < 1:
        raise BadInputError(f"expected lengths of at least 1, got {lengths}; count tokens")
    check_writable(out / "splitting-frequency.csv")
    sizes = options.numbers_of(logits, "--logits", "0.5,1,2")
    cases = meanfield.frequency(meanfield.random_layers(count, counts, sizes, width, heads, causal, seed))
    table = meanfield.shares(cases)
    return _write(cases, table, out, "splitting-frequency", lambda _, place: meanfield.draw_frequency(table, place))


def _write(rows: Rows, table: Rows, out: Path, name: str, draw: Callable[[Rows, Path], list[Path]]) -> Told:
    """Everything is computed by now: write the table and the figure."""
    place = drawing.make_folder(out)
    files = [drawing.save_rows(rows, place / f"{name}.csv"), *draw(rows, place)]

    def show() -> None:
        show_table(name, table, digits=6)
        print(*files, sep="\n")

    return Told({"rows": table, "files": [str(f) for f in files]}, show)
