"""Language models on a GPU from a module to a number: layers of true shapes with random bf16 weights, two layers deep.

Before anything is timed, the same layer is measured in float64 on a short input, and the two must agree.
"""

import math
import time
from typing import Any

import torch
from torch import nn

import howsmooth as hs
from benchmarks.harness import agree
from benchmarks.layers import gpt2_layer

TITLE = "Layers of language models on a GPU (bf16 weights, causal)"
SHAPES: dict[str, dict[str, int]] = {
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
        if shape not in SHAPES:
            row = _layer(n)
        else:
            if not any(row["shape"] == shape for row in rows):
                _check(shape)
            row = _row(shape, map, n)
        before = next((r for r in reversed(rows) if (r["shape"], r["map"]) == (shape, map)), None)
        doublings = math.log2(n / before["n"]) if before else 0.0
        row["GiB per doubling"] = (row["peak GiB"] / before["peak GiB"]) ** (1 / doublings) if before else "–"
        rows.append(row)
        print(row, flush=True)
    return rows


def module(shape: str, n: int, layers: int = 2, vocabulary: int = 1024) -> nn.Module:
    """A Llama of a true shape with random weights, built where it is measured."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        **SHAPES[shape],
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


def _row(shape: str, map: Any, n: int) -> dict[str, Any]:
    model = hs.load(module(shape, n))
    times = []
    for _ in range(2 if n <= 32_768 else 1):  # the first may compile
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        captured = model.capture(ids=ids(n))
        torch.cuda.synchronize()
        ran = time.perf_counter() - start
        found = captured.measure(1, map)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return _told(shape, map, n, found.estimate, times) | {"run s": ran, "cut": found.cut}


def _layer(n: int) -> dict[str, Any]:
    layer, x = gpt2_layer(n, causal=True)
    layer, x = layer.to("cuda", torch.float32), x.cuda()
    hs.lipschitz(layer, x[:4096])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    found = hs.lipschitz(layer, x)
    torch.cuda.synchronize()
    return _told("GPT-2 layer", "attention", n, found, [time.perf_counter() - start]) | {"run s": 0.0, "cut": True}


def _told(shape: str, map: str, n: int, found: hs.Estimate, times: list[float]) -> dict[str, Any]:
    return {
        "shape": shape,
        "map": map,
        "n": n,
        "seconds": times[-1],
        "first s": times[0],
        "steps": found.steps,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "L": found.value,
        "upper/lower": found.upper / found.lower,
        "noise": found.noise,
        "lower in": found.precision,
    }
