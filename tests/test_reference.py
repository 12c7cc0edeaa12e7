"""The reference: every public name, every argument told, messages that are said, and the project's address."""

import ast
import dataclasses
import inspect
import pydoc
import re
import runpy
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import howsmooth

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(DOCS).with_suffix("")): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))}
API = "\n".join(page for name, page in PAGES.items() if name.startswith("reference/api/"))


def test_every_public_name_is_listed_once():
    listed = re.findall(r"^::: howsmooth\.(\w+)$", API, re.M)
    assert sorted(listed) == sorted(howsmooth.__all__)
    linked = re.findall(r"\]\[howsmooth\.([\w.]+)\]", PAGES["reference/api"].split("What more than one")[0])
    named = re.findall(r"^::: howsmooth\.([\w.]+)$", API, re.M)
    assert sorted(linked) == sorted(name for name in named if not name.startswith("kinds."))


def test_every_public_name_has_an_example():
    """In its docstring, which the page shows, or right below it on the page; as types that are only returned have one."""
    parts = re.split(r"^::: howsmooth\.([\w.]+)$", API, flags=re.M)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        found = pydoc.locate(f"howsmooth.{name}")
        if name in howsmooth.__all__:
            assert ">>> " in (found.__doc__ or "") or ">>> " in text, name


def told(text: str | None, section: str) -> list[str]:
    """The names under a heading of a docstring in Google's style."""
    found = re.search(rf"^{section}:\n((?:    .*\n|\n(?=    ))+)", inspect.cleandoc(text or "") + "\n", re.M)
    return re.findall(r"^    \**(\w+): ", found[1], re.M) if found else []


@pytest.mark.parametrize("name", re.findall(r"^::: howsmooth\.([\w.]+)$", API, re.M))
def test_help_tells_every_argument(name):
    """Of a function with what it gives, of a class those of its constructor, where users call that."""
    found: Any = pydoc.locate(f"howsmooth.{name}")
    kinds = {f"kinds.{kind}" for kind in dir(howsmooth.kinds)}
    if not callable(found) or name in UNTOLD or (dataclasses.is_dataclass(found) and name not in {*howsmooth.__all__, *kinds}):
        return
    given: Any = found
    plain = inspect.unwrap(cast(Callable[..., Any], given))
    if dataclasses.is_dataclass(found):
        wanted, section = {field.name for field in dataclasses.fields(found) if field.init}, "Attributes"
    else:
        wanted, section = set(inspect.signature(found).parameters), "Args"
    assert wanted <= set(told(found.__doc__, section))
    gives = not isinstance(found, type) and not inspect.isgeneratorfunction(plain)  # not a class, not a context
    assert not gives or "Returns:" in (found.__doc__ or "")


UNTOLD = {
    "Model",
    "Capture",
    "Map",
    "HowSmoothError",
    "maps.Jacobian",
    "models.Measurements",
    "spectral.Estimates",
}  # not constructed


def test_the_front_door_lists_what_is_public():
    assert dir(howsmooth) == sorted(howsmooth.__all__)
    assert dir(howsmooth.kinds) == ["Cosine", "Differential", "Hard", "L2", "Linear", "Sigmoid", "Sinkhorn", "Softmax"]


def test_examples_in_docstrings_become_code():
    pytest.importorskip("griffe", reason="reads docstrings as the site does; pip install 'howsmooth[docs]' runs this")
    shown = runpy.run_path(str(DOCS / "tools" / "docstrings.py"))["shown"]
    text = "Twice (docs/howto/tokens.md).\n\nArgs:\n    x: A number.\n\n    >>> f(1)\n    2\n\nPlain"
    link = '<a href="../../howto/tokens.html">tokens</a>'
    assert shown(text) == f"Twice ({link}).\n\nArgs:\n    x: A number.\n\n```pycon\n>>> f(1)\n2\n```\n\nPlain"


def test_messages_in_the_faq_are_those_that_are_said():
    """Ours, in the code; torch's own, as it says them on a CPU."""
    sources = [ast.parse(path.read_text("utf-8")) for path in (ROOT / "src").rglob("*.py")]
    words = [node.value for tree in sources for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    said = "\n".join(word for word in words if isinstance(word, str))
    part = PAGES["reference/faq"].partition("## What howsmooth says")[2].partition("## Questions\n")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", part, re.M)
    assert len(messages) > 20
    assert [message for message in messages if message not in said] == []
    attend = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(1, 2, 8, 8, requires_grad=True)
    with pytest.raises(NotImplementedError) as forward:
        torch.func.jvp(lambda q: attend(q, q, q), (q.detach(),), (q.detach(),))
    (slope,) = torch.autograd.grad(attend(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError) as second:
        slope.sum().backward()
    for error, page in ((forward, "reference/faq"), (forward, "howto/forward-mode"), (second, "reference/faq")):
        assert str(error.value).split(" that does not")[0].split(" is not")[0] in PAGES[page]


ADDRESS = runpy.run_path(str(DOCS / "tools" / "address.py"))


def test_an_address_of_the_project_stands_wherever_one_can(tmp_path):
    files = {name: (ROOT / name).read_text("utf-8") for name in ADDRESS["FILES"]}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    ADDRESS["write"]("https://example.org/us/howsmooth/", tmp_path)
    filled = {name: (tmp_path / name).read_text("utf-8") for name in files}
    assert ADDRESS["address"](tmp_path) == "https://example.org/us/howsmooth"
    assert "git clone https://example.org/us/howsmooth howsmooth`" in filled["README.md"]
    assert filled["README.md"].count("](https://example.org/us/howsmooth") == 3
    assert "$ git clone https://example.org/us/howsmooth howsmooth &&" in filled["docs/tutorial.md"]
    assert len(tomllib.loads(filled["pyproject.toml"])["project"]["urls"]) == 5
    assert "repository-code: https://example.org/us/howsmooth\n" in filled["CITATION.cff"]
    ADDRESS["write"]("https://example.org/other", tmp_path)
    assert not any("us/howsmooth" in (tmp_path / name).read_text("utf-8") for name in files)
    ADDRESS["write"]("", tmp_path)
    if ADDRESS["address"]() == "":
        assert {name: (tmp_path / name).read_text("utf-8") for name in files} == files
    with pytest.raises(SystemExit, match="an address like"):
        ADDRESS["write"]("here", tmp_path)


@pytest.mark.slow
def test_the_site_links_to_the_address_where_there_is_one(site):
    assert ADDRESS["address"]() or "md-source" not in (site / "index.html").read_text("utf-8")
    hooks = runpy.run_path(str(DOCS / "tools" / "hooks.py"))
    for to in ("", "https://example.org/us/howsmooth"):
        config = types.SimpleNamespace(repo_url=None)
        hooks["on_config"].__globals__["address"] = lambda to=to: to
        hooks["on_config"](config)
        assert config.repo_url == (to or None)
