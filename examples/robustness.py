"""Does a smoother model withstand attacks better? python examples/robustness.py [--seeds N] [--workers N] [--out FILE]

A small vision transformer on scikit-learn's digits, trained plainly, with weight decay, with spectral normalisation of all its
matrices, with norms on queries and keys, and with a penalty on its local Lipschitz constant at several strengths. Then: clean
accuracy, accuracy under a projected-gradient ℓ2 attack at three radii, and the constants themselves.
"""

import argparse
import json
import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs

WIDTH, HEADS, DEPTH, PATCH = 48, 4, 2, 2
EPOCHS, BATCH, PENALISED, RATE, TESTED = 20, 64, 16, 4e-3, 200
RADII = (0.5, 1.0, 1.5)  # pixels go from 0 to 1, an image has a length of about 4.5
STRENGTHS = (0.03, 0.1, 0.3)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"weight decay {w:g}": {"decay": w} for w in (0.1, 1.0)},
    "spectral norm": {"spectral": True},
    "q/k norm": {"normed": True},
    **{f"penalty {s:g}": {"strength": s} for s in STRENGTHS},
}


class SelfAttention(nn.Module):
    def __init__(self, normed: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        size = WIDTH // HEADS
        self.q_norm, self.k_norm = (nn.RMSNorm(size), nn.RMSNorm(size)) if normed else (nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, normed: bool):
        super().__init__()
        self.ln_1, self.attention, self.ln_2 = nn.LayerNorm(WIDTH), SelfAttention(normed), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """Images (batch, 8, 8) → logits of ten digits."""

    def __init__(self, normed: bool = False):
        super().__init__()
        self.embed, self.places = nn.Linear(PATCH**2, WIDTH), nn.Parameter(0.02 * torch.randn((8 // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block(normed) for _ in range(DEPTH))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        tiles = images.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).transpose(2, 3).flatten(3).flatten(1, 2)
        x = self.embed(tiles) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x).mean(1))


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and some to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images).float().reshape(-1, 8, 8)[order] / 16, torch.tensor(labels).long()[order]
    return x[:-500], y[:-500], x[-TESTED:], y[-TESTED:]


def train(way: str, seed: int, epochs: int = EPOCHS, certified: int = 0) -> dict[str, Any]:
    """One model and how it does. certified: at how many test images a certified radius is looked for."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    options, begun = WAYS[way], time.perf_counter()
    x, y, x_test, y_test = digits(seed)
    model = ViT(options.get("normed", False))
    if options.get("spectral"):
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                nn.utils.parametrizations.spectral_norm(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=options.get("decay", 0.0))
    total = epochs * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=total)
    strength, state = options.get("strength", 0.0), hs.WarmStart(products=2)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH)[: len(x) // BATCH]:
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            if strength:
                # the constant of the whole model, from pixels to logits, at some images of the batch
                loss = loss + strength * hs.smoothness(model, x[rows[:PENALISED]], state, batched=True).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()
    return {
        "way": way,
        "seed": seed,
        "clean": accuracy(model, x_test, y_test),
        "attacked": [accuracy(model, attack(model, x_test, y_test, radius), y_test) for radius in RADII],
        "model_L": float(hs.lipschitz_batch(model, x_test[:10], tol=1e-2).value.median()),
        "attention_L": [attention_constant(model, x_test[:2], k) for k in range(DEPTH)],
        "certified": [certified_radius(model, x, int(y)) for x, y in zip(x_test[:certified], y_test, strict=False)],
        "seconds": time.perf_counter() - begun,
    }


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(-1) == y).float().mean())


def attack(model: nn.Module, x: Tensor, y: Tensor, radius: float, steps: int = 25, starts: int = 2) -> Tensor:
    """The worst images found within an ℓ2 distance: projected gradient ascent on the margin, from several random starts."""
    best, worst = x.clone(), torch.full((len(x),), -math.inf)
    for start in range(starts):
        random = torch.Generator().manual_seed(start)
        change = torch.randn(x.shape, generator=random)
        change = radius * change / change.flatten(1).norm(dim=1)[:, None, None] * torch.rand(len(x), 1, 1, generator=random)
        for _ in range(steps):
            change.requires_grad_()
            margin = margins(model, (x + change).clamp(0, 1), y)
            (slope,) = torch.autograd.grad(margin.sum(), change)
            with torch.no_grad():
                change = change + radius / 8 * slope / slope.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None]
                change = change * (radius / change.flatten(1).norm(dim=1).clamp_min(radius))[:, None, None]
                change = (x + change).clamp(0, 1) - x  # closer to x, if anything
        with torch.no_grad():
            found = x + change
            margin = margins(model, found, y)
            better = margin > worst
            best[better], worst[better] = found[better], margin[better]
    assert float((best - x).flatten(1).norm(dim=1).max()) <= radius * (1 + 1e-5)
    return best


def margins(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By how much the strongest wrong logit is above the right one."""
    logits = model(x)
    right = logits.gather(1, y[:, None])[:, 0]
    return logits.scatter(1, y[:, None], -math.inf).amax(1) - right


def attention_constant(model: nn.Module, x: Tensor, layer: int) -> float:
    """The largest certified constant of a layer's attention over some images."""
    loaded = hs.load(model)
    return max(loaded.capture(inputs=image[None]).measure(layer, tol=1e-2).value for image in x)


def certified_radius(model: nn.Module, image: Tensor, label: int) -> float:
    """An ℓ2 distance of pixels within which the answer is certified to be right; 0 where it is wrong at the image itself.

    The certificate is one of the tokens that enter the first block. They come from pixels by one matrix for each patch, apart
    from each other, so a change of pixels moves them by at most its length times that matrix's norm.
    """
    found = hs.certified_radius(hs.load(model), inputs=image[None], label=label, per="sequence", attack=False)
    embed: Any = model.get_submodule("embed")
    return found.certified / float(torch.linalg.matrix_norm(embed.weight.detach().double(), 2))


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and whether a way is on the front: no other is as good at every radius and on clean images."""
    rows = []
    for way in WAYS:
        own = [r for r in runs if r["way"] == way]
        if not own:
            continue
        attacked = [statistics.fmean(r["attacked"][i] for r in own) for i in range(len(RADII))]
        rows.append(
            {
                "way": way,
                "seeds": len(own),
                "clean": statistics.fmean(r["clean"] for r in own),
                **{f"at {radius:g}": a for radius, a in zip(RADII, attacked, strict=True)},
                "model_L": statistics.fmean(r["model_L"] for r in own),
                "attention_L": [statistics.fmean(r["attention_L"][k] for r in own) for k in range(DEPTH)],
                "certified": statistics.fmean(c) if (c := [c for r in own for c in r.get("certified", [])]) else None,
                "seconds": statistics.fmean(r["seconds"] for r in own),
            }
        )
    for row in rows:
        for radius in RADII:
            key = f"at {radius:g}"
            beaten = any(
                o["clean"] >= row["clean"] and o[key] >= row[key] and (o["clean"], o[key]) != (row["clean"], row[key])
                for o in rows
            )
            row[f"front {key}"] = not beaten
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Clean accuracy against accuracy under attack, one panel a radius."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 2.9), layout="constrained")
    panels = figure.subplots(1, len(RADII), sharey=True)
    for axes, radius in zip(panels, RADII, strict=True):
        for row in rows:
            ours = row["way"].startswith("penalty")
            look = {"color": "tab:red", "marker": "o"} if ours else {"color": "tab:blue", "marker": "s"}
            axes.plot(
                row[f"at {radius:g}"],
                row["clean"],
                ls="",
                ms=5,
                fillstyle="full" if row[f"front at {radius:g}"] else "none",
                **look,
            )
            axes.annotate(row["way"], (row[f"at {radius:g}"], row["clean"]), (4, -3), textcoords="offset points", fontsize=5)
        axes.set(xlabel=f"accuracy under attack, radius {radius:g}", title="")
    panels[0].set(ylabel="clean accuracy")
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("robustness.json"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument(
        "--certified", type=int, default=0, help="test images of each run to certify a radius at, half a minute each"
    )
    parser.add_argument("--raw", type=Path, help="runs as they end, one a line; those that are there are not run again")
    asked = parser.parse_args()
    raw = asked.raw or asked.out.with_suffix(".jsonl")
    done = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    known = {(r["way"], r["seed"]) for r in done}
    jobs = [(way, seed) for seed in range(asked.seeds) for way in WAYS if (way, seed) not in known]
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool, raw.open("a") as file:
        for run in pool.map(partial(train, certified=asked.certified), *zip(*jobs, strict=True)) if jobs else ():
            file.write(json.dumps(run) + "\n")
            file.flush()
            done.append(run)
            print(
                f"{run['way']}, seed {run['seed']}: {run['clean']:.3f}, {run['attacked']}, L {run['model_L']:.3g}", flush=True
            )
    rows = summary(done)
    asked.out.write_text(json.dumps({"radii": RADII, "tested": TESTED, "rows": rows}, indent=1) + "\n")
    if asked.figure is not None:
        draw(rows, asked.figure)
