"""A map of a model, cut at its attention function: `after ∘ softmax attention ∘ before`.

The block runs once with the tokens put in where the map begins, and stops where it ends. `before` and `after` are torch's own
graph; the attention calls in between are nodes of that graph whose products run on the kernels.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.kernels import AttentionKernel, attention_and_kernel
from howsmooth.kernels.base import FINER, Precision
from howsmooth.kernels.products import float32_products
from howsmooth.maps import AutodiffJacobian, Operator
from howsmooth.maps.base import Map
from howsmooth.maps.leading import led_to
from howsmooth.models.by_hand import ByHand
from howsmooth.models.guess import paths
from howsmooth.models.intercept import IMPLEMENTATION, WRITTEN_OUT, Answered, Call, Intercept, implementation
from howsmooth.models.room import unhooked, weights_of
from howsmooth.models.span import MapName, Span
from howsmooth.models.trace import (
    KeepDouble,
    Layer,
    Trace,
    Watch,
    evaluating,
    find_context,
    find_hidden,
    first_tensor,
    without_weights,
)

ROUTED = "experts are those chosen at this input: routing is held fixed"
_PICKS = (torch.topk, Tensor.topk, torch.argmax, Tensor.argmax, torch.sort, Tensor.sort, torch.argsort, Tensor.argsort)
_SMALL = 4096  # entries up to which the graph is checked with a product each way of its own


class Stop(Exception):
    """The end of a map, or all that was asked for, is reached; nothing behind it is run."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value


class Ran(NamedTuple):
    """A map at some tokens: what it gave, (n, d_out), the attention calls on the way and the kernel that served each."""

    output: Tensor
    calls: list[Answered]
    kernels: list[AttentionKernel]


