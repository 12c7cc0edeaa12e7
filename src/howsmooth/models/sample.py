"""One input through a model: what enters every layer, and the maps of its layers, cut out where that is right.

Whether a map that runs on the kernels is the model's own layer is decided here, by `same`, and nowhere else.
"""

import functools
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.models.cut import MAPS, Cut, CutJacobian, MapName
from howsmooth.models.intercept import IMPLEMENTATION, UncuttableError, implementation, register
from howsmooth.models.tokens import Window
from howsmooth.models.trace import KeepDouble, Trace, trace
from howsmooth.solve import Options, Solved, solve

_MOST_LOGITS = 2**26  # 512 MiB in float64
# Relative to the largest entry: what float32 constants inside a model explain, and no lost key, window or soft-cap.
_SAME = {torch.float64: 1e-5, torch.float32: 1e-3}


def same(ours: Tensor, theirs: Tensor, tolerance: float | None = None) -> bool:
    """Whether two values of a layer, in one precision, are those of one function."""
    error = float((ours - theirs).abs().max())
    return error <= (_SAME[theirs.dtype] if tolerance is None else tolerance) * float(theirs.abs().max())


class FallbackWarning(UserWarning):
    """A layer whose attention is not cut out: its constant is right, its products go through the model's own code."""


@final
@dataclass(frozen=True, eq=False)
class Sample:
    """A model at one input.

    name: the model's.  owner: the module that is called with `args` and `kwargs`.  window: the tokens in words, where there
    are any.  work: the precision of the measurement.
    """

    name: str
    owner: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    window: Window
    work: torch.dtype

    @property
    def _chooses(self) -> bool:
        """Whether the model lets its configuration choose the attention code."""
        return hasattr(getattr(self.owner, "config", None), "_attn_implementation_internal")

    @property
    def _plain_code(self) -> str | None:
        return "eager" if self._chooses else None

    @functools.cached_property
    def _on_kernels(self) -> tuple[str | None, Trace] | None:
        """The first attention code whose calls reach the kernels, and the model run with it."""
        codes: tuple[str | None, ...] = (None,)
        if self._chooses:
            register()
            codes = (IMPLEMENTATION, "sdpa") if getattr(self.owner, "_supports_sdpa", False) else (IMPLEMENTATION,)
        for code in codes:
            try:
                run = self._run(code)
            except (UncuttableError, KeyError):  # a model that looks its implementation up in a table of its own
                continue
            if bool(run.output.isfinite().all()) and any(layer.cut for layer in run.layers):
                return code, run
        return None

    @functools.cached_property
    def _plain(self) -> Trace:
        """The model's own code with n × n logits, which automatic differentiation goes through."""
        return self._run(self._plain_code)

    @functools.cached_property
    def _judge(self) -> tuple[str | None, Trace]:
        """The model's own code that ours is compared with: the plain one, or torch's attention where logits would not fit.

        Torch's attention knows no soft-cap, and some versions of the library leave it out in silence.
        """
        layers = self.trace.layers
        fits = max(layer.heads * len(layer.x) ** 2 for layer in layers) <= _MOST_LOGITS
        able = self._chooses and getattr(self.owner, "_supports_sdpa", False)
        if fits or not able or any(layer.softcap for layer in layers):
            return self._plain_code, self._plain
        return "sdpa", self._run("sdpa")

    def _run(self, code: str | None) -> Trace:
        with ExitStack() as stack:
            if code is not None:
                stack.enter_context(implementation(self.owner, code))
            if self.work == torch.float64 and code == "eager":  # a float64 mask overflows in its float32 softmax
                stack.enter_context(KeepDouble())
            return trace(self.owner, self.args, self.kwargs)

    @functools.cached_property
    def trace(self) -> Trace:
        """The forward pass, on the kernels where it can be."""
        run = self._plain if self._on_kernels is None else self._on_kernels[1]
        if not run.layers:
            raise BadInputError(
                f"expected a model with self-attention, got {type(self.owner).__name__} in which none was seen; "
                "measure the function itself with howsmooth.lipschitz"
            )
        if not bool(run.output.isfinite().all()):
            raise BadInputError(f"expected a finite output of {self.name}, got NaN or infinity; try dtype=torch.float32")
        return run

    @functools.cached_property
    def real(self) -> Tensor | None:
        """Positions that are not padding; nothing where all are real."""
        if self.window.mask is None or all(self.window.mask):
            return None
        return torch.nonzero(torch.tensor(self.window.mask))[:, 0]

    @property
    def words(self) -> tuple[str, ...]:
        """The tokens that are not padding."""
        words = self.window.words
        return words if self.real is None else tuple(words[i] for i in self.real.tolist())

    def check(self, layer: int, map: str, head: int | None) -> None:
        """Refuse a layer, map or head that is not there."""
        if map not in MAPS:
            raise BadInputError(f"expected a map among {', '.join(MAPS)}, got {map!r}; pick one of them")
        layers = self.trace.layers
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(layers):
            raise BadInputError(f"expected a layer from 0 to {len(layers) - 1}, got {layer!r}; {self.name} has no other")
        heads = layers[layer].heads
        if head is not None:
            if map not in ("attention", "heads", "normed"):
                raise BadInputError(f"expected map attention, heads or normed for a single head, got {map!r}; leave head out")
            if heads and not (isinstance(head, int) and 0 <= head < heads):
                raise BadInputError(f"expected a head from 0 to {heads - 1}, got {head!r}; layer {layer} has no other")
        if map == "normed":
            entering, x = layers[layer].block.tokens, layers[layer].x
            if entering.shape == x.shape and torch.equal(entering, x):
                raise BadInputError(
                    f"expected a block that normalises before it attends, got layer {layer}, which hands its input to "
                    'attention unchanged; measure map="attention"'
                )

    def map(self, layer: int, map: MapName = "attention", head: int | None = None) -> Cut:
        """A map of a layer at this input, cut where it can be; the model's own code stands in where the two disagree."""
        self.check(layer, map, head)
        cut = self.cut(layer, map)
        if cut is not None:
            try:
                with torch.no_grad():
                    value = self._value(cut)
                if self._is_own(cut, value):
                    return replace(cut, head=head)
            except UncuttableError:
                pass
        return self._fallback(layer, map, head)

    def solve(self, layer: int, map: MapName, head: int | None, factor: float, options: Options) -> tuple[Cut, Solved]:
        """A map, its tokens multiplied by `factor`, and its constant there."""
        cut = self.cut(layer, map)
        if cut is not None:
            try:
                if head is not None or factor != 1:  # no value that the model's own code has seen
                    self.map(layer, map)
                chosen = replace(cut, head=head)
                solved = solve(chosen, factor * cut.start, options)
                assert isinstance(solved.operator, CutJacobian)
                if head is not None or factor != 1 or self._is_own(cut, solved.operator.output):
                    return chosen, solved
            except UncuttableError:
                pass
        plain = self._fallback(layer, map, head)
        return plain, solve(plain, factor * plain.start, options)

    def cut(self, layer: int, map: MapName) -> Cut | None:
        """The map on the kernels, not yet compared with the model's own code; nothing where it cannot be cut."""
        if self._on_kernels is None:
            return None
        code, run = self._on_kernels
        if map != "model" and not run.layers[layer].cut:
            return None
        return Cut(self.owner, code, run, run.layers[layer], map, None, self.real, True, self.work)

    def _value(self, cut: Cut) -> Tensor:
        """The map at its own tokens, in float64 where the model can."""
        try:
            return cut.to(torch.float64).value(cut.start.double()[None])
        except (RuntimeError, TypeError):
            return cut.value(cut.start.to(self.work)[None])

    @torch.no_grad()
    def _is_own(self, cut: Cut, value: Tensor) -> bool:
        """Whether `value`, the map on the kernels, is what the model's own code gives in the same precision."""
        code, run = self._judge
        own = replace(cut, code=code, kernels=False, work=value.dtype)
        if cut.code is not None and (cut.trace.masks or cut.code != IMPLEMENTATION):  # each code has masks of its own
            own = replace(own, trace=run, layer=run.layers[cut.layer.index])
        return same(value, own.value(cut.start.to(value.dtype)[None]))

    def _fallback(self, layer: int, map: MapName, head: int | None) -> Cut:
        run = self._plain
        plain = Cut(self.owner, self._plain_code, run, run.layers[layer], map, None, self.real, False, self.work)
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
