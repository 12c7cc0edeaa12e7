"""How far can an input move before a model's answer changes?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.errors import BadFunctionError, BadInputError, foreign, reason
from howsmooth.maps import Map
from howsmooth.maps.base import check_finite, check_input
from howsmooth.maps.jacobian import doubled
from howsmooth.models import MapName, Model
from howsmooth.models.closed import in_pieces, to_the_end
from howsmooth.models.model_input import Which
from howsmooth.models.tokens import Window
from howsmooth.program.modules import written_path
from howsmooth.program.pieces import Piece, Pieces, pieces_of, pruned
from howsmooth.program.reading import check_agrees, read_function
from howsmooth.progress import Progress, progress_bar
from howsmooth.search.radius import Radius, first_order, largest, smallest_change
from howsmooth.settings import PER, Per, choice, flag, moving, number, whole
from howsmooth.solve import Options, solve
from howsmooth.theory.around import Certified, Derivatives, Neighbourhood, expand, output_move, scalar_changes

_SMALL = 768  # numbers that may move up to which a function is expanded whole
_RIVALS = 64  # of many answers, those whose margins have gradients of their own
_START = 1e-3  # where a radius is looked for when no attack says, as a part of a token's length


def certified_radius(
    model: Model | nn.Module | Callable[[Tensor], Tensor],
    x: Tensor | None = None,
    *,
    label: int | None = None,
    change: float | None = None,
    per: Per = "token",
    tokens: Any = None,
    layer: int = 0,
    map: MapName | None = None,
    attack: bool = True,
    **input: Any,
) -> Radius:
    """The largest radius found within which no change of the tokens can change a model's answer, and an attack beside it.

    In float64, casts to float32 left out. Small functions are expanded whole (docs/explanation/around-blocks.md §3), others by
    certified norms (§4). What counts is how values move, also where a detach hides it from autograd.

    Args:
        model: A loaded `Model` with `text`, `ids` or its other inputs, whose tokens are those that enter `layer`; or a
            module, a function or a map such as `Attention` with `x`, which gives the scores of all answers.
        x: Tokens of a module, function or map, (n, d) or (1, n, d).
        label: The answer that must hold, by default the one that is given at the input: the class, or the next token.
        change: Instead of an answer, what must hold is that the output moves by at most this part of its length.
        layer: Of a loaded model, where its tokens move.
        map: That of the layer alone, such as `"block"`, in place of all that follows.
        per: Lengths are of every token's move (`"token"`) or of all together (`"sequence"`).
        tokens: The positions that may move.
        attack: Whether to look for the shortest change that does change the answer.
        **input: Of a loaded model: `text`, `ids`, or what it takes by name.

    Returns:
        The certified radius, beside the attacked one and what the gradient alone would promise.

    >>> flat = torch.tensor([[1.0, 0.0]])
    >>> certified_radius(lambda t: t.mean(0), flat, per="sequence").certified > 0.7  # the line x = y is 1/√2 away
    True
    """
    length, attack = choice(per, "per", PER), flag(attack, "attack")
    if map is not None and (change is None or not isinstance(model, Model)):
        raise BadInputError("expected map beside a loaded model and change, got it otherwise; a layer alone gives no answer")
    if isinstance(model, Model) and x is not None:
        raise BadInputError("expected the model's inputs by name, got a tensor; pass text=, ids= or inputs=")
    answered = _from_model(model, layer, map, input) if isinstance(model, Model) else _from_function(model, x, input)
    free = None if tokens is None else moving(tokens, len(answered.x))
    if change is not None:
        if label is not None:
            raise BadInputError("expected either label or change, got both; ask one after the other")
        change = number(change, "a change > 0", "0.1 is a tenth of the output's length", above=0.0)
        return _of_change(answered, change, length, free, attack)
    return _of_answer(answered, label, length, free, attack)


@dataclass(frozen=True, eq=False)
class _Answered:
    """What a function makes of tokens: rows of scores in float64, the last of which is the answer. graph: with layers whole."""

    f: Callable[[Tensor], Tensor]
    graph: Callable[[], Pieces] | None
    x: Tensor


def _from_model(model: Model, layer: int, map: MapName | None, input: dict[str, Any]) -> _Answered:
    sample = model.capture(**input).sample
    if map is not None:
        own, x = in_pieces(sample, layer, Which(map)), sample.segment(layer, Which(map)).start.double()
        whole = pieces_of(own, tuple(x.shape))
        assert whole is not None
        return _Answered(whole, lambda: whole, x)
    f, graph, x = to_the_end(sample, layer)
    return _Answered(f, graph, x)


def _from_function(f: Callable[[Tensor], Tensor], x: Tensor | None, input: dict[str, Any]) -> _Answered:
    if not callable(f):
        raise BadInputError(f"expected a model, a module or a function, got {type(f).__name__}; load one with howsmooth.load")
    if x is None or input:
        raise BadInputError(
            "expected x for a module or function, got none or other inputs; pass tokens (n, d), or a loaded model"
        )
    check_input(x)
    check_finite(x, "input")
    batched = x.ndim == 3
    if x.ndim not in (2, 3) or (batched and len(x) != 1):
        raise BadInputError(f"expected one input (n, d) or (1, n, d), got shape {tuple(x.shape)}; pass one at a time")
    flat = (x[0] if batched else x).detach().double().cpu()
    if isinstance(f, Map):
        own = f.to("cpu", torch.float64)
        graph = pieces_of(own, tuple(flat.shape))
        return _Answered(own, None if graph is None else lambda: graph, flat)
    g: Any = doubled(f)  # a module is copied
    if isinstance(g, nn.Module):
        g.eval().requires_grad_(False)

    def scores(t: Tensor) -> Tensor:
        try:
            with written_path():
                y = g((t[None] if batched else t).clone())  # which g may write into
        except Exception as error:
            if not foreign(error):
                raise
            raise BadInputError(
                f"expected a function that takes float64 of shape {tuple(x.shape)}, got an error from it "
                f"({reason(error)[:160]}); pass a module, which is widened, or a function in float64"
            ) from error
        return y.reshape(-1, y.shape[-1])

    return _Answered(scores, None, flat)


def _of_answer(a: _Answered, label: int | None, per: Per, free: tuple[int, ...] | None, attack: bool) -> Radius:
    with torch.no_grad():
        rows = a.f(a.x)
    if rows.shape == a.x.shape and len(rows) > 1:
        raise BadInputError(
            f"expected a model that answers, got hidden states of width {rows.shape[-1]}; load it with head=True, or ask for "
            "change=0.1, a tenth of the output's length"
        )
    scores = rows[-1]
    if len(scores) < 2 or not bool(rows.isfinite().all()):
        raise BadInputError("expected finite scores of two answers or more, got others; return one for each answer")
    given = int(scores.argmax())
    label = (
        given if label is None else whole(label, f"a label from 0 to {len(scores) - 1}", "there is no other", below=len(scores))
    )
    size, lead = float(a.x.norm(dim=-1).mean()), scores[label] - scores
    order = lead.argsort()
    order = order[order != label]
    margin = float(lead[order[0]])
    if margin <= 0:
        return Radius(0.0, 0.0, 0.0, per, label, margin, size, 1.0, f"the answer at the input is {given}", a.x.clone())
    near, far = order[:_RIVALS], order[_RIVALS:]

    def margins(t: Tensor) -> Tensor:
        z = a.f(t)[-1]
        return z[label] - z[near]

    bounds = _bounds(a, per, free, lambda g: _with_margins(g, label, near, far), margins if not len(far) else None)
    slopes = _slopes(bounds.graph, a.x) * _free(a.x, free)
    linear = first_order(lead[near], slopes, per)
    attacked, point = smallest_change(margins, a.x, per, free, slopes=bounds.graph) if attack else (math.inf, None)
    start = min(attacked, linear)

    def holds(r: float) -> bool:
        changes, behind = bounds.scalars(r)
        return bool((lead[near] - changes > 0).all()) and bool((lead[far] - behind > 0).all())

    found = largest(holds, start if math.isfinite(start) else _START * size)
    check_agrees(bounds.graph, margins, _edge(a.x, found, per, free, slopes[0]))
    reason = "margins and how far they can move" if found else "some part of the function can move without a bound"
    return Radius(found, attacked, linear, per, label, margin, size, bounds.confidence(), reason, point)


def _of_change(a: _Answered, change: float, per: Per, free: tuple[int, ...] | None, attack: bool) -> Radius:
    with torch.no_grad():
        y = a.f(a.x)
    most, size = change * float(y.norm()), float(a.x.norm(dim=-1).mean())
    if not 0 < most < math.inf:
        raise BadInputError("expected a finite output that is not zero, got another; give a function with one")

    def left(t: Tensor) -> Tensor:
        return (most - (a.f(t) - y).norm())[None]

    bounds = _bounds(a, per, free, None, a.f)

    def output(t: Tensor) -> Tensor:
        return bounds.graph(t).reshape(y.shape)

    estimate = solve(output, a.x, Options(tokens=free)).estimate
    count = len(a.x) if free is None else len(free)
    linear = most / estimate.value / (math.sqrt(count) if per == "token" else 1.0) if estimate.value else math.inf
    attacked, point = math.inf, None
    if attack and estimate.value:
        way = 2 * most / estimate.value * estimate.direction.double()
        attacked, point = smallest_change(left, a.x, per, free, [way, -way], lambda t: (most - (output(t) - y).norm())[None])
    start = min(attacked, linear)
    found = largest(lambda r: bounds.total(r) <= most, start if math.isfinite(start) else _START * size)
    check_agrees(bounds.graph, a.f, _edge(a.x, found, per, free, estimate.direction.double()))
    reason = "how far the output can move" if found else "some part of the function can move without a bound"
    return Radius(found, attacked, linear, per, None, most, size, bounds.confidence(), reason, point)


def _free(x: Tensor, free: tuple[int, ...] | None) -> Tensor:
    rows = torch.zeros(len(x), 1, dtype=torch.float64)
    rows[list(range(len(x))) if free is None else list(free)] = 1.0
    return rows


def _edge(x: Tensor, r: float, per: Per, free: tuple[int, ...] | None, way: Tensor) -> list[Tensor]:
    """Points at the edge of what is certified: both ways along a change and along two random ones."""
    random = torch.Generator().manual_seed(0)
    ways = _free(x, free) * torch.stack([way, *torch.randn(2, *x.shape, generator=random, dtype=torch.float64)])
    lengths = ways.norm(dim=-1, keepdim=True) if per == "token" else ways.norm(dim=(-2, -1), keepdim=True)
    return [x + sign * step for step in r * ways / lengths.clamp_min(1e-300) for sign in (1, -1)]


def _slopes(margins: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        y = margins(x)
        return torch.stack([torch.autograd.grad(v, x, retain_graph=True, materialize_grads=True)[0] for v in y])


@dataclass(frozen=True, eq=False)
class _RadiusBounds:
    """What is certified within a radius.

    graph: of the margins of the near rivals, or of the output.  scalars: how far margins of the near rivals can fall, and of
    the far ones.  total: how far the output can move.
    """

    graph: Pieces
    scalars: Callable[[float], tuple[Tensor, Tensor]]
    total: Callable[[float], float]
    confidence: Callable[[], float]


@dataclass(frozen=True, eq=False)
class _Margins:
    """Graphs of margins. hidden: what the answers are read off, and lengths: of how each far margin is."""

    graph: Pieces
    hidden: Pieces | None
    lengths: Tensor


def _bounds(
    a: _Answered,
    per: Per,
    free: tuple[int, ...] | None,
    behind: Callable[[Pieces], _Margins] | None,
    f: Callable[[Tensor], Tensor] | None,
) -> _RadiusBounds:
    """By expansion where the function is small enough, else by certified norms.

    behind: the margins behind a graph of scores, nothing where the output itself is asked for.  f: a function that is nothing
    but what is asked for, where there is one.
    """
    moved = a.x.numel() if free is None else len(free) * a.x.shape[1]
    if moved <= _SMALL or a.graph is None:
        try:
            graph = read_function(a.f if f is None else f, a.x, closed=a.graph is None)
            what = _Margins(graph, None, torch.zeros(0)) if f is not None or behind is None else behind(graph)
            return _within(lambda g: expand(g, a.x, per == "sequence", free), a.x, what, per, free)
        except BadFunctionError:
            if a.graph is None:
                raise
    graph = a.graph()
    what = _Margins(graph, None, torch.zeros(0)) if behind is None else behind(graph)
    return _within(lambda g: Certified(g, a.x, free), a.x, what, per, free)


def _within(
    of: Callable[[Pieces], Derivatives], x: Tensor, what: _Margins, per: Per, free: tuple[int, ...] | None
) -> _RadiusBounds:
    """of: the derivatives of a graph, formed or known by their norms."""
    whole, hidden = of(what.graph), None if what.hidden is None else of(what.hidden)

    def around(r: float) -> Neighbourhood:
        return Neighbourhood(x, r * _free(x, free)[:, 0], r if per == "sequence" else None)

    def scalars(r: float) -> tuple[Tensor, Tensor]:
        far = torch.zeros(0) if hidden is None else what.lengths * output_move(hidden, around(r))
        return scalar_changes(whole, around(r)), far

    def confidence() -> float:
        return max(0.0, whole.confidence + (0.0 if hidden is None else hidden.confidence - 1))

    return _RadiusBounds(what.graph, scalars, lambda r: output_move(whole, around(r)), confidence)


def _with_margins(graph: Pieces, label: int, near: Tensor, far: Tensor) -> _Margins:
    """A graph of scores cut short: the margins of the last row, from what the scores are read off where that is a matrix."""
    at = graph.output
    while graph.nodes[at].kind == "linear" and len(graph.nodes[at].inputs) == 1 and graph.nodes[at].name not in ("mm", "addmm"):
        at = graph.nodes[at].inputs[0]
    matrix = graph.nodes[at].constant if graph.nodes[at].name in ("mm", "addmm") else None
    offset = _offset(graph, at, matrix) if isinstance(matrix, Tensor) else None
    if not isinstance(matrix, Tensor) or offset is None:
        if len(far):
            raise BadInputError(
                f"expected at most {_RIVALS + 1} answers, or scores that a matrix makes of the last token, got "
                f"{len(near) + len(far) + 1} of another kind; give a function of fewer"
            )
        return _Margins(_behind(graph, graph.output, lambda z: z[label] - z[near], len(near)), None, torch.zeros(0))
    source, w = graph.nodes[at].inputs[0], matrix.double()
    rows, more = w[:, label : label + 1] - w[:, near], offset[label] - offset[near]
    margins = _behind(graph, source, lambda h: h @ rows + more, len(near))
    if not len(far):
        return _Margins(margins, None, torch.zeros(0))
    lengths = (w[:, label : label + 1] - w[:, far]).norm(dim=0) * (1 + 1e-9)
    return _Margins(margins, _behind(graph, source, lambda h: h, w.shape[0]), lengths)


def _offset(graph: Pieces, at: int, matrix: Tensor) -> Tensor | None:
    """What is added to `h @ matrix` in the last row of the output, `h` what enters a node; nothing where more is done to it."""
    ways = [at]
    while ways[-1] != graph.output:
        ways.append(next(i for i in range(ways[-1] + 1, len(graph.nodes)) if ways[-1] in graph.nodes[i].inputs))

    def scores(h: Tensor) -> Tensor:
        for i in ways:
            h = graph.nodes[i].run(h)
        return h.reshape(-1, h.shape[-1])[-1]

    shape = graph.nodes[graph.nodes[at].inputs[0]].shape
    h = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    offset, product = scores(torch.zeros_like(h)), h[-1] @ matrix.double()
    linear = scores(h) - offset
    return offset if linear.shape == product.shape and torch.allclose(linear, product, rtol=1e-9, atol=1e-9) else None


def _behind(graph: Pieces, source: int, run: Callable[[Tensor], Tensor], count: int) -> Pieces:
    """The graph up to a node, and a linear function of its last row."""
    node = Piece("linear", "last row", (source,), lambda t: run(t.reshape(-1, t.shape[-1])[-1]), (count,))
    return pruned(replace(graph, nodes=(*graph.nodes[: source + 1], node), output=source + 1))


@dataclass(frozen=True, eq=False)
class Radii:
    """Radii by window and layer, or the sentence that says why there is none."""

    rows: tuple[tuple[int, int, Radius | str], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {"rows": [{"window": w, "layer": k} | _plain(r) for w, k, r in self.rows]}

    def found(self) -> list[tuple[int, int, Radius]]:
        """Window, layer and radius where there is one."""
        return [(w, k, r) for w, k, r in self.rows if isinstance(r, Radius)]


def _plain(radius: Radius | str) -> dict[str, Any]:
    return radius.to_dict() if isinstance(radius, Radius) else {"refused": radius}


def radii(
    model: Model,
    windows: Sequence[Window],
    layers: Sequence[int] | None,
    progress: Progress | bool | None = None,
    **how: Any,
) -> Radii:
    """`certified_radius` for every window and layer, all layers where none is named. how: its other arguments.

    progress: a bar where a person watches; False for none.
    """
    some = range(model.capture([windows[0]]).num_layers) if layers is None else layers
    cases = [(w, k) for w in range(len(windows)) for k in some]
    rows: list[tuple[int, int, Radius | str]] = []
    with progress_bar("certifying", progress) as shown:
        shown.begin(len(cases))
        for w, k in cases:
            try:
                rows.append((w, k, certified_radius(model, ids=windows[w], layer=k, **how)))
            except BadFunctionError as error:
                rows.append((w, k, str(error)))
            shown.advance()
    return Radii(tuple(rows))
