"""Which token moves which: the Frobenius norm `‖J_ij‖` of the derivative of output token i by input token j, for one layer.

Exact for attention in closed form. With `P` the weights, `Q = τP` times the soft-cap's slope, `o_i = Σ_j P_ij v_j`, and `k̃_ij`
the query `q_i` carried back through the norm and the phases of key j, off the diagonal

    J_ij = Σ_h W_o^h (P_ij W_v^h + Q_ij (v_j − o_i) k̃_ijᵀ W_k^h)

is a sum of fixed matrices and matrices of rank one, so `‖J_ij‖²` is a sum over pairs of heads of products of small matrices. On
the diagonal `B_i = Σ_j Q_ij (v_j − o_i) k_jᵀ`, carried back to the query's weights, is added, and the block is formed.

Of any other map by random signs: `E|J_ij z|² = ‖J_ij‖²`, one product for each input token and probe.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.tiled import Tiled
from howsmooth.maps import Attention, AttentionJacobian, NormJacobian
from howsmooth.models import FallbackWarning
from howsmooth.solve import linear
from howsmooth.spectral import Operator
from howsmooth.study.answers import ReportData
from howsmooth.study.charts import Drawing, Picture, Section, coded
from howsmooth.study.jobs import Cells, Job, Row, grouped
from howsmooth.study.layers import LayerRow
from howsmooth.study.question import Extras, Question, Steps, mean
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Part, Setting, parts, task_of_part

_LONGEST = 512  # tokens that a picture can show
_PROBED = 64  # the same where a product is needed for each token and probe
_PROBES = 8
_SHORT = (256, 128, 64, 32, 16)  # tokens of a picture where none of the lengths that are asked for is affordable
_WORK = {"cpu": 2e11, "cuda": 1e13}  # multiplications for a picture in closed form: a dozen seconds at most
_PROBE_WORK = 1e12  # the same for one by probes
_BLOCKS = 2**22  # entries of diagonal blocks formed at once


@final
@dataclass(frozen=True, kw_only=True)
class InfluenceRow(Row):
    """A picture of one layer at one input.

    value: the Frobenius norm of all of `J`.  norms: `‖J_ij‖`, a list for each output token.  accuracy: their typical relative
    error, 0 where they are exact.
    """

    kind = "influence"
    sample: int = 0
    value: float | None = None
    accuracy: float
    norms: Sequence[Sequence[float]]
    seconds: float | None = None

    def lines(self) -> list[Cells]:
        """One line for each output token, one column for each input token."""
        return [{"to": i} | {f"from_{j}": v for j, v in enumerate(line)} for i, line in enumerate(self.norms)]


def influence_job(part: Part, lengths: Sequence[int]) -> Job:
    """A picture of the layer and window of a part, at the longest of `lengths` that is affordable, or at a shorter one."""
    return part.job(measure_influence, lengths=sorted(lengths))


@task_of_part
def measure_influence(reader: Reader, part: Part, lengths: list[int]) -> Iterator[InfluenceRow]:
    """One row for the layer and window of a part, at the longest of `lengths` that is affordable, or at a shorter one."""
    began = time.perf_counter()
    (layer,) = part.layers
    wanted = sorted({n for n in lengths if n <= _LONGEST}, reverse=True) or [_LONGEST]
    for n in (*wanted, *(n for n in _SHORT if n < min(wanted))):
        captured = replace(part, n=n).capture(reader)
        attn = captured.closed(layer) if part.map == "attention" else None
        if attn is not None and _is_plain(attn) and _work(attn, n) <= _WORK.get(attn.device.type, _WORK["cpu"]):
            jacobian = linear(attn, captured.tokens(layer))
            assert isinstance(jacobian, AttentionJacobian)
            norms, accuracy = exact(jacobian), 0.0
        elif n <= _PROBED and _probe_work(captured.tokens(layer, part.map).shape[1], n) <= _PROBE_WORK:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                f = captured.map(layer, part.map)
            norms, accuracy = probed(linear(f, f.start)), (2 * _PROBES) ** -0.5
        else:
            continue
        about = {"model": captured.model, "layer": layer, "map": part.map, "n": n, "sample": part.first}
        rounded = [[float(f"{v:.5g}") for v in row] for row in norms.tolist()]
        found = InfluenceRow(**about, value=float(norms.norm()), accuracy=accuracy, norms=rounded)
        yield replace(found, seconds=time.perf_counter() - began)
        return


def _is_plain(attn: Attention) -> bool:
    """Whether weights are softmax's, and norms of queries and keys, where there are any, of one head each."""
    return attn.kind.traits.plain and all(norm is None or norm.width == attn.head_width for norm in (attn.q_norm, attn.k_norm))


def _work(attn: Attention, n: int) -> float:
    """Multiplications, in round numbers: of the diagonal, and where keys are turned or normalised of all pairs of heads."""
    rows = attn.w_q.shape[0]
    frames = 1 if attn.rotary is None and attn.k_norm is None else n
    return n * attn.width * attn.out_width * rows + 2.0 * n * frames * rows**2


