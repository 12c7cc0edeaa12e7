"""What it costs to follow, or to penalise, the constants of a model that trains; answers are compared first.

Numbers are printed as they come.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import howsmooth as hs
from benchmarks.harness import WrongAnswerError

TITLE = "Training: update() every 10 steps, and a step with the penalty, against plain steps"
EVERY = 10
Seconds = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Case:
    """A model that trains on batches of token ids. probe: tokens of one row that is followed and penalised."""

    name: str
    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    inputs: Callable[[Tensor], Any]
    letters: int
    batch: int
    n: int
    probe: int


def run(quick: bool) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # nanoGPT's settings for a CPU
        small = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 80}
        return [timed(_study(), quick), timed(gpt2("characters, 0.8 M", small, 12, 64, 64, "cpu"), quick)]
    finally:
        torch.set_num_threads(threads)


def gpt2(name: str, size: dict[str, Any], batch: int, n: int, probe: int, device: str) -> Case:
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    model: Any = GPT2LMHeadModel(GPT2Config(**(ends | size))).train()
    model = model.to(device)

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(input_ids=ids, labels=ids).loss

    return Case(name, model, loss, lambda ids: {"input_ids": ids}, model.config.vocab_size, batch, n, probe)


def _study() -> Case:
    """The model of examples/divergence.py, as it is trained there."""
    spec = importlib.util.spec_from_file_location("divergence", Path(__file__).parent.parent / "examples" / "divergence.py")
    assert spec is not None
    assert spec.loader is not None
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    torch.manual_seed(0)
    model = study.GPT(80)

    def loss(ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())

    return Case("examples/divergence.py, 0.2 M", model, loss, lambda ids: ids, 80, study.BATCH, study.LENGTH, study.PROBE)


def timed(case: Case, quick: bool) -> dict[str, Any]:
    model, device = case.model, next(case.model.parameters()).device
    cuda, begun = device.type == "cuda", time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=cuda)
    ids = torch.randint(case.letters, (case.batch, case.n), device=device)
    probe = case.inputs(ids[:1, : case.probe])
    tracker = hs.Tracker(model, probe, check_every=0)
    penalty = hs.SmoothnessPenalty(model, target=1e-3, rows=1, products=0)

    def say(text: str) -> None:
        print(f"  {case.name}, probe {case.probe}: {text} ({time.perf_counter() - begun:.0f} s)", flush=True)

    def step(term: Callable[[], Any] = lambda: 0.0) -> None:
        (case.loss(ids) + 1e-3 * term()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def penalised() -> None:
        step(lambda: penalty(**probe) if isinstance(probe, dict) else penalty(probe))

    for _ in range(3):
        step()
        tracker.update()
    ends = sorted({0, max(tracker.names)})
    _agree(hs.Tracker(model, probe, layers=ends, check_every=0), updates=4)
    say("tracked constants of the first and the last layer agree with certified ones")
    seconds = _by_clock if cuda else _by_processor
    steps, updates = _medians(seconds, step, tracker.update, rounds=3 if quick else 10)
    share = updates / (EVERY * steps)
    say(f"step {1e3 * steps:.1f} ms, update {1e3 * updates:.1f} ms, {share:.1%} of {EVERY} steps")
    longer = _longer(seconds, step, tracker.update, rounds=1 if quick else 5)
    say(f"a run with an update every {EVERY} steps takes {longer:+.1%}")
    held, with_update = (_peak(step), _peak(lambda: (step(), tracker.update()))) if cuda else (0, 0)
    if held:
        say(f"peak {held / 2**30:.2f} GiB, with an update {with_update / held - 1:+.1%}")
    penalised()
    plain, priced = _medians(seconds, step, penalised, rounds=3 if quick else 6, every=2)
    with_penalty = _peak(penalised) if cuda else 0
    say(f"a step with the penalty takes {priced / plain:.2f} plain ones")
    return {
        "model": case.name,
        "device": torch.cuda.get_device_name() if cuda else "cpu, one thread",
        "batch": f"{case.batch} × {case.n}",
        "probe": case.probe,
        "step_ms": 1e3 * steps,
        "update_ms": 1e3 * updates,
        "share": share,
        "run_longer": longer,
        "memory": with_update / held - 1 if held else None,
        "penalty_times": priced / plain,
        "penalty_memory": with_penalty / held - 1 if held else None,
    }


def _agree(tracker: hs.Tracker, updates: int) -> None:
    """Refuse to time numbers that are not the certified ones."""
    for _ in range(updates):
        tracker.update()
    for row in tracker.check().rows:
        if not (row.tracked <= row.upper and abs(row.drift) <= 0.05):
            raise WrongAnswerError(
                f"layer {row.layer}: tracked {row.tracked:.6g}, certified {row.value:.6g}; no time is reported"
            )


def _medians(
    seconds: Seconds, step: Callable[[], Any], other: Callable[[], Any], rounds: int, every: int = EVERY
) -> tuple[float, float]:
    """Seconds of a step, and of something else after every few of them, side by side."""
    steps, others = [], []
    for _ in range(rounds):
        steps += [seconds(step) for _ in range(every)]
        others.append(seconds(other))
    return statistics.median(steps), statistics.median(others)


def _longer(seconds: Seconds, step: Callable[[], Any], update: Callable[[], Any], rounds: int, updates: int = 3) -> float:
    """By how much a run takes longer with updates, side by side.

    Nothing waits for the device between steps, as in a run: on a GPU an update is prepared while the steps before it go on.
    """

    def run(with_updates: bool) -> None:
        for _ in range(updates):
            for _ in range(EVERY):
                step()
            if with_updates:
                update()

    plain, followed = zip(*((seconds(lambda: run(False)), seconds(lambda: run(True))) for _ in range(rounds)), strict=True)
    return statistics.median(followed) / statistics.median(plain) - 1


def _by_processor(run: Callable[[], Any]) -> float:
    """On a CPU by processor time, which other processes disturb less."""
    start = time.process_time()
    run()
    return time.process_time() - start


def _by_clock(run: Callable[[], Any]) -> float:
    """On a GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _peak(run: Callable[[], Any]) -> int:
    """Bytes at most on the GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
