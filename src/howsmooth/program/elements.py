"""Runs of the elements of a model's lists of modules, of which its blocks are some."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from howsmooth.program.tracing import Program


@dataclass(eq=False)
class Element:
    """One run of an element of a list of modules: the orders of its nodes, and the parts of it that were called."""

    path: str
    parent: str
    first: int
    last: int
    parts: set[str]

    def among_blocks(self, module: nn.Module) -> bool:
        """Whether the list is one of blocks: a ModuleList, or a Sequential of parts that are alike."""
        parent = module.get_submodule(self.parent)
        return isinstance(parent, nn.ModuleList) or len({type(m) for m in parent.children()}) == 1


def elements_of(program: Program) -> list[Element]:
    """Runs of elements of lists of modules, each after those it is inside."""
    lists = {p for p, m in program.module.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    known: dict[str, Element] = {}
    found: list[Element] = []
    for scope in sorted(program.scopes, key=lambda s: (s.first, -s.last)):
        words = scope.path.split(".") if scope.path else []
        for i in range(1, len(words) + 1):
            path, parent, part = ".".join(words[:i]), ".".join(words[: i - 1]), ".".join(words[i:])
            if parent not in lists:
                continue
            e = known.get(path)
            if e is not None and scope.last <= e.last:  # inside a call that is known
                continue
            if e is None or part in e.parts:
                known[path] = Element(path, parent, scope.first, scope.last, {part})
                found.append(known[path])
            else:
                e.last = max(e.last, scope.last)
                e.parts.add(part)
    return sorted(found, key=lambda e: (e.first, -e.last))


def place_in_list(module: nn.Module, path: str) -> tuple[str, int]:
    """The list of modules that a path is an element of, and its place there; nothing and -1 where it is in none."""
    parent, _, place = path.rpartition(".")
    listed = place.isdigit() and isinstance(module.get_submodule(parent), nn.ModuleList)
    return (parent, int(place)) if listed else ("", -1)


def not_run_before(module: nn.Module, path: str, run: Collection[str], kinds: Collection[type]) -> str:
    """The first element of a path's list, before it and of some kinds, that does not run; nothing where all do."""
    parent, place = place_in_list(module, path)
    for key, block in module.get_submodule(parent).named_children() if place >= 0 else ():
        other = f"{parent}.{key}".removeprefix(".")
        if int(key) < place and type(block) in kinds and other not in run:
            return other
    return ""
