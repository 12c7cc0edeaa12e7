"""A map of a model, cut at its attention function: `after ∘ softmax attention ∘ before`.

The block runs once with the tokens put in where the map begins, and stops where it ends. `before` and `after` are torch's own
graph; the attention calls in between are nodes of that graph whose products run on the kernels.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.kernels import SoftmaxAttention, attention_and_kernel
from howsmooth.kernels.base import Precision
from howsmooth.maps import AutodiffJacobian, Operator, inner
from howsmooth.maps.base import Map
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

MapName = Literal["attention", "heads", "normed", "block", "model"]
MAPS: tuple[MapName, ...] = get_args(MapName)
_SMALL = 4096  # entries up to which the graph is checked with a product each way of its own


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
    precision: of the fused kernels, where these serve.
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

    @property
    def start(self) -> Tensor:
        """The tokens the map takes in the trace, (n, d), padding left out."""
        return self.base if self.real is None else self.base[self.real]

    @property
    def base(self) -> Tensor:
        """The same with padding."""
        if self.name in ("attention", "heads"):
            return self.layer.x
        return self.trace.layers[0].block.tokens if self.name == "model" else self.layer.block.tokens

    @property
    def place(self) -> str:
        """The module that the map belongs to, by its path in the model."""
        if self.name == "model":
            return type(self.trace.whole.module).__name__
        found = self.layer.name if self.name in ("attention", "heads") else self.layer.block.name
        return found or type(self.layer.module).__name__

    @property
    def width(self) -> int:
        return self.base.shape[-1]

    @property
    def out_width(self) -> int:
        with torch.no_grad():
            return self.value(self.start.to(self.work)[None]).shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.work

    def moved(self, device, dtype):
        return self if dtype in (None, self.work) else replace(self, work=dtype)

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

        def refine() -> CutJacobian | None:
            finer = next((k.finer for k in kernels if k.finer is not None), None)
            return None if finer is None else replace(cut, precision=finer).linearize(x)[1]

        try:
            jacobian = CutJacobian(f, x, kernels, refine)
        except (RuntimeError, TypeError) as error:
            if x.dtype == torch.float64 and self.work != torch.float64:  # code that knows no float64
                raise BadFunctionError(f"expected a model that runs in float64, got {error}; measure in float32") from None
            raise
        return jacobian.output, jacobian

    def _run(self, tokens: Tensor) -> tuple[Tensor, list[SoftmaxAttention]]:
        """The map at tokens (n, d), and the attention calls on the way."""
        kernels: list[SoftmaxAttention] = []

        def on_call(call: Call) -> Tensor:
            if self.head is None:
                out, kernel = attention_and_kernel(call.q, call.k, call.v, call.scores, self.precision)
            else:
                out, kernel = _one_head(call, self.head, self.precision)
            kernels.append(kernel)
            return out

        intercept = Intercept(on_call, lambda: None, dict(self.trace.masks))
        root = self.trace.whole if self.name == "model" else self.layer.block
        convert = _converter(self.work, set(intercept.masks))
        x = tokens if self.real is None else self.base.to(tokens.dtype).index_copy(0, self.real, tokens)
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
            if len(y) != len(self.base):
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
            _at_call(stack, self.trace.layers[0].block.module, 0, x, everywhere=True)
            return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, tree_map(convert, (root.args, root.kwargs)))
        if self.name in ("normed", "block", "model"):
            return root.substitute(x.reshape(root.hidden.shape), convert)
        return tree_map(convert, (root.args, root.kwargs))


@final
class CutJacobian(Operator):
    """The Jacobian of a cut map: torch's graph with the kernels inside, the map evaluated once.

    `Jᵀu` is a backward pass, `Jv` the backward pass of that, as in `AutodiffJacobian`. Whether the two fit together is read off
    the first product with `JᵀJ`, which needs both; where they do not, `AutodiffJacobian` finds another way or says that there
    is none.
    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        x: Float[Tensor, "1 n d"],
        kernels: list[SoftmaxAttention],
        refine: "Callable[[], CutJacobian | None]" = lambda: None,
    ):
        self._f, self.kernels, self._refine = f, kernels, refine
        self.batch, self.in_shape, self.dtype, self.device = 1, tuple(x.shape[1:]), x.dtype, x.device
        self._checked: AutodiffJacobian | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        if x.numel() <= _SMALL:  # decomposed whole, so no product with JᵀJ would come
            self._checked = AutodiffJacobian(f, x, batched=True)
            self.output = self._checked.output
        else:
            with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                self._x = x.detach().clone().requires_grad_()
                self._y = f(self._x)
            self.output = self._y.detach()
            self._trusted = False
        self.out_shape = tuple(self.output.shape[1:])
        if not bool(self.output.isfinite().all()):
            raise BadInputError(f"expected outputs within the range of {x.dtype}, got NaN or infinity; use dtype=torch.float64")

    @functools.cached_property
    def _second(self) -> tuple[Tensor, Tensor]:
        """`u ↦ Jᵀu` as a graph: its argument and its value."""
        with torch.inference_mode(False), torch.enable_grad():
            u = torch.zeros_like(self._y, requires_grad=True)
            return u, torch.autograd.grad(self._y, self._x, u, create_graph=True, materialize_grads=True)[0]

    @property
    def noise(self) -> float:
        """Rounding, and what it makes of logits, as for an attention layer of our own."""
        return max([32 * torch.finfo(self.dtype).eps, *(k.noise for k in self.kernels)])

    @property
    def heavy(self) -> bool:
        return any(k.heavy for k in self.kernels)

    def refined(self):
        return self._refine()

    def jvp(self, v):
        if self._last is not None and torch.equal(self._last[0], v):
            return self._last[1]
        if self._checked is not None:
            out = self._checked.jvp(v)
        else:
            u, transposed = self._second
            probes = v[:, 0].reshape(len(v), *self._x.shape)
            out = torch.stack([torch.autograd.grad(transposed, u, p, True, materialize_grads=True)[0] for p in probes])
        self._last = (v, out)
        return out

    def vjp(self, u):
        if self._checked is not None:
            return self._checked.vjp(u)
        probes = u[:, 0].reshape(len(u), *self._y.shape)
        return torch.stack([torch.autograd.grad(self._y, self._x, p, True, materialize_grads=True)[0] for p in probes])

    def gram(self, v):
        if self._checked is None and not self._trusted:
            try:
                image = self.jvp(v)
                product = self.vjp(image)
            except RuntimeError:
                image = product = None
            if image is not None and product is not None and self._fits(v, image, product):
                self._trusted = True
                return product, inner(image, image)
            self._checked, self._last = AutodiffJacobian(self._f, self._x.detach(), batched=True), None
        return super().gram(v)

    def _fits(self, v: Tensor, image: Tensor, product: Tensor) -> bool:
        """`|J v|² = ⟨v, JᵀJ v⟩`."""
        left, right = image.double().square().sum(), (v.double() * product.double()).sum()
        return bool((left - right).abs() <= min(1e3 * self.noise, 0.02) * left) or not bool(left.isfinite())


