"""The public questions: how smooth is a map here, what does theory allow, does splitting pay, where is it worst?"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict, Unpack, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from howsmooth.errors import BadInputError, HowSmoothError
from howsmooth.kernels.kinds.kind import check_softmax
from howsmooth.maps.attention import Attention, as_map
from howsmooth.maps.base import Map, check_input, one_sequence
from howsmooth.maps.products import Jacobian
from howsmooth.measures.measure import Measure
from howsmooth.program.pieces import Pieces, pieces_of
from howsmooth.search import Ball, TokenSet, WorstCase, find_near, find_worst
from howsmooth.settings import Per, Positions, moving, shown
from howsmooth.solve import SMALL_ERRORS, Options, assumed, linear, solve, solve_batch, solve_moving
from howsmooth.spectral import Estimate, Estimates, Gain, GaussianProbes, GolubKahan, Solver, Spectrum
from howsmooth.theory.around import Around, AroundAttention, Certified, Neighbourhood, around_graph
from howsmooth.theory.at_point.table import point_bounds
from howsmooth.theory.bound import Bounds
from howsmooth.theory.over_ball.table import ball_bounds
from howsmooth.theory.splitting import Splitting, halves, of_blocks, of_halves

_THOROUGH = 2**15  # entries of an input past which top pairs are treated apart on request alone: they cost many solves


class HowSolved(TypedDict, total=False):
    """What `lipschitz` takes by name, beside `k`."""

    within: float | None
    per: Per
    tokens: Positions | None
    steps: int | None
    tol: float
    certify: float | None
    seed: int | None
    solver: Solver | None


@overload
def lipschitz(
    f: Map | Callable[[Tensor], Tensor], x: Tensor | Measure, *, k: None = ..., **how: Unpack[HowSolved]
) -> Estimate: ...
@overload
def lipschitz(f: Map | Callable[[Tensor], Tensor], x: Tensor | Measure, *, k: int, **how: Unpack[HowSolved]) -> Spectrum: ...
def lipschitz(
    f: Map | Callable[[Tensor], Tensor],
    x: Tensor | Measure,
    *,
    k: int | None = None,
    within: float | None = None,
    per: Per = "token",
    tokens: Positions | None = None,
    steps: int | None = None,
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int | None = None,
    solver: Solver | None = None,
) -> Estimate | Spectrum:
    """The local Lipschitz constant `‖D_x f‖₂` of `f` at `x`, with a lower and an upper bound; or the largest one near `x`.

    Work is done in the precision of `x` and `f`, `value` is evaluated again in float64, and `lower` is what is proved of it
    whatever rounding did. Where the certificate leaves the interval wide, the deterministic bound at a point stands in if it
    is smaller, and `confidence` is 1.

    Args:
        f: An attention layer, a norm, a composition of them, or any torch function of one tensor. `nn.MultiheadAttention`
            is self-attention.
        x: Tokens (n, d); for a function, one input of any shape; or a `Measure`, at which the local Wasserstein-2 constant
            is measured: that of moving atoms and of splitting them (docs/explanation/meanfield.md, Theorem 5.2).
            `lipschitz_batch` takes many inputs.
        k: The `k` largest singular values, with an interval and two directions each, as a `Spectrum`.
        within: The largest constant over all inputs that are this close to `x`, for attention layers, norms and
            compositions of them: `upper` is certified, `value` attained at `point` (docs/explanation/around.md).
        per: "token", every token moves at most so far, or "sequence", all of them together (Frobenius norm).
        tokens: Positions that may move, in the input and in its perturbations; all by default.
        steps: With `within`, measurements of each start of the search for `value`.
        tol: Relative accuracy of `value`.
        certify: Go on until `upper/lower ≤ 1 + certify`. With `within`, large inputs too get the bound that treats the top
            singular pairs apart; it costs as much as some hundred solves.
        seed: Of the random start; by default made from `x` and `f(x)`, so that no map can be built against it and a run
            repeats.
        solver: `GolubKahan(...)` or `DenseSVD()`; by default dense where `x` and `f(x)` have at most 256 entries.

    Returns:
        The constant with both bounds, the direction that attains it, and how it was found; with `k`, several of them. It is
        a number: `float(lipschitz(f, x))`.

    >>> from howsmooth import Attention
    >>> identity = Attention.from_matrices(torch.zeros(2, 2), torch.eye(2))
    >>> round(lipschitz(identity, torch.zeros(3, 2)).value, 6)  # uniform attention: the mean of three tokens
    1.0
    >>> round(lipschitz(identity, torch.zeros(3, 2), within=0.5).upper, 6)  # the same everywhere
    1.0
    """
    f = as_map(f)
    if isinstance(f, Map) and isinstance(x, Tensor) and x.ndim == 3:
        raise BadInputError(
            f"expected one input (n, d), got a batch of shape {tuple(x.shape)}; call lipschitz_batch(f, x), or pass x[0]"
        )
    if isinstance(x, Measure) and (within is not None or tokens is not None):
        raise BadInputError("expected tokens (n, d) for within and tokens, got a measure; pass its points")
    if within is None and (per != "token" or steps is not None):
        raise BadInputError("expected within=r beside per and steps, got none; they say how an input may move near x")
    if k is not None and (isinstance(x, Measure) or within is not None):
        raise BadInputError("expected k at one input, got it beside within or a measure; leave k out there")
    free = None if tokens is None or isinstance(x, Measure) else moving(tokens, _length(x))
    options = Options(tol, certify, seed, solver, free, k=k)
    if within is None or isinstance(x, Measure):
        solved = solve(f, x, options)
        return solved.estimate if solved.spectrum is None else solved.spectrum
    return solve_near(f, Neighbourhood.of(x, within, per, free), free, steps, options)


def _length(x: Tensor) -> int:
    """The number of tokens of one input."""
    check_input(x)
    return 1 if x.ndim == 0 else len(x)


def solve_near(
    f: Map | Callable[[Tensor], Tensor],
    area: Neighbourhood,
    tokens: tuple[int, ...] | None,
    steps: int | None,
    options: Options,
) -> Estimate:
    """The largest constant over a neighbourhood."""
    known = check_structure(f, area.point)
    assert isinstance(f, Map)
    short = area.point.to(f.dtype)  # as short as the map works, where the input was that
    here = solve(f, short if torch.equal(short.double(), area.point) else area.point, options).estimate
    if area.far == 0:
        return replace(here, point=area.point)
    delta = options.solver.delta if isinstance(options.solver, GolubKahan) else GolubKahan().delta
    norm = here.upper if options.certify is None and area.point.numel() > _THOROUGH else None
    bound = bound_around(known, area, tokens=tokens, norm=norm, delta=delta, seed=here.seed)
    found = find_near(f, area, tokens, steps, options, here)
    lower = found.estimate.lower
    upper = max(found.estimate.value, bound.upper_end(lower, found.estimate.noise))
    narrow = upper <= lower * (1 + (options.tol if options.certify is None else options.certify))
    return replace(
        found.estimate,
        upper=upper,
        confidence=bound.confidence if norm is None else min(bound.confidence, here.confidence),
        status="certified" if narrow else "converged" if found.converged else "step limit",
        point=found.point,
        around=bound.reason,
        assumes=assumed(bound.confidence < 1, SMALL_ERRORS not in found.estimate.assumes),
    )


def bound_around(
    known: Attention | Pieces,
    area: Neighbourhood,
    *,
    tokens: tuple[int, ...] | None = None,
    norm: float | None = None,
    delta: float = 1e-6,
    seed: int = 0,
) -> Around:
    """Bounds on a map whose structure is known. Arguments as for `AroundAttention`."""
    if isinstance(known, Attention):
        return AroundAttention(known, area.point, tokens=tokens, norm=norm, delta=delta, seed=seed).within(area)
    return around_graph(Certified(known, area.point, tokens, delta, seed, norm), area)


def check_structure(f: object, x: Tensor) -> Attention | Pieces:
    """A layer, or the graph of a map at an input of that shape; maps without a bound around an input are refused."""
    if isinstance(f, Attention):
        check_softmax(f.kind, "a bound around an input")
        return f
    graph = pieces_of(f, tuple(x.shape)) if isinstance(f, Map) else None
    if graph is None:
        raise BadInputError(
            f"expected a layer, a norm or a composition of them for a bound around an input, got {type(f).__name__}; "
            "load(module).measure(within=r) knows blocks of models, worst_case(f, over=BallAround(x, r)) searches near x"
        )
    for node in graph.nodes:
        if isinstance(node.opaque, Attention):
            check_softmax(node.opaque.kind, "a bound around an input")
    return graph


def lipschitz_batch(
    f: Map | Callable[[Tensor], Tensor],
    xs: Tensor,
    *,
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int | None = None,
    solver: Solver | None = None,
) -> Estimates:
    """The constants of `f` at many inputs, solved together.

    Args:
        f: As for `lipschitz`. A function must treat the items of its first axis apart, as a module with a batch axis does.
        xs: Inputs, (batch, …).
        tol: As for `lipschitz`.
        certify: As for `lipschitz`.
        seed: As for `lipschitz`.
        solver: As for `lipschitz`.

    Returns:
        A sequence of estimates, whose `value`, `lower` and `upper` are tensors.

    >>> from howsmooth import Attention
    >>> identity = Attention.from_matrices(torch.zeros(2, 2), torch.eye(2))
    >>> lipschitz_batch(identity, torch.zeros(4, 3, 2)).value.shape
    torch.Size([4])
    """
    options = Options(tol, certify, seed, solver)
    if isinstance(xs, Measure):
        raise BadInputError("expected a tensor of inputs, got a measure; measure them in a loop with lipschitz")
    return solve_batch(as_map(f), xs, options).estimates


def gain(
    f: Map | Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    probes: int = 16,
    confidence: float = 0.95,
    tokens: Positions | None = None,
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int | None = None,
    solver: Solver | None = None,
) -> Gain:
    """The mean gain `‖D_x f‖_F/√N` of `f` at `x`: how much a random change of all `N` entries grows, as a root mean square.

    The local Lipschitz constant is what the worst change grows. Many tools report a mean gain under that name; the two differ
    by the factor `√(N/stable_rank)`.

    Args:
        f: As for `lipschitz`.
        x: One input.
        probes: Gaussian vectors, multiplied as a block; the error falls like `1/√probes`.
        confidence: Of the interval, which also takes the constant's upper end (docs/explanation/theory.md, Proposition 2.9).
        tokens: Positions that may move, as for `lipschitz`.
        tol: Of the constant.
        certify: Of the constant.
        seed: Of the constant's random start.
        solver: Of the constant. Where it decomposes the Jacobian the gain is exact, and has an effective rank.

    Returns:
        The gain with its interval, and over how many directions it spreads.

    >>> half = gain(lambda t: t / 2, torch.ones(6))
    >>> half.value, half.stable_rank, round(half.effective_rank, 6)
    (0.5, 6.0, 6.0)
    """
    if isinstance(x, Measure):
        raise BadInputError("expected one input as a tensor, got a measure; pass its points")
    free = None if tokens is None else moving(tokens, _length(x))
    found = solve(as_map(f), x, Options(tol, certify, seed, solver, free, GaussianProbes(probes, confidence))).gain
    assert found is not None
    return found


def jacobian(f: Map | Callable[[Tensor], Tensor], x: Tensor) -> Jacobian:
    """`D_x f` as a linear operator that is never formed: `J @ v`, `J.T @ u`, `J.shape`, `J.to_scipy()`, `J.dense()`.

    Args:
        f: As for `lipschitz`.
        x: One input.

    Returns:
        A linear map: `J @ v`, `J.T @ u`, `J.dense()`.

    >>> J = jacobian(lambda t: t**2, torch.tensor([1.0, 2.0, 3.0]))
    >>> J.shape, (J @ torch.ones(3)).tolist(), (J.T @ torch.ones(3)).tolist()
    ((3, 3), [2.0, 4.0, 6.0], [2.0, 4.0, 6.0])
    """
    if isinstance(x, Measure):
        raise BadInputError("expected one input as a tensor, got a measure; pass its points")
    return Jacobian(linear(as_map(f), x), x.shape)


def bounds(
    attn: Attention | nn.MultiheadAttention, x: Tensor | None = None, *, n: int | None = None, radius: float | None = None
) -> Bounds:
    """What theory says of a layer's Lipschitz constant.

    Give an input, or a number of tokens and a radius: two questions.

    Args:
        attn: A layer of weights, or `nn.MultiheadAttention` as self-attention.
        x: Tokens (n, d). The bounds are those at this input, beside the measured constant. Where `lipschitz` refuses the input,
            bounds stand alone and `where` says why.
        n: How many tokens. The bounds hold for all sequences of so many tokens in a ball.
        radius: Of that ball: no token is longer.

    Returns:
        A table of bounds, one row a theorem. A row whose assumptions fail says so and has no number.
    """
    attn = as_map(attn)
    if not isinstance(attn, Attention):
        raise BadInputError(f"expected an Attention layer, got {type(attn).__name__}; bounds need its weights")
    if x is not None:
        if n is not None or radius is not None:
            raise BadInputError(
                "expected either x, or n and radius, got both; ask for the point and the ball one after the other"
            )
        rows = point_bounds(attn, x)
        where = f"at an input of {x.shape[0]} tokens"
        try:
            return Bounds(tuple(rows), where, lipschitz(attn, x).value)
        except HowSmoothError as error:  # rows need no products
            return Bounds(tuple(rows), f"{where}, which is not measured: {error}")
    if n is None or radius is None:
        raise BadInputError(f"expected n and radius, or an input x, got n={shown(n)}, radius={shown(radius)}; give both")
    rows = ball_bounds(attn, n, radius)
    return Bounds(tuple(rows), f"over {n} tokens in the ball of radius {float(radius):g}")


def splitting(
    f: Map | Callable[[Tensor], Tensor],
    x: Float[Tensor, "n d"] | Measure,
    *,
    tol: float = 1e-3,
    certify: float | None = None,
    seed: int | None = None,
    solver: Solver | None = None,
) -> Splitting:
    """Does it pay to split a token into halves that move apart, or to move tokens whole? (docs/explanation/meanfield.md §5)

    For a map the blocks `S_i` are formed (Theorem 5.4); a function is evaluated on tokens written twice, where moving is the
    symmetric and splitting the antisymmetric part of the Jacobian (Proposition 5.7).

    Args:
        f: A map of this package, or any function of tokens (n, d) → (n, d_out) for every n that commutes with permutations.
        x: Tokens, or for a map a `Measure`, whose equal atoms are one. Equal tokens can part as they are.
        tol: As for `lipschitz`.
        certify: As for `lipschitz`.
        seed: As for `lipschitz`.
        solver: As for `lipschitz`.

    Returns:
        The constants of moving tokens and of splitting one, the token, and its direction.

    >>> from howsmooth import Attention
    >>> attn = Attention.from_matrices(-torch.eye(1).double(), torch.eye(1).double())
    >>> mu = Measure(torch.tensor([[0.0], [4.0]]), torch.tensor([15 / 16, 1 / 16]))  # little mass far out
    >>> splitting(attn, mu)
    splitting pays: token 0 split gives 0.9375, moving gives 0.258199, gain 3.631
    """
    f, options = as_map(f), Options(tol, certify, seed, solver)
    if isinstance(f, Map):
        if isinstance(x, Measure):
            mu = x.merge()
            moved, operator, *_ = solve_moving(f, mu, options)
        else:
            # atoms of one mass that keep their places, so that masks, biases and phases stay as they are
            mu = Measure.from_tokens(one_sequence(x))
            moved, operator, *_ = solve(f, mu.points, options)
            moved = replace(moved, direction=moved.direction.double() * len(mu) ** 0.5)
        return of_blocks(moved, operator, mu)
    if isinstance(x, Measure):
        raise BadInputError(f"expected a map of this package for a measure, got {type(f).__name__}; pass tokens to a function")
    if not callable(f):
        raise BadInputError(f"expected a map or a function of tokens, got {type(f).__name__}; pass a callable")
    together, apart, at = halves(f, one_sequence(x), seed or 0)
    moved = solve(together, at, options).estimate
    split, operator, *_ = solve(apart, torch.zeros_like(at), options)
    return of_halves(moved, split, operator)


def worst_case(
    f: Map | Callable[[Tensor], Tensor],
    n: int | None = None,
    radius: float | None = None,
    *,
    over: TokenSet | None = None,
    steps: int | None = None,
    restarts: int | None = None,
    certify: float = 0.02,
    seed: int = 0,
) -> WorstCase:
    """The largest local Lipschitz constant found over a set of inputs, with the input.

    Starts from configurations of the layer's heads, the same shaken, and random points; climbs `L` by its own gradient from all
    of them at once; certifies `L` at the best. It is a search: the constant over the set is at least `value`, and at most
    `bound`.

    Args:
        f: An attention layer, a composition of maps, or a function that treats a batch of inputs item by item.
        n: How many tokens.
        radius: Of the ball they lie in.
        over: Another set: `Ellipsoid(norm)` with `n`, or `BallAround(x, radius)` alone.
        steps: Measurements of every start; by default 100 where `n·d ≤ 256`, fewer above.
        restarts: Random starts; by default 32 where `n·d ≤ 256`, fewer above.
        certify: Of `L` at the best input, as for `lipschitz`.
        seed: Of the random starts.

    Returns:
        The worst tokens found, the certified constant there, and the best bound over the set.

    >>> from howsmooth import Attention
    >>> result = worst_case(Attention.from_matrices(-torch.eye(1), torch.eye(1)), n=4, radius=1.0, steps=20)
    >>> print(f"{result.value:.3f}, {result.ratio:.2f} of {result.bound.id}")
    2.208, 0.58 of B7
    """
    if (radius is None) == (over is None):
        raise BadInputError("expected either radius or over, got both or neither; radius=4.0 asks for the ball of radius 4")
    space = Ball(radius) if radius is not None else over
    if not isinstance(space, TokenSet):
        raise BadInputError(f"expected a Ball, Ellipsoid or BallAround, got {type(space).__name__}; import them from howsmooth")
    return find_worst(as_map(f), space, n, steps, restarts, certify, seed)
