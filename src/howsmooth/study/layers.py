"""Every layer and head: the measurement that all studies of a model are made of."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.models import MAPS, Capture, FallbackWarning, Measurement
from howsmooth.models.cut import MapName
from howsmooth.spectral import Estimate
from howsmooth.study.jobs import Job, Row
from howsmooth.study.reader import Reader, entering
from howsmooth.verbs import lipschitz, lipschitz_batch

_TOKENS = 512  # in a batch; longer samples gain nothing from company
_LAYERS = 8  # of one task


@final
@dataclass(frozen=True)
class Question:
    """What is asked of a model: lengths, samples of text, layers, and the map.

    layers: all where None.  tol, certify, seed: as in `howsmooth.lipschitz`; the seed also places the samples.
    """

    lengths: tuple[int, ...]
    samples: int = 8
    layers: tuple[int, ...] | None = None
    map: str = "attention"
    tol: float = 1e-3
    certify: float | None = None
    seed: int = 0

    def options(self) -> dict[str, Any]:
        return {"tol": self.tol, "certify": self.certify, "seed": self.seed}


@final
@dataclass(frozen=True)
class Setting:
    """A question that a reader can answer: its layers are known, and where its samples begin."""

    question: Question
    layers: tuple[int, ...]
    starts: tuple[int, ...]


def settle(reader: Reader, question: Question) -> Setting:
    """Check a question before any work: the longest sample is run once, one layer of the shortest measured."""
    lengths = question.lengths
    if not lengths or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in lengths):
        raise BadInputError(f"expected lengths of at least one token, got {list(lengths)}; give whole numbers")
    if question.map not in MAPS:
        raise BadInputError(f"expected a map among {', '.join(MAPS)}, got {question.map!r}; pick one of them")
    longest = max(lengths)
    starts = reader.starts(question.samples, longest, question.seed)
    reader.window(min(lengths), 0)  # a length below the special tokens is refused here
    captured = reader.captures(longest, starts[:1])[0]
    layers = tuple(range(captured.num_layers)) if question.layers is None else tuple(dict.fromkeys(question.layers))
    if not layers:
        raise BadInputError("expected a layer or more, got none; leave the layers out for all of them")
    outside = [layer for layer in layers if isinstance(layer, bool) or layer not in range(captured.num_layers)]
    if outside:
        raise BadInputError(
            f"expected layers from 0 to {captured.num_layers - 1}, got {outside[0]!r}; {captured.model} has no other"
        )
    shortest = reader.captures(min(lengths), starts[:1])[0]
    _measured(shortest, layers[0], question.map, question.options())  # refuses a map that the model lacks, and bad options
    return Setting(question, layers, tuple(starts))


def layer_jobs(setting: Setting, shares: bool = False) -> list[Job]:
    """Every layer at every length on every sample, the longest first; samples of few tokens go together.

    shares: also how much of the worst direction falls on each token, for the first sample.
    """
    q, jobs = setting.question, []
    for n in sorted(set(q.lengths), reverse=True):
        size = max(1, _TOKENS // n)
        for first in range(0, len(setting.starts), size):
            for layers in _groups(setting.layers):
                arguments = {
                    "n": n,
                    "starts": list(setting.starts[first : first + size]),
                    "first": first,
                    "layers": layers,
                    "map": q.map,
                    "shares": shares and first == 0,
                    **q.options(),
                }
                jobs.append(Job(measure_layers, arguments))
    return jobs


def head_jobs(setting: Setting, lengths: Sequence[int] | None = None) -> list[Job]:
    """Every head alone, on the first sample, at these lengths."""
    q = setting.question
    if q.map not in ("attention", "normed"):
        return []
    chosen = sorted(set(lengths or q.lengths), reverse=True)
    return [
        Job(measure_heads, {"n": n, "start": setting.starts[0], "layers": layers, "map": q.map, **q.options()})
        for n in chosen
        for layers in _groups(setting.layers)
    ]


def measure_layers(
    reader: Reader,
    n: int,
    starts: list[int],
    first: int,
    layers: list[int],
    map: str,
    shares: bool,
    tol: float,
    certify: float | None,
    seed: int,
) -> list[Row]:
    """A row for every layer and sample. Layers in closed form take the samples in lock step."""
    captured, rows = reader.captures(n, starts), []
    options = {"tol": tol, "certify": certify, "seed": seed}
    for layer in layers:
        closed = reader.closed(captured[0], layer) if map == "attention" else None
        began = time.perf_counter()
        if closed is not None:
            x = torch.stack([entering(c, layer) for c in captured])
            found = list(lipschitz_batch(closed, x, **options))
            lengths = x.double().norm(dim=-1)
            radii = list(zip(lengths.square().mean(-1).sqrt().tolist(), lengths.amax(-1).tolist(), strict=True))
            cut = True
        else:
            measured = [_measured(c, layer, map, options) for c in captured]
            found, radii = [m.estimate for m in measured], [(m.radius_rms, m.radius_max) for m in measured]
            cut = all(m.cut for m in measured)
        seconds = (time.perf_counter() - began) / len(captured)
        for k, (estimate, (radius, radius_max)) in enumerate(zip(found, radii, strict=True)):
            row = row_of(reader, "layer", layer, map, n, first + k, estimate) | {
                "start": starts[k],
                "radius": radius,
                "radius_max": radius_max,
                "cut": cut,
                "seconds": seconds,
            }
            if shares and first + k == 0:
                row["shares"] = [round(s, 7) for s in share(estimate)]
            rows.append(row)
    return rows


def measure_heads(
    reader: Reader, n: int, start: int, layers: list[int], map: str, tol: float, certify: float | None, seed: int
) -> list[Row]:
    """A row for every head alone, through its own part of the output projection; none where heads cannot be told apart."""
    captured, rows = reader.captures(n, [start])[0], []
    options = {"tol": tol, "certify": certify, "seed": seed}
    for layer in layers:
        closed = reader.closed(captured, layer) if map == "attention" else None
        for head in range(captured.trace.layers[layer].heads):
            began = time.perf_counter()
            if closed is not None:
                estimate = lipschitz(one_head(closed, head), entering(captured, layer), **options)
            else:
                try:
                    estimate = _measured(captured, layer, map, options, head).estimate
                except BadInputError:  # a layer that is not cut has no heads to speak of
                    break
            seconds = time.perf_counter() - began
            rows.append(row_of(reader, "head", layer, map, n, 0, estimate) | {"head": head, "start": start, "seconds": seconds})
    return rows


def one_head(attn: Attention, head: int) -> Attention:
    """A head alone: its queries, its group's keys and values, its columns of the output projection."""
    group = head // (attn.heads // (attn.kv_heads or attn.heads))
    keys = attn.kv_heads or attn.heads

    def rows(t: torch.Tensor | None, parts: int, index: int) -> torch.Tensor | None:
        return None if t is None else t.unflatten(0, (parts, -1))[index]

    w_q, w_v = rows(attn.w_q, attn.heads, head), rows(attn.w_v, keys, group)
    assert w_q is not None
    assert w_v is not None
    width = w_v.shape[0]
    bias = attn.bias
    return replace(
        attn,
        w_q=w_q,
        w_k=rows(attn.w_k, keys, group),
        w_v=w_v,
        w_o=None if attn.w_o is None else attn.w_o[:, head * width : (head + 1) * width],
        b_q=rows(attn.b_q, attn.heads, head),
        b_k=rows(attn.b_k, keys, group),
        b_v=rows(attn.b_v, keys, group),
        b_o=None,
        heads=1,
        kv_heads=1,
        scale=attn.w_q.shape[0] ** -0.5 * attn.heads**0.5 if attn.scale is None else attn.scale,
        bias=bias if bias is None or bias.shape[1] == 1 else bias[:, head : head + 1],
    )


def row_of(reader: Reader, kind: str, layer: int, map: str, n: int, sample: int, estimate: Estimate) -> Row:
    """What every row says."""
    return {
        "kind": kind,
        "model": reader.model.name,
        "layer": layer,
        "map": map,
        "n": n,
        "sample": sample,
        "value": estimate.value,
        "lower": estimate.lower,
        "upper": estimate.upper,
        "confidence": estimate.confidence,
        "status": estimate.status,
        "steps": estimate.steps,
        "seed": estimate.seed,
    }


def share(estimate: Estimate) -> list[float]:
    """How much of the direction falls on each token."""
    energy = estimate.direction.double().square().sum(-1)
    total = float(energy.sum())
    return (energy / total if total > 0 else energy).tolist()


def _measured(captured: Capture, layer: int, map: str, options: dict[str, Any], head: int | None = None) -> Measurement:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        return captured.measure(layer, map_name(map), head=head, **options)


def map_name(name: str) -> MapName:
    """A map's name as the type checker knows it."""
    return MAPS[MAPS.index(name)]  # pyright: ignore[reportArgumentType]


def _groups(layers: Sequence[int]) -> list[list[int]]:
    return [list(layers[i : i + _LAYERS]) for i in range(0, len(layers), _LAYERS)]