def _one_head(call: Call, head: int, precision: Precision) -> tuple[Tensor, SoftmaxAttention]:
    """The output with every head but one set to zero."""
    heads, group = call.q.shape[1], call.q.shape[1] // call.k.shape[1]
    own = slice(head // group, head // group + 1)
    scores = call.scores
    bias = scores.mask.bias
    if bias is not None and bias.shape[1] > 1:
        scores = replace(scores, mask=replace(scores.mask, bias=bias[:, head : head + 1]))
    out, kernel = attention_and_kernel(call.q[:, head : head + 1], call.k[:, own], call.v[:, own], scores, precision)
    return nn.functional.pad(out, (0, 0, 0, 0, head, heads - 1 - head)), kernel


def _at_call(stack: ExitStack, module: nn.Module, index: int, x: Tensor | None, everywhere: bool = False) -> Callable[[], bool]:
    """Put `x` in at one call of a module; tells whether that call has come.

    everywhere: also for whoever else holds the tokens, as a residual around the module does.
    """
    count = -1

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal count
        count += 1
        if count != index or x is None:
            return None
        hidden = find_hidden(args, kwargs)
        assert hidden is not None
        value = x.reshape(hidden.shape)
        if everywhere:
            hidden.copy_(value)
            return None
        return tree_map(lambda t: value if t is hidden else t, (args, kwargs))

    stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
    return lambda: count == index


def _converter(dtype: torch.dtype, keep: set[int]) -> Callable[[Any], Any]:
    """Floating-point tensors in another precision; storages in `keep`, which only stand for something, as they are.

    A tensor that occurs twice stays one tensor.
    """
    done: dict[int, Tensor] = {}

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.untyped_storage().data_ptr() in keep:
            return leaf
        if id(leaf) not in done:
            done[id(leaf)] = leaf.detach().to(dtype)
        return done[id(leaf)]

    return convert
