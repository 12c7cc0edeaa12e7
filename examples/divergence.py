"""Which layer goes first when training diverges, and how early is it seen? python examples/divergence.py

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

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 64, 4, 4, 48, 16
STEPS, EVERY, PROBE = 150, 10, 48
RISING, STEADY = 0.3, 0.003  # learning rates: reached at the end of the rise, and held
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
        self.blocks, self.ln, self.head = (
            nn.ModuleList(Block() for _ in range(DEPTH)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, letters),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def train(seed: int, rising: bool, steps: int = STEPS) -> dict[str, Any]:
    """One run: its losses, what the tracker saw every ten steps, its checks, and the time both took."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = alice()
    code = {letter: i for i, letter in enumerate(sorted(set(text)))}
    data = torch.tensor([code[letter] for letter in text])
    model = GPT(len(code))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    tracker = hs.Tracker(model, data[None, :PROBE], check_every=5)
    losses, seen, checks, spent, trained = [], [], [], [], 0.0
    for step in range(steps):
        begun = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = RISING * (step + 1) / steps if rising else STEADY * min(1.0, (step + 1) / 50)
        start = torch.randint(len(data) - LENGTH - 1, (BATCH, 1))
        batch = data[start + torch.arange(LENGTH + 1)]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        trained += time.process_time() - begun
        if step % EVERY == 0:
            begun = time.process_time()
            values = tracker.update(step)
            taken = time.process_time() - begun
            by_layer = [[values[f"smoothness/{where}layer_{k:02d}"] for k in range(DEPTH)] for where in QUANTITIES.values()]
            seen.append([step, *by_layer])
            if tracker.key(0, "upper") not in values:
                spent.append(taken)
            elif step:  # the first check starts the tracking
                ends = [[values[tracker.key(k, what)] for what in ("upper", "drift")] for k in range(DEPTH)]
                checks += [[step, k, by_layer[0][k], *ends[k]] for k in range(DEPTH)]
        left = left_at(losses)
        if not math.isfinite(losses[-1]) or (left is not None and step > left + 30):
            break
    share = statistics.fmean(spent) / (EVERY * trained / len(losses))
    return {"seed": seed, "rising": rising, "losses": losses, "seen": seen, "checks": checks, "share": share}


def left_at(losses: list[float]) -> int | None:
    """The step at which the loss leaves its course: ten steps whose mean is LEFT above the lowest such mean so far."""
    lowest = math.inf
    for end in range(10, len(losses) + 1):
        mean = statistics.fmean(losses[end - 10 : end])
        if not mean <= lowest + LEFT:
            return end - 10
        lowest = min(lowest, mean)
    return None


def worst(run: dict[str, Any], name: str, before: float = math.inf) -> float:
    """The most alarming value of a quantity at any layer up to a step: the largest, or for entropies one over the smallest."""
    at = 1 + list(QUANTITIES).index(name)
    values = [alarming(name, v) for row in run["seen"] if row[0] <= before for v in row[at]]
    return max(values, default=0.0)


def alarming(name: str, value: float) -> float:
    value = 1 / max(value, 1e-9) if name == "entropy" else value
    return value if math.isfinite(value) else math.inf


def first_alarm(run: dict[str, Any], name: str, threshold: float) -> tuple[int, int] | None:
    """Step and layer of the first alarm."""
    at = 1 + list(QUANTITIES).index(name)
    for row in run["seen"]:
        layer = max(range(DEPTH), key=lambda k: alarming(name, row[at][k]))
        if alarming(name, row[at][layer]) > threshold:
            return row[0], layer
    return None


