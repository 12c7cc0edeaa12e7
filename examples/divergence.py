"""Which layer goes first when training diverges, and how early is it seen? python examples/divergence.py [--workers N] [--out FILE]

A small character-level GPT learns *Alice in Wonderland* while its learning rate rises without end: sooner or later every run
diverges. The same model at a steady learning rate is stable. A tracker follows all layers every 10 steps. Thresholds of its
alarms are set on five seeds and tried on ten others.
"""

import argparse
import json
import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth.study import alice

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 128, 4, 4, 64, 32
STEPS, EVERY = 600, 10
RISING, STEADY = 0.08, 0.003  # learning rates: reached at the end of the rise, and held
LEFT = 0.5  # nats above the lowest loss so far, over the last ten steps: the loss has left its course
EARLY = 20  # steps before that
QUANTITIES = {"L": "", "max logit": "max_logit/", "entropy": "entropy/"}


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attention, self.ln_2 = nn.LayerNorm(WIDTH), SelfAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, letters: int):
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.ln, self.head = nn.ModuleList(Block() for _ in range(DEPTH)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def train(seed: int, rising: bool, steps: int = STEPS, tracked: bool = True, peak: float = RISING) -> dict[str, Any]:
    """One run: its losses, what the tracker saw every ten steps, its checks, and the time both took."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = alice()
    code = {letter: i for i, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([code[letter] for letter in text])
    model = GPT(len(code))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    tracker = hs.Tracker(model, data[None, :LENGTH], check_every=10) if tracked else None
    losses, seen, checks, spent = [], [], [], 0.0
    begun = time.perf_counter()
    for step in range(steps):
        rate = peak * (step + 1) / steps if rising else STEADY * min(1.0, (step + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = rate
        start = torch.randint(len(data) - LENGTH - 1, (BATCH, 1))
        batch = data[start + torch.arange(LENGTH + 1)]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if tracker is not None and step % EVERY == 0:
            now = time.perf_counter()
            values = tracker.update(step)
            if "smoothness/upper/layer_00" in values:
                if step:  # the first one starts tracking
                    checks += [[step, k, values[tracker.key(k)], *(values[tracker.key(k, w)] for w in ("upper", "drift"))] for k in range(DEPTH)]
            else:
                spent += (time.perf_counter() - now) * (EVERY * len(seen) + 1 > 0)
            seen.append([step, *([values[f"smoothness/{where}layer_{k:02d}"] for k in range(DEPTH)] for where in QUANTITIES.values())])
        if not math.isfinite(losses[-1]):
            break
    return {"seed": seed, "rising": rising, "losses": losses, "seen": seen, "checks": checks, "update_seconds": spent, "seconds": time.perf_counter() - begun}


def left_at(losses: list[float]) -> int | None:
    """The step at which the loss leaves its course: ten steps in a row end LEFT above the lowest ten so far."""
    lowest = math.inf
    for end in range(10, len(losses) + 1):
        mean = statistics.fmean(losses[end - 10 : end])
        if not mean <= lowest + LEFT:
            return end - 10
        lowest = min(lowest, mean)
    return None
