"""What mkdocs fills in: the page of commands, made from the commands themselves, and where the words are."""

import html
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))  # this tree's package, whatever is installed

address = runpy.run_path(str(Path(__file__).with_name("address.py")))["address"]
MARK = "<!-- commands -->"
# how far a page stands up or down in what the search finds: what is asked for stands before proofs and tables
BOOSTS = {
    **dict.fromkeys(("tutorial", "reference/glossary", "reference/faq", "about/cite"), 3.0),
    "howto/": 2.0,
    **dict.fromkeys(("explanation/", "reference/performance", "about/changelog", "about/contributing"), 0.01),
}
GLOSSARY = "\n\nWords: [Glossary](../reference/glossary.md).\n"  # at the foot of every how-to
EVERYWHERE = {"--json", "--debug", "--help"}  # told once, above the commands


def on_config(config: Any, **_: Any) -> None:
    """Called by mkdocs first: links to the source, where the project has an address."""
    if to := address():
        config.repo_url, config.repo_name, config.edit_uri = to, to.rpartition("/")[2], "edit/main/docs/"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page."""
    text = markdown.replace(MARK, commands()) if MARK in markdown else markdown
    page.meta["search"] = {"boost": next((much for name, much in BOOSTS.items() if page.file.src_uri.startswith(name)), 1.0)}
    return text + GLOSSARY if page.file.src_uri.startswith("howto/") else text


def commands() -> str:
    """Every command, its arguments and options."""
    import typer

    from howsmooth_command import app

    root: Any = typer.main.get_command(app())
    return "\n\n".join(section(f"howsmooth {name}", found) for name, found in _leaves(root))


def _leaves(group: Any, before: str = "") -> list[tuple[str, Any]]:
    """Commands, those of groups with the group's name before theirs."""
    found = []
    for name in group.list_commands(None):
        child = group.commands[name]
        found += _leaves(child, f"{before}{name} ") if hasattr(child, "commands") else [(before + name, child)]
    return found


def section(name: str, command: Any) -> str:
    """One command: what it does, an example, a table of its options."""
    told, _, example = command.help.partition("Example:")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not EVERYWHERE & set(p.opts)]
    usage = " ".join([name, *(p.name.upper() for p in arguments), "[OPTIONS]"])
    lines = [f"## {name}", " ".join(told.split()), f"```text\n{usage}\n```", "| argument | meaning | default |\n|---|---|---|"]
    for p in [*arguments, *options]:
        names = p.name.upper() if p in arguments else ", ".join([*p.opts, *p.secondary_opts])
        default = "required" if p.required else "" if p.default in (None, False, ()) else f"`{p.default}`"
        lines[-1] += f"\n| `{names}` | {_cell(getattr(p, 'help', None) or '')} | {default} |"
    if example:
        lines.append(f"```text\n{' '.join(example.split())}\n```")
    return "\n\n".join(lines)


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
