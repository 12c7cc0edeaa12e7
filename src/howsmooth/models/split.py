"""A map of a model, cut at its attention function: `after ∘ softmax attention ∘ before`.

The block runs once with the tokens put in where the map begins, and stops where it ends. `before` and `after` are torch's own
graph; the attention calls in between are nodes of that graph whose products run on the kernels.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from howsmooth.attention.maps import Map
from howsmooth.errors import BadInputError
from howsmooth.kernels import SoftmaxAttention
from howsmooth.models.attend import attend
from howsmooth.models.intercept import Call, Intercept, implementation
from howsmooth.models.precision import KeepDouble
from howsmooth.models.trace import (
    Invocation,
    Layer,
    Trace,
    evaluating,
    find_hidden,
    first_tensor,
    without_weights,
)
from howsmooth.operators import AutodiffJacobian, Operator

MapName = Literal["attention", "heads", "normed", "block", "model"]
MAPS: tuple[MapName, ...] = get_args(MapName)


class _Stop(Exception):
    """The end of the map is reached; nothing behind it is run."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value


@final
@dataclass(frozen=True, eq=False)
class Cut(Map):
    """One map of one layer at the input of a trace.

    owner: the model whose configurations choose the attention code.  code: that choice, `howsmooth` for the kernels.
    trace, layer: where the arguments come from.  name: which map.  head: one head alone.
    real: the tokens that are not padding; the others keep their values and are neither moved nor measured.
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

    @property
    def start(self) -> Tensor:
        """The tokens the map takes in the trace, (n, d), padding left out."""
        return self._base if self.real is None else self._base[self.real]

    @property
    def _base(self) -> Tensor:
        if self.name in ("attention", "heads"):
            return self.layer.x
        return self.trace.layers[0].block.tokens if self.name == "model" else self.layer.block.tokens

    @property
    def width(self) -> int:
        return self._base.shape[-1]

    @property
    def out_width(self) -> int:
        with torch.no_grad():
            return self.value(self.start.to(self.work)[None]).shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.work

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Cut":
        return self if dtype == self.work else replace(self, work=dtype)

    def value(self, x):
        return torch.stack([self._run(item)[0] for item in x])

    def linearize(self, x):
        if len(x) != 1:
            raise BadInputError(f"expected one input at a time for a map of a model, got {len(x)}; loop over them")
        cut = self.to(x.dtype)
        kernels: list[SoftmaxAttention] = []

        def f(t: Tensor) -> Tensor:
            y, seen = cut._run(t[0])
            kernels.extend(seen)
            return y[None]

        jacobian = AutodiffJacobian(f, x, batched=True)
        return jacobian.output, CutJacobian(jacobian, kernels)

    def _run(self, tokens: Tensor) -> tuple[Tensor, list[SoftmaxAttention]]:
        """The map at tokens (n, d), and the attention calls on the way."""
        kernels: list[SoftmaxAttention] = []

        def on_call(call: Call) -> Tensor:
            if self.head is None:
                out, kernel = attend(call.q, call.k, call.v, call.scores)
            else:
                out, kernel = _one_head(call, self.head)
            kernels.append(kernel)
            return out

        intercept = Intercept(on_call, lambda: None, dict(self.trace.masks))
        root = self.trace.whole if self.name == "model" else self.layer.block
        kept = {p for p in intercept.masks}
        convert = _converter(self.work, kept)
        x = tokens if self.real is None else self._base.to(tokens.dtype).index_copy(0, self.real, tokens)
        state = {
            k: t.detach().to(self.work) if t.is_floating_point() else t
            for k, t in (*root.module.named_parameters(), *root.module.named_buffers())
        }
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.owner))
            if self.code is not None:
                stack.enter_context(implementation(self.owner, self.code))
            if self.kernels:
                stack.enter_context(intercept.active())
            if self.work == torch.float64:
                stack.enter_context(KeepDouble())
            for module in root.module.modules():
                if isinstance(module, nn.MultiheadAttention):
                    stack.enter_context(module.register_forward_pre_hook(without_weights, with_kwargs=True))
            args, kwargs = self._enter(stack, root, x, convert)
            try:
                output = functional_call(root.module, state, args, kwargs)
            except _Stop as stop:
                output = stop.value
        y = first_tensor(output)
        y = y.reshape(-1, y.shape[-1])
        if self.real is not None:
            if len(y) != len(self._base):
                raise BadInputError(f"expected as many outputs as tokens under a padding mask, got {len(y)}; leave it out")
            y = y[self.real]
        return y, kernels

    def _enter(
        self, stack: ExitStack, root: Invocation, x: Tensor, convert: Callable[[Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arrange for `x` to enter where the map begins and for the run to stop where it ends."""
        layer = self.layer
        if self.name in ("attention", "heads", "normed"):
            reached = _at_call(stack, layer.module, layer.call, None if self.name == "normed" else x)
            end = layer.projection

            def leave(module: nn.Module, args: Any, output: Any) -> None:
                if reached():
                    raise _Stop(first_tensor(output))

            def leave_before(module: nn.Module, args: tuple[Any, ...]) -> None:
                if reached():
                    raise _Stop(args[0])

            if self.name == "heads":
                if end is None:
                    raise BadInputError(
                        f"expected an output projection that is a module of its own, got none behind {layer.name}; "
                        'measure map="attention"'
                    )
                stack.enter_context(end.register_forward_pre_hook(leave_before))
            else:
                stack.enter_context((layer.module if end is None else end).register_forward_hook(leave))
        if self.name == "model" and root.module is not self.trace.layers[0].block.module:
            _at_call(stack, self.trace.layers[0].block.module, 0, x)
            return tree_map(convert, (root.args, root.kwargs))
        if self.name in ("normed", "block", "model"):
            return root.substitute(x.reshape(root.hidden.shape), convert)
        return tree_map(convert, (root.args, root.kwargs))


