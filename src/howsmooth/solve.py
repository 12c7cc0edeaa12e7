"""The norm of a Jacobian from a map and an input: choose a precision and a solver, solve, evaluate the value, and put both
ends beside it. Everything the package says of a constant comes through here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.measures.measure import Measure
from howsmooth.program.at_input import Function, JacobianAt, jacobian_at, jacobian_on
from howsmooth.settings import number, seed_of, shown, whole
from howsmooth.spectral import (
    AttainedValues,
    DenseSVD,
    Estimate,
    Estimates,
    Gain,
    GaussianProbes,
    GolubKahan,
    Solution,
    Solver,
    Spectrum,
    Status,
    attained_values,
    dense_gains,
    narrow,
    probed_gains,
    small,
    width_of_run,
)
from howsmooth.spectral.operator import Operator, Restricted, Rounded, Weighted, drawn, stream, unit_rows
from howsmooth.theory.at_point.table import operator_bound
from howsmooth.theory.splitting import of_blocks

_LOOSE = 5.0  # upper/lower past which a deterministic bound may do better
_APART = 0.1  # share of the accuracy asked for that two precisions of a function may differ by
_MODERATE = 1e8  # squares of products between its inverse and this leave float32 no trouble
BLIND = "rounding errors that do not depend on the random start"
SMALL_ERRORS = "rounding errors that are small beside the product they are made in"


@final
@dataclass(frozen=True)
class Options:
    """What a constant is to be: how exact, from which start, by which solver.

    tol: relative accuracy of `value`.  certify: go on until `upper/lower ≤ 1 + certify`.  seed: of the random start; by
    default made from the input and the output, so that no map can be built against it and a run repeats.
    solver: `GolubKahan(...)` or `DenseSVD()`; by default dense where input and output have at most 256 entries.
    tokens: positions that may move, in order; all by default.  gain: probes that the mean gain is estimated with, beside the
    constant; none by default.  k: how many of the largest singular values, as a `Spectrum`; the largest alone by default.
    """

    tol: float = 1e-3
    certify: float | None = None
    seed: int | None = None
    solver: Solver | None = None
    tokens: tuple[int, ...] | None = None
    gain: GaussianProbes | None = None
    k: int | None = None

    def __post_init__(self):
        checked = {"tol": number(self.tol, "0 < tol < 1", "the default is 1e-3", above=0, below=1)}
        if self.certify is not None:
            checked["certify"] = number(self.certify, "certify > 0", "0.02 asks for an interval of 2 %", above=0)
        if self.seed is not None:
            checked["seed"] = seed_of(self.seed)
        if self.k is not None:
            checked["k"] = whole(self.k, "a whole number k ≥ 1 of singular values", "k=8 is usual", least=1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        solves = callable(getattr(self.solver, "solve", None)) and not isinstance(self.solver, type | Tensor)
        if self.solver is not None and not solves:
            raise BadInputError(f"expected GolubKahan(...) or DenseSVD() as solver, got {shown(self.solver)}; or leave it out")

    def resolved_by(self, operator: Operator) -> bool:
        """Whether products of this precision carry the digits that are asked for."""
        return self.tol >= operator.noise and (self.certify is None or self.certify >= 8 * operator.noise)


class Solved(NamedTuple):
    """One constant, the operator (of a batch of one) that its value was evaluated with, `J v` of its direction `v`, and the
    gain and the spectrum, if wanted."""

    estimate: Estimate
    operator: Operator
    image: Tensor
    gain: Gain | None = None
    spectrum: Spectrum | None = None


class SolvedBatch(NamedTuple):
    """Constants of a batch, their operators in one, `J v` of their directions, (batch, …); gains and spectra, if
    wanted."""

    estimates: Estimates
    operator: Operator
    images: Tensor
    gains: tuple[Gain, ...] | None = None
    spectra: tuple[Spectrum, ...] | None = None

    def of(self, item: int) -> Solved:
        """What is known of one input; its operator is that of all."""
        gain = None if self.gains is None else self.gains[item]
        spectrum = None if self.spectra is None else self.spectra[item]
        return Solved(self.estimates[item], self.operator, self.images[item], gain, spectrum)


def solve(f: Function, x: Tensor | Measure, options: Options) -> Solved:
    """The constant of `f` at one input.

    f: a map of this package for tokens (n, d) or a `Measure`; any torch function of one tensor, whatever its shape.
    """
    if isinstance(x, Measure):
        moved, operator, image, *_ = solve_moving(f, x, options)
        return Solved(_with_splitting(moved, operator, x, options), operator, image)
    return _solve(jacobian_at(f, x, batched=False), options).of(0)


def solve_batch(f: Function, xs: Tensor, options: Options) -> SolvedBatch:
    """The constants at the inputs along the first axis of `xs`, in lock step."""
    return _solve(jacobian_at(f, xs, batched=True), options)


def solve_moving(f: Function, measure: Measure, options: Options) -> Solved:
    """`‖D^½ J D^{−½}‖`, what moving whole atoms can do, and the operator it is the norm of, in float64."""
    estimates, operator, images, *_ = _solve(jacobian_on(f, measure), options)
    direction = estimates[0].direction.double()
    root = measure.mass.sqrt()[:, None].to(direction.device)
    return Solved(replace(estimates[0], direction=direction / root), operator, images[0])


def linear(f: Function, x: Tensor) -> Operator:
    """The Jacobian of `f` at one input, in the precision of `x` and `f`, as an operator with a batch of one."""
    return jacobian_at(f, x, batched=False).operator


def _solve(given: JacobianAt, options: Options, width: float | None = None) -> SolvedBatch:
    """The lower and the upper end for every input.  width: of the run's intervals, where rounding needs a part of `certify`."""
    at = given if options.tokens is None else given.restricted(options.tokens)
    run = options if width is None else replace(options, certify=width)
    most = min(at.operator.in_size, at.operator.out_size)
    if options.k is not None and options.k > most:
        raise BadInputError(
            f"expected k from 1 to {most}, as many singular values as there are, got {options.k}; ask for fewer"
        )
    operator = _finer(at.operator, run.resolved_by)
    solver = options.solver or (DenseSVD() if small(operator) else GolubKahan())
    dense, rigorous = isinstance(solver, DenseSVD), isinstance(solver, GolubKahan) and solver.rigorous
    seeds = at.seeds(options.seed)
    working = not dense and not rigorous and run.resolved_by(operator)
    solutions = _in_range(solver, operator, run, seeds) if working else None
    precise = (at.precise() or operator) if rigorous else _precise(operator, at)
    apart = [0.0] * len(seeds)
    if solutions is not None and at.foreign and precise is not operator:
        apart = _apart(operator, precise, seeds)
        allowed = _APART * (options.tol if options.certify is None else options.certify)
        if not all(a <= allowed * s.value for a, s in zip(apart, solutions, strict=True)):
            solutions, apart = None, [0.0] * len(seeds)  # two functions: the float64 one is meant
    if solutions is not None and options.k is not None and precise is not operator and precise.dtype == torch.float64:
        ends = [(torch.tensor(s.values), torch.tensor(_widened(s, s.values, operator.noise, 0.0))) for s in solutions]
        if not all(narrow(values, values, uppers, options.certify) for values, uppers in ends):
            solutions, apart = None, [0.0] * len(seeds)  # rounding hides the small ones
    if solutions is None:
        operator, solutions = precise, _in_double(solver, precise, run, seeds)
    unlike = apart
    found = _attained(precise, solutions) if (options.k or 1) == 1 else attained_values(precise, solutions)
    if rigorous and options.certify is None:
        _check_proved(solutions, found.lowers[:, 0].tolist(), options.tol)
    noise = 0.0 if dense or rigorous else operator.noise
    if not dense and not rigorous:  # whose upper ends count the rounding of all products
        apart = apart if found.errors is None else [a + error for a, error in zip(apart, found.errors, strict=True)]
    uppers, certain = _uppers(solutions, found.values.tolist(), noise, apart, precise)
    if (options.k or 1) > 1 and options.certify is not None and width is None and not dense:
        width = width_of_run(solutions, found, torch.tensor(uppers, dtype=torch.float64), options.certify)
        if width is not None:
            return _solve(given, options, width)
    delta = solver.delta if isinstance(solver, GolubKahan) else 0.0
    estimates = Estimates(
        Estimate(
            value=float(found.values[i, 0]),
            lower=float(found.lowers[i, 0]),
            upper=uppers[i][0],
            confidence=1.0 if certain[i] else 1 - delta,
            status="dense" if dense else _status(s.converged, float(found.lowers[i, 0]), uppers[i][0], options),
            direction=_everywhere(operator, found.right[0, i]).reshape(at.shape),
            steps=s.steps,
            precision=str(precise.dtype).removeprefix("torch."),
            tol=options.tol,
            certify=options.certify,
            seed=seeds[i],
            noise=noise,
            assumes=assumed(not (dense or rigorous or certain[i]), found.errors is not None),
        )
        for i, s in enumerate(solutions)
    )
    own = precise.operator if isinstance(precise, Restricted) else precise
    gains = None if options.gain is None else _gains(options.gain, operator, estimates, solutions, unlike)
    spectra = None if options.k is None else _spectra(operator, at, options, estimates, solutions, found, uppers)
    return SolvedBatch(estimates, own, found.images, gains, spectra)