@final
@dataclass(frozen=True, eq=False)
class Cut(Map):
    """One map of one layer at the input of a trace.

    owner: the model whose configurations choose the attention code.  code: that choice, `howsmooth` for the kernels.
    trace, layer: where the arguments come from.  name: which map.  head: one head alone.
    real: the tokens that are not padding; the others keep their values and are neither moved nor measured.
    kernels: whether attention calls run on the kernels.  work: the precision.  precision: of the fused kernels.
    """

    owner: nn.Module
    code: str | None
    trace: Trace
    layer: Layer
    name: MapName
    head: int | None = None
    real: Tensor | None = None
    kernels: bool = True
    work: torch.dtype = torch.float32
    precision: Precision = "half"

    @functools.cached_property
    def span(self) -> Span:
        return Span.of(self.name, self.trace, self.layer)

    @property
    def attends(self) -> Layer:
        """The attention that the map is, or is made around."""
        return (self.layer.crossing or self.layer) if self.name in ("cross", "context") else self.layer

    @property
    def start(self) -> Tensor:
        """The tokens the map takes in the trace, (n, d), padding left out."""
        tokens = self.span.tokens if self.real is None else self.span.tokens[self.real]
        return tokens.to(self.trace.output.device)

    @property
    def width(self) -> int:
        return self.span.tokens.shape[-1]

    @property
    def out_width(self) -> int:
        with torch.no_grad():
            return self.value(self.start.to(self.work)[None]).shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.work

    @property
    def device(self) -> torch.device:
        return self.trace.output.device

    def moved(self, device, dtype):
        return self if dtype in (None, self.work) else replace(self, work=dtype)

    @float32_products()
    def value(self, x):
        return torch.stack([self.run(item).output for item in x])

    def linearize(self, x):
        if len(x) != 1:
            raise BadInputError(f"expected one input at a time for a map of a model, got {len(x)}; loop over them")
        last = vars(self).get("_last", lambda: None)()
        if last is not None:  # one graph at a time: the old one is made again should it be asked
            last.release()
        jacobian = CutJacobian(self.to(x.dtype), x)
        vars(self)["_last"] = weakref.ref(jacobian)
        try:
            return jacobian.output, jacobian
        except (RuntimeError, TypeError) as error:
            if x.dtype == torch.float64 and self.work != torch.float64:  # code that knows no float64
                raise BadFunctionError(f"expected a model that runs in float64, got {error}; measure in float32") from None
            raise

    def run(self, tokens: Tensor) -> Ran:
        """The map at tokens (n, d)."""
        calls, kernels = list[Answered](), list[AttentionKernel]()
        inside = self.name not in ("cross", "context")  # what a block does before its cross-attention is no part of those

        def on_call(call: Call) -> Tensor:
            heads = call.q.shape[1]
            head = self.head if inside else None
            call = call if head is None else _one_head(call, head)
            out, kernel = attention_and_kernel(*call.qkv, call.scores, self.precision)
            if inside:
                calls.append(Answered(call, out))
                kernels.append(kernel)
            return out if head is None else nn.functional.pad(out, (0, 0, 0, 0, head, heads - 1 - head))

        def enter(*_: Any) -> None:
            nonlocal inside
            inside = True

        with self.attends.module.register_forward_pre_hook(enter):
            return Ran(self.through(tokens, on_call), calls, kernels)

    def through(self, tokens: Tensor, on_call: Callable[[Call], Tensor]) -> Tensor:
        """The map at tokens (n, d), its attention calls answered by `on_call`, which may end the run with `Stop`."""
        span = self.span
        root = span.root
        convert = _converter(tokens.device, self.work, set(self.trace.masks))
        x = tokens if self.real is None else span.tokens.to(tokens).index_copy(0, self.real.to(tokens.device), tokens)
        with ExitStack() as stack:
            stack.enter_context(self.running(on_call))
            args, kwargs = _enter(stack, span, x, convert)
            try:
                output = functional_call(root.module, self.state(root.module, tokens.device), args, kwargs)
            except Stop as stop:
                output = stop.value
        y = first_tensor(output)
        y = y.reshape(-1, y.shape[-1])
        if self.real is not None:
            if len(y) != len(span.tokens):
                raise BadInputError(f"expected as many outputs as tokens under a padding mask, got {len(y)}; leave it out")
            y = y[self.real.to(y.device)]
        return y

    def state(self, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """A module's parameters and buffers there, in the precision of this map."""
        written = self.span.everywhere  # tokens are written in place, and may be a weight or a view of one
        convert = _converter(device, self.work, set(), copy=written)  # a weight of two names stays one
        return {k: convert(t) if t.is_floating_point() else t.detach().to(device) for k, t in weights_of(module).items()}

    @contextmanager
    def running(self, on_call: Callable[[Call], Tensor], watched: bool = True) -> Iterator[Watch | None]:
        """Inside it the model's modules run as this map runs them, attention calls answered by `on_call`.

        watched: by a `Watch`, where calls may not come through the library's interface; it has a price for every operation, for
        nothing where a first run has caught none.
        """
        watch = Watch() if watched and self.kernels and self.code != IMPLEMENTATION else None
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.owner))
            stack.enter_context(unhooked(self.span.root.module))
            if self.code is not None:
                stack.enter_context(implementation(self.owner, self.code))
            if self.kernels:
                stack.enter_context(Intercept(on_call, dict(self.trace.masks)).active())
                if watch is not None:
                    stack.enter_context(watch)
                if self.code == WRITTEN_OUT:
                    stack.enter_context(ByHand())
            if self.work == torch.float64:
                stack.enter_context(KeepDouble())
            for module in self.span.root.module.modules():
                if isinstance(module, nn.MultiheadAttention):
                    stack.enter_context(module.register_forward_pre_hook(without_weights, with_kwargs=True))
            yield watch


