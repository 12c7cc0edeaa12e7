"""How far one goes through the package for an answer: functions, files and changes of file of a few calls.

A function of the package that `sys.setprofile` sees counts once; a change of file is a call from a function of one
file of the package into another's, or back. Comprehensions and lambdas count with the function that holds them.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import howsmooth as hs
from benchmarks.harness import agree

TITLE = "The walk through the package for one answer"
PACKAGE = str(Path(hs.__file__).parent)
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do."


def walk(call: Callable[[], object]) -> dict[str, int]:
    """Calls, functions, files and changes of file inside the package during `call`, in this thread."""
    calls = hops = 0
    functions: set[tuple[str, str]] = set()
    last: str | None = None

    def inside(code: CodeType) -> bool:
        return code.co_filename.startswith(PACKAGE)

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, hops, last
        code = frame.f_code
        if event != "call" or not inside(code):
            return
        calls += 1
        functions.add((code.co_filename, code.co_qualname.split(".<locals>.<")[0].removesuffix(".<locals>")))
        hops += last is not None and last != code.co_filename
        last = code.co_filename

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    named = {f for f in functions if "<" not in f[1].split(".")[-1]}
    return {"calls": calls, "functions": len(named), "files": len({f for f, _ in named}), "changes of file": hops}


def run(quick: bool = False) -> list[dict[str, object]]:
    """Each call is made once before on inputs of another shape, so that what is set up once a process is not counted."""
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []

    def row(name: str, call: Callable[[], object], before: Callable[[], object] | None = None) -> None:
        if before is not None:
            before()
        rows.append({"call": name, **walk(call)})

    model = hs.load("demo", device="cpu")
    w_q, w_k, w_v, w_o = torch.randn(4, 8, 8).mul(8**-0.5)
    attn = hs.Attention(w_q, w_k, w_v, w_o)
    x = torch.randn(64, 8)
    agree("lipschitz", hs.lipschitz(attn, x).value, float(torch.linalg.svdvals(hs.jacobian(attn, x).dense())[0]), 1e-4)
    row("lipschitz(attn, x)", lambda: hs.lipschitz(attn, x), lambda: hs.lipschitz(attn, x[:50]))
    row(
        "lipschitz(attn, x, within=0.1)",
        lambda: hs.lipschitz(attn, x, within=0.1),
        lambda: hs.lipschitz(attn, x[:50], within=0.1),
    )
    row("measure(text, layer=3)", lambda: model.measure(text=TEXT, layer=3), lambda: model.measure(text=TEXT[:40], layer=3))
    row("measure(text, layer=3) again", lambda: model.measure(text=TEXT, layer=3))
    if not quick:
        row("measure(text, layer=3, within=0.05)", lambda: model.measure(text=TEXT[:24], layer=3, within=0.05))
    net = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(3)])
    trackers: list[hs.Tracker] = []
    row("Tracker(net, probe)", lambda: trackers.append(hs.Tracker(net, torch.randn(2, 16, 32))))
    row("Tracker.update(), first", trackers[0].update)
    row("Tracker.update(), later", trackers[0].update)
    return rows
