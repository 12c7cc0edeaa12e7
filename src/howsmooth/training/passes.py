"""One forward pass of a model that asks its layers for products with their Jacobians.

Where a layer's map begins, its tokens `x` go on as a leaf of a graph of their own. Where it ends, a backward pass through that
graph gives `Jᵀ u`, recorded: it is linear in `u`, so a backward pass through it, from any `v`, gives `J v`. The model itself
runs on as if nothing had happened, and stops behind the last layer that is asked for. So one pass and two short backward
passes for each layer are a step of power iteration in all layers.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from howsmooth.errors import BadInputError
from howsmooth.kernels import Scores, attend, plain_attention
from howsmooth.kernels.kinds import Softmax
from howsmooth.kernels.products import float32_products
from howsmooth.kernels.tensors import check_dense
from howsmooth.models import Model
from howsmooth.models.cut import Cut
from howsmooth.models.intercept import Answered, Call
from howsmooth.models.sample import Sample
from howsmooth.models.span import MapName, Span
from howsmooth.models.trace import find_hidden, first_tensor
from howsmooth.settings import choice, items, whole
from howsmooth.training.bundle import Bundle, Recorded
from howsmooth.training.looks import look

Inputs = Tensor | Mapping[str, Any]
_TORCH_ATTENTION = nn.functional.scaled_dot_product_attention
_HELD = 2**28  # bytes of layers that wait to be measured together
FAST: tuple[MapName, ...] = ("attention", "heads", "normed", "block")


@final
@dataclass(eq=False)
class Seen:
    """What one pass saw of one layer.

    x: the tokens that entered, as they came.  value: by row of the probe, or by head of every row, `max |J w|` over unit `w` in
    the span of the last `v`, a lower end of the constant, less what rounding may have added; where a graph was asked for,
    `|Jᵀ u|` with its graph, at the unit `u` of the last image, held fixed.  directions: the next `u`, (rows · times, N).
    looks: of its attention calls, as `look` gives them, where they were asked for.
    """

    x: Tensor
    value: Tensor
    directions: Tensor
    looks: list[Tensor] = field(default_factory=list)


@final
@dataclass(frozen=True, eq=False)
class Route:
    """Where a layer's map lies in a run of the model: which call of its block, which call of its module in there."""

    index: int
    name: str
    span: Span
    module: nn.Module
    call: int

    @property
    def block(self) -> nn.Module:
        return self.span.root.module

    @property
    def nth(self) -> int:
        return self.span.root.nth

    @property
    def inside(self) -> bool:
        """Whether the map begins at the attention module and not at the block."""
        return self.span.enter is not None


