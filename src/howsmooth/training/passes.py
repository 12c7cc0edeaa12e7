"""One forward pass of a model that asks its layers for products with their Jacobians.

Where a layer's map begins, its tokens `x` go on with a direction `v` (forward mode) and as a leaf of a graph of their own;
where it ends, the direction that arrives is `J v`, and one backward pass through that graph gives `Jᵀ J v`. The model itself
runs on as if nothing had happened. So one pass and one short backward pass for each layer give everything a step of power
iteration needs in all layers.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from howsmooth.errors import BadInputError
from howsmooth.kernels import AttentionKernel, Scores, attend, attention_and_kernel, plain_attention
from howsmooth.kernels.products import float32_products
from howsmooth.models import Model
from howsmooth.models.cut import Cut
from howsmooth.models.intercept import Call
from howsmooth.models.sample import Sample
from howsmooth.models.span import MapName, Span
from howsmooth.models.trace import find_hidden, first_tensor
from howsmooth.settings import choice, items, whole

Inputs = Tensor | Mapping[str, Any]
FAST: tuple[MapName, ...] = ("attention", "heads", "normed", "block")


@final
@dataclass(eq=False)
class Seen:
    """What one pass saw of one layer.

    x: the tokens that entered, as they came.  image: `J v`, by row of the probe.  pulled: `Jᵀ u`, `u = J v/|J v|`, in the shape
    of `x`.  value: `|Jᵀ u|` by row, a lower end of the constant that is attained by `pulled`, with a graph where one was asked
    for: `u` is held fixed.  kernels: its attention calls.
    """

    x: Tensor
    image: Tensor
    pulled: Tensor
    value: Tensor
    kernels: list[AttentionKernel] = field(default_factory=list)


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
        self, directions: Mapping[int, Tensor], *, graph: bool = False, times: int = 1, heads: bool = False
    ) -> Iterator[dict[int, Seen]]:
        """One pass for each batch of the probe: rows together where the model keeps them apart along its first axis.

        What cannot be measured, since something is not finite there, and all behind it, is left out.

        directions: by layer, (rows · times, n, d); drawn where there is none.  graph: keep the graph of `value` down to the
        weights, on attention with second derivatives.  times: how many directions a row has; each gets a copy of the row.
        heads: the copies are for one head each, alone.
        """
        start = 0
        for (args, kwargs), real in zip(self.batches, self.real, strict=True):
            count = (len(self.rows) if self.together else 1) * times
            own = {k: v[start : start + count] for k, v in directions.items()}
            yield _Run(self, args, kwargs, None if real is None else real.to(self.device), own, graph, times, heads).seen()
            start += count


class _Run:
    """One pass on its way."""

    def __init__(
        self,
        passes: Passes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        real: Tensor | None,
        directions: Mapping[int, Tensor],
        graph: bool,
        times: int,
        heads: bool,
    ):
        self.passes, self.args, self.kwargs, self.real = passes, args, kwargs, real
        self.directions, self.graph, self.times, self.heads = directions, graph, times, heads
        self.rows = (len(passes.rows) if passes.together else 1) * self.times
        self.found: dict[int, Seen] = {}
        self.calls: dict[nn.Module, int] = {}  # of blocks so far
        self.within: dict[nn.Module, int] = {}  # of attention modules since their block began
        self.within_entry: Route | None = None  # whose first module is still running
        self.active: tuple[Route, Tensor, Tensor, list[AttentionKernel], ExitStack, torch.dtype] | None = None

    def seen(self) -> dict[int, Seen]:
        passes, module = self.passes, self.passes.model.module
        with ExitStack() as stack:
            stack.enter_context(float32_products())
            stack.enter_context(torch.set_grad_enabled(self.graph))
            stack.enter_context(forward_ad.dual_level())
            stack.callback(self._abandon)
            for route in passes.routes:
                self._listen(stack, route)
            stack.enter_context(passes.base.running(self._on_call))
            if not passes.kernels or self.graph:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            with suppress(BadInputError):  # logits that are not finite, or out of range
                functional_call(module, self._wide(), self.args, self.kwargs)
        return self.found

    def _wide(self) -> dict[str, Tensor]:
        """Weights of the measured parts in the precision of the measurement, where they are in another."""
        names = {id(t): name for name, t in self.passes.model.module.named_parameters(remove_duplicate=False)}
        parts = {id(p): p for route in self.passes.routes for p in _inside(route)}
        wide = {names[key]: p for key, p in parts.items() if p.is_floating_point() and p.dtype != self.passes.work}
        return {name: p.to(self.passes.work) for name, p in wide.items()}

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
            if not here() or self.active is not None or route.index in self.found:
                return None
            hidden = find_hidden(args, kwargs)
            assert hidden is not None
            dual = self._enter(route, hidden)
            return tree_map(lambda t: dual if t is hidden else self._copied(t), (args, kwargs))

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
            return tree_map(lambda t: self._once(self._plain(t)), output) if left else None

        stack.enter_context((module if route.inside else block).register_forward_hook(ends))

    def _is_active(self, route: Route) -> bool:
        return self.active is not None and self.active[0] is route

    def _enter(self, route: Route, hidden: Tensor) -> Tensor:
        """`hidden` with its direction, at the head of a graph."""
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))  # also inside a checkpoint's own forward pass
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))  # a checkpoint would save nothing
        x = hidden if self.graph else hidden.detach()
        x = x.to(self.passes.work)
        x = x if self.times == 1 else x.repeat_interleave(self.times, 0)
        x = x if x.requires_grad else x.requires_grad_()
        v = self._direction(route.index, x)
        self.active, self.within_entry = (route, x, v, [], stack, hidden.dtype), route
        return forward_ad.make_dual(x.clone(), v)  # a clone, which the model may write into

    def _direction(self, index: int, x: Tensor) -> Tensor:
        v = self.directions.get(index)
        if v is None or v.numel() != x.numel():
            random = torch.Generator().manual_seed(index)
            v = torch.randn(x.shape, generator=random)
        return self.unit(v.to(x).reshape(x.shape))

    def _leave(self, output: Any) -> Any:
        assert self.active is not None
        route, x, v, kernels, stack, dtype = self.active
        y, image = forward_ad.unpack_dual(first_tensor(output))
        image = self.masked(torch.zeros_like(y) if image is None else image.detach())
        with forward_ad._set_fwd_grad_enabled(False):  # what the graph saved has directions too, of no use here
            pulled = torch.autograd.grad(y, x, self.unit(image), create_graph=self.graph, materialize_grads=True)[0]
            pulled = self.masked(pulled)
            value = self.sizes(pulled)
        self.found[route.index] = Seen(x.detach()[:: self.times], image, pulled.detach(), value, kernels)
        self.active = None
        stack.close()
        if self.within_entry:  # what else goes on in there still has its copies
            return tree_map(lambda t: self._plain(t, dtype), output)
        return tree_map(lambda t: self._once(self._plain(t, dtype)), output)

    def _copied(self, t: Any) -> Any:
        """An argument beside the tokens, for every copy of its row; what only stands for a mask is read in `_along`."""
        several = self.times > 1 and isinstance(t, Tensor) and t.ndim > 0 and len(t) == self.rows // self.times > 1
        return t.repeat_interleave(self.times, 0) if several and t.untyped_storage().nbytes() > t.element_size() else t

    def _once(self, t: Any) -> Any:
        """A result of the copies, for the rows themselves."""
        several = self.times > 1 and isinstance(t, Tensor) and t.ndim > 0 and len(t) == self.rows
        return t[:: self.times] if several else t

    def _plain(self, t: Any, dtype: torch.dtype | None = None) -> Any:
        """A tensor without its direction, and without a graph that nobody asked for."""
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        t = forward_ad.unpack_dual(t).primal
        t = t if self.graph else t.detach()
        return t if dtype is None else t.to(dtype)

    def _abandon(self) -> None:
        if self.active is not None:
            self.active[4].close()

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
        if self.graph:
            return plain_attention(call.q, call.k, call.v, call.scores)
        if self.active is None:
            with torch._C.DisableTorchFunction():
                return attend(call.q, call.k, call.v, call.scores)
        return self._along(call)

    def _for_copies(self, scores: Scores) -> Scores:
        """The mask of the rows for every copy of them."""
        mask, rows = scores.mask, self.rows // self.times
        if self.times == 1 or (mask.keys is None and mask.bias is None):
            return scores
        keys, bias = (_copies(t, rows, self.times) for t in (mask.keys, mask.bias))
        return replace(scores, mask=replace(mask, keys=keys, bias=bias))

    def _along(self, call: Call) -> Tensor:
        """Attention and its derivative along the direction, by a product of the kernel."""
        assert self.active is not None
        duals = [forward_ad.unpack_dual(t) for t in (call.q, call.k, call.v)]
        q, k, v = (d.primal for d in duals)
        with torch._C.DisableTorchFunction():
            out, kernel = attention_and_kernel(q, k, v, self._for_copies(call.scores))
            self.active[3].append(kernel)
            moved = [torch.zeros_like(d.primal) if d.tangent is None else d.tangent.detach() for d in duals]
            along = kernel.jvp(*(t.to(kernel.output.dtype)[None] for t in moved))[0].to(out.dtype)
            if self.heads:  # the value stays whole for the layers behind, derivatives are those of one head
                own = torch.eye(self.times, device=out.device, dtype=out.dtype)
                factors = own.repeat(len(out) // len(own), 1)[:, : out.shape[1], None, None]
                one = out * factors
                out, along = out.detach() + (one - one.detach()), along * factors
        return forward_ad.make_dual(out, along)


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


def _copies(t: Tensor | None, rows: int, times: int) -> Tensor | None:
    return t if t is None or len(t) != rows else t.repeat_interleave(times, 0)


def _inside(route: Route) -> list[Tensor]:
    """The weights that a route's map may use."""
    parts = (route.module, route.span.leave) if route.inside else (route.block,)
    return [p for part in parts if part is not None for p in part.parameters()]


def _same(t: Tensor) -> Tensor:
    return t


def _batch_first(sample: Sample) -> bool:
    """Whether the rows of a batch stay apart along the first axis of all blocks."""
    return all(layer.block.hidden.ndim == 3 and layer.block.hidden.shape[0] == 1 for layer in sample.trace.layers)


def rows_of(probe: Inputs) -> list[Inputs]:
    """The rows of a batch, one sequence in each."""
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
