"""Growth over depth: constants and gains of the maps from layer to layer, Lyapunov exponents, and the coupling of blocks.

Let `J_l` be the Jacobian of block `l` at an input, all tokens together, and `Q_0` a random matrix of `k` orthonormal columns.
The decompositions `J_l Q_{l−1} = Q_l R_l` follow its columns from block to block (Benettin et al. 1980).
The finite-time Lyapunov exponents are `λ_i = (1/m) Σ_l log (R_l)_ii` over `m` blocks. The product of all `R` belongs to the
whole map, so `m (λ_1 + … + λ_i) ≤ log σ_1 + … + log σ_i` for its singular values, whatever `Q_0` is.

Coupling asks how well the directions of one block diagonalise the next one (Aubry, Meng, Sugolov & Papyan 2024, arXiv
2407.07810). With `U`, `V`, `S` the `k` largest singular triples of a block without its residual path, the misalignment of `l`
and `l + 1` is `‖U_lᵀ J_{l+1} V_l − S_{l+1}‖_F / ‖S_{l+1}‖_F`: 0 where they share these directions, and about 1 where they have
nothing to do with each other.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadFunctionError, BadInputError, NoConvergenceError
from howsmooth.models.capture import Capture, HowMeasured
from howsmooth.models.measurement import Measurement, Measurements
from howsmooth.models.model_input import ModelInput, Which
from howsmooth.program.ends import Ends
from howsmooth.program.segments import SegmentMap
from howsmooth.results import axes_for, html_table, plain_text
from howsmooth.settings import items, shown, whole
from howsmooth.solve import linear
from howsmooth.spectral import Operator
from howsmooth.spectral.operator import drawn, stream

if TYPE_CHECKING:
    import pandas

    from howsmooth.results import Axes


@final
@dataclass(frozen=True, eq=False)
class Depth:
    """How changes grow from layer to layer of a model at one input.

    Attributes:
        layers: Where maps begin, and which blocks they end behind.
        to_end: The map from what enters each layer to the end, each with its gain.
        from_first: The map from what enters the first layer to what leaves each, each with its gain.
        blocks: All blocks on the way, in order.
        stretches: `log (R_l)_ii` of every block and direction; `-inf` where nothing of a direction is left.
        misalignments: Of every block but the last with the one behind it, if asked for.
    """

    layers: tuple[int, ...]
    to_end: Measurements
    from_first: Measurements
    blocks: tuple[int, ...]
    stretches: Float[Tensor, "blocks k"]
    misalignments: tuple[float, ...] | None = None

    @property
    def exponents(self) -> Float[Tensor, " k"]:
        """The finite-time Lyapunov exponents, per block, of the directions in order."""
        return self.stretches.mean(0)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        both = {name: [m.to_dict() for m in getattr(self, name)] for name in ("to_end", "from_first")}
        numbers = {name: getattr(self, name).tolist() for name in ("stretches", "exponents")}
        off = None if self.misalignments is None else list(self.misalignments)
        return {"layers": list(self.layers), "blocks": list(self.blocks)} | both | numbers | {"misalignments": off}

    def lines(self) -> list[dict[str, Any]]:
        """One line for each layer, for a table."""
        off = dict(zip(self.blocks, self.misalignments or (), strict=False))
        return [
            {"layer": layer} | _both("to_end", end) | _both("from_first", first) | {"misalignment": off.get(layer)}
            for layer, end, first in zip(self.layers, self.to_end, self.from_first, strict=True)
        ]

    def to_frame(self) -> "pandas.DataFrame":
        """One row for each layer: both maps with their gains, and the misalignment with the next block."""
        import pandas

        return pandas.DataFrame.from_records(self.lines())

    def __str__(self) -> str:
        said = f"{'layer':>5} {'L to end':>10} {'gain':>8} {'L from first':>13} {'gain':>8}"
        lines = [
            f"{layer:>5} {end.value:>10.5g} {_gain(end):>8.4g} {first.value:>13.5g} {_gain(first):>8.4g}"
            for layer, end, first in zip(self.layers, self.to_end, self.from_first, strict=True)
        ]
        exponents = ", ".join(f"{e:.4g}" for e in self.exponents.tolist())
        more = [f"Lyapunov exponents over {len(self.blocks)} blocks: {exponents}"] if exponents else []
        return "\n".join([f"{self.to_end[0].model}, n = {self.to_end[0].n}", said, *lines, *more])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(f"{self.to_end[0].model}, n = {self.to_end[0].n}", self.lines())

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Constants and gains of the maps to the end and from the first layer, layer by layer."""
        ax = axes_for(ax, title=plain_text(self.to_end[0].model), xlabel="layer", ylabel="times")
        ax.set_yscale("log")
        for name, words in (("to_end", "to the end"), ("from_first", f"from layer {self.layers[0]}")):
            for column, what, style in ((name, "L", "-o"), (f"{name}_gain", "gain", "--o")):
                ax.plot(self.layers, [line[column] for line in self.lines()], style, label=f"{what} {words}")
        ax.legend()
        return ax


def _both(name: str, m: Measurement) -> dict[str, Any]:
    return {name: m.value, f"{name}_gain": _gain(m)}


def _gain(m: Measurement) -> float:
    return math.nan if m.gain is None else m.gain.value


