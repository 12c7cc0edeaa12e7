"""Attacks on any map at an input: for a budget `ε`, how far can the output be moved, and how much of `L ε` is that?

The budget is the Frobenius norm of the change of the input; the gain of an attack is (change of the output)/(change of the
input). To first order no attack gains more than `L`, and the top singular direction gains `L`; docs/explanation/worst-inputs.md
§3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import BadFunctionError, BadInputError, HowSmoothError
from howsmooth.maps.base import check_finite, check_input
from howsmooth.maps.jacobian import applied
from howsmooth.search.sets import length_of
from howsmooth.settings import choice, items, seed_of, whole
from howsmooth.solve import Function, Options, solve
from howsmooth.spectral import Estimate, GolubKahan
from howsmooth.theory.splitting import in_double

METHODS = ("noise", "one step", "projected gradient", "singular", "relinearised", "splitting")

_TOL = 2e-4  # of the singular direction
_ROUNDING = 1e3  # a change below this many roundings of what changes is not measured
_STEP = 2.5  # a projected gradient's path, in units of its budget (Madry et al. 2018)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Attack:
    """One attack at one budget.

    moved: length of the change of the input, at most `epsilon`.  change: length of the change of the output, None where there
    is none to report and `note` says why.  predicted: the gain to first order of the best attack of its kind.
    calls: evaluations with a derivative and products with the Jacobian that it took; for noise, evaluations.
    perturbation: the change of the input; for splitting, what one half of each token is moved by, the other by its opposite.
    """

    method: str
    epsilon: float
    moved: float
    change: float | None
    predicted: float
    calls: int
    note: str
    perturbation: Float[Tensor, "..."] | None

    @property
    def gain(self) -> float | None:
        """Change of the output over change of the input."""
        return None if self.change is None or self.moved == 0 else self.change / self.moved

    @property
    def share(self) -> float | None:
        """Gain over what first order predicts."""
        return None if self.gain is None or self.predicted == 0 else self.gain / self.predicted

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; the perturbation is left out."""
        names = ("method", "epsilon", "moved", "change", "gain", "predicted", "share", "calls", "note")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        gain = self.note if self.gain is None else f"gain {self.gain:.4g} of {self.predicted:.4g}"
        return f"Attack({self.method}, budget {self.epsilon:.3g}, {gain})"