@final
class CutJacobian(Operator):
    """The Jacobian of a cut map at `x`, (1, n, d): torch's graph with the kernels inside, as in `AutodiffJacobian`.

    Whether its two products fit together is read off the first one with `JᵀJ`, which needs both. Where the kernels' operands
    keep eleven bits, those of all matrix products do, until it is refined. The graph is made when it is asked for, and let go
    of when a finer one is.
    """

    def __init__(self, cut: "Cut", x: Float[Tensor, "1 n d"], made: "_Made | None" = None, exact: bool = False):
        self._cut, self._x, self._exact = cut, x, exact
        self._made = _Made(cut, x) if made is None else made
        self.batch, self.in_shape, self.dtype, self.device = 1, tuple(x.shape[1:]), x.dtype, x.device

    @property
    def out_shape(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]  known once the map has run
        return tuple(self.output.shape[1:])

    @property
    def output(self) -> Tensor:
        """The map at `x`, (1, n, d_out)."""
        return self._graph.output

    @property
    def kernels(self) -> list[AttentionKernel]:
        """The attention calls on the way."""
        return self._made.get().kernels

    @property
    def _graph(self) -> AutodiffJacobian:
        return self._made.get().jacobian

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of how the map was run."""
        self._made.get()
        return (ROUTED,) if self._made.routed else ()

    def release(self) -> None:
        """Let go of the graph, after a last look at what is asked for without it."""
        if self._made.graph is not None:
            _ = self.coarse, self.heavy
            self._made.graph = None

    @functools.cached_property
    def coarse(self) -> bool:
        """Whether matrix products around the kernels take operands of eleven bits."""
        if self._exact or self._cut.precision != "half":
            return False
        return bool(self.kernels) and all(k.coarse for k in self.kernels)

    @property
    def noise(self) -> float:
        return self._noise

    @functools.cached_property
    def _noise(self) -> float:
        """Rounding, and what it makes of logits, as for an attention layer of our own."""
        kernels = max([32 * torch.finfo(self.dtype).eps, *(k.noise for k in self.kernels)])
        return math.hypot(kernels, self._coarse_noise()) if self.coarse else kernels  # independent errors

    def _coarse_noise(self) -> float:
        """The relative error that eleven-bit operands around the kernels make of a product with a random vector."""
        v = torch.randn(1, 1, *self.in_shape, generator=torch.Generator(self.device).manual_seed(0), device=self.device)
        with float32_products():
            true = self._graph.jvp(v)
        size = float(true.norm())
        return float((self.jvp(v) - true).norm()) / size if size > 0 else 0.0

    @property
    def heavy(self) -> bool:
        return self._heavy

    @functools.cached_property
    def _heavy(self) -> bool:
        return any(k.heavy for k in self.kernels)

    def refined(self):
        if self.coarse:
            return CutJacobian(self._cut, self._x, self._made, exact=True)
        finer = FINER.get(self._cut.precision)
        if self._made.graph is not None:  # else some kernel of a coarser one has it
            finer = next((k.finer for k in self.kernels if k.finer is not None), None)
        if finer is None:
            return None
        self.release()
        return CutJacobian(replace(self._cut, precision=finer), self._x)

    def jvp(self, v):
        with float32_products(coarse=self.coarse):
            return self._graph.jvp(v)

    def vjp(self, u):
        with float32_products(coarse=self.coarse):
            return self._graph.vjp(u)

    def gram(self, v):
        if not self._made.trusted:
            self._made.trusted = True
            try:
                product, energy = super().gram(v)
                if self._fits(v, product, energy):
                    return product, energy
            except RuntimeError:
                pass
            self._graph.check()
        return super().gram(v)

    def guess(self, seeds):
        """`Jᵀ` of one output direction at all tokens, the one that values lead to; nothing but for one call of attention."""
        graph = self._made.get()
        if len(graph.calls) != 1:
            return None
        with float32_products(coarse=self.coarse):
            ways = paths(graph.calls[0], *graph.jacobian.ends, self._cut.real)
        return None if ways is None else self.vjp(led_to(*ways, seeds).expand(1, 1, *self.out_shape))[0]

    def _fits(self, v: Tensor, product: Tensor, energy: Tensor) -> bool:
        """`|J v|² = ⟨v, JᵀJ v⟩`."""
        left, right = energy.double().diagonal(dim1=1, dim2=2).sum(), (v.double() * product.double()).sum()
        return bool((left - right).abs() <= min(1e3 * self.noise, 0.02) * left) or not bool(left.isfinite())


class _Choices(TorchFunctionMode):
    """Hears whether a map picks by the size of something that depends on its tokens, as a router picks experts."""

    def __init__(self):
        super().__init__()
        self.made = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _PICKS:
            self.made |= any(isinstance(t, Tensor) and t.requires_grad for t in (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


class _Graph(NamedTuple):
    jacobian: AutodiffJacobian
    calls: list[Answered]
    kernels: list[AttentionKernel]


class _Made:
    """The graph of a cut map and its attention calls, made when asked for; `trusted` once its products were checked."""

    def __init__(self, cut: Cut, x: Float[Tensor, "1 n d"]):
        self._cut, self._x = cut, x
        self.trusted = x.numel() <= _SMALL  # decomposed whole, so no product with JᵀJ would come: checked as it is made
        self.graph: _Graph | None = None
        self.routed = False

    @float32_products()
    def get(self) -> _Graph:
        if self.graph is None:
            cut, calls, kernels, choices = self._cut, list[Answered](), list[AttentionKernel](), _Choices()

            def f(t: Tensor) -> Tensor:  # knows nothing of what holds it, so that all goes when that does
                with choices:
                    ran = cut.run(t[0])
                calls.extend(ran.calls)
                kernels.extend(ran.kernels)
                return ran.output[None]

            jacobian = AutodiffJacobian(f, self._x, batched=True, checked=self._x.numel() <= _SMALL)
            self.graph = _Graph(jacobian, list(calls), list(kernels))
            self.routed = choices.made
        return self.graph


def _one_head(call: Call, head: int) -> Call:
    """A call of one head alone."""
    scores = replace(call.scores, kind=call.scores.kind.head(head))
    parts, group, bias = scores.kind.parts, call.q.shape[1] // call.k.shape[1], scores.mask.bias
    q, k, v = (slice(h * p, (h + 1) * p) for h, p in ((head, parts), (head // group, parts), (head // group, 1)))
    if bias is not None and bias.shape[1] > 1:
        scores = replace(scores, mask=replace(scores.mask, bias=bias[:, head : head + 1]))
    return replace(call, q=call.q[:, q], k=call.k[:, k], v=call.v[:, v], scores=scores)


def _enter(stack: ExitStack, span: Span, x: Tensor, convert: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrange for `x` to enter where a map begins and for the run to stop where it ends; the root's arguments."""
    if span.enter is not None:
        _put_in(stack, span, *span.enter, x)
    if span.leave is not None and span.counted is not None:
        _stop_at(stack, span.leave, span.before, *span.counted)
    if span.enter is None:
        return span.root.substitute(x.reshape(span.root.hidden.shape), convert)
    args, kwargs = tree_map(convert, (span.root.args, span.root.kwargs))
    if span.everywhere:  # it is written into
        return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (args, kwargs))
    return args, kwargs