def _spectra(
    operator: Operator,
    at: JacobianAt,
    options: Options,
    estimates: Estimates,
    solutions: list[Solution],
    found: AttainedValues,
    uppers: list[list[float]],
) -> tuple[Spectrum, ...]:
    """The largest singular values of a batch, beside the largest ones alone."""
    spectra = []
    for i, (estimate, solution) in enumerate(zip(estimates, solutions, strict=True)):
        values, lower, upper = found.values[i], found.lowers[i], torch.tensor(uppers[i], dtype=torch.float64)
        status: Status = "converged" if solution.converged and options.certify is None else "step limit"
        if estimate.status == "dense":
            status = "dense"
        elif narrow(values, lower, upper, options.tol if options.certify is None else options.certify):
            status = "certified"
        left, right = found.left[:, i], torch.stack([_everywhere(operator, v) for v in found.right[:, i]])
        output = at.outputs[i]
        left = left.reshape(len(left), *output.shape) if left[0].numel() == output.numel() else left
        spectra.append(Spectrum(values, lower, upper, left, right.reshape(len(right), *at.shape), status, estimate))
    return tuple(spectra)


def _gains(
    probes: GaussianProbes, operator: Operator, estimates: Estimates, solutions: list[Solution], unlike: list[float]
) -> tuple[Gain, ...]:
    """Gains beside the constants of a batch, from their own spectra where those are at hand."""
    if estimates[0].status == "dense":
        return dense_gains(operator)
    return probed_gains(operator, estimates, torch.stack([s.direction for s in solutions]), probes, unlike)


