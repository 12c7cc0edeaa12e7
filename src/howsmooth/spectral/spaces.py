"""Several singular values: one Krylov space after another, and an upper end for each. Theorem 2.10.

`M = JᵀJ` is known on orthonormal `Q`: `M Q = Q S + F Gᵀ` with orthonormal `F ⟂ Q`. For every `x > 0`

    M ⪯ (S + GGᵀ/x) ⊕ (C + x FFᵀ),    C = (I − QQᵀ) M (I − QQᵀ)

so `λ_i ≤ max(λ_i(S + GGᵀ/x), ‖C + x FFᵀ‖)`. The first space, from the start that one singular value has too, finds the values.
The second begins at a fresh random vector beside the first one, and Theorem 2.2 bounds the norm there: it sees what the first
start could not, as copies of a multiple value. If it finds something large, it joins the first one, and a third begins.
"""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.spectral import certificate

SMALLEST = 1e-3  # of the largest value: smaller ones are told apart as finely as this one
LOOSE = 0.1  # width of the intervals where no other is wanted
_COUPLING = 0.25  # `x` at most, as a share of the least of the wanted eigenvalues: more would raise the norm beside the space
_GRID = 9  # places at which a hidden eigenvalue is looked for
# Chosen by counting products on the demo's layers: a space that is left later finds more, one that is left earlier misses a
# value more often, which costs another space.
RISK, CONVERGED_RISK = 0.4, 0.05
_HALVINGS = 40


class SeveralEnds(NamedTuple):
    """Attained values `θ` of `M` in the space, upper ends of the eigenvalues of their number, and coordinates in the basis."""

    theta: Float[Tensor, " k"]
    upper: Float[Tensor, " k"]
    vectors: Float[Tensor, "m k"]


@final
class Spaces:
    """What is known of the `k` largest eigenvalues of `M`. All of it are small matrices on the host, in float64.

    width: that the intervals of singular values should have, relatively; none if the values should converge to `tol`.
    noise: of products with `M`, as a share of its norm; smaller eigenvalues are not told from zero.
    A space is a run of Lanczos steps on `C + x FFᵀ` with its own `α` and `β`, and `H = FᵀQ` of its vectors and the next one.
    """

    def __init__(self, k: int, tol: float, width: float | None, noise: float):
        self.k, self.tol, self.width, self._noise, self._converges = k, tol, width or LOOSE, noise, width is None
        self.count, self.x = 0, 0.0  # spaces behind this one; of this one
        self._S = torch.zeros(0, 0, dtype=torch.float64)  # of all spaces behind this one, as the next two
        self._G = torch.zeros(0, 0, dtype=torch.float64)
        self._known: Tensor | None = None  # λ_i(S + GGᵀ/x)

    def read(self, alpha: Tensor, beta: Tensor, H: Float[Tensor, "steps_and_one f"]) -> None:
        """Take in the steps of this space so far, and find the Ritz values of all spaces together."""
        self.alpha, self.beta, own = alpha, beta, H[:-1]
        T = alpha.diag_embed() + beta[:-1].diag_embed(1) + beta[:-1].diag_embed(-1)
        self.ritz = torch.linalg.eigvalsh(T)  # of this space alone
        beside = self._G @ own.mT
        self._joint = torch.cat([torch.cat([self._S, beside], 1), torch.cat([beside.mT, T - self.x * own @ own.mT], 1)])
        leaves = torch.zeros(len(self._joint), own.shape[1] + 1, dtype=torch.float64)  # along what is left of F, and q₊
        leaves[: len(self._S), :-1], leaves[len(self._S) :, :-1] = self._G, -self.x * own
        leaves[-1, -1] = beta[-1]
        self._leaves = leaves
        products = torch.eye(own.shape[1] + 1, dtype=torch.float64)
        products[:-1, :-1] -= own.mT @ own
        products[:-1, -1] = products[-1, :-1] = H[-1]
        squares, turn = torch.linalg.eigh(products)
        self._outward = leaves @ (turn * squares.clamp_min(0.0).sqrt())
        values, vectors = torch.linalg.eigh(self._joint)
        self.theta, self.vectors = values.flip(-1)[: self.k].clamp_min(0.0), vectors.flip(-1)[:, : self.k]

    @property
    def top(self) -> float:
        """The largest Ritz value of all spaces."""
        return float(self.theta[0])

    def wanted(self) -> Float[Tensor, " k"]:
        """Below which the upper ends of eigenvalues should be."""
        sigma = self.theta.sqrt()
        return (sigma + self.width * sigma.clamp_min(SMALLEST * float(sigma[0]))).square() + self._noise * self.top

    def ready(self, rarity: float, risk_rarity: float) -> bool:
        """Whether the values are found: nothing that leaves the space is near them, and nothing that is hidden is likely.

        rarity, risk_rarity: `log_rarity` of this space's start, for the risk that is taken where values need not converge, and
        where they must.
        """
        if len(self.theta) < self.k or self.top == 0:
            return len(self.theta) == self.k
        wanted = self.wanted()
        places = self.theta[-1] + (wanted[-1] - self.theta[-1]) * torch.linspace(0, 1, _GRID, dtype=torch.float64)
        tiny = torch.finfo(torch.float64).tiny
        growth = ((places[:, None] - self.ritz).abs().clamp_min(tiny).log() - self.beta.clamp_min(tiny).log()).sum(-1).max()
        if growth < (risk_rarity if self._converges else rarity):
            return False
        if self._converges:
            away = (self.vectors.mT @ self._outward).norm(dim=-1)
            if bool((away > 2 * self.tol * self.theta.clamp_min(SMALLEST * self.top) + self._noise * self.top).any()):
                return False
        return bool((self._raised(_COUPLING * float(wanted[-1])) <= wanted).all())

    def begin(self, R: Float[Tensor, "f f"]) -> None:
        """Go on to the next space.  R: what turns its orthonormal `F` into what was left of the old `F`, and `q₊`.

        `x` is the least with which the values that are known stay in their intervals.
        """
        wanted = self.wanted()
        high = _COUPLING * float(wanted[-1])
        self._outward = self._leaves @ R.mT
        low = 1e-6 * high
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if bool((self._raised(middle) <= wanted).all()) else (middle, high)
        self._known, self._S, self._G, self.x = self._raised(high), self._joint, self._outward, high
        self.count += 1

    def _raised(self, x: float) -> Float[Tensor, " k"]:
        """`λ_i(S + GGᵀ/x)`."""
        if x <= 0:
            return self.theta
        return torch.linalg.eigvalsh(self._joint + self._outward @ self._outward.mT / x).flip(-1)[: self.k]

    @property
    def hidden(self) -> bool:
        """Whether this space has seen something too large for the intervals that are wanted."""
        return self.count == 0 or float(self.ritz[-1]) > float(self.wanted()[-1])

    def ends(self, beside: float) -> SeveralEnds:
        """Of all spaces.  beside: an upper end of `‖C + x FFᵀ‖`, or of the largest eigenvalue in the first space."""
        upper = torch.full_like(self.theta, beside)
        if self._known is not None:
            upper = self._known[: len(upper)].maximum(upper)
        return SeveralEnds(self.theta, upper.maximum(self.theta), self.vectors)

    def upper_end(self, beta: Tensor, rarity: Tensor) -> float:
        """Of what this space runs on, Theorem 2.2.  beta: not below rounding."""
        if float(self.ritz[-1]) <= 0:
            return 0.0
        return float(certificate.upper_end(self.ritz[None], beta[None], rarity)[0])
