"""A recording that is confirmed by the module itself: compared with it at the input and beside it."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.utils._pytree import tree_map

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.program.nodes import name
from howsmooth.program.tracing import Program, bare, tensors_in, trace, unchanged

# relative to the largest entry: what products in another order explain
_SAME = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 1e-2
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


@final
class Function(nn.Module):
    """A function as a module of no weights, so that what it is made of stays in the mode that it is in.

    derived: it is run with gradients, for it takes derivatives itself.
    """

    def __init__(self, f: Callable[..., Any], derived: bool = False):
        super().__init__()
        plain = getattr(f, "_orig_mod", None) or getattr(f, "_torchdynamo_orig_callable", f)  # what torch.compile was given
        self._f, self.derived = (plain,), derived  # in a tuple, where no module is looked for

    def forward(self, *args: Any) -> Any:
        if not self.derived:
            return self._f[0](*args)
        with torch.enable_grad():
            found = self._f[0](*(t.detach().requires_grad_(t.is_floating_point()).clone() for t in args))
        return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, found)


def record_function(f: Callable[..., Any], *args: Tensor) -> Program:
    """The program of `f(*args)`, confirmed by `f` itself; one that takes derivatives is recorded below them.

    The tensors in its closure, the weights of modules among them, are constants of the program.

    >>> [n.name for n in record_function(lambda t: 2 * t.detach(), torch.ones(3)).nodes]
    ['tensors_1', 'detach', 'mul', 'output']
    """
    try:
        program = trace(Function(f), args)
    except (RuntimeError, TypeError, BadInputError):  # as of a derivative where there are no gradients
        program = None
    try:
        if program is None or any(n.args == (True,) for n in program.nodes if name(n) == "_set_grad_enabled"):
            program = trace(Function(f, derived=True), args, whole=False)
    except (RuntimeError, TypeError, BadInputError) as error:
        said = next(iter(str(error).strip().splitlines()), "no word")[:120]
        raise BadFunctionError(
            f"expected a function made of torch operations alone, got one that ends in an error as it is recorded ({said}); "
            "write it in torch operations"
        ) from error
    confirm(program)
    return program


def confirm(program: Program) -> None:
    """Refuse a recording that does not give what the module gives next, at its input or beside it.

    What the recording cannot know shows there: numbers that are read off (numpy, `item`), caches, state, choices.
    """
    generator = torch.Generator().manual_seed(0)
    beside = tuple(_beside(t, generator) for t in program.tensors)
    for where, tensors in (("at its input", program.tensors), ("beside its input", beside)):
        ours, own = replayed(program, tensors), program.own(tensors)
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


def _beside(t: Tensor, generator: torch.Generator) -> Tensor:
    """Another tensor of the same kind: features are moved, ids exchanged among their places."""
    if t.dtype is torch.bool or t.numel() < 2:
        return t
    if t.is_floating_point():
        return t + _STEP * t.abs().mean() * torch.randn(t.shape, generator=generator).to(t)
    return t.flatten()[torch.randperm(t.numel(), generator=generator).to(t.device)].view(t.shape)
