"""`howsmooth study …`: one question of a model each."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.cli.shared import (
    Address,
    EngineName,
    Layers,
    Lengths,
    MapOption,
    Quiet,
    Samples,
    Seed,
    TextFile,
    Tol,
    Workers,
    engine_of,
    layers_of,
    lengths_of,
    print_json,
    show_table,
)
from howsmooth.errors import BadInputError

STUDIES = ("growth", "layers", "radius", "norms", "bounds", "splitting", "worst")


@app.command()
def study(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(STUDIES)}")],
    model: Annotated[str, typer.Argument(help="demo, a folder with config.json and safetensors, or a hub name")],
    text: TextFile = None,
    lengths: Lengths = None,
    layers: Layers = "all",
    samples: Samples = 8,
    map_name: MapOption = "attention",
    factors: Annotated[str | None, typer.Option(help="radius: what the tokens are multiplied by, as in 0.5,1,2")] = None,
    steps: Annotated[int, typer.Option(help="worst: measurements of every start of the search")] = 30,
    out: Annotated[Path | None, typer.Option(help="results file, .sqlite; <study>-results.sqlite by default")] = None,
    table: Annotated[Path | None, typer.Option(help="also write the rows, .csv or .parquet")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the results file")] = False,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    tol: Tol = 1e-3,
    seed: Seed = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Ask one question of a model.

    growth: L against n, fitted. layers: every layer and head at one length. radius: L against the size of the tokens.
    norms: with and without the norm in front. bounds: measured against each bound. splitting: does splitting a token pay.
    worst: the worst input found beside the text.

    Example: howsmooth study growth demo --lengths 8,16,32,64,128,136,256,512 --samples 8
    """
    with one_sentence(debug):
        from howsmooth.run import progress_bar, write_table
        from howsmooth.study.jobs import run_sweep
        from howsmooth.study.layers import Question, settle
        from howsmooth.study.lengths import fitting_lengths
        from howsmooth.study.reader import Reader

        if name not in STUDIES:
            raise BadInputError(f"expected a study among {', '.join(STUDIES)}, got {name!r}; pick one of them")
        results = out or Path(f"{name}-results.sqlite")
        if table is not None and (table.suffix not in (".csv", ".parquet") or table.exists()):
            raise BadInputError(f"expected a new file named .csv or .parquet, got {table}; choose another name")
        asked, chosen, scales = lengths_of(lengths), layers_of(layers), _factors(factors)
        reader = Reader.by_name(model, text)
        usual = fitting_lengths(reader, samples)
        default = usual if name == "growth" else (max([n for n in usual if n <= 128], default=usual[0]),)
        setting = settle(reader, Question(asked or default, samples, chosen, map_name, tol, None, seed))
        jobs = _jobs(name, setting, scales, steps)
        if not jobs:
            raise BadInputError(f"expected the map attention for the study {name}, got {map_name!r}; leave --map out")
        hands = engine_of(engine, address, workers, reader.model)
        assert reader.source is not None
        bar = progress_bar(name, quiet=quiet or as_json)
        found = run_sweep(reader.source, jobs, results, engine=hands, resume=resume, progress=bar)
        if not found.rows:
            raise BadInputError(f"expected layers in closed form for the study {name}, got none in {model}; measure it instead")
        if table is not None:
            write_table(results, table)
        if as_json:
            print_json({"results": str(results.resolve()), "rows": found.rows, "failures": found.failures})
            return
        if not quiet:
            title, lines = TABLES[name](found)
            show_table(title, lines)
            for reason in found.failures[:3]:
                typer.echo(f"howsmooth: a task gave nothing: {reason}", err=True)
        print(results.resolve())


