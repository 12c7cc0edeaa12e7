"""A model ready to be measured."""

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack, final, overload

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.kernels.tensors import Place, check_dense, place
from howsmooth.models.capture import MEASURED, Capture, HowMeasured
from howsmooth.models.closed import ClosedForms
from howsmooth.models.depth import Depth, depth_of
from howsmooth.models.folder import tokenizer_of
from howsmooth.models.gguf import gguf_tokenizer, is_unpacked
from howsmooth.models.lens import POSITIONS, PROMPT, Lens, mean_jacobian
from howsmooth.models.measurement import Measurement, Measurements
from howsmooth.models.model_input import ModelInput, runs
from howsmooth.models.recorded import Recordings
from howsmooth.models.room import check_device, device_of, fits
from howsmooth.models.tokens import Text, Window, of_ids, padding_flags, whole_numbers
from howsmooth.program.ends import MapName
from howsmooth.program.modules import bare, offloaded, side_of
from howsmooth.program.tracing import distinct
from howsmooth.settings import items, meant, shown

Side = Literal["encoder", "decoder", "text", "vision"] | str
Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
Ids = Sequence[int] | Tensor | Window
GIVEN = ("windows", "text", "ids", "inputs", "mask", "n")  # what `capture` takes by name


@final
@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A transformer, or any torch module with attention in it.

    `measure` gives the constants of its layers at one input, `capture` runs inputs once to measure many maps there, `text`
    cuts a text into windows of tokens.
    """

    name: str
    module: nn.Module
    side: str | None = None
    tokenizer_source: Any = None  # the tokenizer, or where to load it from
    notes: tuple[str, ...] = ()
    forms: ClosedForms = field(default_factory=ClosedForms)
    recordings: Recordings = field(default_factory=Recordings)
    where: torch.device | None = None  # the device of the measurement, where weights stay elsewhere

    @classmethod
    def of(cls, module: nn.Module, name: str, side: str | None, tokenizer: Any, device: torch.device | None = None) -> "Model":
        """`module`, or the side of it that is named. tokenizer: itself, where to load it from, or nothing.

        device: where it goes; weights that do not fit there stay where they are and are lent to it block by block.
        """
        if getattr(module, "is_quantized", False) and not is_unpacked(module):
            raise BadInputError(
                f"expected weights that can be widened, got a quantised {type(module).__name__}; pass model.dequantize()"
            )
        if tokenizer is not None and not isinstance(tokenizer, str) and not callable(tokenizer):
            raise BadInputError(
                f"expected a tokenizer of transformers, its folder or its name, got {type(tokenizer).__name__}; pass one"
            )
        if any(p.is_meta for p in module.parameters()) and not offloaded(module):
            raise BadInputError(
                f"expected weights in memory, got a {type(module).__name__} whose weights are elsewhere (device meta); load it "
                "without device_map and pass device="
            )
        chosen = bare(side_of(bare(module), side))
        if device is not None and offloaded(chosen):
            raise BadInputError(
                f"expected no device for a {type(module).__name__}, whose device_map says where it goes, got {device}; "
                "leave it out"
            )
        there = device if device is None or device.type != "cuda" or device.index is not None else torch.device("cuda", 0)
        lends = there is not None and not fits(chosen, there)
        if there is not None and not lends:
            chosen = chosen.to(there)
        kinds = {p.dtype for p in chosen.parameters() if p.is_floating_point()}
        small = sorted(str(k).removeprefix("torch.") for k in kinds if torch.finfo(k).bits < 32)
        notes = (f"weights in {', '.join(small)} widened to float32 for the measurement",) if small else ()
        if lends:
            notes += (f"weights larger than the memory of {there}, lent to it one block at a time",)
        return cls(name, chosen, side, tokenizer, notes, where=there if lends else None)

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.module.parameters())
        return f"Model({self.name}, {type(self.module).__name__}, {count / 1e6:.3g} M parameters, {self.device})"

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the measurement: float64 for a float64 model, float32 for all others."""
        kinds = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        return torch.float64 if torch.float64 in kinds else torch.float32

    @property
    def device(self) -> torch.device:
        """Where it is measured: where its weights are, unless they are lent to another device block by block."""
        return self.where or device_of(self.module)

    def to(self, device: Place = None, dtype: torch.dtype | None = None) -> "Model":
        """The model elsewhere or in another precision, named as for a torch module, which is moved in place."""
        device, dtype = place(device, dtype)
        check_device(device)
        if device is None and dtype is None:
            return self
        return Model.of(self.module.to(dtype=dtype), self.name, None, self.tokenizer_source, device or self.where)

    @functools.cached_property
    def tokenizer(self) -> Any:
        if self.tokenizer_source is None:
            raise BadInputError(
                "expected a model with a tokenizer, got one that was built in memory; pass ids, or load(module, tokenizer=…)"
            )
        source = self.tokenizer_source
        if not isinstance(source, str):
            return source
        return gguf_tokenizer(Path(source), source) if Path(source).is_file() else tokenizer_of(source)

    def text(self, text: str) -> Text:
        """A text in tokens, ready to be cut into windows."""
        return Text.of(self.tokenizer, text)

    def capture(
        self,
        windows: str | Sequence[Window | Sequence[int] | str] | None = None,
        *,
        text: str | None = None,
        ids: Ids | None = None,
        inputs: Inputs | None = None,
        mask: Sequence[bool] | Tensor | None = None,
        n: int | None = None,
        **forward: Any,
    ) -> Capture:
        """Run inputs through the model: many windows at once, or one input given in one of these ways.

        Args:
            windows: Of a text (`model.text(text).windows(n, samples)`), lists of token ids, or texts; or one text.
            text: Cut to its first `n` tokens, special ones among them; whole by default.
            ids: Token ids, fed exactly as they are, or a window from `text()`.
            mask: False at padding.
            inputs: What the module takes, in order or by name, with one sequence in it: pixel values, features, embeddings.
            n: How many tokens of `text`.
            **forward: The same by name, as in `capture(**tokenizer(text, return_tensors="pt"))`; rows of `input_ids` are
                windows.

        Returns:
            What every layer received. `Capture.measure` takes it from there.
        """
        if isinstance(windows, str) and text is None:
            windows, text = None, windows
        if sum(value is not None for value in (windows, text, ids, inputs, forward or None)) != 1:
            raise BadInputError(
                "expected exactly one of windows, text, ids, inputs or inputs by name, got none or several; pass one"
            )
        if text is None and n is not None:
            raise BadInputError("expected n beside a text, got n without one; cut the input yourself")
        if ids is None and mask is not None:
            raise BadInputError("expected mask beside ids, got a mask without them; name it attention_mask among the inputs")
        self.check_names(forward, GIVEN)
        if inputs is not None or forward:
            samples = self._of_inputs(forward if inputs is None else inputs)
        elif windows is not None:
            several = items(windows, "a list of windows, of lists of ids or of texts", "cut some from a text")
            samples = [self._of_window(self._window(w)) for w in several]
        elif text is not None:
            samples = [self._of_window(self.text(text).window(n))]
        else:
            assert ids is not None
            samples = [self._of_window(self._window(ids, mask))]
        if not samples:
            raise BadInputError("expected a window or more, got none; cut some from a text")
        return Capture(self.name, tuple(samples), self.forms, self.notes)

    def depth(
        self,
        text: str | None = None,
        layers: Sequence[int] | None = None,
        *,
        to: int | Literal["final"] = "final",
        k: int = 8,
        coupling: int | None = None,
        tol: float = 1e-3,
        certify: float | None = None,
        seed: int | None = None,
        **more: Any,
    ) -> Depth:
        """The growth of changes over depth: constants, mean gains and Lyapunov exponents of the maps from layer to layer.

        Args:
            text: A text, as for `measure`.
            layers: Where maps to the end begin, and where those from the first of them end; all by default.
            to: The end: "final" for the last block, before the final norm, or a layer.
            k: Directions that the exponents follow; 0 for none.
            coupling: Of how many top directions neighbouring blocks are compared; not at all by default.
            tol: As in `howsmooth.lipschitz`.
            certify: As in `howsmooth.lipschitz`.
            seed: As in `howsmooth.lipschitz`.
            **more: The input where it is no text, as for `capture`.

        Returns:
            A `Depth`, which prints as a table.
        """
        self.check_names((name for name in more if name not in GIVEN), ("layers", *GIVEN))
        exact: HowMeasured = {"tol": tol, "certify": certify, "seed": seed}
        return depth_of(self.capture(text=text, **more), layers, to, k, coupling, exact)

    @overload
    def measure(self, text: str, layer: int, map: MapName = ..., **how: Unpack[HowMeasured]) -> Measurement: ...
    @overload
    def measure(self, text: str | None = ..., *, layer: int, map: MapName = ..., **more: Any) -> Measurement: ...
    @overload
    def measure(
        self, text: str, layer: Sequence[int] | None = ..., map: MapName = ..., **how: Unpack[HowMeasured]
    ) -> Measurements: ...
    @overload
    def measure(
        self, text: str | None = ..., layer: Sequence[int] | None = ..., map: MapName = ..., **more: Any
    ) -> Measurements: ...
    def measure(
        self,
        text: str | None = None,
        layer: int | Sequence[int] | None = None,
        map: MapName = "attention",
        **more: Any,
    ) -> Measurement | Measurements:
        """The local Lipschitz constants of a map at one input: of one layer, of several, or of all where none is named.

        Args:
            text: A text, cut to its first `n` tokens where that is given.
            layer: A number, or a list of them; all by default.
            map: `attention` (what enters the attention sub-layer → output projection), `heads` (before that projection),
                `normed` (the block's own norm first), `block` (the whole layer), `update` (the block without its residual
                path), `cross` and `context` (the block's cross-attention, in its queries' tokens or in its context),
                `model` (first block → last hidden state, behind the final norm).
            **more: What `Capture.measure` takes (layers, head, heads, factor, tokens, to, stream, call, closed, within, per,
                steps, tol, certify, seed, gain, k), and the input where it is no text: ids, mask, n, inputs, or the
                model's own arguments by name, as for `capture`.

        Returns:
            A `Measurement` for one layer, `Measurements` for several, which print as a table.

        >>> model = Model.of(nn.TransformerEncoderLayer(8, 2, batch_first=True), "layer", None, None)
        >>> f"{model.measure(inputs=torch.eye(8)[None, :4], layer=0, tol=1e-2).radius_rms:.2f}"
        '1.00'
        """
        how = {name: more.pop(name) for name in tuple(more) if name in MEASURED}
        self.check_names((name for name in more if name not in GIVEN), (*MEASURED, *GIVEN))
        captured = self.capture(text=text, **more)
        return captured.measure(layer, map, **how)

    def mean_jacobian(
        self,
        prompts: Sequence[Any] | str,
        layers: Sequence[int] | None = None,
        to: int | Literal["final"] = "final",
        *,
        positions: slice | Sequence[int] = POSITIONS,
        n: int | None = PROMPT,
        path: str | Path | None = None,
    ) -> Lens:
        """The Jacobian lens: the mean Jacobian from what leaves a layer to what leaves a later one, over prompts and positions.

        Args:
            prompts: Texts, lists of token ids, or windows of a text.
            layers: Where the Jacobians begin, at what leaves these; by default all before the end.
            to: Where they end: "final" for the last block, before the final norm, or a layer.
            positions: Tokens that count; by default all but the first 16, which are sinks, and the last.
            n: How many tokens of a prompt are taken; None for all.
            path: A safetensors file that is written after every prompt. Prompts that it has already are not run again.

        Returns:
            A `Lens`. Prompts too short for the positions, or whose Jacobian is not finite, are named in `left_out`.
        """
        return mean_jacobian(self, prompts, layers, to, positions, n, path)

    def _window(self, ids: Ids | str, mask: Sequence[bool] | Tensor | None = None) -> Window:
        if isinstance(ids, Window):
            return ids
        if isinstance(ids, str):
            return self.text(ids).window()
        return self._of_ids(whole_numbers(ids), padding_flags(mask))

    def _of_ids(self, ids: list[int], mask: list[bool] | None) -> Window:
        """Ids that the model has, in the tokenizer's words."""
        self._check_ids(ids, mask)
        try:
            tokenizer = None if self.tokenizer_source is None else self.tokenizer
        except BadInputError:
            tokenizer = None
        return of_ids(ids, tokenizer, mask)

    def _of_window(self, window: Window) -> ModelInput:
        self._check_ids(window.ids, window.mask)
        ids = torch.tensor([window.ids])
        if "input_ids" not in self.takes:
            raise BadInputError(
                f"expected a model that takes token ids, got {type(self.module).__name__}; pass its inputs by name, as in "
                "pixel_values=…"
            )
        kwargs: dict[str, Any] = {"input_ids": ids}
        if "attention_mask" in self.takes:
            kwargs["attention_mask"] = torch.ones_like(ids) if window.mask is None else torch.tensor([window.mask]).long()
        elif window.mask is not None and not all(window.mask):
            raise BadInputError(f"expected a model that takes a padding mask, got {type(self.module).__name__}; leave mask out")
        return self._sample(*self.fitted(kwargs), window)

    @functools.cached_property
    def takes(self) -> tuple[str, ...]:
        """The names that the module's `forward` lists."""
        signature = inspect.signature(self.module.forward).parameters.values()
        return tuple(p.name for p in signature if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))

    def fitted(self, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's own arguments, in order and by name: where the model is, in its precision, and without a cache."""
        if isinstance(inputs, Mapping):
            args, kwargs = (), dict(inputs)
        else:
            fix = "pass a tensor, a list of them or a dictionary"
            args, kwargs = (inputs,) if isinstance(inputs, Tensor) else tuple(items(inputs, "the module's inputs", fix)), {}
        for t in (*args, *kwargs.values()):
            check_dense(t, "the inputs")
        kind = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

        fitted = {
            id(t): t.to(self.device, kind if t.is_floating_point() else t.dtype) for t in distinct((*args, *kwargs.values()))
        }

        def fit(t: Any) -> Any:  # what is given twice stays one tensor
            return fitted.get(id(t), t)

        args, kwargs = tuple(fit(a) for a in args), {k: fit(v) for k, v in kwargs.items()}
        if isinstance(self.module, nn.MultiheadAttention) and len(args) == 1:
            args = args * 3  # self-attention: the tokens are queries, keys and values
        return args, kwargs | {"use_cache": False} if "use_cache" in self.takes else kwargs

    def _of_inputs(self, inputs: Inputs) -> list[ModelInput]:
        """One sample for every row of `input_ids`, or one of all."""
        args, kwargs = self.fitted(inputs)
        ids = kwargs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            return [self._sample(args, kwargs, Window((), ()))]
        samples = []
        for row in range(len(ids)):
            one = {
                k: v[row : row + 1] if isinstance(v, Tensor) and v.shape[:1] == ids.shape[:1] else v for k, v in kwargs.items()
            }
            mask = one.get("attention_mask")
            flags = padding_flags(mask) if isinstance(mask, Tensor) and mask.ndim == 2 else None
            samples.append(self._sample(args, one, self._of_ids(whole_numbers(one["input_ids"]), flags)))
        return samples

    def check_names(self, names: Iterable[str], beside: Sequence[str] = ()) -> None:
        """Refuse a name that the module does not list; one that lists none, as a wrapper does, takes any.

        beside: names that mean something else here, one of which may have been meant.
        """
        unknown = [name for name in names if self.takes and name not in self.takes]
        if unknown:
            raise BadInputError(
                f"expected inputs that {type(self.module).__name__} takes ({', '.join(self.takes)}), got {shown(unknown[0])}; "
                f"{meant(unknown[0], (*beside, *self.takes))}"
            )

    def _sample(self, args: tuple[Any, ...], kwargs: dict[str, Any], window: Window) -> ModelInput:
        sample = ModelInput(self.name, self.module, args, kwargs, window, self.dtype, self.recordings)
        with runs(type(self.module).__name__):
            try:
                _ = sample.layers
            except IndexError:
                raise BadInputError(
                    f"expected ids within the vocabulary and no more tokens than {self.name} has positions, got {len(window)}; "
                    "give fewer tokens"
                ) from None
        return sample

    def check_vocabulary(self, ids: Sequence[int]) -> None:
        """Refuse ids that the model does not have."""
        size = getattr(getattr(self.module, "config", None), "vocab_size", None)
        outside = [i for i in ids if i < 0 or (isinstance(size, int) and i >= size)]
        if outside:
            raise BadInputError(
                f"expected token ids from 0 to {size - 1 if size else '…'}, got {outside[0]}; use the model's own tokenizer"
            )

    def _check_ids(self, ids: Sequence[int], mask: Sequence[bool] | None) -> None:
        if not ids:
            raise BadInputError("expected at least one token id, got none; pass a list of whole numbers")
        if mask is not None and len(mask) != len(ids):
            raise BadInputError(f"expected a mask of {len(ids)} entries, one per id, got {len(mask)}; match their lengths")
        if mask is not None and not any(mask):
            raise BadInputError("expected a token that is not padding, got a mask without one; leave the mask out")
        self.check_vocabulary(ids)
        limit = getattr(getattr(self.module, "config", None), "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < len(ids):
            raise BadInputError(
                f"expected at most {limit} tokens, the positions {self.name} has, got {len(ids)}; pass n={limit}"
            )
