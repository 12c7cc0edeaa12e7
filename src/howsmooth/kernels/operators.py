"""Attention's five products as operators of torch: `torch.ops.howsmooth.attend` and what its derivatives are made of.

    attend       q, k, v ↦ o, ℓ                         the output and the log-sum-exp of every row of logits, in two parts
    attend_jvp   dq, dk, dv ↦ do, dℓ                    derivatives of both
    attend_vjp   g ↦ gradients of ⟨g, o⟩ in q, k, v
    attend_hvp   dq, dk, dv, do, dℓ, g ↦ derivatives of those gradients
    attend_jvp2  dq, dk, dv, dℓ and a second direction ↦ second derivatives of o and ℓ

Each is a function of tensors and numbers alone, with a kernel for fake tensors (so `torch.compile` and `torch.export` see one
node) and a batching rule; `autograd.py` says how they are each other's derivatives. Heads are (batch, heads, tokens, width),
keys and values may have fewer heads, a bias is (1 or batch, 1 or heads, 1 or n, m). What moves may have one more axis in front,
the probes, which share the weights. Nothing waits for the device.

`documents` cut the tokens into parts that attend to themselves alone: a row for each, with its first query, the number of
queries, its first key, the number of keys. No more than `max_q` and `max_k` of them. The queries stand at the end of the keys.
What is computed of a token without a document is NaN. A kernel of the GPU takes all of them in one launch; on tiles they are
read off the device and taken one by one.

`seed`, on the CPU, says which weights dropout leaves out, each with probability `dropout`: on tiles, the same in every product.

`ℓ` is (batch, heads, 2, n): the largest logit `t` of a row, and `log Σ exp(s − t)`, which one number for both would lose beside
an offset of the whole row. Their sum does not depend on `t`, so `t` counts as a constant: derivatives of `ℓ` are zero and that
of the second part. Kernels on a GPU count in units of log 2.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.kernels.base import Scores
from howsmooth.kernels.dispatch import unfit
from howsmooth.kernels.masks import Mask
from howsmooth.kernels.tensors import heads_last
from howsmooth.kernels.tiled import Blocked, Dropout, hvp, jvp2

LIBRARY = torch.library.Library("howsmooth", "DEF")
HOW = "float scale, float? softcap, bool causal, int? window, int first, Tensor? documents, int max_q, int max_k, "
HOW += "float dropout, Tensor? seed"
N_HOW = HOW.count(",") + 1

Tensors = tuple[Tensor, ...]
_Gives = Callable[..., Tensors]


def _placed(t: Tensor, like: Tensor) -> Tensor:
    return heads_last(t.shape, like).copy_(t)


def _fused(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels of the GPU serve a problem."""
    return q.is_cuda and unfit(q, v) is None


@functools.cache
def _native() -> Any:
    from howsmooth.kernels.triton import native

    return native


def _outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def _tiles(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: Sequence[Any], saved: Sequence[Tensor] | None) -> Blocked:
    kind = torch.promote_types(q.dtype, torch.float32)
    scale, softcap, causal, window, first, p, seed = how
    mask = Mask.trusted(causal, window, None if bias is None else bias.to(kind), first)
    saved = None if saved is None else (saved[0].to(kind), saved[1])
    q, k, v = (t.to(kind) for t in (q, k, v))
    dropout = None if seed is None else Dropout(p, int(seed))
    return Blocked(q, k, v, Scores(scale, softcap, mask), trusted=True, saved=saved, dropout=dropout)


def _probes(moving: Sequence[Tensor], like: Tensor, kind: torch.dtype) -> list[Tensor]:
    """With an axis of probes where there is none, in the precision of the work."""
    return [t.to(kind) if like.ndim == 5 else t.to(kind)[None] for t in moving]


def _attend(q: Tensor, at: Blocked) -> Tensors:
    return _placed(at.output, q), at.log_sum_exp


def _jvp(q: Tensor, at: Blocked, *along: Tensor) -> Tensors:
    return _moved(*at.jvp_and_drift(*_probes(along, along[0], at.q.dtype)), q, along[0])