def thresholds(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Midway, on a logarithmic scale, between the worst of stable runs and what every diverging one shows EARLY steps ahead."""
    calm = {name: max(worst(r, name) for r in runs if not r["rising"]) for name in QUANTITIES}
    ends = [(r, left) for r in runs if r["rising"] and (left := left_at(r["losses"])) is not None]
    wild = {name: min((worst(r, name, left - EARLY) for r, left in ends), default=math.inf) for name in QUANTITIES}
    return {name: math.sqrt(calm[name] * max(calm[name], wild[name])) for name in QUANTITIES}


def study(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the runs say: thresholds from the first five seeds, alarms on the others."""
    seeds = sorted({r["seed"] for r in runs})
    levels = thresholds([r for r in runs if r["seed"] in seeds[:5]])
    rest = [r for r in runs if r["seed"] in seeds[5:]]
    wild = [r for r in rest if r["rising"] and left_at(r["losses"]) is not None]
    calm = [r for r in rest if not r["rising"]]
    rows = []
    for name, level in levels.items():
        leads, firsts = [], []
        for run in wild:
            alarm, left = first_alarm(run, name, level), left_at(run["losses"])
            leads.append(None if alarm is None or left is None else left - alarm[0])
            firsts.append(None if alarm is None else alarm[1])
        rows.append(
            {
                "quantity": name,
                "threshold": 1 / level if name == "entropy" else level,
                "early": sum(lead is not None and lead >= EARLY for lead in leads),
                "diverging": len(wild),
                "false": sum(first_alarm(run, name, level) is not None for run in calm),
                "stable": len(calm),
                "median_lead": statistics.median([lead for lead in leads if lead is not None] or [0]),
                "least_lead": min((lead for lead in leads if lead is not None), default=0),
                "first_layers": firsts,
            }
        )
    checks = [c for r in runs for c in r["checks"]]
    return {
        "rows": rows,
        "left": {str(r["seed"]): left_at(r["losses"]) for r in runs if r["rising"]},
        "stable_left": sum(left_at(r["losses"]) is not None for r in runs if not r["rising"]),
        "checks": len(checks),
        "within_5_percent": sum(abs(c[4]) <= 0.05 for c in checks) / max(1, len(checks)),
        "above_upper": sum(c[2] > c[3] for c in checks),
        "share_of_training_time": {
            "stable": statistics.median([r["share"] for r in runs if not r["rising"]] or [0.0]),
            "rising": statistics.median([r["share"] for r in runs if r["rising"]] or [0.0]),
        },
        "example": next((r for r in wild), None),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """One diverging run: the loss, and the three quantities of every layer."""
    from matplotlib.figure import Figure

    run = result["example"]
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    panels = figure.subplots(4, 1, sharex=True)
    panels[0].plot(run["losses"], lw=0.9, color="black")
    panels[0].set(ylabel="loss", ylim=(1.8, 5))
    for axes, (i, row) in zip(panels[1:], enumerate(result["rows"]), strict=True):
        for k in range(DEPTH):
            axes.plot([r[0] for r in run["seen"]], [r[1 + i][k] for r in run["seen"]], lw=1.1, label=f"layer {k}")
        axes.axhline(row["threshold"], color="0.5", lw=0.8, ls="--")
        axes.set(yscale="log", ylabel=row["quantity"])
    for axes in panels:
        axes.axvline(left_at(run["losses"]), color="tab:red", lw=0.8)
    panels[1].legend(fontsize=7, ncols=DEPTH, frameon=False)
    panels[-1].set(xlabel=f"step; dashed: alarm, red: the loss leaves its course (seed {run['seed']})")
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=15, help="five set the thresholds, the others try them")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("divergence.json"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--raw", type=Path, help="runs as they end, one a line; those that are there are not run again")
    asked = parser.parse_args()
    raw = asked.raw or asked.out.with_suffix(".jsonl")
    done = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
    known = {(r["seed"], r["rising"]) for r in done}
    jobs = [(seed, rising) for seed in range(asked.seeds) for rising in (True, False) if (seed, rising) not in known]
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool, raw.open("a") as file:
        for run in pool.map(train, *zip(*jobs, strict=True)) if jobs else ():
            file.write(json.dumps(run) + "\n")
            file.flush()
            done.append(run)
            print(
                f"seed {run['seed']}, {'rising' if run['rising'] else 'steady'}: left at {left_at(run['losses'])}", flush=True
            )
    result = study(done)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    if asked.figure is not None:
        draw(result, asked.figure)
    print(json.dumps({k: v for k, v in result.items() if k != "example"}, indent=1))