@final
class Passes:
    """A model at a probe, ready to be run again and again as its weights change.

    model: as `howsmooth.load` gives it.  probe: a batch, by the names of the model's `forward`, or its only tensor.
    layers: `"all"` or which.  map: `attention`, `heads`, `normed` or `block`.
    """

    def __init__(self, model: Model, probe: Inputs, layers: str | Sequence[int], map: MapName):
        self.model, self.map = model, choice(map, "a map", FAST)
        self.rows = rows_of(probe)
        samples = [self._sample(row) for row in self.rows]
        first = samples[0]
        self.count = len(first.trace.layers)
        self.layers = chosen(layers, self.count)
        if any(len(s.trace.layers) != self.count for s in samples):
            raise BadInputError("expected rows of a probe that go the same way through the model, got others; pass one row")
        cuts = [first.map(k, self.map) for k in self.layers]  # refuses what is not there, compares with the model's own code
        bad = next((cut for cut in cuts if not cut.kernels), None)
        self.kernels = bad is None
        whole = first.cut(self.layers[0], "model") if bad is None else replace(bad, name="model")
        assert whole is not None
        self.base: Cut = whole
        trace = self.base.trace
        self.routes = [
            Route(k, cut.span.place, Span.of(self.map, trace, layer), layer.module, layer.call)
            for k, cut in zip(self.layers, cuts, strict=True)
            for layer in (trace.layers[k],)
        ]
        self.heads = {k: trace.layers[k].heads for k in self.layers}
        self.least = min(route.span.tokens.numel() for route in self.routes)  # numbers in the smallest direction
        self.together = all(_batch_first(s) for s in samples)
        self.batches = [_joined(samples)] if self.together else [(s.args, s.kwargs) for s in samples]
        self.real = self._real(samples)
        self.watched = True  # until a whole pass has come through the library's interfaces alone
        self.work, self.device = first.work, self.base.trace.output.device

    def fed(self, batch: Inputs) -> "Passes":
        """The same model and layers at another batch, without looking at the model again."""
        other = copy.copy(self)
        other.rows = rows_of(batch)
        kind = next((p.dtype for p in self.model.module.parameters() if p.is_floating_point()), torch.float32)

        def fit(t: Any) -> Any:
            return t.to(self.device, kind if t.is_floating_point() else None) if isinstance(t, Tensor) else t

        fixed = {} if "use_cache" not in self.batches[0][1] else {"use_cache": False}

        def ready(row: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return ((fit(row),), fixed) if isinstance(row, Tensor) else ((), {k: fit(t) for k, t in row.items()} | fixed)

        other.batches = [ready(batch)] if self.together else [ready(row) for row in other.rows]
        mask = None if isinstance(batch, Tensor) or "input_ids" not in batch else batch.get("attention_mask")
        padded = mask if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()) else None
        masks = None if padded is None else padded.bool()[:, :, None]
        apart = [None] * len(other.rows) if masks is None else [own[None] for own in masks]
        other.real = [masks] if self.together else apart
        return other

    def _sample(self, row: Inputs) -> Sample:
        captured = self.model.capture(inputs=row) if isinstance(row, Tensor) else self.model.capture(**row)
        return captured.sample

    def _real(self, samples: list[Sample]) -> list[Tensor | None]:
        """For each batch that is run, which tokens are not padding, (rows, n, 1); nothing where all are real."""
        masks: list[Tensor | None] = [None if s.real is None else torch.tensor(s.window.mask)[None, :, None] for s in samples]
        if self.together and any(m is not None for m in masks):
            n = max(m.shape[1] for m in masks if m is not None)
            return [torch.cat([torch.ones(1, n, 1, dtype=torch.bool) if m is None else m for m in masks])]
        return masks[:1] if self.together else masks

    def run(
        self,
        directions: Mapping[int, Tensor],
        *,
        starts: Mapping[int, Tensor] | None = None,
        graph: bool = False,
        times: int = 1,
        heads: bool = False,
        rounds: int = 1,
        settled: float = 0.0,
        looks: bool = False,
    ) -> Iterator[dict[int, Seen]]:
        """One pass for each batch of the probe: rows together where the model keeps them apart along its first axis.

        What cannot be measured, since something is not finite there, and all behind it, is left out.

        directions: by layer, the `u`, (rows · times, n, d); drawn where there is none.  starts: by layer, the `v`, where they
        are known instead.  graph: keep the graph of `value` down to the weights, on attention with second derivatives.
        times: how many directions a row has; each gets a copy of the row.  heads: the copies are for one head each, alone.
        rounds: steps of power iteration at most.  settled: the gain of a step at which no further one is needed.
        looks: also what attention looks like.
        """
        how = _How(graph, times, heads, rounds, settled, looks)
        start = 0
        for (args, kwargs), real in zip(self.batches, self.real, strict=True):
            count = (len(self.rows) if self.together else 1) * times
            us, vs = ({k: t[start : start + count] for k, t in (given or {}).items()} for given in (directions, starts))
            yield _Run(self, args, kwargs, None if real is None else real.to(self.device), us, vs, how).seen()
            start += count


@dataclass(frozen=True)
class _How:
    """The settings of `Passes.run`."""

    graph: bool
    times: int
    heads: bool
    rounds: int
    settled: float
    looks: bool


class _Enough(Exception):
    """All layers that were asked for are done: the rest of the model need not run."""


