"""Moving tokens against splitting one, for the maps of this package and for any permutation-equivariant function."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadFunctionError
from howsmooth.maps.jacobian import applied, doubled
from howsmooth.measures.measure import Measure
from howsmooth.spectral import Estimate, svd
from howsmooth.spectral.operator import Operator
from howsmooth.theory.blocks import block_direction, block_norms

_TIE = 1e-9  # relative difference that rounding explains
_BLOCKS = 2**26  # entries of a function's splitting blocks that are formed


@final
@dataclass(frozen=True, eq=False)
class Splitting:
    """What splitting one token adds to moving all of them.

    Attributes:
        moved: The constant of moving whole tokens, with both ends.
        split: That of splitting one, `max_i ‖S_i‖`, with both ends.
        token: The one whose splitting does most; of a measure, after equal atoms are merged.
        direction: (d,), the unit vector along which its halves part.
        norms: (n,), what splitting each token attains.
    """

    moved: Estimate
    split: Estimate
    token: int
    direction: Float[Tensor, " d"]
    norms: Float[Tensor, " n"]

    @property
    def gain(self) -> float:
        """How many times more splitting does than moving; infinite where moving does nothing."""
        if self.moved.value == 0:
            return math.inf if self.split.value > 0 else 0.0
        return self.split.value / self.moved.value

    @property
    def pays(self) -> bool:
        """Whether splitting does more than moving; a tie, as for maps that act token by token, does not pay."""
        return self.split.value > self.moved.value * (1 + _TIE)

    @property
    def certain(self) -> bool:
        """Whether the two intervals decide `pays` (with probability `confidence`)."""
        if self.pays:
            return self.split.lower > self.moved.upper
        return self.split.upper <= self.moved.lower * (1 + _TIE)

    @property
    def confidence(self) -> float:
        """The probability with which both intervals hold."""
        return max(0.0, self.moved.confidence + self.split.confidence - 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON; an infinite gain is None."""
        plain = {name: getattr(self, name) for name in ("pays", "certain", "confidence", "token")}
        gain = self.gain if math.isfinite(self.gain) else None
        return {"gain": gain, **plain, "moved": self.moved.to_dict(), "split": self.split.to_dict()}

    def __str__(self) -> str:
        verdict = "pays" if self.pays else "does not pay"
        sure = "" if self.certain else ", not certain"
        return (
            f"splitting {verdict}{sure}: token {self.token} split gives {self.split.value:.6g}, "
            f"moving gives {self.moved.value:.6g}, gain {self.gain:.4g}"
        )

    __repr__ = __str__


def of_blocks(moved: Estimate, operator: Operator, mu: Measure, above: float = 0.0) -> Splitting:
    """The answer for a map.

    moved: the constant of moving the atoms of `mu`.  operator: what it is the norm of.  above: as for `block_norms`.
    """
    norms = block_norms(operator, above)
    token = int(norms.value[0].argmax())
    along, value = block_direction(operator, token)
    lower = min(value, float(norms.lower.max()))
    direction = torch.zeros_like(moved.direction)
    direction[token] = along / float(mu.mass[token]) ** 0.5
    upper = max(value, float(norms.upper.max()))
    narrow = "certified" if upper <= lower * (1 + (moved.certify or moved.tol)) else "converged"
    status = "dense" if norms.confidence == 1 else narrow
    split = replace(moved, value=value, lower=lower, upper=upper, confidence=norms.confidence, status=status, split=True)
    split = replace(split, direction=direction, steps=0, precision="float64", noise=0.0)  # blocks are formed, not multiplied
    return Splitting(moved, split, token, along, norms.value[0])


Function = Callable[[Tensor], Tensor]


