"""A map of a model as a part of its recorded run, attention on the kernels: a `Map` of tokens, (n, d) → (n, d_out).

The graph between where the map begins and where it ends is torch's own; the attention calls in it are nodes whose products run
on the kernels.
"""

import functools
import math
import weakref
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.fx import Node

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.kernels import AttentionKernel, attention_and_kernel
from howsmooth.kernels.base import FINER, Precision
from howsmooth.kernels.tensors import float32_products
from howsmooth.maps import AutodiffJacobian
from howsmooth.maps.base import Map
from howsmooth.program.attention import Call, answering, attention
from howsmooth.program.calls import find_calls
from howsmooth.program.ends import Ends
from howsmooth.program.operations import CONVOLUTIONS, MATRIX, PICKS, name, shape
from howsmooth.program.replay import Run, Segment
from howsmooth.spectral import Operator
from howsmooth.spectral.matrices import led_to

_SMALL = 4096  # entries up to which the graph is checked with a product each way of its own
_PASSES = 4  # backward passes, each way, that a guess may take: part of a product with `JᵀJ` each


class Replayed(NamedTuple):
    """A map at some tokens: what it gave, (n, d_out), and the attention calls on the way with the kernel that served each."""

    output: Tensor
    calls: list[Call]
    outputs: list[Tensor]
    kernels: list[AttentionKernel]


