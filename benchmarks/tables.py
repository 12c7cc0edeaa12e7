"""Write the committed results into the marked places of the docs: `python -m benchmarks.tables`."""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

ROOT = Path(__file__).parents[1]

GPU = (
    "n", "mask", "error", "ours ms", "TFLOP/s", "of matmul", "peak GiB", "vjp ms", "flash vjp ms", "torch.func/ours",
    "peer bf16/ours", "peer float32/ours",
)  # fmt: skip

SPECTRA = ("layers", "solved", "missed", "certified", "widest", "pairs of one", "pairs of eight", "ratio", "products ratio")

# of `sdpa` on a GPU, by what was timed
SDPA = {
    "pair": ("n", "mask", "error", "ours ms", "replayed ms", "together ms", "GiB", "peer/ours", "peer/ours, replayed"),
    "HVP": ("n", "mask", "error", "ours ms", "pair ms", "GiB"),
    "MeanFlow": (
        "what",
        "n",
        "ours ms",
        "replayed ms",
        "GiB",
        "math ms",
        "math GiB",
        "plain ms",
        "ours/plain",
        "ours/plain, replayed",
    ),
}


def markdown(rows: list[dict[str, Any]], columns: tuple[str, ...] | None = None) -> str:
    """Rows as a Markdown table."""
    columns = columns or tuple(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[c]) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def fill(text: str, tables: dict[str, str]) -> str:
    """`text` with what stands between `<!-- name -->` and `<!-- /name -->` replaced."""
    for name, table in tables.items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m, t=table: m[1] + t + "\n" + m[2], text, flags=re.S)
    return text


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    results = {path.stem: json.loads(path.read_text())["rows"] for path in sorted(RESULTS.glob("*.json"))}
    tables = {name: markdown(rows) for name, rows in results.items()}
    tables["gpu"] = markdown(results["gpu"], GPU)
    tables["spectra"] = markdown(results["spectra"], SPECTRA)
    for what, columns in SDPA.items():
        tables[f"gpu_sdpa {what}"] = markdown([row for row in results["gpu_sdpa"] if row["what"].startswith(what)], columns)
    for document in (
        "docs/reference/kinds.md",
        "docs/reference/performance.md",
        "docs/reference/derivatives.md",
        "docs/explanation/point-bounds.md",
        "docs/explanation/around.md",
        "docs/reference/architectures.md",
        "docs/explanation/around-blocks.md",
    ):
        path = ROOT / document
        path.write_text(fill(path.read_text(), tables))
