"""A recording that is confirmed by the module itself: compared with it at the input and beside it."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from howsmooth.errors import BadFunctionError, BadInputError, reason
from howsmooth.program.attention import attention
from howsmooth.program.functional import copied
from howsmooth.program.modules import bare, check_whole, unchanged
from howsmooth.program.operations import COMPARES, EMBEDDINGS, SELECTS, SHAPE, name, value, walk
from howsmooth.program.replay import Run, Segment, Way
from howsmooth.program.tracing import Flow, Program, trace

# relative to the largest entry: what products in another order explain
_SAME = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
# the same where attention is served by other code: what casts to float32 inside a model explain, and no lost key or window
_REPLACED = {torch.float64: 1e-5, torch.complex128: 1e-5, torch.float32: 1e-3, torch.complex64: 1e-3}
_COARSE = 2e-2
_KEEPS_IDS = SHAPE | SELECTS | {"where", "masked_fill", "add", "clamp", "clamp_min"}
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
    check_whole(module)
    with unchanged(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # of torch's older checkpoints
        with prepared():
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
        raise BadFunctionError(
            f"expected a function made of torch operations alone, got one that ends in an error as it is recorded "
            f"({reason(error)}); write it in torch operations"
        ) from error
    confirm(program)
    return program


@final
@dataclass(frozen=True, eq=False)
class RecordedFunction:
    """A function of one tensor by its confirmed recording, whose derivative is that of its values."""

    program: Program
    segment: Segment

    @classmethod
    def at(cls, f: Callable[[Tensor], Tensor], x: Tensor) -> "RecordedFunction":
        """A function, recorded at `x`, in its own precision; casts of one of float64 to float32 on the way are left out."""
        program = record_function(f, x)
        way = Way.of(moving_with(program), program.inputs, program.outputs)
        wide = x.dtype is value(program.outputs[0]).dtype is torch.float64 and not _narrow(way)
        return cls(program, way.at(Run.recorded(program, torch.float64 if wide else None)))

    def __call__(self, x: Tensor) -> Tensor:
        return self.segment(x)[0]

    def widened(self, f: Callable[[Tensor], Tensor], x: Tensor) -> "RecordedFunction":
        """The function in float64, which `f` is: replayed where it is confirmed by `f`, else recorded anew."""
        if _narrow(self.segment.way) or not isinstance(self.program.module, Function):
            return self.at(f, x)
        program = replace(self.program, module=Function(f, self.program.module.derived), example=(x,))
        try:
            confirm(program, torch.float64)
        except BadFunctionError:
            return self.at(f, x)
        return RecordedFunction(program, self.segment.way.at(Run.recorded(program)))


def moving_with(program: Program) -> Flow:
    """What moves with the arguments of a function; refused where its last output does not."""
    flow = Flow(program, program.inputs)
    if not flow.live(program.outputs[-1]):
        raise BadFunctionError("expected an output that depends on x, got one that does not; look for constants and numpy")
    return flow


def _narrow(way: Way) -> bool:
    """Whether there are numbers of half precision on a way."""
    return not {getattr(value(n), "dtype", None) for n in way.nodes}.isdisjoint({torch.float16, torch.bfloat16})


def confirm(program: Program, work: torch.dtype | None = None) -> None:
    """Refuse a recording that does not give what the module gives next, at its input or beside it.

    What the recording cannot know shows there: numbers that are read off (numpy, `item`), caches, state, choices.  work: the
    precision of its replay, the module's own by default.
    """
    versions = _versions(program)
    for where, tensors in (("at its input", program.tensors), ("beside its input", beside(program))):
        try:
            ours, own = replayed(program, tensors, work), program.own(tensors)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise BadFunctionError(
                f"expected a function that runs again {where}, got {reason(error)}; look for caches, state and choices that "
                "depend on values"
            ) from error
        if versions != _versions(program):
            raise BadFunctionError(
                "expected a function that gives the same twice, got one that writes into a tensor that it keeps; "
                "make the tensor anew in every call"
            )
        if not agrees(program, own, ours):
            raise BadFunctionError(
                f"expected a function that the operations of one run describe, got one that they miss {where}; look for numpy, "
                "item(), caches and state, and pass use_cache=False"
            )


def _versions(program: Program) -> list[int]:
    """How often the constants that outputs are made of were written into, but for the running statistics of norms."""
    needed, found = {program.nodes[-1]}, list[int]()
    for n in reversed(program.nodes):
        if n not in needed or name(n) in ("batch_norm", "instance_norm"):
            continue
        needed.update(m for m in n.all_input_nodes if n.target is not copied or m is n.args[1])  # else it is written over
        t = getattr(program.code, str(n.target)) if n.op == "get_attr" else None
        found += [t._version] if isinstance(t, Tensor) and not t.is_inference() else []
    return found


@torch.no_grad()
def replayed(program: Program, tensors: tuple[Tensor, ...], work: torch.dtype | None = None) -> list[Tensor]:
    """What the recording gives with other tensors among the arguments, in the module's own precision or another one."""
    values = Run(program, tuple(t.clone() for t in tensors), work).values(program.outputs)
    return [values[n] for n in program.outputs]


