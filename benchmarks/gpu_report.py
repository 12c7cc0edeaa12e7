"""`howsmooth report` on a GPU: a model of Llama-3.2-1B's shape with sixteen layers and random bf16 weights, from a folder."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import module
from benchmarks.report import measured, save

TITLE = "A report on a GPU (Llama-3.2-1B's shape, 16 layers, lengths 512 … 16384, 4 samples)"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)


def run(quick: bool) -> list[dict[str, Any]]:
    return [_timed(2, LENGTHS[:2], 1) if quick else _timed(16, LENGTHS, 4)]


def _timed(layers: int, lengths: tuple[int, ...], samples: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model", module("Llama-3.2-1B", max(LENGTHS), layers, vocabulary=128_256))
        torch.cuda.empty_cache()
        return measured(f"{folder}/model", f"{folder}/report", lengths, samples, "cuda")
