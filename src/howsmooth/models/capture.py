"""One input through a model, and any map of any layer measured there."""

import functools
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.kernels import SoftmaxAttention
from howsmooth.maps import Attention, Operator
from howsmooth.models.affine import as_attention
from howsmooth.models.cut import MAPS, Cut, CutJacobian, MapName
from howsmooth.models.intercept import IMPLEMENTATION, UncuttableError, implementation, register
from howsmooth.models.measurement import Measurement
from howsmooth.models.precision import KeepDouble
from howsmooth.models.tokens import Window
from howsmooth.models.trace import Trace, trace
from howsmooth.solve import Options, solve
from howsmooth.spectral import Estimate

_MOST_LOGITS = 2**26  # 512 MiB in float64
_PARITY = {torch.float64: 1e-5, torch.float32: 1e-3}  # what float32 constants inside the model explain, and no lost key


class FallbackWarning(UserWarning):
    """A layer whose attention is not cut out: its constant is right, its products go through the model's own code."""


@final
@dataclass(frozen=True, eq=False)
class Capture:
    """A model at one input: for every attention layer what enters it and how it was called.

    `measure` gives the constant of a map of a layer; nothing is run again but that layer's block.
    """

    model: str
    owner: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    window: Window
    work: torch.dtype
    notes: tuple[str, ...]

    @functools.cached_property
    def _codes(self) -> tuple[str | None, ...]:
        """Ways to run the model's attention so that it may reach the kernels, the best first."""
        if not self._has_choice:
            return (None,)
        register()
        return (IMPLEMENTATION, "sdpa") if getattr(self.owner, "_supports_sdpa", False) else (IMPLEMENTATION,)

    @functools.cached_property
    def _has_choice(self) -> bool:
        """Whether the model lets its configuration choose the attention code."""
        return hasattr(getattr(self.owner, "config", None), "_attn_implementation_internal")

    @property
    def _own_code(self) -> str | None:
        """The model's own code that ours is compared with: the plain one, or torch's attention where logits would not fit.

        Torch's attention knows no soft-cap, and some versions of the library leave it out in silence.
        """
        if not self._has_choice:
            return None
        layers = self.trace.layers
        logits = max(layer.heads * len(layer.x) ** 2 for layer in layers)
        capped = any(layer.softcap for layer in layers)
        able = getattr(self.owner, "_supports_sdpa", False)
        return "sdpa" if able and not capped and logits > _MOST_LOGITS else "eager"

    def _trace(self, code: str | None) -> Trace:
        with ExitStack() as stack:
            if code is not None:
                stack.enter_context(implementation(self.owner, code))
            if self.work == torch.float64 and code == "eager":  # a float64 mask overflows in its float32 softmax
                stack.enter_context(KeepDouble())
            return trace(self.owner, self.args, self.kwargs)

    @functools.cached_property
    def _cut(self) -> tuple[str | None, Trace] | None:
        """The first way in which attention calls reach the kernels."""
        for code in self._codes:
            try:
                found = self._trace(code)
            except (UncuttableError, KeyError):  # a model that looks its implementation up in a table of its own
                continue
            if bool(found.output.isfinite().all()) and any(layer.cut for layer in found.layers):
                return code, found
        return None

    @functools.cached_property
    def _plain(self) -> Trace:
        """The model's own code with n × n logits, which automatic differentiation goes through."""
        return self._trace("eager" if self._has_choice else None)

    @functools.cached_property
    def _own(self) -> Trace:
        return self._plain if self._own_code in ("eager", None) else self._trace(self._own_code)

    @functools.cached_property
    def trace(self) -> Trace:
        found = self._plain if self._cut is None else self._cut[1]
        if not found.layers:
            raise BadInputError(
                f"expected a model with self-attention, got {type(self.owner).__name__} in which none was seen; "
                "measure the function itself with howsmooth.lipschitz"
            )
        if not bool(found.output.isfinite().all()):
            raise BadInputError(f"expected a finite output of {self.model}, got NaN or infinity; try dtype=torch.float32")
        return found

    @property
    def num_layers(self) -> int:
        return len(self.trace.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """The attention modules, in order."""
        return tuple(layer.name for layer in self.trace.layers)

    @functools.cached_property
    def real(self) -> Tensor | None:
        """Positions that are not padding; nothing where all are real."""
        if self.window.mask is None or all(self.window.mask):
            return None
        return torch.nonzero(torch.tensor(self.window.mask))[:, 0]

    def tokens(self, layer: int, map: MapName = "attention") -> Tensor:
        """What enters a map, (n, d), padding left out."""
        return self.map(layer, map).start

    def map(self, layer: int, map: MapName = "attention", head: int | None = None) -> Cut:
        """A map of a layer at this input, cut where it can be; the model's own code, which stands in if need be, agrees."""
        self._check(layer, map, head)
        cut = self._candidate(layer, map)
        if cut is not None:
            try:
                with torch.no_grad():
                    value = self._value(cut)
                if self._agrees(cut, value):
                    return replace(cut, head=head)
            except UncuttableError:
                pass
        return self._fallback(layer, map, head)

    def _value(self, cut: Cut) -> Tensor:
        """The map at its own tokens, in float64 where the model can."""
        try:
            return cut.to(torch.float64).value(cut.start.double()[None])
        except (RuntimeError, TypeError):
            return cut.value(cut.start.to(self.work)[None])

    def attention(self, layer: int) -> Attention:
        """A layer as `howsmooth.Attention` in float64, for bounds and searches; refused where it is not of that form.

        Its mask is that of this input; `tokens(layer)` are the tokens that enter it here.
        """
        return as_attention(self.map(layer))

    def _candidate(self, layer: int, map: MapName) -> Cut | None:
        """The map on the kernels, not yet compared with the model's own code."""
        if self._cut is None:
            return None
        code, found = self._cut
        if map != "model" and not found.layers[layer].cut:
            return None
        return Cut(self.owner, code, found, found.layers[layer], map, None, self.real, True, self.work)

    def _fallback(self, layer: int, map: MapName, head: int | None) -> Cut:
        code = "eager" if self._has_choice else None
        plain = Cut(self.owner, code, self._plain, self._plain.layers[layer], map, None, self.real, False, self.work)
        kind = type(plain.layer.module).__name__
        if head is not None:
            raise BadInputError(
                f"expected a layer whose attention can be cut out to single out head {head}, got {kind}, "
                "which has its own; leave head out"
            )
        warnings.warn(
            f"layer {layer} ({kind}) has attention of its own; its products go through the model's code and take O(n²) memory",
            FallbackWarning,
            stacklevel=4,
        )
        return plain

    @torch.no_grad()
    def _agrees(self, cut: Cut, value: Tensor) -> bool:
        """Whether `value`, the map on the kernels, is what the model's own code gives in the same precision."""
        own = replace(cut, code=self._own_code, kernels=False, work=value.dtype)
        if cut.code is not None and (cut.trace.masks or cut.code != IMPLEMENTATION):  # each code has masks of its own
            own = replace(own, trace=self._own, layer=self._own.layers[cut.layer.index])
        theirs = own.value(cut.start.to(value.dtype)[None])
        return float((value - theirs).abs().max()) <= _PARITY[value.dtype] * float(theirs.abs().max())

    def _check(self, layer: int, map: str, head: int | None) -> None:
        if map not in MAPS:
            raise BadInputError(f"expected a map among {', '.join(MAPS)}, got {map!r}; pick one of them")
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < self.num_layers:
            raise BadInputError(f"expected a layer from 0 to {self.num_layers - 1}, got {layer!r}; {self.model} has no other")
        if head is not None:
            heads = self.trace.layers[layer].heads
            if map not in ("attention", "heads", "normed"):
                raise BadInputError(f"expected map attention, heads or normed for a single head, got {map!r}; leave head out")
            if heads and not (isinstance(head, int) and 0 <= head < heads):
                raise BadInputError(f"expected a head from 0 to {heads - 1}, got {head!r}; layer {layer} has no other")
        if map == "normed":
            found = self.trace.layers[layer]
            if found.block.tokens.shape == found.x.shape and torch.equal(found.block.tokens, found.x):
                raise BadInputError(
                    f"expected a block that normalises before it attends, got layer {layer}, which hands its input to "
                    'attention unchanged; measure map="attention"'
                )

    def measure(
        self,
        layer: int,
        map: MapName = "attention",
        *,
        head: int | None = None,
        heads: bool = False,
        tol: float = 1e-3,
        certify: float | None = None,
        seed: int = 0,
    ) -> Measurement:
        """The constant of a map of a layer at this input.

        head: that head alone, through its part of the output projection.  heads: also one estimate per head.
        tol, certify, seed: as in `howsmooth.lipschitz`.
        """
        self._check(layer, map, head)
        options = Options(tol, certify, seed)
        cut, estimate, operator = self._solve(layer, map, head, options)
        x = cut.start
        with torch.no_grad():
            v = estimate.direction.to(operator.dtype)
            image = operator.jvp(v[None, None])[0, 0]
        kernels = operator.kernels if isinstance(operator, CutJacobian) else []
        alone: tuple[Estimate, ...] = ()
        if heads:
            count = self.trace.layers[layer].heads
            alone = tuple(solve(replace(cut, head=h), x, options)[0] for h in range(count))
        norms = x.double().norm(dim=-1)
        words = self.window.words if self.real is None else tuple(self.window.words[i] for i in self.real.tolist())
        if len(words) != len(x):
            words = tuple(str(i) for i in range(len(x)))
        return Measurement(
            model=self.model,
            layer=layer,
            module=cut.place,
            map=map,
            head=head,
            n=len(x),
            estimate=estimate,
            radius_rms=float(norms.square().mean().sqrt()),
            radius_max=float(norms.max()),
            logits=_logits(kernels),
            tokens=words,
            input_share=_shares(v),
            output_share=_shares(image),
            received=_received(kernels, len(self.window) or len(x), self.real),
            cut=cut.kernels,
            notes=self.notes,
            heads=alone,
        )

    def _solve(self, layer: int, map: MapName, head: int | None, options: Options) -> tuple[Cut, Estimate, Operator]:
        """The map, its constant, and its Jacobian in float64."""
        cut = self._candidate(layer, map)
        if cut is not None:
            try:
                estimate, operator = solve(replace(cut, head=head), cut.start, options)
                if head is not None:
                    self.map(layer, map)  # one head alone is no value of the model's own code
                assert isinstance(operator, CutJacobian)
                if head is not None or self._agrees(cut, operator.output):
                    return replace(cut, head=head), estimate, operator
            except UncuttableError:
                pass
        plain = self._fallback(layer, map, head)
        return plain, *solve(plain, plain.start, options)


def _shares(v: Tensor) -> tuple[float, ...]:
    """How much of a vector's square falls on each token."""
    energy = v.double().square().sum(-1)
    total = energy.sum()
    return tuple((energy / total if total > 0 else energy).tolist())


def _logits(kernels: list[SoftmaxAttention]) -> tuple[float, float] | None:
    ranges = [k.logit_range() for k in kernels]
    return (min(a for a, _ in ranges), max(b for _, b in ranges)) if ranges else None


def _received(kernels: list[SoftmaxAttention], n: int, real: Tensor | None) -> tuple[float, ...] | None:
    """Attention per token, where one attention call over all tokens is measured."""
    if len(kernels) != 1:
        return None
    got = kernels[0].attention_received()
    if got.shape != (1, n):
        return None
    got = got[0] if real is None else got[0, real]
    return tuple((got / got.sum().clamp_min(torch.finfo(got.dtype).tiny)).double().tolist())