def _put_in(stack: ExitStack, span: Span, module: nn.Module, index: int, x: Tensor) -> None:
    """Put `x` in at one call of a module."""
    calls = itertools.count()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if next(calls) != index:
            return None
        old = find_hidden(args, kwargs)
        if span.aside and old is not None:
            old = find_context(args, kwargs, old, len(x))
        assert old is not None
        value = x.reshape(old.shape)
        if span.everywhere:
            old.copy_(value)
            return None
        return tree_map(lambda t: value if t is old else t, (args, kwargs))

    stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))


def _stop_at(stack: ExitStack, end: nn.Module, before: bool, counted: nn.Module, index: int) -> None:
    """Stop with what `end` takes, or gives, once `counted` is in its call number `index`."""
    last = -1

    def count(_: nn.Module, args: Any) -> None:
        nonlocal last
        last += 1

    def taken(_: nn.Module, args: tuple[Any, ...]) -> None:
        if last == index:
            raise Stop(args[0])

    def given(_: nn.Module, args: Any, output: Any) -> None:
        if last == index:
            raise Stop(first_tensor(output))

    stack.enter_context(counted.register_forward_pre_hook(count))
    stack.enter_context(end.register_forward_pre_hook(taken) if before else end.register_forward_hook(given))


def _converter(device: torch.device, dtype: torch.dtype, keep: set[int], copy: bool = False) -> Callable[[Any], Any]:
    """Floating-point tensors where and as they are needed; storages in `keep`, which only stand for something, as they are.

    A tensor that occurs twice stays one tensor. With `copy` nothing shares memory with what was given.
    """
    done: dict[int, Tensor] = {}

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.untyped_storage().data_ptr() in keep:
            return leaf
        if id(leaf) not in done:
            done[id(leaf)] = leaf.detach().to(device, dtype, copy=copy)
        return done[id(leaf)]

    return convert