def _everywhere(operator: Operator, direction: Tensor) -> Tensor:
    """A direction of all tokens, zero for those that are frozen."""
    return operator.spread(direction) if isinstance(operator, Restricted) else direction


def _finer(operator: Operator, enough: Callable[[Operator], bool]) -> Operator:
    """The cheapest products that are exact enough, or the finest there are short of float64."""
    while not enough(operator) and (refined := operator.refined()) is not None:
        operator = refined
    return operator


def _precise(operator: Operator, at: JacobianAt) -> Operator:
    """What `value` is evaluated with: float64, or the finest products short of it where float64 is out of proportion."""
    if operator.dtype == torch.float64:
        return operator
    return _finer(operator, lambda _: False) if operator.heavy else at.precise() or operator


@torch.no_grad()
def _apart(operator: Operator, precise: Operator, seeds: Sequence[int]) -> list[float]:
    """How far the Jacobians of a function in two precisions are apart in Frobenius norm, as a random probe each way shows."""
    apart = torch.zeros(operator.batch, dtype=torch.float64)
    for shape, name in ((operator.in_shape, "jvp"), (operator.out_shape, "vjp")):
        probe = torch.stack([drawn(shape, stream(s, f"probe {name}", operator.device)) for s in seeds])[None]
        coarse, fine = (getattr(J, name)(probe.to(J.device, J.dtype))[0].double().flatten(1) for J in (operator, precise))
        apart = apart.maximum((fine - coarse).norm(dim=-1).cpu())
    return [a if math.isfinite(a) else math.inf for a in apart.tolist()]


