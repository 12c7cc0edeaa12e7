"""Tiny models that read: random weights, a vocabulary of two dozen words, and a text to cut."""

import random
from pathlib import Path
from typing import Any

import transformers as t

from howsmooth.models import load
from howsmooth.study.reader import Reader
from problems.zoo import randomize

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "see", "what", "it", "was", "that", "made", ",", ".")
POSITIONS = 48
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS))
SHAPE: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": POSITIONS,
}


def bert(seed: int = 0) -> t.BertModel:
    return randomize(t.BertModel(t.BertConfig(**SHAPE)), seed)


def gpt2(seed: int = 0) -> t.GPT2Model:
    config = t.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0)
    return randomize(t.GPT2Model(config), seed)


def ids(count: int = 80, seed: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(5, len(VOCABULARY)) for _ in range(count)]


def text(count: int = 120, seed: int = 0) -> str:
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) for _ in range(count))


def reader(module: Any = None, seed: int = 0) -> Reader:
    """A model in memory that reads token ids."""
    return Reader.of(load(bert(seed) if module is None else module), ids())


def save(folder: Path, module: t.PreTrainedModel | None = None) -> Path:
    """A model folder with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    (module or bert()).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))  # pyright: ignore[reportAttributeAccessIssue]
    t.PreTrainedTokenizerFast(
        tokenizer_object=words, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    return folder
