"""A model ready to be measured."""

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.models.capture import Capture
from howsmooth.models.cut import MapName
from howsmooth.models.library import tokenizer_of
from howsmooth.models.measurement import Measurement
from howsmooth.models.tokens import Text, Window, of_ids

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


@final
@dataclass(frozen=True, eq=False)
class Model:
    """A transformer, or any torch module with attention in it.

    `measure` gives the constant of one layer at one input, `capture` runs an input once to measure many layers there,
    `text` cuts a text into windows of tokens.
    """

    name: str
    module: nn.Module = field(repr=False)
    side: str | None
    tokenizer_source: str | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module, name: str, side: str | None, tokenizer_source: str | None) -> "Model":
        """`module`, or the side of it that is named."""
        if getattr(module, "is_quantized", False):
            raise BadInputError(
                f"expected weights that can be widened, got a quantised {type(module).__name__}; pass model.dequantize()"
            )
        chosen = _side(module, side)
        kinds = {p.dtype for p in chosen.parameters() if p.is_floating_point()}
        small = sorted(str(k).removeprefix("torch.") for k in kinds if torch.finfo(k).bits < 32)
        notes = (f"weights in {', '.join(small)} widened to float32 for the measurement",) if small else ()
        return cls(name, chosen, side, tokenizer_source, notes)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the measurement: float64 for a float64 model, float32 for all others."""
        kinds = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        return torch.float64 if torch.float64 in kinds else torch.float32

    @functools.cached_property
    def tokenizer(self) -> Any:
        if self.tokenizer_source is None:
            raise BadInputError("expected a model with a tokenizer, got one that was built in memory; pass ids")
        return tokenizer_of(self.tokenizer_source)

    def text(self, text: str) -> Text:
        """A text in tokens, ready to be cut into windows."""
        return Text.of(self.tokenizer, text)

    def capture(
        self,
        *,
        text: str | None = None,
        ids: Sequence[int] | Tensor | Window | None = None,
        inputs: Inputs | None = None,
        mask: Sequence[bool] | Tensor | None = None,
        n: int | None = None,
    ) -> Capture:
        """Run one input through the model.

        text: cut to its first `n` tokens, special ones among them; whole by default.
        ids: token ids, fed exactly as they are, or a window from `text()`.  mask: false at padding.
        inputs: what the module takes, by name or in order, with one sequence in it: pixel values, features, embeddings.
        """
        if sum(given is not None for given in (text, ids, inputs)) != 1:
            raise BadInputError("expected one of text, ids and inputs, got none or several; pass exactly one")
        if text is None and n is not None:
            raise BadInputError("expected n together with text, got it with ids or inputs; cut those yourself")
        if inputs is not None:
            if mask is not None:
                raise BadInputError("expected mask together with ids, got it with inputs; name it among the inputs")
            return self._of_inputs(inputs)
        if text is not None:
            window = self.text(text).window(n)
        elif isinstance(ids, Window):
            window = ids
        else:
            assert ids is not None
            window = of_ids(_whole_numbers(ids), self._tokenizer_if_any(), _flags(mask))
        return self._of_window(window)

    def measure(
        self,
        *,
        layer: int,
        text: str | None = None,
        ids: Sequence[int] | Tensor | Window | None = None,
        inputs: Inputs | None = None,
        mask: Sequence[bool] | Tensor | None = None,
        n: int | None = None,
        map: MapName = "attention",
        head: int | None = None,
        heads: bool = False,
        tol: float = 1e-3,
        certify: float | None = None,
        seed: int = 0,
    ) -> Measurement:
        """The local Lipschitz constant of one map of one layer at one input; see `capture` for the input.

        map: `attention` (what enters the attention sub-layer → output projection), `heads` (before that projection),
        `normed` (the block's own norm first), `block` (the whole layer), `model` (first block → last hidden state).
        head: one head alone.  heads: one estimate per head beside the whole.  tol, certify, seed: as in `howsmooth.lipschitz`.
        """
        captured = self.capture(text=text, ids=ids, inputs=inputs, mask=mask, n=n)
        return captured.measure(layer, map, head=head, heads=heads, tol=tol, certify=certify, seed=seed)

    def attention(
        self,
        *,
        layer: int,
        text: str | None = None,
        ids: Sequence[int] | Tensor | Window | None = None,
        inputs: Inputs | None = None,
        n: int | None = None,
    ) -> Attention:
        """One layer as `howsmooth.Attention` with the mask of one input, where it is of that form; see `Capture.attention`."""
        return self.capture(text=text, ids=ids, inputs=inputs, n=n).attention(layer)

    def _tokenizer_if_any(self) -> Any | None:
        if self.tokenizer_source is None:
            return None
        try:
            return self.tokenizer
        except BadInputError:
            return None

    def _of_window(self, window: Window) -> Capture:
        self._check_ids(window)
        ids = torch.tensor([window.ids], device=self._device)
        mask = torch.ones_like(ids) if window.mask is None else torch.tensor([window.mask], device=self._device).long()
        accepted = inspect.signature(self.module.forward).parameters
        if "input_ids" not in accepted:
            raise BadInputError(
                f"expected a model that takes token ids, got {type(self.module).__name__}; pass inputs by name, as in "
                "inputs={'pixel_values': …}"
            )
        kwargs: dict[str, Any] = {"input_ids": ids}
        if "attention_mask" in accepted:
            kwargs["attention_mask"] = mask
        elif window.mask is not None and not all(window.mask):
            raise BadInputError(f"expected a model that takes a padding mask, got {type(self.module).__name__}; leave mask out")
        return self._captured((), kwargs, window)

    def _of_inputs(self, inputs: Inputs) -> Capture:
        if isinstance(inputs, Mapping):
            args, kwargs = (), dict(inputs)
        else:
            args, kwargs = ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}
        kind = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

        def fit(t: Any) -> Any:
            return t.to(self._device, kind if t.is_floating_point() else t.dtype) if isinstance(t, Tensor) else t

        args, kwargs = tuple(fit(a) for a in args), {k: fit(v) for k, v in kwargs.items()}
        if isinstance(self.module, nn.MultiheadAttention) and len(args) == 1:
            args = args * 3  # self-attention: the tokens are queries, keys and values
        mask = kwargs.get("attention_mask")
        ids = kwargs.get("input_ids")
        window = Window((), ())
        if isinstance(ids, Tensor):
            window = of_ids(_whole_numbers(ids), self._tokenizer_if_any(), _flags(mask if isinstance(mask, Tensor) else None))
            self._check_ids(window)
        return self._captured(args, kwargs, window)

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any], window: Window) -> Capture:
        if "use_cache" in inspect.signature(self.module.forward).parameters:
            kwargs["use_cache"] = False
        captured = Capture(self.name, self.module, args, kwargs, window, self.dtype, self.notes)
        try:
            _ = captured.trace
        except IndexError:
            raise BadInputError(
                f"expected ids within the vocabulary and no more tokens than {self.name} has positions, got {len(window)}; "
                "give fewer tokens"
            ) from None
        return captured

    def _check_ids(self, window: Window) -> None:
        ids = window.ids
        if not ids:
            raise BadInputError("expected at least one token id, got none; pass a list of whole numbers")
        if window.mask is not None and len(window.mask) != len(ids):
            raise BadInputError(
                f"expected a mask of {len(ids)} entries, one per id, got {len(window.mask)}; match their lengths"
            )
        if window.mask is not None and not any(window.mask):
            raise BadInputError("expected a token that is not padding, got a mask without one; leave the mask out")
        config = getattr(self.module, "config", None)
        size = getattr(config, "vocab_size", None)
        outside = [i for i in ids if i < 0 or (isinstance(size, int) and i >= size)]
        if outside:
            raise BadInputError(
                f"expected token ids from 0 to {size - 1 if size else '…'}, got {outside[0]}; use the model's own tokenizer"
            )
        limit = getattr(config, "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < len(ids):
            raise BadInputError(f"expected at most {limit} tokens, the positions {self.name} has, got {len(ids)}; give fewer")

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))


def _side(module: nn.Module, side: str | None) -> nn.Module:
    """The part of a model with two sides that is meant."""
    config = getattr(module, "config", None)
    towers: dict[str, nn.Module] = {}
    if getattr(config, "is_encoder_decoder", False):
        for name in ("encoder", "decoder"):
            part = getattr(module, f"get_{name}", lambda: None)()
            if isinstance(part, nn.Module):
                towers[name] = part
    else:
        for name in ("text", "vision"):
            part = getattr(module, f"{name}_model", None)
            if isinstance(part, nn.Module):
                towers[name] = part
        towers = towers if len(towers) == 2 else {}
    if not towers:
        if side is not None:
            raise BadInputError(f"expected no side for {type(module).__name__}, which has one only, got {side!r}; leave it out")
        return module
    if side not in towers:
        raise BadInputError(
            f"expected side to be {' or '.join(map(repr, towers))} for {type(module).__name__}, got {side!r}; name one of them"
        )
    return towers[side]


def _whole_numbers(ids: Sequence[int] | Tensor) -> list[int]:
    """One sequence of token ids."""
    found = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(found) == 1 and isinstance(found[0], list | tuple):
        found = list(found[0])
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
        raise BadInputError("expected one list of whole token ids, got something else in it; pass one sequence at a time")
    return found


def _flags(mask: Sequence[bool] | Tensor | None) -> list[bool] | None:
    if mask is None:
        return None
    found = mask.tolist() if isinstance(mask, Tensor) else list(mask)
    if len(found) == 1 and isinstance(found[0], list | tuple):
        found = list(found[0])
    return [bool(m) for m in found]
