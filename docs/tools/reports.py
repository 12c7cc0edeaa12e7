"""Make the live reports of the site, `docs/live/*.html`, again: `python docs/tools/reports.py`."""

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaModel

import howsmooth as hs

LIVE = Path(__file__).parents[1] / "live"


def llama() -> hs.Model:
    """A random Llama of four layers: rotary phases, grouped keys, RMSNorm, a causal mask. It reads the demo's tokens."""
    demo = hs.load("demo", device="cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30522,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    return hs.load(LlamaModel(config).eval(), tokenizer=demo.tokenizer)


def make(name: str, model: hs.Model | str, lengths: list[int]) -> Path:
    """One page, without the figures and tables beside it."""
    report = hs.inspect(model, lengths=lengths, samples=4)
    with tempfile.TemporaryDirectory() as folder:
        page = report.save(Path(folder) / name, figures=False)
        LIVE.mkdir(exist_ok=True)
        return Path(shutil.copy(page, LIVE / f"{name}.html"))


if __name__ == "__main__":
    for made in (make("demo", "demo", [8, 16, 32, 64, 128, 136, 192]), make("llama", llama(), [8, 16, 32, 64, 128])):
        print(made, f"{made.stat().st_size / 1024:.0f} KiB")