def halves(f: Function, x: Float[Tensor, "n d"], seed: int) -> tuple[Function, Function, Tensor]:
    """On tokens written twice: the functions of moving both copies together and of moving them apart, and `x` in float64."""
    f, x = in_double(f, x)
    f, n = partial(applied, f), len(x)
    _check_equivariant(f, x, seed)

    def together(t: Tensor) -> Tensor:
        return f(torch.cat([t, t]))[:n]

    def apart(e: Tensor) -> Tensor:
        return f(torch.cat([x + e, x - e]))[:n]

    return together, apart, x


def of_halves(moved: Estimate, split: Estimate, jacobian: Operator) -> Splitting:
    """The answer for a function. moved, split: constants of `halves`.  jacobian: of moving apart, at rest."""
    norms, directions = _blocks(jacobian, split.direction)
    token = int(norms.argmax())
    direction = torch.zeros_like(split.direction)
    direction[token] = directions[token].to(direction)
    value, lower = max(split.value, float(norms[token])), max(split.lower, (1 - jacobian.noise) * float(norms[token]))
    split = replace(split, value=value, lower=lower, upper=max(split.upper, value), direction=direction, split=True)
    return Splitting(moved, split, token, directions[token], norms)


def in_double(f: Function, x: Tensor) -> tuple[Function, Tensor]:
    """Function and input in float64, where the function can be."""
    g = doubled(f)
    try:
        with torch.no_grad():
            y = g(x.double())
    except Exception:  # what it is, is told where the function is used
        return f, x
    return (g, x.double()) if isinstance(y, Tensor) and y.dtype == torch.float64 else (f, x)


def _blocks(jacobian: Operator, direction: Tensor) -> tuple[Tensor, Tensor]:
    """What splitting each token attains, (n,), and along which directions, (n, d).

    The Jacobian is block diagonal (Proposition 5.7), so one product serves all tokens: with every unit vector where the blocks
    fit in memory, else with the direction that a solver gave.
    """
    n, d = jacobian.in_shape
    if n * d * jacobian.out_shape[-1] <= _BLOCKS:
        probes = torch.eye(d, dtype=jacobian.dtype, device=jacobian.device)[:, None, None].expand(-1, 1, n, -1)
        blocks = jacobian.jvp(probes)[:, 0].permute(1, 2, 0)  # (n, d_out, d)
        _, sigma, right = svd(blocks.double())
        return sigma[:, 0], right[:, 0]
    v = direction.to(jacobian.dtype)
    length = v.norm(dim=-1).clamp_min(torch.finfo(v.dtype).tiny)
    norms = jacobian.jvp(v[None, None])[0, 0].norm(dim=-1) / length
    # rows that are rounding say nothing
    return torch.where(length > 1e-6 * length.max(), norms, 0.0).double(), (v / length[:, None]).double()


def _check_equivariant(f: Function, x: Float[Tensor, "n d"], seed: int) -> None:
    """Refuse a function that does not commute with permutations of tokens.

    Tried near the tokens written twice, with a shift and an exchange, which generate all permutations.
    """
    n = len(x)
    random = torch.Generator().manual_seed(seed)
    size = float(x.abs().max()) or 1.0
    z = torch.cat([x, x]) + 0.01 * size * torch.randn(2 * n, x.shape[1], generator=random).to(x)
    with torch.no_grad():
        y = f(z)
        if not isinstance(y, Tensor) or y.ndim != 2 or len(y) != 2 * n:
            got = f"shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
            raise BadFunctionError(
                f"expected one output row per token, ({2 * n}, d_out), got {got}; splitting needs a map of tokens"
            )
        shift, exchange = torch.arange(2 * n).roll(1), torch.tensor([1, 0, *range(2, 2 * n)])
        for order in (shift.to(x.device), exchange.to(x.device)):
            off = float((f(z[order]) - y[order]).norm() / y.norm().clamp_min(torch.finfo(y.dtype).tiny))
            if not off <= 1e4 * torch.finfo(y.dtype).eps:
                raise BadFunctionError(
                    f"expected a function that commutes with permutations of tokens, got outputs {off:.1e} apart; "
                    "drop masks, positions and dropout, or pass causal attention as an Attention layer"
                )