@final
@dataclass(frozen=True, eq=False)
class Attacks(Sequence[Attack]):
    """All attacks at all budgets, and the constant they are measured against."""

    estimate: Estimate
    rows: tuple[Attack, ...]

    def __getitem__(self, index):
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {"estimate": self.estimate.to_dict(), "attacks": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        lines = [
            f"L = {self.estimate.value:.6g}",
            f"{'budget':>10}  {'attack':<19}{'gain':>10}{'first order':>13}{'share':>8}{'calls':>7}",
        ]
        for r in self.rows:
            gain = "–" if r.gain is None else f"{r.gain:.4g}"
            share = "–" if r.share is None else f"{r.share:.1%}"
            note = f"  {r.note}" if r.note else ""
            lines.append(f"{r.epsilon:>10.3g}  {r.method:<19}{gain:>10}{r.predicted:>13.4g}{share:>8}{r.calls:>7}{note}")
        return "\n".join(lines)

    __repr__ = __str__


def attack(
    f: Function,
    x: Float[Tensor, "..."],
    epsilons: Sequence[float] | float | None = None,
    *,
    methods: Sequence[str] = METHODS,
    steps: int = 10,
    doubled: Function | None = None,
    seed: int = 0,
) -> Attacks:
    """Attack `f` at `x` within every budget, in every way, in float64 where `f` can be.

    noise: the best of random directions.  one step: along the gradient at a random point.  projected gradient: many such steps.
    singular: the top singular direction, either sign.  relinearised: from there, `steps` times to what the Jacobian at the
    perturbed input makes best.  splitting: the halves of one token pushed apart. Noise, projected gradient and relinearised may
    spend the same calls.

    f: a map, or a function of one input, which must be deterministic.  x: one input, (n, d) or for a function any shape.
    epsilons: budgets, by default 10⁻⁴, 10⁻² and 10⁻¹ of the length of `x`.  steps: re-linearisations.
    doubled: the same map on twice as many tokens, where `f` is tied to a length.

    >>> from howsmooth.maps import Attention
    >>> attn = Attention.from_matrices(-torch.eye(2), torch.eye(2))
    >>> rows = attack(attn, torch.tensor([[1.0, 0.0], [-1.0, 0.5], [-1.0, 0.0]]), 1e-4, methods=["singular"])
    >>> rows[0].share > 0.98
    True
    """
    check_input(x)
    check_finite(x, "input")
    methods = [choice(m, "methods", METHODS) for m in items(methods, "a list of methods", f"name some of {', '.join(METHODS)}")]
    if not methods:
        raise BadInputError(f"expected a method or more, got none; name some of {', '.join(METHODS)}")
    steps = whole(steps, "a whole number of steps, at least 1", "10 is the usual one", least=1)
    seed = seed_of(seed)
    f, x = in_double(f, x.detach())
    y = _value(f, x)
    if not bool(y.isfinite().all()):
        raise BadFunctionError("expected a finite output, got NaN or infinity; check the function at this x")
    estimate = solve(f, x, Options(_TOL, None, seed, GolubKahan()))[0]
    budgets = _budgets(epsilons, x, y, estimate.value)
    split: _BestSplitting | str = ""
    if "splitting" in methods:
        split = _best_splitting(f if doubled is None else in_double(doubled, x)[0], x, y, estimate.value, seed)
    rows = []
    for epsilon in budgets:
        run = _Budget(f, x, y, epsilon, estimate, steps, seed)
        rows += [run.split(split) if method == "splitting" else run.attack(method) for method in methods]
    return Attacks(estimate, tuple(rows))


def _budgets(epsilons: Sequence[float] | float | None, x: Tensor, y: Tensor, constant: float) -> list[float]:
    """The budgets asked for, none so small that input or output round the change away."""
    size = max(float(x.norm()), _length(y) / constant if constant > 0 else 0.0)
    least = _ROUNDING * torch.finfo(x.dtype).eps * size
    if epsilons is None:
        length = float(x.norm()) or 1.0
        return [max(s * length, 2 * least) for s in (1e-4, 1e-2, 1e-1)]
    several: list[Any] = [epsilons] if isinstance(epsilons, Real) else items(epsilons, "a budget or a list", "give lengths")
    budgets = [length_of(epsilon, "budget epsilon") for epsilon in several]
    for epsilon in budgets:
        if epsilon < least:
            raise BadInputError(f"expected epsilon ≥ {least:.1e}, got {epsilon:g}; below it {x.dtype} rounds the change away")
    return budgets


class _Budget:
    """The attacks of one budget."""

    def __init__(self, f: Function, x: Tensor, y: Tensor, epsilon: float, estimate: Estimate, steps: int, seed: int):
        self.f, self.x, self.y, self.epsilon, self.estimate, self.steps, self.seed = f, x, y, epsilon, estimate, steps, seed
        self.calls = 2 * estimate.steps + steps  # what the relinearised attack may spend

    def attack(self, method: str) -> Attack:
        way: dict[str, Callable[[], tuple[Tensor, int]]] = {
            "noise": self._noise,
            "one step": lambda: self._gradient(1),
            "projected gradient": lambda: self._gradient(self.calls),
            "singular": self._singular,
            "relinearised": self._relinearised,
        }
        delta, calls = way[method]()
        return self._row(method, delta, self._change(delta), self.estimate.value, calls, "")

    def split(self, split: "_BestSplitting | str") -> Attack:
        if isinstance(split, str):
            return Attack("splitting", self.epsilon, self.epsilon, None, 0.0, 0, split, None)
        delta = self.epsilon * split.direction
        return self._row("splitting", delta, split.change(delta), split.gain, split.calls, split.note)

    def _row(self, method: str, delta: Tensor, change: float | None, predicted: float, calls: int, note: str) -> Attack:
        if change == -math.inf:
            change, note = None, f"the output is not finite at this budget{'; ' + note if note else ''}"
        return Attack(method, self.epsilon, float(delta.norm()), change, predicted, calls, note, delta)

    def _noise(self) -> tuple[Tensor, int]:
        return max(self._random(self.calls), key=self._change), self.calls

    def _gradient(self, calls: int) -> tuple[Tensor, int]:
        """`δ ← Π(δ + α ∇/|∇|)`, `∇ = J(x + δ)ᵀ(f(x + δ) − f(x))`, from a random point; one step goes all the way."""
        (delta,) = self._random(1)
        best, most = delta, -math.inf
        length = self.epsilon * (_STEP / calls if calls > 1 else 1e6)
        for _ in range(calls):
            change, g = self._slope(delta)
            if calls > 1 and change > most:
                best, most = delta, change
            delta = self._on_sphere(delta + length * _unit(g))
        return (delta if self._change(delta) > most else best), calls

    def _singular(self) -> tuple[Tensor, int]:
        v = self._on_sphere(self.estimate.direction.to(self.x))
        return max((v, -v), key=self._change), 2 * self.estimate.steps

    def _relinearised(self) -> tuple[Tensor, int]:
        """`δ ← ε ∇/|∇|`, all the way from the singular direction; a step that loses is taken back, the next is half as far."""
        delta, calls = self._singular()
        share, trial, most, g = 1.0, delta, -math.inf, torch.zeros_like(delta)
        for _ in range(self.steps):
            change, slope = self._slope(trial)
            if change > most:
                delta, most, g, share = trial, change, slope, min(1.0, 2 * share)
            else:
                share /= 2
            trial = self._on_sphere((1 - share) * delta + share * self.epsilon * _unit(g))
        return (trial if self._change(trial) > most else delta), calls + self.steps

    def _slope(self, delta: Tensor) -> tuple[float, Tensor]:
        """The change at `x + delta`, and the gradient of half its square."""
        with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            moved = (self.x + delta).detach().requires_grad_()
            change = self.f(moved) - self.y
            (g,) = torch.autograd.grad(change, moved, change.detach())
        return _length(change.detach()), torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0)

    def _change(self, delta: Tensor) -> float:
        return _length(_value(self.f, self.x + delta) - self.y)

    def _random(self, count: int) -> list[Tensor]:
        """Random points of the sphere, the same for every method."""
        draw = torch.Generator().manual_seed(self.seed)
        points = (torch.randn(self.x.shape, generator=draw, dtype=torch.float64) for _ in range(count))
        return [self._on_sphere(point.to(self.x)) for point in points]

    def _on_sphere(self, delta: Tensor) -> Tensor:
        return self.epsilon * _unit(delta)


