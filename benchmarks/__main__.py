"""`python -m benchmarks [name …] [--quick] [--cases N]`: run, print tables, write JSON beside this file."""

import argparse
import importlib

import torch

from benchmarks.harness import environment, save, table

ALL = [
    "solve",
    "spectra",
    "svds",
    "pair",
    "kinds",
    "long",
    "batch",
    "certify",
    "certified",
    "gain",
    "inexact",
    "settle",
    "point",
    "tightness",
    "soundness",
    "kind_bounds",
    "around",
    "around_blocks",
    "hidden_ways",
    "near",
    "models",
    "report",
    "architectures",
    "measures",
    "worst",
    "attack",
    "training",
    "walk",
    "sdpa",
]
COUNTED = ["around", "around_blocks", "gain", "hidden_ways", "kind_bounds", "spectra"]
ON_A_GPU = ["gpu", "gpu_kinds", "gpu_lens", "gpu_sdpa", "gpu_solve", "gpu_models", "gpu_report", "gpu_training", "gpu_varlen"]

if __name__ == "__main__":
    names = ALL + (ON_A_GPU if torch.cuda.is_available() else [])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*names, []], help="which to run; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, nothing written")
    parser.add_argument("--cases", type=int, help=f"how many cases to look at, for {', '.join(COUNTED)}")
    options = parser.parse_args()
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    for name in options.names or names:
        benchmark = importlib.import_module(f"benchmarks.{name}")
        counted = {"cases": options.cases} if name in COUNTED else {}
        rows = benchmark.run(options.quick, **counted)
        print(table(benchmark.TITLE, rows), flush=True)
        if not options.quick:
            save(name, rows)
