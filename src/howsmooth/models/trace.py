"""One forward pass, watched: which modules attend, what enters them, and where each block begins and ends."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from howsmooth.errors import BadInputError
from howsmooth.kernels import attend
from howsmooth.kernels.kinds import Kind
from howsmooth.models.by_hand import makes_pairs
from howsmooth.models.intercept import Call, Intercept, Tagged, torch_attention
from howsmooth.models.room import lent
from howsmooth.models.stand_ins import StandIn
from howsmooth.models.steps import PRODUCTS

_TORCH_ATTENTION = nn.functional.scaled_dot_product_attention
_SOFTMAX = (torch.softmax, Tensor.softmax, nn.functional.softmax)
_SINGLE = torch.float32
_CASTS = (Tensor.to, Tensor.type)
_REDUCTIONS = (torch.softmax, Tensor.softmax, torch.nn.functional.softmax, torch.mean, Tensor.mean, torch.sum, Tensor.sum)
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_OTHER_SIDE = ("key_value_states", "encoder_hidden_states")
_KEPT = 8  # a trace keeps tokens on a GPU up to this part of its memory, and in the host's beyond


@dataclass(frozen=True, eq=False)
class Invocation:
    """A module and one call of it. `hidden` is the argument that carries the tokens, `nth` counts the calls of that module."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor
    nth: int

    @property
    def tokens(self) -> Tensor:
        """What enters, (n, d)."""
        return self.hidden.reshape(-1, self.hidden.shape[-1])

    def substitute(self, value: Tensor, convert: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `value` for the tokens and every other leaf converted."""
        return tree_map(lambda t: value if t is self.hidden else convert(t), (self.args, self.kwargs))


@dataclass(frozen=True, eq=False)
class Layer:
    """One self-attention of a forward pass, or one cross-attention.

    block: the transformer layer it belongs to, as it was called.  module: what computes queries, keys and values; its tokens
    were `x`, (n, d).  call: which call of `module` within the block.  projection: the output projection, a module of its own
    inside `module` or right behind it; nothing where there is none to be seen.  heads: query heads; 0 where unknown.
    kind: of its weights; nothing where that is unknown.  cut: whether its attention calls run on the kernels.
    context: of a cross-attention, what its keys and values are made of, (m, d).  cross: the cross-attention of its block.
    """

    index: int
    name: str
    block: Invocation
    module: nn.Module
    call: int
    x: Tensor
    projection: nn.Module | None
    heads: int
    kind: Kind | None
    cut: bool
    context: Tensor | None = None
    cross: "Layer | None" = None

    @property
    def crossing(self) -> "Layer | None":
        """The cross-attention of its block, itself where a model has nothing else."""
        return self.cross if self.context is None else self


@dataclass(frozen=True, eq=False)
class Trace:
    """A forward pass. `masks` gives the meaning of the mask tensors among the arguments. Tokens may be kept on the host."""

    whole: Invocation
    layers: tuple[Layer, ...]
    invocations: dict[tuple[nn.Module, int], Invocation]
    masks: dict[int, Tagged]
    output: Tensor


@dataclass(eq=False)
class _Frame:
    """A module call in progress."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nth: int
    calls: Counter[nn.Module] = field(default_factory=Counter)  # of the modules inside

    def invocation(self, keep: Callable[[Tensor], Tensor]) -> Invocation | None:
        hidden = find_hidden(self.args, self.kwargs)
        if hidden is None:
            return None
        kept = keep(hidden)
        args, kwargs = tree_map(lambda t: kept if t is hidden else t, (self.args, self.kwargs))
        return Invocation(self.module, self.name, args, kwargs, kept, self.nth)


@dataclass(eq=False)
class _Event:
    """An attention on its way."""

    frames: list[_Frame]  # enclosing calls, outermost first; the last one is the attention module's
    x: Tensor
    heads: int
    kind: Kind | None
    cut: bool
    context: Tensor | None
    output: Tensor | None = None
    projection: nn.Module | None = None
    open: bool = True  # the projection may still come


def find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tokens among the arguments of a module: `hidden_states`, or the first floating-point tensor with two axes or more."""
    candidates = [kwargs.get("hidden_states"), *args, *kwargs.values()]
    return next((t for t in candidates if isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 2), None)


def find_context(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor, keys: int | None) -> Tensor | None:
    """What cross-attention looks at, among the arguments of a module; nothing for self-attention.

    By the library's names, or the second argument, as for torch's own module, if it is another sequence of that width, or, with
    as many rows as there are keys and not as many as there are tokens, any sequence. keys: how many there are, if known.
    """
    named = next((t for name in _OTHER_SIDE if isinstance(t := kwargs.get(name), Tensor)), None)
    if named is not None:
        return named
    rows = hidden.numel() // hidden.shape[-1]
    second = args[1] if len(args) > 1 else kwargs.get("key")
    for t in (second, *args, *kwargs.values()):
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.ndim != hidden.ndim or t is hidden:
            continue
        count = t.numel() // max(1, t.shape[-1])
        alike = t is second and t.shape[-1] == hidden.shape[-1] and keys in (None, count)
        if (alike and not (t.shape == hidden.shape and torch.equal(t, hidden))) or (keys == count != rows):
            return t
    return None


def first_tensor(output: Any) -> Tensor:
    """What a module gives, without what it gives besides."""
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    if not leaves:
        raise BadInputError(f"expected a module that returns a tensor, got {type(output).__name__}; measure another map")
    return leaves[0]


def is_linear(module: nn.Module) -> bool:
    """A module that is a matrix: `nn.Linear`, GPT-2's `Conv1D`, quantised relatives."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off, torch's fused encoder layers off, and everything as it was afterwards.

    Modes are set one by one, not by `model.eval()`: some models do more there, merge weights say, that nobody would undo.
    """
    training = [m for m in model.modules() if m.training]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    _set_training(training, False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        _set_training(training, True)


def _set_training(modules: list[nn.Module], mode: bool) -> None:
    for module in modules:
        own = vars(module)
        if "training" in own:
            own["training"] = mode  # ten times as fast as torch's way of setting attributes
        else:  # a scripted module
            module.training = mode


def without_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """`nn.MultiheadAttention` told not to return its weights, which would take it off the common path."""
    if isinstance(module, nn.MultiheadAttention) and len(args) < 5:
        kwargs = {**kwargs, "need_weights": False}
    return args, kwargs


class _Pairs(Tensor):
    """Numbers of pairs of tokens: a product that is square in them, and whatever is made of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]  as torch has it


