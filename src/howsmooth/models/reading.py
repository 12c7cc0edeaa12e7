"""What becomes of tokens on their way to an attention call, read off a model's module as formulas.

The matrices that take the tokens are found by watching; other numbers are then put in the place of what they give, and the
queries, keys and values that come of them tell the rest: which entries belong to which head, factors, norms, phases.
Nothing of size n × n is made, no softmax is taken, and what is read off is no more than a guess until it is compared.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from howsmooth.errors import BadInputError
from howsmooth.maps import LayerNorm, RMSNorm, Rotary
from howsmooth.maps.operator import drawn, stream
from howsmooth.models.cut import Cut, Stop
from howsmooth.models.intercept import Call
from howsmooth.models.trace import find_hidden

FORMULA = 1e-9  # agreement in float64 that only the same formula, evaluated another way, gives
_EXACT = 1e-12  # what rounding alone explains
_LARGE = 1e6  # of an entry beside others near one: no eps of a norm is seen any more
_SMALL = 1e-3  # of entries whose mean square is near a norm's eps


def off(ours: Tensor, theirs: Tensor) -> float:
    """How far two tensors are apart, relative to the largest entry; infinite where they are not to be compared."""
    error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return 0.0 if error == 0 else error / size if size > 0 and math.isfinite(error) else math.inf


def agree(ours: Tensor, theirs: Tensor, tolerance: float = FORMULA) -> bool:
    """Whether two tensors are the same up to rounding."""
    return off(ours, theirs) <= tolerance


class Matrix(NamedTuple):
    """`x ↦ x Wᵀ + b`."""

    weight: Float[Tensor, "out d"]
    bias: Float[Tensor, " out"]


class Stage:
    """An attention module as a model called it, ready to be called again on other numbers, in float64.

    x: the tokens that entered.  call: what reached the attention function.  parts: the modules that took the tokens.
    """

    def __init__(self, cut: Cut):
        self.cut, self.module = cut, cut.layer.module
        self.x = cut.start.double()
        self._state = cut.state(self.module, self.x.device)
        self._calls: list[Call] = []
        self._entered: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._took: dict[nn.Module, Tensor] = {}  # with what each gave, outermost last
        with ExitStack() as stack:
            stack.enter_context(self.module.register_forward_pre_hook(self._enter, with_kwargs=True))
            for inside in self.module.modules():
                if inside is not self.module:
                    stack.enter_context(inside.register_forward_hook(self._note))
            with torch.enable_grad():  # with a graph, in which a bias that depends on the tokens is seen and refused
                cut.through(self.x.clone().requires_grad_(), self._reached)
        if len(self._calls) != 1 or len(self._entered) <= cut.layer.call or self.call.q.shape[0] != 1:
            raise BadInputError(
                f"expected a layer with one attention call over all tokens, got {type(self.module).__name__}; "
                "measure it instead"
            )
        self._args, self._kwargs = self._entered[cut.layer.call]
        nested = {inner for outer in self._took for inner in outer.modules() if inner is not outer}
        self.parts = [part for part in self._took if part not in nested]

    @property
    def call(self) -> Call:
        return self._calls[0]

    @property
    def widths(self) -> list[int]:
        """How many numbers each part gives per token."""
        return [self._took[part].shape[-1] for part in self.parts]

    @property
    def width(self) -> int:
        """How many numbers the parts give per token; the tokens' own width where there are no parts."""
        return sum(self.widths) or self.x.shape[1]

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain: dict[int, Tensor] = {}  # a tensor that occurs twice stays one
        self._entered.append(
            tree_map(lambda t: plain.setdefault(id(t), t.detach()) if isinstance(t, Tensor) else t, (args, kwargs))
        )

    def _note(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given = next((t for t in args if isinstance(t, Tensor)), None)
        if not self._entered or given is None or not isinstance(output, Tensor) or given.shape[-1] != self.x.shape[1]:
            return
        alike = given.numel() == self.x.numel() and output.numel() == len(self.x) * output.shape[-1]
        if alike and torch.equal(given.reshape(self.x.shape), self.x):
            self._took.pop(module, None)
            self._took[module] = output.detach()

    def _reached(self, call: Call) -> Tensor:
        self._calls.append(replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach()))
        raise Stop(call.q)

    def lift(self, z: Float[Tensor, "n width"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (heads, n, ·), where the parts give `z`, or where the tokens are `z`."""
        reached: list[Call] = []

        def on_call(call: Call) -> Tensor:
            reached.append(call)
            raise Stop(call.q)

        args, kwargs = self._args, self._kwargs
        with ExitStack() as stack:
            stack.enter_context(self.cut.running(on_call))
            if self.parts:
                for part, own in zip(self.parts, z.split(self.widths, -1), strict=True):
                    value = own.reshape(self._took[part].shape)
                    stack.enter_context(mock.patch.object(part, "forward", functools.partial(_instead, value)))
            else:
                hidden = find_hidden(args, kwargs)
                assert hidden is not None
                value = z.reshape(hidden.shape)
                args, kwargs = tree_map(lambda t: value if t is hidden else t, (args, kwargs))
            with suppress(Stop):
                functional_call(self.module, self._state, args, kwargs)
        call = reached[0]
        return call.q[0], call.k[0], call.v[0]

    def matrices(self) -> Matrix:
        """All parts' matrices, one below the other."""
        with self.cut.running(self._reached):
            found = [matrix_of(part, self.cut.state(part, self.x.device), self.x.shape[1]) for part in self.parts]
        return Matrix(torch.cat([m.weight for m in found]), torch.cat([m.bias for m in found]))


def read_projection(stage: Stage) -> Matrix:
    """What the layer makes of heads' outputs: its projection's matrix, or where that is no module, from its answers."""
    (_, heads, n, _), width = stage.call.q.shape, stage.call.v.shape[-1]
    projection = stage.cut.layer.projection
    if projection is not None:
        with stage.cut.running(lambda call: call.q):
            return matrix_of(projection, stage.cut.state(projection, stage.x.device), heads * width)
    units = torch.cat([torch.zeros(1, heads * width), torch.eye(heads * width)]).to(stage.x)
    answers = []
    for own in units.split(n):
        given = torch.cat([own, units.new_zeros(n - len(own), heads * width)]).unflatten(-1, (heads, width)).transpose(0, 1)
        answers.append(stage.cut.through(stage.x, functools.partial(_instead, given[None]))[: len(own)])
    whole = torch.cat(answers)
    return Matrix((whole[1:] - whole[0]).mT.contiguous(), whole[0])


def _instead(value: Tensor, *_: Any, **__: Any) -> Tensor:
    return value


def matrix_of(module: nn.Module, state: dict[str, Tensor], width: int) -> Matrix:
    """The matrix that a module is, from its own `weight` where that explains its answers, else from its answers."""

    def f(t: Tensor) -> Tensor:
        return functional_call(module, state, (t[None],))[0]

    like = next(iter(state.values()), torch.empty(0, dtype=torch.float64))
    probe = drawn((4, width), stream(0, "matrix", like.device), torch.float64)
    answer = f(probe)
    weight, bias = state.get("weight"), state.get("bias", answer.new_zeros(answer.shape[-1]))
    if weight is not None and weight.ndim == 2:
        for w in (weight, weight.mT):
            if w.shape == (answer.shape[-1], width) and agree(probe @ w.mT + bias, answer, _EXACT):
                return Matrix(w, bias)
    bias = f(torch.zeros_like(probe[:1]))[0]
    w = torch.cat([f(t) for t in torch.eye(width, dtype=probe.dtype, device=probe.device).split(1024)]).sub_(bias).mT
    if not agree(probe @ w.mT + bias, answer):
        raise BadInputError(f"expected an affine projection, got {type(module).__name__}; measure the layer instead")
    return Matrix(w.contiguous(), bias)


def written_along(module: nn.Module, stage: Stage, width: int) -> int | None:
    """The axis of a matrix module's own `weight` along which its outputs lie; nothing where that is not its matrix."""
    with stage.cut.running(lambda call: call.q):
        state = stage.cut.state(module, stage.x.device)
        matrix = matrix_of(module, state, width)
    weight = state.get("weight")
    if weight is None or matrix.weight.data_ptr() != weight.data_ptr():
        return None
    return 0 if matrix.weight.stride() == weight.stride() else 1


class Side(NamedTuple):
    """Queries, keys or values as a formula of tokens: `turn(norm(x Wᵀ + b))`.

    norm: over a head, or over all of them where it is that wide.
    """

    heads: int
    matrix: Matrix
    norm: LayerNorm | RMSNorm | None = None
    rotary: Rotary | None = None


def read_sides(stage: Stage) -> tuple[Side, Side, Side]:
    """Queries, keys and values; keys and values that several heads share once."""
    if not stage.parts:
        return _dense(stage)
    whole = stage.matrices()
    q, k, v = _readers(stage)
    return q.read(whole), k.read(whole), v.read(whole)


def head_entries(stage: Stage) -> list[list[Tensor]]:
    """For queries, keys and values: which entries of what the parts give each head is made of; shared heads once."""
    return [list(reader.index) for reader in _readers(stage)]


def _readers(stage: Stage) -> "list[_Reader]":
    """One for queries, keys and values each."""
    random = drawn((len(stage.x), stage.width), stream(0, "parts", stage.x.device), torch.float64)
    first = _columns(stage, random)
    group = math.gcd(_shared(first[1]), _shared(first[2]))
    return [
        _Reader(stage, random, role, list(range(0, len(own), step)), tuple(own[::step]))
        for role, (own, step) in enumerate(zip(first, (1, group, group), strict=True))
    ]


def _dense(stage: Stage) -> tuple[Side, Side, Side]:
    """Affine queries, keys and values of a module without parts, from its answers to `0, e_1, …, e_d` for tokens."""
    n, d = stage.x.shape
    units = torch.cat([torch.zeros(1, d), torch.eye(d)]).to(stage.x)
    answers: list[list[Tensor]] = [[], [], []]
    for own in units.split(n):
        for gathered, t in zip(answers, stage.lift(torch.cat([own, stage.x[len(own) :]])), strict=True):
            gathered.append(t[:, : len(own)].transpose(0, 1).flatten(1))  # (tokens, heads · width)
    wholes = [torch.cat(gathered) for gathered in answers]
    heads = (stage.call.q.shape[1], stage.call.k.shape[1], stage.call.v.shape[1])
    q, k, v = (Side(h, Matrix((t[1:] - t[0]).mT.contiguous(), t[0])) for h, t in zip(heads, wholes, strict=True))
    return q, k, v


def _columns(stage: Stage, random: Tensor) -> list[list[int]]:
    """For queries, keys and values: the first entry of `z` that each head is made of.

    One large entry at a time, with either sign, at every place where a head may begin; each token takes another one.
    """
    shapes = [(t.shape[1], t.shape[3]) for t in (stage.call.q, stage.call.k, stage.call.v)]
    step = math.gcd(*(w for _, w in shapes))
    places = list(range(0, stage.width, step))
    moved: list[list[Tensor]] = [[], [], []]
    for start in range(0, len(places), len(random)):
        own = places[start : start + len(random)]
        spike = torch.zeros_like(random)
        spike[range(len(own)), own] = _LARGE**2
        for gathered, up, down in zip(moved, stage.lift(random + spike), stage.lift(random - spike), strict=True):
            gathered.append((up - down).abs().amax(-1)[:, : len(own)])  # (heads, places)
    found = []
    for gathered in moved:
        size = torch.cat(gathered, -1)
        found.append([places[int(i)] for i in (size > 0.1 * size.amax(-1, keepdim=True)).int().argmax(-1)])
    return found


def _shared(columns: list[int]) -> int:
    """How many heads in a row have the same columns, the same number everywhere."""
    count = next((i for i, c in enumerate(columns) if c != columns[0]), len(columns))
    even = len(columns) % count == 0
    return count if even and all(len(set(columns[i : i + count])) == 1 for i in range(0, len(columns), count)) else 1


class _Reader:
    """One side of an attention call as a function of what the parts give."""

    def __init__(self, stage: Stage, rest: Tensor, role: int, heads: list[int], columns: tuple[int, ...]):
        self.stage, self.rest, self.role, self.heads = stage, rest, role, heads
        self.width = (stage.call.q, stage.call.k, stage.call.v)[role].shape[-1]
        self.index = torch.stack([torch.arange(c, c + self.width) for c in columns]).to(rest.device)
        if int(self.index.max()) >= stage.width:
            raise BadInputError("expected heads whose entries lie side by side, got others; measure the layer instead")

    def answer(self, z: Float[Tensor, "#n #heads width"]) -> Float[Tensor, "n heads width"]:
        """What comes of `z`, everything else as it was."""
        whole = self.rest.clone()
        whole[:, self.index] = z.expand(len(whole), *self.index.shape)
        return self.stage.lift(whole)[self.role][self.heads].transpose(0, 1)

    def probe(self, support: Sequence[int]) -> Float[Tensor, "1 1 width"]:
        """Entries near ±1 there, of mean zero where there are several, and none elsewhere."""
        z = self.rest.new_zeros(self.width)
        own = torch.linspace(1.0, 1.25, len(support)).to(z)
        own[1::2] *= -1
        z[list(support)] = own - own.mean() if len(support) > 1 else own
        return z[None, None]

    def read(self, whole: Matrix) -> Side:
        """This side, from what the parts make of tokens."""
        z, heads = self.probe(range(self.width)), len(self.heads)
        w, b = whole.weight[self.index.flatten()], whole.bias[self.index.flatten()]
        once, twice = self.answer(z), self.answer(2 * z)
        if agree(twice, 2 * once):
            factor, rotary = self._turned(self.answer)
            factor = factor.flatten()
            return Side(
                heads, Matrix(w, b) if bool((factor == 1).all()) else Matrix(w * factor[:, None], b * factor), None, rotary
            )
        return Side(heads, Matrix(w, b), *self._normed(z, once))

    def _normed(self, z: Tensor, once: Tensor) -> tuple[LayerNorm | RMSNorm, Rotary | None]:
        """A norm, over a head or over all of them, and the phases behind it."""
        heads = len(self.heads)
        first = torch.ones(1, heads, 1, dtype=z.dtype, device=z.device)
        first[:, 0] = 3.0
        wide = heads > 1 and not agree(self.answer(z * first)[:, 1:], once[:, 1:])
        centred = agree(self.answer(z + 2.0), once)

        def halves(t: Tensor) -> tuple[Tensor, Tensor]:
            """What changes sign with `t`, the norm's weight at work, and what does not, its bias."""
            up, down = self.answer(t), self.answer(-t)
            return (up - down) / 2, (up + down) / 2

        def weighted(t: Tensor) -> Tensor:
            """What the norm's weight and the phases make of `t`."""
            spread = t.expand(-1, heads, -1).square().mean((1, 2) if wide else 2, keepdim=True).sqrt()
            return halves(_LARGE * t)[0] * spread

        weight, rotary = self._turned(weighted)
        large, bias = halves(_LARGE * z)
        ratio = float(large.norm() / halves(_SMALL * z)[0].norm())
        eps = _SMALL**2 * float(z.square().mean()) * max(0.0, ratio**2 - 1)
        bias = (bias if rotary is None else rotary.turn(bias.transpose(0, 1), back=True).transpose(0, 1))[0]
        unbiased = float(bias.abs().max()) <= FORMULA * float(weight.abs().max())
        if not wide:
            if not (agree(weight, weight[:1]) and (unbiased or agree(bias, bias[:1]))):
                raise BadInputError("expected one norm for all heads, got one for each; measure the layer instead")
            weight, bias = weight[:1], bias[:1]
        kind = LayerNorm if centred else RMSNorm
        eps = float(f"{eps:.9g}") if eps > _EXACT * _SMALL**2 else 0.0
        return kind(weight.flatten(), None if unbiased else bias.flatten(), eps), rotary

    def _turned(self, f: Callable[[Tensor], Tensor]) -> tuple[Float[Tensor, "heads width"], Rotary | None]:
        """The factors and phases of a linear `f`, the phases those relative to the first token's where these are none."""
        z = self.probe(range(self.width))
        seen = f(z)
        drift = (seen - seen[:1]).abs().amax((0, 1))
        moving = torch.nonzero(drift > _EXACT * seen.abs().max())[:, 0]
        if not len(moving):
            return seen[0] / z[0], None
        last, width = int(moving[-1]) + 1, self.width
        t = drawn(seen.shape, stream(0, "turned", z.device), z.dtype)
        t = t - t.mean(-1, keepdim=True)
        value = f(t)
        for turned in dict.fromkeys((last + last % 2, width - width % 2)):  # planes may stand still at the end
            for interleaved in (False, True):
                first = range(0, turned, 2) if interleaved else range(turned // 2)
                second = range(1, turned, 2) if interleaved else range(turned // 2, turned)
                factor, cos, sin = self._phases(f, seen[0] / z[0], list(first), list(second))
                if not bool(cos.isfinite().all() and sin.isfinite().all()):
                    continue
                rotary = Rotary(cos, sin, interleaved)
                if agree(rotary.turn((factor * t).transpose(0, 1)).transpose(0, 1), value):
                    return factor, rotary
        raise BadInputError("expected rotary phases on the first entries of a head, got others; measure the layer instead")

    def _phases(
        self, f: Callable[[Tensor], Tensor], factor: Tensor, first: list[int], second: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Factors of all entries, cosines and sines of the planes `(first_p, second_p)`, the tables' size among the factors."""
        a, b = self.probe(first), self.probe(second)
        of_a, of_b = f(a), f(b)
        cos_a, sin_a = of_a[..., first] / a[..., first], of_a[..., second] / a[..., first]
        cos_b, sin_b = of_b[..., second] / b[..., second], -of_b[..., first] / b[..., second]
        factor = factor.clone()
        factor[:, first] = torch.hypot(cos_a[0], sin_a[0]).copysign(cos_a[0])
        factor[:, second] = torch.hypot(cos_b[0], sin_b[0]).copysign(cos_b[0])
        return factor, cos_a[:, 0] / factor[:1, first], sin_a[:, 0] / factor[:1, first]
