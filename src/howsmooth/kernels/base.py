"""What a kernel gives: attention of any kind linearised at `q, k, v`; the plain reference for it; and logits cut into tiles.

The reference is attention as one would write it, for autograd and for checking the kernels. On tiles nothing of size n × m is
ever kept.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.kinds import Kind, Softmax
from howsmooth.kernels.kinds.kind import Vectors
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.tensors import numbers, tanh, tanh_slope

if TYPE_CHECKING:
    from howsmooth.kernels.tiled import Tiled

Precision = Literal["half", "mixed", "strict"]  # of the fused kernels' products: docs/reference/performance.md

_TIED = 16  # units in the last place within which two logits are one
FINER: dict[Precision, Precision] = {"half": "mixed", "mixed": "strict"}

# tensors by head; directions have an axis more, one row per probe. A kind may cut queries and keys of a head in parts
Queries = Float[Tensor, "*probes batch heads n d"]
Keys = Float[Tensor, "*probes batch kv_heads m d"]
Values = Float[Tensor, "*probes batch v_heads m d_v"]
Outputs = Float[Tensor, "*probes batch o_heads n d_v"]
Offsets = Float[Tensor, "*probes batch kv_heads m"]  # a number of every key, added to its logits


@dataclass(frozen=True)
class Scores:
    """How logits come from queries and keys, `s = scale · q·k`, soft-capped, then masked; and the kind of their weights."""

    scale: float
    softcap: float | None = None
    mask: Mask = field(default_factory=Mask)
    kind: Kind = field(default_factory=Softmax)

    def __post_init__(self):
        if self.softcap is not None and not self.softcap > 0:
            raise BadInputError(f"expected a positive soft-cap, got {self.softcap}; leave it out for none")
        self.kind.check(self.softcap, self.mask)

    @property
    def softmax(self) -> bool:
        """Whether weights are softmax's own, with no sink beside the keys: what most of theory speaks of."""
        return self.kind.traits.plain

    def select(self, items: Tensor) -> "Scores":
        """The scores of some items of the batch."""
        return replace(self, mask=self.mask.select(items))

    def check(self, q: Queries, k: Keys, v: Values) -> tuple[int, int, int, int]:
        """Refuse tensors that do not fit together; gives batch, heads, n and m."""
        parts = self.kind.parts
        (batch, heads, n, _), (kv_heads, m) = q.shape, k.shape[1:3]
        if heads % (parts * v.shape[1]) or kv_heads != parts * v.shape[1]:
            raise BadInputError(
                f"expected key/value heads that divide the {heads} query heads, got {kv_heads}; change kv_heads"
            )
        heads //= parts
        self.kind.check_layer(heads, self.scale)
        self.kind.check_tokens(n, m)
        self.mask.check(batch, heads, n, m)
        return batch, heads, n, m