@final
class CutJacobian(Operator):
    """The Jacobian of a cut map: torch's graph with the kernels inside."""

    def __init__(self, jacobian: AutodiffJacobian, kernels: list[SoftmaxAttention]):
        self._jacobian, self.kernels = jacobian, kernels
        self.batch, self.in_shape, self.out_shape = jacobian.batch, jacobian.in_shape, jacobian.out_shape
        self.dtype, self.device = jacobian.dtype, jacobian.device

    @property
    def noise(self) -> float:
        """Rounding, and what it makes of logits, as for an attention layer of our own."""
        return torch.finfo(self.dtype).eps * (32 + max((k.largest_logit for k in self.kernels), default=0.0))

    def jvp(self, v):
        return self._jacobian.jvp(v)

    def vjp(self, u):
        return self._jacobian.vjp(u)


def _one_head(call: Call, head: int) -> tuple[Tensor, SoftmaxAttention]:
    """The output with every head but one set to zero."""
    heads, group = call.q.shape[1], call.q.shape[1] // call.k.shape[1]
    own = slice(head // group, head // group + 1)
    scores = call.scores
    bias = scores.mask.bias
    if bias is not None and bias.shape[1] > 1:
        scores = replace(scores, mask=replace(scores.mask, bias=bias[:, head : head + 1]))
    out, kernel = attend(call.q[:, head : head + 1], call.k[:, own], call.v[:, own], scores)
    return nn.functional.pad(out, (0, 0, 0, 0, head, heads - 1 - head)), kernel


def _at_call(stack: ExitStack, module: nn.Module, index: int, x: Tensor | None) -> Callable[[], bool]:
    """Put `x` in at one call of a module; tells whether that call has come."""
    count = -1

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        count += 1
        if count != index or x is None:
            return None
        hidden = find_hidden(args, kwargs)
        assert hidden is not None
        value = x.reshape(hidden.shape)
        return tree_map(lambda t: value if t is hidden else t, (args, kwargs))

    stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
    return lambda: count == index


def _converter(dtype: torch.dtype, keep: set[int]) -> Callable[[Any], Any]:
    """Floating-point tensors in another precision; storages in `keep`, which only stand for something, as they are."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.untyped_storage().data_ptr() not in keep:
            return leaf.detach().to(dtype)
        return leaf

    return convert