def depth_of(
    captured: Capture,
    layers: Sequence[int] | None = None,
    to: int | str = "final",
    k: int = 8,
    coupling: int | None = None,
    exact: HowMeasured | None = None,
) -> Depth:
    """The growth over depth at the only input of a capture, as `Model.depth` describes it.

    exact: tol, certify and seed.
    """
    exact = exact or {}
    how: HowMeasured = {**exact, "gain": True}
    sample, count = captured.sample, captured.num_layers
    expected = f'"final" or a layer from 0 to {count - 1}'
    if to != "final" and not isinstance(to, Integral):
        raise BadInputError(f'expected to to be {expected}, got {shown(to)}; measure(layer, to="logits") goes further')
    last = count - 1 if to == "final" else whole(to, expected, "there is no other", below=count)
    given = range(last + 1) if layers is None else items(layers, "a list of layers", "leave it out for all of them")
    chosen = sorted({whole(layer, "layers counted from 0", "give whole numbers") for layer in given})
    if not chosen or chosen[-1] > last:
        raise BadInputError(
            f"expected layers up to {last}, where the maps end, got {chosen}; choose earlier ones, or a later to"
        )
    k = whole(k, "a whole number k ≥ 0 of directions", "k=8 is usual, 0 leaves the exponents out")
    if coupling is not None:
        coupling = whole(coupling, "coupling=None, or a number of directions", "8 is usual", least=1)
    maps = blocks(sample, chosen[0], last) if k else []  # refused before anything is measured
    if maps and k > (most := maps[0].start.numel()):
        raise BadInputError(f"expected k up to {most}, as many directions as there are, got {k}; ask for fewer")
    to_end = captured.measure(chosen, **{**how, "to": "final" if to == "final" else last})
    inward = [captured.measure(chosen[0], **{**how, "to": layer}) for layer in chosen if layer < last]
    from_first = Measurements([*inward, to_end[0]][: len(chosen)])
    start = random_directions(maps[0], k, to_end[0].estimate.seed) if maps else torch.zeros(0, 0)
    found = list(stretches((linear(f, f.start) for f in maps), start))
    rows = torch.stack(found) if found else torch.zeros(last + 1 - chosen[0], 0)
    off = None if coupling is None else tuple(misalignments(captured, range(chosen[0], last + 1), coupling, exact))
    return Depth(tuple(chosen), to_end, from_first, tuple(range(chosen[0], last + 1)), rows, off)


def blocks(sample: ModelInput, first: int, last: int) -> list[SegmentMap]:
    """The blocks from one layer to another as maps whose composition is the map from the first to the last.

    Each ends where the next begins. Refused where a way leads around a block, or where blocks have several streams.
    """
    for layer in range(first, last + 1):
        sample.check(layer, Which("block"))
    ends = [sample.ends(layer, Which("block")) for layer in range(first, last + 1)]
    far = sample.ends(first, Which("block", to=last))
    starts, flow = [e.enter for e in ends], far.flow
    through = flow.after(far.enter, far.leave)
    single = all(len(e) == 1 for e in (*starts, far.leave))
    if not single or any(e.flow is not flow for e in ends) or not {s[0] for s in starts[1:]} <= set(through):
        raise BadFunctionError(
            "expected blocks of one stream that follow each other, got others; pass k=0 for constants and gains alone"
        )
    leaves = [*starts[1:], far.leave]
    cut = [Ends(enter, leave, flow) for enter, leave in zip(starts, leaves, strict=True)]
    return [SegmentMap(sample.run, e, f"block {first + i}", None, sample.real, sample.work) for i, e in enumerate(cut)]


def random_directions(f: SegmentMap, k: int, seed: int) -> Float[Tensor, "k n d"]:
    """Orthonormal directions of the input of a map, the same for the same seed."""
    size, random = f.start.numel(), stream(seed, "lyapunov", f.device)
    q = torch.linalg.qr(drawn((size, k), random, torch.float64))[0]
    return q.mT.unflatten(1, tuple(f.start.shape))


@torch.no_grad()
def stretches(operators: Iterable[Operator], start: Float[Tensor, "k *in"]) -> Iterator[Float[Tensor, " k"]]:
    """`log R_ii` of orthonormal directions, operator after operator, with a QR decomposition in between.

    Where less is left of a direction than rounding, it is `-inf`.
    """
    q = start
    for operator in operators:
        z = operator.jvp(q.to(operator.device, operator.dtype)[:, None])[:, 0].double()
        if not bool(z.isfinite().all()):
            raise NoConvergenceError("expected finite products with the Jacobian, got NaN or infinity; rescale the map")
        turned, r = torch.linalg.qr(z.flatten(1).mT)
        left = r.diagonal().abs()
        least = operator.noise * r.norm(dim=0).max()
        yield torch.where(left > least, left, 0.0).log().cpu()
        q = turned.mT.unflatten(1, z.shape[1:])


def misalignments(captured: Capture, layers: Sequence[int], k: int, exact: HowMeasured) -> Iterator[float]:
    """Of every block with the next one, both without their residual paths; 0 where they share their `k` top directions."""
    before = None
    for layer in layers:
        spectrum = captured.measure(layer, "update", **{**exact, "k": k}).spectrum
        assert spectrum is not None
        if before is not None:
            operator = linear(captured.map(layer, "update"), captured.tokens(layer, "update"))
            image = operator.jvp(before.right.to(operator.device, operator.dtype)[:, None])[:, 0].double().flatten(1)
            turned = before.left.double().flatten(1).to(image.device) @ image.mT
            values = spectrum.values.to(image.device)
            size = float(values.norm())
            yield float((turned - values.diag()).norm()) / size if size > 0 else math.inf
        before = spectrum
