"""Real models: all layers of the demo model against power iteration, and the memory of a model of half a billion parameters."""

import multiprocessing
import time
from importlib import resources
from typing import Any

import torch

TITLE = "Every attention layer of the demo model at n = 256 to 1e-3, and a 24-layer model of 0.5 B parameters at n = 512"
ACCURACY = 1e-3
N = 256


def run(quick: bool) -> list[dict[str, Any]]:
    rows = _demo([0, 3] if quick else list(range(6)))
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        rows.append(pool.apply(_large, (2 if quick else 24,)))
    return rows


def _demo(layers: list[int]) -> list[dict[str, Any]]:
    """Ours is the whole of `measure`, with its comparison with the model's own code and its float64 check.

    Power iteration goes through the same modules with eager attention and is stopped by an oracle.
    """
    import howsmooth as hs
    from benchmarks.harness import agree, seconds
    from benchmarks.rivals import power_iteration
    from howsmooth.models.interface import CHOICE
    from howsmooth.program.modules import configured

    model = hs.load("demo", device="cpu")
    captured = model.capture(text=resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8"), n=N)
    rows, ours_total, power_total = [], 0.0, 0.0
    for layer in layers:
        block: Any = model.module.get_submodule(f"encoder.layer.{layer}.attention")
        x = captured.tokens(layer)

        def f(t: torch.Tensor, block: Any = block) -> torch.Tensor:
            return block.output.dense(block.self(t[None])[0])[0]

        truth = captured.measure(layer, tol=1e-5, seed=7).value
        found = captured.measure(layer)
        agree("howsmooth", found.value, truth, ACCURACY)
        ours = seconds(lambda i=layer: captured.measure(i), repeat=3)
        with torch.no_grad(), configured(model.module, CHOICE, "eager"):
            start = time.perf_counter()
            value, steps = power_iteration(f, x, truth, ACCURACY)
            power = time.perf_counter() - start
        agree("power iteration", value, truth, ACCURACY)
        ours_total, power_total = ours_total + ours, power_total + power
        rows.append(
            _row(f"demo layer {layer}", N, value=found.value, ours=ours, pairs=found.estimate.steps, power=power, steps=steps)
        )
    return [*rows, _row(f"demo, {len(layers)} layers", N, ours=ours_total, power=power_total)]


def _large(layers: int) -> dict[str, Any]:
    """A model of Qwen2-0.5B's shape with random weights in bfloat16, every layer measured, in a process of its own."""
    import transformers as t

    import howsmooth as hs
    from benchmarks.long import _peak

    torch.manual_seed(0)
    config = t.Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        dtype="bfloat16",
    )
    module: Any = t.AutoModel.from_config(config)
    count = sum(p.numel() for p in module.parameters())
    start = time.perf_counter()
    captured = hs.load(module).capture(ids=torch.randint(0, 151936, (512,)))
    values = [captured.measure(layer, tol=1e-2).value for layer in range(captured.num_layers)]
    taken = time.perf_counter() - start
    if not all(value > 0 for value in values):
        raise ValueError("expected a positive constant in every layer; no memory is reported")
    return _row(f"{layers} layers, {count / 1e9:.2f} B parameters", 512, ours=taken, peak=_peak() / 2**30)


def _row(
    what: str,
    n: int,
    *,
    value: float | str = "–",
    ours: float,
    pairs: int | str = "–",
    power: float | None = None,
    steps: int | str = "–",
    peak: float | str = "–",
) -> dict[str, Any]:
    return {
        "what": what,
        "n": n,
        "L": value,
        "ours s": ours,
        "pairs": pairs,
        "power pairs": steps,
        "power/ours": "–" if power is None else power / ours,
        "peak GiB": peak,
    }