def _run(solver: Solver, operator: Operator, options: Options, seeds: Sequence[int]) -> list[Solution]:
    """A solver's answer, of one value unless several are wanted."""
    if options.k in (None, 1):
        return solver.solve(operator, options.tol, options.certify, seeds)
    return solver.solve(operator, options.tol, options.certify, seeds, k=options.k)


def _in_range(solver: Solver, operator: Operator, options: Options, seeds: Sequence[int]) -> list[Solution] | None:
    """Solutions in the working precision; nothing where fourth powers of the norm leave its range."""
    safe = torch.finfo(operator.dtype).max ** 0.23
    try:
        solutions = _run(solver, operator, options, seeds)
    except NoConvergenceError:
        return None
    short = operator.dtype != torch.float64  # where small products were squared, a value may be too small to be seen to be
    fits = [1 / safe < s.value < safe and (not short or 1 / _MODERATE < s.energy < _MODERATE) for s in solutions]
    return solutions if all(fits) else None


def _in_double(solver: Solver, operator: Operator, options: Options, seeds: Sequence[int]) -> list[Solution]:
    """Solutions of the precise maps; for products, of the maps divided by a size they attain, whatever that is."""
    tol, certify = options.tol, options.certify
    if not options.resolved_by(operator):
        raise BadInputError(
            f"expected tol ≥ {operator.noise:.1e} and certify ≥ {8 * operator.noise:.1e}, got tol={tol}, "
            f"certify={certify}; the products of this map at this x carry no more digits in {operator.dtype}"
        )
    if isinstance(solver, DenseSVD):
        return _run(solver, operator, options, seeds)
    v = torch.stack([drawn(operator.in_shape, stream(seed, "size", operator.device)) for seed in seeds])[None]
    v = v.to(operator.device, operator.dtype)
    size = operator.jvp(v)[0].flatten(1).abs().amax(-1)
    size = torch.where(size > 0, size, 1.0)
    if isinstance(solver, GolubKahan) and solver.rigorous:  # divided only if need be, and by a power of two, without rounding
        if bool(((size > 1 / _MODERATE) & (size < _MODERATE)).all()):
            return _run(solver, operator, options, seeds)
        size = size.log2().round().exp2()
    rows = (1 / size).reshape(-1, *[1] * len(operator.out_shape))
    solutions = _run(solver, Weighted(operator, rows, torch.ones_like(v[0])), options, seeds)
    return [s.scaled(c) for s, c in zip(solutions, size.tolist(), strict=True)]


def assumed(blind: bool, proved: bool) -> str:
    """What an interval assumes of rounding.  blind: for its upper end.  proved: nothing for its lower one."""
    return "; ".join([BLIND] * blind + [SMALL_ERRORS] * (not proved))


@torch.no_grad()
def _attained(operator: Operator, solutions: list[Solution]) -> AttainedValues:
    """`|J v|/|v|` for directions `v` as evaluated, and what is left of it whatever rounding did.

    Where nothing is proved of rounding, both numbers are less the noise of a product, no more.
    """
    right = torch.stack([s.direction for s in solutions])[None]
    v = right.to(operator.device, operator.dtype)
    product = operator.rounded(Rounded.exact(v))
    image = product.vector.flatten(2)
    size = image.abs().amax(-1, keepdim=True)  # taken out, so that squares stay in range
    size = torch.where(size > 0, size, 1.0)
    left = unit_rows(image / size).reshape(product.vector.shape)
    lengths = (image / size).norm(dim=-1) / v.flatten(2).norm(dim=-1) * size[..., 0]
    values = ((1 - operator.noise) * lengths[0].double()).clamp_min(0.0)
    if product.off is None:
        values = values.cpu()[:, None]
        return AttainedValues(values, values, None, product.vector[0], left, right)

    def length(t: Tensor) -> Tensor:
        """Of rows first, then of what they make, so that sums are short."""
        return t.double().norm(dim=-1).flatten(2).norm(dim=-1)[0]

    sums = 4 * (sum(operator.in_shape) + sum(operator.out_shape)) * torch.finfo(torch.float64).eps
    errors = (1 + sums) * (product.off.flatten(2).norm(dim=-1)[0] + torch.finfo(torch.float64).tiny) / length(v)
    lowers = (1 - sums) * length(product.vector / size[..., None]) * size[0, :, 0].double() / length(v) - errors
    lowers = torch.where(lowers > 0, lowers, 0.0).minimum(values)  # also where overflow leaves no number
    errors = torch.where(errors.isfinite(), errors, torch.inf)
    return AttainedValues(values.cpu()[:, None], lowers.cpu()[:, None], errors.tolist(), product.vector[0], left, right)


