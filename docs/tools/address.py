"""The address of the project, wherever one stands: `python docs/tools/address.py https://host/name`; `""` takes it out.

It is kept once, as `address` under `[tool.howsmooth]` in `pyproject.toml`. The site reads it from there. README, tutorial,
package and citation are written, since others read them as they are. While it is empty none of them shows anything.
"""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERN = r"https://[\w.-]+(?:/[\w.-]+)+"


def address(root: Path = ROOT) -> str:
    """The address as it is kept, without a slash behind it."""
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["howsmooth"]["address"]


def _readme(text: str, to: str) -> str:
    host = to.removeprefix("https://").partition("/")[0].replace("-", "--")
    badge = f"[![source](https://img.shields.io/badge/source-{host}-1e4f70)]({to})"
    links = f"{badge} [Issues]({to}/issues) · [Releases]({to}/releases)\n\n" if to else ""
    text = re.sub(r"\A# howsmooth\n\n(?:\[!\[source\].*\n\n)?", f"# howsmooth\n\n{links}", text)
    clone = f"`git clone {to} howsmooth`" if to else "`git clone` this repository"
    return re.sub(r"`git clone[^`]*`(?: this repository)?, and in its folder", f"{clone}, and in its folder", text)


def _tutorial(text: str, to: str) -> str:
    return re.sub(r"git clone \S+ howsmooth", f"git clone {to or 'THIS-REPOSITORY'} howsmooth", text)


def _package(text: str, to: str) -> str:
    names = {"Homepage": "", "Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
    text = re.sub(rf'^(?:{"|".join(names)}) = "https.*\n', "", text, flags=re.M)
    urls = "".join(f'{name} = "{to}{rest}"\n' for name, rest in names.items()) if to else ""
    text = text.replace("[project.urls]\n", f"[project.urls]\n{urls}")
    return re.sub(r'^address = ".*"$', f'address = "{to}"', text, flags=re.M)


def _citation(text: str, to: str) -> str:
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.M)
    return text.replace("license: MIT\n", f"license: MIT\nrepository-code: {to}\n") if to else text


FILES: dict[str, Callable[[str, str], str]] = {
    "README.md": _readme,
    "docs/tutorial.md": _tutorial,
    "pyproject.toml": _package,
    "CITATION.cff": _citation,
}


def write(to: str, root: Path = ROOT) -> None:
    """Every file with this address, or without one."""
    to = to.rstrip("/")
    if to and not re.fullmatch(PATTERN, to):
        raise SystemExit(f'expected an address like https://host/name, got {to!r}; pass "" to take it out')
    for name, filled in FILES.items():
        path = root / name
        path.write_text(filled(path.read_text("utf-8"), to), "utf-8")


if __name__ == "__main__":
    write(sys.argv[1])