class AttentionKernel(ABC):
    """Attention linearised at `q, k, v`: its output and products with its Jacobian.

    inputs: `q, k, v` as they came, keys and values not repeated.  largest_logit: a bound on every logit before masks.
    """

    largest_logit: float = 0.0

    def __init__(self, q: Queries, k: Keys, v: Values, scores: Scores, dtype: torch.dtype, trusted: bool = False):
        """dtype: of the products.  trusted: nothing is checked, so that nothing waits for the device."""
        self.inputs = (q, k, v)
        self.scores = scores
        if trusted:
            return
        scores.check(q, k, v)
        self.scores = replace(scores, mask=scores.mask.to(q.device, dtype), kind=scores.kind.to(q.device, dtype))

    def check_range(self, q: Queries, k: Keys, offset: Tensor | None, dtype: torch.dtype) -> None:
        """Write down `largest_logit`; refuse logits that leave the range of a precision. offset: of every key."""
        sizes = [torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64).max() for t in (q, k)]
        sizes += [] if offset is None else [offset.abs().max().double()]
        longest_q, longest_k, *shift = numbers(torch.stack(sizes))  # the device is waited for once
        self.largest_logit = abs(self.scores.scale) * longest_q * longest_k + sum(shift)
        if not self.largest_logit < 0.25 * torch.finfo(dtype).max:
            raise BadInputError(
                f"expected logits within the range of {dtype}, got up to {self.largest_logit:.1e}; "
                "use float64 or smaller weights"
            )

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.inputs[0].shape[1] // self.inputs[1].shape[1]

    def expand(self, t: Tensor) -> Tensor:
        """Key/value heads repeated for the query heads that share them."""
        return t if self.group == 1 else t.repeat_interleave(self.group, dim=-3)

    def sum_groups(self, t: Tensor) -> Tensor:
        """Sums over the query heads that share a key head."""
        return t if self.group == 1 else t.unflatten(-3, (-1, self.group)).sum(-3)

    @property
    @abstractmethod
    def output(self) -> Outputs:
        """`o = P v`."""

    @abstractmethod
    def jvp(self, dq: Queries, dk: Keys, dv: Values, doffset: Offsets | None = None) -> Outputs:
        """Derivative of the output along `dq, dk, dv`, and along the offset of the keys where the kernel has one."""

    @abstractmethod
    def vjp(self, g: Outputs) -> tuple[Queries, Keys, Values]:
        """Transposed product: gradients of `⟨g, o⟩` in `q, k, v`."""

    def vjp_and_offset(self, g: Outputs) -> tuple[Queries, Keys, Values, Offsets | None]:
        """Gradients of `⟨g, o⟩` in `q, k, v`, and in the offset of the keys where the kernel has one."""
        return *self.vjp(g), None

    @abstractmethod
    def attention_received(self) -> Float[Tensor, "batch m"]:
        """Column sums of `P`, averaged over heads: how much each key is attended to."""

    def logit_range(self, below: Float[Tensor, "batch heads n"] | None = None) -> tuple[float, float]:
        """The least and the greatest logit that some query attends to, soft-cap and bias included; two zeros where none does.

        below: what is taken off the logits of each query.
        """
        return self.tiled().logit_range(below)

    @abstractmethod
    def select(self, items: Tensor) -> "AttentionKernel":
        """Attention on some items of the batch."""

    @abstractmethod
    def tiled(self) -> "Tiled":
        """Attention with its weights within reach, tile by tile; kinds whose weights are not on tiles are refused."""

    @property
    def noise(self) -> float:
        """Relative error of a product: rounding, and what it makes of logits, where one unit in s moves `P` by s units."""
        return torch.finfo(self.output.dtype).eps * (32 + self.largest_logit + self.lifted)

    @property
    def lifted(self) -> float:
        """How far a bias lifts or lowers the largest logit of a row: its digits are lost before it is taken off again."""
        return 0.0

    @property
    def coarse(self) -> bool:
        """Whether operands of every product keep eleven bits only, so that those around attention may."""
        return False

    @property
    def finer(self) -> Precision | None:
        """The next precision above this kernel's, where there is one short of float64."""
        return None

    def refined(self) -> "AttentionKernel | None":
        """Attention with more exact products at a higher price, where there is one short of float64."""
        return None

    @property
    def heavy(self) -> bool:
        """Whether products in float64 would cost far more than all the others together."""
        return False


def plain_attention(q: Queries, k: Keys, v: Values, scores: Scores, rows: int = 1024) -> Outputs:
    """`P v` for weights of any kind, `rows` queries at a time where a row stands for itself.

    Queries without a visible key give zero. There are only out-of-place operations, so every derivative and transform of torch
    works through it.
    """
    _, _, n, m = scores.check(q, k, v)
    kind, mask = scores.kind, scores.mask.to(q.device, q.dtype)
    entry, inner = (kind.enter(q, k, v, scores.scale), kind.inner(scores)) if kind.maps else (None, scores)
    q, k, v, offset = by_head(Vectors(q, k, v) if entry is None else entry.vectors)
    bias = None if inner.mask.bias is None else inner.mask.bias.to(q.device, q.dtype)
    slack = logit_slack(q, k, inner.scale, bias)
    shift = kind.shift(mask, m)
    if kind.traits.balancing is not None:
        rows = n
    outputs = []
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        visible = mask.visible(slice(start, stop), slice(0, m), q.device)
        if mask.keys is not None:
            visible = visible & mask.keys[:, None, None, :]
        part = bias if bias is None or bias.shape[2] == 1 else bias[:, :, start:stop]
        s, visible = masked_logits(logits_of(q[:, :, start:stop], k, offset, inner.scale, inner.softcap), part, visible)
        if shift is not None:
            s = s + (shift.to(s)[:, None, None, None] if isinstance(shift, Tensor) else shift)
        outputs.append(kind.weigh(s, visible, slack[:, :, start:stop]) @ v)
    out = torch.cat(outputs, dim=2)
    leave = kind.leave(out) if kind.maps else None
    return out if leave is None else leave.output


