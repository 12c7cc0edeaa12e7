"""What the experiments look at: pretrained models and random ones of full size, masked or not, on windows of a text.

A subject is a name, so that a task can be written down: `demo`, a folder or a hub name for pretrained weights,
`random:bert-base` and `random:gpt2` for the configurations that transformers gives these models, with fresh weights and only
the layers needed.
"""

import functools
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.models import Capture, FallbackWarning, Model, Text, load
from howsmooth.study import read_text

Masking = Literal["masked", "unmasked"]
RANDOM = ("random:bert-base", "random:gpt2")
RANDOM_LAYERS = (0, 6)
LONGEST_WINDOW = 98  # window of the paper's growth curves; weights are read at one of that length


@final
@dataclass(frozen=True, eq=False)
class Subject:
    """A model that is masked or not, and the text as it reads it."""

    name: str
    masking: Masking
    model: Model
    text: Text

    @property
    def shortest(self) -> int:
        """The least number of tokens of a window."""
        return max(2, 1 + len(self.text.prefix) + len(self.text.suffix))

    @property
    def longest(self) -> int:
        """The most tokens that the model has positions and the text has words for."""
        positions = getattr(getattr(self.model.module, "config", None), "max_position_embeddings", None)
        return min(positions, len(self.text)) if isinstance(positions, int) and positions > 0 else len(self.text)

    def capture(self, n: int, sample: int, seed: int) -> Capture:
        """The model at sample number `sample` of `n` tokens; the same whatever the number of samples."""
        return self.model.capture(ids=self.text.windows(n, sample + 1, seed)[sample])

    def attention(self, layer: int) -> Attention:
        """The weights of a layer, from which bad tokens are built and which take any number of them; measuring needs none."""
        # weights are read off as many unit vectors at a time as there are tokens
        attn = self.capture(min(LONGEST_WINDOW, self.longest), 0, 0).attention(layer).to(torch.float32)
        if attn.bias is not None:
            said = f"got layer {layer} with a bias for some"
            raise BadInputError(f"expected a layer for any number of tokens, {said}; leave it out")
        return attn

    @property
    def whole_modules(self) -> list[nn.Module]:
        """Attention with residual and LayerNorm, layer by layer; only BERT has that as a module."""
        return [module for module in self.model.module.modules() if type(module).__name__ == "BertAttention"]

    @property
    def is_masked(self) -> bool:
        """Whether now, in the last layer, the first token of a sequence ignores a later one."""
        ids = list(self.text.windows(max(8, self.shortest), 1, 0)[0].ids)
        other = list(ids)
        other[-2] = next(i for i in self.text.ids if i != ids[-2])
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FallbackWarning)
            captures = [self.model.capture(ids=i) for i in (ids, other)]
            first, second = (last(last.start)[0] for last in (c.map(c.num_layers - 1) for c in captures))
        return torch.allclose(first, second, rtol=0, atol=1e-5 * float(first.abs().max()))

    def mask(self, masking: Masking) -> None:
        """Turn the switches by which transformers builds masks: encoders look at one of them, decoders at the other."""
        config: Any = self.model.module.config
        config.is_decoder = config.is_causal = masking == "masked"
        for part in self.model.module.modules():
            if isinstance(getattr(part, "is_causal", None), bool):
                setattr(part, "is_causal", masking == "masked")  # noqa: B010, no attribute that torch declares


@final
@dataclass(frozen=True)
class Description:
    """What a plan has to know of a pretrained model: its layers, the lengths it reads, and how it can be masked.

    maskings: its own, and masked where it can be: the paper's BERT is measured both ways.  plain: whether its weights are those
    of a plain layer, so that tokens can be built from them.  whole_module: whether it has BERT's modules.
    """

    layers: int
    shortest: int
    longest: int
    maskings: tuple[Masking, ...]
    plain: bool
    whole_module: bool


@functools.lru_cache(maxsize=2)
def subject(
    name: str, masking: Masking, seed: int, device: str = "cpu", passage: str | None = None, digest: str | None = None
) -> Subject:
    """The subject of a task, kept for the next one.

    seed: of random weights.  device: as for `load`.  passage: a text file.  digest: of what is in it, so that tasks on another
    text are others.
    """
    words = read_text(passage)
    if name in RANDOM:
        # embeddings of a random model are independent draws, so of the ids only the repetitions matter: any tokenizer will do
        model, tokens = load(_random(name, masking, seed), device), load("demo").text(words)
        tokens = tokens if name == "random:bert-base" else replace(tokens, prefix=(), suffix=())  # GPT-2 has no special tokens
    elif name.startswith("random:"):
        raise BadInputError(f"expected {' or '.join(RANDOM)}, got {name!r}; pick one of them")
    else:
        model = load(name, device)
        tokens = model.text(words)
    whole = Subject(name, masking, model, tokens)
    if whole.is_masked != (masking == "masked"):
        whole.mask(masking)
        if whole.is_masked != (masking == "masked"):
            raise BadInputError(f"expected a model that can be {masking}, got {name}, whose configuration cannot; leave it out")
    return whole


@functools.lru_cache(maxsize=16)
def describe(name: str, passage: str | None = None) -> Description:
    """A pretrained model as a plan sees it. passage: the text file that it reads."""
    model = load(name)
    whole = Subject(name, "unmasked", model, model.text(read_text(passage)))
    layers, own = whole.capture(max(8, whole.shortest), 0, 0).num_layers, whole.is_masked
    try:
        whole.attention(0)
        plain = True
    except BadInputError:
        plain = False
    whole.mask("masked")  # the last thing that this copy of the model is for
    maskings: list[Masking] = ["masked" if masked else "unmasked" for masked in dict.fromkeys((own, whole.is_masked))]
    return Description(layers, whole.shortest, whole.longest, tuple(maskings), plain, bool(whole.whole_modules))


def _random(name: str, masking: Masking, seed: int) -> nn.Module:
    """A fresh model from the library's configuration: width 768, 12 heads, dropout off."""
    from transformers import AutoModel, BertConfig, GPT2Config

    count, masked = max(RANDOM_LAYERS) + 1, masking == "masked"
    bert = name == "random:bert-base"
    config: Any = BertConfig(num_hidden_layers=count, is_decoder=masked) if bert else GPT2Config(n_layer=count)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModel.from_config(config).eval()


def length_of(x: Tensor) -> float:
    """R, the root mean square norm of the tokens."""
    return float(x.double().square().sum(-1).mean().sqrt())


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Names for legends: of folders and hub names the last part, where no other has the same.

    >>> short_names(["models/mine", "org/bert", "mine", "random:gpt2"])
    {'models/mine': 'models/mine', 'org/bert': 'bert', 'mine': 'mine', 'random:gpt2': 'random:gpt2'}
    """
    names = list(dict.fromkeys(names))
    last = {name: PurePath(name).name or name for name in names}
    counts = Counter(last.values())
    return {name: last[name] if counts[last[name]] == 1 else name for name in names}
