"""Inputs through a model, and any maps of any layers measured there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from numbers import Integral
from typing import Any, TypedDict, Unpack, final, overload

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels import AttentionKernel
from howsmooth.maps import Attention, AttentionJacobian
from howsmooth.models.closed import ClosedForms, closed_form, in_pieces
from howsmooth.models.measurement import Measurement, Measurements
from howsmooth.models.model_input import ATTENTION, ModelInput, Which
from howsmooth.models.tokens import Window
from howsmooth.program.ends import End, MapName
from howsmooth.program.segments import SegmentJacobian, SegmentMap
from howsmooth.progress import Progress, progress_bar
from howsmooth.results import shares
from howsmooth.settings import Per, Positions, flag, items, meant, moving, number, shown, whole
from howsmooth.solve import Options, Solved, solve, solve_batch
from howsmooth.spectral import Estimate, GaussianProbes
from howsmooth.theory.around import Neighbourhood
from howsmooth.verbs import solve_near

LOCK_STEP = 512  # tokens of windows that are solved together; longer ones gain nothing from company


class HowMeasured(TypedDict, total=False):
    """What `Capture.measure` takes by name."""

    layers: Sequence[int] | None
    head: int | None
    heads: bool
    factor: float
    tokens: Positions | None
    to: End | None
    stream: int | None
    call: int | None
    closed: bool | None
    within: float | None
    per: Per
    steps: int | None
    tol: float
    certify: float | None
    seed: int | None
    gain: bool
    k: int | None


MEASURED = ("layer", "map", *HowMeasured.__annotations__)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Capture:
    """A model at one input, or at several windows: its recorded run there.

    `measure` gives the constants of maps of layers; nothing is run again but those layers' blocks. `attention` gives a layer
    as `howsmooth.Attention`, `map` any map as it is, `tokens` what enters it. `capture[i]` is the capture of one window.
    """

    model: str
    samples: tuple[ModelInput, ...]
    forms: ClosedForms
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | slice) -> "Capture":
        if isinstance(index, slice):
            if not self.samples[index]:
                raise BadInputError(f"expected a window or more, got none of {len(self)}; take a slice that is not empty")
            return replace(self, samples=self.samples[index])
        count = len(self)
        at = whole(index, f"a window from 0 to {count - 1}", "there is no other", least=-count, below=count)
        return replace(self, samples=(self.samples[at],))

    def __iter__(self) -> Iterator["Capture"]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        lengths = sorted({len(s.segment(0).start) if s.layers.found[0].groups else len(s.window) for s in self.samples})
        span = " to ".join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))
        return f"Capture({self.model}, {self.num_layers} layers, {len(self)} × {span} tokens)"

    @property
    def sample(self) -> ModelInput:
        """The only input."""
        if len(self.samples) != 1:
            raise BadInputError(f"expected a capture of one input, got {len(self)} windows; take one of them, as in capture[0]")
        return self.samples[0]

    @property
    def window(self) -> Window:
        """The only input in words."""
        return self.sample.window

    @property
    def num_layers(self) -> int:
        return len(self.samples[0].layers.found)

    @property
    def names(self) -> tuple[str, ...]:
        """The attention modules, in order; where a layer has none, its block."""
        layers = self.samples[0].layers
        return tuple(layers.module_of(layer) or layer.path for layer in layers.found)

    def heads(self, layer: int) -> int:
        """How many heads a layer has; 0 where they cannot be told apart."""
        self.samples[0].check(layer, ATTENTION)
        return self.samples[0].segment(layer).ends.heads

    def tokens(self, layer: int, map: MapName = "attention") -> Tensor:
        """What enters a map of the only input, (n, d), padding left out."""
        self.sample.check(layer, Which(map))
        return self.sample.segment(layer, Which(map)).start

    def map(
        self,
        layer: int,
        map: MapName = "attention",
        head: int | None = None,
        *,
        to: End | None = None,
        stream: int | None = None,
        call: int | None = None,
    ) -> SegmentMap:
        """A map of a layer at the only input, to be called or measured like any other map."""
        return self.sample.map(layer, Which(map, head, to, stream, call))

    def attention(self, layer: int) -> Attention:
        """A layer as `howsmooth.Attention` in float64, for bounds and searches; refused where it is not of that form.

        Its mask is that of the only input; `tokens(layer)` are the tokens that enter it there.
        """
        return closed_form(self.sample, layer)

    def closed(self, layer: int) -> Attention | None:
        """A layer in the precision of the measurement, read off once for all captures of a model; None where refused."""
        self.sample.check(layer, ATTENTION)
        return self.forms.of(self.sample, layer)

    @overload
    def measure(self, layer: int, map: MapName = ..., **how: Unpack[HowMeasured]) -> Measurement: ...
    @overload
    def measure(self, layer: Sequence[int] | None = ..., map: MapName = ..., **how: Unpack[HowMeasured]) -> Measurements: ...
    def measure(
        self,
        layer: int | Sequence[int] | None = None,
        map: MapName = "attention",
        *,
        layers: Sequence[int] | None = None,
        head: int | None = None,
        heads: bool = False,
        factor: float = 1.0,
        tokens: Positions | None = None,
        to: End | None = None,
        stream: int | None = None,
        call: int | None = None,
        closed: bool | None = None,
        within: float | None = None,
        per: Per = "token",
        steps: int | None = None,
        tol: float = 1e-3,
        certify: float | None = None,
        seed: int | None = None,
        gain: bool = False,
        k: int | None = None,
        **unknown: Any,
    ) -> Measurement | Measurements:
        """The constants of a map: of one layer at one input, or of several layers (all where none is named) at every window.

        Args:
            layer: A number, or a list of them; all by default.
            layers: The same; give one of the two.
            head: That head alone, through its part of the output projection.
            heads: Also one estimate per head.
            factor: What the tokens that enter are multiplied by.
            tokens: The positions that may move, as `Measurement.tokens` counts them, or a mask that is true there; the
                others are frozen, all outputs count.
            to: From what enters the layer's block to what leaves a later one, by its number; "final" for the last block,
                before the final norm; "logits" for what the model returns.
            stream: Of several streams that attention joins, one of them; all as one input by default.
            call: Of a block that attends several times, another attention than the first.
            closed: Measure a layer's closed form, read off once and kept, where it has one, short windows in lock step; by
                default where there are several windows.
            within: The largest constant over all inputs this close, as in `howsmooth.lipschitz`; in float64, for maps of
                self-attention that are made of known pieces (docs/howto/certified.md).
            per: Whether `within` is a length of every token or of all together, as in `howsmooth.lipschitz`.
            steps: Of the search within, as in `howsmooth.lipschitz`.
            tol: As in `howsmooth.lipschitz`.
            certify: As in `howsmooth.lipschitz`.
            seed: As in `howsmooth.lipschitz`.
            gain: Also the mean gain, as in `howsmooth.gain`, from 16 probes.
            k: Also the `k` largest singular values with their directions, as in `howsmooth.lipschitz`, as `spectrum`.
        """
        for name in unknown:
            raise BadInputError(f"expected arguments of measure, got {shown(name)}; {meant(name, MEASURED)}")
        if layers is not None:
            if layer is not None:
                raise BadInputError("expected either layer or layers, got both; a list of layers goes in either")
            layer = items(layers, "a list of layers", "pass layer=0 for one of them")
        options = Options(tol, certify, seed, gain=GaussianProbes() if flag(gain, "gain") else None, k=k)
        one = isinstance(layer, Integral)
        if one and len(self) > 1:
            raise BadInputError(
                f"expected a list of layers for a capture of {len(self)} windows, got {layer}; pass [{layer}], or take one "
                "window, as in capture[0]"
            )
        expected, fix = "a layer, a list of layers, or None for all", "count from 0"
        chosen: Sequence[Any] = [layer] if one else range(self.num_layers) if layer is None else items(layer, expected, fix)
        if not chosen:
            raise BadInputError(f"expected {expected}, got an empty list; {fix}")
        closed = (len(self) > 1 and within is None) if closed is None else flag(closed, "closed")
        which = Which(map if to is None else "block", head, to, stream, call)
        for index in chosen:
            for sample in self.samples:
                sample.check(index, which)
        settings = _Settings(
            which=replace(which, head=None if head is None else int(head)),
            heads=flag(heads, "heads"),
            factor=number(factor, "a positive factor below 1e6", "1 leaves the tokens as they are", above=0.0, below=1e6),
            options=options,
            within=within,
            per=per,
            steps=steps,
        )
        if within is None and (per != "token" or steps is not None):
            raise BadInputError("expected within=r beside per and steps, got none; they say how an input may move")
        if within is not None and (settings.heads or closed or options.gain is not None or k is not None):
            raise BadInputError("expected none of heads, closed, gain, k beside within, got one; measure that without within")
        measured: list[Measurement] = []
        with Progress() if len(chosen) == 1 else progress_bar("layers") as bar:
            bar.begin(len(chosen))
            for index in (int(i) for i in chosen):
                if tokens is not None:
                    for sample in self.samples:  # a mask fits one length alone, positions are the same at all
                        free = moving(tokens, len(sample.segment(index, settings.which).start))
                        settings = replace(settings, options=replace(options, tokens=free))
                if within is not None:
                    measured += [self._near(sample, index, settings) for sample in self.samples]
                elif closed and settings.which in (Which(), Which(head=settings.which.head)):
                    measured += self._closed_layer(index, settings)
                else:
                    measured += [self._of_segment(sample, index, settings) for sample in self.samples]
                bar.advance()
        return measured[0] if one else Measurements(measured)

    def _closed_layer(self, layer: int, settings: "_Settings") -> list[Measurement]:
        """A layer at every window, in closed form where it has one."""
        measured: list[Measurement] = []
        for length, run in groupby(self.samples, lambda s: len(s.segment(layer).start)):
            together = list(run)
            size = max(1, LOCK_STEP // length)
            for first in range(0, len(together), size):
                some = together[first : first + size]
                attn = self.forms.of(some[0], layer)
                if attn is None or any(self.forms.of(s, layer) is not attn for s in some[1:]):
                    measured += [self._of_segment(s, layer, settings) for s in some]
                else:
                    measured += self._of_closed(some, layer, attn, settings)
        return measured

    def _of_segment(self, sample: ModelInput, layer: int, settings: "_Settings") -> Measurement:
        """Through the model's recorded run, the attention calls in it on the kernels."""
        segment, solved = sample.solve(layer, settings.which, settings.factor, settings.options)
        operator = solved.operator
        kernels = operator.kernels if isinstance(operator, SegmentJacobian) else []
        output = operator.output if isinstance(operator, SegmentJacobian) else None
        alone: tuple[Estimate, ...] = ()
        if settings.heads and segment.on_kernels:
            x = settings.factor * segment.start
            options = replace(settings.options, gain=None, k=None)
            alone = tuple(solve(segment.of(head=h), x, options).estimate for h in range(segment.ends.heads))
        return self._measurement(sample, layer, settings, segment, solved, output, kernels, alone)

    def _near(self, sample: ModelInput, layer: int, settings: "_Settings") -> Measurement:
        """The largest constant near the input, of a map made of known pieces."""
        assert settings.within is not None
        which = settings.which
        segment = sample.map(layer, which)
        x = settings.factor * segment.start.double()
        area = Neighbourhood.of(x, settings.within, settings.per, settings.options.tokens)
        f = in_pieces(sample, layer, which, settings.within)
        estimate = solve_near(f, area, settings.options.tokens, settings.steps, settings.options)
        point = x if estimate.point is None else estimate.point
        operator = f.linearize(point[None])[1]
        image = operator.jvp(estimate.direction.double()[None, None])[0, 0]
        with torch.no_grad():
            ran = segment.replayed(x.to(segment.work))
        solved = Solved(estimate, operator, image)
        return self._measurement(sample, layer, settings, segment, solved, ran.output, ran.kernels, ())

    def _of_closed(self, samples: list[ModelInput], layer: int, attn: Attention, settings: "_Settings") -> list[Measurement]:
        """In closed form, several windows in lock step."""
        x = settings.factor * torch.stack([s.segment(layer).start for s in samples])
        solved = solve_batch(attn if settings.which.head is None else attn.head(settings.which.head), x, settings.options)
        operator = solved.operator
        assert isinstance(operator, AttentionJacobian)
        count = attn.heads if settings.heads else 0
        options = replace(settings.options, gain=None, k=None)
        alone = [solve_batch(attn.head(h), x, options).estimates for h in range(count)]
        measured, outputs = [], operator.layer.finish(operator.kernel.output)
        for i, sample in enumerate(samples):
            segment = sample.segment(layer, settings.which)
            kernel = operator.kernel if len(samples) == 1 else operator.kernel.select(torch.tensor([i], device=x.device))
            heads = tuple(head[i] for head in alone)
            measured.append(self._measurement(sample, layer, settings, segment, solved.of(i), outputs[i], [kernel], heads))
        return measured

    def _measurement(
        self,
        sample: ModelInput,
        layer: int,
        settings: "_Settings",
        segment: SegmentMap,
        solved: Solved,
        output: Tensor | None,
        kernels: Sequence[AttentionKernel],
        heads: tuple[Estimate, ...],
    ) -> Measurement:
        lengths = (settings.factor * segment.start.double()).norm(dim=-1)
        n, which = len(lengths), settings.which
        own = len(sample.words) == n and which.map != "context"  # a context has tokens of its own
        words = sample.words if own else tuple(map(str, range(n)))
        ranges = [kernel.logit_range() for kernel in kernels]
        return Measurement(
            model=self.model,
            layer=layer,
            module=segment.place,
            map=which.map,
            head=which.head,
            n=n,
            estimate=solved.estimate,
            radius_rms=float(lengths.square().mean().sqrt()),
            radius_max=float(lengths.max()),
            logits=(min(a for a, _ in ranges), max(b for _, b in ranges)) if ranges else None,
            tokens=words,
            input_share=shares(solved.estimate.direction),
            output_share=shares(solved.image),
            received=None
            if which.map == "cross"
            else _received(kernels, len(sample.window) if own else n, sample.real if own else None),
            # a head alone has no output that all ways to it agree on: the bias belongs to all of them
            output_norm=None if output is None or which.head is not None else float(output.double().norm()),
            moving=settings.options.tokens,
            within=settings.within,
            per=None if settings.within is None else settings.per,
            cut=bool(kernels) and segment.on_kernels,
            notes=self.notes + sample.notes(layer, which, segment),
            to=which.to,
            heads=heads,
            gain=solved.gain,
            spectrum=solved.spectrum,
        )


@dataclass(frozen=True)
class _Settings:
    """What is measured of a layer: the arguments of `Capture.measure`."""

    which: Which
    heads: bool
    factor: float
    options: Options
    within: float | None = None
    per: Per = "token"
    steps: int | None = None


def _received(kernels: Sequence[AttentionKernel], n: int, real: Tensor | None) -> tuple[float, ...] | None:
    """Attention per token, where one attention call over all tokens is measured."""
    if len(kernels) != 1:
        return None
    got = kernels[0].attention_received()
    if got.shape != (1, n):
        return None
    got = got[0] if real is None else got[0, real]
    return tuple((got / got.sum().clamp_min(torch.finfo(got.dtype).tiny)).double().tolist())
