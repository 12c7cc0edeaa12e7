"""Language models on a GPU from a module to a number: layers of true shapes with random bf16 weights, two layers deep.

Before anything is timed, the same layer is measured in float64 on a short input, and the two must agree.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import howsmooth as hs
from benchmarks.harness import agree
from benchmarks.layers import gpt2_layer

TITLE = "Layers of language models on a GPU (bf16 weights, causal)"
SHAPES = {
    "Llama-3-8B": {"hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128},
    "Llama-3.2-1B": {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64},
}
ROWS = [
    ("Llama-3.2-1B", "attention", 8192),
    ("Llama-3.2-1B", "attention", 32_768),
    ("Llama-3-8B", "attention", 8192),
    ("Llama-3-8B", "attention", 16_384),
    ("Llama-3-8B", "attention", 32_768),
    ("Llama-3-8B", "block", 8192),
    ("Llama-3-8B", "block", 16_384),
    ("Llama-3-8B", "block", 32_768),
    ("GPT-2 layer", "attention", 131_072),
    ("Llama-3.2-1B", "attention", 131_072),
    ("Llama-3-8B", "attention", 131_072),
]


def run(quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape, map, n in ROWS[:1] if quick else ROWS:
        if shape in SHAPES and not any(row["shape"] == shape for row in rows):
            _check(shape)
        row = {"shape": shape, "map": map, "n": n} | (_model(shape, map, n) if shape in SHAPES else _layer(n))
        before = next((r for r in reversed(rows) if (r["shape"], r["map"]) == (shape, map)), None)
        doublings = math.log2(n / before["n"]) if before else 0.0
        row["GiB per doubling"] = (row["peak GiB"] / before["peak GiB"]) ** (1 / doublings) if before else "–"
        rows.append(row)
        print(row, flush=True)
    return rows


def module(shape: str, n: int, layers: int = 2, vocabulary: int = 1024) -> nn.Module:
    """A Llama of a true shape with random weights, built where it is measured."""
    from transformers import LlamaConfig, LlamaModel

    options: dict[str, Any] = dict(SHAPES[shape])
    config = LlamaConfig(
        **options,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=vocabulary,
        max_position_embeddings=n,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaModel(config).eval()
    finally:
        torch.set_default_dtype(before)


def ids(n: int) -> torch.Tensor:
    return torch.randint(0, 1024, (1, n), generator=torch.Generator().manual_seed(n))


def _check(shape: str) -> None:
    own = module(shape, 1024)
    found = hs.load(own).measure(ids=ids(1024), layer=1)
    truth = hs.load(own.double()).measure(ids=ids(1024), layer=1, tol=1e-5)
    agree(f"{shape}, n = 1024", found.value, truth.value, 1e-3)
    agree(f"{shape}, upper end", max(found.upper, truth.value), found.upper, 0.0)


def _model(shape: str, map: Any, n: int) -> dict[str, Any]:
    model = hs.load(module(shape, n))

    def measure() -> tuple[hs.Estimate, bool]:
        found = model.capture(ids=ids(n)).measure(1, map)
        return found.estimate, found.cut

    first = _timed(measure)  # may compile
    return first if n > 32_768 else _timed(measure) | {"first s": first["first s"]}


def _layer(n: int) -> dict[str, Any]:
    layer, x = gpt2_layer(n, causal=True)
    layer, x = layer.to("cuda", torch.float32), x.cuda()
    first = _timed(lambda: (hs.lipschitz(layer, x), True))
    return _timed(lambda: (hs.lipschitz(layer, x), True)) | {"first s": first["first s"]}


def _timed(measure: Callable[[], tuple[hs.Estimate, bool]]) -> dict[str, Any]:
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found, cut = measure()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "first s": seconds,
        "steps": found.steps,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "L": found.value,
        "upper/lower": found.upper / found.lower,
        "noise": found.noise,
        "lower in": found.precision,
        "cut": cut,
    }