def _factors(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise BadInputError(f"expected --factors like 0.5,1,2, got {text!r}; give numbers with commas") from None


def _jobs(name: str, setting: Any, factors: list[float] | None, steps: int) -> list[Any]:
    from howsmooth.study import beside_theory as bounds
    from howsmooth.study import layers, norms, radius, splitting, worst

    lengths = list(setting.question.lengths)
    return {
        "growth": lambda: layers.layer_jobs(setting),
        "layers": lambda: layers.layer_jobs(setting) + layers.head_jobs(setting),
        "radius": lambda: radius.radius_jobs(setting, factors or radius.FACTORS),
        "norms": lambda: norms.norm_jobs(setting),
        "bounds": lambda: bounds.bound_jobs(setting, lengths),
        "splitting": lambda: splitting.splitting_jobs(setting),
        "worst": lambda: [job for n in lengths for job in worst.worst_jobs(setting, n, steps)],
    }[name]()


def _growth(found: Any) -> tuple[str, list[dict[str, Any]]]:
    from howsmooth.study.lengths import of

    return "L, geometric mean over samples, and its growth L ~ n^exponent", of(found).table()


def _layers(found: Any) -> tuple[str, list[dict[str, Any]]]:
    lines: dict[tuple[int, int], dict[str, Any]] = {}
    for row in _sorted(found.rows):
        line = lines.setdefault((row["layer"], row["n"]), {"layer": row["layer"], "n": row["n"]})
        if row["kind"] == "head":
            line[f"head {row['head']}"] = f"{row['value']:.3g}"
        else:
            line.setdefault("L", []).append(row["value"])
    for line in lines.values():
        line["L"] = f"{_mean(line['L']):.3g}"
    return "L of every layer, geometric mean over samples, and of every head alone on the first", list(lines.values())


def _by(column: str, title: str, unit: str = "{:g}") -> Callable[[Any], tuple[str, list[dict[str, Any]]]]:
    """One line per layer and length, one column per value of `column`."""

    def table(found: Any) -> tuple[str, list[dict[str, Any]]]:
        cells: dict[tuple[int, int], dict[Any, list[float]]] = {}
        for row in _sorted(found.rows):
            cells.setdefault((row["layer"], row["n"]), {}).setdefault(row[column], []).append(row["value"])
        lines = [
            {"layer": layer, "n": n} | {unit.format(k): f"{_mean(v):.3g}" for k, v in found.items()}
            for (layer, n), found in cells.items()
        ]
        return title, lines

    return table


def _bounds(found: Any) -> tuple[str, list[dict[str, Any]]]:
    lines = []
    for row in _sorted(found.rows):
        line = {"layer": row["layer"], "n": row["n"], "L": f"{row['value']:.4g}"}
        line |= {b["id"]: _power(b["log_value"]) for b in row["bounds"] if b["log_value"] is not None}
        lines.append(line)
    return "measured L on the first sample, and every bound that applies: D at the input, B over the ball", lines


def _splitting(found: Any) -> tuple[str, list[dict[str, Any]]]:
    lines = []
    for key in dict.fromkeys((row["layer"], row["n"]) for row in _sorted(found.rows)):
        rows = [row for row in found.rows if (row["layer"], row["n"]) == key]
        gains = sorted(row["gain"] for row in rows if row["gain"] is not None)
        pays = sum(row["pays"] for row in rows)
        line = {"layer": key[0], "n": key[1], "inputs": len(rows), "pays": pays}
        lines.append(
            line | {"median gain": f"{gains[len(gains) // 2]:.3g}", "largest gain": f"{gains[-1]:.3g}"} if gains else line
        )
    return "splitting a token against moving tokens; it pays where the gain is above 1", lines


def _worst(found: Any) -> tuple[str, list[dict[str, Any]]]:
    lines = [
        {
            "layer": row["layer"],
            "n": row["n"],
            "R": f"{row['radius_max']:.3g}",
            "text": f"{row['text']:.4g}",
            "worst found": f"{row['value']:.4g}",
            "ceiling": _power(row["log_ceiling"]),
            "how": row["how"],
        }
        for row in _sorted(found.rows)
    ]
    return "L on the text, at the worst input found with tokens no longer, and the least upper bound there", lines


TABLES: dict[str, Callable[[Any], tuple[str, list[dict[str, Any]]]]] = {
    "growth": _growth,
    "layers": _layers,
    "radius": _by("factor", "L where all tokens are multiplied by", "×{:g}"),
    "norms": _by("map", "L of attention alone, of the norm in front alone, and of both", "{}"),
    "bounds": _bounds,
    "splitting": _splitting,
    "worst": _worst,
}


def _sorted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["layer"], row["n"], row["sample"], row.get("factor", 0), row.get("head", 0)))


def _mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0


def _power(log: float | None) -> str:
    return "–" if log is None else f"{math.exp(log):.4g}" if log < 60 else f"10^{log / math.log(10):.0f}"
