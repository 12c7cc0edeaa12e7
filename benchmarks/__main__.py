"""`python -m benchmarks [name …] [--quick]`: run, print tables, write JSON beside this file."""

import argparse

from benchmarks import architectures, attack, batch, certify, long, models, pair, point, solve, tightness, worst
from benchmarks.harness import environment, save, table

ALL = {
    "solve": solve,
    "pair": pair,
    "long": long,
    "batch": batch,
    "certify": certify,
    "point": point,
    "tightness": tightness,
    "models": models,
    "architectures": architectures,
    "worst": worst,
    "attack": attack,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ALL, []], help="which to run; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats, nothing written")
    options = parser.parse_args()
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    for name in options.names or ALL:
        rows = ALL[name].run(options.quick)
        print(table(ALL[name].TITLE, rows), flush=True)
        if not options.quick:
            save(name, rows)