class _Run:
    """One pass on its way."""

    def __init__(
        self,
        passes: Passes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        real: Tensor | None,
        directions: Mapping[int, Tensor],
        starts: Mapping[int, Tensor],
        how: _How,
    ):
        self.passes, self.args, self.kwargs, self.real = passes, args, kwargs, real
        self.directions, self.starts, self.how = directions, starts, how
        self.graph, self.times = how.graph, how.times
        self.rows = (len(passes.rows) if passes.together else 1) * self.times
        self.found: dict[int, Seen] = {}
        self.left: list[Recorded] = []  # not measured yet
        self.begun: set[int] = set()
        self.count = 0  # of layers that were left
        self.calls: dict[nn.Module, int] = {}  # of blocks so far
        self.within: dict[nn.Module, int] = {}  # of attention modules since their block began
        self.within_entry: Route | None = None  # whose first module is still running
        self.active: tuple[Route, Tensor, list[Answered], ExitStack, torch.dtype] | None = None

    def seen(self) -> dict[int, Seen]:
        passes, module = self.passes, self.passes.model.module
        with ExitStack() as stack:
            stack.enter_context(float32_products())
            stack.enter_context(torch.set_grad_enabled(self.graph))
            stack.callback(self._abandon)
            for route in passes.routes:
                self._listen(stack, route)
            watch = stack.enter_context(passes.base.running(self._on_call, passes.watched))
            if not passes.kernels or self.graph:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            wide = self._wide()
            with suppress(_Enough, BadInputError):  # the latter: logits that are not finite, or out of range
                functional_call(module, wide, self.args, self.kwargs) if wide else module(*self.args, **self.kwargs)
            if self.count == len(passes.routes):
                passes.watched = watch is not None and watch.caught
            with torch._C.DisableTorchFunction():
                self._measure()
        return self.found

    def _wide(self) -> dict[str, Tensor]:
        """Weights of the measured parts in the precision of the measurement, where they are in another."""
        work = self.passes.work
        parts = {id(p) for route in self.passes.routes for p in _inside(route) if p.is_floating_point() and p.dtype != work}
        if not parts:
            return {}
        named = self.passes.model.module.named_parameters(remove_duplicate=False)
        return {name: p.to(work) for name, p in named if id(p) in parts}

    def _listen(self, stack: ExitStack, route: Route) -> None:
        block, module, span = route.block, route.module, route.span
        if block not in self.calls:
            self.calls[block] = -1

            def begins(_: nn.Module, args: Any) -> None:
                self.calls[block] += 1
                self.within.clear()

            stack.enter_context(block.register_forward_pre_hook(begins))
        if module not in self.within:
            self.within[module] = -1

            def counts(_: nn.Module, args: Any) -> None:
                self.within[module] = self.within.get(module, -1) + 1

            stack.enter_context(module.register_forward_pre_hook(counts))

        def here() -> bool:
            return self.calls[block] == route.nth and (not route.inside or self.within.get(module, -1) == route.call)

        def enters(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not here() or self.active is not None or route.index in self.begun:
                return None
            self.begun.add(route.index)
            with torch._C.DisableTorchFunction():
                hidden = find_hidden(args, kwargs)
                assert hidden is not None
                tokens = self._enter(route, hidden)
                if len(args) == 1 and args[0] is hidden and not kwargs:
                    return (tokens,), kwargs
                return tree_map(lambda t: tokens if t is hidden else self._copied(t), (args, kwargs))

        def leaves(_: nn.Module, args: Any, output: Any) -> Any:
            return self._leave(output) if self._is_active(route) else None

        def arrives(_: nn.Module, args: tuple[Any, ...]) -> Any:
            return self._leave(args) if self._is_active(route) else None

        stack.enter_context((module if route.inside else block).register_forward_pre_hook(enters, with_kwargs=True))
        end = block if span.leave is None else span.leave
        stack.enter_context(end.register_forward_pre_hook(arrives) if span.before else end.register_forward_hook(leaves))

        def ends(_: nn.Module, args: Any, output: Any) -> Any:
            if self.within_entry is not route:
                return None
            self.within_entry = None
            left = self.active is None  # else the map ends further on
            return _mapped(lambda t: self._once(self._plain(t)), output) if left else None

        stack.enter_context((module if route.inside else block).register_forward_hook(ends))

    def _is_active(self, route: Route) -> bool:
        return self.active is not None and self.active[0] is route

    def _enter(self, route: Route, hidden: Tensor) -> Tensor:
        """`hidden`, a copy for every direction, at the head of a graph."""
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))  # a checkpoint would save nothing
        x = hidden if self.graph else hidden.detach()
        x = x.to(self.passes.work)
        x = x if self.times == 1 else x.repeat_interleave(self.times, 0)
        x = x if x.requires_grad else x.requires_grad_()
        self.active, self.within_entry = (route, x, [], stack, hidden.dtype), route
        return x.clone()  # which the model may write into

    def _leave(self, output: Any) -> Any:
        assert self.active is not None
        route, x, calls, stack, dtype = self.active
        with torch._C.DisableTorchFunction():  # nothing in here is the model's
            self.active = None
            stack.close()
            self.left.append(Recorded(route.index, x, first_tensor(output), calls))
            self.count += 1
            if self.graph or sum(layer.held for layer in self.left) > _HELD:
                self._measure()
            if self.count == len(self.passes.routes):
                raise _Enough
            if self.within_entry:  # what else goes on in there still has its copies
                return _mapped(lambda t: self._plain(t, dtype), output)
            return _mapped(lambda t: self._once(self._plain(t, dtype)), output)

    def _measure(self) -> None:
        """The layers that were left, those of a kind together; what refuses is left out."""
        kinds: dict[Any, list[Recorded]] = {}
        for layer in self.left:
            kinds.setdefault(layer.kind, []).append(layer)
        self.left = []
        for layers in kinds.values():
            try:
                self._turn(layers)
            except BadInputError:  # one of them, or all
                for layer in layers if len(layers) > 1 else ():
                    with suppress(BadInputError):
                        self._turn([layer])

    @torch.enable_grad()
    def _turn(self, layers: list[Recorded]) -> None:
        """Values and next directions of layers of a kind."""
        bundle = Bundle(layers, self.rows, self.times, self.how.heads, self.masked)
        starts = [self.starts[layer.index] for layer in layers if layer.index in self.starts] or None
        turned = bundle.step(bundle.first([self._direction(layer.index, layer.y) for layer in layers]), starts)
        for _ in range(self.how.rounds - 1):
            if not turned.gain > self.how.settled:
                break
            turned = bundle.step(bundle.back(turned.directions.chunk(len(layers))))
        values, directions = turned.value.chunk(len(layers)), turned.directions.flatten(0, 1).chunk(len(layers))
        if self.graph:
            values = [self.sizes(t) for t in bundle.back(directions, graph=True)]
        else:  # what rounding may have added is taken off
            noise = max((kernel.noise for kernel in bundle.kernels), default=0.0)
            values = [max(0.0, 1 - noise) * t for t in values]
        looks = [look(kernel, self.real, len(layers)) for kernel in bundle.kernels] if self.how.looks else []
        for i, layer in enumerate(layers):
            x = layer.x.detach()[:: self.times]
            self.found[layer.index] = Seen(x, values[i], directions[i], [each[i] for each in looks])

    def _direction(self, index: int, y: Tensor) -> Tensor:
        """The `u` of a layer whose output is `y`: carried over, or random; none where it is known what goes in."""
        u = self.directions.get(index)
        if index in self.starts:
            u = torch.zeros_like(y)
        elif u is None or u.numel() != y.numel():
            u = self.unit(torch.randn(y.shape, generator=torch.Generator().manual_seed(index)).to(y))
        return u.detach().to(y).reshape(y.shape)

    def _copied(self, t: Any) -> Any:
        """An argument beside the tokens, for every copy of its row; what only stands for a mask is read in `_linearized`."""
        several = self.times > 1 and isinstance(t, Tensor) and t.ndim > 0 and len(t) == self.rows // self.times > 1
        return t.repeat_interleave(self.times, 0) if several and t.untyped_storage().nbytes() > t.element_size() else t

    def _once(self, t: Any) -> Any:
        """A result of the copies, for the rows themselves."""
        several = self.times > 1 and isinstance(t, Tensor) and t.ndim > 0 and len(t) == self.rows
        return t[:: self.times].clone() if several else t

    def _plain(self, t: Any, dtype: torch.dtype | None = None) -> Any:
        """A tensor without its direction, and without a graph that nobody asked for."""
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        t = t if self.graph else t.detach()
        return t if dtype is None else t.to(dtype)

    def _abandon(self) -> None:
        if self.active is not None:
            self.active[3].close()

    def masked(self, t: Tensor) -> Tensor:
        return t if self.real is None else t * self._mask(t)

    def _mask(self, t: Tensor) -> Tensor:
        assert self.real is not None
        return self.real.repeat_interleave(self.times, 0).reshape(*t.shape[:-1], 1)

    def sizes(self, t: Tensor) -> Tensor:
        """Norms by row, of any layout where there is one row."""
        return (t.flatten(1) if self.rows > 1 else t.reshape(1, -1)).norm(dim=-1)

    def unit(self, t: Tensor) -> Tensor:
        """Of length one in every row, zero at padding."""
        t = self.masked(t)
        size = self.sizes(t)
        return t / torch.where(size > 0, size, 1.0).reshape(-1, *[1] * (t.ndim - 1))

    def _on_call(self, call: Call) -> Tensor:
        if self.active is None or self.graph:
            return _attention(*call.qkv, call.scores)
        with torch._C.DisableTorchFunction():
            with torch.no_grad():
                q, k, v = (t[:: self.times] for t in call.qkv)
                out = _attention(q, k, v, call.scores)
                out = out if self.times == 1 else out.repeat_interleave(self.times, 0)
            self.active[2].append(Answered(call, out.requires_grad_()))
            return out.clone()  # which the model may write into


