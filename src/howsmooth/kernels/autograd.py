"""How attention's operators are each other's derivatives, so that torch takes any two of them in any mode in O(n · d) memory.

With `x = (q, k, v)`, `A(x; t)` the jvp along `t`, `B(x; g)` the vjp: `⟨g, A(x; t)⟩ = ⟨B(x; g), t⟩ = φ(x, t, g)`. What depends
on `x` is in either the gradient of φ in `x`, one and the same product `H(x; t, g)`, the Hessian of `⟨g, o⟩` times `t`:

    backward of attend:  B(x; g)             jvp of attend:  A(x; t)
    backward of A:       H(x; t, g), B(x; g)   jvp of A along (t*, t'):  A(x; t') + D(x; t, t*)
    backward of B:       H(x; t, g), A(x; t)   jvp of B along (t*, g'):  B(x; g') + H(x; t*, g)

`o` and the log-sum-exp `ℓ` are inputs of the products too. Backwards, all that comes through them is counted in `x`; forwards,
their tangents arrive with those of `x` and are what the next product needs. `H` and `D` are not differentiated again.

`attention_and_kernel` is the node of a measured map: attention of any kind with the kernel that serves it, since a solver takes
dozens of products at one place. It is linearised: `v ↦ J v` and `g ↦ Jᵀ g` are each other's backward pass, so `J v` also runs
as a backward pass through a graph of `Jᵀ g`. How `J` changes with `q, k, v` is no part of a linearisation: that raises.
"""

import functools
import importlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # the level at work, or none
from torch._functorch import eager_transforms
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction  # an operator's derivative at one level of torch.func's transforms

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import AttentionKernel, Keys, Outputs, Precision, Queries, Scores, Values
from howsmooth.kernels.dispatch import linearize
from howsmooth.kernels.operators import LIBRARY, N_HOW

Found = tuple[Any, ...]
ATTEND, JVP, VJP, HVP, JVP2 = (
    getattr(torch.ops.howsmooth, name).default for name in ("attend", "attend_jvp", "attend_vjp", "attend_hvp", "attend_jvp2")
)

_ONCE = "expected first derivatives only, got a derivative of a derivative; use howsmooth.sdpa for those"
_TWICE = "expected first or second derivatives of attention, got a third; use torch.nn.functional.scaled_dot_product_attention"
_CALLED = threading.local()  # backward: whether that mode was on where an operator was called last
_MASK = "expected a constant mask under these transforms, got one that is differentiated; use torch's function for it"


