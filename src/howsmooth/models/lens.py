"""The mean Jacobian from a layer to a later one over prompts and positions: the Jacobian lens of a language model.

`J_l` takes a small change of what leaves block `l` at a token to that of what leaves the last block, before the final norm. At
the chosen positions P of a prompt it is `Σ_{t, t' ∈ P} ∂h_final[t']/∂h_l[t] / |P|`: the mean over tokens `t` of what all later
tokens `t'` get, as in the public Jacobian lenses (Gurnee et al., 2026). One backward pass gives a row for every layer.
"""

import hashlib
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import BadFunctionError, BadInputError, ResultsError, reason
from howsmooth.models.model_input import ModelInput, Which
from howsmooth.models.tokens import Window
from howsmooth.program.operations import shape
from howsmooth.program.replay import Way, followed
from howsmooth.progress import progress_bar
from howsmooth.settings import items, shown, whole

if TYPE_CHECKING:
    from howsmooth.models.model import Model

PROMPT, POSITIONS = (
    128,
    slice(16, -1),
)  # tokens of a prompt, and those that count: early ones are sinks, the last has no next word
_ROW_BYTES = {"cpu": 2**24, "cuda": 2**27}  # of what moves through the widest operation in one backward pass
_MOST = 2**31  # tokens
_SAMPLED = 64  # entries of a weight that tell a model from another
_DOMINANT = 0.1  # share of all prompts' squared norms above which one dominates