def _attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """Attention with first and second derivatives."""
    mask = scores.mask
    if mask.ends is not None:  # by positions, which the operators do not know
        return plain_attention(q, k, v, scores)
    with torch._C.DisableTorchFunction():
        plain = scores.kind == Softmax() and scores.softcap is None  # no sink
        simple = plain and mask.window is None and mask.keys is None and mask.bias is None
        if simple and not torch.is_grad_enabled():
            grouped = q.shape[1] != k.shape[1]
            return _TORCH_ATTENTION(q, k, v, is_causal=mask.causal, scale=scores.scale, enable_gqa=grouped)
        return attend(q, k, v, scores)


def chosen(layers: str | Sequence[int], count: int) -> list[int]:
    """Layers by number, in order, of a model that has so many."""
    fix = "count from 0"
    if isinstance(layers, str) and layers == "all":
        return list(range(count))
    given = items(layers, '"all" or a list of layers', fix)
    expected = f"layers from 0 to {count - 1}"
    found = sorted({whole(k, expected, fix, below=count) for k in given})
    if not found:
        raise BadInputError(f"expected {expected}, got an empty list; {fix}")
    return found


def _inside(route: Route) -> list[Tensor]:
    """The weights that a route's map may use."""
    parts = (route.module, route.span.leave) if route.inside else (route.block,)
    return [p for part in parts if part is not None for p in part.parameters()]


