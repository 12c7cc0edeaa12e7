"""What it costs on a GPU to follow, or to penalise, the constants of a model of GPT-2's size that trains."""

from typing import Any

import torch

from benchmarks.training import gpt2, timed

TITLE = "Training on a GPU: update() every 10 steps, and a step with the penalty, against plain steps"


def run(quick: bool) -> list[dict[str, Any]]:
    torch.set_float32_matmul_precision("high")  # as scripts that train on a GPU do
    return [timed(gpt2("GPT-2, 124 M", {}, 8, 1024, probe, "cuda"), quick) for probe in (1024, 256)]
