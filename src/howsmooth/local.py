"""The one verb: how smooth is this map here?"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from howsmooth.attention.maps import Map, check_finite
from howsmooth.bounds.point import operator_bound
from howsmooth.errors import BadFunctionError, BadInputError, NoConvergenceError
from howsmooth.measures.measure import Measure
from howsmooth.operators import AutodiffJacobian, Operator, Weighted
from howsmooth.operators.autodiff import check_deterministic
from howsmooth.spectral import DenseSVD, Estimate, Estimates, GolubKahan, Solution, Solver, Status
from howsmooth.spectral.own import own_direction, own_norms

_LOOSE = 5.0  # upper/lower past which a deterministic bound may do better
_DENSE_SIZE = 256  # rows and columns up to which a dense decomposition is the quicker way too


@overload
def lipschitz(
    f: Map,
    x: Measure,
    *,
    tol: float = ...,
    certify: float | None = ...,
    seed: int = ...,
    solver: Solver | None = ...,
    batched: None = ...,
) -> Estimate: ...
@overload
def lipschitz(
    f: Map | Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    tol: float = ...,
    certify: float | None = ...,
    seed: int = ...,
    solver: Solver | None = ...,
    batched: Literal[False],
) -> Estimate: ...
@overload
def lipschitz(
    f: Map | Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    tol: float = ...,
    certify: float | None = ...,
    seed: int = ...,
    solver: Solver | None = ...,
    batched: Literal[True],
) -> Estimates: ...
@overload
def lipschitz(
    f: Map | Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    tol: float = ...,
    certify: float | None = ...,
    seed: int = ...,
    solver: Solver | None = ...,
    batched: None = ...,
) -> Any: ...
def lipschitz(
    f: Map | Callable[[Tensor], Tensor],
    x: Tensor | Measure,
    *,
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int = 0,
    solver: Solver | None = None,
    batched: bool | None = None,
) -> Estimate | Estimates:
    """The local Lipschitz constant `‖D_x f‖₂` of `f` at `x`, from below and from above.

    f: an attention layer, a norm, a composition of them, or any torch function of one tensor.
    x: tokens (n, d), or a batch (batch, n, d) measured in lock step; for a function, any shape; or a `Measure`, at which the
    local Wasserstein-2 constant is measured: that of moving atoms and of splitting them (docs/meanfield.md, Theorem 5.2).
    tol: relative accuracy of `value`.  certify: go on until `upper/lower ≤ 1 + certify`.  seed: of the random start.
    solver: `GolubKahan(...)` or `DenseSVD()`; by default dense where `x` and `f(x)` have at most 256 entries.
    batched: whether the first axis of `x` runs over inputs; by default when `x` has three axes.

    Work is done in the precision of `x` and `f`, `lower` is evaluated again in float64. Where the certificate leaves the
    interval wide, the deterministic bound at a point stands in if it is smaller, and `confidence` is 1.

    >>> from howsmooth import Attention
    >>> identity = Attention.from_matrices(torch.zeros(2, 2), torch.eye(2))
    >>> round(lipschitz(identity, torch.zeros(3, 2)).value, 6)  # uniform attention: the mean of three tokens
    1.0
    """
    if isinstance(x, Measure):
        if batched:
            raise BadInputError("expected one measure at a time, got batched=True; measure them in a loop")
        return _with_splitting(*whole_atoms(f, x, tol, certify, seed, solver), x, certify)
    _check_options(x, tol, certify, seed)
    several = x.ndim == 3 if batched is None else batched
    problem = _MapProblem(f, x, several) if isinstance(f, Map) else _FunctionProblem(f, x, several)
    estimates, _ = _estimates(problem, several, tol, certify, seed, solver)
    return Estimates(tuple(estimates)) if several else estimates[0]


def whole_atoms(
    f: Map | Callable[[Tensor], Tensor],
    measure: Measure,
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int = 0,
    solver: Solver | None = None,
) -> tuple[Estimate, Operator]:
    """`‖D^½ J D^{−½}‖`, what moving whole atoms can do, and the operator it is the norm of, in float64."""
    _check_options(measure.points, tol, certify, seed)
    found, operator = _estimates(_MeasureProblem(f, measure), False, tol, certify, seed, solver)
    root = measure.mass.sqrt()[:, None].to(found[0].direction.device)
    return replace(found[0], direction=found[0].direction.double() / root), operator


def _estimates(
    problem: "_MapProblem | _MeasureProblem | _FunctionProblem",
    several: bool,
    tol: float,
    certify: float | None,
    seed: int,
    solver: Solver | None,
) -> tuple[list[Estimate], Operator]:
    """Both ends for every input of a problem, and the operator that the lower ones were evaluated with."""
    operator = _fine_enough(problem.operator(), tol, certify)
    if solver is None:
        small = max(operator.in_size, operator.out_size) <= _DENSE_SIZE
        solver = DenseSVD() if small else GolubKahan()
    dense = isinstance(solver, DenseSVD)
    solutions = None
    if not dense and _resolves(operator, tol, certify):
        solutions = _solve(solver, operator, tol, certify, seed)
    precise = _precise(operator, problem)
    if solutions is None:
        operator = precise
        if not _resolves(operator, tol, certify):
            raise BadInputError(
                f"expected tol ≥ {operator.noise:.1e} and certify ≥ {8 * operator.noise:.1e}, got tol={tol}, "
                f"certify={certify}; the products of this map at this x carry no more digits in {operator.dtype}"
            )
        solutions = solver.solve(operator, tol, certify, seed) if dense else _solve_scaled(solver, operator, tol, certify, seed)
    noise = 0.0 if dense else operator.noise
    exact = 1.0 if precise.dtype == torch.float64 else 1 - precise.noise
    lowers = [exact * low for low in _attained(precise, solutions)]
    uppers = [
        max(low, s.upper * (1 + noise + 2 * (abs(s.value - low) / low if low else 0.0)))
        for s, low in zip(solutions, lowers, strict=True)
    ]
    loose = any(up > _LOOSE * low for up, low in zip(uppers, lowers, strict=True))
    bound = operator_bound(precise) if loose else None
    certain = [math.inf] * len(uppers) if bound is None else bound.tolist()
    risk = solver.delta if isinstance(solver, GolubKahan) else 0.0
    estimates = []
    for solution, lower, likely, sure in zip(solutions, lowers, uppers, certain, strict=True):
        upper = max(lower, min(likely, sure))
        estimates.append(
            Estimate(
                lower=lower,
                upper=upper,
                confidence=1.0 if sure < likely else 1 - risk,
                status="dense" if dense else _status(solution.converged, lower, upper, tol, certify),
                direction=solution.direction.reshape(problem.shape[1:] if several else problem.shape),
                steps=solution.steps,
                precision=str(precise.dtype).removeprefix("torch."),
                tol=tol,
                seed=seed,
                noise=noise,
            )
        )
    return estimates, precise


class _MapProblem:
    """A map of ours at `x`: closed-form products."""

    def __init__(self, f: Map, x: Tensor, several: bool):
        check_finite(x, "tokens")
        if x.ndim != (3 if several else 2):
            raise BadInputError(
                f"expected tokens of shape (n, d), or (batch, n, d) for a batch, got {tuple(x.shape)}; reshape the tokens"
            )
        self._f, self._x, self.shape = f, f.prepare(x if several else x[None]).detach(), x.shape

    def operator(self) -> Operator:
        return self._f.linearize(self._x)[1]

    def precise(self) -> Operator | None:
        try:
            return self._f.linearize(self._x.double())[1]
        except BadFunctionError:  # a map made of someone else's code, which may know no float64
            return None


class _MeasureProblem:
    """A map of ours at a measure: `D^½ J D^{−½}`, the Jacobian on `L²(μ)`."""

    def __init__(self, f: Map | Callable[[Tensor], Tensor], measure: Measure):
        if not isinstance(f, Map):
            raise BadInputError(
                f"expected a map of this package for a measure, got {type(f).__name__}; a function takes tokens, not masses"
            )
        self._f, self._measure, self.shape = f, measure, measure.points.shape
        self._x = f.prepare(measure.points).detach()[None]

    def operator(self) -> Operator:
        return self._at(self._x)

    def precise(self) -> Operator:
        return self._at(self._x.double())

    def _at(self, x: Tensor) -> Operator:
        root = self._measure.mass.sqrt()[None, :, None]
        jacobian = self._f.on(self._measure).linearize(x)[1]
        return Weighted(jacobian, root.to(x), (1 / root).to(x))


class _FunctionProblem:
    """Any torch function at `x`: products by automatic differentiation."""

    def __init__(self, f: Callable[[Tensor], Tensor], x: Tensor, several: bool):
        if not callable(f):
            raise BadInputError(f"expected a map or a function of one tensor, got {type(f).__name__}; pass a callable")
        if x.dtype not in (torch.float32, torch.float64):
            raise BadInputError(f"expected float32 or float64 input, got {x.dtype}; pass x.float() and f in float32")
        check_finite(x, "input")
        if several and x.ndim < 2:
            raise BadInputError(f"expected a batch of inputs, got shape {tuple(x.shape)}; pass batched=False")
        self._f, self._x, self._several, self.shape = f, x.detach(), several, x.shape

    def operator(self) -> Operator:
        jacobian = AutodiffJacobian(self._f, self._x, self._several)
        check_deterministic(self._f, self._x, jacobian.output)
        return jacobian

    def precise(self) -> Operator | None:
        """In float64, where the function can be: a module is copied, anything else must take float64 as it is."""
        f = copy.deepcopy(self._f).double() if isinstance(self._f, nn.Module) else self._f
        try:
            jacobian = AutodiffJacobian(f, self._x.double(), self._several)
        except (RuntimeError, TypeError, BadFunctionError):
            return None
        return jacobian if jacobian.output.dtype == torch.float64 else None


def _fine_enough(operator: Operator, tol: float, certify: float | None) -> Operator:
    """The cheapest products that carry the digits that are asked for, or the finest there are."""
    while not _resolves(operator, tol, certify):
        finer = operator.refined()
        if finer is None:
            break
        operator = finer
    return operator


def _precise(operator: Operator, problem: "_MapProblem | _MeasureProblem | _FunctionProblem") -> Operator:
    """What `lower` is evaluated with: float64, or the finest products short of it where float64 is out of proportion."""
    if operator.dtype == torch.float64:
        return operator
    if not operator.heavy:
        return problem.precise() or operator
    while (finer := operator.refined()) is not None:
        operator = finer
    return operator


def _resolves(operator: Operator, tol: float, certify: float | None) -> bool:
    """Whether products in this precision carry the digits that are asked for."""
    return tol >= operator.noise and (certify is None or certify >= 8 * operator.noise)


def _solve(solver: Solver, operator: Operator, tol: float, certify: float | None, seed: int) -> list[Solution] | None:
    """Solutions in the working precision; nothing where fourth powers of the norm leave its range."""
    safe = torch.finfo(operator.dtype).max ** 0.23
    try:
        solutions = solver.solve(operator, tol, certify, seed)
    except NoConvergenceError:
        return None
    return solutions if all(1 / safe < s.value < safe for s in solutions) else None


def _solve_scaled(solver: Solver, operator: Operator, tol: float, certify: float | None, seed: int) -> list[Solution]:
    """Solutions of the maps divided by a size they attain, whatever that is."""
    random = torch.Generator().manual_seed(seed)
    v = torch.randn(1, operator.batch, *operator.in_shape, generator=random).to(operator.device, operator.dtype)
    size = operator.jvp(v)[0].flatten(1).abs().amax(-1)
    size = torch.where(size > 0, size, 1.0)
    rows = (1 / size).reshape(-1, *[1] * len(operator.out_shape))
    solutions = solver.solve(Weighted(operator, rows, torch.ones_like(v[0])), tol, certify, seed)
    return [replace(s, value=s.value * c, upper=s.upper * c) for s, c in zip(solutions, size.tolist(), strict=True)]


@torch.no_grad()
def _attained(operator: Operator, solutions: list[Solution]) -> list[float]:
    """`|J v|/|v|` for the directions found."""
    v = torch.stack([s.direction for s in solutions])[None].to(operator.device, operator.dtype)
    image = operator.jvp(v).flatten(2)
    size = image.abs().amax(-1, keepdim=True)  # taken out, so that squares stay in range
    size = torch.where(size > 0, size, 1.0)
    return ((image / size).norm(dim=-1) / v.flatten(2).norm(dim=-1) * size[..., 0])[0].double().tolist()


def _with_splitting(moved: Estimate, operator: Operator, measure: Measure, certify: float | None) -> Estimate:
    """The larger of moving atoms and of splitting one, Theorem 5.2. Directions are displacements of length one in `L²(μ)`."""
    norms = own_norms(operator, above=moved.lower)
    best = float(norms.lower.max())
    lower, direction, split = moved.lower, moved.direction, False
    if best > moved.lower:
        token = int(norms.lower[0].argmax())
        along, lower = own_direction(operator, token)
        direction, split = torch.zeros_like(direction), True
        direction[token] = along / float(measure.mass[token]) ** 0.5
    upper = max(lower, moved.upper, float(norms.upper.max()))
    status = moved.status
    if status != "dense" or norms.confidence < 1:
        status = _status(status != "step limit", lower, upper, moved.tol, certify)
    confidence = moved.confidence - (1 - norms.confidence)
    return replace(moved, lower=lower, upper=upper, confidence=confidence, status=status, direction=direction, split=split)


def _status(settled: bool, lower: float, upper: float, tol: float, certify: float | None) -> Status:
    if upper <= lower * (1 + (tol if certify is None else certify)):
        return "certified"
    return "converged" if settled and certify is None else "step limit"


def _check_options(x: Tensor, tol: float, certify: float | None, seed: int) -> None:
    if not isinstance(x, Tensor):
        raise BadInputError(f"expected a torch tensor, got {type(x).__name__}; use torch.as_tensor(x)")
    if not x.is_floating_point():
        raise BadInputError(f"expected a floating-point tensor, got {x.dtype}; pass embeddings, not token ids")
    if x.numel() == 0:
        raise BadInputError(f"expected at least one token, got shape {tuple(x.shape)}; pass a longer input")
    if not all(isinstance(t, int | float) for t in (tol, certify or 1.0)) or not isinstance(seed, int):
        raise BadInputError(
            f"expected numbers tol and certify and a whole seed, got {tol!r}, {certify!r} and {seed!r}; correct them"
        )
    if not 0 < tol < 1:
        raise BadInputError(f"expected 0 < tol < 1, got {tol}; the default is 1e-3")
    if certify is not None and not 0 < certify < math.inf:
        raise BadInputError(f"expected certify > 0, got {certify}; 0.02 asks for an interval of 2 %")
