"""How docstrings look on the site: examples as code, links to pages that they name, and all arguments of a study."""

import inspect
import pydoc
import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))  # this tree's package, whatever is installed


class Docstrings(griffe.Extension):
    """Loaded by mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = shown(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Arguments that a decorator names in place of `**scope` are those of the signature that `help` shows."""
        if "scope" not in func.parameters:
            return
        del func.parameters["scope"]
        for name, p in inspect.signature(pydoc.locate(func.path)).parameters.items():  # pyright: ignore[reportArgumentType]
            if name not in func.parameters:
                annotation = re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(p.annotation))
                keyword = griffe.ParameterKind.keyword_only
                func.parameters.add(griffe.Parameter(name, annotation=annotation, kind=keyword, default=repr(p.default)))


def shown(text: str) -> str:
    """A docstring as Markdown. Pages of API are in a folder of their own, two below the root."""
    text = re.sub(r"docs/((?:explanation|howto|reference)/([\w-]+))\.md", r'<a href="../../\1.html">\2</a>', text)
    return "\n\n".join(_part(part) for part in re.split(r"\n\s*\n", text))


def _part(part: str) -> str:
    lines = part.splitlines()
    if not part.lstrip().startswith(">>> "):
        return part
    margin = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(["```pycon", *(line[margin:] for line in lines), "```"])