@final
class SegmentMap(Map):
    """One map at the input of a run. Of its Jacobians only the last one keeps a graph.

    run: the recorded model at the input.  ends: where the map begins and ends.  place: a name for people.
    head: one head alone.  real: the tokens that are not padding; the others keep their values and neither move nor count.
    work: the precision.  precision: of the fused kernels.
    """

    def __init__(
        self,
        run: Run,
        ends: Ends,
        place: str = "",
        head: int | None = None,
        real: Tensor | None = None,
        work: torch.dtype = torch.float64,
        precision: Precision = "half",
    ):
        self.run, self.ends, self.place, self.head, self.real, self.work = run, ends, place, head, real, work
        self.precision: Precision = precision
        self._last: weakref.ref[SegmentJacobian] | None = None

    def of(
        self,
        *,
        run: Run | None = None,
        head: int | None = None,
        work: torch.dtype | None = None,
        precision: Precision | None = None,
    ) -> "SegmentMap":
        """The map in another run of its program, one head of it, or in another precision."""
        head = self.head if head is None else head
        work, precision = work or self.work, precision or self.precision
        return SegmentMap(run or self.run, self.ends, self.place, head, self.real, work, precision)

    @functools.cached_property
    def on_kernels(self) -> bool:
        """Whether all attention on the way runs on the kernels."""
        inside = set(self.ends.way.nodes)
        return all(call.output.target is attention for call in find_calls(self.ends.flow) if call.output in inside)

    @functools.cached_property
    def frozen_choice(self) -> bool:
        """Whether something on the way was picked by its size, as a router picks experts, and stays as it was picked."""
        flow = self.ends.flow
        return any(name(n) in PICKS and flow.live(n) for n in (*self.ends.way.nodes, *self.ends.way.beside))

    @functools.cached_property
    def start(self) -> Tensor:
        """The tokens that enter, (n, d), padding left out."""
        return self._entering if self.real is None else self._entering[self.real.to(self._entering.device)]

    @property
    def width(self) -> int:
        return self._sizes[1]

    @property
    def out_width(self) -> int:
        with torch.no_grad():
            return self.value(self.start.to(self.work)[None]).shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.work

    @property
    def device(self) -> torch.device:
        return self.run.device

    def __repr__(self) -> str:
        return f"SegmentMap({self.place}, {self.ends.enter[0].name} → {self.ends.leave[0].name}, {len(self.start)} tokens)"

    def moved(self, device, dtype):
        return self if dtype in (None, self.work) else self.of(work=dtype)

    @float32_products()
    def value(self, x):
        segment = self.to(x.dtype)
        return torch.stack([segment.replayed(item).output for item in x])

    def linearize(self, x):
        if len(x) != 1:
            raise BadInputError(f"expected one input at a time for a map of a model, got {len(x)}; loop over them")
        if self._last is not None and (last := self._last()) is not None:  # its graph comes again when it is needed
            last.release()
        jacobian = SegmentJacobian(self.to(x.dtype), x)
        self._last = weakref.ref(jacobian)
        try:
            return jacobian.output, jacobian
        except (RuntimeError, TypeError) as error:
            if x.dtype == torch.float64 and self.work != torch.float64:  # code that knows no float64
                raise BadFunctionError(f"expected a model that runs in float64, got {error}; measure in float32") from None
            raise

    def replayed(self, tokens: Float[Tensor, "n d"]) -> Replayed:
        """The map at tokens."""
        found = Replayed(tokens, [], [], [])

        def answer(call: Call) -> Tensor:
            heads = call.q.shape[1]
            own = call if self.head is None else call.head(self.head)
            out, kernel = attention_and_kernel(own.q, own.k, own.v, own.scores, self.precision)
            found.calls.append(own)
            found.outputs.append(out)
            found.kernels.append(kernel)
            return out if self.head is None else torch.nn.functional.pad(out, (0, 0, 0, 0, self.head, heads - 1 - self.head))

        x = tokens
        if self.real is not None:
            x = self._entering.to(tokens).index_copy(0, self.real.to(tokens.device), tokens)
        beside = self.run.at(self.work).values(self.ends.way.beside)
        with answering(answer):
            leaving = Segment(self.ends.way, beside, self.work)(*self._parts(x))
        y = self._rows(leaving, self.ends.leave)
        if self.ends.less:
            y = y - x
        if self.real is not None:
            if len(y) != len(x):
                raise BadInputError(f"expected as many outputs as tokens under a padding mask, got {len(y)}; leave it out")
            y = y[self.real.to(y.device)]
        return found._replace(output=y)

    @functools.cached_property
    def _entering(self) -> Tensor:
        """The tokens that enter, padding among them."""
        values = self.run.at(self.work).values(self.ends.enter)
        return self._rows([values[n] for n in self.ends.enter], self.ends.enter)

    # layouts: what a node holds, as rows

    @functools.cached_property
    def _channels(self) -> bool:
        """Whether entries lie along the second axis of what enters, as the convolution has them that takes it first."""
        flow, start = self.ends.flow, self.ends.enter[0]
        if len(shape(start) or ()) < 3:
            return False
        reached = flow.down(start)
        first = next((n for n in self.ends.way.nodes if name(n) in MATRIX and reached & flow.bit(n)), None)
        if first is None or name(first) not in CONVOLUTIONS:
            return False
        return any(shape(m) == shape(start) or m is start for m in flow.feeds(first))

    def _axis(self, n: Node) -> int:
        entering, own = shape(self.ends.enter[0]) or (), shape(n) or ()
        return 1 if self._channels and len(own) == len(entering) else -1

    @functools.cached_property
    def _sizes(self) -> tuple[list[int], int]:
        """How many rows each part has, and the width of all of them."""
        shapes = [(shape(n) or (), self._axis(n)) for n in self.ends.enter]
        widths = {size[axis] for size, axis in shapes}
        width = widths.pop() if len(widths) == 1 else 1  # parts of several widths are one column of entries
        return [math.prod(size) // width for size, _ in shapes], width

    def _parts(self, x: Float[Tensor, "n d"]) -> list[Tensor]:
        """Rows as what enters, part by part."""
        rows, width = self._sizes
        parts = []
        for n, part in zip(self.ends.enter, x.split(rows), strict=True):
            size, axis = list(shape(n) or ()), self._axis(n)
            if axis == 1 and width > 1:
                size = [size[0], *size[2:], size[1]]
                parts.append(part.reshape(size).movedim(-1, 1))
            else:
                parts.append(part.reshape(size))
        return parts

    def _rows(self, tensors: Sequence[Tensor], nodes: Sequence[Node]) -> Tensor:
        """What nodes hold, as rows of one width; one column where the widths differ."""
        flat = []
        for t, n in zip(tensors, nodes, strict=True):
            t = t.movedim(1, -1) if self._axis(n) == 1 else t
            flat.append(t.reshape(-1, t.shape[-1]) if t.ndim else t.reshape(1, 1))
        if len({t.shape[-1] for t in flat}) > 1:
            flat = [t.reshape(-1, 1) for t in flat]
        return torch.cat(flat) if len(flat) > 1 else flat[0]


@final
class SegmentJacobian(Operator):
    """The Jacobian of a map of a model at `x`, (1, n, d): torch's graph with the kernels inside, as in `AutodiffJacobian`.

    Whether its two products fit together is read off the first one with `JᵀJ`, which needs both. Where the kernels' operands
    keep eleven bits, those of all matrix products do, until it is refined. The graph is built when it is needed, and dropped
    when a finer one is.
    """

    def __init__(self, map: SegmentMap, x: Float[Tensor, "1 n d"], graph: "_LazyGraph | None" = None, exact: bool = False):
        self._map, self._x, self._exact = map, x, exact
        self._lazy = _LazyGraph(map, x) if graph is None else graph
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
        """The kernels of the attention calls on the way."""
        return self._lazy.get()[1].kernels

    @property
    def _graph(self) -> AutodiffJacobian:
        return self._lazy.get()[0]

    def release(self) -> None:
        """Drop the graph, after a last look at what is needed without it."""
        if self._lazy.graph is not None:
            _ = self.coarse, self.heavy
            self._lazy.graph = None

    @functools.cached_property
    def coarse(self) -> bool:
        """Whether matrix products around the kernels take operands of eleven bits."""
        if self._exact or self._map.precision != "half":
            return False
        return bool(self.kernels) and all(k.coarse for k in self.kernels)

    @functools.cached_property
    def noise(self) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Rounding, and what it makes of logits, as for an attention layer of our own."""
        kernels = max([32 * torch.finfo(self.dtype).eps, *(k.noise for k in self.kernels)])
        if not self.coarse:
            return kernels
        # the relative error that eleven-bit operands around the kernels make of a product with a random vector
        v = torch.randn(1, 1, *self.in_shape, generator=torch.Generator(self.device).manual_seed(0), device=self.device)
        with float32_products():
            true = self._graph.jvp(v)
        size = float(true.norm())
        return math.hypot(kernels, float((self.jvp(v) - true).norm()) / size if size > 0 else 0.0)  # independent errors

    @functools.cached_property
    def heavy(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return any(k.heavy for k in self.kernels)

    def refined(self):
        if self.coarse:
            return SegmentJacobian(self._map, self._x, self._lazy, exact=True)
        finer: Precision | None = FINER.get(self._map.precision)
        if self._lazy.graph is not None:  # else some kernel of a coarser one has it
            finer = next((k.finer for k in self.kernels if k.finer is not None), None)
        if finer is None:
            return None
        self.release()
        return SegmentJacobian(self._map.of(precision=finer), self._x)

    def jvp(self, v):
        with float32_products(coarse=self.coarse):
            return self._graph.jvp(v)

    def vjp(self, u):
        with float32_products(coarse=self.coarse):
            return self._graph.vjp(u)

    def gram(self, v):
        if not self._lazy.trusted:
            self._lazy.trusted = True
            try:
                product, energy = super().gram(v)
                # |J v|² = ⟨v, JᵀJ v⟩
                left, right = energy.double().diagonal(dim1=1, dim2=2).sum(), (v.double() * product.double()).sum()
                if bool((left - right).abs() <= min(1e3 * self.noise, 0.02) * left) or not bool(left.isfinite()):
                    return product, energy
            except RuntimeError:
                pass
            self._graph.check()
        return super().gram(v)

    def guess(self, seeds):
        """`Jᵀ` of one output direction at all tokens, the one that values lead to, where there is one attention call."""
        jacobian, ran = self._lazy.get()
        if len(ran.calls) != 1:
            return None
        with float32_products(coarse=self.coarse):
            ways = paths(ran.calls[0].v, ran.outputs[0], *jacobian.ends, self._map.real)
        return None if ways is None else self.vjp(led_to(*ways, seeds).expand(1, 1, *self.out_shape))[0]


class _LazyGraph:
    """The graph of a map of a model, with its attention calls, built when it is needed; `trusted` once it was checked."""

    def __init__(self, map: SegmentMap, x: Float[Tensor, "1 n d"]):
        self._map, self._x = map, x
        self.trusted = x.numel() <= _SMALL  # decomposed whole, so no product with JᵀJ would come: checked as it is built
        self.graph: tuple[AutodiffJacobian, Replayed] | None = None

    @float32_products()
    def get(self) -> tuple[AutodiffJacobian, Replayed]:
        if self.graph is None:
            map, ran = self._map, list[Replayed]()

            def f(t: Tensor) -> Tensor:  # knows nothing of what holds it, so that all goes when that does
                now = map.replayed(t[0])
                ran.extend([now] if not ran else [])
                return now.output[None]

            jacobian = AutodiffJacobian(f, self._x, batched=True, checked=self._x.numel() <= _SMALL)
            self.graph = jacobian, ran[0]
        return self.graph


def paths(
    values: Float[Tensor, "1 kv_heads m d_v"],
    output: Float[Tensor, "1 heads n d_v"],
    x: Float[Tensor, "1 n d"],
    y: Float[Tensor, "1 n d_out"],
    places: Int[Tensor, " n"] | None,
) -> tuple[Float[Tensor, "heads d_out d_v"], Float[Tensor, "heads d_v d"]] | None:
    """`y ← output` and `values ← x` of a call of attention, head by head: Wₒ and W_v, and what is around them.

    Before and behind attention every token is on its own, so a backward pass asks for as many rows as there are tokens.
    Nothing where that takes many passes, or where values are not made of `x`.

    places: of the tokens, where some are padding.
    """
    n = x.shape[1]
    if not (values.requires_grad and output.requires_grad) or y.shape[1] != n or values.shape[2] != output.shape[2]:
        return None
    if max(y.shape[2], values.shape[1] * values.shape[3]) > _PASSES * n or (places is None and values.shape[2] != n):
        return None
    tokens = torch.arange(n, device=x.device) if places is None else places.to(x.device)
    behind, before = [], []
    for first in range(0, y.shape[2], n):
        some = torch.arange(min(n, y.shape[2] - first), device=x.device)
        u = torch.zeros_like(y)
        u[0, some, first + some] = 1.0
        (g,) = torch.autograd.grad(y, output, u, retain_graph=True, materialize_grads=True)
        behind.append(g[0, :, tokens[some]])  # (heads, some, d_v)
    _, shared, _, d_v = values.shape
    for first in range(0, shared * d_v, n):
        some = torch.arange(min(n, shared * d_v - first), device=x.device)
        head, entry = (first + some) // d_v, (first + some) % d_v
        u = torch.zeros_like(values)
        u[0, head, tokens[some], entry] = 1.0
        (g,) = torch.autograd.grad(values, x, u, retain_graph=True, materialize_grads=True)
        before.append(g[0, some])
    outward, inward = torch.cat(behind, 1), torch.cat(before).unflatten(0, (shared, d_v))
    if not all(bool(t.isfinite().all()) and bool(t.any()) for t in (outward, inward)):
        return None
    return outward, inward.repeat_interleave(output.shape[1] // shared, 0)