def _probe_work(width: int, n: int) -> float:
    """Multiplications of all probes, in round numbers: a block has about 12 d² weights, a product costs a few of its runs."""
    return 48.0 * _PROBES * (n * width) ** 2


@torch.no_grad()
def probed(operator: Operator, seed: int = 0, probes: int = _PROBES) -> Float[Tensor, "n n_in"]:
    """`‖J_ij‖` by random signs. A square has the relative variance `2/probes` at most, where the block has rank one."""
    n, d = operator.in_shape
    random = torch.Generator().manual_seed(seed)
    columns = []
    for j in range(n):
        v = torch.zeros(probes, 1, n, d)
        v[:, 0, j] = torch.randint(0, 2, (probes, d), generator=random) * 2.0 - 1.0
        images = operator.jvp(v.to(operator.device, operator.dtype))[:, 0]
        columns.append(images.double().square().sum(-1).mean(0).sqrt())
    return torch.stack(columns, 1).cpu()


@torch.no_grad()
def exact(operator: AttentionJacobian) -> Float[Tensor, "n n"]:
    """`‖J_ij‖` of attention at one input, in float64 but for the diagonal."""
    layer = operator.layer
    if operator.batch != 1 or not _is_plain(layer):
        raise BadInputError(
            "expected softmax attention at one input with norms of single heads, got another; take random probes"
        )
    w, kernel = layer.by_head(), operator.kernel.tiled()
    P, Q = _weights(kernel, layer.scale)
    centre = kernel.v.double().mean(1, keepdim=True)  # only differences of values enter
    v, o, q = kernel.v.double() - centre, kernel.o.double() - centre, kernel.q.double()
    N = torch.einsum("gov,how->ghvw", w.o, w.o)  # W_oᵀW_o, by pairs of heads
    K = torch.einsum("gkd,hld->ghkl", w.k, w.k)
    G = (N * torch.einsum("gvd,hwd->ghvw", w.v, w.v)).sum((2, 3))  # ⟨W_o^g W_v^g, W_o^h W_v^h⟩
    F = N.transpose(0, 1) @ torch.einsum("hwd,gkd->hgwk", w.v, w.k)  # W_o^gᵀ W_o^h W_v^h W_k^gᵀ
    squares = (P * torch.tensordot(G, P, 1)).sum(0)
    at_o = o[:, None] @ N  # (h, g, n, d_v)
    ends = (at_o * o).sum(-1, keepdim=True)
    own = torch.empty_like(q)  # k̃_ii
    for cols, back in _frames(operator, q):
        own[:, cols] = back[:, cols]
        for h in range(len(q)):
            y = back @ F[h].mT  # (g, n, d_v)
            slope = y @ v[:, cols].mT - (y * o).sum(-1, keepdim=True)  # (g, n, cols)
            inputs = ((back[h] @ K[h]) * back).sum(-1)  # k̃ᵀ W_k W_kᵀ k̃
            at_v = v[h, cols] @ N[h]
            outputs = ends[h] + (at_v * v[:, cols]).sum(-1)[:, None]
            outputs = outputs - at_o[h] @ v[:, cols].mT - (at_v @ o.mT).mT  # |W_o (v_j − o_i)|², by pairs of heads
            cross = (Q[:, :, cols] * slope).sum(0)
            pairs = (Q[:, :, cols] * outputs * inputs[..., None]).sum(0)
            squares[:, cols] += 2 * P[h][:, cols] * cross + Q[h][:, cols] * pairs
    squares.diagonal().copy_(_diagonal(operator, P, Q, own))
    if layer.attention_mask is not None:  # tokens that are not real give zero
        squares *= layer.attention_mask[0, :, None]
    return squares.clamp_min(0.0).sqrt().cpu()


def _weights(kernel: Tiled, scale: float) -> tuple[Float[Tensor, "heads n n"], Float[Tensor, "heads n n"]]:
    """`P`, and `Q = τP` times the soft-cap's slope."""
    _, heads, n, m = kernel.shape
    P = torch.zeros(heads, n, m, dtype=torch.float64, device=kernel.q.device)
    Q, inverse = torch.zeros_like(P), kernel.inverse.double()
    for b in kernel.blocks():
        P[b.heads, b.rows, b.cols] = b.weights.double() * inverse[b.heads, b.rows]
        Q[b.heads, b.rows, b.cols] = b.slope.double() * inverse[b.heads, b.rows] * scale
    return P, Q


def _frames(operator: AttentionJacobian, q: Float[Tensor, "heads n d_h"]) -> Iterator[tuple[slice, Tensor]]:
    """Keys that act on queries alike, and all queries carried back through them: all keys, or each by itself."""
    layer, slope, n = operator.layer, operator.k_slope, q.shape[1]
    if layer.rotary is None and slope is None:
        yield slice(0, n), q
        return
    rotary = None if layer.rotary is None else layer.rotary.to(q.device, torch.float64)
    for j in range(n):
        here, back = slice(j, j + 1), q[None]
        if rotary is not None:
            back = replace(rotary, cos=rotary.cos[..., here, :], sin=rotary.sin[..., here, :]).turn(back, back=True)
        if slope is not None:
            back = _through(slope, back, here, layer.heads)
        yield here, back[0]


