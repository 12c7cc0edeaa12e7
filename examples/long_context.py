"""A directional derivative of a whole transformer at long context, in O(n) memory: python examples/long_context.py [n]

Eager attention would keep n × n weights for every head and layer; `patch` gives the model fused attention with forward mode.
"""

import sys
import time

import torch
from transformers import LlamaConfig, LlamaModel

import howsmooth as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
n = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384 if device == "cuda" else 512

config = LlamaConfig(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=4,
    max_position_embeddings=n, vocab_size=100,
)  # fmt: skip
torch.manual_seed(0)
model = hs.patch(LlamaModel(config).eval().to(device).requires_grad_(False))
x, v = (torch.randn(1, n, 768, device=device) for _ in range(2))


def f(x):
    return model(inputs_embeds=x, use_cache=False).last_hidden_state


def seconds(run):
    run()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


(y, dy), forward = seconds(lambda: torch.func.jvp(f, (x,), (v,)))
dx, backward = seconds(lambda: torch.func.vjp(f, x)[1](dy)[0])
gap = abs(float((dx * v).sum() / dy.square().sum()) - 1)
print(f"{n} tokens on {device}: J v in {forward:.2f} s, Jᵀ u in {backward:.2f} s; ⟨Jᵀ J v, v⟩ = |J v|² to {gap:.0e}")
if device == "cuda":
    kept = 12 * n * n / 2**28
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; one layer's weights alone would take {kept:.0f}")
