"""A Hessian-vector product of a Llama block at long context, in O(n) memory: python examples/hessian.py [n]"""

import sys
import time

import torch
from torch.func import grad, jvp
from transformers import LlamaConfig, LlamaModel

import howsmooth as hs

device = "cuda" if torch.cuda.is_available() else "cpu"
n = int(sys.argv[1]) if len(sys.argv) > 1 else 32_768 if device == "cuda" else 512

config = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
    max_position_embeddings=n, vocab_size=100,
)  # fmt: skip
torch.manual_seed(0)
dtype = torch.bfloat16 if device == "cuda" else torch.float32
model = hs.patch(LlamaModel(config).eval().to(device, dtype).requires_grad_(False))
x, v = (torch.randn(1, n, config.hidden_size, device=device, dtype=dtype) for _ in range(2))


def energy(x):
    return model(inputs_embeds=x, use_cache=False).last_hidden_state.float().square().mean()


def wait():
    if device == "cuda":
        torch.cuda.synchronize()


for attempt in ("first", "again"):
    wait()
    start = time.perf_counter()
    _, product = jvp(grad(energy), (x,), (v,))
    wait()
    print(
        f"{attempt}: H v of {n} tokens on {device} in {time.perf_counter() - start:.2f} s, |H v| = {float(product.norm()):.3g}"
    )
if device == "cuda":
    kept = config.num_attention_heads * n * n * 2 / 2**30
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; attention weights alone would take {kept:.0f}")