class _BestSplitting(NamedTuple):
    """How one token is best split: every token doubled, the halves of one moved by `±direction`.

    Each half carries half the mass of a token, so moving both by `±e` costs `(½|e|² + ½|e|²)^½ = |e|` and the output's change
    is weighted in the same way: `W₂` between the measures, times √n.
    """

    change: Callable[[Tensor], float]
    direction: Tensor
    gain: float
    calls: int
    note: str


def _best_splitting(f: Function, x: Tensor, y: Tensor, constant: float, seed: int) -> _BestSplitting | str:
    """The best splitting, or why there is none."""
    if x.ndim != 2:
        return "a sequence of tokens (n, d) is needed to split one"
    doubled = x.repeat_interleave(2, 0)
    try:
        base = _value(f, doubled)
    except (HowSmoothError, RuntimeError, ValueError, IndexError):
        return "the function does not take twice as many tokens"
    token_wise = base.shape[0] == 2 * y.shape[0] and y.shape[0] == len(x)
    if not token_wise and base.shape != y.shape:
        return "the output of the doubled input cannot be compared"
    weight = 0.5**0.5 if token_wise else 1.0
    same = y.repeat_interleave(2, 0) if token_wise else y
    drift = float((base - same).norm() / same.norm().clamp_min(torch.finfo(y.dtype).tiny))

    def halves(delta: Tensor) -> Tensor:
        return f(doubled + torch.stack([delta, -delta], 1).flatten(0, 1))

    try:
        whole = solve(halves, torch.zeros_like(x), Options(_TOL, None, seed, GolubKahan()))[0]
        token = int(whole.direction.square().sum(-1).argmax())
        at = torch.nn.functional.one_hot(torch.tensor(token), len(x)).to(x)[:, None]
        one = solve(lambda e: halves(at * e), torch.zeros_like(x[0]), Options(_TOL, None, seed))[0]
    except BadFunctionError:
        return "the output does not depend on how tokens are split"
    if weight * one.value <= 1e-9 * constant:
        return "splitting a token moves nothing to first order"
    note = f"token {token}"
    if drift >= 1e-6:  # far above float64's rounding
        note += f"; doubling alone moves the output by {drift:.1%}: order matters, gains are of the doubled input"
    return _BestSplitting(
        change=lambda delta: weight * _length(_value(halves, delta) - base),
        direction=at * one.direction.to(x),
        gain=weight * one.value,
        calls=2 * (whole.steps + one.steps),
        note=note,
    )


@torch.no_grad()
def _value(f: Function, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return applied(f, x.clone())


def _length(t: Tensor) -> float:
    """The norm, its squares kept in range; −inf where it is not finite, so that no attack chooses that."""
    size = float(t.abs().max())
    length = size * float((t / size).norm()) if 0 < size < math.inf else size
    return length if math.isfinite(length) else -math.inf


def _unit(g: Tensor) -> Tensor:
    return g / g.norm().clamp_min(torch.finfo(g.dtype).tiny)