def _vjp(q: Tensor, at: Blocked, g: Tensor) -> Tensors:
    return _gradients(at.vjp(*_probes((g,), g, at.q.dtype)), q, g)


def _hvp(q: Tensor, at: Blocked, *moving: Tensor) -> Tensors:
    dq, dk, dv, do, dlse, g = _probes(moving, moving[-1], at.q.dtype)
    return _gradients(hvp(at, (dq, dk, dv), do, dlse[..., 1, :], g), q, moving[-1])


def _jvp2(q: Tensor, at: Blocked, *moving: Tensor) -> Tensors:
    dq, dk, dv, dlse, eq, ek, ev, else_ = _probes(moving, moving[0], at.q.dtype)
    return _moved(*jvp2(at, (dq, dk, dv), dlse[..., 1, :], (eq, ek, ev), else_[..., 1, :]), q, moving[0])


def _kernel(native: str | None, on_tiles: _Gives, tokens: str, fake: _Gives) -> _Gives:
    """An operator, served by a kernel of the GPU where there is one that fits, else on tiles.

    tokens: what each tensor has them of, those that come in and, after a colon, those that go out. q: queries, k: keys, l:
    queries along the last axis.
    """
    into, out_of = tokens.split(":")

    def whole(how: Sequence[Any], q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *saved: Tensor) -> Tensors:
        fused = _fused(q, v) and how[-1] is None  # without a seed
        with _outside_autocast(q.device):
            # the logits of tiles are not those of the GPU's kernels to the last bit
            at = _tiles(q, k, v, bias, how, saved[:2] if saved and not fused else None)
            return on_tiles(q, at, *saved[2:])

    def kernel(*args: Any) -> Tensors:
        tensors, (*how, documents, _, _, p, seed) = args[:-N_HOW], args[-N_HOW:]
        q, k, v, _, *saved = tensors
        if native is not None and seed is None and _fused(q, v):
            return getattr(_native(), native)(*tensors, args[-N_HOW:])
        if documents is None:
            return whole([*how, p, seed], *tensors)
        out = tuple(t.fill_(torch.nan) for t in fake(*tensors))
        for i, n, j, m in documents.tolist():
            spans = {"q": (-2, i, n), "k": (-2, j, m), "l": (-1, i, n)}
            parts = [t.narrow(*spans[of]) for t, of in zip(out, out_of, strict=True)]
            if n == 0 or m == 0:  # nothing attends to anything
                for part in parts:
                    part.zero_()
                continue
            q_, k_, v_, *saved_ = (t.narrow(*spans[of]) for t, of in zip((q, k, v, *saved), into, strict=True))
            for part, found in zip(parts, whole([*how[:-1], m - n, p, seed], q_, k_, v_, None, *saved_), strict=True):
                part.copy_(found)
        return out

    return kernel


def _moved(do: Tensor, row: Tensor, like: Tensor, moving: Tensor) -> Tensors:
    """Derivatives of the output, and of both parts of the log-sum-exp."""
    dlse = torch.stack([torch.zeros_like(row), row], -2)
    return (_placed(do, like), dlse) if moving.ndim == 5 else (_placed(do[0], like), dlse[0])


def _gradients(found: Sequence[Tensor], like: Tensor, moving: Tensor) -> Tensors:
    return tuple(_placed(t if moving.ndim == 5 else t[0], like) for t in found)


def _fake_outputs(q: Tensor, v: Tensor, moving: Tensor) -> Tensors:
    """An output and a log-sum-exp in two parts."""
    *lead, n, _ = moving.shape
    lse = q.new_empty((*lead, 2, n), dtype=torch.promote_types(q.dtype, torch.float32))
    return heads_last((*lead, n, v.shape[-1]), q), lse


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensors:
    return tuple(heads_last((*g.shape[:-4], *t.shape), q) for t in (q, k, v))


