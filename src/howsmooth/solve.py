"""The norm of a Jacobian from a map and an input: choose a precision and a solver, solve, evaluate the lower end, widen the
upper one. Everything the package says of a constant comes through here."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from howsmooth.errors import BadFunctionError, BadInputError, NoConvergenceError
from howsmooth.maps.base import Map, check_finite, check_input
from howsmooth.maps.jacobian import AutodiffJacobian, check_deterministic, doubled
from howsmooth.maps.operator import Operator, Weighted
from howsmooth.measures.measure import Measure
from howsmooth.spectral import DenseSVD, Estimate, Estimates, GolubKahan, Solution, Solver, Status
from howsmooth.theory.point import operator_bound
from howsmooth.theory.splitting import of_blocks

_LOOSE = 5.0  # upper/lower past which a deterministic bound may do better
_DENSE_SIZE = 256  # rows and columns up to which a dense decomposition is the quicker way too

Function = Map | Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class Options:
    """How a constant is asked for.

    tol: relative accuracy of `value`.  certify: go on until `upper/lower ≤ 1 + certify`.  seed: of the random start.
    solver: `GolubKahan(...)` or `DenseSVD()`; by default dense where input and output have at most 256 entries.
    """

    tol: float = 1e-3
    certify: float | None = None
    seed: int = 0
    solver: Solver | None = None

    def __post_init__(self):
        tol, certify, seed = self.tol, self.certify, self.seed
        if not all(isinstance(t, int | float) for t in (tol, certify or 1.0)) or not isinstance(seed, int):
            raise BadInputError(
                f"expected numbers tol and certify and a whole seed, got {tol!r}, {certify!r} and {seed!r}; correct them"
            )
        if not 0 < tol < 1:
            raise BadInputError(f"expected 0 < tol < 1, got {tol}; the default is 1e-3")
        if certify is not None and not 0 < certify < math.inf:
            raise BadInputError(f"expected certify > 0, got {certify}; 0.02 asks for an interval of 2 %")

    def resolved_by(self, operator: Operator) -> bool:
        """Whether products of this precision carry the digits that are asked for."""
        return self.tol >= operator.noise and (self.certify is None or self.certify >= 8 * operator.noise)


class Solved(NamedTuple):
    """One constant, the operator (of a batch of one) that its lower end was evaluated with, and `J v` of its direction `v`."""

    estimate: Estimate
    operator: Operator
    image: Tensor


class SolvedBatch(NamedTuple):
    """Constants of a batch, their operators in one, and `J v` of their directions, (batch, …)."""

    estimates: Estimates
    operator: Operator
    images: Tensor


def solve(f: Function, x: Tensor | Measure, options: Options) -> Solved:
    """The constant of `f` at one input.

    f: a map of this package for tokens (n, d) or a `Measure`; any torch function of one tensor, whatever its shape.
    """
    if isinstance(x, Measure):
        moved, operator, image = solve_moving(f, x, options)
        return Solved(_with_splitting(moved, operator, x, options), operator, image)
    estimates, operator, images = _solve(_problem(f, x, batched=False), options)
    return Solved(estimates[0], operator, images[0])


def solve_batch(f: Function, xs: Tensor, options: Options) -> SolvedBatch:
    """The constants at the inputs along the first axis of `xs`, in lock step."""
    return _solve(_problem(f, xs, batched=True), options)


def solve_moving(f: Function, measure: Measure, options: Options) -> Solved:
    """`‖D^½ J D^{−½}‖`, what moving whole atoms can do, and the operator it is the norm of, in float64."""
    estimates, operator, images = _solve(_measure_problem(f, measure), options)
    direction = estimates[0].direction.double()
    root = measure.mass.sqrt()[:, None].to(direction.device)
    return Solved(replace(estimates[0], direction=direction / root), operator, images[0])


def linear(f: Function, x: Tensor) -> Operator:
    """The Jacobian of `f` at one input, in the precision of `x` and `f`, as an operator with a batch of one."""
    return _problem(f, x, batched=False).operator


class _Problem(NamedTuple):
    """A Jacobian in the working precision, a way to the same in float64 where there is one, the shape of one input."""

    operator: Operator
    precise: Callable[[], Operator | None]
    shape: torch.Size


def _problem(f: Function, x: Tensor, batched: bool) -> _Problem:
    check_input(x)
    if batched and x.ndim < 2:
        raise BadInputError(f"expected a batch of inputs along the first axis, got shape {tuple(x.shape)}; stack the inputs")
    return _map_problem(f, x, batched) if isinstance(f, Map) else _function_problem(f, x, batched)


def _map_problem(f: Map, x: Tensor, batched: bool) -> _Problem:
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

    return _Problem(f.linearize(xs)[1], precise, xs.shape[1:])


def _measure_problem(f: Function, measure: Measure) -> _Problem:
    """A map of ours at a measure: `D^½ J D^{−½}`, the Jacobian on `L²(μ)`."""
    if not isinstance(f, Map):
        raise BadInputError(
            f"expected a map of this package for a measure, got {type(f).__name__}; a function takes tokens, not masses"
        )
    x, root = f.prepare(measure.points).detach()[None], measure.mass.sqrt()[None, :, None]

    def at(x: Tensor) -> Operator:
        return Weighted(f.on(measure).linearize(x)[1], root.to(x), (1 / root).to(x))

    return _Problem(at(x), lambda: at(x.double()), measure.points.shape)


def _function_problem(f: Callable[[Tensor], Tensor], x: Tensor, batched: bool) -> _Problem:
    """Any torch function at `x`: products by automatic differentiation."""
    if not callable(f):
        raise BadInputError(f"expected a map or a function of one tensor, got {type(f).__name__}; pass a callable")
    if x.dtype not in (torch.float32, torch.float64):
        raise BadInputError(f"expected float32 or float64 input, got {x.dtype}; pass x.float() and f in float32")
    check_finite(x, "input")
    jacobian = AutodiffJacobian(f, x, batched)
    check_deterministic(f, x, jacobian.output)
    if not batched and x.ndim > 2 and len(x) > 1 and jacobian.items_apart():
        raise BadInputError(
            f"expected one input, got {len(x)} of them that the function treats apart, shape {tuple(x.shape)}; "
            "call lipschitz_batch(f, x), or pass one of them"
        )

    def precise() -> Operator | None:
        """In float64, where the function can be."""
        g = doubled(f)
        try:
            finer = AutodiffJacobian(g, x.detach().double(), batched)
        except (RuntimeError, TypeError, BadFunctionError):
            return None
        return finer if finer.output.dtype == torch.float64 else None

    return _Problem(jacobian, precise, x.shape[1:] if batched else x.shape)


def _solve(problem: _Problem, options: Options) -> SolvedBatch:
    """Both ends for every input of a problem."""
    operator = _finer(problem.operator, options.resolved_by)
    small = max(operator.in_size, operator.out_size) <= _DENSE_SIZE
    solver = options.solver or (DenseSVD() if small else GolubKahan())
    dense = isinstance(solver, DenseSVD)
    solutions = _in_range(solver, operator, options) if not dense and options.resolved_by(operator) else None
    precise = _precise(operator, problem)
    if solutions is None:
        operator, solutions = precise, _in_double(solver, precise, options)
    lowers, images = _attained(precise, solutions)
    noise = 0.0 if dense else operator.noise
    uppers, certain = _uppers(solutions, lowers, noise, precise)
    delta = solver.delta if isinstance(solver, GolubKahan) else 0.0
    estimates = Estimates(
        Estimate(
            lower=lower,
            upper=upper,
            confidence=1.0 if sure else 1 - delta,
            status="dense" if dense else _status(solution.converged, lower, upper, options),
            direction=solution.direction.reshape(problem.shape),
            steps=solution.steps,
            precision=str(precise.dtype).removeprefix("torch."),
            tol=options.tol,
            certify=options.certify,
            seed=options.seed,
            noise=noise,
        )
        for solution, lower, upper, sure in zip(solutions, lowers, uppers, certain, strict=True)
    )
    return SolvedBatch(estimates, precise, images)


def _finer(operator: Operator, enough: Callable[[Operator], bool]) -> Operator:
    """The cheapest products that are exact enough, or the finest there are short of float64."""
    while not enough(operator) and (refined := operator.refined()) is not None:
        operator = refined
    return operator


def _precise(operator: Operator, problem: _Problem) -> Operator:
    """What `lower` is evaluated with: float64, or the finest products short of it where float64 is out of proportion."""
    if operator.dtype == torch.float64:
        return operator
    return _finer(operator, lambda _: False) if operator.heavy else problem.precise() or operator


def _in_range(solver: Solver, operator: Operator, options: Options) -> list[Solution] | None:
    """Solutions in the working precision; nothing where fourth powers of the norm leave its range."""
    safe = torch.finfo(operator.dtype).max ** 0.23
    try:
        solutions = solver.solve(operator, options.tol, options.certify, options.seed)
    except NoConvergenceError:
        return None
    return solutions if all(1 / safe < s.value < safe for s in solutions) else None


def _in_double(solver: Solver, operator: Operator, options: Options) -> list[Solution]:
    """Solutions of the precise maps; for products, of the maps divided by a size they attain, whatever that is."""
    tol, certify, seed = options.tol, options.certify, options.seed
    if not options.resolved_by(operator):
        raise BadInputError(
            f"expected tol ≥ {operator.noise:.1e} and certify ≥ {8 * operator.noise:.1e}, got tol={tol}, "
            f"certify={certify}; the products of this map at this x carry no more digits in {operator.dtype}"
        )
    if isinstance(solver, DenseSVD):
        return solver.solve(operator, tol, certify, seed)
    random = torch.Generator().manual_seed(seed)
    v = torch.randn(1, operator.batch, *operator.in_shape, generator=random).to(operator.device, operator.dtype)
    size = operator.jvp(v)[0].flatten(1).abs().amax(-1)
    size = torch.where(size > 0, size, 1.0)
    rows = (1 / size).reshape(-1, *[1] * len(operator.out_shape))
    solutions = solver.solve(Weighted(operator, rows, torch.ones_like(v[0])), tol, certify, seed)
    return [replace(s, value=s.value * c, upper=s.upper * c) for s, c in zip(solutions, size.tolist(), strict=True)]


@torch.no_grad()
def _attained(operator: Operator, solutions: list[Solution]) -> tuple[list[float], Tensor]:
    """`|J v|/|v|` for the directions `v`, short of float64 less the error that products may have; and `J v`."""
    v = torch.stack([s.direction for s in solutions])[None].to(operator.device, operator.dtype)
    images = operator.jvp(v)
    image = images.flatten(2)
    size = image.abs().amax(-1, keepdim=True)  # taken out, so that squares stay in range
    size = torch.where(size > 0, size, 1.0)
    exact = 1.0 if operator.dtype == torch.float64 else 1 - operator.noise
    lengths = (image / size).norm(dim=-1) / v.flatten(2).norm(dim=-1) * size[..., 0]
    return (exact * lengths[0].double()).tolist(), images[0]


def _uppers(solutions: list[Solution], lowers: list[float], noise: float, precise: Operator) -> tuple[list[float], list[bool]]:
    """Upper ends widened by what rounding explains, and which of them are certain.

    Where the certificate leaves an interval wide, the deterministic bound at a point stands in if it is smaller.
    """
    likely = [
        max(low, s.upper * (1 + noise + 2 * (abs(s.value - low) / low if low else 0.0)))
        for s, low in zip(solutions, lowers, strict=True)
    ]
    loose = any(up > _LOOSE * low for up, low in zip(likely, lowers, strict=True))
    bound = operator_bound(precise) if loose else None
    sure = [math.inf] * len(likely) if bound is None else bound.tolist()
    uppers = [max(low, min(a, b)) for low, a, b in zip(lowers, likely, sure, strict=True)]
    return uppers, [b < a for a, b in zip(likely, sure, strict=True)]


def _with_splitting(moved: Estimate, operator: Operator, measure: Measure, options: Options) -> Estimate:
    """The larger of moving atoms and of splitting one, Theorem 5.2. Directions are displacements of length one in `L²(μ)`."""
    both = of_blocks(moved, operator, measure, above=moved.lower)
    best = both.split if float(both.norms.max()) > moved.lower else moved
    upper, status = max(best.lower, moved.upper, both.split.upper), moved.status
    if status != "dense" or both.split.confidence < 1:
        status = _status(status != "step limit", best.lower, upper, options)
    return replace(
        moved,
        lower=best.lower,
        upper=upper,
        confidence=both.confidence,
        status=status,
        direction=best.direction,
        split=best.split,
    )


def _status(settled: bool, lower: float, upper: float, options: Options) -> Status:
    if upper <= lower * (1 + (options.tol if options.certify is None else options.certify)):
        return "certified"
    return "converged" if settled and options.certify is None else "step limit"
