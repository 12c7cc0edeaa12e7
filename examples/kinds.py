"""Which kind of attention is smoothest once it is trained? python examples/kinds.py [--seeds N] [--workers N] [--out FILE]

Small models of characters learn *Alice in Wonderland*, one for each kind of attention, all with the same budget: a fifth of the
characters of a passage is hidden and told from the others. Nothing is causal, so that every kind has a form. Then, on text held
back: the loss, the constants of the attention layers and of the whole model, how far an attack on the embeddings raises the
loss, and the time of a step.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth import kinds
from howsmooth.kernels import Scores, plain_attention
from howsmooth.study import alice

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 64, 4, 2, 32, 32
STEPS, RATE, HIDDEN = 600, 4e-3, 0.2
TESTED, MEASURED = 64, 8  # passages for the loss and the attack, and for the constants
RADII = (0.05, 0.1)  # of an attack, in parts of the length of all embeddings of a passage
QUICK = {"steps": 3, "tested": 2}
KINDS: dict[str, kinds.Kind] = {
    "softmax": kinds.Softmax(),
    "sigmoid": kinds.Sigmoid(),
    "l2": kinds.L2(),
    "cosine": kinds.Cosine(),
    "linear": kinds.Linear(),
    "sinkhorn": kinds.Sinkhorn(),
    "differential": kinds.Differential(0.2, epsilon=1e-5, factor=0.8),  # as its paper starts its first layer
}


class SelfAttention(nn.Module):
    """Attention of any kind at the scale that its source has."""

    def __init__(self, kind: kinds.Kind):
        super().__init__()
        self.kind, self.scale = kind, kind.scale(WIDTH // HEADS // kind.parts)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = HEADS * self.kind.parts
        q, k, v = (
            side(x).unflatten(-1, (count, -1)).transpose(-3, -2)
            for side, count in ((self.q, heads), (self.k, heads), (self.v, HEADS))
        )
        mixed = plain_attention(q, k, v, Scores(self.scale, kind=self.kind))
        return self.out(mixed.transpose(-3, -2).flatten(-2))

    def as_map(self) -> hs.Attention:
        """The same as a map to be measured."""
        sides = (self.q, self.k, self.v, self.out)
        biases = {f"b_{name}": side.bias.detach() for name, side in zip("qkvo", sides, strict=True)}
        return hs.Attention(*(side.weight.detach() for side in sides), heads=HEADS, kind=self.kind, **biases)


class Block(nn.Module):
    def __init__(self, kind: kinds.Kind):
        super().__init__()
        self.ln_1, self.attention, self.ln_2 = nn.LayerNorm(WIDTH), SelfAttention(kind), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Reader(nn.Module):
    """Characters, some of them hidden → scores of every character at every place."""

    def __init__(self, letters: int, kind: kinds.Kind):
        super().__init__()
        self.letters = nn.Embedding(letters + 1, WIDTH)  # the last is hidden
        angles = torch.arange(LENGTH)[:, None] * 64.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], 1))
        self.blocks = nn.ModuleList(Block(kind) for _ in range(DEPTH))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def embed(self, ids: Tensor) -> Tensor:
        return self.letters(ids) + self.places

    def read(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))

    def forward(self, ids: Tensor) -> Tensor:
        return self.read(self.embed(ids))


def passages(data: Tensor, count: int, letters: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Characters with some hidden, all of them, and where they are hidden."""
    whole = data[torch.randint(len(data) - LENGTH, (count, 1), generator=random) + torch.arange(LENGTH)]
    hidden = torch.rand(whole.shape, generator=random) < HIDDEN
    return whole.masked_fill(hidden, letters), whole, hidden


def losses(scores: Tensor, whole: Tensor, hidden: Tensor) -> Tensor:
    """By passage, the mean loss of its hidden characters, in nats."""
    each = nn.functional.cross_entropy(scores.flatten(0, 1), whole.flatten(), reduction="none").view(whole.shape)
    return (each * hidden).sum(1) / hidden.sum(1).clamp_min(1)


