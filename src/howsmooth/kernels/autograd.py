"""How attention's operators are each other's derivatives, so that torch takes any two of them in any mode in O(n · d) memory.

With `x = (q, k, v)`, `A(x; t)` the jvp along `t`, `B(x; g)` the vjp: `⟨g, A(x; t)⟩ = ⟨B(x; g), t⟩ = φ(x, t, g)`. What depends
on `x` is in either the gradient of φ in `x`, one and the same product `H(x; t, g)`, the Hessian of `⟨g, o⟩` times `t`:

    backward of attend:  B(x; g)             jvp of attend:  A(x; t)
    backward of A:       H(x; t, g), B(x; g)   jvp of A along (t*, t'):  A(x; t') + D(x; t, t*)
    backward of B:       H(x; t, g), A(x; t)   jvp of B along (t*, g'):  B(x; g') + H(x; t*, g)

`o` and the log-sum-exp `ℓ` are inputs of the products too. Backwards, all that comes through them is counted in `x`; forwards,
their tangents arrive with those of `x` and are what the next product needs. `H` and `D` are not differentiated again.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # the level at work, or none
from torch._functorch import eager_transforms
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction  # an operator's derivative at one level of torch.func's transforms

from howsmooth.errors import BadInputError
from howsmooth.kernels.operators import LIBRARY

Found = tuple[Any, ...]
ATTEND, JVP, VJP, HVP, JVP2 = (
    getattr(torch.ops.howsmooth, name).default for name in ("attend", "attend_jvp", "attend_vjp", "attend_hvp", "attend_jvp2")
)

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


class Attend(_SingleLevelFunction):
    """`q, k, v, bias` and how, to `o, ℓ`."""

    @staticmethod
    def forward(*args: Any) -> Found:
        return _below(ATTEND, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Found) -> None:
        _keep(ctx, (*inputs[:4], *output), inputs[4:])

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> Found:
        if ctx.needs_input_grad[3]:
            raise BadInputError(_MASK)
        grads = (None,) * 3 if g[0] is None else VJP(*ctx.saved_tensors, g[0], *ctx.how)
        return *grads, *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Found:
        if tangents[3] is not None:
            raise BadInputError(_MASK)
        return JVP(*ctx.saved_tensors, *_filled(tangents[:3], ctx.saved_tensors[:3]), *ctx.how)


class Along(_SingleLevelFunction):
    """`q, k, v, bias, o, ℓ, dq, dk, dv` and how, to `do, dℓ`."""

    @staticmethod
    def forward(*args: Any) -> Found:
        return _below(JVP, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Found) -> None:
        _keep(ctx, (*inputs[:9], *output), inputs[9:])

    @staticmethod
    def backward(ctx: Any, *g: Tensor | None) -> Found:
        if g[0] is None:
            return (None,) * 13
        at, moved, needs = ctx.saved_tensors[:6], ctx.saved_tensors[6:], ctx.needs_input_grad
        of_place, of_tangent = (None,) * 3, (None,) * 3
        if any(needs[:3]):
            of_place = _summed(HVP(*at, *moved, g[0], *ctx.how), at[0])
        if any(needs[6:9]):
            of_tangent = VJP(*at, g[0], *ctx.how)
        return *of_place, None, None, None, *of_tangent, *(None,) * 4

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


class Transposed(_SingleLevelFunction):
    """`q, k, v, bias, o, ℓ, g` and how, to the gradients of `⟨g, o⟩`."""

    @staticmethod
    def forward(*args: Any) -> Found:
        return _below(VJP, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Found) -> None:
        _keep(ctx, inputs[:7], inputs[7:])

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Found:
        *at, g = ctx.saved_tensors
        along = _filled(tangents, (_spread(t, g, at[0]) for t in at[:3]))
        do, dlse = JVP(*at, *along, *ctx.how)
        of_place = (None,) * 3
        if any(ctx.needs_input_grad[:3]):
            of_place = _summed(HVP(*at, *along, do, dlse, g, *ctx.how), at[0])
        return *of_place, None, None, None, do, *(None,) * 4

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


class _Last(_SingleLevelFunction):
    """A second derivative. Dual numbers carry their tangents through a backward pass whether anybody asks for them or not:
    there a third derivative is NaN, elsewhere it raises."""

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


class Hessian(_Last):
    """The vjp's dependence on `q, k, v`."""

    @staticmethod
    def forward(*args: Any) -> Found:
        return _below(HVP, *args)


class AlongTwice(_Last):
    """The jvp's dependence on `q, k, v`."""

    @staticmethod
    def forward(*args: Any) -> Found:
        return _below(JVP2, *args)


def _keep(ctx: Any, tensors: tuple, how: tuple) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)
    ctx.how = how


def _place_tangents(ctx: Any, at: Sequence[Any], tangents: Sequence[Tensor | None]) -> tuple[list[Tensor], Any, Any]:
    """Of `q, k, v`, of `o` and of `ℓ`, which come along with them."""
    place, (o, lse) = _filled(tangents[:3], at[:3]), tangents[4:6]
    if o is None or lse is None:
        o, lse = JVP(*at, *place, *ctx.how)
    return place, o, lse


def _register(op: Any, function: Any) -> None:
    def at_one_level(*args: Any) -> Found:
        moves = _moves(args[:-4])  # all but how
        if peek_interpreter_stack() is None:
            return function.apply(*args) if moves else _below(op, *args)
        _CALLED.backward = torch.is_grad_enabled()
        if not moves:
            return _below(op, *args)
        with enable_single_level_autograd_function():
            return function.apply(*args)

    LIBRARY.impl(op, at_one_level, "Autograd")


for _op, _function in ((ATTEND, Attend), (JVP, Along), (VJP, Transposed), (HVP, Hessian), (JVP2, AlongTwice)):
    _register(_op, _function)