def _moves(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a derivative in some of them may be taken at this level of torch.func, the lowest being torch.autograd's."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    # asking each for a tangent would be slow; torch allows no dual numbers below a torch.func.jvp, whose own are at its level
    return torch._C._is_fwd_grad_enabled() and not (eager_transforms.JVP_NESTING and peek_interpreter_stack() is None)


def _below(op: Any, *args: Any) -> Found:
    """What the operator itself gives; levels further out still see it, and differentiate backward if that was on."""
    if peek_interpreter_stack() is None:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    # both modes are off inside an autograd function; forward mode inside its jvp too, where levels further out want it
    with (
        torch.set_grad_enabled(_CALLED.backward),
        forward_ad._set_fwd_grad_enabled(True),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        return op(*args)


def _filled(tangents: Iterable[Tensor | None], likes: Iterable[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, likes, strict=True)]


def _spread(t: Tensor, moving: Tensor, fixed: Tensor) -> Tensor:
    """What does not depend on the probe, for every probe of `moving`."""
    return t if moving.ndim == fixed.ndim else t.expand(len(moving), *t.shape)


def _summed(found: Sequence[Tensor], fixed: Tensor) -> list[Tensor]:
    """Over probes, for what they share."""
    return [t if t.ndim == fixed.ndim else t.sum(0) for t in found]


def _plus(a: Sequence[Tensor] | None, b: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    if a is None or b is None:
        return tuple((a if b is None else b) or ())
    return tuple(x + y for x, y in zip(a, b, strict=True))


class _OneLevel(_SingleLevelFunction):
    """An operator at one level; `forward` comes with the operator. Its inputs are tensors and, last, numbers that say how."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Found) -> None:
        tensors = (*inputs[:-N_HOW], *output)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.how = inputs[-N_HOW:]


class Attend(_OneLevel):
    """`q, k, v, bias` and how, to `o, ℓ`."""

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> Found:
        if ctx.needs_input_grad[3]:
            raise BadInputError(_MASK)
        grads = (None,) * 3 if g[0] is None else VJP(*ctx.saved_tensors, g[0], *ctx.how)
        return *grads, *(None,) * (1 + N_HOW)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Found:
        if tangents[3] is not None:
            raise BadInputError(_MASK)
        return JVP(*ctx.saved_tensors, *_filled(tangents[:3], ctx.saved_tensors[:3]), *ctx.how)


class AttendJvp(_OneLevel):
    """`q, k, v, bias, o, ℓ, dq, dk, dv` and how, to `do, dℓ`."""

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> Found:
        if g[0] is None:
            return (None,) * (9 + N_HOW)
        at, moved, needs = ctx.saved_tensors[:6], ctx.saved_tensors[6:], ctx.needs_input_grad
        of_place, of_tangent = (None,) * 3, (None,) * 3
        if any(needs[:3]):
            of_place = _summed(HVP(*at, *moved, g[0], *ctx.how), at[0])
        if any(needs[6:9]):
            of_tangent = VJP(*at, g[0], *ctx.how)
        return *of_place, None, None, None, *of_tangent, *(None,) * N_HOW

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Found:
        at, along, dlse = ctx.saved_tensors[:6], ctx.saved_tensors[6:9], ctx.saved_tensors[10]
        of_tangent = of_place = None
        if any(t is not None for t in tangents[6:9]):
            of_tangent = JVP(*at, *_filled(tangents[6:9], along), *ctx.how)
        if any(t is not None for t in tangents[:3]):
            place, _, lse = _place_tangents(ctx, at, tangents)
            twice = (_spread(t, along[0], at[0]) for t in (*place, lse))
            of_place = JVP2(*at, *along, dlse, *twice, *ctx.how)
        return _plus(of_tangent, of_place)


class AttendVjp(_OneLevel):
    """`q, k, v, bias, o, ℓ, g` and how, to the gradients of `⟨g, o⟩`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Found) -> None:
        _OneLevel.setup_context(ctx, inputs, ())  # outputs are not read

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Found:
        *at, g = ctx.saved_tensors
        along = _filled(tangents, (_spread(t, g, at[0]) for t in at[:3]))
        do, dlse = JVP(*at, *along, *ctx.how)
        of_place = (None,) * 3
        if any(ctx.needs_input_grad[:3]):
            of_place = _summed(HVP(*at, *along, do, dlse, g, *ctx.how), at[0])
        return *of_place, None, None, None, do, *(None,) * N_HOW

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Found:
        *at, g = ctx.saved_tensors
        of_g = of_place = None
        if tangents[6] is not None:
            of_g = VJP(*at, tangents[6], *ctx.how)
        if any(t is not None for t in tangents[:3]):
            place, o, lse = _place_tangents(ctx, at, tangents)
            of_place = HVP(*at, *(_spread(t, g, at[0]) for t in (*place, o, lse)), g, *ctx.how)
        return _plus(of_g, of_place)


class SecondDerivative(_OneLevel):
    """The jvp's or the vjp's dependence on `q, k, v`, which is not differentiated again: that raises.

    Dual numbers carry their tangents through a backward pass whether anybody wants them or not: there it gives NaN.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Found) -> None:
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> NoReturn:
        raise BadInputError(_TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Found:
        if torch._C._are_functorch_transforms_active():
            raise BadInputError(_TWICE)
        return tuple(torch.full_like(t, torch.nan) for t in ctx.saved_tensors)


def _place_tangents(ctx: Any, at: Sequence[Any], tangents: Sequence[Tensor | None]) -> tuple[list[Tensor], Any, Any]:
    """Of `q, k, v`, of `o` and of `ℓ`, which come along with them."""
    place, (o, lse) = _filled(tangents[:3], at[:3]), tangents[4:6]
    if o is None or lse is None:
        o, lse = JVP(*at, *place, *ctx.how)
    return place, o, lse


def _register(op: Any, derivatives: type[_OneLevel]) -> None:
    function: Any = type(derivatives.__name__, (derivatives,), {"forward": staticmethod(functools.partial(_below, op))})

    def at_one_level(*args: Any) -> Found:
        moves = _moves(args[:-N_HOW])  # all but how
        if peek_interpreter_stack() is None:
            return function.apply(*args) if moves else _below(op, *args)
        _CALLED.backward = torch.is_grad_enabled()
        if not moves:
            return _below(op, *args)
        with enable_single_level_autograd_function():
            return function.apply(*args)

    LIBRARY.impl(op, at_one_level, "Autograd")


_register(ATTEND, Attend)
_register(JVP, AttendJvp)
_register(VJP, AttendVjp)
_register(HVP, SecondDerivative)
_register(JVP2, SecondDerivative)


def attention_and_kernel(
    q: Queries, k: Keys, v: Values, scores: Scores, precision: Precision = "half", copies: int = 1
) -> tuple[Outputs, AttentionKernel]:
    """`softmax(s) v`, and the kernel that serves it: for whoever puts it inside a model and must know how exact it is.

    copies: how often every item comes, one copy behind the other, each with a direction of its own; the kernel serves one.

    >>> x = torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    >>> out, kernel = attention_and_kernel(x, x, x, Scores(1.0))
    >>> torch.autograd.grad(out.sum(), x)[0].shape
    torch.Size([1, 1, 3, 2])
    """
    if max(_transforms(t) for t in (q, k, v)) > 1:
        raise BadInputError(_ONCE)
    if copies > 1:
        mask = scores.mask
        keys, bias = (t[::copies] if t is not None and len(t) == len(q) else t for t in (mask.keys, mask.bias))
        scores = replace(scores, mask=replace(mask, keys=keys, bias=bias))
    dual = any(_transforms(t) == 0 and forward_ad.unpack_dual(t).tangent is not None for t in (q, k, v))
    here = _Here(scores, precision, copies, dual)
    return _Linearised.apply(here, q, k, v), here.kernel  # pyright: ignore[reportReturnType]


@dataclass(eq=False)
class _Here:
    """Attention at one `q, k, v`: the kernel built in the forward pass, which gets plain tensors, read by the derivatives.

    dual: torch's own forward mode is on.
    """

    scores: Scores
    precision: Precision
    copies: int
    dual: bool
    kernel: AttentionKernel = field(init=False)

    def probes(self, t: Tensor) -> Tensor:
        """Directions, one for each copy, as the kernel takes them: a probe for each copy."""
        return t.to(self.kernel.output.dtype).unflatten(0, (-1, self.copies)).transpose(0, 1)

    def items(self, t: Tensor, like: Tensor) -> Tensor:
        """What the kernel gives for each probe, one copy behind the other."""
        return t.transpose(0, 1).flatten(0, 1).to(like.dtype)


def _transforms(t: Tensor) -> int:
    """How many of torch.func's transforms wrap a tensor."""
    functorch = importlib.import_module("torch._C._functorch")
    depth = 0
    while functorch.is_functorch_wrapped_tensor(t):
        t, depth = functorch.get_unwrapped(t), depth + 1
    return depth


class _Linearised(torch.autograd.Function):
    @staticmethod
    def forward(here: _Here, *qkv: Tensor) -> Tensor:
        kind = torch.promote_types(qkv[0].dtype, torch.float32)
        q, k, v = (t.detach()[:: here.copies].to(kind) for t in qkv)
        here.kernel = linearize(q, k, v, here.scores, "auto", here.precision)
        out = here.kernel.output.to(qkv[0].dtype, copy=True)  # the kernel keeps its own
        return out if here.copies == 1 else out.repeat_interleave(here.copies, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.here, ctx.qkv = inputs[0], inputs[1:]

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple:
        if ctx.here.dual:
            raise BadInputError(_ONCE)
        graph = torch.is_grad_enabled() and ctx.here.copies == 1  # of the backward pass itself, for another one through it
        products = _Product.apply(ctx.here, True, graph, *g)
        if graph:
            guard = _Guard.apply(*ctx.qkv)
            products = (t + guard for t in products)
        return None, *products

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        return _Product.apply(ctx.here, False, False, *_filled(tangents[1:], ctx.qkv))[0] + _Guard.apply(*ctx.qkv)


class _Product(torch.autograd.Function):
    """`dq, dk, dv ↦ J (dq, dk, dv)`, or, transposed, `g ↦ Jᵀ g`. graph: only its graph may be wanted, at zero."""

    @staticmethod
    def forward(here: _Here, transposed: bool, graph: bool, *vectors: Tensor) -> Found:
        first = vectors[0]
        if graph and not bool(first.any()):  # the graph of a linear map is made at zero
            return tuple(torch.zeros_like(t, dtype=first.dtype) for t in here.kernel.inputs)
        probes = map(here.probes, vectors)
        found = here.kernel.vjp(*probes) if transposed else (here.kernel.jvp(*probes),)
        return tuple(here.items(t, first) for t in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Found) -> None:
        ctx.here, ctx.transposed = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Found:
        return None, None, None, *_Product.apply(ctx.here, not ctx.transposed, False, *g)


class _Guard(torch.autograd.Function):
    """Zero, added to a product for its dependence on `q, k, v`; raises when that is wanted."""

    @staticmethod
    def forward(*qkv: Tensor) -> Tensor:
        return qkv[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> NoReturn:
        raise BadInputError(_ONCE)
