"""What commands that measure a model share: options, engines, tables."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.models import MAPS, MapName, Model
from howsmooth.run import Engine, Local, Ray
from howsmooth.run.pool import cores

TextFile = Annotated[str | None, typer.Option("--text", help="a text file; Alice in Wonderland by default")]
Lengths = Annotated[
    str | None, typer.Option(help="numbers of tokens, as in 16,32,64; by default from 8 to 512 as model and text allow")
]
Layers = Annotated[str, typer.Option(help="all, or layers as in 0,3,5")]
Samples = Annotated[int, typer.Option(help="windows of the text at each length")]
MapOption = Annotated[str, typer.Option("--map", help=f"one of {', '.join(MAPS)}")]
EngineName = Annotated[str, typer.Option("--engine", help="local or ray")]
Address = Annotated[str | None, typer.Option(help="of a Ray cluster, auto for the one this machine belongs to")]
Workers = Annotated[
    int | None, typer.Option(help="processes; by default the cores, four at most, and one for a model above 1 GB")
]
Seed = Annotated[int, typer.Option(help="of the samples and of the solver's start")]
Tol = Annotated[float, typer.Option(help="relative accuracy of every value")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but the result's path")]

_LARGE = 1e9  # bytes of weights that are not held several times over


def engine_of(name: str, address: str | None, workers: int | None, model: Model) -> Engine:
    """The engine that is asked for."""
    if name not in ("local", "ray"):
        raise BadInputError(f"expected --engine local or ray, got {name!r}; pick one of them")
    if name == "ray":
        return Ray(address=address, workers=workers)
    if address is not None:
        raise BadInputError("expected --address with --engine ray, got it with local; add --engine ray")
    size = sum(p.numel() * p.element_size() for p in model.module.parameters())
    return Local(workers=(min(cores(), 4) if size < _LARGE else 1) if workers is None else workers)


def map_of(name: str) -> MapName:
    """A map by its name."""
    for known in MAPS:
        if name == known:
            return known
    raise BadInputError(f"expected --map to be one of {', '.join(MAPS)}, got {name!r}; pick one of them")


def lengths_of(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else _whole_numbers(text, "--lengths", "16,32,64")


def layers_of(text: str) -> tuple[int, ...] | None:
    return None if text == "all" else _whole_numbers(text, "--layers", "all or 0,3,5")


def _whole_numbers(text: str, option: str, example: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        raise BadInputError(f"expected {option} like {example}, got {text!r}; give whole numbers with commas")
    return numbers


def numbers_of(text: str, option: str, example: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise BadInputError(f"expected {option} like {example}, got {text!r}; give numbers with commas") from None


def read_matrices(path: Path, *choices: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which must hold all the names of one of the choices."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    wanted = ", or ".join(" and ".join(names) for names in choices)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"expected a safetensors file, got {path} ({error}); save {wanted} with safetensors") from None
    if not any(set(names) <= set(tensors) for names in choices):
        got = ", ".join(sorted(tensors)) or "none"
        raise BadInputError(f"expected tensors {wanted} in {path}, got {got}; name them so")
    return tensors


def one_head(gamma: float, width: int, causal: bool) -> Attention:
    """`A = gamma · I`, `V = I`."""
    eye = torch.eye(width, dtype=torch.float64)
    return Attention.from_matrices(gamma * eye, eye, causal=causal)


def show_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table: rich in a terminal, plain when piped."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [["" if row.get(name) is None else str(row[name]) for name in names] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold")
        for name in names:
            table.add_column(name, justify="right")
        for line in cells:
            table.add_row(*(Text(c) for c in line))
        Console().print(table)
        return
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    print(title)
    for line in (names, *cells):
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def print_json(value: Any) -> None:
    """One JSON object; what is not finite is null."""
    print(json.dumps(_finite(value), indent=1, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
