"""The largest singular value from products alone: Golub–Kahan from a random start.

One-sided form (Simon & Zha 2000): only the right vectors `q` are kept and reorthogonalised, so `k` steps keep `k` vectors.
With `M = JᵀJ` and `Q = (q_1 … q_k)`, `T = QᵀMQ` is tridiagonal, `α` on its diagonal and `β` beside it; its eigenvalues
are the squares of Golub–Kahan's singular values.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.maps import Operator
from howsmooth.spectral import certificate
from howsmooth.spectral.estimate import Solution

_CHUNK = 16  # basis vectors allocated at a time, fewer where they take more than this
_CHUNK_BYTES = 2**28
_LONG = 2**24  # numbers past which a random vector is drawn where it is needed
# Chosen by experiment: on 200 random layers they leave `value` within `tol` of the norm in 99 of 100 (tests/spectral).
_DOUBT = 0.13  # without a guess, a value `tol` larger must need a start this rare; the reported upper end takes `delta`
_REACH = 20  # with a guess, a value this many `tol` larger must need some luck
_MARGIN = 0.97  # chosen too: 3 % of `certify` is room for the rounding that widens the reported interval


@final
@dataclass(frozen=True)
class GolubKahan:
    """Golub–Kahan with full reorthogonalisation.

    max_steps: products with `J` and with `Jᵀ`.  delta: the upper end's failure probability.
    """

    max_steps: int = 300
    delta: float = 1e-6

    def __post_init__(self):
        if not (isinstance(self.max_steps, int) and self.max_steps >= 1) or not 0 < self.delta < 1:
            raise BadInputError(
                f"expected a whole number max_steps ≥ 1 and 0 < delta < 1, got max_steps={self.max_steps}, "
                f"delta={self.delta}; the defaults are 300 and 1e-6"
            )

    def solve(self, operator: Operator, tol: float, certify: float | None, seed: int) -> list[Solution]:
        """The top singular pair of every map of a batch, in lock step; each stops by itself."""
        return _Run(self, operator, tol, certify, seed).finish()


class _Run:
    """One batch on its way. Vectors stay on the operator's device, (batch, N); numbers are on the host, in float64."""

    def __init__(self, solver: GolubKahan, operator: Operator, tol: float, certify: float | None, seed: int):
        self.solver, self.operator, self.tol, self.certify, self.seed = solver, operator, tol, certify, seed
        self.size, self.rounding = operator.in_size, operator.noise
        self.basis = _Basis(operator)
        self.solutions: dict[int, Solution] = {}
        # of every item that is still served
        self.items = torch.arange(operator.batch)
        self.active = torch.ones(operator.batch, dtype=torch.bool)
        self.alpha = torch.zeros(operator.batch, 0, dtype=torch.float64)  # (batch, k)
        self.beta = torch.zeros(operator.batch, 0, dtype=torch.float64)  # (batch, k); the last couples to the next vector
        self.starts = torch.ones(operator.batch, dtype=torch.float64)  # fresh random vectors used
        self.shift = torch.zeros(operator.batch, dtype=torch.float64)  # log of what a guess takes from the start
        self.guessed = False

    def finish(self) -> list[Solution]:
        q, before, beta = self._start(), None, None
        while True:
            self.basis.append(q)
            image, energy = self.operator.gram(q[None].unflatten(2, self.operator.in_shape))
            w, alpha = image[0].flatten(1), energy[:, 0]  # M q and ⟨q, M q⟩: (batch, N), (batch, 1)
            w = torch.addcmul(w, alpha, q, value=-1)
            if before is not None and beta is not None:
                w.addcmul_(beta, before, value=-1)
            w = self.basis.orthogonal(w)
            beta = w.norm(dim=-1, keepdim=True)
            before, q = q, w / torch.where(beta > 0, beta, 1.0)
            q = self._restart(q, self._read(alpha, beta))
            self.active &= ~self._stop()
            if not bool(self.active.any()):
                return [self.solutions[i] for i in range(len(self.solutions))]
            if int(self.active.sum()) <= len(self.items) // 2:
                keep = torch.nonzero(self.active)[:, 0]
                q, before, beta = (t[keep.to(t.device)] for t in (q, before, beta))
                self._shrink(keep)

    def _start(self) -> Float[Tensor, "batch N"]:
        """A random vector, and beside it the operator's own guess in equal parts.

        The guess cannot hide a direction from the certificate: it shifts `⟨v, q⟩`, which makes small values no likelier, and
        the sum's length, at most 2, is charged to the start's rarity (docs/theory.md, Proposition 2.3).
        """
        q = self._gaussian().expand(self.operator.batch, -1)
        guess = self.operator.guess() if self.size > 2 else None
        if guess is not None:
            q = q + _unit(guess.flatten(1).to(q))
            self.shift = q.norm(dim=-1).double().log().cpu()
            self.guessed = True
            q = _unit(q)
        return q.contiguous()

    def _gaussian(self) -> Float[Tensor, "1 N"]:
        """A random direction for this step, the same for every item, so that a batch and a loop agree."""
        device = self.operator.device if self.size >= _LONG else torch.device("cpu")  # short ones alike on every device
        random = torch.Generator(device).manual_seed((self.seed * 1_000_003 + self.basis.count) % 2**63)
        return _unit(torch.randn(1, self.size, generator=random, device=device).to(self.operator.device, self.operator.dtype))

    def _read(self, alpha: Float[Tensor, "batch 1"], beta: Float[Tensor, "batch 1"]) -> Tensor:
        """Write down `α` and `β`, the only numbers of a step that leave the device; where `β` is rounding."""
        numbers = torch.stack([alpha, beta]).double().cpu()
        if not bool(numbers.isfinite().all()):
            raise NoConvergenceError("expected finite products with the Jacobian, got NaN or infinity; rescale the map")
        self.alpha, self.beta = torch.cat([self.alpha, numbers[0]], 1), torch.cat([self.beta, numbers[1]], 1)
        return self.beta[:, -1] <= self.rounding * self.alpha.amax(-1)

    def _restart(self, q: Float[Tensor, "batch N"], lost: Tensor) -> Float[Tensor, "batch N"]:
        """Where the Krylov space is invariant, go on from a fresh random vector orthogonal to it (Corollary 2.4)."""
        if self.basis.count >= self.size or not bool(lost.any()):
            return q
        fresh = self._gaussian().expand_as(q)
        for _ in range(2):
            fresh = _unit(self.basis.orthogonal(fresh))
        self.starts = self.starts + lost.to(self.starts)
        return torch.where(lost.to(q.device)[:, None], fresh, q)

    def _stop(self) -> Tensor:
        """Which items stop at this step; their solutions are written down."""
        beside = self.beta[:, :-1]
        T = self.alpha.diag_embed() + beside.diag_embed(1) + beside.diag_embed(-1)
        ritz, vectors = torch.linalg.eigh(T)  # ascending
        theta = ritz[:, -1].clamp_min(0.0)
        beta = self.beta.maximum((self.rounding * theta)[:, None])  # not below what rounding makes of zero
        whole = self.basis.count >= self.size
        limit = whole or self.basis.count >= self.solver.max_steps
        residual = self.beta[:, -1] * vectors[:, -1, -1].abs()
        converged = (residual <= 2 * self.tol * theta) | torch.tensor(whole)
        if not whole and bool(converged.any()):
            converged &= self._confirmed(theta, ritz, beta)
        converged |= theta == 0
        stop = converged | torch.tensor(limit)
        upper = theta
        if not whole and (self.certify is not None or bool(stop.any())):
            upper = certificate.upper_end(ritz, beta, self._rarity(self.solver.delta))
            upper = torch.where(theta == 0, 0.0, upper)
        if self.certify is not None:
            wanted = _MARGIN * self.certify - 2 * self.rounding  # rounding widens the interval afterwards
            stop = (upper <= theta * (1 + wanted) ** 2) | torch.tensor(limit)
        stop &= self.active
        for i in torch.nonzero(stop)[:, 0].tolist():
            self.solutions[int(self.items[i])] = Solution(
                value=float(theta[i]) ** 0.5,
                upper=float(upper[i]) ** 0.5,
                direction=self.basis.combined(i, vectors[i, :, -1]).reshape(self.operator.in_shape),
                steps=self.basis.count,
                converged=bool(converged[i]),
            )
        return stop

    def _confirmed(self, theta: Tensor, ritz: Tensor, beta: Tensor) -> Tensor:
        """A small residual may belong to the second singular value: ask what a larger first one would take.

        From a random start, a value `tol` larger must need a start of probability `_DOUBT`. A guess has looked where the
        largest value usually is: beside one, only a value `_REACH · tol` larger must need some luck.
        """
        # 1 − 1e-9: all but certain, the least that can be asked of a start
        reach, risk = (_REACH * self.tol, 1 - 1e-9) if self.guessed else (self.tol, _DOUBT)
        return certificate.log_growth(theta * (1 + reach) ** 2, ritz, beta) >= self._rarity(risk)

    def _rarity(self, risk: float) -> Tensor:
        return certificate.log_rarity(self.starts, self.size, risk) + self.shift

    def _shrink(self, keep: Tensor) -> None:
        """Leave out items that have stopped: done when half of them have."""
        for name in ("items", "active", "alpha", "beta", "starts", "shift"):
            setattr(self, name, getattr(self, name)[keep])
        index = keep.to(self.operator.device)
        self.basis.select(index)
        self.operator = self.operator.select(index)


