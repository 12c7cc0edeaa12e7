"""The largest singular value from products alone: block Golub–Kahan from random starts.

One-sided form (Simon & Zha 2000): only the right vectors `q` are kept and reorthogonalised, so `k` steps keep `k` vectors.
Their projection `T = QᵀJᵀJQ` is block tridiagonal; its eigenvalues are the squares of Golub–Kahan's singular values.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from howsmooth.errors import BadInputError, NoConvergenceError
from howsmooth.maps import Operator
from howsmooth.spectral import certificate
from howsmooth.spectral.solution import Solution

_CHUNK = 16  # basis vectors allocated at a time, fewer where they are large
_CHUNK_BYTES = 2**28
_LONG = 2**24  # numbers past which a random vector is drawn where it is needed
_REACH = 20  # a guess lets the test for convergence look this many `tol` above the value
_DOUBT = 0.13  # risk that the test for convergence takes; the reported upper end takes `delta`


@final
@dataclass(frozen=True)
class GolubKahan:
    """Block Golub–Kahan with full reorthogonalisation.

    block: random starts per input. One spends the fewest products; more pay only where their products are cheaper together.
    max_steps: products with `J` and with `Jᵀ`, per start.  delta: the upper end's failure probability.
    """

    block: int = 1
    max_steps: int = 300
    delta: float = 1e-6

    def __post_init__(self):
        whole = all(isinstance(k, int) and k >= 1 for k in (self.block, self.max_steps))
        if not whole or not 0 < self.delta < 1:
            raise BadInputError(
                f"expected whole numbers block ≥ 1 and max_steps ≥ 1, and 0 < delta < 1, got block={self.block}, "
                f"max_steps={self.max_steps}, delta={self.delta}; the defaults are 1, 300 and 1e-6"
            )

    def solve(self, operator: Operator, tol: float, certify: float | None, seed: int) -> list[Solution]:
        """The top singular pair of every map of a batch, in lock step; each stops by itself."""
        return _Run(self, operator, tol, certify, seed).finish()


class _Run:
    """One batch on its way. Items that have stopped leave; the arrays shrink when half of them have."""

    def __init__(self, solver: GolubKahan, operator: Operator, tol: float, certify: float | None, seed: int):
        self.solver, self.operator, self.tol, self.certify = solver, operator, tol, certify
        self.size, self.seed = operator.in_size, seed
        self.block = solver.block if 8 * solver.block <= self.size else 1
        self.limit = min(solver.max_steps, self.size // self.block)
        self.rounding = operator.noise
        self.items = torch.arange(operator.batch)
        self.active = torch.ones(operator.batch, dtype=torch.bool)
        step_bytes = operator.batch * self.block * self.size * torch.finfo(operator.dtype).bits // 8
        self.chunk = self.block * max(1, min(_CHUNK, _CHUNK_BYTES // step_bytes))
        self.basis: list[Tensor] = []  # chunks of (batch, chunk, N)
        self.filled = 0  # vectors in the basis
        self.projected = torch.zeros(operator.batch, 0, 0, dtype=torch.float64)  # T
        self.coupling = torch.zeros(operator.batch, 0, self.block, dtype=torch.float64)  # diagonals of the B's
        self.starts = torch.ones(operator.batch, dtype=torch.float64)  # fresh random vectors used
        self.shift = torch.zeros(operator.batch, dtype=torch.float64)  # log of what a guess takes from the start
        self.guessed = False
        self.solutions: dict[int, Solution] = {}

    def finish(self) -> list[Solution]:
        q = self._start()
        previous, below = None, None
        step = 0
        while bool(self.active.any()):
            step += 1
            self._append(q)
            w, diagonal = self.operator.gram(q.transpose(0, 1).unflatten(2, self.operator.in_shape))
            w = torch.baddbmm(w.flatten(2).transpose(0, 1), diagonal, q, alpha=-1)  # (batch, block, N)
            if previous is not None and below is not None:
                w.baddbmm_(below.mT, previous, alpha=-1)
            w = self._orthogonal(w)
            following, below = self._factor(w, diagonal)
            self._project()
            self.active &= ~self._stopping(step)
            previous, q = q, following
            if 0 < int(self.active.sum()) <= len(self.items) // 2:
                index = torch.nonzero(self.active)[:, 0]
                previous, q, below = (t[index.to(t.device)] for t in (previous, q, below))
                self._shrink(index)
        return [self.solutions[i] for i in range(len(self.solutions))]

    def _start(self) -> Tensor:
        """Random vectors, and beside a single one the operator's own guess in equal parts.

        The guess cannot hide a direction from the certificate: it shifts `⟨v, q⟩`, which makes small values no likelier, and
        the sum's length, at most 2, is charged to the start's rarity.
        """
        op = self.operator
        q = self._gaussian()
        q = q / q.norm() if self.block == 1 else torch.linalg.qr(q.mT)[0].mT
        q = q.expand(op.batch, -1, -1)
        guess = op.guess() if self.block == 1 and self.size > 2 else None
        if guess is not None:
            guess = guess.flatten(1)[:, None].to(q)
            length = guess.norm(dim=-1, keepdim=True)
            q = q + guess / torch.where(length > 0, length, 1.0)
            length = q.norm(dim=-1, keepdim=True)
            self.shift = length[:, 0, 0].double().log().cpu()
            self.guessed = True
            q = q / length
        return q.contiguous()

    def _gaussian(self) -> Tensor:
        """Gaussian vectors of this step, the same for every item, so that a batch and a loop agree."""
        device = self.operator.device if self.size >= _LONG else torch.device("cpu")  # short ones alike on every device
        random = torch.Generator(device).manual_seed((self.seed * 1_000_003 + self.filled) % 2**63)
        vectors = torch.randn(1, self.block, self.size, generator=random, device=device)
        return vectors.to(self.operator.device, self.operator.dtype)

    def _append(self, q: Tensor) -> None:
        offset = self.filled % self.chunk
        if offset == 0:
            self.basis.append(q.new_empty(len(q), self.chunk, self.size))
        self.basis[-1][:, offset : offset + self.block] = q
        self.filled += self.block

    def _chunks(self) -> list[Tensor]:
        return [chunk[:, : self.filled - i * self.chunk] for i, chunk in enumerate(self.basis)]

    def _orthogonal(self, w: Tensor) -> Tensor:
        """`w` made orthogonal to the basis; a second pass where the first took most of it away.

        On a GPU always: asking whether it did would cost more than doing it.
        """
        before = w.norm(dim=-1) if w.device.type == "cpu" else None
        for _ in range(2):
            for chunk in self._chunks():
                w = torch.baddbmm(w, torch.bmm(w, chunk.mT), chunk, alpha=-1)
            if before is not None:
                after = w.norm(dim=-1)
                if bool((after > 0.5 * before).all()):
                    break
                before = after
        return w

    def _factor(self, w: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
        """`w = B q` with orthonormal `q`. Where `w` vanishes, the Krylov space is invariant: go on from a fresh vector.

        The only place of a step where numbers are read off the device: `diagonal` and `B`, in one transfer.
        """
        if self.block == 1:
            factor = w.norm(dim=-1, keepdim=True)  # (batch, 1, 1)
            q = w / torch.where(factor > 0, factor, 1.0)
        else:
            self._read(diagonal, w.norm(dim=-1)[..., None].expand_as(diagonal))  # a decomposition hangs on NaN
            q, upper = torch.linalg.qr(w.mT)
            factor = upper.mT
            # nearly dependent columns leave q less orthogonal to the basis than w was
            q = torch.linalg.qr(self._orthogonal(q.mT.contiguous()).mT)[0].mT.contiguous()
        self.diagonal, self.below = self._read(diagonal, factor)
        scale = self.diagonal.diagonal(dim1=1, dim2=2).amax(-1)
        if len(self.projected[0]):
            scale = scale.maximum(self.projected.diagonal(dim1=1, dim2=2).amax(-1))
        lost = self.below.diagonal(dim1=1, dim2=2).abs() <= self.rounding * scale[:, None]  # (batch, block)
        if bool(lost.any()) and self.filled < self.size:
            gone = lost.to(w.device)
            fresh = torch.where(gone[..., None], self._gaussian(), w)
            last = gone.int().argsort(dim=1, stable=True)[..., None]  # what is left of w first, so that q spans it
            fresh = fresh.gather(1, last.expand_as(fresh))
            fresh = self._orthogonal(fresh / fresh.norm(dim=-1, keepdim=True))
            fresh = self._orthogonal(torch.linalg.qr(fresh.mT)[0].mT.contiguous())
            fresh = torch.linalg.qr(fresh.mT)[0].mT
            q = torch.where(gone.any(-1)[:, None, None], fresh, q)
            self.starts = self.starts + lost.any(-1).to(self.starts)
        if self.block > 1:
            factor = torch.bmm(w, q.mT)
            self.below = factor.double().cpu()
        return q, factor

    def _read(self, diagonal: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Both matrices in float64 on the host, checked."""
        numbers = torch.stack([diagonal, factor]).double().cpu()
        if not bool(numbers.isfinite().all()):
            raise NoConvergenceError("expected finite products with the Jacobian, got NaN or infinity; rescale the map")
        return numbers[0], numbers[1]

    def _project(self) -> None:
        """Grow T by one block; `below` couples it to the next."""
        diagonal, below = self.diagonal, self.below
        batch, old = self.projected.shape[:2]
        grown = diagonal.new_zeros(batch, old + self.block, old + self.block)
        grown[:, :old, :old] = self.projected
        grown[:, old:, old:] = 0.5 * (diagonal + diagonal.mT)
        if old:
            last = self.last_below
            grown[:, old:, old - self.block : old] = last.mT
            grown[:, old - self.block : old, old:] = last
        self.projected, self.last_below = grown, below
        self.coupling = torch.cat([self.coupling, below.diagonal(dim1=1, dim2=2).abs()[:, None]], 1)

    def _stopping(self, step: int) -> Tensor:
        """Which items stop at this step; their solutions are written down."""
        ritz, vectors = torch.linalg.eigh(self.projected)  # ascending
        theta = ritz[:, -1].clamp_min(0.0)
        whole, limit = self.filled >= self.size, step >= self.limit
        residual = torch.linalg.vector_norm(self.last_below.mT @ vectors[:, -self.block :, -1:], dim=(1, 2))
        converged = (residual <= 2 * self.tol * theta) | torch.tensor(whole)
        if not (whole or self.block > 1) and bool(converged.any()):
            converged &= self._confirmed(ritz, theta)
        converged |= theta == 0
        stop = converged | torch.tensor(limit)
        upper = torch.full_like(theta, torch.inf)
        if self.certify is not None or bool(stop.any()):
            upper = theta if whole else self._upper(ritz, theta, step)
        if self.certify is not None:
            wanted = 0.97 * self.certify - 2 * self.rounding  # leaves room for the rounding that widens the interval
            stop = (upper <= theta * (1 + wanted) ** 2) | torch.tensor(limit or whole)
        stop &= self.active
        for i in torch.nonzero(stop)[:, 0].tolist():
            self.solutions[int(self.items[i])] = Solution(
                value=float(theta[i]) ** 0.5,
                upper=float(upper[i]) ** 0.5,
                direction=self._direction(i, vectors[i, :, -1]),
                steps=step,
                converged=bool(converged[i]),
            )
        return stop

    def _upper(self, ritz: Tensor, theta: Tensor, step: int) -> Tensor:
        if self.block > 1:
            upper = certificate.from_block(theta, step, self.limit, self.block, self.size, self.solver.delta)
        else:
            upper = certificate.from_one_start(ritz, self._beta(theta), self._rarity(self.solver.delta))
        return torch.where(theta == 0, 0.0, upper)

    def _confirmed(self, ritz: Tensor, theta: Tensor) -> Tensor:
        """A small residual may belong to the second singular value: ask what a larger first one would take.

        From a random start, a value `tol` larger must need a start of probability `_DOUBT`. A guess has looked where the
        largest value usually is: beside one, only a value `_REACH · tol` larger must need some luck.
        """
        reach, risk = (_REACH * self.tol, 1 - 1e-9) if self.guessed else (self.tol, _DOUBT)
        return certificate.log_growth(theta * (1 + reach) ** 2, ritz, self._beta(theta)) >= self._rarity(risk)

    def _beta(self, theta: Tensor) -> Tensor:
        """Off-diagonals, not below what rounding makes of zero."""
        return self.coupling[:, :, 0].maximum((self.rounding * theta)[:, None])

    def _rarity(self, risk: float) -> Tensor:
        return certificate.log_rarity(self.starts, self.size, risk) + self.shift

    def _direction(self, item: int, coefficients: Tensor) -> Tensor:
        coefficients = coefficients.to(self.operator.device, self.operator.dtype)
        v = torch.zeros(self.size, dtype=self.operator.dtype, device=self.operator.device)
        for chunk in self._chunks():
            part, coefficients = coefficients[: chunk.shape[1]], coefficients[chunk.shape[1] :]
            v.addmv_(chunk[item].mT, part)
        return (v / v.norm()).reshape(self.operator.in_shape)

    def _shrink(self, keep: Tensor) -> None:
        """Leave out items that have stopped."""
        index = keep.to(self.operator.device)
        self.items, self.active = self.items[keep], self.active[keep]
        self.projected, self.last_below = self.projected[keep], self.last_below[keep]
        self.coupling, self.starts, self.shift = self.coupling[keep], self.starts[keep], self.shift[keep]
        self.basis = [chunk[index] for chunk in self.basis]
        self.operator = self.operator.select(index)
