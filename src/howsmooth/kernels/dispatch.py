"""Which kernel serves a problem; and attention between two maps, one before it and one behind it, around another kernel."""

import functools
from collections.abc import Callable
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.errors import BadInputError, warn
from howsmooth.kernels.balanced import Balanced
from howsmooth.kernels.base import AttentionKernel, Keys, Precision, Queries, Scores, TileSize, Values, cut
from howsmooth.kernels.kinds import Kind
from howsmooth.kernels.kinds.kind import Entry, Vectors
from howsmooth.kernels.summed import Summed
from howsmooth.kernels.tiled import Blocked, Dense

KEPT_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}

Kernel = Literal["auto", "dense", "blocked", "triton"]
Build = Callable[[Vectors, Scores], AttentionKernel]


def linearize(
    q: Queries, k: Keys, v: Values, scores: Scores, kernel: Kernel = "auto", precision: Precision = "half"
) -> AttentionKernel:
    """Attention at `q, k, v`, of the kind that its scores name.

    By default fused kernels on a GPU below float64, for the kinds they know; elsewhere weights are kept while they are small,
    and made again for each product when they are not. A `kernel` chosen by name serves or raises. `precision` is that of
    the fused kernels.

    >>> import torch
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> type(linearize(x, x, x, Scores(1.0))).__name__
    'Dense'
    """
    core = functools.partial(_core, kernel=kernel, precision=precision)
    return Mapped(q, k, v, scores, core) if scores.kind.maps else core(Vectors(q, k, v), scores)


def _core(at: Vectors, scores: Scores, kernel: Kernel, precision: Precision) -> AttentionKernel:
    """Attention at vectors that nothing more is done to."""
    q, k, v, offset = at
    kind, mask = scores.kind, scores.mask
    if kernel == "triton" or (kernel == "auto" and q.is_cuda and q.dtype != torch.float64):
        reason = _unfused(kind) or ("a mask by positions" if mask.ends is not None else unfit(q, v))
        if reason is None:
            from howsmooth.kernels.triton import Fused

            return Fused(q, k, v, scores, precision, offset=offset)
        if kernel == "triton":
            raise BadInputError(f"expected a problem for the fused kernels, got {reason}; use kernel='blocked'")
        if _unfused(kind) is None:
            _warn_once(reason)
    banded = mask.window is not None or mask.ends is not None or (mask.causal and (mask.first or q.shape[2] != k.shape[2]))
    if kind.traits.features is not None and kernel != "dense" and not banded:
        return Summed(q, k, v, scores)
    keep = kernel == "dense" or (kernel == "auto" and _kept_bytes(q, k, scores) <= KEPT_BYTES.get(q.device.type, 0))
    if kind.traits.balancing is not None:
        return Balanced(q, k, v, scores, offset=offset, keep=keep)
    return (Dense if keep else Blocked)(q, k, v, scores, offset=offset)


def _unfused(kind: Kind) -> str | None:
    """Why there is no fused kernel for a kind, or nothing."""
    return None if kind.fused else f"{type(kind).__name__} attention, which has none"


def _kept_bytes(q: Tensor, k: Tensor, scores: Scores) -> int:
    area = sum(tile.area for tile in cut(q.shape[2], k.shape[2], scores.mask, TileSize.on(q.device)))
    one = scores.softcap is None and not scores.kind.sloped  # a tile that is its own slope, or none
    return q.shape[0] * q.shape[1] * area * q.element_size() * (1 if one else 2)


def unfit(q: Tensor, v: Tensor) -> str | None:
    """Why the fused kernels cannot serve a problem, or nothing."""
    missing = _no_triton()
    if missing is not None:
        return missing
    from howsmooth.kernels.triton import WIDEST_HEAD, interpreted

    if not q.is_cuda and not interpreted():
        return f"tensors on {q.device.type}, not on a CUDA device"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"tensors of {q.dtype}, not float32, float16 or bfloat16"
    if max(q.shape[-1], v.shape[-1]) > WIDEST_HEAD:
        return f"heads of width {max(q.shape[-1], v.shape[-1])}, over {WIDEST_HEAD}"
    if q.is_cuda and _capability(q.device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    return None


_capability = functools.cache(torch.cuda.get_device_capability)


@functools.cache
def _no_triton() -> str | None:
    try:
        import triton
    except ImportError:
        return "no installation of triton"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 2):
        return f"triton {triton.__version__}, older than 3.2"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    warn(f"the fused kernels cannot serve {reason}; using torch operations, which are slower, as kernel='blocked' does unasked")


@final
class Mapped(AttentionKernel):
    """`leave ∘ core ∘ enter`, where the kind of attention says what enters and leaves.

    core: attention of a simpler kind at the vectors that entered.
    """

    def __init__(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        scores: Scores,
        build: Callable[[Vectors, Scores], AttentionKernel],
        core: AttentionKernel | None = None,
    ):
        """build: makes the core.  core: where it is there already."""
        super().__init__(q, k, v, scores, q.dtype, trusted=core is not None)
        entry = self.scores.kind.enter(q, k, v, self.scores.scale)
        assert entry is not None
        self._entry: Entry = entry
        self._build = build
        self.core = build(entry.vectors, self.scores.kind.inner(self.scores)) if core is None else core
        self._exit = self.scores.kind.leave(self.core.output)
        self.largest_logit = self.core.largest_logit

    @property
    def output(self):
        return self.core.output if self._exit is None else self._exit.output

    def jvp(self, dq, dk, dv, doffset=None):
        do = self.core.jvp(*self._entry.push(dq, dk, dv))
        return do if self._exit is None else self._exit.push(do)

    def vjp(self, g):
        g = g if self._exit is None else self._exit.pull(g)
        return self._entry.pull(Vectors(*self.core.vjp_and_offset(g)))

    def attention_received(self) -> Float[Tensor, "batch m"]:
        """Of weights that are combined from several: the column sums of what comes out, of either sign."""
        if self._exit is None:
            return self.core.attention_received()
        o = self.core.output
        signs = self._exit.signs(o.shape[1])
        g = torch.zeros_like(o)
        g[..., 0] = signs.to(o)[:, None]
        return self.core.vjp(g[None])[2][0, ..., 0].sum(1) * (self.scores.kind.parts / o.shape[1])

    def logit_range(self, below=None):
        return self.core.logit_range(self._entry.below)

    def select(self, items):
        q, k, v = (t[items] for t in self.inputs)
        return Mapped(q, k, v, self.scores.select(items), self._build)

    def tiled(self):
        raise BadInputError(
            f"expected a kind whose logits are of queries and keys as they are, got {self.scores.kind!r}; its core has tiles"
        )

    @property
    def noise(self) -> float:
        before = self.core.noise + self._entry.roundings * torch.finfo(self.output.dtype).eps
        return before if self._exit is None else before * self._exit.growth

    @property
    def lifted(self) -> float:
        return self.core.lifted

    @property
    def coarse(self) -> bool:
        return self.core.coarse

    @property
    def finer(self):
        return self.core.finer

    def refined(self):
        core = self.core.refined()
        return None if core is None else Mapped(*self.inputs, self.scores, self._build, core)

    @property
    def heavy(self) -> bool:
        return self.core.heavy
