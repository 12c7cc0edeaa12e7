"""What a measurement of a model says, and many of them as a table."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from howsmooth.results import OneNumber, Results, axes_for, draw_intervals, html_table, plain_text
from howsmooth.spectral import Estimate, Gain, Spectrum, Status

if TYPE_CHECKING:
    import pandas

    from howsmooth.results import Axes

_MOST = 0.5  # share above which one token carries a direction
_NAMED = 64  # tokens of a figure that are written out
_SINK = 0.25  # share of all attention above which a token is a sink


@final
@dataclass(frozen=True, eq=False)
class Measurement(OneNumber):
    """The local Lipschitz constant of one map of one layer at one input, and what it is made of.

    Attributes:
        model: Its name.
        layer: The layer's number.
        module: The name of the module.
        map: Which map of the layer.
        head: Of one head alone, its number.
        tokens: The words that are measured.
        cut: Whether the layer's attention is a part of its own in the recorded run.
        estimate: The constant, with a lower and an upper bound.
        n: Tokens measured, padding left out.
        radius_rms: Root mean square norm of the tokens that enter.
        radius_max: Largest norm of the tokens that enter.
        logits: Least and greatest visible logit, nothing where the attention could not be cut out.
        input_share: How much of the worst direction falls on each token; sums to one.
        output_share: How much of the image of the worst direction falls on each token; sums to one.
        received: How much of all attention each token gets, averaged over heads and queries.
        output_norm: Frobenius norm of all tokens that leave, nothing for a head alone.
        to: Where the map ends, if behind its layer: a later layer, "final" or "logits".
        moving: Positions that may move, nothing where all may.
        within: Radius of the neighbourhood over which the constant is the largest one, nothing at the input itself.
        per: Whether that radius is one of every token or of all together.
        heads: One estimate per head, if asked for.
        gain: The mean gain of random changes, if asked for.
        spectrum: The largest singular values, if asked for.
        notes: What was widened, and that experts stay as chosen.
    """

    model: str
    layer: int
    module: str
    map: str
    head: int | None
    n: int
    estimate: Estimate
    radius_rms: float
    radius_max: float
    logits: tuple[float, float] | None
    tokens: tuple[str, ...]
    input_share: tuple[float, ...]
    output_share: tuple[float, ...]
    received: tuple[float, ...] | None
    cut: bool
    output_norm: float | None = None
    moving: tuple[int, ...] | None = None
    within: float | None = None
    per: str | None = None
    notes: tuple[str, ...] = ()
    heads: tuple[Estimate, ...] = ()
    to: int | str | None = None
    gain: Gain | None = None
    spectrum: Spectrum | None = None

    @property
    def value(self) -> float:
        return self.estimate.value

    @property
    def lower(self) -> float:
        return self.estimate.lower

    @property
    def upper(self) -> float:
        return self.estimate.upper

    @property
    def confidence(self) -> float:
        return self.estimate.confidence

    @property
    def status(self) -> Status:
        return self.estimate.status

    @property
    def direction(self) -> Tensor:
        """The worst direction, (n, d)."""
        return self.estimate.direction

    @property
    def relative(self) -> float | None:
        """`L·|x|/|f(x)|`: what a small change is of the output, over what it is of the input; nothing where `f(x)` is zero."""
        return self.value * self.radius_rms * self.n**0.5 / self.output_norm if self.output_norm else None

    @property
    def effective_inputs(self) -> float:
        """Over how many tokens the worst direction spreads: `1/Σ share²`, 1 for a single token, n for all alike."""
        return 1 / sum(s * s for s in self.input_share)

    @property
    def effective_outputs(self) -> float:
        """Over how many tokens its image spreads."""
        total = sum(s * s for s in self.output_share)
        return 1 / total if total else 0.0

    @property
    def sink(self) -> int | None:
        """The token that carries most of the worst direction and draws much of all attention, if there is one."""
        if self.received is None or self.n < 4:
            return None
        top = max(range(self.n), key=lambda i: self.input_share[i])
        return top if self.input_share[top] > _MOST and self.received[top] > _SINK else None

    @property
    def remark(self) -> str:
        """One sentence on which token carries the worst direction."""
        top = max(range(self.n), key=lambda i: self.input_share[i])
        share, word = self.input_share[top], self.tokens[top]
        if self.sink is not None and self.received is not None:
            return (
                f"attention sink: token {top} ({word!r}) draws {self.received[top]:.0%} of all attention and carries "
                f"{share:.0%} of the worst direction"
            )
        if share > _MOST:
            return f"token {top} ({word!r}) alone carries {share:.0%} of the worst direction"
        return f"the worst direction spreads over about {self.effective_inputs:.1f} of {self.n} tokens"

    def top_tokens(self, count: int = 5) -> list[tuple[int, str, float]]:
        """Position, word and share of the tokens that carry most of the worst direction."""
        order = sorted(range(self.n), key=lambda i: -self.input_share[i])[:count]
        return [(i, self.tokens[i], self.input_share[i]) for i in order]

    def row(self, kind: str = "layer", **more: Any) -> dict[str, Any]:
        """One line of a table: what a study stores and a page shows, without lists. more: further columns."""
        row = {"kind": kind, "model": self.model, "layer": self.layer, "map": self.map, "n": self.n}
        if self.head is not None:
            row["head"] = self.head
        row |= estimate_columns(self.estimate)
        return row | {"radius": self.radius_rms, "radius_max": self.radius_max, "cut": self.cut} | more

    def about(self) -> dict[str, Any]:
        """More columns: the relative constant, and the token that carries most of the worst direction."""
        (place, word, share), *_ = self.top_tokens(1)
        received = None if self.received is None else self.received[place]
        top = {"top_token": place, "top_word": word, "top_share": share, "top_received": received}
        return {"relative": self.relative} | top

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON; the direction is left out."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("estimate", "heads", "gain", "spectrum")}
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}
        said = {name: getattr(self, name) for name in ("relative", "effective_inputs", "effective_outputs", "sink", "remark")}
        more = {name: getattr(self, name) for name in ("gain", "spectrum")}
        more = {name: None if result is None else result.to_dict() for name, result in more.items()}
        return plain | self.estimate.to_dict() | said | {"heads": [e.to_dict() for e in self.heads]} | more

    def __str__(self) -> str:
        head = "" if self.head is None else f", head {self.head}"
        moving = "" if self.moving is None else f", {len(self.moving)} of them moving"
        near = "" if self.within is None else f" within {self.within:g} per {self.per}"
        return f"{self.model} layer {self.layer} {self.map}{head}, n = {self.n}{moving}{near}: {self.estimate}; {self.remark}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._title, [_line(self) | {"note": self.estimate.note}])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """How much of the worst direction and of its image falls on each token, as bars."""
        ax = axes_for(ax, title=plain_text(f"{self._title}: L = {self.value:.4g}"), ylabel="share")
        ax.bar([i - 0.2 for i in range(self.n)], self.input_share, 0.4, label="worst direction")
        ax.bar([i + 0.2 for i in range(len(self.output_share))], self.output_share, 0.4, label="its image")
        if self.n <= _NAMED:
            ax.set_xticks(range(self.n), [plain_text(word) for word in self.tokens], rotation=90)
        ax.legend()
        return ax

    @property
    def _title(self) -> str:
        head = "" if self.head is None else f", head {self.head}"
        return f"{self.model} layer {self.layer} {self.map}{head}, n = {self.n}"


@final
class Measurements(Results[Measurement]):
    """Measurements by layer, and within a layer by window. Prints as a table; `to_frame` gives a pandas data frame."""

    def to_frame(self) -> "pandas.DataFrame":
        """One row each: layer, map, n, value, both ends, radius, and what `Measurement.about` says."""
        import pandas

        rows = [m.row() | m.about() for m in self]
        return pandas.DataFrame.from_records(rows).drop(columns="kind", errors="ignore")

    def __str__(self) -> str:
        if not self:
            return "no measurements"
        first = self[0]
        lines = [
            f"{first.model}, {first.map}",
            f"{'layer':>5} {'n':>6} {'L':>10} {'at most':>10} {'status':<10} worst direction",
        ]
        lines += [f"{m.layer:>5} {m.n:>6} {m.value:>10.5g} {m.upper:>10.5g} {m.status:<10} {m.remark}" for m in self]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title = f"{self[0].model}, {self[0].map}" if self else "no measurements"
        return html_table(title, [_line(m) for m in self])

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """The constants by layer, with their intervals, one colour for each number of tokens."""
        title = plain_text(f"{self[0].model}, {self[0].map}") if self else "no measurements"
        ax = axes_for(ax, title=title, xlabel="layer", ylabel="local Lipschitz constant")
        for n in sorted({m.n for m in self}):
            some = [m for m in self if m.n == n]
            draw_intervals(ax, [m.layer for m in some], some, f"n = {n}")
        if self:
            ax.legend()
        return ax


def _line(m: Measurement) -> dict[str, Any]:
    """One line of a table in a notebook."""
    said = {"layer": m.layer, "n": m.n, "L": m.value, "at least": m.lower, "at most": m.upper}
    return said | {"status": m.status, "worst direction": m.remark}


def estimate_columns(estimate: Estimate) -> dict[str, Any]:
    """What every row says of its number."""
    names = ("value", "lower", "upper", "confidence", "status", "steps", "seed")
    return {name: getattr(estimate, name) for name in names}