class Watch(TorchFunctionMode):
    """Catches names of torch's attention that were bound before it was patched, and hears attention that is written out.

    on_weights: told of every softmax that the model's own code takes, and whether over a square of logits.
    pairs: it is also told when numbers of pairs of tokens, whatever was done to them, are multiplied with something.
    caught: whether such a name was called.
    """

    def __init__(self, on_weights: Callable[[bool], None] | None = None, pairs: bool = False):
        super().__init__()
        self._on_weights, self._pairs = on_weights, pairs
        self.caught = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _TORCH_ATTENTION:
            self.caught = True
            return torch_attention(*args, **kwargs)
        paired = self._pairs and any(isinstance(t, _Pairs) for t in tree_leaves((args, kwargs)))
        if paired:
            args = tree_map(_plain, args)
            kwargs = {k: tree_map(_plain, t) for k, t in kwargs.items()}
        out = func(*args, **kwargs)
        if self._on_weights is None or isinstance(out, StandIn):
            return out
        if func in _SOFTMAX and out.ndim in (3, 4):
            self._on_weights(out.shape[-1] - out.shape[-2] in (0, 1))  # one key more than queries: a learned sink
        multiplies = func in PRODUCTS or func is torch.einsum
        if paired and multiplies:
            self._on_weights(True)
        elif self._pairs and (paired or multiplies):
            made = paired or makes_pairs(func, args)
            return tree_map(lambda t: t.as_subclass(_Pairs) if made and _is_square(t) else t, out)
        return out


