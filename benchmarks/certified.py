"""Around an input, against what a user would pick instead: CROWN of auto_LiRPA, global bounds, and sampling from below.

auto_LiRPA needs an interpreter of its own: `python3.11 -m venv lirpa`, `lirpa/bin/pip install torch==1.13.1 "numpy<1.24" tqdm
appdirs packaging pyyaml`, `lirpa/bin/pip install --no-deps auto_LiRPA==0.3`, and `LIRPA_PYTHON=lirpa/bin/python`. Without it
its columns stay empty. The digits are those of scikit-learn (`pip install howsmooth[bench]`).
"""

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import howsmooth as hs
from benchmarks.certified_models import Behind, Digits, build
from benchmarks.harness import WrongAnswerError
from howsmooth.program.reading import read_function
from howsmooth.theory.around import AroundAttention, Certified, Neighbourhood, around_graph

TITLE = "Certified change of the output, and certified radius of an answer, ℓ2 over all tokens"
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do"
LAYER, N_BLOCK = 2, 4
SHARES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # radii, in lengths of a token
CROWNED = {4: SHARES, 16: SHARES[:2]}  # by length, where CROWN is run: it takes a quarter of an hour for a radius at 16 tokens
TRAINED, EPOCHS = 1397, 30
BETWEEN = 2e-3, 0.2  # radii that CROWN's is looked for between


def run(quick: bool) -> list[dict[str, Any]]:
    rows = attention(4, quick) + ([] if quick else attention(16)) + _block(quick)
    return rows + _digits(10 if quick else 100)


def attention(n: int, quick: bool = False) -> list[dict[str, Any]]:
    """One attention layer at n tokens."""
    capture = hs.load("demo", device="cpu").capture(text=TEXT, n=n)
    attn, x = capture.attention(LAYER), capture.tokens(LAYER).double()
    d, heads = attn.width, attn.heads
    weights = {"q": (attn.w_q, attn.b_q), "k": (attn.w_k, attn.b_k), "v": (attn.w_v, attn.b_v), "o": (attn.w_o, attn.b_o)}
    model = build("attention", [d, heads]).double()
    model.load_state_dict(
        {f"{k}.{end}": t for k, both in weights.items() for end, t in zip(("weight", "bias"), both, strict=True)}
    )
    _same(model, attn, x)
    size = float(x.norm(dim=-1).mean())
    shares = SHARES[1:3] if quick else SHARES
    crown = _crown("attention", [d, heads], model, x[None].numpy(), {"radii": [s * size for s in shares if s in CROWNED[n]]})
    rows = []
    for i, share in enumerate(shares):
        start = time.perf_counter()
        area = Neighbourhood.of(x, share * size, "sequence")
        ours = AroundAttention(attn, x).within(area).moved_total
        taken = time.perf_counter() - start
        ball = min(b.value for b in hs.bounds(attn, n=n, radius=area.reach) if b.side == "upper" and b.value is not None)
        rows.append(_row(f"attention layer, n = {n}", share, lambda t: attn(t), x, ours, taken, crown, i, ball * share * size))
    return rows


def _block(quick: bool) -> list[dict[str, Any]]:
    capture = hs.load("demo", device="cpu").capture(text=TEXT, n=N_BLOCK)
    own: nn.Module = capture.sample.owner.get_submodule(capture.map(LAYER, "block").place)
    names = {
        "attention.q": "attention.self.query", "attention.k": "attention.self.key", "attention.v": "attention.self.value",
        "attention.o": "attention.output.dense", "first": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "second": "output.LayerNorm",
    }  # fmt: skip
    hidden, d = own.get_parameter("intermediate.dense.weight").shape
    heads = capture.heads(LAYER)
    model = Behind(d, heads, hidden).double().eval()
    for ours, theirs in names.items():
        model.get_submodule(ours).load_state_dict(own.get_submodule(theirs).state_dict())
    for ours in ("first", "second"):
        model.get_submodule(ours).eps = own.get_submodule(names[ours]).eps
    model.requires_grad_(False)
    x = capture.tokens(LAYER, "block").double()
    size = float(x.norm(dim=-1).mean())
    layer = capture.attention(LAYER)
    recorded = _block_graph(model, layer, x)
    _same(model, recorded, x)
    shares = SHARES[1:3] if quick else SHARES
    crown = _crown("block", [d, heads, hidden], model, x[None].numpy(), {"radii": [s * size for s in shares]})
    rows = []
    for i, share in enumerate(shares):
        start = time.perf_counter()
        ours = around_graph(Certified(recorded, x), Neighbourhood.of(x, share * size, "sequence")).moved_total
        taken = time.perf_counter() - start
        rows.append(
            _row(f"block, n = {N_BLOCK}", share, recorded, x, ours, taken, crown, i, _product_of_norms(model, x, share * size))
        )
    return rows