def _batched(name: str, fixed: int, moving: int, outputs: int) -> Callable[..., Any]:
    """The batching rule of an operator with so many tensors at the place, moving, and coming out.

    Where only what moves is batched, as under `jacfwd` and `jacrev`, it becomes probes that share the weights; else a batch.
    """
    op = getattr(torch.ops.howsmooth, name)

    def front(t: Tensor, dim: int | None, size: int) -> Tensor:
        return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
        size, how = info.batch_size, args[fixed + moving :]
        if any(dim is not None for dim in in_dims[fixed + moving :]):
            raise BadInputError(
                "expected the same documents and seed of dropout for a whole batch, got a batch of them; "
                "loop over it, or pass randomness='same'"
            )
        moves = [front(t, d, size) for t, d in zip(args[fixed : fixed + moving], in_dims[fixed:], strict=False)]
        probes = bool(moves) and moves[0].ndim == 6
        if moves and all(d is None for d in in_dims[:fixed]):
            out = op(*args[:fixed], *(t.flatten(0, 1) if probes else t for t in moves), *how)
            return tuple(t.unflatten(0, (size, -1)) if probes else t for t in out), (0,) * outputs
        items = args[0].shape[0 if in_dims[0] is None else int(in_dims[0] == 0)]
        places = [_merged(t, d, size, items) for t, d in zip(args[:fixed], in_dims, strict=False)]
        out = op(*places, *(t.movedim(0, 1).flatten(1, 2) if probes else t.flatten(0, 1) for t in moves), *how)
        return tuple(t.unflatten(int(probes), (size, -1)) for t in out), (int(probes),) * outputs

    def _merged(t: Tensor | None, dim: int | None, size: int, items: int) -> Tensor | None:
        if t is None or (dim is None and t.shape[0] == 1 < items):  # a bias for all items
            return t
        t = front(t, dim, size)
        return t.expand(-1, items, *t.shape[2:]).flatten(0, 1)

    return rule


def _define() -> None:
    at, saved = "Tensor q, Tensor k, Tensor v, Tensor? bias, ", "Tensor o, Tensor lse, "
    along, second_along = "Tensor dq, Tensor dk, Tensor dv, ", "Tensor eq, Tensor ek, Tensor ev, Tensor else_, "
    two, three = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor)"
    table: dict[str, tuple[str | None, _Gives, str, str, str, _Gives, tuple[int, int, int]]] = {
        "attend": ("forward", _attend, at, two, "qkk:ql", lambda q, k, v, *_: _fake_outputs(q, v, q), (4, 0, 2)),
        "attend_jvp": ("jvp", _jvp, at + saved + along, two, "qkkqlqkk:ql",
                       lambda q, k, v, b, o, s, dq, *_: _fake_outputs(q, v, dq), (6, 3, 2)),
        "attend_vjp": ("vjp", _vjp, at + saved + "Tensor g, ", three, "qkkqlq:qkk",
                       lambda q, k, v, b, o, s, g, *_: _fake_gradients(q, k, v, g), (6, 1, 3)),
        "attend_hvp": ("hvp", _hvp, at + saved + along + "Tensor do, Tensor dlse, Tensor g, ", three, "qkkqlqkkqlq:qkk",
                       lambda q, k, v, b, o, s, dq, *_: _fake_gradients(q, k, v, dq), (6, 6, 3)),
        "attend_jvp2": (None, _jvp2, at + saved + along + "Tensor dlse, " + second_along, two, "qkkqlqkklqkkl:ql",
                        lambda q, k, v, b, o, s, dq, *_: _fake_outputs(q, v, dq), (6, 8, 2)),
    }  # fmt: skip
    for name, (native, on_tiles, takes, gives, tokens, fake, counts) in table.items():
        LIBRARY.define(f"{name}({takes}{HOW}) -> {gives}")
        LIBRARY.impl(name, _kernel(native, on_tiles, tokens, fake), "CompositeExplicitAutograd")
        torch.library.register_fake(f"howsmooth::{name}", fake, lib=LIBRARY)
        torch.library.register_vmap(f"howsmooth::{name}", _batched(name, *counts), lib=LIBRARY)


_define()
