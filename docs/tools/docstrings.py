"""How docstrings look on the site: examples as code, and what is said of arguments and fields as a list."""

import re
from collections.abc import Collection
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Loaded by mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            names = [p.name for p in obj.parameters] if isinstance(obj, griffe.Function) else obj.members
            obj.docstring.value = shown(obj.docstring.value, names)


def shown(text: str, names: Collection[str]) -> str:
    """A docstring as Markdown. names: of arguments or fields; `name: …` at a line's start or after two spaces is about one."""
    text = re.sub(r"docs/((?:explanation|howto|reference)/([\w-]+))\.md", r'<a href="../\1.html">\2</a>', text)  # of the site
    return "\n\n".join(_part(part, names) for part in re.split(r"\n\s*\n", text))


def _part(part: str, names: Collection[str]) -> str:
    lines = part.splitlines()
    first = lines[0].lstrip()
    if first.startswith(">>> "):
        margin = len(lines[0]) - len(first)
        return "\n".join(["```pycon", *(line[margin:] for line in lines), "```"])
    listed = re.match(r"(\w+)(?:, \w+)*: ", part)
    if listed is None or listed[1] not in names:
        return part
    name = "|".join(map(re.escape, names))
    several = rf"(?:{name})(?:, (?:{name}))*"
    if not re.match(rf"{several}: ", part):
        return part
    found = re.split(rf"(?:^|\n|  +)({several}): ", part)[1:]
    told = [" ".join(said.split()) for said in found[1::2]]
    heads = [", ".join(f"`{one}`" for one in some.split(", ")) for some in found[::2]]
    return "\n".join(f"* {head}: {said}" for head, said in zip(heads, told, strict=True))