class _Basis:
    """The vectors `q_1 … q_k` of every item, in chunks, so that a longer run copies nothing."""

    def __init__(self, operator: Operator):
        step_bytes = operator.batch * operator.in_size * torch.finfo(operator.dtype).bits // 8
        self.room = max(1, min(_CHUNK, _CHUNK_BYTES // step_bytes))  # vectors in a chunk
        self.count = 0
        self._chunks: list[Tensor] = []  # (batch, room, N)

    @property
    def chunks(self) -> list[Float[Tensor, "batch part N"]]:
        """What is filled of each chunk."""
        return [chunk[:, : self.count - i * self.room] for i, chunk in enumerate(self._chunks)]

    def append(self, q: Float[Tensor, "batch N"]) -> None:
        if self.count % self.room == 0:
            self._chunks.append(q.new_empty(len(q), self.room, q.shape[1]))
        self._chunks[-1][:, self.count % self.room] = q
        self.count += 1

    def orthogonal(self, w: Float[Tensor, "batch N"]) -> Float[Tensor, "batch N"]:
        """`w` made orthogonal to the basis; a second pass where the first took most of it away.

        On a GPU always: asking whether it did would cost more than doing it. There, matrix products of one long row are
        forty times as slow as reading it, so vectors that fill a chunk are taken one by one.
        """
        if len(w) == 1 and self.room == 1 and w.device.type != "cpu":
            v = w[0].clone()
            for _ in range(2):
                for chunk in self.chunks:
                    v.addcmul_(chunk[0, 0], torch.dot(chunk[0, 0], v), value=-1)
            return v[None]
        w = w[:, None]
        before = w.norm(dim=-1) if w.device.type == "cpu" else None
        for _ in range(2):
            for chunk in self.chunks:
                w = torch.baddbmm(w, torch.bmm(w, chunk.mT), chunk, alpha=-1)
            if before is not None:
                after = w.norm(dim=-1)
                if bool((after > 0.5 * before).all()):
                    break
                before = after
        return w[:, 0]

    def combined(self, item: int, coefficients: Float[Tensor, " k"]) -> Float[Tensor, " N"]:
        """The unit vector along `Σ c_j q_j` of one item."""
        first = self._chunks[0][item]
        coefficients, v = coefficients.to(first), torch.zeros_like(first[0])
        for chunk, part in zip(self.chunks, coefficients.split(self.room), strict=True):
            v.addmv_(chunk[item].mT, part)
        return v / v.norm()

    def select(self, items: Tensor) -> None:
        self._chunks = [chunk[items] for chunk in self._chunks]


def _unit(v: Float[Tensor, "batch N"]) -> Float[Tensor, "batch N"]:
    """Rows of length one; zero stays zero."""
    length = v.norm(dim=-1, keepdim=True)
    return v / torch.where(length > 0, length, 1.0)
