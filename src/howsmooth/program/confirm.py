"""A recording that is confirmed by the module itself: compared with it at the input and beside it."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from howsmooth.errors import BadFunctionError
from howsmooth.program.nodes import name
from howsmooth.program.operations import PARTS, SHAPE, TABLES
from howsmooth.program.tracing import Program, bare, tensors_in, trace, unchanged

# relative to the largest entry: what products in another order explain
_SAME = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 1e-2
_COMPARED = {"eq", "ne", "lt", "le", "gt", "ge"}
_STEP = 0.01  # of the size of features, by which they are moved


def record(module: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Program:
    """The program of `module(*args, **kwargs)`, confirmed by the module itself.

    The module is run three times, in eval mode and without gradients; its parameters, buffers, attributes and modes stay as
    they are.

    >>> program = record(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (torch.ones(1, 2),))
    >>> [n.name for n in program.nodes if n.op == "call_function"]
    ['linear', 'relu']
    >>> list(program.weights_now())
    ['0.weight', '0.bias']
    """
    module = bare(module)
    with unchanged(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # of torch's older checkpoints
        program = trace(module, args, kwargs)
        confirm(program)
    return program


def confirm(program: Program) -> None:
    """Refuse a recording that does not give what the module gives next, at its input or beside it.

    What the recording cannot know shows there: numbers that are read off (numpy, `item`), caches, state, choices.
    """
    generator = torch.Generator().manual_seed(0)
    special = _special_ids(program)
    beside = tuple(_beside(t, special.get(n), generator) for n, t in zip(program.inputs, program.tensors, strict=True))
    for where, tensors in (("at its input", program.tensors), ("beside its input", beside)):
        try:
            ours, own = replayed(program, tensors), program.own(tensors)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise BadFunctionError(
                f"expected a function that runs again {where}, got {type(error).__name__} ({str(error).splitlines()[0][:80]}); "
                "look for caches, state and choices that depend on values"
            ) from error
        if len(own) != len(ours) or not all(map(_same, own, ours)):
            raise BadFunctionError(
                f"expected a function that the operations of one run describe, got one that they miss {where}; look for numpy, "
                "item(), caches and state, and pass use_cache=False"
            )


@torch.no_grad()
def replayed(program: Program, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """What the recording gives with other tensors among the arguments, in the module's own precision."""
    weights = [t.detach() for t in program.weights_now().values()]
    return list(tensors_in(Interpreter(program.code).run(*weights, *(t.clone() for t in tensors))))


def _same(own: Tensor, ours: Tensor) -> bool:
    if own.shape != ours.shape or own.dtype != ours.dtype:
        return False
    if not own.is_floating_point() and not own.is_complex():
        return torch.equal(own, ours)
    finite = own[own.isfinite()]
    size = float(finite.abs().max()) if len(finite) else 0.0
    return torch.allclose(own, ours, rtol=0.0, atol=_SAME.get(own.dtype, _COARSE) * max(size, 1e-300), equal_nan=True)


def _special_ids(program: Program) -> dict[Node, set[int]]:
    """The arguments that hold ids of tables, and their ids that the module compares with numbers of its own, or pads with."""
    found: dict[Node, set[int]] = {}
    for n in program.inputs:
        todo, visited, special, is_id = [n], {n}, set[int](), False
        while todo:
            for u in todo.pop().users:
                if u in visited:
                    continue
                visited.add(u)
                if name(u) in TABLES:
                    is_id, special = True, special | {i for i in u.args[2:3] if isinstance(i, int)}
                elif name(u) in _COMPARED:
                    special |= {i for i in u.args if isinstance(i, int)}
                elif name(u) in SHAPE | PARTS | {"where", "masked_fill", "add", "clamp", "clamp_min"}:
                    todo.append(u)
        if is_id:
            found[n] = special
    return found


def _beside(t: Tensor, special: set[int] | None, generator: torch.Generator) -> Tensor:
    """Another tensor of the same kind: features are moved, ordinary ids exchanged among their places, all else left."""
    if t.is_floating_point():
        return t + _STEP * t.abs().mean() * torch.randn(t.shape, generator=generator).to(t) if t.numel() else t
    if special is None:
        return t
    flat = t.flatten().clone()
    places = (~torch.isin(flat, torch.tensor(sorted(special), dtype=t.dtype, device=t.device))).nonzero()[:, 0]
    flat[places] = flat[places[torch.randperm(len(places), generator=generator).to(t.device)]]
    return flat.view(t.shape)
