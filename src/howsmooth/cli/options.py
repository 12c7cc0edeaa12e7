"""Options that several commands take, each with one name and one meaning, and what becomes of their text."""

import sys
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.models import MAPS, MapName, Model
from howsmooth.models.room import free
from howsmooth.run import Engine, Local, Ray
from howsmooth.run.pool import cores

ModelName = Annotated[str, typer.Argument(help="demo, a folder with config.json and safetensors, or a hub name")]
Side = Annotated[str | None, typer.Option(help="encoder or decoder, text or vision, of a model with two")]
Map = Annotated[str, typer.Option("--map", help=f"one of {', '.join(MAPS)}")]
Layers = Annotated[str, typer.Option(help="all, or layers as in 0,3,5")]
Text = Annotated[str | None, typer.Option(help="a text file; Alice in Wonderland by default")]
Samples = Annotated[int, typer.Option(help="windows of the text at each length")]
Lengths = Annotated[
    str | None, typer.Option(help="numbers of tokens, as in 16,32,64; by default from 8 to 512 as model and text allow")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one")]
Tol = Annotated[float, typer.Option(help="relative accuracy of every value")]
Certify = Annotated[float | None, typer.Option(help="go on until upper/lower is at most 1 + this")]
Seed = Annotated[int, typer.Option(help="of everything random: samples of text, weights, starts of solvers and searches")]
Start = Annotated[int | None, typer.Option("--seed", help="of the random start; made from the input by default")]
Causal = Annotated[bool, typer.Option(help="masked attention")]
EngineName = Annotated[str, typer.Option("--engine", help="local or ray")]
Address = Annotated[str | None, typer.Option(help="of a Ray cluster, auto for the one this machine belongs to")]
Workers = Annotated[
    int | None,
    typer.Option(
        help="processes; by default the cores, four at most, on a GPU half of them, six at most and as many as its memory "
        "holds, and one for a model above 1 GB on the CPU"
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="go on with the results that are there")]
Force = Annotated[bool, typer.Option("--force", help="start again in a folder that holds results or other files")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but the result's path")]

_POSITIONS = "0,5-9"
_MOST_POSITIONS = 2**24  # in one stretch
_LARGE = 1e9  # bytes of weights that are not held several times over
_Number = TypeVar("_Number", int, float)


def engine_of(name: str, address: str | None, workers: int | None, model: Model, device: str) -> Engine:
    """The engine that is asked for; workers on Ray take a GPU each where the model is on one."""
    if name not in ("local", "ray"):
        raise BadInputError(f"expected --engine local or ray, got {name!r}; pick one of them")
    if name == "ray":
        if device not in ("auto", "cpu", "cuda"):
            raise BadInputError(
                f"expected --device auto, cpu or cuda with --engine ray, got {device!r}; Ray gives each worker a GPU of its own"
            )
        return Ray(address=address, workers=workers, gpus=float(model.device.type == "cuda"))
    if address is not None:
        raise BadInputError("expected --address with --engine ray, got it with local; add --engine ray")
    return Local(workers=_workers(model) if workers is None else workers)


def _workers(model: Model) -> int:
    """As many as there are cores and as memory holds, four at most, six on a GPU, which waits for Python most of the time.

    On a GPU the longest window has been through the model by now; a measurement there takes about twice as much beside it.
    """
    if model.device.type == "cuda":
        taken = torch.cuda.max_memory_allocated(model.device)
        held = min(cores() // 2, 6, free(model.device) // max(1, 3 * taken))
        return 1 if model.where is not None else max(1, held)
    size = sum(p.numel() * p.element_size() for p in model.module.parameters())
    return min(cores(), 4) if size < _LARGE else 1


def map_of(name: str) -> MapName:
    """A map by its name, refused before a model is loaded."""
    for known in MAPS:
        if name == known:
            return known
    raise BadInputError(f"expected a map among {', '.join(MAPS)}, got {name!r}; pick one of them")


def lengths_of(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else numbers_of(text, "--lengths", "16,32,64", int)


def layers_of(text: str) -> tuple[int, ...] | None:
    return None if text == "all" else numbers_of(text, "--layers", "all or 0,3,5", int)


def positions_of(text: str | None) -> tuple[int, ...] | None:
    """Positions with commas between them, or a stretch of them from the first to the last: `0,5-9`."""
    if text is None:
        return None
    positions: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        (start,) = numbers_of(first, "--tokens", _POSITIONS, int)
        (end,) = numbers_of(last, "--tokens", _POSITIONS, int) if dash else (start,)
        if not 0 <= start <= end < start + _MOST_POSITIONS:
            raise BadInputError(f"expected --tokens like {_POSITIONS}, got {part!r}; give the smaller one first")
        positions += range(start, end + 1)
    return tuple(positions)


def numbers_of(text: str, option: str, example: str, kind: type[_Number] = float) -> tuple[_Number, ...]:
    """Numbers with commas between them, one at least."""
    try:
        numbers = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        numbers = ()
    if not numbers:
        whole = "whole " if kind is int else ""
        raise BadInputError(f"expected {option} like {example}, got {text!r}; give {whole}numbers with commas")
    return numbers


def read_stdin() -> str:
    """What is piped in, as text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except (AttributeError, ValueError, OSError) as error:  # closed from the start, closed since, or not to be read
        said = "no UTF-8 text" if isinstance(error, UnicodeDecodeError) else "a closed one"
        raise BadInputError(f"expected a text on standard input, got {said}; pipe one in, or name a file") from None


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
