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
from torch.utils._pytree import tree_leaves, tree_map

from howsmooth.errors import BadInputError
from howsmooth.maps.operator import drawn, stream
from howsmooth.models.by_hand import ByHand
from howsmooth.models.cut import Cut, CutJacobian
from howsmooth.models.intercept import IMPLEMENTATION, WRITTEN_OUT, UncuttableError, implementation, register
from howsmooth.models.model_input import FallbackWarning
from howsmooth.models.room import check_room, enough
from howsmooth.models.rows import OwnRows, sample_rows
from howsmooth.models.span import MAPS, MapName, Span
from howsmooth.models.tokens import Window
from howsmooth.models.trace import KeepDouble, Trace, trace
from howsmooth.settings import choice, whole
from howsmooth.solve import Options, Solved, solve

_MOST_LOGITS = 2**26  # 512 MiB in float64: what the model's own code may hold at once
_PREFIX = 256  # tokens of a longer input that the model's plain code sees whole
_ROWS = 16, 64  # at least and at most so many queries of a longer input are compared
# Relative to the largest entry: what float32 constants inside a model explain, and no lost key, window or soft-cap.
_SAME = {torch.float64: 1e-5, torch.float32: 1e-3}
_STEP = 0.03  # of an input beside another, relative to its size: what is not the same function differs there
HEAVY = 2**29  # logits past which a value in float64 costs more than a measurement
FORMULA = 1e-9  # agreement in float64 that only the same formula, evaluated another way, gives


def same(ours: Tensor, theirs: Tensor, tolerance: float | None = None) -> bool:
    """Whether two values of a layer, in one precision, are those of one function."""
    error = float((ours - theirs).abs().max())
    return error <= (_SAME[theirs.dtype] if tolerance is None else tolerance) * float(theirs.abs().max())