class LensSum(NamedTuple):
    """Running means over prompts. squares: summed squared deviations from the mean.  turned: the mean of `J/|J|`."""

    mean: Tensor
    squares: Tensor
    turned: Tensor

    def with_one_more(self, J: Tensor, count: int) -> "LensSum":
        """After prompt number `count`."""
        off = J - self.mean
        mean = self.mean + off / count
        turned = self.turned + (J / J.norm().clamp_min(torch.finfo(J.dtype).tiny) - self.turned) / count
        return LensSum(mean, self.squares + off * (J - mean), turned)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Lens:
    """Mean Jacobians of a model from some layers to a later one. `lens[3]` is layer 3's, (d, d), its rows the output.

    Attributes:
        model: The model's name.
        to: Where the Jacobians end: a layer, or "final" for the last block.
        sums: Means and spreads over prompts, by layer.
        norms: `|J_l|` in Frobenius norm, by layer and prompt.
        prompts: A hash of every prompt.
        left_out: Prompts that count for nothing, and why.
        fingerprint: Of the model's weights and of what was asked.
        source: The model itself, where the lens was made in this process.
    """

    model: str
    to: int | str
    sums: Mapping[int, LensSum]
    norms: Mapping[int, tuple[float, ...]]
    prompts: tuple[str, ...]
    left_out: tuple[str, ...]
    fingerprint: str
    source: "Model | None" = None

    def __getitem__(self, layer: int) -> Tensor:
        return self.sums[self._layer(layer)].mean

    def __repr__(self) -> str:
        left = f", {len(self.left_out)} left out" if self.left_out else ""
        d, (first, *_, last) = self.d_model, (*self.source_layers, self.source_layers[-1])
        return f"Lens({self.model}, layers {first} to {last} → {self.to}, {d} × {d}, {self.n_prompts} prompts{left})"

    @property
    def n_prompts(self) -> int:
        return len(self.prompts)

    @property
    def source_layers(self) -> list[int]:
        return sorted(self.sums)

    @property
    def d_model(self) -> int:
        return len(self[self.source_layers[0]])

    def error(self, layer: int) -> Tensor:
        """The standard error of every entry of a mean, from how it varies over prompts; infinite for a single prompt."""
        count = self.n_prompts
        squares = self.sums[self._layer(layer)].squares
        return (squares / (count * (count - 1))).sqrt() if count > 1 else torch.full_like(squares, math.inf)

    def robust(self) -> "Lens":
        """A lens that no prompt dominates: the mean of `J/|J|` times the median norm, in place of the mean."""
        found = {k: s._replace(mean=s.turned * statistics.median(self.norms[k])) for k, s in self.sums.items()}
        return replace(self, sums=found)

    def dominant(self, layer: int) -> list[tuple[int, float]]:
        """Prompts with more than a tenth of all squared norms of a layer: number and share, the largest first."""
        squares = [norm**2 for norm in self.norms[self._layer(layer)]]
        total = sum(squares)
        shares = [(i, s / total) for i, s in enumerate(squares) if total and s > _DOMINANT * total]
        return sorted(shares, key=lambda pair: -pair[1])

    def to_dict(self) -> dict[str, Any]:
        """The dictionary of the public lenses' files: `J`, `n_prompts`, `source_layers`, `d_model`."""
        J = {layer: self[layer].clone() for layer in self.source_layers}
        return {"J": J, "n_prompts": self.n_prompts, "source_layers": self.source_layers, "d_model": self.d_model}

    def apply(self, h: Tensor, layer: int) -> Tensor:
        """What the model would say of hidden states: the logits of `J_l h` behind its own final norm and head.

        Args:
            h: What leaves block `layer`, (…, d); `lens.source.capture(text).tokens(layer + 1, "block")` gives it.
            layer: A layer of the lens.
        """
        J = self[layer]
        if self.source is None or self.to != "final":
            got = "none" if self.source is None else f"one to layer {self.to}"
            raise BadInputError(
                f"expected a lens to the end of a model, with that model, got {got}; pass Lens.load(path, model)"
            )
        if not isinstance(h, Tensor) or h.ndim < 1 or h.shape[-1] != J.shape[1]:
            got = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
            raise BadInputError(f"expected hidden states (…, {J.shape[1]}), got {got}; pass what leaves block {layer}")
        return behind(self.source, h.to(self.source.device, self.source.dtype) @ J.to(self.source.device, self.source.dtype).T)

    def save(self, path: str | Path) -> None:
        """Write everything to a safetensors file, in one piece or not at all."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = Path(path)
        tensors = {f"J.{k}": s.mean for k, s in self.sums.items()}
        tensors |= {f"{name}.{k}": getattr(s, name) for k, s in self.sums.items() for name in ("squares", "turned")}
        tensors = {k: t.contiguous() for k, t in tensors.items()}
        about = {"n_prompts": self.n_prompts, "source_layers": self.source_layers, "d_model": self.d_model, "model": self.model}
        about |= {"to": self.to, "norms": list(self.norms.items()), "prompts": self.prompts, "left_out": self.left_out}
        about |= {"fingerprint": self.fingerprint}
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, beside, {k: json.dumps(v) for k, v in about.items()})
            beside.replace(path)
        except (OSError, SafetensorError) as error:
            raise ResultsError(f"expected a place to write to, got {reason(error)}; choose another path") from error
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, model: "Model | None" = None) -> "Lens":
        """A lens that was saved.  model: what `apply` goes on through."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                told = {k: json.loads(v) for k, v in (file.metadata() or {}).items()}
                sums = {
                    k: LensSum(*(file.get_tensor(f"{name}.{k}") for name in ("J", "squares", "turned")))
                    for k in map(int, told["source_layers"])
                }
                norms = {int(k): tuple(v) for k, v in told["norms"]}
                prompts, left_out, mark = tuple(told["prompts"]), tuple(told["left_out"]), told["fingerprint"]
                name, to = told["model"], told["to"]
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise ResultsError(
                f"expected a lens that Lens.save wrote, got {reason(error)}; check {shown(str(path))}"
            ) from error
        return cls(name, to, sums, norms, prompts, left_out, mark, model)

    def _layer(self, layer: int) -> int:
        if layer not in self.sums:
            raise BadInputError(f"expected a layer of the lens, {self.source_layers}, got {shown(layer)}; choose one of them")
        return layer


