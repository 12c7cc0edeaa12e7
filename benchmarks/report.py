"""`howsmooth report` on the CPU: a rotary model of 30 layers and 135 M parameters with random weights, from a folder."""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from howsmooth.cli.options import SweepOptions
from howsmooth.report.assemble import inspect_into
from howsmooth.study import alice
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Scope, settle

TITLE = "A report on the CPU (576 wide, 9 heads of 64, 3 key/value heads, MLP 1536)"


def run(quick: bool) -> list[dict[str, Any]]:
    layers, lengths, samples = (2, (16, 64, 256), 1) if quick else (30, (16, 64, 256, 1024), 2)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model", rotary(layers, max(lengths)))
        return [measured(f"{folder}/model", f"{folder}/report", lengths, samples, "cpu")]


def measured(model: str, out: str, lengths: tuple[int, ...], samples: int, device: str) -> dict[str, Any]:
    """What the command does, timed: seconds by kind of row, failures, the size of the page, seconds."""
    start = time.perf_counter()
    reader = Reader.by_name(model, device=device)
    setting = settle(reader, Scope(lengths, samples))
    engine = SweepOptions(device=device).engine_for(reader.model)
    report, page = inspect_into(reader, setting, out, "howsmooth report", engine=engine)
    seconds = time.perf_counter() - start
    parts = Counter[str]()  # by kind of row, all workers together
    for row in report.rows:
        parts[f"{row.kind} s"] += row.to_dict()["seconds"]
    row = {"layers": len(setting.layers), "lengths": len(lengths), "samples": samples, "workers": engine.name, **parts}
    return row | {"failures": len(report.failures), "page MB": page.stat().st_size / 1e6, "seconds": seconds}


def rotary(layers: int, n: int) -> Any:
    """The model, whose weights are random."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=n,
        vocab_size=49_152,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaModel(config).eval()


def save(folder: Path, model: Any) -> None:
    """A model, and a tokenizer that was trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([alice()], trainers.BpeTrainer(vocab_size=1000, special_tokens=["<s>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    model.save_pretrained(folder)
