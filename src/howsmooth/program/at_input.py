"""Maps and functions at an input: their Jacobians in closed form, or by automatic differentiation of a recording."""

import hashlib
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from howsmooth.errors import BadFunctionError, BadInputError, HowSmoothError
from howsmooth.maps.base import Map, check_finite, check_input
from howsmooth.maps.jacobian import AutodiffJacobian, applied, check_output, doubled
from howsmooth.measures.measure import Measure
from howsmooth.parallel import active
from howsmooth.program.confirm import RecordedFunction
from howsmooth.program.modules import check_whole, unchanged
from howsmooth.spectral.operator import Operator, Restricted, Weighted

_SAMPLED = 2**20  # entries of an input that its mark is made of

Function = Map | Callable[[Tensor], Tensor]


class JacobianAt(NamedTuple):
    """A Jacobian in the working precision, a way to it in float64 where there is one, the shape of one input.

    inputs, outputs: of every item, along the first axis.  foreign: whether the two precisions are someone else's code, which
    may compute different functions in them.
    """

    operator: Operator
    precise: Callable[[], Operator | None]
    shape: torch.Size
    inputs: Tensor
    outputs: Tensor
    foreign: bool = False

    def restricted(self, tokens: tuple[int, ...]) -> "JacobianAt":
        """The Jacobian for perturbations of some tokens alone."""

        def precise() -> Operator | None:
            whole = self.precise()
            return None if whole is None else Restricted(whole, tokens)

        return self._replace(operator=Restricted(self.operator, tokens), precise=precise)

    def seeds(self, seed: int | None) -> list[int]:
        """Of every item: the one that is given, or a mark of its input and output."""
        if seed is not None:
            return [seed] * len(self.inputs)
        return [_mark(x, y) for x, y in zip(self.inputs, self.outputs, strict=True)]


def _mark(x: Tensor, y: Tensor) -> int:
    """A number made of an input, to the bit, and of an output, roughly, so that a batch and a loop find the same one."""
    flat = x.detach().flatten()
    exact = flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().resolve_neg().numpy().tobytes()
    parts = y.detach().flatten().tensor_split(8)
    sizes = torch.stack([p.double().square().mean() if p.numel() else y.new_zeros((), dtype=torch.float64) for p in parts])
    rough = [round(math.log2(size)) if 0 < size < math.inf else size for size in sizes.tolist()]
    mark = hashlib.blake2b(exact + repr(rough).encode(), digest_size=6)
    return int.from_bytes(mark.digest(), "big")


def jacobian_at(f: Function, x: Tensor, batched: bool) -> JacobianAt:
    """The Jacobian of a map or function at one input, or at those along the first axis of `x`."""
    check_input(x)
    together = active()
    if together is not None and together.size > 1:
        raise BadInputError(
            f"expected a measurement of a whole sequence, got one inside context_parallel of {together.size} processes, where "
            "each has a shard; measure outside of it"
        )
    if isinstance(f, nn.Module):
        check_whole(f)
    if batched and x.ndim < 2:
        raise BadInputError(f"expected a batch of inputs along the first axis, got shape {tuple(x.shape)}; stack the inputs")
    return _of_map(f, x, batched) if isinstance(f, Map) else _of_function(f, x, batched)


def _of_map(f: Map, x: Tensor, batched: bool) -> JacobianAt:
    """A map of ours at `x`: closed-form products."""
    xs = x if batched else x[None]
    if xs.ndim != 3:
        raise BadInputError(
            f"expected tokens of shape (n, d), got {tuple(xs.shape[1:])}; tokens are rows, lipschitz_batch takes many"
        )
    check_finite(x, "tokens")
    xs = f.prepare(xs).detach()

    def precise() -> Operator | None:
        try:
            return f.linearize(xs.double())[1]
        except BadFunctionError:  # a map made of someone else's code, which may know no float64
            return None

    value, operator = f.linearize(xs)
    return JacobianAt(operator, precise, xs.shape[1:], xs, value)


def jacobian_on(f: Function, measure: Measure) -> JacobianAt:
    """A map of ours at a measure: `D^½ J D^{−½}`, the Jacobian on `L²(μ)`."""
    if not isinstance(f, Map):
        raise BadInputError(
            f"expected a map of this package for a measure, got {type(f).__name__}; a function takes tokens, not masses"
        )
    x, root = f.prepare(measure.points).detach()[None], measure.mass.sqrt()[None, :, None]

    def at(x: Tensor) -> tuple[Tensor, Operator]:
        value, operator = f.on(measure).linearize(x)
        return value, Weighted(operator, root.to(x), (1 / root).to(x))

    value, operator = at(x)
    return JacobianAt(operator, lambda: at(x.double())[1], measure.points.shape, x, value)


def _of_function(f: Callable[[Tensor], Tensor], x: Tensor, batched: bool) -> JacobianAt:
    """Any torch function at `x`: products by automatic differentiation."""
    if not callable(f):
        raise BadInputError(f"expected a map or a function of one tensor, got {type(f).__name__}; pass a callable")
    if x.dtype not in (torch.float32, torch.float64):
        raise BadInputError(f"expected float32 or float64 input, got {x.dtype}; pass x.float() and f in float32")
    check_finite(x, "input")
    recorded = _recorded(f, x)
    jacobian = AutodiffJacobian(recorded, x, batched)
    if not batched and x.ndim > 2 and len(x) > 1 and jacobian.items_apart():
        raise BadInputError(
            f"expected one input, got {len(x)} of them that the function treats apart, shape {tuple(x.shape)}; "
            "call lipschitz_batch(f, x), or pass one of them"
        )

    def precise() -> Operator | None:
        """In float64, where the function can be."""
        try:
            finer = AutodiffJacobian(_recorded(doubled(f), x.double(), recorded), x.double(), batched)
        except (RuntimeError, TypeError, HowSmoothError):
            return None
        return finer if finer.output.dtype == torch.float64 else None

    inputs, outputs = (x, jacobian.output) if batched else (x[None], jacobian.output[None])
    return JacobianAt(jacobian, precise, x.shape[1:] if batched else x.shape, inputs, outputs, foreign=True)


def _output(f: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """What a function gives, without gradients where it can do without, so that nothing it keeps becomes part of a graph."""
    with torch.no_grad(), suppress(Exception):
        return f(x.clone())  # a clone, so that f may work in place
    with torch.enable_grad():
        return applied(f, x.clone().requires_grad_().clone())


def _recorded(f: Callable[[Tensor], Tensor], x: Tensor, known: RecordedFunction | None = None) -> RecordedFunction:
    """A function by its operations, whatever it tells automatic differentiation. known: the same in another precision."""
    own = unchanged(f, evaluating=False) if isinstance(f, nn.Module) else nullcontext()
    with torch.inference_mode(False), torch.enable_grad(), own:
        x = x.detach().clone()
        if known is not None:
            return known.widened(f, x)
        check_output(_output(f, x))
        return RecordedFunction.at(f, x)
