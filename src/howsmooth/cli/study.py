"""`howsmooth study`: one question of a model each."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import geometric_mean, median_high

from howsmooth.cli import Answer, note, show_table, typed
from howsmooth.cli.options import EngineName, engine_of
from howsmooth.errors import BadInputError
from howsmooth.models import MapName
from howsmooth.report.assemble import variants_report
from howsmooth.run import check_folder, check_writable, progress_bar, write_table
from howsmooth.settings import whole
from howsmooth.study.beside_theory import measure_splitting, splitting_jobs, unanswered, worst_jobs
from howsmooth.study.jobs import Job, Measured, Row, run_sweep
from howsmooth.study.layers import FACTORS, Question, Setting, bound_jobs, head_jobs, layer_jobs, radius_jobs, settle
from howsmooth.study.lengths import fitting_lengths
from howsmooth.study.lengths import of as growth_of
from howsmooth.study.norms import norm_jobs
from howsmooth.study.reader import Reader
from howsmooth.study.swapped import REACH, choice_jobs, kind_names, usual_lengths, variant_jobs
from howsmooth.study.swapped import of as variants_of

STUDIES = ("growth", "layers", "radius", "norms", "bounds", "splitting", "worst", "variants")


def study(
    name: str,
    model: str,
    *,
    text: str | None = None,
    lengths: tuple[int, ...] | None = None,
    layers: tuple[int, ...] | None = None,
    samples: int = 8,
    map: MapName = "attention",
    factors: tuple[float, ...] | None = None,
    steps: int | None = None,
    kinds: str | None = None,
    page: Path | None = None,
    out: Path | None = None,
    table: Path | None = None,
    resume: bool = False,
    engine: EngineName = "local",
    address: str | None = None,
    workers: int | None = None,
    side: str | None = None,
    device: str = "auto",
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Answer:
    """Ask one question of a model.

    growth: L against n, fitted. layers: every layer and head at one length. radius: L against the size of the tokens.
    norms: with and without the norm in front. bounds: measured against each bound. splitting: does splitting a token pay.
    worst: the worst input found beside the text. variants: the same layers with other kinds of attention put in.

    name: one of growth, layers, radius, norms, bounds, splitting, worst, variants
    factors: radius, variants: what the tokens are multiplied by, as in 0.5,1,2
    steps: worst: measurements of every start of the search; 30 by default
    kinds: variants: kinds of attention to put in, as in sigmoid,linear
    page: variants: also write a page and figures into this folder
    out: results file, .sqlite; <study>-results.sqlite by default
    table: also write the rows, .csv or .parquet

    Example: howsmooth study growth demo --lengths 8,16,32,64,128,136,256,512 --samples 8
    """
    if name not in STUDIES:
        raise BadInputError(f"expected a study among {', '.join(STUDIES)}, got {name!r}; pick one of them")
    for option, given, studies in (
        ("--factors", factors, ("radius", "variants")),
        ("--steps", steps, ("worst",)),
        ("--kinds", kinds, ("variants",)),
        ("--page", page, ("variants",)),
    ):
        if given is not None and name not in studies:
            only = f"the study {studies[0]} alone" if len(studies) == 1 else f"the studies {' and '.join(studies)} alone"
            raise BadInputError(f"expected {option} with {only}, got it with {name}; leave it out")
    put_in = kind_names(None if kinds is None else [part.strip() for part in kinds.split(",") if part.strip()])
    if page is not None:
        check_folder(page, "page", force=resume)
    moves = whole(30 if steps is None else steps, "--steps of at least 0", "leave it out for 30")
    results = out or Path(f"{name}-results.sqlite")
    if table is not None:
        check_writable(table)
        if table.suffix not in (".csv", ".parquet") or table.exists():
            raise BadInputError(f"expected a new file named .csv or .parquet, got {table}; choose another name")
    usual_factors = REACH if name == "variants" else FACTORS
    scales = usual_factors if factors is None else factors
    reader = Reader.by_name(model, text, side, device)
    setting = settle(reader, Question(lengths or _lengths(name, reader, samples), samples, layers, map, tol, certify, seed))
    jobs = choice_jobs(setting, put_in) if name == "variants" else _jobs(name, setting, scales, moves)
    lacking = unanswered(setting, measure_splitting) if name == "splitting" else ()
    if not jobs and lacking:
        raise BadInputError(
            f"expected a layer whose tokens can be split, got none ({lacking[0].rstrip('.')}); measure another layer"
        )
    if not jobs:
        raise BadInputError(f"expected the map attention for the study {name}, got {map!r}; leave --map out")
    for sentence in lacking:
        note(sentence)
    hands = engine_of(engine, address, workers, reader.model, device)
    bar = progress_bar(name, quiet=quiet)
    if name == "variants":
        first = run_sweep(reader, jobs, results, resume=resume)
        jobs = variant_jobs(setting, first.of("choice"), scales)
        then = run_sweep(reader, jobs, results, engine=hands, resume=True, progress=bar)
        measured = Measured(first.rows + then.rows, first.failures + then.failures, then.versions)
    else:
        measured = run_sweep(reader, jobs, results, engine=hands, resume=resume, progress=bar)
    if name == "bounds" and not measured.of("bounds"):
        raise BadInputError("expected a layer that is a formula of its weights, got none; study growth measures any layer")
    if page is not None:
        variants_report(reader, setting, measured, typed()).save(page, force=True)
    if table is not None:
        write_table(results, table)

    def show() -> None:
        if not quiet:
            title, lines = TABLES[name]
            show_table(title, lines(measured), words=("breaks", "how", "kind", "scale"))
            for reason in dict.fromkeys(f"{row['variant']}: {row['reason']}" for row in measured.of("left out")):
                note(f"left out {reason}")
            for reason in measured.failures[:3]:
                note(f"a task gave nothing: {reason}")
        print(results.resolve())

    return Answer({"results": str(results.resolve()), "rows": measured.rows, "failures": measured.failures}, show)


def _lengths(name: str, reader: Reader, samples: int) -> tuple[int, ...]:
    """Where none are asked for."""
    usual = fitting_lengths(reader, samples)
    if name == "variants":
        return usual_lengths(reader, samples)
    return usual if name == "growth" else (max([n for n in usual if n <= 128], default=usual[0]),)


def _jobs(name: str, setting: Setting, factors: Sequence[float], steps: int) -> list[Job]:
    lengths = setting.question.lengths
    return {
        "growth": lambda: layer_jobs(setting),
        "layers": lambda: layer_jobs(setting) + head_jobs(setting),
        "radius": lambda: radius_jobs(setting, factors),
        "norms": lambda: norm_jobs(setting),
        "bounds": lambda: bound_jobs(setting),
        "splitting": lambda: splitting_jobs(setting),
        "worst": lambda: [job for n in lengths for job in worst_jobs(setting, n, steps)],
    }[name]()


def _lines(cells: Callable[[list[Row]], Row], measured: Measured) -> list[Row]:
    """One line per layer and length: what `cells` makes of the rows there."""
    place = itemgetter("layer", "n")
    rows = sorted(measured.rows, key=lambda row: (*place(row), row["sample"], row.get("factor", 0), row.get("head", -1)))
    return [{"layer": layer, "n": n} | cells(list(there)) for (layer, n), there in groupby(rows, place)]


def _means(column: Callable[[Row], str]) -> Callable[[Measured], list[Row]]:
    """The geometric mean over samples of everything that goes into the same column."""

    def cells(rows: list[Row]) -> Row:
        values: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            values[column(row)].append(row["value"])
        return {name: geometric_mean(some) if min(some) > 0 else 0.0 for name, some in values.items()}

    return partial(_lines, cells)


def _splits(rows: list[Row]) -> Row:
    gains = [row["gain"] for row in rows if row["gain"] is not None]
    line = {"inputs": len(rows), "pays": sum(row["pays"] for row in rows)}
    return line | ({"median gain": median_high(gains), "largest gain": max(gains)} if gains else {})


def _bounds(rows: list[Row]) -> Row:
    bounds = [b for row in rows if row["kind"] == "bounds" for b in row["bounds"]]  # only the first sample is asked
    return {"L": rows[0]["value"]} | {b["id"]: _exp(b["log_value"]) for b in bounds if b["log_value"] is not None}


def _worst(rows: list[Row]) -> Row:
    row = rows[0]  # only the first sample is asked
    line = {"R": row["radius_max"], "text": row["text"], "worst found": row["value"]}
    return line | {"ceiling": _exp(row["log_ceiling"]), "how": row["how"]}


def _exp(log: float | None) -> float | str:
    """A power of ten where it is huge."""
    return "–" if log is None else math.exp(log) if log < 60 else f"10^{log / math.log(10):.0f}"


TABLES: dict[str, tuple[str, Callable[[Measured], list[Row]]]] = {
    "growth": ("L, geometric mean over samples, and its growth L ~ n^exponent", lambda measured: growth_of(measured).table()),
    "layers": (
        "L of every layer, geometric mean over samples, and of every head alone on the first",
        _means(lambda row: f"head {row['head']}" if row["kind"] == "head" else "L"),
    ),
    "radius": ("L where all tokens are multiplied by", _means(lambda row: f"×{row['factor']:g}")),
    "norms": ("L of attention alone, of the norm in front alone, and of both", _means(itemgetter("map"))),
    "bounds": (
        "measured L on the first sample, and every bound that applies: D at the input, B over the ball",
        partial(_lines, _bounds),
    ),
    "splitting": ("splitting a token against moving tokens; it pays where the gain is above 1", partial(_lines, _splits)),
    "worst": (
        "L on the text, at the worst input found with tokens no longer, and the least upper bound there",
        partial(_lines, _worst),
    ),
    "variants": (
        "L with every kind put in, geometric means over layers and samples; at the longest length from ×softmax on",
        lambda measured: variants_of(measured).table(),
    ),
}