def _check_proved(solutions: list[Solution], lowers: list[float], tol: float) -> None:
    """Refuse a rigorous answer whose lower end is further below what was found than `tol`: rounding is proved no smaller."""
    short = max((1 - low / s.value for s, low in zip(solutions, lowers, strict=True) if s.value > 0), default=0.0)
    if short > tol:
        raise BadInputError(
            f"expected tol ≥ {short:.1e} for rigorous=True, got tol={tol}; no more digits of this map at this x are proved, "
            "leave rigorous out or make its logits and biases smaller"
        )


def _uppers(
    solutions: list[Solution], values: list[list[float]], noise: float, apart: list[float], precise: Operator
) -> tuple[list[list[float]], list[bool]]:
    """Upper ends widened by what rounding explains and by what maps are apart, and whether those of the largest are certain.

    Where the certificate leaves its interval wide, the deterministic bound at a point stands in if it is smaller.
    """
    likely = []
    for s, own, more in zip(solutions, values, apart, strict=True):
        ends = [max(v, end) for v, end in zip(own, _widened(s, own, noise, more), strict=True)]
        likely.append([end if end >= v else math.inf for v, end in zip(own, ends, strict=True)])  # nan is no bound
    loose = any(ends[0] > _LOOSE * own[0] for ends, own in zip(likely, values, strict=True))
    bound = operator_bound(precise.operator if isinstance(precise, Restricted) else precise) if loose else None
    sure = [math.inf] * len(likely) if bound is None else bound.tolist()
    uppers = [
        [max(v, min(end, most)) for v, end in zip(own, ends, strict=True)]
        for own, ends, most in zip(values, likely, sure, strict=True)
    ]
    return uppers, [most < ends[0] for ends, most in zip(likely, sure, strict=True)]


def _widened(s: Solution, values: Sequence[float], noise: float, more: float) -> list[float]:
    """Upper ends of a run with what rounding may have taken off them.  values: as evaluated again.

    Products with `JᵀJ` are off by a share of its norm, which counts for more in the root of a smaller eigenvalue.
    """
    if len(values) == 1:
        (value,) = values
        return [s.upper * (1 + noise + (2 * abs(s.value - value) / value if noise and value else 0.0)) + more]
    hidden, off = math.sqrt(noise) * s.value, noise * s.value
    ends = zip(s.uppers, s.values, values, strict=True)
    return [math.hypot(end, hidden) + off + (2 * abs(run - v) if noise else 0.0) + more for end, run, v in ends]


def _with_splitting(moved: Estimate, operator: Operator, measure: Measure, options: Options) -> Estimate:
    """The larger of moving atoms and of splitting one, Theorem 5.2. Directions are displacements of length one in `L²(μ)`."""
    both = of_blocks(moved, operator, measure, above=moved.value)
    best = both.split if float(both.norms.max()) > moved.value else moved
    lower, status = max(moved.lower, both.split.lower), moved.status
    upper = max(best.value, moved.upper, both.split.upper)
    if status != "dense" or both.split.confidence < 1:
        status = _status(status != "step limit", lower, upper, options)
    return replace(
        moved,
        value=best.value,
        lower=lower,
        upper=upper,
        confidence=both.confidence,
        status=status,
        direction=best.direction,
        split=best.split,
    )


def _status(converged: bool, lower: float, upper: float, options: Options) -> Status:
    if upper <= lower * (1 + (options.tol if options.certify is None else options.certify)):
        return "certified"
    return "converged" if converged and options.certify is None else "step limit"
