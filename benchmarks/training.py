"""What it costs to follow, or to penalise, the constants of a model that trains; answers are compared first."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import howsmooth as hs
from benchmarks.harness import WrongAnswerError

TITLE = "Training: update() every 10 steps, and a step with the penalty, against plain steps"
EVERY = 10


def run(quick: bool = False) -> list[dict[str, Any]]:
    if torch.cuda.is_available():
        sizes = [("GPT-2, 124 M", {}, 8, 1024, 1024), ("GPT-2, 124 M", {}, 8, 1024, 256)]
    else:
        small = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 80}
        sizes = [("characters, 0.8 M", small, 16, 128, 128), ("characters, 0.8 M", small, 16, 128, 32)]
    return [row for name, size, batch, n, probe in sizes for row in _rows(name, size, batch, n, probe, quick)]


def _rows(name: str, size: dict[str, Any], batch: int, n: int, probe: int, quick: bool) -> list[dict[str, Any]]:
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    model: Any = GPT2LMHeadModel(GPT2Config(**(ends | size))).train()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=cuda)
    ids = torch.randint(model.config.vocab_size, (batch, n), device=device)
    tracker = hs.Tracker(model, {"input_ids": ids[:1, :probe]}, check_every=0)
    penalty = hs.SmoothnessPenalty(model, target=1e-3, rows=1, products=0)

    def step(term: Callable[[], Any] = lambda: 0.0) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss = model(input_ids=ids, labels=ids).loss
        (loss + 1e-3 * term()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def penalised() -> None:
        step(lambda: penalty(input_ids=ids[:, :probe]))

    for _ in range(3):
        step()
        tracker.update()
    _agree(tracker)
    repeat = 3 if quick else 10
    plain, held = _median(step, repeat), _peak(step)
    # an update sees weights that have moved, as in a run
    update = _median(tracker.update, repeat, before=step)
    with_update = _peak(lambda: (step(), tracker.update()))
    priced, with_penalty = _median(penalised, repeat), _peak(penalised)
    return [
        {
            "model": name,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "batch": f"{batch} × {n}",
            "probe": probe,
            "step_ms": 1e3 * plain,
            "update_ms": 1e3 * update,
            "share": update / (EVERY * plain),
            "memory": with_update / held - 1 if held else None,
            "penalty_times": priced / plain,
            "penalty_memory": with_penalty / held - 1 if held else None,
        }
    ]


def _agree(tracker: hs.Tracker) -> None:
    """Refuse to time numbers that are not the certified ones."""
    check = tracker.check()
    for row in check.rows:
        if not (row.tracked <= row.upper and abs(row.drift) <= 0.05):
            raise WrongAnswerError(
                f"layer {row.layer}: tracked {row.tracked:.6g}, certified {row.value:.6g}; no time is reported"
            )


def _median(run: Callable[[], Any], repeat: int, before: Callable[[], Any] | None = None) -> float:
    times = []
    for _ in range(repeat + 1):
        if before is not None:
            before()
        _wait()
        start = time.perf_counter()
        run()
        _wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _peak(run: Callable[[], Any]) -> int:
    """Bytes at most on the device; 0 where nobody counts."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
