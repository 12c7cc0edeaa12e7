"""Options that several commands take, each with one name and one meaning, and what becomes of their text.

model: demo, smollm2, a folder with config.json and safetensors, a GGUF file, or a hub name
side: which tower of a model with two
map: which map of a layer
layers: layers as in 0,3,5, or all
text: a text file [default: Alice in Wonderland]
samples: number of text windows per length
lengths: numbers of tokens, as in 16,32,64 [default: from 8 to 512 as model and text allow]
device: cpu, cuda, cuda:1, or auto: a GPU if there is one
tol: relative tolerance of every value
certify: tighten the upper bound until upper/lower is at most 1 + this
seed: random seed for text samples, weights and the starts of solvers and searches
causal (--causal/--no-causal): masked attention
engine: where tasks run
address: address of a Ray cluster; auto finds the one that this machine belongs to
workers: worker processes [default: chosen from cores and memory; 1 for a model above 1 GB on the CPU]
resume: continue an interrupted run
force: overwrite a folder that holds results or other files
quiet: print only the path of the result, and show no progress
radius: radius of the ball of tokens
gamma: one head with A = gamma · I and V = I
alpha: the number A
width (--width, --dim): width of the tokens for --gamma and of a random layer
heads: heads of a random layer, or of the layer in --weights
weights: a safetensors file with A and V, or with w_q, w_k, w_v, w_o
random: a random layer: normal weights of deviation 0.02, as in GPT-2
out: folder for the table (CSV) and the figure (PNG, PDF)
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from howsmooth.cli import several
from howsmooth.errors import BadInputError
from howsmooth.models import MapName, Model
from howsmooth.models.model import Side
from howsmooth.models.room import free
from howsmooth.run import Engine, Local, Ray
from howsmooth.run.pool import cores
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Scope, Setting, fitting_lengths, settle

_POSITIONS = "0,5-9"
_MOST_POSITIONS = 2**24  # in one stretch
_LARGE = 1e9  # bytes of weights that are not kept several times over


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What a sweep over a model's layers measures, and where its tasks run."""

    text: str | None = None
    lengths: tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None
    samples: int = 8
    map: MapName = "attention"
    side: Side | None = None
    tol: float = 1e-3
    certify: float | None = None
    seed: int = 0
    resume: bool = False
    engine: Literal["local", "ray"] = "local"
    address: str | None = None
    workers: int | None = None
    device: str = "auto"
    quiet: bool = False

    def reader(self, model: str) -> Reader:
        """A model by its name, reading the text."""
        return Reader.by_name(model, self.text, self.side, self.device)

    def setting(self, reader: Reader, usual: Callable[[Reader, int], tuple[int, ...]] = fitting_lengths) -> Setting:
        """What is measured, checked. usual: the lengths where none are named."""
        lengths = self.lengths or usual(reader, self.samples)
        return settle(reader, Scope(lengths, self.samples, self.layers, self.map, self.tol, self.certify, self.seed))

    def engine_for(self, model: Model) -> Engine:
        """Where tasks run; workers on Ray take a GPU each where the model is on one."""
        if self.engine == "ray":
            if self.device not in ("auto", "cpu", "cuda"):
                raise BadInputError(
                    f"expected --device auto, cpu or cuda with --engine ray, got {self.device!r}; "
                    "Ray gives each worker a GPU of its own"
                )
            return Ray(address=self.address, workers=self.workers, gpus=float(model.device.type == "cuda"))
        if self.address is not None:
            raise BadInputError("expected --address with --engine ray, got it with local; add --engine ray")
        return Local(workers=usual_workers(model) if self.workers is None else self.workers)


def usual_workers(model: Model) -> int:
    """As many as there are cores and as memory holds, four at most, six on a GPU, which waits for Python most of the time.

    On a GPU the longest window has been through the model by now; a measurement there takes about twice as much beside it.
    """
    if model.device.type == "cuda":
        taken = torch.cuda.max_memory_allocated(model.device)
        fitting = min(cores() // 2, 6, free(model.device) // max(1, 3 * taken))
        return 1 if model.where is not None else max(1, fitting)
    size = sum(p.numel() * p.element_size() for p in model.module.parameters())
    return min(cores(), 4) if size < _LARGE else 1


def positions_of(text: str | None) -> tuple[int, ...] | None:
    """Positions with commas between them, or a stretch of them from the first to the last: `0,5-9`."""
    if text is None:
        return None
    positions: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        (start,) = several(first, "--tokens", int)
        (end,) = several(last, "--tokens", int) if dash else (start,)
        if not 0 <= start <= end < start + _MOST_POSITIONS:
            raise BadInputError(f"expected --tokens like {_POSITIONS}, got {part!r}; give the smaller one first")
        positions += range(start, end + 1)
    return tuple(positions)


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
