"""Jacobians of maps: of attention in closed form, of any torch function by automatic differentiation."""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import BadFunctionError, foreign, reason
from howsmooth.kernels import AttentionKernel
from howsmooth.kernels.tensors import float32_products
from howsmooth.maps.norms import NormJacobian, over_heads
from howsmooth.maps.rounding import Point, attention_errors, attention_point, attention_rounding
from howsmooth.spectral.matrices import led_to
from howsmooth.spectral.operator import Operator, Rounded, drawn, inner, stream

if TYPE_CHECKING:
    from howsmooth.maps.attention import Attention


_MANY, _LOOKS = 2**22, "cuda"  # where so many numbers are looked at; elsewhere that costs more than keeping them
_TOKENS = 512  # random ones on which the error of projections is measured


@final
class AttentionJacobian(Operator):
    """`D_x f = Wₒ ∘ concat ∘ D(attention) ∘ turn ∘ D(norms) ∘ project`.

    layer: the weights, in the precision of the tokens.  kernel: attention at their queries, keys and values.
    q_slope, k_slope: Jacobians of the norms of queries and keys, where the layer has them, on (heads, n, head width), or on
    (n, all heads) where a norm goes over all of them.
    tokens: (batch, n, d), where it is taken, for those who ask what rounding took from queries, keys and values.
    exact: projections keep all bits of their operands; else only eleven where the kernel's products do.
    """

    def __init__(
        self,
        layer: "Attention",
        kernel: AttentionKernel,
        q_slope: NormJacobian | None = None,
        k_slope: NormJacobian | None = None,
        tokens: Tensor | None = None,
        exact: bool = False,
    ):
        self.layer, self.kernel, self.q_slope, self.k_slope, self.tokens = layer, kernel, q_slope, k_slope, tokens
        self.coarse = not exact and kernel.coarse
        self.batch, _, n, _ = kernel.output.shape
        self.in_shape, self.out_shape = (n, layer.width), (n, layer.out_width)
        self.dtype, self.device = kernel.output.dtype, kernel.output.device

    @property
    def noise(self) -> float:
        return math.hypot(self.kernel.noise, self._projection_noise) if self.coarse else self.kernel.noise  # independent

    @functools.cached_property
    @torch.no_grad()
    def _projection_noise(self) -> float:
        """The relative error of projections with eleven-bit operands, in and out, measured on some random tokens."""
        layer, random = self.layer, torch.Generator().manual_seed(0)
        x = torch.randn(_TOKENS, layer.width, generator=random).to(self.device, self.dtype)
        o = torch.randn(_TOKENS, layer.heads * self.kernel.output.shape[-1], generator=random).to(x)

        def projected() -> list[Tensor]:
            inward = torch.cat([t.flatten() for t in layer.project(x, with_bias=False)])
            return [inward] if layer.w_o is None else [inward, o @ layer.w_o.mT]

        with float32_products():
            true = projected()
        with float32_products(coarse=True):
            coarse = projected()
        return math.hypot(*(float((a - b).norm() / b.norm()) for a, b in zip(coarse, true, strict=True) if float(b.norm()) > 0))

    @property
    def heavy(self) -> bool:
        return self.kernel.heavy

    def refined(self):
        if self.coarse:
            return AttentionJacobian(self.layer, self.kernel, self.q_slope, self.k_slope, self.tokens, exact=True)
        kernel = self.kernel.refined()
        return None if kernel is None else AttentionJacobian(self.layer, kernel, self.q_slope, self.k_slope, self.tokens)

    def tiled(self) -> "AttentionJacobian":
        """A Jacobian like it on a kernel whose weights are within reach."""
        return AttentionJacobian(self.layer, self.kernel.tiled(), self.q_slope, self.k_slope, self.tokens)

    def vectors(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Directions of the tokens → those of queries, keys and values as attention takes them."""
        return self._placed(*self.layer.project(v, with_bias=False))

    def _placed(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Directions of projected tokens → those behind norms and phases."""
        dq = dq if self.q_slope is None else over_heads(self.q_slope.jvp, dq, self.q_slope.in_shape[-1])
        dk = dk if self.k_slope is None else over_heads(self.k_slope.jvp, dk, self.k_slope.in_shape[-1])
        if (rotary := self.layer.rotary) is not None:
            dq, dk = rotary.turn(dq), rotary.turn(dk)
        return dq, dk, dv

    def _push(self, v: Tensor) -> Tensor:
        """Directions of the tokens → those of the heads' outputs, side by side."""
        return self.layer.concat(self.kernel.jvp(*self.vectors(v)))

    def _pull(self, t: Tensor) -> Tensor:
        """The transpose of `_push`."""
        dq, dk, dv = self.kernel.vjp(self.layer.unconcat(t))
        if (rotary := self.layer.rotary) is not None:
            dq, dk = rotary.turn(dq, back=True), rotary.turn(dk, back=True)
        dq = dq if self.q_slope is None else over_heads(self.q_slope.vjp, dq, self.q_slope.in_shape[-1])
        dk = dk if self.k_slope is None else over_heads(self.k_slope.vjp, dk, self.k_slope.in_shape[-1])
        return self.layer.unproject(dq, dk, dv)

    @torch.no_grad()
    def jvp(self, v):
        w_o = self.layer.w_o
        with float32_products(coarse=self.coarse):
            o = self._push(v)
            return o if w_o is None else o @ w_o.mT

    @torch.no_grad()
    def vjp(self, u):
        w_o = self.layer.w_o
        with float32_products(coarse=self.coarse):
            return self._pull(u if w_o is None else u @ w_o)

    @functools.cached_property
    def _gram_o(self) -> Tensor | None:
        """`WₒᵀWₒ`, which stands for `Wₒ` and then `Wₒᵀ` in products with `JᵀJ`; nothing where `Wₒ` is the cheaper one."""
        w_o = self.layer.w_o
        with float32_products():
            return w_o.mT @ w_o if w_o is not None and w_o.shape[1] < 2 * w_o.shape[0] else None

    @torch.no_grad()
    def gram(self, v):
        if self._gram_o is None:
            return super().gram(v)
        with float32_products(coarse=self.coarse):
            o = self._push(v)
            weighted = o @ self._gram_o
            return self._pull(weighted), inner(o, weighted)

    @torch.no_grad()
    def guess(self, seeds: Sequence[int]):
        """`Jᵀ` of one output direction at all tokens, the one that values lead to: the top input of `Wₒ W_v` at every token,
        times the attention that it receives, where all heads share one `P`."""
        layer = self.layer
        inward = layer.w_v.unflatten(0, (layer.kv_heads, -1)).repeat_interleave(layer.heads // layer.kv_heads, 0)
        w_o = torch.eye(layer.out_width).to(inward) if layer.w_o is None else layer.w_o
        outward = w_o.unflatten(1, (layer.heads, -1)).transpose(0, 1)
        return self.vjp(led_to(outward, inward, seeds)[None, :, None].expand(1, self.batch, *self.out_shape))[0]

    @functools.cached_property
    def _here(self) -> Point | None:
        """What rounding has done to the point, where tokens are exact."""
        return attention_point(self, torch.zeros(self.batch, dtype=torch.float64, device=self.device))

    def _point(self, moved: Tensor) -> Point | None:
        return attention_point(self, moved) if bool(moved.any()) else self._here

    @torch.no_grad()
    def rounding(self, moved=0.0):
        point = self._point(torch.full((self.batch,), moved, dtype=torch.float64, device=self.device))
        return None if point is None else attention_rounding(self, point)

    @torch.no_grad()
    def rounded(self, v):
        w_o = self.layer.w_o
        with float32_products(coarse=self.coarse):
            projected = self.layer.project(v.vector, with_bias=False)
            vectors = self._placed(*projected)
            t = self.layer.concat(self.kernel.jvp(*vectors))
            image = t if w_o is None else t @ w_o.mT
        point = None if v.moved is None else self._point(v.moved)
        if point is None or v.off is None:
            return Rounded(image, None, None)
        return Rounded(image, attention_errors(self, point, (v.vector, v.off), projected, vectors, t), point.moved)

    def select(self, items):
        layer = self.layer
        if layer.attention_mask is not None:
            layer = replace(layer, attention_mask=layer.attention_mask[items])
        if layer.rotary is not None:
            layer = replace(layer, rotary=layer.rotary.select(items))
        slopes = [None if s is None else s.select(items) for s in (self.q_slope, self.k_slope)]
        tokens = None if self.tokens is None else self.tokens[items]
        return AttentionJacobian(layer, self.kernel.select(items), slopes[0], slopes[1], tokens, exact=not self.coarse)


@final
class AutodiffJacobian(Operator):
    """`D_x f` by automatic differentiation.

    The graph of `y = f(x)` is kept and serves every product: `Jᵀu` is a backward pass; `u ↦ Jᵀu` is linear, and its own
    backward pass is `Jv`. Where a function has no second derivative, `Jv` falls back to forward mode, which evaluates `f`
    again.

    batched: `f` treats the leading axis of `x` item by item; otherwise `x` is one input, whatever its shape.
    checked: whether the two products fit together is tried now; `check` does it later.

    >>> J = AutodiffJacobian(lambda x: x**2, torch.tensor([1.0, 2.0]), batched=False)
    >>> J.jvp(torch.ones(1, 1, 2)).tolist()
    [[[2.0, 4.0]]]
    """

    def __init__(self, f: Callable[[Tensor], Tensor], x: Float[Tensor, "..."], batched: bool, checked: bool = True):
        self._f, self._batched = f, batched
        with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            self._x = x.detach().clone().requires_grad_()
            self._y = applied(f, self._x.clone())  # a clone, so that f may work in place
            self._check_output()
            self._u = torch.zeros_like(self._y, requires_grad=True)
            self._transposed = self._second_graph()
        self.batch = x.shape[0] if batched else 1
        self.in_shape = tuple(x.shape[1:] if batched else x.shape) or (1,)
        self.out_shape = tuple(self._y.shape[1:] if batched else self._y.shape) or (1,)
        self.dtype, self.device = x.dtype, x.device
        if checked:
            self.check()
        if batched and self.batch > 1 and not self.items_apart():
            raise BadFunctionError(
                "expected a function that treats the items of the batch apart, got one that mixes them; "
                "measure one item at a time with lipschitz"
            )

    @property
    def output(self) -> Tensor:
        """`f(x)`."""
        return self._y.detach()

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """`x` and `f(x)` with the graph between them, for whoever asks for a part of it."""
        return self._x, self._y

    def check(self) -> None:
        """Make sure that `J v` and `Jᵀ u` fit together: by forward mode where double backward loses something, or refused."""
        if not self._consistent():
            self._transposed = None
            if not self._consistent():
                raise BadFunctionError(
                    "expected a function with derivatives in both modes, got one whose J v and Jᵀ u disagree or are missing; "
                    "look for custom backward passes or operations without double backward"
                )

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
            with torch.autograd.graph.saved_tensors_hooks(_without_zeros, lambda t: t):
                g = torch.autograd.grad(self._y, self._x, self._u, create_graph=True, materialize_grads=True)[0]
        except RuntimeError:
            return None
        return g if g.requires_grad else None

    def _consistent(self) -> bool:
        """`⟨J v, u⟩ = ⟨v, Jᵀ u⟩` on a random pair: a backward pass that cannot be differentiated loses part of `J v`."""
        random = stream(0, "pair", self.device)
        v = drawn((1, self.batch, *self.in_shape), random).to(self.dtype)
        u = drawn((1, self.batch, *self.out_shape), random).to(self.dtype)
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
        y = check_output(self._y)
        if not y.requires_grad:
            raise BadFunctionError(
                "expected an output that depends on x, got one with no derivative in x; "
                "look for detach, no_grad, item() or numpy inside the function"
            )
        if self._batched and (y.ndim == 0 or y.shape[0] != self._x.shape[0]):
            raise BadFunctionError(
                f"expected one output per item of the batch ({self._x.shape[0]}), got shape {tuple(y.shape)}; "
                "call lipschitz, which takes x as one input"
            )

    def items_apart(self) -> bool:
        """Whether a perturbation of some items of the first axis leaves the others alone.

        Items are parted by each bit of their index, both ways.
        """
        count = len(self._x)
        if self._y.ndim == 0 or len(self._y) != count:
            return False
        v = drawn(self._x.shape, stream(0, "items", self.device)).to(self._x)
        index = torch.arange(count, device=self.device)
        for bit in range((count - 1).bit_length()):
            for side in (0, 1):
                moved = (index >> bit) & 1 == side
                if bool((self._jvp(v * moved.reshape(-1, *[1] * (v.ndim - 1)))[~moved] != 0).any()):
                    return False
        return True


def check_output(y: Any) -> Tensor:
    """What a function gave; refused unless it is one finite tensor of floating-point numbers."""
    if not isinstance(y, Tensor):
        raise BadFunctionError(
            f"expected a function that returns one tensor, got {type(y).__name__}; pick one, as in lambda x: f(x)[0]"
        )
    if not y.is_floating_point():
        raise BadFunctionError(f"expected a floating-point output, got {y.dtype}; return a differentiable tensor")
    if y.layout != torch.strided:
        raise BadFunctionError(f"expected a dense output, got one of layout {y.layout}; call .to_dense() on it")
    if y.numel() == 0:
        raise BadFunctionError(f"expected an output with entries, got shape {tuple(y.shape)}; return something to measure")
    if not bool(y.isfinite().all()):
        raise BadFunctionError("expected a finite output, got NaN or infinity; check the function at this x")
    return y


def applied(f: Callable[[Tensor], Any], x: Tensor) -> Any:
    """`f(x)`, where what someone else's `f` raises is one sentence, with its own error as the cause."""
    try:
        return f(x)
    except Exception as error:
        if not foreign(error):
            raise
        kinds = sorted({str(p.dtype) for p in f.parameters()}) if isinstance(f, nn.Module) else []
        if kinds and str(x.dtype) not in kinds and type(error) in (RuntimeError, NotImplementedError):
            raise BadFunctionError(
                f"expected a module and an input of one precision, got {', '.join(kinds)} and {x.dtype}; convert one of them"
            ) from None
        raise BadFunctionError(
            f"expected a function that takes {x.dtype} of shape {tuple(x.shape)}, got an error from it "
            f"({reason(error)[:160]}); check both"
        ) from error


def _without_zeros(t: Tensor) -> Tensor:
    """What a graph keeps of a tensor: of many zeros, one. The graph of `u ↦ Jᵀu` is made at `u = 0`, so it is full of them."""
    many = t.numel() >= _MANY and t.device.type == _LOOKS
    return t.detach() if not many or bool(t.any()) else t.new_zeros(()).expand(t.shape)  # detached: no graph holds itself


def doubled(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function for float64: a module is copied, anything else must take it as it is."""
    return copy.deepcopy(f).double() if isinstance(f, nn.Module) else f
