"""Layers of every kind with rotary phases, at tokens far out that the phases turn onto each other; features that underflow."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from howsmooth.errors import HowSmoothError
from howsmooth.kernels import kinds
from howsmooth.maps import Attention, RMSNorm, Rotary

from .kind_cases import F64, INPUTS, KINDS, KindCase, KindTally, Random, fuzz, largest_singular_values

LOGARITHMS_EVERY = 10  # inputs of a layer

UNDERFLOWING = "linear, features near zero"
HOSTILE = [f"{name}, turned" for name in (*KINDS, "tied L2") if name != "hard"] + [UNDERFLOWING]


def draw_hostile(name: str, seed: int) -> KindCase:
    """The case of that number."""
    r = np.random.default_rng([100 + HOSTILE.index(name), seed])
    return _underflowing(r, name, seed) if name == UNDERFLOWING else _turned(r, name, seed)


def fuzz_hostile(name: str, seeds: range, inputs: float = math.inf) -> KindTally:
    """`fuzz` on these; where features underflow, the closed form is compared with logarithms too."""
    tally = fuzz(name, seeds, inputs, draw_hostile)
    if name == UNDERFLOWING and not tally.wrong:
        for seed in range(seeds.start, seeds.start + tally.layers + tally.refused):
            case = draw_hostile(name, seed)
            try:
                closed = largest_singular_values(case.layer, case.x)[::LOGARITHMS_EVERY]
            except HowSmoothError:
                continue
            own = torch.stack([_by_logarithms(case.layer, x) for x in case.x[::LOGARITHMS_EVERY]])
            if not bool(((closed - own).abs() <= 1e-6 * own + case.noise).all()):
                tally.wrong.append(f"closed form and logarithms disagree: {case.name}")
    return tally


def _tensor(a: np.ndarray) -> Tensor:
    return torch.as_tensor(a, dtype=F64)


def _turned(r: Random, name: str, seed: int) -> KindCase:
    kind_name = name.removesuffix(", turned")
    heads = int(r.choice([1, 1, 2]))
    tied = kind_name == "tied L2"
    kind = kinds.L2(tied=True) if tied else kinds.L2() if kind_name == "L2" else KINDS[kind_name](r, heads)
    n, d, part = int(r.choice([2, 3, 4, 6])), int(r.choice([1, 2, 3])), int(r.choice([2, 2, 3, 4]))
    head, size = part * kind.parts, float(r.choice([0.1, 1.0, 1.0, 3.0]))
    square = d == part and r.random() < 0.5
    w_q = size * (np.tile(np.eye(d), (heads * kind.parts, 1)) if square else r.standard_normal((heads * head, d)))
    w_k = None if tied else w_q * r.choice([1.0, -1.0]) if r.random() < 0.6 else size * r.standard_normal((heads * head, d))
    w_v = w_q.copy() if r.random() < 0.5 else r.standard_normal((heads * part, d))
    options: dict = {"rotary": _phases(r, part, n)}
    for bias in ("b_q", "b_k") if not tied else ("b_q",):
        if r.random() < 0.4:
            options[bias] = _tensor(r.standard_normal(heads * head) * r.choice([0.5, 5.0, 50.0]))
    for norm in ("q_norm", "k_norm") if not tied else ():
        if r.random() < 0.2:
            options[norm] = RMSNorm(_tensor(r.standard_normal(part)), eps=float(r.choice([1e-3, 0.3, 10.0])))
    if r.random() < 0.3 and not isinstance(kind, kinds.Sinkhorn):
        options["causal"] = True
    if r.random() < 0.2 and not isinstance(kind, kinds.L2 | kinds.Linear):
        options["softcap"] = float(r.choice([0.5, 3.0]))
    if r.random() < 0.2:
        options["b_v"] = _tensor(r.standard_normal(len(w_v)) * 5)
    if not isinstance(kind, kinds.Linear) and r.random() < 0.7:
        options["scale"] = float(r.choice([1.0, 0.3]))
    keys = None if w_k is None else _tensor(w_k)
    layer = Attention(_tensor(w_q), keys, _tensor(w_v), heads=heads, kind=kind, **options)
    x = _aligned(r, layer, n, d)
    radius = float(x.norm(dim=-1).max()) * (1 + 1e-14)
    return KindCase(layer, x, radius, f"{name}, seed {seed}: {layer!r}, n={n}, R={radius:.3g}, {sorted(options)}")


def _phases(r: Random, part: int, n: int) -> Rotary:
    """Angles of any size; some tables stretch or shrink a plane."""
    planes = int(r.integers(1, part // 2 + 1))
    angle = r.standard_normal((n, planes)) * float(r.choice([0.1, 1.0, 100.0]))
    size = 10 ** r.uniform(-2, 0.5, (1, planes)) if r.random() < 0.2 else np.ones((1, planes))
    return Rotary(_tensor(size * np.cos(angle)), _tensor(size * np.sin(angle)), bool(r.random() < 0.5))


def _aligned(r: Random, layer: Attention, n: int, d: int) -> Tensor:
    """Tokens whose turned queries lie near one place, or near two; some in general position."""
    w, rotary, part = layer.by_head(), layer.rotary, layer.part_width
    assert rotary is not None
    inverse, bias = torch.linalg.pinv(w.q[0, :part]), w.b_q[0, :part]
    exact = (rotary.cos.square() + rotary.sin.square()).sqrt()
    back = Rotary(rotary.cos / exact, rotary.sin / exact, rotary.interleaved)
    x, far = _tensor(r.standard_normal((INPUTS, n, d))), float(r.choice([0.3, 3.0, 30.0, 100.0]))
    for k in range(INPUTS):
        near = float(r.choice([0.0, 0.1, 0.7, 2.0]))
        if k % 5 == 0:
            x[k] *= far / 3
            continue
        place = r.standard_normal(part)
        place *= far / np.linalg.norm(place)
        side = r.standard_normal(part)
        z = place + near * (r.standard_normal((n, part)) if k % 2 else np.outer(r.choice([-1.0, 0.0, 1.0], n), side))
        x[k] = (back.turn(_tensor(z), back=True) - bias) @ inverse.mT
    return x


def _underflowing(r: Random, name: str, seed: int) -> KindCase:
    n, d, head = int(r.choice([1, 2, 3, 5])), int(r.choice([1, 2, 3])), int(r.choice([1, 2, 3]))
    kv_heads, group = int(r.choice([1, 2])), int(r.choice([1, 2]))
    heads = kv_heads * group
    steep = float(r.choice([1.0, 10.0, 30.0, 300.0, 900.0]))

    def weight(rows: int) -> Tensor:
        return _tensor(-np.abs(r.standard_normal((rows, d))) * steep * r.choice([0.1, 1.0, 1.0], (rows, 1)))

    w_q, w_k, w_v = weight(heads * head), weight(kv_heads * head), _tensor(r.standard_normal((kv_heads * head, d)))
    options: dict = {"causal": bool(r.random() < 0.3)}
    for bias, rows in (("b_q", heads * head), ("b_k", kv_heads * head)):
        if r.random() < 0.3:
            options[bias] = _tensor(r.standard_normal(rows) * steep)
    kind = kinds.Linear(normalized=bool(r.random() < 0.8))
    layer = Attention(w_q, w_k, w_v, heads=heads, kv_heads=kv_heads, kind=kind, **options)
    x = np.abs(r.standard_normal((INPUTS, n, d))) + r.choice([0.0, 1.0])
    x[::7] *= r.choice([1.0, -1.0], (len(x[::7]), n, 1))
    x[::5] = x[::5, :1]
    radius = float(np.linalg.norm(x, axis=-1).max()) * (1 + 1e-14)
    return KindCase(layer, _tensor(x), radius, f"{name}, seed {seed}: {layer!r}, n={n}, steep={steep:g}, {sorted(options)}")


def _by_logarithms(layer: Attention, x: Tensor) -> Tensor:
    """`‖D_x f‖₂`, with logarithms of the weights, which do not underflow, differentiated automatically."""
    assert isinstance(layer.kind, kinds.Linear)
    divided = layer.kind.normalized

    def value(x: Tensor) -> Tensor:
        q, k, v = layer.vectors(x[None])
        k, v = (t.repeat_interleave(layer.heads // layer.kv_heads, 1) for t in (k, v))
        q, k = (torch.where(t > 0, t.clamp_min(0.0).log1p(), t) for t in (q, k))
        s = (q[..., :, None, :] + k[..., None, :, :]).logsumexp(-1)
        if layer.causal:
            s = s.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        return replace(layer, b_o=None).finish((s.softmax(-1) if divided else s.exp()) @ v)[0]

    J = torch.func.jacrev(value)(x)
    return torch.linalg.matrix_norm(J.reshape(-1, x.numel()), ord=2)
