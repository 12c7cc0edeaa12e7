"""One run of a model on its way: maps of its layers recorded as they are passed, all else as if nothing had happened."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
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
from howsmooth.models.intercept import Answered, Call
from howsmooth.models.trace import find_hidden, first_tensor
from howsmooth.training.bundle import Recorded
from howsmooth.training.gate import Gates, apart
from howsmooth.training.probe import Arguments
from howsmooth.training.route import Course, Route
from howsmooth.training.turns import Seen, Turns

_TORCH_ATTENTION = nn.functional.scaled_dot_product_attention


class _Enough(Exception):
    """All layers that were asked for are done: the rest of the model need not run."""


@dataclass(eq=False)
class _Entered:
    """A route that is being recorded. x: what its graph begins at.  stack: what is let go of at its end.
    dtype: in which its tokens came."""

    route: Route
    x: Tensor
    stack: ExitStack
    dtype: torch.dtype
    calls: list[Answered] = field(default_factory=list)


@final
class OnePass:
    """One run of the model of a course. turns: what is measured in it."""

    def __init__(self, course: Course, turns: Turns):
        self.course, self.turns = course, turns
        self.graph, self.times, self.rows = turns.how.graph, turns.how.times, turns.rows
        self.left: list[Recorded] = []  # not measured yet
        self.begun: set[int] = set()
        self.count = 0  # of layers that were left
        self.calls: dict[nn.Module, int] = {}  # of blocks so far
        self.within: dict[nn.Module, int] = {}  # of attention modules since their block began
        self.within_entry: Route | None = None  # whose first module is still running
        self.active: _Entered | None = None
        self.gates = Gates()

    def seen(self, given: Arguments) -> dict[int, Seen]:
        """Run the model at some arguments; what was seen of each layer."""
        course, (args, kwargs) = self.course, given
        with ExitStack() as stack:
            if not self.graph:  # whose backward pass comes later, in whatever precision torch was told
                stack.enter_context(float32_products(coarse=True))
            stack.enter_context(torch.set_grad_enabled(self.graph))
            stack.callback(self._abandon)
            for route in course.routes:
                self._listen(stack, route)
            watch = stack.enter_context(course.base.running(self._on_call, course.watched))
            if not course.kernels or self.graph:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            wide = course.widened()
            with suppress(_Enough, BadInputError):  # the latter: logits that are not finite, or out of range
                functional_call(course.module, wide, args, kwargs) if wide else course.module(*args, **kwargs)
            if self.count == len(course.routes):
                course.watched = watch is not None and watch.caught
            with torch._C.DisableTorchFunction():
                self._measure()
        return self.turns.found

    def _measure(self) -> None:
        left, self.left = self.left, []
        if not self.graph:
            self.turns.measure(left)
            return
        if self.course.apart is None and self.count == len(self.course.routes):
            self.course.apart = not self._hooked() and apart([(layer.x, layer.y) for layer in left])
        for layers in [left] if self.course.apart else [[layer] for layer in left]:
            self.turns.measure(layers)
        self.gates.shut = False

    def _hooked(self) -> bool:
        """Whether modules have hooks for gradients, which would hear of those that end at a gate."""
        return any(part._backward_hooks or part._backward_pre_hooks for part in self.course.module.modules())

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
                return _mapped(lambda t: tokens if t is hidden else self._copied(t), (args, kwargs))

        def leaves(_: nn.Module, args: Any, output: Any) -> Any:
            return self._leave(output) if self._is_active(route) else None

        def arrives(_: nn.Module, args: tuple[Any, ...]) -> Any:
            return self._leave(args) if self._is_active(route) else None

        stack.enter_context(route.entrance.register_forward_pre_hook(enters, with_kwargs=True))
        end = block if span.leave is None else span.leave
        stack.enter_context(end.register_forward_pre_hook(arrives) if span.before else end.register_forward_hook(leaves))

        def ends(_: nn.Module, args: Any, output: Any) -> Any:
            if self.within_entry is not route:
                return None
            self.within_entry = None
            left = self.active is None  # else the map ends further on
            return _mapped(lambda t: self._once(self._plain(t)), output) if left else None

        stack.enter_context(route.entrance.register_forward_hook(ends))

    def _is_active(self, route: Route) -> bool:
        return self.active is not None and self.active.route is route

    def _enter(self, route: Route, hidden: Tensor) -> Tensor:
        """`hidden`, a copy for every direction, at the head of a graph."""
        stack = ExitStack()
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))  # a checkpoint would save nothing
        x = hidden if self.graph else hidden.detach()
        x = x.to(self.course.work)
        x = x if self.times == 1 else x.repeat_interleave(self.times, 0)
        x = x if x.requires_grad else x.detach().requires_grad_()
        x = self.gates.behind(x) if self.graph else x
        self.active, self.within_entry = _Entered(route, x, stack, hidden.dtype), route
        return x.clone()  # which the model may write into

    def _leave(self, output: Any) -> Any:
        assert self.active is not None
        entered, dtype = self.active, self.active.dtype
        with torch._C.DisableTorchFunction():  # nothing in here is the model's
            self.active = None
            entered.stack.close()
            y = first_tensor(output)
            y = y.clone() if self.graph else y  # the model may write into its own before this one is measured
            self.left.append(Recorded(entered.route.index, entered.x, y, entered.calls))
            self.count += 1
            if not self.graph and sum(layer.held for layer in self.left) > self.course.room:
                self._measure()
            if self.count == len(self.course.routes):
                raise _Enough
            if self.within_entry:  # what else goes on in there still has its copies
                return _mapped(lambda t: self._plain(t, dtype), output)
            return _mapped(lambda t: self._once(self._plain(t, dtype)), output)

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
            self.active.stack.close()

    def _on_call(self, call: Call) -> Tensor:
        if self.active is None or self.graph:
            return _attention(*call.qkv, call.scores)
        with torch._C.DisableTorchFunction():
            with torch.no_grad():
                q, k, v = (t[:: self.times] for t in call.qkv)
                out = _attention(q, k, v, call.scores)
                out = out if self.times == 1 else out.repeat_interleave(self.times, 0)
            self.active.calls.append(Answered(call, out.requires_grad_()))
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


def _mapped(f: Callable[[Any], Any], value: Any) -> Any:
    """`tree_map`, at its price only where there is more than tuples and dictionaries."""
    if isinstance(value, Tensor):
        return f(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is tuple:
        return tuple([_mapped(f, t) for t in value])
    if type(value) is dict:
        return {name: _mapped(f, t) for name, t in value.items()}
    return tree_map(f, value)


def _same(t: Tensor) -> Tensor:
    return t
