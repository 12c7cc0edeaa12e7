"""`howsmooth split`: does splitting a token pay, and the mean-field experiments."""

from pathlib import Path
from typing import Any

from howsmooth.cli import Answer, show_table
from howsmooth.cli.options import read_matrices
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.measures import Measure
from howsmooth.paper.drawing import Drawn, make_folder, save_both, save_rows
from howsmooth.paper.meanfield import (
    convergence_figure,
    convergence_table,
    gaussian_convergence,
    radius_figure,
    worst_clusters,
    worst_measure,
)
from howsmooth.paper.splitting_maps import frequency as measure_frequency
from howsmooth.paper.splitting_maps import grid_figure, map_table, random_layers, share_figure, shares, splitting_map
from howsmooth.run import check_writable
from howsmooth.settings import number, whole
from howsmooth.verbs import splitting

_GROUP = "Does splitting a token do more than moving it?"
OUT = Path("split-report")

Rows = list[dict[str, Any]]


def ask(*, weights: Path, causal: bool = False) -> Answer:
    """Does splitting pay for one head at one measure?

    The answer is the gain, the token and both constants.

    weights: a safetensors file with A, V, points, and perhaps masses and positions
    causal: masked attention; needs positions

    Example: howsmooth split ask --weights head.safetensors
    """
    tensors = read_matrices(weights, ("A", "V", "points"))
    attn = Attention.from_matrices(tensors["A"].double(), tensors["V"].double(), causal=causal)
    mu = Measure(tensors["points"].double(), tensors.get("masses"), tensors.get("positions"))
    answer = splitting(attn, mu)
    return Answer(answer.to_dict(), lambda: print(answer))


def map_(
    *,
    alphas: tuple[float, ...] = (-1.0, 1.0),
    masses: tuple[float, ...] = (0.5, 0.9, 0.99),
    extent: float = 12.0,
    points: int = 121,
    out: Path = OUT,
) -> Answer:
    """Map where two atoms on a line split, for several A.

    alphas: numbers A, separated by commas
    masses: masses of the first atom, separated by commas
    extent: half the side of the map
    points: grid points along a side

    Example: howsmooth split map --alphas=-1,1 --out figures
    """
    check_writable(out / "splitting-map.csv")
    grids = splitting_map(alphas, masses, extent, points)
    cells = [point for grid in grids for point in grid.cells()]
    return _write(cells, map_table(grids), out, "splitting-map", grid_figure(grids))


def growth(
    *,
    alpha: float = -1.0,
    radii: tuple[float, ...] = (0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5),
    out: Path = OUT,
) -> Answer:
    """Find the worst two Diracs for each radius.

    The mean-field bounds stand beside them.

    radii: radii, separated by commas

    Example: howsmooth split growth --alpha=-1 --out figures
    """
    check_writable(out / "meanfield-growth.csv")
    rows = [worst_measure(alpha, radius) for radius in radii]
    cells = [row.cells() for row in rows]
    return _write(cells, cells, out, "meanfield-growth", radius_figure(rows))


def convergence(*, alpha: float = -1.0, radius: float = 2.0, longest: int = 512, seeds: int = 8, out: Path = OUT) -> Answer:
    """How constants of n tokens reach the mean-field one.

    One curve is for a density, the other for the worst case.

    radius: the density is a Gaussian cut to [-radius, radius]
    longest: most atoms; powers of two up to it
    seeds: samples of every length

    Example: howsmooth split convergence --radius 2 --out figures
    """
    longest = whole(longest, "--longest from 4 to 65536", "correct it", least=4, below=2**16 + 1)
    seeds = whole(seeds, "--seeds of at least 1", "correct it", least=1)
    radius = number(radius, "a --radius above 0 and below 1000", "correct it", above=0.0, below=1e3)
    check_writable(out / "meanfield-convergence.csv")
    lengths = [2**k for k in range(2, longest.bit_length())]
    rows = gaussian_convergence(alpha, radius, lengths, seeds)
    rows += worst_clusters(alpha, radius, [2**k for k in range(1, 21)])
    cells = [row.cells() for row in rows]
    return _write(cells, convergence_table(rows), out, "meanfield-convergence", convergence_figure(rows))


def frequency(
    *,
    count: int = 100,
    width: int = 4,
    heads: int = 1,
    causal: bool = False,
    lengths: tuple[int, ...] = (2, 4, 8, 16),
    logits: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0),
    seed: int = 0,
    out: Path = OUT,
) -> Answer:
    """How often inputs of random layers split.

    count: random layers and inputs for every length and size of logits
    width: width of the tokens
    heads: heads of the layers
    lengths: numbers of tokens, separated by commas
    logits: sizes of logits, separated by commas

    Example: howsmooth split frequency --count 20 --out figures
    """
    if min(lengths) < 1:
        raise BadInputError(f"expected lengths of at least 1, got {min(lengths)}; count tokens")
    check_writable(out / "splitting-frequency.csv")
    cases = measure_frequency(random_layers(count, lengths, logits, width, heads, causal, seed))
    table, cells = shares(cases), [case.cells() for case in cases]
    return _write(cells, [row.cells() for row in table], out, "splitting-frequency", share_figure(table))


def _write(cells: Rows, table: Rows, out: Path, name: str, figure: Drawn) -> Answer:
    """Everything is computed by now: write the table and the figure."""
    assert figure is not None  # there are rows
    place = make_folder(out)
    files = [save_rows(cells, place / f"{name}.csv"), *save_both(figure, place / name)]

    def show() -> None:
        show_table(name, table, digits=6)
        print(*files, sep="\n")

    return Answer({"rows": table, "files": [str(f) for f in files]}, show)
