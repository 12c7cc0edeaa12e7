"""`howsmooth report` on a GPU: a model of Llama-3.2-1B's shape with sixteen layers and random bf16 weights, from a folder."""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import module
from howsmooth.cli.options import engine_of
from howsmooth.report.assemble import inspect_into
from howsmooth.study import alice
from howsmooth.study.layers import Question, settle
from howsmooth.study.reader import Reader

TITLE = "A report on a GPU (Llama-3.2-1B's shape, 16 layers, lengths 512 … 16384, 4 samples)"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)


def run(quick: bool) -> list[dict[str, Any]]:
    return [_timed(2, LENGTHS[:2], 1) if quick else _timed(16, LENGTHS, 4)]


def _timed(layers: int, lengths: tuple[int, ...], samples: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder) / "model", layers)
        start = time.perf_counter()
        reader = Reader.by_name(f"{folder}/model", device="cuda")
        setting = settle(reader, Question(tuple(lengths), samples))
        engine = engine_of("local", None, None, reader.model, "cuda")
        report, page = inspect_into(reader, setting, f"{folder}/report", "howsmooth report", engine=engine)
        seconds = time.perf_counter() - start
        parts = Counter[str]()
        for row in report.data.rows:
            parts[f"{row['kind']} s"] += row["seconds"]
        about = {"layers": layers, "lengths": len(lengths), "samples": samples, "workers": engine.name, **parts}
        return about | {"failures": len(report.failures), "page MB": page.stat().st_size / 1e6, "seconds": seconds}


def _save(folder: Path, layers: int) -> None:
    """The model, and a tokenizer that was trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([alice()], trainers.BpeTrainer(vocab_size=1000, special_tokens=["<s>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    own: Any = module("Llama-3.2-1B", max(LENGTHS), layers, vocabulary=128_256)
    own.save_pretrained(folder)
    del own
    torch.cuda.empty_cache()
