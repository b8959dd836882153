"""Notebooks as pages: cells and their stored output, read as Markdown, so that links in them are checked like all others."""
from __future__ import annotations

import json
from typing import Any, Dict, List

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx


class NotebookParser(MystParser):
    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(as_markdown(json.loads(inputstring)), document)


def as_markdown(notebook: Dict[str, Any]) -> str:
    parts: List[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [_fence("python", source), *_shown(cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def _shown(outputs: List[Dict[str, Any]]) -> List[str]:
    """Pictures, and text as it would be in a terminal; successive pieces of text are one."""
    shown: List[str] = []
    text: List[str] = []
    for output in [*outputs, {}]:
        data = output.get("data", {})
        if "image/svg+xml" in data or not output:
            if text:
                shown.append(f":::{{container}} output\n{_fence('text', ''.join(text).strip())}\n:::")
                text = []
        if "image/svg+xml" in data:
            picture = "".join(data["image/svg+xml"])
            shown.append(_fence("{raw} html", f'<div class="output">{picture[picture.index("<svg"):]}</div>'))
        elif output:
            text.append("".join(output.get("text", data.get("text/plain", ""))))
    return shown


def _fence(language: str, text: str) -> str:
    return f"````{language}\n{text}\n````"


def setup(app: Sphinx) -> Dict[str, Any]:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
