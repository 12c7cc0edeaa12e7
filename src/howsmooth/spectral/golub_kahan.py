"""The largest singular value from products alone: Golub–Kahan from a random start.

One-sided form (Simon & Zha 2000): only the right vectors `q` are kept and reorthogonalised, so `k` steps keep `k` vectors.
With `M = JᵀJ` and `Q = (q_1 … q_k)`, `T = QᵀMQ` is tridiagonal, `α` on its diagonal and `β` beside it; its eigenvalues
are the squares of Golub–Kahan's singular values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.settings import flag, number, whole
from howsmooth.spectral import certificate
from howsmooth.spectral.basis import KrylovBasis
from howsmooth.spectral.estimate import Solution
from howsmooth.spectral.operator import Operator, stream, unit_rows
from howsmooth.spectral.spaces import CONVERGED_RISK, RISK, Spaces

_LONG = 2**24  # numbers past which a random vector is drawn where it is needed
_MARGIN = 0.97  # chosen: 3 % of `certify` is room for the rounding that widens the reported interval


class _Doubt(NamedTuple):
    """A run has converged when a value larger by a share `largest_error(tol)` needed a start of probability `risk`."""

    reach: float
    most: float
    risk: float

    def largest_error(self, tol: float) -> float:
        """`reach · tol`, but no more than `most` or `tol`: what is hidden below it may be that far off."""
        return min(self.reach * tol, max(self.most, tol))


# Chosen by experiment, so that `value` is within `tol` of the norm on all but two of a thousand layers (benchmarks: settle).
_CLEAR = _Doubt(20, 0.05, 0.05)  # the top direction is clearly the one that was guessed
_PLAIN = _Doubt(20, 0.02, 0.05)  # it is the one that was guessed, or its Ritz value stands alone
_OTHERWISE = _Doubt(3, 0.01, 0.05)
_ALONE = 0.2  # gap to the next Ritz value, as a share of the top one
_GUESS = 20.0  # length of a guess, in units of what a random start has along any direction: enough to lead, no more than that
# entry of the top Ritz vector along the start, as a share of the guess's own, from which it is the one that was guessed, and
# clearly so; chance gives others a twentieth
_SHARE, _CLEARLY = 0.5, 0.7


@final
@dataclass(frozen=True)
class GolubKahan:
    """Golub–Kahan with full reorthogonalisation.

    Attributes:
        max_steps: Products with `J` and with `Jᵀ`.
        delta: The upper end's failure probability.
        rigorous: Work in float64 and count every rounding error, so that `upper` assumes nothing about them (Theorem 2.5).
            For maps of this package, whose rounding is bounded in advance.
    """

    max_steps: int = 300
    delta: float = 1e-6
    rigorous: bool = False

    def __post_init__(self):
        most = "the default is 300"
        object.__setattr__(self, "max_steps", whole(self.max_steps, "a whole number max_steps ≥ 1", most, least=1))
        object.__setattr__(self, "delta", number(self.delta, "0 < delta < 1", "the default is 1e-6", above=0, below=1))
        object.__setattr__(self, "rigorous", flag(self.rigorous, "rigorous"))

    def solve(
        self,
        operator: Operator,
        tol: float,
        certify: float | None,
        seeds: Sequence[int],
        start: Tensor | None = None,
        *,
        k: int = 1,
    ) -> list[Solution]:
        """The `k` top singular pairs of every map of a batch; each stops by itself. start: in place of its guess.

        One pair is found in lock step. Several take one Krylov space after another (`Spaces`), map by map.
        """
        if k == 1:
            run = _Iteration(self, operator, tol, certify, seeds)
            run.start = start
            return run.finish()
        if self.rigorous:
            raise BadInputError("expected k=1 for rigorous=True, got more; rounding is counted in full for one value alone")
        if self.max_steps <= k:
            raise BadInputError(f"expected max_steps above k={k}, got {self.max_steps}; the default is 300")
        alone = (operator.select(torch.tensor([i], device=operator.device)) for i in range(operator.batch))
        items = [operator] if operator.batch == 1 else alone
        return [_Iteration(self, J, tol, certify, [seed], k).finish()[0] for J, seed in zip(items, seeds, strict=True)]


class _Iteration:
    """One batch on its way. Vectors stay on the operator's device, (batch, N); numbers are on the host, in float64."""

    def __init__(
        self, solver: GolubKahan, operator: Operator, tol: float, certify: float | None, seeds: Sequence[int], k: int = 1
    ):
        self.solver, self.operator, self.tol, self.certify, self.seeds = solver, operator, tol, certify, list(seeds)
        self.start: Tensor | None = None  # in place of the operator's own guess
        self.size, self.rounding = operator.in_size, operator.noise
        self.error, self.fixed = self._errors() if solver.rigorous else (0.0, 0.0)
        self.basis = KrylovBasis(operator)
        self.solutions: dict[int, Solution] = {}
        # of every item that is still served
        self.items = torch.arange(operator.batch)
        self.active = torch.ones(operator.batch, dtype=torch.bool)
        self.alpha = torch.zeros(operator.batch, 0, dtype=torch.float64)  # (batch, k)
        self.beta = torch.zeros(operator.batch, 0, dtype=torch.float64)  # (batch, k); the last couples to the next vector
        self.starts = torch.ones(operator.batch, dtype=torch.float64)  # fresh random vectors used
        self.rest = torch.zeros(operator.batch, 0, dtype=torch.float64)  # (batch, k), what a step leaves over; if rigorous
        self.shift = torch.zeros(operator.batch, dtype=torch.float64)  # log of what a guess takes from the start
        self.invariant = torch.zeros(operator.batch, dtype=torch.bool)  # the Krylov space is invariant; if rigorous
        self.guessed = math.inf  # entry along the start of the direction that was guessed, if it were exact
        # of several singular values: the spaces so far, what the last of them left (times, N), and this one along that
        width = None if certify is None else max(_MARGIN * certify - 2 * self.rounding, 0.5 * certify)
        self.spaces = Spaces(k, tol, width, self.rounding) if k > 1 else None
        self.left = torch.zeros(0, operator.in_size, dtype=operator.dtype, device=operator.device)
        self.along: list[Tensor] = []
        self.leaving, self.energy = False, 0.0

    def finish(self) -> list[Solution]:
        q, before, beta = self._start(), None, None
        while True:
            self.basis.append(q)
            product = self._gram(q[None].unflatten(2, self.operator.in_shape))
            image, alpha = product[0][0].flatten(1), product[1][:, 0]  # M q and ⟨q, M q⟩: (batch, N), (batch, 1)
            if self.spaces is not None and len(self.left):
                along = q @ self.left.mT
                image, alpha = image + self.spaces.x * along @ self.left, alpha + self.spaces.x * along.square().sum()
            w = torch.addcmul(image, alpha, q, value=-1)
            if before is not None and beta is not None:
                w.addcmul_(beta, before, value=-1)
            w = self.basis.orthogonal(w)
            beta = w.norm(dim=-1, keepdim=True)
            last, before, q = before, q, w / torch.where(beta > 0, beta, 1.0)
            invariant = self._read(alpha, beta)
            if self.solver.rigorous:
                self._account(image, last, before, q)
                self.invariant |= invariant
            else:
                q = self._restart(q, invariant)
            self.active &= ~(self._stop() if self.spaces is None else self._stop_several(self.spaces, q))
            if not bool(self.active.any()):
                return [self.solutions[i] for i in range(len(self.solutions))]
            if self.spaces is not None and self.leaving:
                q, before, beta = self._next_space(self.spaces, q), None, None
            elif int(self.active.sum()) <= len(self.items) // 2:
                keep = torch.nonzero(self.active)[:, 0]
                q, before, beta = (t[keep.to(t.device)] for t in (q, before, beta))
                self._shrink(keep)

    def _errors(self) -> tuple[float, float]:
        """The bounds on rounding that a rigorous run stands on: of products, and of the map that they are products with."""
        known = self.operator.rounding()
        if known is None or self.operator.dtype != torch.float64:
            raise BadInputError(
                f"expected a map whose rounding is bounded for rigorous=True, got {type(self.operator).__name__} in "
                f"{self.operator.dtype}; pass softmax attention, a norm or a composition of them, or leave rigorous out"
            )
        return known.error, known.fixed

    def _gram(self, q: Float[Tensor, "1 batch *in_shape"]) -> tuple[Tensor, Tensor]:
        """`JᵀJ q`; for a rigorous run by the two products whose rounding is bounded, and no shorter way."""
        return Operator.gram(self.operator, q) if self.solver.rigorous else self.operator.gram(q)

    def _account(self, image: Tensor, last: Tensor | None, q: Tensor, after: Tensor) -> None:
        """Write down how far `M q = β₋ q₋ + α q + β q₊` is from holding for the computed product, rounded up."""
        alpha, beta = self.alpha[:, -1:].to(q.device), self.beta[:, -1:].to(q.device)
        rest, sizes = image - alpha * q - beta * after, image.norm(dim=-1) + (alpha + beta)[:, 0]
        if last is not None:
            earlier = self.beta[:, -2:-1].to(q.device)
            rest, sizes = rest - earlier * last, sizes + earlier[:, 0]
        unit = torch.finfo(torch.float64).eps
        rest = (rest.norm(dim=-1) + 8 * unit * sizes) * (1 + self.size * unit)
        self.rest = torch.cat([self.rest, rest[:, None].cpu()], 1)

    def _start(self) -> Float[Tensor, "batch N"]:
        """A random vector, and beside it a little of the operator's own guess.

        The guess cannot hide a direction from the certificate: it shifts `⟨v, q⟩`, which makes small values no likelier, and
        the sum's length is charged to the start's rarity (docs/explanation/theory.md, Proposition 2.3). A long
        guess would cost steps: what they tell of all other directions is measured against the length of the start.
        """
        q = self._gaussian()
        guess = None if self.size <= 2 else self.operator.guess(self.seeds) if self.start is None else self.start
        if guess is not None:
            length = min(1.0, _GUESS * self.size**-0.5)
            q = q + length * unit_rows(guess.flatten(1).to(q))
            self.shift = q.norm(dim=-1).double().log().cpu()
            self.guessed = length / (1 + length**2) ** 0.5
            q = unit_rows(q)
        return q.contiguous()

    def _gaussian(self) -> Float[Tensor, "batch N"]:
        """A random direction for this step, every item's from its own seed, so that a batch and a loop agree."""
        device = self.operator.device if self.size >= _LONG else torch.device("cpu")  # short ones alike on every device
        dtype = torch.float64 if self.solver.rigorous else torch.float32

        def drawn(seed: int) -> Tensor:
            random = stream(seed, f"start {self.basis.count}", device)
            return torch.randn(self.size, generator=random, device=device, dtype=dtype)

        rows = {seed: drawn(seed) for seed in set(self.seeds)}
        q = torch.stack([rows[seed] for seed in self.seeds])
        return unit_rows(q.to(self.operator.device, self.operator.dtype))

    def _read(self, alpha: Float[Tensor, "batch 1"], beta: Float[Tensor, "batch 1"]) -> Tensor:
        """Write down `α` and `β`, the only numbers of a step that leave the device; where `β` is rounding."""
        numbers = torch.stack([alpha, beta]).double().cpu()
        if not bool(numbers.isfinite().all()):
            raise NoConvergenceError("expected finite products with the Jacobian, got NaN or infinity; rescale the map")
        self.alpha, self.beta = torch.cat([self.alpha, numbers[0]], 1), torch.cat([self.beta, numbers[1]], 1)
        return self.beta[:, -1] <= self._floor()

    def _floor(self) -> Tensor:
        """What rounding makes of a `β` that is zero. Beside another space its size counts: products are with all of `J`."""
        largest = self.alpha.amax(-1)
        if self.spaces is None or self.spaces.count == 0:
            return self.rounding * largest
        top = self.spaces.top
        return self.rounding * (top * largest.clamp_min(self.rounding**2 * top)).sqrt()

    def _restart(self, q: Float[Tensor, "batch N"], invariant: Tensor) -> Float[Tensor, "batch N"]:
        """Where the Krylov space is invariant, go on from a fresh random vector orthogonal to it (Corollary 2.4)."""
        if self.basis.count >= self.size or not bool(invariant.any()):
            return q
        fresh = self._gaussian()
        for _ in range(2):
            fresh = unit_rows(self.basis.orthogonal(fresh))
        self.starts = self.starts + invariant.to(self.starts)
        return torch.where(invariant.to(q.device)[:, None], fresh, q)

    def _stop(self) -> Tensor:
        """Which items stop at this step; their solutions are written down."""
        beside = self.beta[:, :-1]
        T = self.alpha.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1)
        ritz, vectors = torch.linalg.eigh(T)  # ascending
        theta = ritz[:, -1].clamp_min(0.0)
        beta = self.beta.maximum((self.rounding * theta)[:, None])  # not below what rounding makes of zero
        whole = self.basis.count >= self.size
        limit = whole or self.basis.count >= self.solver.max_steps
        if self.solver.rigorous:
            limit, whole = limit or bool(self.invariant.all()), False
        converged = self._converged(ritz, vectors, beta) | torch.tensor(whole) | self.invariant
        converged |= theta == 0
        stop = converged | torch.tensor(limit)
        upper = theta
        if not whole and (self.certify is not None or bool(stop.any())):
            upper = self._upper(theta, ritz, beta)
        if self.certify is not None:
            wanted = _MARGIN * self.certify - 2 * self.rounding  # rounding widens the interval afterwards
            stop = (upper <= theta * (1 + wanted) ** 2) | torch.tensor(limit) | self.invariant
        stop &= self.active
        for i in torch.nonzero(stop)[:, 0].tolist():
            self.solutions[int(self.items[i])] = Solution(
                values=(float(theta[i]) ** 0.5,),
                uppers=(float(upper[i]) ** 0.5 + self.fixed,),
                directions=self.basis.combined(i, vectors[i, :, -1]).reshape(1, *self.operator.in_shape),
                steps=self.basis.count,
                converged=bool(converged[i]),
                energy=float(self.alpha[i, 0]),
            )
        return stop

    def _stop_several(self, spaces: Spaces, q: Float[Tensor, "1 N"]) -> Tensor:
        """Whether all intervals are narrow: the solution is written down. Else, whether to leave this space.  q: the next."""
        if not self.along:
            self.along = [(self.basis.last @ self.left.mT)[0].double().cpu()]
        self.energy = self.energy or float(self.alpha[0, 0])
        self.along.append((q @ self.left.mT)[0].double().cpu())
        spaces.read(self.alpha[0], self.beta[0], torch.stack(self.along))
        whole, steps = self.basis.count >= self.size, self.basis.count
        limit = whole or steps >= self.solver.max_steps
        ends, beta = spaces.ends(spaces.top), self.beta[0].maximum(self._floor())
        narrow = whole
        if not whole and (spaces.count > 0 or limit):
            share = 0.9 if spaces.count <= 1 else 0.1 / (spaces.count * (spaces.count - 1))  # of the risk, as for `log_rarity`
            ends = spaces.ends(spaces.upper_end(beta, self._rarity(share * self.solver.delta)))
            narrow = spaces.count > 0 and bool((ends.upper <= spaces.wanted()).all())
        if narrow or limit:
            upper = ends.theta if whole else ends.upper
            self.solutions[0] = Solution(
                values=tuple(ends.theta.sqrt().tolist()),
                uppers=tuple(upper.sqrt().tolist()),
                directions=torch.stack([self.basis.combined(0, v) for v in ends.vectors.mT]).unflatten(
                    1, self.operator.in_shape
                ),
                steps=steps,
                converged=narrow,
                energy=self.energy,
            )
        elif spaces.hidden:
            rarities = (float(self._rarity(risk)) for risk in (RISK, CONVERGED_RISK))
            self.leaving = spaces.ready(*rarities)
        return torch.tensor([narrow or limit])

    def _next_space(self, spaces: Spaces, q: Float[Tensor, "1 N"]) -> Float[Tensor, "1 N"]:
        """A fresh random vector beside all spaces so far.  q: the vector that would have been next."""
        left = torch.cat([self.basis.orthogonal(f[None]) for f in (*self.left, q[0])])
        columns, R = torch.linalg.qr(left.double().mT)
        self.left = columns.mT.to(q).contiguous()
        spaces.begin(R.cpu())
        fresh = self._gaussian()
        for _ in range(2):
            fresh = unit_rows(self.basis.orthogonal(fresh))
        self.alpha, self.beta, self.along, self.leaving = self.alpha[:, :0], self.beta[:, :0], [], False
        self.starts, self.shift = torch.ones_like(self.starts), torch.zeros_like(self.shift)
        return fresh

    def _upper(self, theta: Tensor, ritz: Tensor, beta: Tensor) -> Tensor:
        rarity = self._rarity(self.solver.delta)
        if self.solver.rigorous:
            slack = 16 * torch.finfo(torch.float64).eps
            return certificate.inexact_end(self.alpha, self.beta, self.rest, self.error, rarity, slack)
        return torch.where(theta == 0, 0.0, certificate.upper_end(ritz, beta, rarity))

    def _converged(self, ritz: Tensor, vectors: Tensor, beta: Tensor) -> Tensor:
        """Whether a singular value is near the top Ritz value, and a larger one would have shown.

        The residual bounds the distance to some eigenvalue; its square over the gap does better where the gap is wide
        (Kaniel, as in PROPACK). But that may be the second one, so the run also asks how rare a start would have to be that
        hides a larger one: less where the top is the direction that was guessed, or stands alone, least where it clearly is.
        """
        theta = ritz[:, -1].clamp_min(0.0)
        residual = self.beta[:, -1] * vectors[:, -1, -1].abs()
        gap = theta - ritz[:, -2].clamp_min(0.0) if ritz.shape[1] > 1 else torch.zeros_like(theta)
        alone = gap > _ALONE * theta
        refined = torch.where(gap > residual, residual * (residual / (gap - residual)), residual)
        close = torch.where(alone, residual.minimum(refined), residual) <= 2 * self.tol * theta
        if not bool(close.any()):
            return close
        share = vectors[:, 0, -1].abs() / self.guessed
        clear, plain, otherwise = (
            certificate.log_growth(theta * (1 + doubt.largest_error(self.tol)) ** 2, ritz, beta) >= self._rarity(doubt.risk)
            for doubt in (_CLEAR, _PLAIN, _OTHERWISE)
        )
        return close & (otherwise | (plain & ((share >= _SHARE) | alone)) | (clear & (share >= _CLEARLY)))

    def _rarity(self, risk: float) -> Tensor:
        return certificate.log_rarity(self.starts, self.size, risk) + self.shift

    def _shrink(self, keep: Tensor) -> None:
        """Leave out items that have stopped: done when half of them have."""
        for name in ("items", "active", "alpha", "beta", "starts", "shift", "rest", "invariant"):
            setattr(self, name, getattr(self, name)[keep])
        self.seeds = [self.seeds[i] for i in keep.tolist()]
        index = keep.to(self.operator.device)
        self.basis.select(index)
        self.operator = self.operator.select(index)