def _mapped(f: Callable[[Any], Any], output: Any) -> Any:
    """`tree_map`, without its price where there is no tree."""
    return f(output) if isinstance(output, Tensor) else tree_map(f, output)


def _same(t: Tensor) -> Tensor:
    return t


def _batch_first(sample: Sample) -> bool:
    """Whether the rows of a batch stay apart along the first axis of all blocks."""
    return all(layer.block.hidden.ndim == 3 and layer.block.hidden.shape[0] == 1 for layer in sample.trace.layers)


def rows_of(probe: Inputs) -> list[Inputs]:
    """The rows of a batch, one sequence in each."""
    for name, t in probe.items() if isinstance(probe, Mapping) else (("the probe", probe),):
        check_dense(t, str(name))
        if isinstance(t, Tensor) and not t.numel():
            raise BadInputError(f"expected a row or more with tokens in {name}, got shape {tuple(t.shape)}; pass a longer one")
    if isinstance(probe, Tensor):
        return [probe[i : i + 1] for i in range(len(probe))] if probe.ndim else [probe]
    if not isinstance(probe, Mapping):
        raise BadInputError(
            f"expected a probe by the names of the model's forward, as a batch of its training has them, got "
            f"{type(probe).__name__}; pass a dictionary or a tensor"
        )
    sizes = [t.shape[0] for t in probe.values() if isinstance(t, Tensor) and t.ndim]
    count = sizes[0] if sizes else 1

    def row(t: Any, i: int) -> Any:
        return t[i : i + 1] if isinstance(t, Tensor) and t.ndim and t.shape[0] == count else t

    return [{name: row(t, i) for name, t in probe.items()} for i in range(count)]


def _joined(samples: list[Sample]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of all rows at once."""
    first = samples[0]

    def join(values: list[Any]) -> Any:
        several = len(values) > 1 and all(isinstance(t, Tensor) and t.ndim and len(t) == 1 for t in values)
        return torch.cat(values) if several else values[0]

    args = tuple(join([s.args[i] for s in samples]) for i in range(len(first.args)))
    return args, {name: join([s.kwargs[name] for s in samples]) for name in first.kwargs}