def _beside(x: Tensor, step: float) -> Tensor:
    """Tokens moved by a share of their size, each entry in a direction of its own."""
    if not step:
        return x
    return x + step * x.square().mean().sqrt() * drawn(tuple(x.shape), stream(0, "beside", x.device), x.dtype)


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
        """The first attention code whose calls reach the kernels, and the model run with it.

        Of a module that has no choice of code, that with which most calls do.
        """
        codes: tuple[str | None, ...] = (None,)
        if self._chooses:
            register()
            codes = (IMPLEMENTATION, "sdpa") if getattr(self.owner, "_supports_sdpa", False) else (IMPLEMENTATION,)
        best, most = None, 0
        for code in (*codes, WRITTEN_OUT):
            try:
                run = self._run(code)
            except (UncuttableError, KeyError):  # a model that looks its implementation up in a table of its own
                continue
            except (RuntimeError, TypeError, AttributeError):
                if code != WRITTEN_OUT:
                    raise
                continue  # code that does something else with its logits
            if not bool(run.output.isfinite().all()):
                continue
            count = sum(layer.cut for layer in run.layers)
            if count > most:
                best, most = (code, run), count
            if most and (self._chooses or most == len(run.layers)):
                break
        return best

    @functools.cached_property
    def _plain(self) -> Trace:
        """The model's own code with n × n logits, which automatic differentiation goes through."""
        return self._run(self._plain_code)

    @functools.cached_property
    def _long(self) -> bool:
        """Whether the model's own code would hold too many logits at once."""
        return max(layer.heads * len(layer.x) ** 2 for layer in self.trace.layers) > _MOST_LOGITS

    @functools.cached_property
    def _short(self) -> "Sample | None":
        """Some tokens of a long input, those around the first padding if there is any; nothing where they cannot be cut out."""
        n = len(self.trace.layers[0].x)
        given = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]
        if not self._long or n <= _PREFIX or any(t.shape[:2] != (1, n) or t.ndim > 3 for t in given):
            return None
        mask = self.window.mask or ()
        edge = next((i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), 0)
        some = slice(start := max(0, min(edge - _PREFIX // 2, n - _PREFIX)), start + _PREFIX)
        args, kwargs = tree_map(lambda t: t[:, some] if isinstance(t, Tensor) else t, (self.args, self.kwargs))
        window = replace(
            self.window, ids=self.window.ids[some], pieces=self.window.pieces[some], mask=self.window.mask and mask[some]
        )
        return replace(self, args=args, kwargs=kwargs, window=window)

    @functools.cached_property
    def _verdicts(self) -> dict[tuple[int, MapName], bool]:
        """By layer and map, whether the map on the kernels was found to be the model's own."""
        return {}

    def _run(self, code: str | None) -> Trace:
        with ExitStack() as stack:
            if code is not None:
                stack.enter_context(implementation(self.owner, code))
            if code == WRITTEN_OUT:
                stack.enter_context(ByHand())
            if self.work == torch.float64 and code in ("eager", WRITTEN_OUT):  # a float64 mask overflows in its float32 softmax
                stack.enter_context(KeepDouble())
            return trace(self.owner, self.args, self.kwargs, pairs=not self._chooses)

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
        map = choice(map, "a map", MAPS)
        layers = self.trace.layers
        layer = whole(layer, f"a layer from 0 to {len(layers) - 1}", f"{self.name} has no other", below=len(layers))
        heads = layers[layer].heads
        if map in ("cross", "context"):
            Span.of(map, self.trace, layers[layer])  # refuses a block without
            heads = (layers[layer].crossing or layers[layer]).heads
            if map == "context" and self.real is not None:
                raise BadInputError("expected an input without padding for map 'context', got a padded one; leave it out")
        if head is not None:
            if map in ("block", "model"):
                raise BadInputError(f"expected a map that is attention alone for a single head, got {map!r}; leave head out")
            if heads:
                whole(head, f"a head from 0 to {heads - 1}", f"layer {layer} has no other", below=heads)
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
        if cut is not None and self._is_own(cut):
            return replace(cut, head=head)
        return self._fallback(layer, map, head)

    def solve(self, layer: int, map: MapName, head: int | None, factor: float, options: Options) -> tuple[Cut, Solved]:
        """A map, its tokens multiplied by `factor`, and its constant there."""
        cut = self.cut(layer, map)
        what = self.check_room(layer, map)
        if cut is not None:
            seen = head is None and factor == 1  # then the solver's own value is one that the model's code can be asked for
            try:
                with enough(what, cut.start.device):
                    if self._looks_own(cut) if seen else self._is_own(cut):
                        chosen = replace(cut, head=head)
                        solved = solve(chosen, factor * cut.start, options)
                        assert isinstance(solved.operator, CutJacobian)
                        if not seen or self._is_own(cut, solved.operator.output):
                            return chosen, solved
            except UncuttableError:
                pass
        plain = self._fallback(layer, map, head)
        with enough(f"{what} through the model's own code", plain.start.device):
            return plain, solve(plain, factor * plain.start, options)

    def check_room(self, layer: int, map: MapName) -> str:
        """Refuse a map that cannot fit on the device; what was asked for, in words."""
        span = Span.of(map, self.trace, self.trace.layers[layer])
        what = f"map {map!r} of layer {layer} at {len(span.tokens)} tokens"
        whole = span.root.module if map in ("block", "model") else None
        check_room(span.tokens, whole, self.work, self.trace.output.device, what)
        return what

    def cut(self, layer: int, map: MapName) -> Cut | None:
        """The map on the kernels, not yet compared with the model's own code; nothing where it cannot be cut."""
        if self._on_kernels is None:
            return None
        code, run = self._on_kernels
        cut = Cut(self.owner, code, run, run.layers[layer], map, None, self.real, True, self.work)
        return cut if map == "model" or cut.attends.cut else None

    def _value(self, cut: Cut, step: float = 0.0) -> Tensor:
        """The map at its own tokens, or that far beside them, in float64 where the model can; in the finest products below it
        where those are many."""
        work = self.work if cut.start.is_cuda and cut.layer.heads * len(cut.start) ** 2 > HEAVY else torch.float64

        def at(cut: Cut) -> Tensor:
            x = _beside(cut.start, step).to(cut.work)[None]
            if cut.code != WRITTEN_OUT:
                return cut.value(x)
            with torch.enable_grad():  # with a graph, in which a bias that depends on the tokens is seen and refused
                return cut.value(x.clone().requires_grad_()).detach()

        try:
            return at(replace(cut, work=work, precision="strict"))
        except (RuntimeError, TypeError):
            return at(cut)

    @torch.no_grad()
    def _is_own(self, cut: Cut, value: Tensor | None = None) -> bool:
        """Whether the map on the kernels, `value` at its own tokens, is what the model's own code gives in the same precision.

        A long input is compared at a sample of queries, against all keys, and a short part of it whole.
        """
        at = cut.layer.index, cut.name
        if at not in self._verdicts:
            try:
                own = self._looks_own(cut)
                if own and self._long and cut.name == "model":  # layers differ from the model's own in their attention alone
                    own = all(self._is_own(replace(cut, layer=k, name="attention")) for k in cut.trace.layers)
                elif own:
                    value = self._value(cut) if value is None else value
                    in_rows = self._long and cut.name not in ("cross", "context")  # whose keys are few, or are the tokens
                    own = self._agrees_in_rows(cut, value) if in_rows else self._agrees(cut, value)
                    if own and not in_rows and cut.code == WRITTEN_OUT:  # one value may be that of several functions
                        own = self._agrees(cut, self._value(cut, _STEP), _STEP)
            except UncuttableError:
                own = False
            self._verdicts[at] = own
        return self._verdicts[at]

    def _looks_own(self, cut: Cut) -> bool:
        """Whether a short part of a long input finds the model's own layer; true where there is no such part."""
        short = None if cut.name == "model" else self._short
        if short is None:
            return True
        try:
            part = short.cut(cut.layer.index, cut.name)
        except (RuntimeError, ValueError, IndexError):  # a model that takes no part of its input
            return True
        return part is not None and short._is_own(part)

    def _agrees(self, cut: Cut, value: Tensor, step: float = 0.0) -> bool:
        own = replace(cut, code=self._plain_code, kernels=False, work=value.dtype)
        if cut.code is not None and (cut.trace.masks or cut.code != IMPLEMENTATION):  # each code has masks of its own
            own = replace(own, trace=self._plain, layer=self._plain.layers[cut.layer.index])
        return same(value, own.value(_beside(cut.start, step).to(value.dtype)[None]))

    def _agrees_in_rows(self, cut: Cut, value: Tensor) -> bool:
        n, count = len(cut.span.tokens), len(cut.start)
        least, most = _ROWS
        some = sample_rows(count, max(least, min(most, _MOST_LOGITS // (n * max(1, cut.layer.heads))))).to(value.device)
        rows = some if self.real is None else self.real.to(some.device)[some]
        own = OwnRows(n, rows, cut.trace.masks)
        code = self._plain_code if cut.code == IMPLEMENTATION else cut.code
        with own.active(written_out=code == WRITTEN_OUT):
            theirs = replace(cut, code=code, kernels=False, work=value.dtype).value(cut.start.to(value.dtype)[None])
        return own.answered > 0 and same(value[:, some], theirs[:, some])

    def plain(self, layer: int, map: MapName) -> Cut:
        """The map in the model's own code, with n × n logits."""
        run = self._plain
        return Cut(self.owner, self._plain_code, run, run.layers[layer], map, None, self.real, False, self.work)

    def _fallback(self, layer: int, map: MapName, head: int | None) -> Cut:
        plain = self.plain(layer, map)
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
