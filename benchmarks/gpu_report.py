"""`howsmooth report` on a GPU: a model of Llama-3.2-1B's shape with sixteen layers and random bf16 weights, from a folder."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import module
from howsmooth.study import alice

TITLE = "A report on a GPU (Llama-3.2-1B's shape, 16 layers, lengths 512 … 16384, 4 samples)"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)


def run(quick: bool) -> list[dict[str, Any]]:
    layers, lengths, samples = (2, LENGTHS[:2], 1) if quick else (16, LENGTHS, 4)
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder) / "model", layers)
        command = [sys.executable, "-c", "from howsmooth.cli import main; main()", "report", f"{folder}/model"]
        command += ["--lengths", ",".join(map(str, lengths)), "--samples", str(samples), "--out", f"{folder}/report"]
        start = time.perf_counter()
        subprocess.run([*command, "--device", "cuda", "--no-figures"], check=True)
        seconds = time.perf_counter() - start
        rows = len((Path(folder) / "report" / "measurements.csv").read_text().splitlines()) - 1
        size = (Path(folder) / "report" / "index.html").stat().st_size
    return [
        {"layers": layers, "lengths": len(lengths), "samples": samples, "rows": rows, "page MB": size / 1e6, "seconds": seconds}
    ]


def _save(folder: Path, layers: int) -> None:
    """The model, and a tokenizer that was trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([alice()], trainers.BpeTrainer(vocab_size=1000, special_tokens=["<s>"]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    own = module("Llama-3.2-1B", max(LENGTHS), layers, vocabulary=128_256)
    own.save_pretrained(folder)
    del own
    torch.cuda.empty_cache()
