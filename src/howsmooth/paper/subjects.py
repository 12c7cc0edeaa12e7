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
from torch import nn

from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.models import Capture, FallbackWarning, Model, Text, Window, load
from howsmooth.study import read_text

Masking = Literal["masked", "unmasked"]
RANDOM = ("random:bert-base", "random:gpt2")
RANDOM_LAYERS = (0, 6)
LONGEST = 98  # window of the paper's growth curves; weights are read at one of that length


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

    def window(self, n: int, sample: int, seed: int) -> Window:
        """Sample number `sample` of `n` tokens; the same whatever the number of samples."""
        return self.text.windows(n, sample + 1, seed)[sample]

    def capture(self, n: int, sample: int, seed: int) -> Capture:
        return self.model.capture(ids=self.window(n, sample, seed))

    @property
    def whole_modules(self) -> list[nn.Module]:
        """Attention with residual and LayerNorm, layer by layer; only BERT has that as a module."""
        return [module for module in self.model.module.modules() if type(module).__name__ == "BertAttention"]


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
def subject(name: str, masking: Masking, seed: int, device: str = "cpu", passage: str | None = None) -> Subject:
    """The subject of a task, kept for the next one. seed: of random weights.  device: as for `load`.  passage: a text file."""
    if name in RANDOM:
        # embeddings of a random model are independent draws, so of the ids only the repetitions matter: any tokenizer will do
        model, text = load(_random(name, masking, seed), device), load("demo").text(read_text(passage))
        text = text if name == "random:bert-base" else replace(text, prefix=(), suffix=())  # GPT-2 has no special tokens
    elif name.startswith("random:"):
        raise BadInputError(f"expected {' or '.join(RANDOM)}, got {name!r}; pick one of them")
    else:
        model = load(name, device)
        text = model.text(read_text(passage))
    whole = Subject(name, masking, model, text)
    if _masking(whole) != masking:
        _set_masking(model.module, masking)
        if _masking(whole) != masking:
            raise BadInputError(f"expected a model that can be {masking}, got {name}, whose configuration cannot; leave it out")
    return whole


@functools.lru_cache(maxsize=16)
def describe(name: str, passage: str | None = None) -> Description:
    """A pretrained model as a plan sees it. passage: the text file that it reads."""
    model = load(name)
    whole = Subject(name, "unmasked", model, model.text(read_text(passage)))
    layers, own = whole.capture(max(8, whole.shortest), 0, 0).num_layers, _masking(whole)
    try:
        attention_of(whole, 0)
        plain = True
    except BadInputError:
        plain = False
    _set_masking(model.module, "masked")  # the last thing that this copy is for of the model
    maskings = tuple(dict.fromkeys((own, _masking(whole))))
    return Description(layers, whole.shortest, whole.longest, maskings, plain, bool(whole.whole_modules))


def _random(name: str, masking: Masking, seed: int) -> nn.Module:
    """A fresh model from the library's configuration: width 768, 12 heads, dropout off."""
    from transformers import AutoModel, BertConfig, GPT2Config

    count, masked = max(RANDOM_LAYERS) + 1, masking == "masked"
    bert = name == "random:bert-base"
    config: Any = BertConfig(num_hidden_layers=count, is_decoder=masked) if bert else GPT2Config(n_layer=count)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModel.from_config(config).eval()


def _masking(whole: Subject) -> Masking:
    """As it is now: whether in the last layer the first token of a sequence ignores a later one."""
    ids = list(whole.window(max(8, whole.shortest), 0, 0).ids)
    other = list(ids)
    other[-2] = next(i for i in whole.text.ids if i != ids[-2])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FallbackWarning)
        captures = [whole.model.capture(ids=i) for i in (ids, other)]
        first, second = (last(last.start)[0] for last in (c.map(c.num_layers - 1) for c in captures))
    return "masked" if torch.allclose(first, second, rtol=0, atol=1e-5 * float(first.abs().max())) else "unmasked"


def _set_masking(module: nn.Module, masking: Masking) -> None:
    """The switches by which transformers builds masks: encoders look at one of them, decoders at the other."""
    config: Any = module.config
    config.is_decoder = config.is_causal = masking == "masked"
    for part in module.modules():
        if isinstance(getattr(part, "is_causal", None), bool):
            setattr(part, "is_causal", masking == "masked")  # noqa: B010, no attribute that torch declares


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Names for legends: of folders and hub names the last part, where no other has the same.

    >>> short_names(["models/mine", "org/bert", "mine", "random:gpt2"])
    {'models/mine': 'models/mine', 'org/bert': 'bert', 'mine': 'mine', 'random:gpt2': 'random:gpt2'}
    """
    names = list(dict.fromkeys(names))
    last = {name: PurePath(name).name or name for name in names}
    counts = Counter(last.values())
    return {name: last[name] if counts[last[name]] == 1 else name for name in names}


def attention_of(whole: Subject, layer: int) -> Attention:
    """The weights of a layer, from which bad tokens are built and which take any number of them; measuring needs none."""
    # weights are read off as many unit vectors at a time as there are tokens
    attn = whole.capture(min(LONGEST, whole.longest), 0, 0).attention(layer).to(torch.float32)
    if attn.bias is not None:
        raise BadInputError(f"expected a layer for any number of tokens, got layer {layer} with a bias for some; leave it out")
    return attn
