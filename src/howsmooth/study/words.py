"""Attacks in token space: change at most `k` words so that a layer's output moves most, or its constant rises most.

Substitutions are guided by first order in the embeddings. With `J` the Jacobian from embeddings to the output, replacing token
`i` by word `w` moves the output by about `J_i (e_w − e_i)`; vjps of a few random output directions estimate its length
for all words and places at once: `|J_i Δ|² = E ⟨J_iᵀu, Δ⟩²` for Gaussian `u`. Everything reported is scored exactly, by running
the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.fx import Node

from howsmooth.errors import BadInputError
from howsmooth.models.capture import Capture
from howsmooth.models.model import Model
from howsmooth.models.recorded import Recording
from howsmooth.models.tokens import Window
from howsmooth.program import ends_of
from howsmooth.program.ends import MapName
from howsmooth.program.replay import Run, Way
from howsmooth.program.tracing import Flow
from howsmooth.spectral import svd

Goal = Literal["output", "constant"]
WAYS = ("nearest embedding", "gradient", "duplicate")

_BEGINS = ("Ġ", "▁")  # how vocabularies mark the beginning of a word: byte-level BPE, and SentencePiece
_SKETCH = 12  # random output directions
_BATCH = 32  # sequences scored together
_REFINEMENTS = 2  # gradients taken at a changed sentence, for each word
_STRIDES = (0.5, 1.0, 2.0)  # how far along the feature-space attack to look for an embedding, in typical distances


@final
@dataclass(frozen=True)
class Change:
    """One edit: the token at `position` becomes `new`, or with `inserted` is followed by it."""

    position: int
    old: str
    new: str
    inserted: bool = False

    def __str__(self) -> str:
        return f"{self.old}+{self.new}" if self.inserted else f"{self.old}→{self.new}"


@final
@dataclass(frozen=True, eq=False)
class TokenAttack:
    """One way's best edit.

    score: how far the output moved relative to its length, or the ratio of the new constant to the old.  scored: edits that
    were scored exactly.  random_mean, random_best: the score of random edits of as many words, on average, and the best of as
    many as were scored.
    """

    way: str
    goal: Goal
    ids: tuple[int, ...]
    changes: tuple[Change, ...]
    score: float
    scored: int
    random_mean: float
    random_best: float
    note: str

    @property
    def wins(self) -> bool:
        """Whether it beats the best of as many random edits."""
        return self.score > self.random_best

    def to_dict(self) -> dict[str, Any]:
        names = ("way", "goal", "score", "scored", "random_mean", "random_best", "wins", "note")
        changes, positions = [str(c) for c in self.changes], [c.position for c in self.changes]
        edit = {"changes": changes, "positions": positions, "ids": list(self.ids)}
        return {name: getattr(self, name) for name in names} | edit


def attack_tokens(
    model: Model,
    window: Window,
    *,
    layer: int | None = None,
    map: MapName = "attention",
    words: int = 1,
    goal: Goal = "output",
    ways: Sequence[str] = WAYS,
    forbid: Sequence[str] = (),
    whole_words: bool = True,
    scored: int = 32,
    seed: int = 0,
) -> tuple[TokenAttack, ...]:
    """Change at most `words` words of a window, in several ways, each beside random edits of the same size.

    nearest embedding: at the tokens that carry the feature-space attack (the direction in embedding space that moves the output
    most), the words whose embeddings lie nearest to where it points.  gradient: all substitutions ranked by first order, the
    best run, better words looked for where they changed one, `scored` in all, the winner kept; and again for the next word.
    duplicate: a token written twice.

    layer: whose output counts, or None for the model's.  map: `attention`, `block`.  goal: `output`, how far it moves;
    `constant`, how much the layer's Lipschitz constant rises.  Special tokens stay; words in `forbid` are not used;
    `whole_words` replaces whole words by whole words only.
    """
    _check(model, window, layer, map, words, goal, ways, scored)
    run = _Runner(model, window, layer, map, goal, forbid, whole_words)
    rows = []
    for way in ways:
        random = torch.Generator().manual_seed(seed)  # a way's answer does not depend on those before it
        rows.append(_duplicate(run, words, random) if way == "duplicate" else _substitute(run, words, random, scored, way))
    return tuple(rows)


class _Runner:
    """The model at many edits of one window: what may be changed, into what, and what a change does.

    unedited: the score of the window itself.  places: the tokens that may be replaced.  words: the vocabulary as it reads.
    allowed: which of it may replace them.
    """

    def __init__(
        self, model: Model, window: Window, layer: int | None, map: MapName, goal: Goal, forbid: Sequence[str], whole: bool
    ):
        self.model, self.module, self.window, self.layer = model, model.module, window, 0 if layer is None else layer
        self.whole = layer is None
        self.map: MapName = map
        self.goal: Goal = goal
        self.unedited = 1.0 if goal == "constant" else 0.0
        captured = model.capture(ids=window)
        captured.tokens(self.layer, map)  # refuses a layer that is not there
        embedding = getattr(self.module, "get_input_embeddings", lambda: None)()
        weight = getattr(embedding, "weight", None)
        if not isinstance(embedding, nn.Module) or not isinstance(weight, Tensor):
            raise BadInputError(
                f"expected a model with token embeddings, got {type(self.module).__name__}; attack its features instead"
            )
        self.weight, self.table = weight, weight.detach()  # (vocabulary, d)
        self.fixed = {k: v for k, v in captured.sample.kwargs.items() if k == "use_cache"}
        self.ids = torch.tensor(window.ids, device=self.table.device)
        self.base = self.outputs(self.ids[None])[0]
        self.constant = self._constant(captured) if goal == "constant" else 0.0
        if goal == "output" and not float(self.base.norm()) > 0:
            raise BadInputError("expected an output that is not zero, got zeros; pick another layer")
        self.places = [i for i, p in enumerate(window.pieces) if not p.special and (not whole or _is_word(window, i))]
        if not self.places:
            raise BadInputError(
                "expected a token that may be replaced, got special tokens and parts of words only; pass whole_words=False"
            )
        tokens = [str(token) for token in model.tokenizer.convert_ids_to_tokens(list(range(len(self.table))))]
        self.words = [t.removeprefix("##").removeprefix("Ġ").removeprefix("▁").strip() for t in tokens]
        begins = [t.startswith(_BEGINS) for t in tokens]  # a word, in a vocabulary that marks those that do
        if not any(begins):
            begins = [not t.startswith("##") for t in tokens]
        banned = {w.lower() for w in forbid}
        good = [w.isalpha() and w.lower() not in banned and (b or not whole) for w, b in zip(self.words, begins, strict=True)]
        self.allowed = torch.tensor(good, device=self.table.device)
        self.allowed[[i for i in model.tokenizer.all_special_ids if i < len(tokens)]] = False
        if not bool(self.allowed.any()):
            raise BadInputError(f"expected words to substitute, got {len(banned)} forbidden ones that leave none; forbid fewer")

    def random(self, words: int, count: int, random: torch.Generator) -> tuple[float, float]:
        """The mean and best score of `count` random substitutions of `words` words."""
        vocabulary, places = torch.nonzero(self.allowed)[:, 0], torch.tensor(self.places)
        edits = self.ids.repeat(max(1, count), 1)
        for edit in edits:
            where = places[torch.randperm(len(places), generator=random)[:words]].to(edit.device)
            edit[where] = vocabulary[torch.randint(len(vocabulary), (len(where),), generator=random)].to(edit)
        scores = self.scores(edits)
        return float(scores.mean()), float(scores.max())

    def outputs(self, ids: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n d"]:
        """What leaves the layer, or the model. Some sequences more than asked are run, so that few batches are recorded."""
        count = len(ids)
        if count > 1:
            ids = torch.cat([ids, ids[-1:].expand(_BATCH - count, -1)])
        recording, run = self._run(ids)
        end = self._end(recording)
        y = run.values([end])[end]
        return y.reshape(len(ids), -1, y.shape[-1])[:count]

    def _run(self, ids: Int[Tensor, "batch n"]) -> tuple[Recording, Run]:
        """The model's recorded run at a batch of sequences."""
        recording, run = self.model.recordings.at(self.module, (), {"input_ids": ids} | self.fixed)
        return recording, Run(run.program, run.tensors, None)

    def _end(self, recording: Recording) -> Node:
        """Where the layer ends, or the model."""
        if self.whole:
            return next(n for n in recording.program.outputs if recording.layers.flow.live(n))
        return ends_of(recording.layers, self.layer, self.map).leave[0]

    def _from_embedding(self, ids: Int[Tensor, " n"], *, to_end: bool) -> tuple[Float[Tensor, "1 n d"], Tensor]:
        """The embeddings of a sequence, and on a graph what leaves the layer, else what enters its map."""
        recording, run = self._run(ids[None])
        program, layers = recording.program, recording.layers
        weights = program.weights_now()
        holder = next(n for n, key in program.weights.items() if weights[key] is self.weight)
        tables = [n for n in holder.users if program.inputs[0] in n.all_input_nodes]
        if len(tables) != 1:
            raise BadInputError("expected ids that are looked up in one table, got others; attack its features instead")
        stop = self._end(recording) if to_end else ends_of(layers, self.layer, self.map).enter[0]
        way = Way.of(Flow(program, tables), tables, (stop,), check=False)
        segment = way.at(run.at(self.model.dtype))
        x = segment.start[0].requires_grad_()
        with torch.enable_grad():
            (y,) = segment(x)
        return x, y

    def scores(self, edits: Int[Tensor, "edits n"], keep: Sequence[Tensor] | None = None) -> Float[Tensor, " edits"]:
        """How far each edit moves the output, relative to its length, or how many times the constant it has.

        keep: for edits of another length, the positions of the old tokens.
        """
        if self.goal == "constant":
            return torch.tensor([self._constant(self.model.capture(ids=e)) / self.constant for e in edits])
        moved = []
        for start in range(0, len(edits), _BATCH):
            y = self.outputs(edits[start : start + _BATCH])
            if keep is not None:
                y = torch.stack([item[k] for item, k in zip(y, keep[start : start + _BATCH], strict=True)])
            moved.append((y - self.base).flatten(1).norm(dim=-1))
        return torch.cat(moved).cpu() / self.base.norm().cpu()

    def _constant(self, captured: Capture) -> float:
        return captured.measure(self.layer, self.map, tol=1e-2).value

    def slopes(self, ids: Int[Tensor, " n"], random: torch.Generator | None) -> Float[Tensor, "probes n d"]:
        """The vjp at the embeddings of random output directions, without `random` of its change; or the constant's gradient."""
        if self.goal == "constant":
            x, y, probes = self._constant_slope(ids)
        else:
            x, y = self._from_embedding(ids, to_end=True)
            y = y.reshape(self.base.shape)
            change = (y - self.base).detach()[None]
            probes = change if random is None else torch.randn(_SKETCH, *y.shape, generator=random).to(y)
        return torch.stack([torch.autograd.grad(y, x, u, retain_graph=True)[0][0] for u in probes])

    def _constant_slope(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, the layer's input on a graph, and `∂_X ⟨u, J(X)v⟩` there: `(J(X+hv)ᵀu − J(X−hv)ᵀu)/2h`."""
        captured = self.model.capture(ids=ids)
        f = captured.map(self.layer, self.map)
        point = f.start.double()
        v = captured.measure(self.layer, self.map, tol=1e-2).direction.to(point)
        u = f.linearize(point[None])[1].jvp(v[None, None])
        u = u / u.norm()
        h = 1e-4 * float(point.norm())
        ahead, behind = (f.linearize((point + s * h * v)[None])[1].vjp(u)[0] for s in (1.0, -1.0))
        x, y = self._from_embedding(ids, to_end=False)
        return x, y, ((ahead - behind) / (2 * h)).reshape(1, *y.shape).to(y)


def _substitute(run: _Runner, words: int, random: torch.Generator, scored: int, way: str) -> TokenAttack:
    """Word after word: candidates by first order at what has been changed so far, the best by exact score."""
    ids, spent, best, note = run.ids, 0, run.unedited, ""
    places = list(run.places)
    for _ in range(min(words, len(run.places))):
        rank = _near_attack if way == "nearest embedding" else _by_gradient
        share = scored if way == "nearest embedding" or run.goal == "constant" else max(1, scored // 2)
        edits = rank(run, run.slopes(ids, random), ids, places, share)
        scores = run.scores(edits)
        spent += len(edits)
        top = int(scores.argmax())
        if float(scores[top]) <= best:
            note = "no further word helps"
            break
        best, ids = float(scores[top]), edits[top]
        if share < scored:
            best, ids, more = _refined(run, edits, scores, scored - share)
            spent += more
        places = [i for i in places if int(ids[i]) == int(run.ids[i])]
    changed = [i for i in run.places if int(ids[i]) != int(run.ids[i])]
    if not changed:
        note = f"no substitution {'raised the constant' if run.goal == 'constant' else 'moved the output'}"
    changes = tuple(Change(i, run.window.pieces[i].text, run.words[int(ids[i])]) for i in changed)
    beside = run.random(words, spent, random)
    return TokenAttack(way, run.goal, tuple(ids.tolist()), changes, best, spent, *beside, note)


def _by_gradient(
    run: _Runner, slopes: Tensor, ids: Tensor, places: list[int], count: int, signed: bool = False
) -> Int[Tensor, "edits n"]:
    """The substitutions with the largest first-order effect; among many places, at most a quarter of them at one."""
    table = run.table.to(slopes.dtype)
    most = max(1, count // min(4, len(places)))
    best: list[tuple[float, int, int]] = []
    for i in places:
        g = slopes[:, i]  # (probes, d)
        effect = table @ g.T - table[ids[i]] @ g.T  # (vocabulary, probes)
        effect = effect.sum(-1) if signed or run.goal == "constant" else effect.square().sum(-1)
        effect = effect.masked_fill(~run.allowed, -torch.inf)
        effect[[int(ids[i]), int(run.ids[i])]] = -torch.inf
        values, which = effect.topk(min(most, len(effect)))
        best += [(float(e), i, int(w)) for e, w in zip(values, which, strict=True) if e > -torch.inf]
    return _edits(ids, [(i, w) for _, i, w in sorted(best, reverse=True)[:count]])


def _refined(run: _Runner, edits: Tensor, scores: Tensor, count: int) -> tuple[float, Int[Tensor, " n"], int]:
    """Better words where the best edits changed one, along the gradient of the change itself, which is there no longer zero.

    The two best edits that changed different places are carried on in turn.
    """
    order = scores.argsort(descending=True).tolist()
    leaders = [order[0], *(k for k in order if not torch.equal(edits[k] == run.ids, edits[order[0]] == run.ids))][:2]
    best, winner, spent = float(scores[order[0]]), edits[order[0]], 0
    tried = {tuple(e.tolist()) for e in edits}
    for k in leaders:
        ids, mine = edits[k], float(scores[k])
        changed = [i for i in run.places if int(ids[i]) != int(run.ids[i])]
        for _ in range(_REFINEMENTS):
            share = max(1, count // (_REFINEMENTS * len(leaders)))
            near = _by_gradient(run, run.slopes(ids, None), ids, changed, share + len(tried), signed=True)
            fresh = [e for e in near if tuple(e.tolist()) not in tried][:share]
            if not fresh:
                break
            tried |= {tuple(e.tolist()) for e in fresh}
            again = run.scores(torch.stack(fresh))
            spent += len(fresh)
            if float(again.max()) > mine:
                mine, ids = float(again.max()), fresh[int(again.argmax())]
        if mine > best:
            best, winner = mine, ids
    return best, winner, spent


def _near_attack(run: _Runner, slopes: Tensor, ids: Tensor, places: list[int], count: int) -> Int[Tensor, "edits n"]:
    """Nearest embeddings to where the feature-space attack moves the tokens that carry most of it.

    Both signs and several lengths are tried. The attack is the top direction of the slopes: that of `JᵀJ` as far as they show.
    """
    table = run.table.to(slopes.dtype)
    direction = svd(slopes.flatten(1))[2][0].reshape(slopes.shape[1:])
    weight = direction.norm(dim=-1)
    order = sorted(places, key=lambda i: -float(weight[i]))[: max(1, count // (2 * len(_STRIDES)))]
    typical = float((table[::97] - table[ids[order[0]]]).norm(dim=-1).median())
    swaps: dict[tuple[int, int], None] = {}
    for i in order:
        unit = direction[i] / weight[i].clamp_min(torch.finfo(weight.dtype).tiny)
        for stride in (sign * stride for stride in _STRIDES for sign in (1.0, -1.0)):
            far = torch.cdist((table[ids[i]] + stride * typical * unit)[None], table)[0]
            far = far.masked_fill(~run.allowed, torch.inf)
            far[[int(ids[i]), int(run.ids[i])]] = torch.inf
            swaps[i, int(far.argmin())] = None
    return _edits(ids, list(swaps)[:count])


def _duplicate(run: _Runner, words: int, random: torch.Generator) -> TokenAttack:
    """A token written twice, up to `words` of them; the outputs of the old tokens are compared."""
    limit = getattr(getattr(run.module, "config", None), "max_position_embeddings", None)
    extra = words if not isinstance(limit, int) else min(words, limit - len(run.ids))
    if extra < 1:
        raise BadInputError(f"expected room for one more token, got {len(run.ids)} of {limit}; take a shorter window")
    doubled: list[int] = []
    best, spent, note = run.unedited, 0, ""
    for _ in range(min(extra, len(run.places))):
        tries = [[*doubled, i] for i in run.places if i not in doubled]
        built = [_doubled(run.ids, t) for t in tries]
        scores = run.scores(torch.stack([b[0] for b in built]), [b[1] for b in built])
        spent += len(tries)
        top = int(scores.argmax())
        if float(scores[top]) <= best:
            note = "no further duplicate helps"
            break
        best, doubled = float(scores[top]), tries[top]
    changes = tuple(Change(i, word, word, inserted=True) for i, word in ((i, run.window.pieces[i].text) for i in doubled))
    ids, note = _doubled(run.ids, doubled)[0], note if doubled else "no duplicate helps"
    beside = run.random(words, spent, random)
    return TokenAttack("duplicate", run.goal, tuple(ids.tolist()), changes, best, spent, *beside, note)


def _doubled(ids: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The ids with some tokens written twice, and where the old ones are."""
    times = torch.ones_like(ids)
    times[list(places)] = 2
    return ids.repeat_interleave(times), times.cumsum(0) - times


def _edits(ids: Tensor, swaps: list[tuple[int, int]]) -> Int[Tensor, "edits n"]:
    if not swaps:
        raise BadInputError("expected a word to substitute, got none that differs; allow more words")
    edits = ids.repeat(len(swaps), 1)
    for row, (i, w) in zip(edits, swaps, strict=True):
        row[i] = w
    return edits


def _is_word(window: Window, i: int) -> bool:
    """A token that is a whole word of letters: neither neighbour touches it with a character that makes a longer word."""
    piece, last = window.pieces[i], len(window.pieces) - 1
    before = "" if i == 0 or window.pieces[i - 1].special or piece.gap else window.pieces[i - 1].text[-1:]
    after = "" if i == last or window.pieces[i + 1].special or window.pieces[i + 1].gap else window.pieces[i + 1].text[:1]
    return piece.text.strip().isalpha() and not any(c.isalnum() or c in "'’-_" for c in before + after)


def _check(
    model: Model, window: Window, layer: int | None, map: str, words: int, goal: str, ways: Sequence[str], scored: int
) -> None:
    if window.mask is not None and not all(window.mask):
        raise BadInputError("expected a window without padding, got one with it; leave the padding out")
    if not window.ids or len(window.pieces) != len(window.ids):
        raise BadInputError("expected a window with its words, got none; take it from model.text(...)")
    if map not in ("attention", "block"):
        raise BadInputError(f"expected map attention or block, got {map!r}; layer=None is the whole model")
    if goal not in ("output", "constant"):
        raise BadInputError(f"expected goal output or constant, got {goal!r}; pick one of them")
    if goal == "constant" and layer is None:
        raise BadInputError("expected a layer for goal constant, got none; name the layer whose constant should rise")
    if not ways or any(w not in WAYS for w in ways):
        raise BadInputError(f"expected ways among {', '.join(WAYS)}, got {list(ways)}; name at least one of them")
    if any(isinstance(k, bool) or not isinstance(k, int) or k < 1 for k in (words, scored)):
        raise BadInputError(
            f"expected whole numbers of words and edits to score, at least 1, got {words!r} and {scored!r}; give 1 or more"
        )
    if model.tokenizer_source is None:
        raise BadInputError("expected a model with a tokenizer, got one that was built in memory; load it from a folder")
