"""One sequence over several processes: attention whose tokens lie in shards, with every derivative that `howsmooth.sdpa` has.

Communication is linear in what is sent, so each map here is its own jvp, and its vjp is the transposed map: what was sent comes
back, and copies are summed. All of them are one collective of `torch.distributed`, `all_to_all_single`. Torch's own functional
collectives have no jvp: forward mode goes through them with a tangent of zero and no error.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from howsmooth.errors import BadInputError, HowSmoothError, reason
from howsmooth.settings import shown

_HEADS, _TOKENS = -3, -2


@dataclass(frozen=True)
class Processes:
    """The processes that share a sequence, in the order of its tokens.

    lengths: how many tokens each has, where the caller said so.
    """

    group: Any
    rank: int
    size: int
    lengths: tuple[int, ...] | None = None

    def agreed(self, *numbers: int, device: torch.device) -> list[tuple[int, ...]]:
        """Whole numbers of every process, which all of them then know."""
        own = torch.tensor(numbers, device=device)
        found = _trade([own] * self.size, [own.shape] * self.size, self.group)
        return [tuple(t.tolist()) for t in found]


_ACTIVE: Processes | None = None


def active() -> Processes | None:
    """The processes that share the sequence at this place; nothing outside of `context_parallel`."""
    return _ACTIVE


@contextmanager
def context_parallel(mesh: DeviceMesh, lengths: Sequence[int] | None = None) -> Iterator[Processes]:
    """Inside, `howsmooth.sdpa` takes and gives this process's shard of the tokens, and attends to those of all processes.

    Shards are runs of tokens in the order of the processes. Masks by order (`is_causal`, `window`) count over the whole
    sequence. An `attn_mask` has this process's queries as rows and all keys as columns. Where every number of heads can be
    divided by the number of processes, each works on some heads of all tokens, else on its own queries and all keys.
    The backward pass needs no context. What is run again in it, as by activation checkpointing, has to be inside.

    Args:
        mesh: of one dimension, as `init_device_mesh("cuda", (4,))` or `mesh["context"]` gives it.
        lengths: how many tokens each process has. By default processes ask each other at every call and wait for the device.

    Raises:
        HowSmoothError: where the mesh or the lengths do not fit, or a process of the mesh ended.
    """
    global _ACTIVE
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = f"one of {mesh.ndim}" if isinstance(mesh, DeviceMesh) else shown(mesh)
        raise BadInputError(f'expected a DeviceMesh of one dimension, got {got}; choose one by its name, as in mesh["context"]')
    if _ACTIVE is not None:
        raise BadInputError("expected no context_parallel around another, got two; leave the first one before")
    size = mesh.size()
    if lengths is not None and (len(lengths) != size or any(type(n) is not int or n < 0 for n in lengths)):
        raise BadInputError(
            f"expected {size} whole numbers of tokens, one for each process, got {shown(lengths)}; leave it out"
        )
    _ACTIVE = Processes(mesh.get_group(), mesh.get_local_rank(), size, None if lengths is None else tuple(lengths))
    try:
        yield _ACTIVE
    finally:
        _ACTIVE = None


@dataclass(frozen=True)
class Exchange:
    """A linear map of tensors (…, heads, tokens, width): pieces of one axis go out, what comes in is joined or summed.

    out: the axis that is cut, one piece for each process; without one, all of it goes to each.
    into: the axis along which what comes in is joined; without one, it is summed.
    pieces, parts: the sizes of what goes out and of what comes in, along the axis that is cut and along the one that is joined.
    """

    at: Processes
    out: int | None
    pieces: tuple[int, ...]
    into: int | None
    parts: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """The part of the result that is this process's, with every derivative."""
        return _Exchanged.apply(x, self)  # pyright: ignore[reportReturnType]

    @property
    def transposed(self) -> "Exchange":
        return Exchange(self.at, self.into, self.parts, self.out, self.pieces)

    def run(self, x: Tensor) -> Tensor:
        sent = [x] * self.at.size if self.out is None else list(x.split(self.pieces, self.out))
        shape = list(x.shape if self.out is None else sent[self.at.rank].shape)
        shapes = [list(shape) for _ in sent]
        if self.into is not None:
            for given, n in zip(shapes, self.parts, strict=True):
                given[self.into] = n
        found = _trade(sent, shapes, self.at.group)
        if self.into is not None:
            return torch.cat(found, self.into)
        wide = torch.promote_types(x.dtype, torch.float32)  # half precision is rounded once
        return torch.stack(found).sum(0, dtype=wide).to(x.dtype)