def train(name: str, seed: int, steps: int = STEPS, tested: int = TESTED) -> dict[str, Any]:
    """One model and how it does."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text, random = alice(), torch.Generator().manual_seed(seed)
    code = {letter: i for i, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([code[letter] for letter in text])
    shown, kept = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]
    model = Reader(len(code), KINDS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    begun = time.process_time()
    for _ in range(steps):
        ids, whole, hidden = passages(shown, BATCH, len(code), random)
        loss = losses(model(ids), whole, hidden).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    step = (time.process_time() - begun) / steps
    model.eval().requires_grad_(False)
    ids, whole, hidden = passages(kept, tested, len(code), torch.Generator().manual_seed(1))  # the same for all models
    x = model.embed(ids)
    clean = losses(model.read(x), whole, hidden)
    layers = constants(model, x[:MEASURED])
    return {
        "kind": name,
        "seed": seed,
        "loss": float(clean.mean()),
        "mean_L": [statistics.fmean(values) for values in layers],
        "largest_L": [max(values) for values in layers],
        "model_L": float(hs.lipschitz_batch(model.read, x[:MEASURED], tol=1e-2).value.mean()),
        "raised": [float((attacked(model, x, whole, hidden, radius) - clean).mean()) for radius in RADII],
        "step": step,
    }


def constants(model: Reader, x: Tensor) -> list[list[float]]:
    """By layer, the constant of its attention at every passage."""
    found = []
    for block in model.blocks:
        assert isinstance(block, Block)
        tokens = block.ln_1(x)
        found.append(hs.lipschitz_batch(block.attention.as_map(), tokens).value.tolist())
        x = block(x)
    return found


def attacked(model: Reader, x: Tensor, whole: Tensor, hidden: Tensor, radius: float, steps: int = 15) -> Tensor:
    """The largest losses found with embeddings moved by a part of their length: projected gradient ascent, Frobenius norm."""
    far = radius * x.flatten(1).norm(dim=1)[:, None, None]
    change, most = torch.zeros_like(x), torch.zeros(len(x))
    for _ in range(steps + 1):
        change.requires_grad_()
        loss = losses(model.read(x + change), whole, hidden)
        (slope,) = torch.autograd.grad(loss.sum(), change)
        most = torch.maximum(most, loss.detach())
        change = change.detach() + far / 4 * slope / slope.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None]
        change = change * (far / change.flatten(1).norm(dim=1)[:, None, None].clamp_min(1e-12)).clamp_max(1.0)
    return most


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and the standard deviation of the loss."""
    rows = []
    for name in KINDS:
        own = [r for r in runs if r["kind"] == name]
        if not own:
            continue
        softmax = {r["seed"]: r["step"] for r in runs if r["kind"] == "softmax"}
        rows.append(
            {
                "kind": name,
                "seeds": len(own),
                "loss": statistics.fmean(r["loss"] for r in own),
                "loss_deviation": statistics.stdev([r["loss"] for r in own]) if len(own) > 1 else None,
                "mean_L": [statistics.fmean(r["mean_L"][k] for r in own) for k in range(DEPTH)],
                "largest_L": [max(r["largest_L"][k] for r in own) for k in range(DEPTH)],
                "model_L": statistics.fmean(r["model_L"] for r in own),
                **{f"raised at {p:g}": statistics.fmean(r["raised"][i] for r in own) for i, p in enumerate(RADII)},
                "step": statistics.fmean(r["step"] for r in own),
                "step_over_softmax": statistics.fmean(r["step"] / softmax[r["seed"]] for r in own if r["seed"] in softmax),
            }
        )
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The loss, clean and attacked, against the constants: of attention, and of the whole model."""
    from matplotlib.figure import Figure

    from howsmooth.report import COLOURS, MARKERS, figure_style, plain_numbers

    with figure_style():
        figure = Figure(figsize=(7.6, 2.8), layout="constrained")
        panels = figure.subplots(1, 3)
        for k, row in enumerate(rows):
            look = {"color": COLOURS[k], "marker": MARKERS[k], "ls": "", "ms": 5, "label": row["kind"]}
            attention = max(row["mean_L"])
            panels[0].plot([attention], [row["loss"]], **look)
            panels[1].plot([attention], [row[f"raised at {RADII[0]:g}"]], **look)
            panels[2].plot([row["model_L"]], [row[f"raised at {RADII[0]:g}"]], **look)
        for axes, across in zip(panels, ("L of attention", "L of attention", "L of the model"), strict=True):
            axes.set(xscale="log", xlabel=across)
            plain_numbers(axes.xaxis)
        panels[0].set(ylabel="loss, nats a character")
        for axes in panels[1:]:
            axes.set(ylabel=f"loss added by an attack of {100 * RADII[0]:g} %")
        panels[2].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed and a few steps, in this process: seconds")
    parser.add_argument("--out", type=Path, default=Path("kinds.json"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--raw", type=Path, help="runs as they end, one a line; those that are there are not run again")
    asked = parser.parse_args()
    raw = asked.raw or asked.out.with_suffix(".jsonl")
    done = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    known = {(r["kind"], r["seed"]) for r in done}
    jobs = [(name, seed) for seed in range(1 if asked.quick else asked.seeds) for name in KINDS if (name, seed) not in known]
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool, raw.open("a") as file:
        small = (train(name, seed, **QUICK) for name, seed in jobs)
        for run in small if asked.quick else pool.map(train, *zip(*jobs, strict=True)) if jobs else ():
            file.write(json.dumps(run) + "\n")
            file.flush()
            done.append(run)
            values = ", ".join(f"{value:.3g}" for value in run["mean_L"])
            print(f"{run['kind']}, seed {run['seed']}: loss {run['loss']:.3f}, L {values}, raised {run['raised']}", flush=True)
    rows = summary(done)
    asked.out.write_text(json.dumps({"radii": RADII, "steps": STEPS, "rows": rows}, indent=1) + "\n")
    if asked.figure is not None:
        draw(rows, asked.figure)