def mean_jacobian(
    model: "Model",
    prompts: Sequence[Any],
    layers: Sequence[int] | None,
    to: int | str,
    positions: slice | Sequence[int],
    n: int | None,
    path: str | Path | None,
) -> Lens:
    """A lens of a model, prompt by prompt; one that is at `path` already goes on where it ended."""
    n = None if n is None else whole(n, "a whole number of tokens n", "ask for one or more", least=1)
    if not isinstance(positions, slice):
        positions = [whole(i, "whole positions", "list them, or pass a slice", least=-_MOST) for i in positions]
    chosen = None if layers is None else [whole(k, "a layer, counted from 0", "list whole numbers") for k in layers]
    given = [prompts] if isinstance(prompts, str) else items(prompts, "a list of prompts", "pass texts or lists of token ids")
    if not given:
        raise BadInputError("expected a prompt or more, got none; pass texts or lists of token ids")
    request = hashlib.sha256(_weights(model) + repr((chosen, to, _plain(positions), n)).encode()).hexdigest()
    lens = Lens(model.name, to, {}, {}, (), (), request, model)
    if path is not None and Path(path).exists():
        lens = Lens.load(path, model)
        if lens.fingerprint != request:
            raise BadInputError(
                f"expected a lens of {model.name} with these layers and positions at {shown(str(path))}, got one of "
                f"{lens.model} with other weights or settings; choose another path"
            )
    plain = [repr(_plain(p)) for p in given]  # one that comes twice counts twice
    marks = [hashlib.sha256(f"{p} {plain[:i].count(p)}".encode()).hexdigest()[:16] for i, p in enumerate(plain)]
    if unknown := set(lens.prompts) - set(marks):
        raise BadInputError(
            f"expected all prompts of the lens at {shown(str(path))}, got {len(unknown)} less; add them, or choose another path"
        )
    skipped = list[str]()
    with progress_bar("prompts") as bar:
        bar.begin(len(given), len(lens.prompts))
        for number, (prompt, mark) in enumerate(zip(given, marks, strict=True)):
            if mark in lens.prompts:
                continue
            try:
                found = _of_prompt(model, prompt, chosen, to, positions, n)
            except _UselessPromptError as error:
                skipped.append(f"prompt {number}: {error}")
                bar.advance(failed=True)
                continue
            count = lens.n_prompts + 1
            zero = {k: torch.zeros_like(J) for k, J in found.items()}
            sums = {k: lens.sums.get(k, LensSum(zero[k], zero[k], zero[k])).with_one_more(J, count) for k, J in found.items()}
            norms = {k: (*lens.norms.get(k, ()), float(J.double().norm())) for k, J in found.items()}
            lens = replace(lens, sums=sums, norms=norms, prompts=(*lens.prompts, mark))
            if path is not None:
                lens.save(path)
            bar.advance()
    if not lens.prompts:
        raise BadInputError(f"expected a prompt that can be counted, got {'; '.join(skipped)[:300]}; pass longer texts")
    lens = replace(lens, left_out=tuple(skipped))
    if path is not None:
        lens.save(path)
    return lens


class _UselessPromptError(Exception):
    """A prompt that is left out, and why."""


def _of_prompt(
    model: "Model", prompt: Any, chosen: list[int] | None, to: int | str, positions: slice | Sequence[int], n: int | None
) -> dict[int, Tensor]:
    """The Jacobians of one prompt, by layer."""
    if isinstance(prompt, str):
        text = model.text(prompt)
        window = text.window(n) if n is not None and len(text) + len(text.prefix) + len(text.suffix) > n else text.window()
    elif isinstance(prompt, Window) and (n is None or len(prompt) <= n):
        window = prompt
    else:
        window = [whole(i, "token ids", "list whole numbers") for i in items(_plain(prompt), "a prompt", "list token ids")][:n]
    sample = model.capture([window]).sample
    length, layers = len(sample.window), len(sample.layers.found)
    last = whole(layers - 1 if to == "final" else to, f'"final" or a layer below {layers}', "count from 0", below=layers)
    sources = sorted(set(range(last) if chosen is None else chosen))
    if not sources or sources[-1] >= last:
        raise BadInputError(f"expected layers before layer {last}, where the Jacobians end, got {sources}; choose earlier ones")
    try:
        at = range(length)[positions] if isinstance(positions, slice) else sorted({range(length)[i] for i in positions})
    except IndexError:
        at = []
    if not at:
        raise _UselessPromptError(f"{length} tokens, too few for the positions")
    found = jacobians(sample, sources, to, torch.tensor(list(at)))
    if not all(bool(J.isfinite().all()) for J in found.values()):
        raise _UselessPromptError("its Jacobian is not finite")
    return found


