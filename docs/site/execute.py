"""Executes a notebook in Jupyter, in a folder of its own, and keeps what its cells print: ``make notebook``."""
from __future__ import annotations

import sys
import tempfile
from typing import Any, List

import nbclient
import nbformat


def execute(path: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False,
                                         resources={"metadata": {"path": folder}})
        client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_plain(output) for output in _kept(cell.outputs)]
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec",)}
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


def _kept(outputs: List[Any]) -> List[Any]:
    """Without what TensorFlow and Keras log, which depends on the machine."""
    return [output for output in outputs if output.get("name") != "stderr"]


def _plain(output: Any) -> Any:
    if output.output_type == "stream":  # the blanks to which tables are padded
        output.text = "\n".join(line.rstrip() for line in output.text.splitlines()) + "\n"
    return output


if __name__ == "__main__":
    execute(sys.argv[1])