def _plain(t: Any) -> Any:
    return t.as_subclass(Tensor) if isinstance(t, _Pairs) else t


def _is_square(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 3 and t.shape[-1] - t.shape[-2] in (0, 1)


class KeepDouble(TorchFunctionMode):
    """Inside it, a request for float32 gives float64.

    Model code casts to float32 in norms, softmax and rotary phases so that half precision survives them; in a float64 model
    the same casts throw digits away. With this mode the model is the function its formulas say.

    >>> with KeepDouble():
    ...     print(torch.ones(1, dtype=torch.float64).float().dtype)
    torch.float64
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float:
            func = Tensor.double
        elif func in _CASTS:
            args = tuple(torch.float64 if a is _SINGLE else a for a in args)
        if kwargs.get("dtype") is _SINGLE and (func in _CASTS or func in _REDUCTIONS):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


@torch.no_grad()
def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], pairs: bool = False) -> Trace:
    """Run `model(*args, **kwargs)` and write down every self-attention layer, in the order they ran.

    Each comes with the cross-attention of its block. Of a model that has cross-attention alone, those are the layers.
    pairs: attention without softmax is heard too, as numbers of pairs of tokens that are multiplied with something.
    """
    return _Tracer(model, pairs).run(args, kwargs)


class _Tracer:
    def __init__(self, model: nn.Module, pairs: bool):
        self.model, self.pairs = model, pairs
        self.names = {module: name for name, module in model.named_modules()}
        self.elements = {
            child for m in model.modules() if isinstance(m, _LISTS) for child in m.children() if not isinstance(child, _LISTS)
        }
        self.stack: list[_Frame] = []
        self.events: list[_Event] = []
        self.crosses: list[_Event] = []
        self.contexts: dict[int, tuple[Tensor, Tensor]] = {}  # as they came, and as they are kept
        self.invocations: dict[tuple[nn.Module, int], Invocation] = {}
        self.counts: Counter[nn.Module] = Counter()
        self.kept = 0  # bytes

    def keep(self, t: Tensor) -> Tensor:
        """A copy, since models may go on to write into it."""
        self.kept += t.numel() * t.element_size()
        long = t.is_cuda and self.kept > torch.cuda.get_device_properties(t.device).total_memory // _KEPT
        return t.detach().cpu() if long else t.detach().clone()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        intercept = Intercept(self._on_call)
        with ExitStack() as stack:
            for module in self.names:
                stack.enter_context(module.register_forward_pre_hook(self._before, with_kwargs=True))
                stack.enter_context(module.register_forward_hook(self._after, with_kwargs=True))
            stack.enter_context(evaluating(self.model))
            given = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
            if given is not None:
                stack.enter_context(lent(self.model, given.device))
            stack.enter_context(intercept.active())
            stack.enter_context(Watch(self._on_weights, self.pairs))
            output = self.model(*args, **kwargs)
        hidden = find_hidden(args, kwargs)
        whole = Invocation(self.model, "", args, kwargs, torch.empty(0, 0) if hidden is None else hidden, 0)
        return Trace(whole, self._layers(), self.invocations, intercept.masks, first_tensor(output))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        args, kwargs = without_weights(module, args, kwargs)
        for frame in self.stack:
            frame.calls[module] += 1
        frame = _Frame(module, self.names[module], args, kwargs, self.counts[module])
        self.counts[module] += 1
        self.stack.append(frame)
        if module in self.elements or len(self.stack) == 1:
            invocation = frame.invocation(self.keep)
            if invocation is not None:
                self.invocations[module, frame.nth] = invocation
        return args, kwargs

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        frame = self.stack.pop()
        for event in (*self.events, *self.crosses):
            if not event.open:
                continue
            own = event.frames[-1]
            if own is frame:
                event.output = first_tensor(output)
                event.open = event.projection is None
            elif is_linear(module):
                if event.output is None:  # still inside: the last matrix is the output projection
                    event.projection = module
                else:
                    given = next((t for t in args if isinstance(t, Tensor)), None)
                    same = given is not None and given.numel() == event.output.numel()
                    if given is not None and same and torch.equal(given.flatten(), event.output.flatten()):
                        event.projection = module
                    event.open = False

    def _on_call(self, call: Call) -> Tensor:
        keys = call.k.shape[0] * call.k.shape[2]
        square = call.q.shape[2] == call.k.shape[2]
        self._note(call.q.shape[1], call.scores.kind, cut=True, square=square, keys=keys)
        with torch._C.DisableTorchFunction():  # what the kernels do is not the model's
            return attend(*call.qkv, call.scores)

    def _on_weights(self, square: bool) -> None:
        self._note(0, None, cut=False, square=square)

    def _note(self, heads: int, kind: Kind | None, cut: bool, square: bool, keys: int | None = None) -> None:
        frames = list(self.stack)
        while frames and not any(True for _ in frames[-1].module.parameters()):
            frames.pop()
        if not frames:
            return
        own = frames[-1]
        hidden = find_hidden(own.args, own.kwargs)
        context = None if hidden is None else find_context(own.args, own.kwargs, hidden, keys)
        if hidden is None or (context is None and not square):
            return
        events = self.events if context is None else self.crosses
        known = next((e for e in events if e.frames[-1] is own), None)
        if known is not None:  # a module that attends more than once is one layer
            known.cut, known.kind = known.cut and cut, known.kind if known.kind == kind else None
            known.heads = 0
            return
        x = self.keep(hidden).reshape(-1, hidden.shape[-1])
        if context is not None:  # one for all layers, as a rule
            _, context = self.contexts.setdefault(id(context), (context, self.keep(context).reshape(-1, context.shape[-1])))
        events.append(_Event(frames, x, heads, kind, cut, context))

    def _layers(self) -> tuple[Layer, ...]:
        if not self.events:
            return tuple(self._layer(i, self.crosses, self._block(e, self.crosses)) for i, e in enumerate(self.crosses))
        layers = []
        for i, event in enumerate(self.events):
            block = self._block(event, self.events)
            inside = [k for k, e in enumerate(self.crosses) if block in e.frames]
            alone = sum(block in e.frames for e in self.events) == 1
            cross = self._layer(inside[0], self.crosses, block) if inside and alone else None
            layers.append(replace(self._layer(i, self.events, block), cross=cross))
        return tuple(layers)

    def _layer(self, index: int, events: list[_Event], block: _Frame) -> Layer:
        event = events[index]
        own = event.frames[-1]
        invocation = self.invocations.get((block.module, block.nth)) or block.invocation(self.keep)
        assert invocation is not None
        call = sum(1 for e in events[:index] if block in e.frames and e.frames[-1].module is own.module)
        return Layer(
            index,
            own.name,
            invocation,
            own.module,
            call,
            event.x,
            event.projection,
            event.heads,
            event.kind,
            event.cut,
            event.context,
        )

    def _block(self, event: _Event, events: list[_Event]) -> _Frame:
        """The outermost element of a list of modules with this attention and no other of its kind."""
        alone = [f for f in event.frames if sum(f in e.frames for e in events) == 1]
        alone = [f for f in alone if find_hidden(f.args, f.kwargs) is not None]
        listed = [f for f in alone if f.module in self.elements]
        inner = [f for f in event.frames if f.module in self.elements and find_hidden(f.args, f.kwargs) is not None]
        return (listed or inner[-1:] or alone or event.frames[-1:])[0]