def _through(slope: NormJacobian, u: Tensor, tokens: slice, heads: int) -> Tensor:
    """The transpose of a norm's derivative at some tokens, for queries of all heads; slope: of (1, its heads, n, d_h)."""
    group = heads // slope.unit.shape[1]
    unit, scale = (t[:, :, tokens].double().repeat_interleave(group, 1) for t in (slope.unit, slope.scale))
    norm = slope.norm.to(torch.float64)
    u = norm.weight * u
    return (norm.center(u) - unit * (unit * u).mean(-1, keepdim=True)) / scale


def _diagonal(operator: AttentionJacobian, P: Tensor, Q: Tensor, own: Tensor) -> Float[Tensor, " n"]:
    """`‖J_ii‖²`: the blocks themselves, some at a time, in the precision of the operator. own: `k̃_ii`, (heads, n, d_h)."""
    layer, kernel, kind = operator.layer, operator.kernel.tiled(), operator.dtype
    centre = kernel.v.double().mean(1, keepdim=True)
    v, o, k = kernel.v.double() - centre, kernel.o.double() - centre, kernel.k.double()
    heads, n, d_v = v.shape
    B = torch.stack([(Q[h] @ (v[h, :, :, None] * k[h, :, None]).flatten(1)).unflatten(1, (d_v, -1)) for h in range(heads)])
    B -= o[..., None] * (Q @ k)[:, :, None]  # (heads, n, d_v, d_h)
    if layer.rotary is not None:
        B = layer.rotary.to(B.device, B.dtype).turn(B.permute(2, 0, 1, 3), back=True).permute(1, 2, 0, 3)
    if operator.q_slope is not None:
        B = _through(operator.q_slope, B.permute(2, 0, 1, 3), slice(0, n), heads).permute(1, 2, 0, 3)
    step = Q.diagonal(dim1=1, dim2=2)[..., None] * (v - o)  # (heads, n, d_v)
    w, squares = layer.by_head(), []
    w_o = w.o.transpose(0, 1).flatten(1).to(kind)  # (d_out, heads · d_v)
    w_q, w_k, w_v = w.q.to(kind), w.k.to(kind), w.v.to(kind)
    size = max(1, _BLOCKS // (layer.width * (layer.out_width + w_o.shape[1])))
    for rows in (slice(i, i + size) for i in range(0, n, size)):
        parts = B[:, rows].to(kind) @ w_q[:, None]  # (heads, rows, d_v, d)
        parts += step[:, rows, :, None].to(kind) * (own[:, rows].to(kind) @ w_k)[:, :, None]
        parts += P.diagonal(dim1=1, dim2=2)[:, rows, None, None].to(kind) * w_v[:, None]
        blocks = w_o @ parts.transpose(0, 1).flatten(1, 2)
        squares.append(blocks.double().square().sum((1, 2)))
    return torch.cat(squares)


def picture_jobs(setting: Setting, rows: Sequence[LayerRow]) -> list[Job]:
    """A picture of the layer with the largest mean at any length."""
    if setting.scope.map == "model":
        return []
    groups = grouped(rows, lambda row: (row.layer, row.n))
    layer, _ = max(sorted(groups), key=lambda place: mean([row.value for row in groups[place]]))
    return [influence_job(replace(parts(setting, samples=1, layers=1)[0], layers=(layer,)), setting.scope.lengths)]


def on_page(setting: Setting, extras: Extras) -> Steps:
    """A picture, once all layers are measured."""
    measured = yield []
    yield picture_jobs(setting, measured.of(LayerRow))


def sentence(rows: list[InfluenceRow], data: ReportData) -> str:
    """How exact the numbers are."""
    if not rows or not rows[0].accuracy:
        return "Every number is exact to rounding."
    return f"The numbers are estimates from random probes, typically within {100 * rows[0].accuracy:.0f} %."


def figure(rows: list[InfluenceRow], data: ReportData) -> list[Drawing]:
    """The norm of the derivative of every output token by every input token."""
    if not rows:
        return []
    row = rows[0]
    about = row.columns("layer", "n", "accuracy")
    chart = Picture(
        name="influence",
        title="From token to token, layer {layer}, n = {n}",
        unit="‖Jᵢⱼ‖, log scale",
        source="influence",
        rows=[about | coded(row.norms)],
        norms=row.norms,
        across="input token j",
        down="output token i",
    )
    return [Drawing((chart,), file="influence")]


INFLUENCE = Question(
    name="influence",
    row=InfluenceRow,
    on_page=on_page,
    sentence=sentence,
    figure=figure,
    section=Section(
        id="influence",
        name="Influence",
        title="Which token moves which",
        place=90,
        folded=True,
        text="Each point is the size ‖J<sub>ij</sub>‖ of the derivative of output token i (down) by input token j (across), "
        "the root of the sum of its squared entries. A strong column is a token that many others hear. $sentence",
    ),
)