@contextmanager
def going_on() -> Iterator[None]:
    """Inside it processes talk to each other; where one of them has ended, the others are told so."""
    try:
        yield
    except RuntimeError as error:
        raise HowSmoothError(
            f"expected every process of the mesh to go on, got {reason(error)}; read what the one that failed says"
        ) from error


def _trade(sent: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: Any) -> list[Tensor]:
    """What each process sent to this one, of these shapes; `sent` has a tensor for each process."""
    out = torch.cat([t.reshape(-1) for t in sent])
    counts = [torch.Size(shape).numel() for shape in shapes]
    into = out.new_empty(sum(counts))
    with going_on():
        dist.all_to_all_single(into, out, counts, [t.numel() for t in sent], group=group)
    return [t.view(torch.Size(shape)) for t, shape in zip(into.split(counts), shapes, strict=True)]


class _Exchanged(torch.autograd.Function):
    """A linear map of a tensor, and its derivatives."""

    @staticmethod
    def forward(x: Tensor, exchange: Exchange) -> Tensor:
        return exchange.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.exchange = inputs[1]

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple:
        return _Exchanged.apply(g[0], ctx.exchange.transposed), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _Exchanged.apply(tangents[0], ctx.exchange)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        x, exchange = args
        return _Exchanged.apply(x.movedim(in_dims[0], 0), exchange), 0


def attention_over(
    at: Processes, attention: partial[Tensor],
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of this process's queries to the keys of all.

    attention: of whole tensors, a mask, and the place of the first query among the keys; its options are alike everywhere.
    """
    n, m, rows = _lengths(at, q, k, v, mask, attention.keywords)
    by_heads = all(t.ndim > 2 and t.shape[_HEADS] % at.size == 0 for t in (q, k, v))
    if not by_heads:
        gather = Exchange(at, None, (), _TOKENS, m)
        first = list(accumulate(n, initial=0))[at.rank]
        return attention(q, gather(k), gather(v), mask, first)

    def of_heads(t: Tensor, tokens: tuple[int, ...]) -> Exchange:
        return Exchange(at, _HEADS, (t.shape[_HEADS] // at.size,) * at.size, _TOKENS, tokens)

    if mask is not None:
        if max(rows) > 1 or (mask.ndim > 1 and n == rows):
            mask = Exchange(at, None, (), _TOKENS, rows)(mask)
        if mask.ndim > 2 and mask.shape[_HEADS] > 1:
            mask = mask.chunk(at.size, _HEADS)[at.rank]
    out = attention(of_heads(q, n)(q), of_heads(k, m)(k), of_heads(v, m)(v), mask, 0)
    return of_heads(q, n).transposed(out)


def _lengths(at: Processes, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Any) -> list[tuple[int, ...]]:
    """How many queries, keys and rows of a mask each process has. Whoever differs in anything else is told."""
    n, m = q.shape[_TOKENS], k.shape[_TOKENS]
    rows = 1 if mask is None or mask.ndim < 2 else mask.shape[_TOKENS]
    if at.lengths is not None:
        if not n == m == at.lengths[at.rank]:
            raise BadInputError(
                f"expected {at.lengths[at.rank]} queries and keys on process {at.rank}, as lengths said, got {n} and {m}; "
                "correct lengths, or leave it out"
            )
        every = (1,) * at.size
        if mask is not None and mask.ndim > 1 and min(at.lengths) < 2:  # one row may be of one query or of all
            every = next(zip(*at.agreed(rows, device=q.device), strict=True))
        return [at.lengths, at.lengths, at.lengths if rows > 1 else every]
    alike = [None if t is None else (t.shape[:_TOKENS], t.shape[-1:], t.dtype) for t in (q, k, v, mask)]
    *found, marks = zip(*at.agreed(n, m, rows, zlib.crc32(repr((alike, how)).encode()), device=q.device), strict=True)
    if len(set(marks)) > 1:
        raise BadInputError(
            "expected inputs that differ between processes in the number of tokens alone, got others beside "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} on process {at.rank}; cut along tokens alone"
        )
    return found
