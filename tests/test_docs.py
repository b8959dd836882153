"""The pages of the documentation: their code runs, and what they show is what it prints."""
from __future__ import annotations

import ast
import contextlib
import glob
import io
import json
import os
import re
import sys
import types
import xml.etree.ElementTree as ElementTree
from typing import Any, Dict, Iterator, List, NamedTuple

import pytest

from tests.command_line import call
from tests.multiprocess.launch import printed

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DOCS = os.path.join(ROOT, "docs")

# A figure of rounding errors, which differ between machines. Everything else is compared as it is.
ROUNDING = re.compile(r"\d(\.\d)?e[-+]\d\d")

has_keras_3 = pytest.mark.skipif(sys.version_info < (3, 8), reason="TensorFlow 1.15 has no Keras 3")


class Fence(NamedTuple):
    """A block of code of a page.

    Attributes:
        line: of its first line.
    """

    language: str
    text: str
    line: int


def page(name: str) -> str:
    with open(os.path.join(DOCS, name), encoding="utf8") as file:
        return file.read()


def fences(name: str) -> List[Fence]:
    text = page(name)
    return [Fence(found.group(1), found.group(2), text[:found.start()].count("\n") + 2)
            for found in re.finditer(r"^```([a-z-]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def run_page(name: str) -> None:
    """Runs a page's Python from top to bottom, in the current folder.  A traceback has the lines of the page."""
    blocks = [fence for fence in fences(name) if fence.language == "python"]
    assert blocks, name
    variables: Dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), variables)


def cells(name: str) -> List[Dict[str, Any]]:
    return [cell for cell in json.loads(page(name))["cells"] if cell["cell_type"] == "code"]


def run_cells(name: str) -> None:
    """Runs a notebook's cells as Jupyter does, and writes what they print to a file.  A picture, which Jupyter would show, prints
    that it has many parts."""
    def picture(path: str) -> None:
        print("PICTURE of many parts" if len(list(ElementTree.parse(path).getroot().iter())) > 100 else "PICTURE")

    package: Any = types.ModuleType("IPython")  # which the tests do without
    package.version_info, package.get_ipython = (9, 0), lambda: None
    display: Any = types.ModuleType("IPython.display")
    display.SVG = picture
    sys.modules.update({"IPython": package, "IPython.display": display})
    variables: Dict[str, Any] = {"__name__": "__main__"}
    parts = []
    for cell in cells(name):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            exec(compile("".join(cell["source"]), name, "exec"), variables)
        parts.append(text.getvalue())
    with open("printed.json", "w", encoding="utf8") as file:
        json.dump(parts, file)


def told(outputs: List[Dict[str, Any]]) -> List[str]:
    """The lines of a cell's stored output."""
    lines: List[str] = []
    for output in outputs:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            lines.append("PICTURE of many parts")
        else:
            lines += "".join(output.get("text", data.get("text/plain", ""))).splitlines()
    return lines


def comparable(lines: List[str]) -> List[str]:
    """Lines in any order: in Jupyter, rich displays tables before the text that contains them is printed."""
    return sorted(ROUNDING.sub("#", line).rstrip() for line in lines if line.strip())


@pytest.mark.slow
@has_keras_3
@pytest.mark.parametrize("name", ["start.md", "guide.md"])
def test_python_of_pages_runs(name: str, tmp_path: Any) -> None:
    code = f"import os; from tests import test_docs; os.chdir({str(tmp_path)!r}); test_docs.run_page({name!r})"
    output = printed("-c", code)
    assert "Traceback" not in output
    if name == "start.md":  # and explains itself as the page says
        shown = next(fence.text for fence in fences(name) if fence.language == "text")
        assert _in_order(shown.split("...\n"), output), output


@pytest.mark.slow
@has_keras_3
def test_tutorial_prints_what_it_shows(tmp_path: Any) -> None:
    code = f"import os; from tests import test_docs; os.chdir({str(tmp_path)!r}); test_docs.run_cells('tutorial.ipynb')"
    printed("-c", code)
    parts = json.loads((tmp_path / "printed.json").read_text(encoding="utf8"))
    stored = cells("tutorial.ipynb")
    assert len(parts) == len(stored)
    for cell, part in zip(stored, parts):
        assert comparable(told(cell["outputs"])) == comparable(part.splitlines()), "make notebook keeps what cells print"


COMMANDS = [(name, fence) for name in ("start.md", "guide.md") for fence in fences(name) if fence.language == "console"]


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("name, fence", COMMANDS, ids=[f"{name} line {fence.line}" for name, fence in COMMANDS])
def test_commands_of_pages_print_what_is_shown(name: str, fence: Fence) -> None:
    from whale_tf.cli import app

    command, _, shown = fence.text.partition("\n")
    assert command.startswith("$ whale ")
    result = call(app, *command.split()[2:])
    assert result.exit_code == 0, result.output
    assert _in_order(re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE), result.stdout), result.stdout


def _in_order(pieces: List[str], text: str) -> bool:
    end = 0
    for piece in pieces:
        found = text.find(piece, end)
        if found < 0:
            return False
        end = found + len(piece)
    return True


def messages(path: str) -> Iterator[str]:
    """The texts of a module that may be messages; what they are filled with is a ``\\0``."""
    with open(path, encoding="utf8") as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp)):
            text = _flat(node)
            if len(text) > 20:
                yield text


def _flat(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_flat(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _flat(node.left) + _flat(node.right)
    value = getattr(node, "value", getattr(node, "s", None))  # Python 3.7 has ast.Str
    return re.sub(r"\{[^{} \"]*\}", "\0", value) if isinstance(value, str) else "\0"


TITLES = re.findall(r"^### `(.*)`$", page("troubleshooting.md"), re.MULTILINE)


@pytest.fixture(scope="module")
def sources() -> List[str]:
    paths = glob.glob(os.path.join(ROOT, "whale_tf", "**", "*.py"), recursive=True)
    return [text for path in paths for text in messages(path)]


@pytest.mark.once
@pytest.mark.parametrize("title", TITLES)
def test_messages_with_a_title_are_still_raised(title: str, sources: List[str]) -> None:
    """A title is how a message begins; ``...`` stands for what is filled in."""
    pieces = re.split(r"\.{3}(?!\.)", title)  # of "wh....", the first dot is the message's
    pattern = re.compile(r"[^\0]*\0[^\0]*?".join(re.escape(piece) for piece in pieces) if len(pieces) > 1 else re.escape(title))
    assert any(pattern.match(text) for text in sources), title


def test_titles_of_messages() -> None:
    assert len(TITLES) > 30 and len(set(TITLES)) == len(TITLES)
