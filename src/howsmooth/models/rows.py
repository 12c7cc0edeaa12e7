"""The model's own attention at some queries only: what layers are compared with where all their logits would not fit.

Each attention call is answered by the code that the model itself would run, for the chosen queries against all keys; the other
rows of its output are zero. Everything else in a block treats tokens one by one, so its output is the model's at those rows.
Attention that a model writes out is followed step by step, and its steps are taken at those rows, with the model's own masks.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from howsmooth.models.by_hand import ByHand
from howsmooth.models.intercept import Tagged, storage
from howsmooth.models.past import Past

_TORCH_ATTENTION = nn.functional.scaled_dot_product_attention
_ENDS = 4  # rows at either end that are always taken


def sample_rows(n: int, count: int) -> Tensor:
    """At most `count` of `n` rows: the first and last few, and random ones in between.

    >>> sample_rows(5, 8).tolist()
    [0, 1, 2, 3, 4]
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    ends = torch.cat([torch.arange(min(_ENDS, n)), torch.arange(max(0, n - _ENDS), n)])
    return torch.cat([ends, order])[: max(count, len(ends))].unique()


class OwnRows:
    """Attention calls over `n` queries answered at `rows`. `answered` counts them.

    masks: what the mask tensors stand for that were handed out when the model was traced.
    """

    def __init__(self, n: int, rows: Tensor, masks: dict[int, Tagged]):
        self.n, self.rows, self.masks, self.answered = n, rows, masks, 0

    @contextmanager
    def active(self, written_out: bool = False) -> Iterator[None]:
        """written_out: the model's code has attention of its own."""
        with ExitStack() as stack:
            if written_out:
                stack.enter_context(ByHand(self._steps))
            interface = _interface()
            plain = getattr(interface, "get_interface", None)
            if plain is not None:

                def get_interface(table: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
                    code = plain(table, name, default)
                    return self._library(code) if name == "eager" else code

                stack.enter_context(mock.patch.object(interface, "get_interface", get_interface))
            stack.enter_context(mock.patch.object(nn.functional, "scaled_dot_product_attention", self._torch))
            stack.enter_context(_Redirect(self._torch))
            yield

    def _library(self, code: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the library's attention interface, (batch, heads, n, d) → (batch, n, heads, d_v)."""

        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if query.shape[2] != self.n:
                return code(module, query, key, value, mask, *args, **kwargs)
            kwargs = {k: self._cut(v, key.shape[2]) for k, v in kwargs.items()}
            given = self._cut(mask, key.shape[2], query.dtype)
            part = code(module, query[:, :, self.rows], key, value, given, *args, **kwargs)[0]
            self.answered += 1
            return part.new_zeros(part.shape[0], self.n, *part.shape[2:]).index_copy(1, self.rows, part), None

        return attend

    def _torch(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """`F.scaled_dot_product_attention`."""
        if query.shape[-2] != self.n:
            return _TORCH_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        if is_causal:
            attn_mask = torch.arange(key.shape[-2], device=query.device) <= self.rows[:, None]
        elif attn_mask is not None:
            attn_mask = self._cut(attn_mask, key.shape[-2])
        part = _TORCH_ATTENTION(query[..., self.rows, :], key, value, attn_mask, dropout_p, **kwargs)
        self.answered += 1
        return part.new_zeros(*part.shape[:-2], self.n, part.shape[-1]).index_copy(part.ndim - 2, self.rows, part)

    def _steps(self, past: Past, v: Tensor) -> Tensor:
        """The steps that a model's own code writes out, its terms as they are."""
        rows = self.rows if past.q.shape[2] == self.n else torch.arange(past.q.shape[2], device=past.q.device)
        part = past.rows(rows) @ v
        self.answered += 1
        return part.new_zeros(*part.shape[:2], past.q.shape[2], part.shape[3]).index_copy(2, rows, part)

    def _cut(self, t: Any, m: int, dtype: torch.dtype | None = None) -> Any:
        """The chosen rows of a tensor (…, n, m), or of the mask that it stands for."""
        if not isinstance(t, Tensor) or t.ndim < 2 or t.shape[-2:] != (self.n, m):
            return t
        known = self.masks.get(storage(t))
        return t[..., self.rows, :] if known is None else known.rows(self.rows).to(t.device, dtype)


class _Redirect(TorchFunctionMode):
    """Whoever bound torch's attention to a name of his own gets `attend` too."""

    def __init__(self, attend: Callable[..., Tensor]):
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return (self._attend if func is _TORCH_ATTENTION else func)(*args, **(kwargs or {}))


def _interface() -> Any:
    """The library's table of attention functions, where the library is there."""
    try:
        from transformers import AttentionInterface
    except ImportError:
        return None
    return AttentionInterface
