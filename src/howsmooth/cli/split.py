"""`howsmooth split`: does splitting a token pay, and the mean-field experiments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from howsmooth.cli import Answer, show_table
from howsmooth.cli.options import read_matrices
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.measures import Measure
from howsmooth.paper import drawing, meanfield
from howsmooth.run import check_writable
from howsmooth.settings import number, whole
from howsmooth.verbs import splitting

GROUP = "Does splitting a token do more than moving it? The mean-field experiments."
OUT = Path("split-report")

Rows = list[dict[str, Any]]


def ask(*, weights: Path, causal: bool = False) -> Answer:
    """Does splitting pay for one head at one measure? Prints the gain, the token and both constants.

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
    rows = meanfield.splitting_map(alphas, masses, extent, points)
    return _write(rows, meanfield.map_table(rows), out, "splitting-map", meanfield.draw_map)


def growth(
    *,
    alpha: float = -1.0,
    radii: tuple[float, ...] = (0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.25, 3.5),
    out: Path = OUT,
) -> Answer:
    """The worst two Diracs against the radius, beside the mean-field bounds.

    radii: radii, separated by commas

    Example: howsmooth split growth --alpha=-1 --out figures
    """
    check_writable(out / "meanfield-growth.csv")
    rows = meanfield.worst_measures(alpha, radii)
    return _write(rows, rows, out, "meanfield-growth", meanfield.draw_worst_measures)


def convergence(*, alpha: float = -1.0, radius: float = 2.0, longest: int = 512, seeds: int = 8, out: Path = OUT) -> Answer:
    """How constants of n tokens reach the mean-field constant, for a density and in the worst case.

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
    rows = meanfield.gaussian_convergence(alpha, radius, lengths, seeds)
    rows += meanfield.worst_clusters(alpha, radius, [2**k for k in range(1, 21)])
    return _write(rows, meanfield.convergence_table(rows), out, "meanfield-convergence", meanfield.draw_convergence)


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

    Example: howsmooth split frequency --count 100 --out figures
    """
    if min(lengths) < 1:
        raise BadInputError(f"expected lengths of at least 1, got {min(lengths)}; count tokens")
    check_writable(out / "splitting-frequency.csv")
    cases = meanfield.frequency(meanfield.random_layers(count, lengths, logits, width, heads, causal, seed))
    table = meanfield.shares(cases)
    return _write(cases, table, out, "splitting-frequency", lambda _, place: meanfield.draw_frequency(table, place))


def _write(rows: Rows, table: Rows, out: Path, name: str, draw: Callable[[Rows, Path], list[Path]]) -> Answer:
    """Everything is computed by now: write the table and the figure."""
    place = drawing.make_folder(out)
    files = [drawing.save_rows(rows, place / f"{name}.csv"), *draw(rows, place)]

    def show() -> None:
        show_table(name, table, digits=6)
        print(*files, sep="\n")

    return Answer({"rows": table, "files": [str(f) for f in files]}, show)
