"""Reading masks: causal, window and padding masks by their rule, anything else as what it adds to the logits."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from howsmooth.kernels import Mask

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_TILE = {"cpu": 2**22, "cuda": 2**26}  # entries of a rule evaluated at once


def of_rule(rule: Rule, batch: int, n: int, m: int, keys: Bool[Tensor, "batch m"] | None, device: torch.device) -> Mask:
    """The mask of a visibility rule `rule(batch, head, query, key)` on index tensors that broadcast.

    The band (causal, window) is guessed from two rows and compared with the rule everywhere, a tile at a time: a rule that is
    a band costs O(n) memory. Any other rule becomes a bias of 0 and −inf.

    >>> rule = lambda b, h, q, k: (k <= q) & (k > q - 2)
    >>> mask = of_rule(rule, 1, 5, 5, None, torch.device("cpu"))
    >>> mask.causal, mask.window, mask.bias
    (True, 2, None)
    """
    keys = None if keys is None or bool(keys.all()) else keys
    item = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    col = torch.arange(m, device=device)[None, None, None, :]

    def rows(start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop, device=device)[None, None, :, None]
        return rule(item, head, index, col).expand(batch, 1, stop - start, m)

    step = max(1, _TILE.get(device.type, 2**22) // (batch * m))
    band = _guess(rows(0, 1)[0, 0, 0], rows(n - 1, n)[0, 0, 0])
    if (n == m or not (band.causal or band.window)) and all(
        bool((rows(i, min(i + step, n)) == band.visible(slice(i, min(i + step, n)), slice(0, m), device)).all())
        for i in range(0, n, step)
    ):
        return Mask(band.causal, band.window, keys)
    shown = torch.cat([rows(i, min(i + step, n)) for i in range(0, n, step)], dim=2)
    return Mask(keys=keys, bias=torch.zeros(shown.shape, device=device).masked_fill(~shown, -torch.inf))


def of_tensor(mask: Tensor, dtype: torch.dtype) -> Mask:
    """The mask that a tensor of four axes stands for: boolean (true where shown), or added to the logits.

    The lowest finite number of a half or single precision type, which models write for −inf, is read as −inf.
    """
    if mask.dtype == torch.bool:
        shown = mask
        added = None
    else:
        shown = mask > 0.5 * torch.finfo(torch.float16 if mask.dtype == torch.float16 else torch.float32).min
        added = mask.to(dtype).masked_fill(~shown, -torch.inf)
        if bool((mask[shown] != 0).any()):
            return Mask(bias=added)
    band = _band(shown)
    if band is not None:
        return band
    return Mask(bias=torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill(~shown, -torch.inf))


def joined(one: Mask, other: Mask) -> Mask:
    """What two masks leave together."""
    if one.keys is not None and other.keys is not None:
        other = replace(other, keys=one.keys & other.keys)
    windows = [w for w in (one.window, other.window) if w is not None]
    keys = one.keys if other.keys is None else other.keys
    bias = other.bias if one.bias is None else one.bias if other.bias is None else one.bias.to(other.bias) + other.bias
    return Mask(one.causal or other.causal, min(windows, default=None), keys, bias)


def _band(shown: Bool[Tensor, "batch heads n m"]) -> Mask | None:
    """A boolean mask as band and keys, if it is one."""
    n, m = shown.shape[2:]
    if not torch.equal(shown, shown[:, :1].expand_as(shown)):  # heads that see other keys
        return None
    shown = shown[:, :1]
    keys = shown.any(2)[:, 0]
    first = shown[0, 0, 0] | ~keys[0]
    last = shown[0, 0, -1] | ~keys[0]
    band = _guess(first, last)
    if n != m and (band.causal or band.window):
        return None
    whole = band.visible(slice(0, n), slice(0, m), shown.device) & keys[:, None, None, :]
    if not torch.equal(whole.expand_as(shown), shown):
        return None
    return Mask(band.causal, band.window, None if bool(keys.all()) else keys)


def _guess(first: Bool[Tensor, " m"], last: Bool[Tensor, " m"]) -> Mask:
    """The band whose first and last rows these might be."""
    m = len(first)
    causal = m > 1 and not bool(first[1:].any())
    count = int(last.sum() if causal else first.sum())
    return Mask(causal, count if 0 < count < m else None)