def _block_graph(model: Behind, layer: hs.Attention, x: Tensor) -> Any:
    """The block with its attention layer taken whole."""

    def f(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attended = layer.value(t[None])[0]
        y = nn.functional.layer_norm(t + attended, t.shape[-1:], model.first.weight, model.first.bias, model.first.eps)
        z = model.down(nn.functional.gelu(model.up(y), approximate="tanh"))
        out = nn.functional.layer_norm(y + z, t.shape[-1:], model.second.weight, model.second.bias, model.second.eps)
        return t, attended, out

    return read_function(f, x, [layer], truth=lambda t: model(t[None])[0])


def _product_of_norms(model: Behind, x: Tensor, r: float) -> float:
    """The global constant of the parts, one by one, times the radius: a norm divides by `√eps` at worst."""
    norm = {k: float(torch.linalg.matrix_norm(p, 2)) for k, p in model.named_parameters() if p.ndim == 2}
    attention = hs.Attention(
        *(model.attention.get_submodule(k).weight for k in "qkvo"),  # pyright: ignore[reportArgumentType]
        heads=model.attention.heads,
    )
    reach = float(x.norm(dim=-1).max()) + r
    ball = min(b.value for b in hs.bounds(attention, n=len(x), radius=reach) if b.side == "upper" and b.value is not None)
    both = math.prod(float(n.weight.abs().max()) / math.sqrt(n.eps) for n in (model.first, model.second))
    return (1 + ball) * (1 + 1.13 * norm["up.weight"] * norm["down.weight"]) * both * r


def _row(
    name: str,
    share: float,
    f: Callable[[Tensor], Tensor],
    x: Tensor,
    ours: float,
    taken: float,
    crown: list,
    i: int,
    ball: float,
) -> dict[str, Any]:
    r = share * float(x.norm(dim=-1).mean())
    seen = _seen(f, x, r)
    if not seen <= ours * (1 + 1e-9):
        raise WrongAnswerError(f"{name}: a change of {seen:.6g} was seen at r = {r:.3g}, above {ours:.6g}; nothing is reported")
    missing = "not run" if crown else None
    rival = crown[i] if i < len(crown) else {"moved": missing, "seconds": missing}
    moved = rival["moved"]
    cell = moved if not isinstance(moved, float) or math.isfinite(moved) else "none"
    return {
        "function": name, "r": share, "seen": seen, "ours": ours, "CROWN": cell, "global": ball, "ours s": taken,
        "CROWN s": rival["seconds"],
    }  # fmt: skip


def _seen(f: Callable[[Tensor], Tensor], x: Tensor, r: float) -> float:
    """The longest change seen: random directions, and the top singular direction followed by ascent."""
    y = f(x).detach()
    random = torch.Generator().manual_seed(0)
    best, delta = 0.0, torch.zeros_like(x)
    for _ in range(20):
        step = torch.randn(x.shape, generator=random, dtype=x.dtype)
        step *= r / step.norm()
        moved = float((f(x + step) - y).norm())
        best, delta = (moved, step) if moved > best else (best, delta)
    top = hs.lipschitz(f, x).direction.double()
    for start in (delta, r * top / top.norm()):
        step = start
        for _ in range(10):
            at = (x + step).requires_grad_()
            moved = (f(at) - y).norm()
            (slope,) = torch.autograd.grad(moved, at)
            best = max(best, float(moved.detach()))
            step = r * slope / slope.norm()
    return best


def _same(model: nn.Module, f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        error = float((model(x[None])[0] - f(x)).abs().max())
    if not error < 1e-6:
        raise WrongAnswerError(f"two forms of one function differ by {error:.1e}; nothing is timed")


def _digits(count: int) -> list[dict[str, Any]]:
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]

    data, target = load_digits(return_X_y=True)
    images, answers = torch.tensor(np.asarray(data) / 16.0).reshape(-1, 8, 8), torch.tensor(np.asarray(target))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINED], order[TRAINED:]
    model = _trained(images[train].float(), answers[train]).double()
    model.requires_grad_(False)
    with torch.no_grad():
        right = model(images[test]).argmax(1) == answers[test]
    chosen = test[right][:count]
    ours, attacked, taken, linear = [], [], [], []
    for x in images[chosen]:
        start = time.perf_counter()
        radius = hs.certified_radius(model, x[None], per="sequence", attack=False)
        taken.append(time.perf_counter() - start)
        ours.append(radius.certified)
        linear.append(radius.first_order)
        attacked.append(hs.certified_radius(model, x[None], per="sequence").attacked)
    if any(a < c for a, c in zip(attacked, ours, strict=True)):
        raise WrongAnswerError("an attack was found within a certified radius; nothing is reported")
    job = {"inputs": count, "between": BETWEEN}
    crown = _crown("digits", [], model, images[chosen].numpy(), job, answers[chosen].numpy())
    return [
        {
            "function": f"digits, {count} inputs, {float(right.double().mean()):.1%} right", "r": "mean radius",
            "seen": float(np.mean(attacked)), "ours": float(np.mean(ours)),
            "CROWN": float(np.mean([c["radius"] for c in crown])) if crown else None,
            "global": float(np.mean(linear)), "ours s": float(np.mean(taken)),
            "CROWN s": float(np.mean([c["seconds"] for c in crown])) if crown else None,
        }
    ]  # fmt: skip


def _trained(images: Tensor, answers: Tensor) -> Digits:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Digits()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=1e-2)
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(images)).split(64):
                loss = nn.functional.cross_entropy(model(images[batch]), answers[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model.eval()


def _crown(
    name: str, sizes: list[int], model: nn.Module, x: np.ndarray, job: dict[str, Any], labels: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """CROWN's answers, from the interpreter that has it; nothing where there is none."""
    python = os.environ.get("LIRPA_PYTHON")
    if python is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        arrays = {f"w.{k}": t.numpy() for k, t in model.state_dict().items()} | {"x": x}
        arrays |= {} if labels is None else {"labels": labels}
        np.savez(Path(folder) / "arrays.npz", **arrays)  # pyright: ignore[reportArgumentType]
        dtype = "float32" if name == "attention" and x.shape[1] > 4 else "float64"  # the same digits there, and half the memory
        (Path(folder) / "job.json").write_text(json.dumps({"name": name, "sizes": sizes, "dtype": dtype} | job))
        subprocess.run([python, str(Path(__file__).with_name("rival_lirpa.py")), folder], check=True)
        return json.loads((Path(folder) / "answer.json").read_text())