def jacobians(sample: ModelInput, sources: Sequence[int], to: int | str, at: Tensor) -> dict[int, Tensor]:
    """The Jacobian of one input from what leaves each block to what leaves block `to`, (d_out, d), over positions `at`."""
    which = Which("block", to=to)
    for k in sources:
        sample.check(k + 1, which)
    ends = {k: sample.ends(k + 1, which) for k in sources}
    whole_way, start = ends[sources[0]].way, ends[sources[0]].enter[0]
    nodes = {k: e.enter[0] for k, e in ends.items()}
    if any(len(e.enter) > 1 or len(e.leave) > 1 for e in ends.values()) or not {start, *whole_way.nodes} >= {*nodes.values()}:
        raise BadFunctionError(
            "expected blocks of one stream that follow each other, got others; measure with to= in their place"
        )
    run = sample.run.at(None)
    known = run.values({*whole_way.beside, start})
    tokens = len(sample.window)
    sizes = [shape(n) or () for n in (*nodes.values(), whole_way.leave[0])]
    if any(math.prod(size[:-1]) != tokens for size in sizes):
        raise BadFunctionError(
            f"expected hidden states ({tokens}, d), got {sizes[0]} and {sizes[-1]}; measure with to= instead"
        )

    def end(*moves: Tensor) -> Tensor:
        """What leaves, where what the blocks give moves."""
        added = dict(zip(nodes.values(), moves, strict=True))
        begin = {**known, start: known[start] + added.get(start, 0)}
        return followed(whole_way.nodes, begin.__getitem__, whole_way.leave, None, added)[whole_way.leave[0]]

    with torch.inference_mode(False), sdpa_kernel(SDPBackend.MATH):
        zeros = [torch.zeros(size, dtype=known[start].dtype, device=run.device) for size in sizes[:-1]]
        y, pull = torch.func.vjp(end, *zeros)  # pyright: ignore[reportAssignmentType]
        at = at.to(y.device)
        return _rows(y, pull, sources, at, tokens, _step(y, whole_way))


def _rows(y: Tensor, pull: Callable[..., Any], sources: Sequence[int], at: Tensor, tokens: int, step: int) -> dict[int, Tensor]:
    """The Jacobians row by row, `step` rows in one backward pass."""
    rows: dict[int, list[Tensor]] = {k: [] for k in sources}
    d = y.shape[-1]
    for first in range(0, d, step):
        some = torch.arange(min(step, d - first), device=y.device)
        g = torch.zeros(len(some), tokens, d, device=y.device, dtype=y.dtype)
        g[some[:, None], at, first + some[:, None]] = 1.0
        back = torch.vmap(pull)(g.reshape(len(some), *y.shape))
        for k, part in zip(sources, back, strict=True):
            rows[k].append(part.reshape(len(some), tokens, -1)[:, at].float().mean(1).cpu())
    return {k: torch.cat(parts) for k, parts in rows.items()}


def behind(model: "Model", h: Tensor) -> Tensor:
    """What the model makes of states that leave its last block: its final norm and head, token by token."""
    most = getattr(getattr(model.module, "config", None), "max_position_embeddings", None)
    ids = [0] * min(PROMPT, most if isinstance(most, int) and most > 0 else PROMPT, max(1, h.shape[:-1].numel()))
    sample = model.capture(ids=ids).sample
    final, logits = sample.ends(0, Which("block", to="final")), sample.ends(0, Which("block", to="logits"))
    leave = next(n for n in logits.leave if len(shape(n) or ()) > 1)
    if (shape(leave) or (0,))[-1] == h.shape[-1]:  # no head: the states themselves, or behind a norm
        raise BadInputError(f"expected a model with a head, got {type(model.module).__name__}; load it with head=True")
    way = Way.of(logits.flow, final.leave, (leave,))
    segment, rows = way.at(sample.run.at(model.dtype)), h.reshape(-1, h.shape[-1])
    size, found = shape(final.leave[0]) or (), []
    with torch.no_grad():
        for part in rows.split(len(ids)):
            padded = torch.cat([part, part.new_zeros(len(ids) - len(part), part.shape[1])])
            out = segment(padded.reshape(size))[0]
            found.append(out.reshape(len(ids), -1)[: len(part)])
    out = torch.cat(found)
    return out.reshape(*h.shape[:-1], out.shape[-1])


def _step(y: Tensor, way: Way) -> int:
    """Rows of one backward pass: as many as keep what moves through the widest operation in its share of memory."""
    widest = max((math.prod(shape(n) or (1,)) for n in way.nodes), default=1)
    return max(1, min(y.shape[-1], _ROW_BYTES.get(y.device.type, 2**24) // (widest * y.element_size())))


def _weights(model: "Model") -> bytes:
    """A hash of some entries of every weight."""
    mark = hashlib.sha256()
    for name, t in sorted(model.module.state_dict().items()):
        flat = t.detach().reshape(-1)
        picked = flat[:: max(1, len(flat) // _SAMPLED)].double().cpu()
        mark.update(f"{name} {tuple(t.shape)} {t.dtype}".encode() + picked.numpy().tobytes())
    return mark.digest()


def _plain(value: Any) -> Any:
    """A prompt or positions as plain values, whose text is always the same."""
    return value.tolist() if isinstance(value, Tensor) else getattr(value, "ids", value)