def agrees(program: Program, own: Sequence[Tensor], ours: Sequence[Tensor]) -> bool:
    """Whether a replay gives what the module itself gives, to rounding where attention is served by other code.

    What padding gives does not count: there is nothing that its queries may see, and code differs in what it makes of that.
    """
    calls = [value(n) for n in program.nodes if n.target is attention]
    most: Any = _REPLACED if calls else _SAME
    if any(_SAME.get(t.dtype) is None for t in calls):  # attention in half precision, whatever precision is around it
        most = {}
    masks = [t.bool() for t in _arguments(program, "attention_mask") if t.ndim == 2 and not t.is_floating_point()]

    pairs = list(zip(own, ours, strict=False))
    for i, (a, b) in enumerate(pairs):
        real = next((m.to(a.device) for m in masks if a.ndim > 2 and a.shape[:2] == b.shape[:2] == m.shape), None)
        pairs[i] = (a, b) if real is None else (a[real], b[real])
    return len(own) == len(ours) and all(same(a, b, most) for a, b in pairs)


def same(own: Tensor, ours: Tensor, most: Mapping[torch.dtype, float] = _SAME) -> bool:
    """Whether two tensors agree to rounding in their precision, NaN and infinity in the same places."""
    if own.shape != ours.shape or own.dtype != ours.dtype:
        return False
    if not own.is_floating_point() and not own.is_complex():
        return torch.equal(own, ours)
    finite = own[own.isfinite()]
    size = float(finite.abs().max()) if len(finite) else 0.0
    return torch.allclose(own, ours, rtol=0.0, atol=most.get(own.dtype, _COARSE) * max(size, 1e-300), equal_nan=True)


def beside(program: Program) -> tuple[Tensor, ...]:
    """Other tensors of the recording's kind: features moved, ordinary ids exchanged among their places, all else as it is."""
    generator = torch.Generator().manual_seed(0)
    special, counts = _special_ids(program)
    given = zip(program.inputs, program.tensors, strict=True)
    return tuple(_near(t, special.get(n), counts.get(n, 0), generator) for n, t in given)


def _near(t: Tensor, special: set[int] | None, count: int, generator: torch.Generator) -> Tensor:
    """Another tensor of the same kind. special: ids that stay in their places; nothing where the tensor holds no ids.

    count: of ids in their table, another of which is taken where there are no two to exchange.
    """
    if t.is_floating_point():
        size = t[t.isfinite()].abs()
        return t + _STEP * size.mean() * torch.randn(t.shape, generator=generator).to(t) if len(size) else t
    if special is None:
        return t
    flat = t.flatten().clone()
    places = (~torch.isin(flat, torch.tensor(sorted(special), dtype=t.dtype, device=t.device))).nonzero()[:, 0]
    flat[places] = flat[places[torch.randperm(len(places), generator=generator).to(t.device)]]
    if torch.equal(flat, t.flatten()) and len(places):
        known = {*special, *flat.tolist()}
        flat[places] = next((i for i in range(count) if i not in known), int(flat[places[0]]))
    return flat.view(t.shape)


def _special_ids(program: Program) -> tuple[dict[Node, set[int]], dict[Node, int]]:
    """The arguments that hold ids of tables, with those that the module compares with numbers of its own, or pads with.

    And how many ids their tables have.
    """
    counts = dict[Node, int]()
    found, named, positions = dict[Node, set[int]](), _named_ids(program.module), set(map(id, _arguments(program, "position")))
    for n in (n for n, t in zip(program.inputs, program.tensors, strict=True) if id(t) not in positions):
        users = {u for m in walk([n], lambda m: [u for u in m.users if name(u) in _KEEPS_IDS]) for u in m.users}
        looked_up = [u for u in users if name(u) in EMBEDDINGS]
        if looked_up:
            padding = [*(i for u in looked_up for i in u.args[2:3]), *(i for u in users if name(u) in COMPARES for i in u.args)]
            found[n] = named | {i for i in padding if isinstance(i, int)}
            counts[n] = min(len(value(u.all_input_nodes[0])) for u in looked_up)
    return found, counts


def _named_ids(module: nn.Module) -> set[int]:
    """The ids that a model's configurations name: of the ends of texts, of padding, of what stands for a picture."""
    found = set[int]()
    for config in (getattr(m, "config", None) for m in module.modules()):
        for key, ids in getattr(config, "__dict__", {}).items():
            if key.rpartition("_")[2] in ("id", "ids", "index") and "token" in key:
                found.update(i for i in tree_leaves(ids) if isinstance(i, int))
    return found


def _arguments(program: Program, word: str) -> list[Tensor]:
    """The tensors among the arguments whose name holds a word."""
    _, kwargs = tree_unflatten(list(program.example), program.spec)
    return [t for key, given in kwargs.items() if word in key for t in tree_leaves(given) if isinstance(t, Tensor)]