def by_head(at: Vectors) -> Vectors:
    """Keys and values once for every head of the queries."""
    group = at.q.shape[1] // at.k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (at.k, at.v))
    return Vectors(at.q, k, v, None if at.offset is None else at.offset.repeat_interleave(group, dim=1))


def logits_of(q: Tensor, k: Tensor, offset: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Soft-capped, before any mask; from tensors and numbers alone, which a compiler can follow."""
    s = scale * (q @ k.mT)
    s = s if offset is None else s + offset[:, :, None]
    return s if softcap is None else softcap * tanh(s / softcap)


def masked_logits(s: Tensor, bias: Tensor | None, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Logits with a bias, which hides keys where it is −∞, finite there too; and which keys are visible."""
    if bias is None:
        return s, visible
    hidden = bias == -torch.inf
    return s + bias.masked_fill(hidden, 0.0), visible & ~hidden


def logit_slack(q: Queries, k: Keys, scale: float, bias: Tensor | None) -> Float[Tensor, "batch heads n 1"]:
    """How far rounding may move a logit of each query, an upper bound."""
    lengths = (torch.linalg.vector_norm(t.detach(), dim=-1, keepdim=True) for t in (q, k))
    q_, k_ = lengths
    logit = abs(scale) * q_ * k_.amax()
    if bias is not None:
        logit = logit + bias.masked_fill(bias == -torch.inf, 0.0).abs().amax()
    return _TIED * torch.finfo(q.dtype).eps * logit


@dataclass(frozen=True)
class Tile:
    """A block of logits. `partial`: the causal or window band cuts through it."""

    rows: slice
    cols: slice
    partial: bool

    @property
    def area(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.cols.stop - self.cols.start)


@dataclass(frozen=True)
class TileSize:
    """Largest tile, the size at which a cut tile is masked rather than divided, and the elements worked on at once."""

    rows: int = 512
    cols: int = 1024
    leaf: int = 128
    elements: int = 2**20

    @classmethod
    def on(cls, device: torch.device) -> "TileSize":
        """Sizes that keep a tile in a CPU's cache, or fill a GPU."""
        return cls() if device.type == "cpu" else cls(rows=4096, cols=8192, leaf=512, elements=2**26)


def cut(n: int, m: int, mask: Mask, size: TileSize) -> tuple[Tile, ...]:
    """Tiles that cover every visible logit once.

    A tile wholly outside the band is dropped, one wholly inside is kept at the largest size, one on the edge is halved
    along its longer side until it reaches `leaf`.

    >>> [(t.rows.start, t.cols.start, t.partial) for t in cut(4, 4, Mask(causal=True), TileSize(4, 4, leaf=2))]
    [(0, 0, True), (2, 0, False), (2, 2, True)]
    """
    tiles: list[Tile] = []

    def divide(rows: slice, cols: slice) -> None:
        inside = mask.band(rows, cols)
        height, width = rows.stop - rows.start, cols.stop - cols.start
        if inside is False:
            return
        if height <= size.rows and width <= size.cols and (inside or max(height, width) <= size.leaf):
            tiles.append(Tile(rows, cols, partial=inside is None))
        elif height >= width or (width <= size.cols and height > size.rows):
            middle = rows.start + _half(height)
            divide(slice(rows.start, middle), cols)
            divide(slice(middle, rows.stop), cols)
        else:
            middle = cols.start + _half(width)
            divide(rows, slice(cols.start, middle))
            divide(rows, slice(middle, cols.stop))

    divide(slice(0, n), slice(0, m))
    return tuple(tiles)


def _half(length: int) -> int:
    """The largest power of two below `length`, so that tiles of long and odd lengths line up."""
    return 1 << ((length - 1).bit_length() - 1)


class OnTiles(AttentionKernel):
    """A kernel that works through its logits tile by tile.

    shape: (batch, heads, n, m).  q, k, v: (g, tokens, width), heads flattened, `g = batch·heads`, keys and values repeated for
    the query heads that share them.  offset: (g, m), added to the logits of every key before the soft-cap.
    """

    def __init__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        scores: Scores,
        size: TileSize | None = None,
        *,
        offset: Offsets | None = None,
        trusted: bool = False,
    ):
        super().__init__(q, k, v, scores, q.dtype, trusted)
        if not trusted:
            self.check_range(q, k, offset, q.dtype)
        batch, heads, n, _ = q.shape
        m = k.shape[2]
        self._size, self._given = size or TileSize.on(q.device), offset
        self.shape = (batch, heads, n, m)
        self.q, self.k, self.v = (t.flatten(0, 1) for t in (q, self.expand(k), self.expand(v)))
        self.offset = None if offset is None else self.expand(offset[..., None]).flatten(0, 1)[..., 0]
        shift = self.scores.kind.shift(self.scores.mask, m)
        self._shift = shift.to(self.q).repeat_interleave(heads)[:, None, None] if isinstance(shift, Tensor) else shift
        count = batch * heads
        # runs of heads whose tiles together stay near the element budget
        steps = [(tile, max(2, self._size.elements // tile.area)) for tile in cut(n, m, scores.mask, self._size)]
        self._parts = [(slice(i, min(i + step, count)), tile) for tile, step in steps for i in range(0, count, step)]

    def select(self, items: Tensor) -> "OnTiles":
        q, k, v = (t[items] for t in self.inputs)
        offset = None if self._given is None else self._given[items]
        return type(self)(q, k, v, self.scores.select(items), self._size, offset=offset)

    def logit_range(self, below=None):
        low, high = torch.inf, -torch.inf
        for heads, tile in self._parts:
            s, _ = self._logits(heads, tile)
            if below is not None:
                s -= below.flatten(0, 1)[heads, tile.rows, None]
            high = max(high, float(s.max()))
            low = min(low, float(s.masked_fill(s == -torch.inf, torch.inf).min()))
        return (low, high) if low <= high else (0.0, 0.0)

    def along(
        self, dq: Queries, dk: Keys, doffset: Offsets | None = None
    ) -> tuple[Float[Tensor, "g probes n e"], Float[Tensor, "g probes m e"]]:
        """Two thin matrices whose product `left rightᵀ` is `τ(dq kᵀ + q dkᵀ)`, and the derivative of the offset beside it."""
        q, k = (t[:, None].expand(-1, len(dq), -1, -1) for t in (self.q, self.k))
        left = torch.cat([flat(dq), q], -1).mul_(self.scores.scale)
        right = torch.cat([k, flat(self.expand(dk))], -1)
        if doffset is None:
            return left, right
        moved = flat(self.expand(doffset[..., None]))  # (g, probes, m, 1)
        return torch.cat([left, torch.ones_like(left[..., :1])], -1), torch.cat([right, moved], -1)

    def slack(self) -> Float[Tensor, "g n 1"]:
        """How far rounding may move a logit of each query."""
        return logit_slack(*self.inputs[:2], self.scores.scale, self.scores.mask.bias).flatten(0, 1)

    def _logits(self, heads: slice, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Masked logits of a tile, and the soft-cap's slope."""
        q, k = self.q[heads, tile.rows], self.k[heads, tile.cols].mT
        if self.offset is None:
            s = torch.bmm(q, k)
            s *= self.scores.scale
        else:
            s = torch.baddbmm(self.offset[heads, None, tile.cols], q, k, alpha=self.scores.scale)
        slope = None
        if self.scores.softcap is not None:
            s.div_(self.scores.softcap)
            slope = tanh_slope(s)
            s.tanh_().mul_(self.scores.softcap)
        mask = self.scores.mask
        if tile.partial:
            s.masked_fill_(~mask.visible(tile.rows, tile.cols, s.device), -torch.inf)
        if mask.keys is not None:
            item = torch.arange(heads.start, heads.stop, device=s.device) // self.shape[1]
            s.masked_fill_(~mask.keys[:, tile.cols][item][:, None], -torch.inf)
        if mask.bias is not None:
            index = torch.arange(heads.start, heads.stop, device=s.device)
            item = index // self.shape[1] if mask.bias.shape[0] > 1 else index * 0
            head = index % self.shape[1] if mask.bias.shape[1] > 1 else index * 0
            rows = tile.rows if mask.bias.shape[2] > 1 else slice(None)
            s += mask.bias[:, :, rows, tile.cols][item, head]
        if self._shift is not None:
            s += self._shift[heads] if isinstance(self._shift, Tensor) else self._shift
        return s, slope

    def unflat(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1).unflatten(1, self.shape[:2])


def flat(t: Tensor) -> Tensor:
    """(probes, batch, heads, n, d) → (batch·heads, probes, n, d)."""
    return t.flatten(1, 2).transpose(0, 1)


def wide(t: Tensor) -> Tensor:
    """(g, probes, n, d) → (g, n, probes·d)."""
    return t.transpose(1, 2).flatten(2)
