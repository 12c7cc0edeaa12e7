"""Which measurements each experiment takes, the paper's protocol or a quick look at the same curves, and the run of it."""

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final, get_args

from howsmooth.errors import BadInputError
from howsmooth.models import measuring_device
from howsmooth.paper import tasks
from howsmooth.paper.subjects import RANDOM, RANDOM_LAYERS, describe
from howsmooth.run import Engine, Plan, Progress, check_folder, claim_folder, read, sweep
from howsmooth.settings import whole
from howsmooth.study import read_text

Part = Literal["real", "random", "adversarial", "meanfield", "splitting", "trap"]
PARTS: tuple[Part, ...] = get_args(Part)


@final
@dataclass(frozen=True)
class Protocol:
    """How much is measured.

    lengths: of windows of text, to 98 as in the paper.  long: further ones, pretrained models only.  samples: windows a length.
    adversarial: lengths of eigenvector tokens.  worst: lengths of the worst configuration.  radii: of the ball that measures
    live in.  grid: points along a side of the splitting map.  cases: random layers for each length and size of logits.
    module_lengths: of windows for the module that the scripts read.  layers: of pretrained models; the first, the middle one
    and the last by default.  text: a file, Alice in Wonderland by default.  device: where models read it, as for `load`.
    """

    lengths: tuple[int, ...] = tuple(range(2, 99, 2))
    long: tuple[int, ...] = tuple(range(102, 503, 40))
    samples: int = 10
    random_lengths: tuple[int, ...] = tuple(range(2, 99, 2))
    module_lengths: tuple[int, ...] = tuple(range(2, 99, 4))
    adversarial: tuple[int, ...] = tuple(range(2, 98, 5))
    worst: tuple[int, ...] = (7, 12, 22, 47, 97)
    radii: tuple[float, ...] = tuple(0.5 + 0.25 * k for k in range(13))
    tokens: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512)
    seeds: int = 8
    grid: int = 121
    cases: int = 100
    layers: tuple[int, ...] | None = None
    text: str | None = None
    device: str = "auto"

    def with_samples(self, samples: int) -> "Protocol":
        """So many windows of text a length."""
        return replace(self, samples=whole(samples, "at least one sample a length", "the paper took 10", least=1))

    def with_lengths(self, lengths: Sequence[int]) -> "Protocol":
        """Windows of text of these lengths alone."""
        some = tuple(sorted({whole(n, "lengths of at least 2", "count tokens", least=2) for n in lengths}))
        if len(some) < 2:
            raise BadInputError(f"expected two lengths or more, got {list(lengths)}; an exponent takes two")
        return replace(self, lengths=some, long=(), random_lengths=some, module_lengths=some)

    def layers_of(self, count: int, few: bool = False) -> list[int]:
        """Which layers of a model with so many: the first, the middle one and the last. few: without the last.

        >>> PAPER.layers_of(12), PAPER.layers_of(6, few=True), PAPER.layers_of(1)
        ([0, 6, 11], [0, 3], [0])
        """
        if self.layers is None:
            return sorted({0, count // 2, count - 1})[: 2 if few else None]
        fix = f"a model has {count}"
        return sorted({whole(k, f"layers from 0 to {count - 1}", fix, below=count) for k in self.layers})

    @property
    def reading(self) -> dict[str, str]:
        """The text as arguments of a task, its digest among them, so that another text is measured anew."""
        if self.text is None:
            return {}
        return {"passage": self.text, "digest": hashlib.sha256(read_text(self.text).encode()).hexdigest()[:16]}

    @property
    def there(self) -> dict[str, str]:
        """The text and the device as arguments of a task; a device is left out where it is a worker's own choice."""
        return self.reading | ({} if self.device == "auto" else {"device": self.device})


PAPER = Protocol()
QUICK = Protocol(
    lengths=(4, 10, 22, 46, 98),
    long=(),
    samples=1,
    random_lengths=(4, 20, 98),
    module_lengths=(10, 22, 46, 98),
    adversarial=(2, 12, 32, 97),
    worst=(22,),
    radii=(1.0, 2.0, 3.0),
    tokens=(4, 8, 16, 32),
    seeds=2,
    grid=41,
    cases=3,
)


def plan(part: Part, models: Sequence[str], protocol: Protocol, seed: int) -> Plan:
    """The tasks of one experiment. models: pretrained ones, by name or folder; each is looked at once to know its layers."""
    plans = dict(zip(PARTS, (_real, _random, _adversarial, _meanfield, _splitting, _trap), strict=True))
    if part not in plans:
        raise BadInputError(f"expected one of {', '.join(PARTS)} or all, got {part!r}; pick one of them")
    return plans[part](models, protocol, seed)


def _real(models: Sequence[str], protocol: Protocol, seed: int) -> Plan:
    arguments: list[dict[str, Any]] = []
    for name in models:
        about = describe(name, protocol.text)
        lengths = [n for n in (*protocol.lengths, *protocol.long) if about.shortest <= n <= about.longest]
        if len(lengths) < 2:
            raise BadInputError(
                f"expected a model that reads two of the lengths, got {name} with at most {about.longest}; leave it out"
            )
        arguments += [
            {"name": name, "masking": m, "layers": layers, "n": n, "sample": s, "seed": seed} | protocol.there
            for layers in [protocol.layers_of(about.layers)]
            for m in about.maskings
            for n in lengths
            for s in range(protocol.samples)
        ]
    return Plan.of(tasks.text, arguments)


def _random(models: Sequence[str], protocol: Protocol, seed: int) -> Plan:
    return Plan.of(
        tasks.text,
        [
            {"name": name, "masking": m, "layers": list(RANDOM_LAYERS), "n": n, "sample": s, "seed": seed} | protocol.there
            for name in RANDOM
            for m in ("unmasked", "masked")
            for n in protocol.random_lengths
            if n > 2 or name != "random:bert-base"  # two tokens would be the special ones alone
            for s in range(protocol.samples)
        ],
    )


def _adversarial(models: Sequence[str], protocol: Protocol, seed: int) -> Plan:
    cases: list[tuple[str, str, int]] = [(tasks.ONE_HEAD, m, 0) for m in ("unmasked", "masked")]
    for name, about in ((name, describe(name, protocol.text)) for name in models):
        cases += [(name, m, k) for m in about.maskings for k in protocol.layers_of(about.layers, few=True) if about.plain]
    cases += [(name, m, 0) for name, m in zip(RANDOM, ("unmasked", "masked"), strict=True)]
    lengths = list(protocol.adversarial)
    named = [{"name": name, "masking": m, "layer": k, "seed": seed} | protocol.reading for name, m, k in cases]
    eigenvector = Plan.of(tasks.adversarial, [about | {"lengths": lengths} for about in named])
    shown = [about for about in named if about["masking"] == "unmasked" and about["name"] not in RANDOM]
    return eigenvector + Plan.of(tasks.worst_tokens, [about | {"n": n} for about in shown for n in protocol.worst])


def _meanfield(models: Sequence[str], protocol: Protocol, seed: int) -> Plan:
    worst = Plan.of(tasks.worst_measure, [{"alpha": -1.0, "radius": r} for r in protocol.radii])
    density = {"alpha": -1.0, "radius": 2.0, "lengths": list(protocol.tokens), "seeds": protocol.seeds}
    clusters = {"alpha": -1.0, "radius": 2.0, "lengths": [2**k for k in range(1, 21)]}
    return worst + Plan.of(tasks.many_tokens, [density]) + Plan.of(tasks.worst_clusters, [clusters])


def _splitting(models: Sequence[str], protocol: Protocol, seed: int) -> Plan:
    grids = [{"alpha": a, "mass": m, "extent": 12.0, "points": protocol.grid} for a in (-1.0, 1.0) for m in (0.5, 0.9, 0.99)]
    counts = [
        {"n": n, "logits": size, "count": protocol.cases, "causal": False, "seed": seed}
        for n in (2, 4, 8, 16)
        for size in (0.5, 1.0, 2.0, 4.0, 8.0)
    ]
    return Plan.of(tasks.splitting_map, grids) + Plan.of(tasks.splitting_frequency, counts)


def _trap(models: Sequence[str], protocol: Protocol, seed: int) -> Plan:
    """Every measurement on text carries both numbers; beside them the iteration itself, and the module the scripts read."""
    start = {"name": "random:gpt2", "masking": "masked", "layer": 6, "n": 32, "steps": 8, "seed": seed}
    alone = Plan.of(tasks.iteration, [start | {"start": k} for k in range(3)])
    modules = [
        {"name": name, "layers": layers, "n": n, "sample": s, "seed": seed} | protocol.reading
        for name, about in ((name, describe(name, protocol.text)) for name in models)
        if about.whole_module
        for layers in [protocol.layers_of(about.layers, few=True)]
        for n in protocol.module_lengths
        if about.shortest <= n <= about.longest
        for s in range(min(protocol.samples, 3))
    ]
    alone += Plan.of(tasks.whole_module, modules)
    return _real(models, replace(protocol, long=()), seed) + _random(models, protocol, seed) + alone


@final
@dataclass(frozen=True)
class Reproduced:
    """What was asked for and measured, with what a reader needs to make it again.

    rows: of every task of the plan that is done.  failures: reasons, and how many tasks.
    """

    path: Path
    rows: tuple[dict[str, Any], ...]
    tasks: int
    skipped: int
    failures: Mapping[str, int]
    versions: Mapping[str, str]
    models: Sequence[str]
    protocol: Protocol
    seed: int
    command: str


def reproduce(
    parts: Sequence[Part],
    models: Sequence[str],
    folder: Path,
    *,
    protocol: Protocol,
    seed: int = 0,
    resume: bool = False,
    force: bool = False,
    engine: Engine | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Reproduced:
    """Measure what the parts need and the folder does not have yet; each result is kept as it arrives.

    models: pretrained ones beside the random models, by name or folder.  resume: continue what is in the folder.
    force: begin again, or write into a folder that holds other files.
    """
    check_folder(folder, "reproduction", resume=resume, force=force)
    measuring_device(protocol.device)
    # plans first: an unknown model is refused before anything is written
    plans = functools.reduce(Plan.__add__, (plan(part, models, protocol, seed) for part in parts))
    path = claim_folder(folder, "reproduction", resume=resume, force=force)
    ended = sweep(plans, path, engine=engine, resume=resume, progress=progress, command=command or None)
    keys = {task.key for task in plans.tasks}
    kept = [row for row in read(path) if row.key in keys]
    done = [row for row in kept if row.status == "done"]
    return Reproduced(
        path,
        rows=tuple(value for row in done for value in (row.value if isinstance(row.value, list) else [row.value])),
        tasks=len(plans.tasks),
        skipped=ended.skipped,
        failures=Counter(str(row.reason) for row in kept if row.status == "failed"),
        versions=done[-1].versions if done else {},
        models=models,
        protocol=protocol,
        seed=seed,
        command=command,
    )
