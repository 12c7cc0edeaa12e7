"""Type the tutorial word for word and see what comes: `python docs/tools/tutorial.py` writes the outputs into the page.

`$ ` lines of a console block go to a shell, `>>> ` lines of all Python blocks to one interpreter. A block whose line above says
`<!-- not run: … -->` is left out. The folder it runs in is written as `…`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "tutorial.md"
BLOCK = re.compile(r"(?P<mark><!-- not run: [^\n]+ -->\n\n)?```(?P<language>console|python)\n(?P<body>.*?)^```$", re.M | re.S)
# reads blocks as JSON, runs their examples in one namespace, gives what each prints, or raises
INTERPRETER = """
import contextlib, doctest, io, json, sys
names, told = {"__name__": "__main__"}, []
sys.displayhook = lambda value: None if value is None else print(repr(value))
for block in json.load(sys.stdin):
    for example in doctest.DocTestParser().get_examples(block):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(example.source, "<tutorial>", "single"), names)
        told.append(out.getvalue())
json.dump(told, sys.stdout)
"""


def typed(page: str, folder: Path, environment: Mapping[str, str]) -> str:
    """The page with the outputs that its commands and examples give in this folder and environment."""
    blocks = [block["body"] for block in BLOCK.finditer(page) if block["language"] == "python"]
    ended = subprocess.run(
        [sys.executable, "-c", INTERPRETER],
        input=json.dumps(blocks),
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
    )
    assert ended.returncode == 0, ended.stderr
    told = iter(json.loads(ended.stdout))

    def run(block: re.Match[str]) -> str:
        if block["mark"] is not None:
            return block[0]
        if block["language"] == "python":
            lines = re.findall(r"^(?:>>>|\.\.\.)[^\n]*$", block["body"], re.M)
            sources = re.findall(r"^>>>[^\n]*(?:\n\.\.\.[^\n]*)*", block["body"], re.M)
            assert len(lines) == sum(source.count("\n") + 1 for source in sources)
            body = "".join(f"{source}\n{next(told)}" for source in sources)
        else:
            body = ""
            for command in re.findall(r"^\$ ([^\n]+)$", block["body"], re.M):
                done = subprocess.run(command, shell=True, cwd=folder, env=environment, text=True, capture_output=True)
                assert done.returncode == 0, done.stderr
                shown = done.stdout.replace(str(folder.resolve()), "…")
                body += f"$ {command}\n" + "".join(line.rstrip() + "\n" for line in shown.splitlines())
        return f"```{block['language']}\n{body}```"

    return BLOCK.sub(run, page)


if __name__ == "__main__":
    scripts = str(Path(sys.executable).parent)
    with tempfile.TemporaryDirectory() as place:
        text = typed(PAGE.read_text("utf-8"), Path(place), os.environ | {"PATH": scripts + os.pathsep + os.environ["PATH"]})
    PAGE.write_text(text, "utf-8")
