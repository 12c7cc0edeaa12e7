"""A recording that is confirmed by the module itself: compared with it at the input and beside it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.errors import BadFunctionError
from howsmooth.program.replay import Run
from howsmooth.program.tracing import Program, bare, trace, unchanged

# relative to the largest entry: what products in another order explain
_SAME = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 1e-2
_STEP = 0.01  # of the size of features, by which they are moved


def record(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    prepared: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Program:
    """The program of `module(*args, **kwargs)`, confirmed by the module itself.

    The module is run three times, in eval mode and without gradients; its parameters, buffers, attributes and modes stay as
    they are.  prepared: what holds while the module is recorded, and not while it is compared with.

    >>> program = record(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (torch.ones(1, 2),))
    >>> [n.name for n in program.nodes if n.op == "call_function"]
    ['linear', 'relu']
    >>> list(program.weights_now())
    ['0.weight', '0.bias']
    """
    module = bare(module)
    with unchanged(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # of torch's older checkpoints
        with prepared():
            program = trace(module, args, kwargs)
        confirm(program)
    return program


def confirm(program: Program) -> None:
    """Refuse a recording that does not give what the module gives next, at its input or beside it.

    What the recording cannot know shows there: numbers that are read off (numpy, `item`), caches, state, choices.
    """
    generator = torch.Generator().manual_seed(0)
    near = tuple(beside(t, generator) for t in program.tensors)
    for where, tensors in (("at its input", program.tensors), ("beside its input", near)):
        ours, own = replayed(program, tensors), program.own(tensors)
        if not agrees(own, ours):
            raise BadFunctionError(
                f"expected a function that the operations of one run describe, got one that they miss {where}; look for numpy, "
                "item(), caches and state, and pass use_cache=False"
            )


@torch.no_grad()
def replayed(program: Program, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """What the recording gives with other tensors among the arguments, in the module's own precision."""
    values = Run(program, tuple(t.clone() for t in tensors), None).values(program.outputs)
    return [values[n] for n in program.outputs]


def agrees(own: Sequence[Tensor], ours: Sequence[Tensor]) -> bool:
    """Whether a replay gives what the module itself gives, to the rounding of another order of its products."""
    return len(own) == len(ours) and all(map(same, own, ours))


def same(own: Tensor, ours: Tensor) -> bool:
    """Whether two tensors agree to rounding in their precision, NaN and infinity in the same places."""
    if own.shape != ours.shape or own.dtype != ours.dtype:
        return False
    if not own.is_floating_point() and not own.is_complex():
        return torch.equal(own, ours)
    finite = own[own.isfinite()]
    size = float(finite.abs().max()) if len(finite) else 0.0
    return torch.allclose(own, ours, rtol=0.0, atol=_SAME.get(own.dtype, _COARSE) * max(size, 1e-300), equal_nan=True)


def beside(t: Tensor, generator: torch.Generator) -> Tensor:
    """Another tensor of the same kind: features are moved, ids exchanged among their places."""
    if t.dtype is torch.bool or t.numel() < 2:
        return t
    if t.is_floating_point():
        return t + _STEP * t.abs().mean() * torch.randn(t.shape, generator=generator).to(t)
    return t.flatten()[torch.randperm(t.numel(), generator=generator).to(t.device)].view(t.shape)
