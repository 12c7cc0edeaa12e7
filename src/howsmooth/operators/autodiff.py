"""The Jacobian of any torch function, the function evaluated once."""

import warnings
from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import BadFunctionError
from howsmooth.operators.base import Operator


@final
class AutodiffJacobian(Operator):
    """`D_x f` by automatic differentiation.

    The graph of `y = f(x)` is kept and serves every product: `Jᵀu` is a backward pass; `u ↦ Jᵀu` is linear, and its own
    backward pass is `Jv`. Where a function has no second derivative, `Jv` falls back to forward mode, which evaluates `f`
    again.

    batched: `f` treats the leading axis of `x` item by item; otherwise `x` is one input, whatever its shape.

    >>> J = AutodiffJacobian(lambda x: x**2, torch.tensor([1.0, 2.0]), batched=False)
    >>> J.jvp(torch.ones(1, 1, 2)).tolist()
    [[[2.0, 4.0]]]
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Float[Tensor, "..."], batched: bool):
        self._f, self._batched = f, batched
        with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            self._x = x.detach().clone().requires_grad_()
            self._y = f(self._x.clone())  # a clone, so that f may work in place
            self._check_output()
            self._u = torch.zeros_like(self._y, requires_grad=True)
            self._transposed = self._second_graph()
        self.batch = x.shape[0] if batched else 1
        self.in_shape = tuple(x.shape[1:] if batched else x.shape) or (1,)
        self.out_shape = tuple(self._y.shape[1:] if batched else self._y.shape) or (1,)
        self.dtype, self.device = x.dtype, x.device
        if not self._consistent():
            self._transposed = None
            if not self._consistent():
                raise BadFunctionError(
                    "expected a function with derivatives in both modes, got one whose J v and Jᵀ u disagree or are missing; "
                    "look for custom backward passes or operations without double backward"
                )
        if batched and self.batch > 1:
            self._check_items_apart()

    @property
    def output(self) -> Tensor:
        """`f(x)`."""
        return self._y.detach()

    def jvp(self, v):
        probes = v.reshape(len(v), *self._x.shape)
        return torch.stack([self._jvp(p) for p in probes]).reshape(len(v), self.batch, *self.out_shape)

    def vjp(self, u):
        probes = u.reshape(len(u), *self._y.shape)
        return torch.stack([self._vjp(p) for p in probes]).reshape(len(u), self.batch, *self.in_shape)

    def _vjp(self, u: Tensor) -> Tensor:
        u = u.to(self._y.dtype)
        return torch.autograd.grad(self._y, self._x, u, retain_graph=True, materialize_grads=True)[0]

    def _jvp(self, v: Tensor) -> Tensor:
        if self._transposed is None:
            with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, on first use of forward mode
                return torch.func.jvp(lambda t: self._f(t.clone()), (self._x.detach(),), (v,))[1].to(v.dtype)
        out = torch.autograd.grad(self._transposed, self._u, v, retain_graph=True, materialize_grads=True)[0]
        return out.to(v.dtype)

    def _second_graph(self) -> Tensor | None:
        try:
            g = torch.autograd.grad(self._y, self._x, self._u, create_graph=True, materialize_grads=True)[0]
        except RuntimeError:
            return None
        return g if g.requires_grad else None

    def _consistent(self) -> bool:
        """`⟨J v, u⟩ = ⟨v, Jᵀ u⟩` on a random pair: a backward pass that cannot be differentiated loses part of `J v`."""
        random = torch.Generator().manual_seed(0)
        v = torch.randn(1, self.batch, *self.in_shape, generator=random).to(self.device, self.dtype)
        u = torch.randn(1, self.batch, *self.out_shape, generator=random).to(self.device, self.dtype)
        transposed = self.vjp(u)
        try:
            forward = self.jvp(v)
        except (RuntimeError, NotImplementedError):
            return False
        size = torch.maximum(forward.abs().max(), transposed.abs().max())
        if size == 0 or not bool(size.isfinite()):
            return True  # a zero Jacobian agrees with itself; an infinite one is refused by the solver
        forward, transposed = forward / size, transposed / size
        difference = (forward * u).sum() - (v * transposed).sum()
        noise = 1e4 * torch.finfo(self.dtype).eps * (forward.norm() * u.norm() + v.norm() * transposed.norm())
        return bool(difference.abs() <= noise)

    def _check_output(self) -> None:
        y = self._y
        if not isinstance(y, Tensor):
            raise BadFunctionError(
                f"expected a function that returns one tensor, got {type(y).__name__}; pick one, as in lambda x: f(x)[0]"
            )
        if not y.is_floating_point():
            raise BadFunctionError(f"expected a floating-point output, got {y.dtype}; return a differentiable tensor")
        if y.numel() == 0:
            raise BadFunctionError(f"expected an output with entries, got shape {tuple(y.shape)}; return something to measure")
        if not y.requires_grad:
            raise BadFunctionError(
                "expected an output that depends on x, got one with no derivative in x; "
                "look for detach, no_grad, item() or numpy inside the function"
            )
        if not bool(y.isfinite().all()):
            raise BadFunctionError("expected a finite output, got NaN or infinity; check the function at this x")
        if self._batched and (y.ndim == 0 or y.shape[0] != self._x.shape[0]):
            raise BadFunctionError(
                f"expected one output per item of the batch ({self._x.shape[0]}), got shape {tuple(y.shape)}; "
                "pass batched=False to treat x as one input"
            )

    def _check_items_apart(self) -> None:
        """A perturbation of some items must leave the others alone: items are split by each bit of their index, both ways."""
        v = torch.randn(self._x.shape, generator=torch.Generator().manual_seed(0)).to(self._x)
        index = torch.arange(self.batch, device=self.device)
        for bit in range((self.batch - 1).bit_length()):
            for side in (0, 1):
                moved = (index >> bit) & 1 == side
                if bool((self._jvp(v * moved.reshape(-1, *[1] * (v.ndim - 1)))[~moved] != 0).any()):
                    raise BadFunctionError(
                        "expected a function that treats the items of the batch apart, got one that mixes them; "
                        "measure one item at a time, or pass batched=False to treat x as one input"
                    )


def check_deterministic(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    """Refuse a function that gives another answer the second time, as dropout in training mode does."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        again = f(x.detach().clone())
    drift = float((again - y).norm() / y.norm().clamp_min(torch.finfo(y.dtype).tiny))
    if drift > 1e3 * torch.finfo(y.dtype).eps:
        raise BadFunctionError(
            f"expected the same output twice, got outputs {drift:.1e} apart; switch dropout off with module.eval()"
        )
