"""The layers of the package: imports point downward, without cycles, and the pure half knows no TensorFlow; what is known of
op types stands in one table."""
from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from typing import Dict, Iterator, List, NamedTuple, Optional, Set

import networkx
import pytest

from whale_tf.ir.traits import TABLE

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = "whale_tf"

# top floor first: a module imports only from its own floor and from those after it
FLOORS = ("cli", "viz", "measure", "epl", "api", "runtime", "parallelize", "processes", "decide", "emit", "transforms", "capture",
          "communicators", "graph_editor", "_tf_compat",
          "diagnosis", "planner", "simulator", "passes", "balance", "schedule", "bridges", "patterns", "profiler", "program",
          "residence", "plan", "ir", "cluster", "config", "documents", "errors", "garbage", "version", "_typing_compat")
PURE = FLOORS[FLOORS.index("diagnosis"):]
TENSORFLOW = ("tensorflow", "keras", "tf_keras", "horovod")


class Import(NamedTuple):
    """One import statement: ``source`` (a module of the package) imports ``target`` (any module)."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source} line {self.line} imports {self.target}"


def module_files(package_dir: str) -> Dict[str, str]:
    """Dotted name -> path of every module below ``package_dir``."""
    base = os.path.dirname(package_dir)
    modules = {}
    for folder, _, names in os.walk(package_dir):
        for name in names:
            if name.endswith(".py"):
                dotted = os.path.relpath(os.path.join(folder, name[:-3]), base).replace(os.sep, ".")
                modules[dotted[:-len(".__init__")] if name == "__init__.py" else dotted] = os.path.join(folder, name)
    return modules


def imports_of(module: str, source: str, is_package: bool, known: Set[str]) -> Iterator[Import]:
    """Every import in ``source``, those inside functions included; ``from a import b`` names ``a.b`` where that is a
    module of ``known``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[:len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join(parts + ([base] if base else []))
            for alias in node.names:
                full = base + "." + alias.name
                yield Import(module, full if full in known else base, node.lineno)


def package_imports() -> List[Import]:
    modules = module_files(os.path.join(ROOT, PACKAGE))
    found: List[Import] = []
    for name, path in sorted(modules.items()):
        with open(path, encoding="utf8") as handle:
            found += imports_of(name, handle.read(), path.endswith("__init__.py"), set(modules))
    return found


def floor(module: str) -> str:
    """``whale_tf.ir.graph`` -> ``ir``; the package itself stands above all floors and has the name ''."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def upward(imports: List[Import]) -> List[Import]:
    """The imports within the package which point to a floor above the importing one."""
    level = {"": -1}
    level.update((name, index) for index, name in enumerate(FLOORS))
    return [i for i in imports if i.target.split(".")[0] == PACKAGE and floor(i.source) != floor(i.target)
            and level[floor(i.target)] < level[floor(i.source)]]


def cycles(imports: List[Import]) -> List[List[str]]:
    graph = networkx.DiGraph((i.source, i.target) for i in imports if i.target.split(".")[0] == PACKAGE)
    return [sorted(part) for part in networkx.strongly_connected_components(graph)
            if len(part) > 1 or graph.has_edge(*(list(part) * 2))]


def impure(imports: List[Import]) -> List[Import]:
    """The imports of TensorFlow in the pure half."""
    return [i for i in imports if floor(i.source) in PURE and i.target.split(".")[0] in TENSORFLOW]


class OpTypes(NamedTuple):
    """A collection of op type names that is written out in a module."""

    module: str
    line: int
    names: List[str]

    def __str__(self) -> str:
        return f"{self.module} line {self.line} lists {', '.join(self.names)}"


def op_types(module: str, source: str) -> Iterator[OpTypes]:
    """Every tuple, list, set, dict, call, split text and regular expression that names three or more op types (as a whole, a
    dict by its keys), most of its strings being op types."""
    for node in ast.walk(ast.parse(source)):
        words: List[str] = []
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            words = [text for item in node.elts for text in _text(item)]
        elif isinstance(node, ast.Dict):
            words = [text for item in node.keys for text in _text(item)]
        elif isinstance(node, ast.Call):
            words = [text for item in node.args for text in _text(item)]
            if isinstance(node.func, ast.Attribute) and node.func.attr == "split":
                words = " ".join(_text(node.func.value)).split()
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "compile":
                words = re.findall(r"\w+", " ".join(words))
        names = [word for word in words if word in TABLE]
        if len(names) >= 3 and 2 * len(names) >= len(words):
            yield OpTypes(module, node.lineno, names)


def _text(node: Optional[ast.AST]) -> List[str]:
    """A literal string."""
    value = getattr(node, "value", getattr(node, "s", None))  # a Str on Python 3.7, a Constant after it
    return [value] if isinstance(value, str) else []


# Modules that may list op types, and why.
LISTS_OP_TYPES: Dict[str, str] = {}


def test_op_types_are_listed_in_one_table() -> None:
    found: List[OpTypes] = []
    for name, path in sorted(module_files(os.path.join(ROOT, PACKAGE)).items()):
        if not name.startswith(f"{PACKAGE}.ir.traits") and name not in LISTS_OP_TYPES:
            with open(path, encoding="utf8") as handle:
                found += op_types(name, handle.read())
    assert not [str(item) for item in found], "let a row of ir/traits say it, and ask for the rows that do (types_where)"


def test_every_module_has_a_floor() -> None:
    unknown = {floor(name) for name in module_files(os.path.join(ROOT, PACKAGE))} - set(FLOORS) - {""}
    assert not unknown, f"give {sorted(unknown)} a place in FLOORS (and in docs/architecture.md)"


def test_imports_point_downward() -> None:
    assert not [str(i) for i in upward(package_imports())]


def test_no_import_cycle() -> None:
    assert not cycles(package_imports())


def test_pure_half_never_names_tensorflow() -> None:
    assert not [str(i) for i in impure(package_imports())]


def test_one_module_imports_typing_extensions() -> None:
    """TensorFlow pins it, so that it is required on Python 3.7 alone."""
    found = [i for i in package_imports() if i.target.split(".")[0] == "typing_extensions"]
    assert {i.source for i in found} == {"whale_tf._typing_compat"}


def test_links_are_not_imported() -> None:
    """``graph_editor``, ``patterns`` and ``bridges`` beside setup.py are links for readers; code imports whale_tf.*."""
    assert not [str(i) for i in package_imports() if i.target.split(".")[0] in ("graph_editor", "patterns", "bridges")]


@pytest.mark.parametrize("folder,allowed", [("models", ()), ("examples", (PACKAGE,)),
                                            ("benchmarks", (PACKAGE, "whale_tf.decide.search"))])
def test_outside_uses_public_api_only(folder: str, allowed: tuple) -> None:
    """models/ knows nothing of us; examples/ see what a user sees; benchmarks/ may also use the pure half, which is a library in
    its own right, and compare what a search plays."""
    found: List[Import] = []
    for name, path in module_files(os.path.join(ROOT, folder)).items():
        with open(path, encoding="utf8") as handle:
            found += imports_of(name, handle.read(), path.endswith("__init__.py"), set())
    pure = folder == "benchmarks"
    assert not [str(i) for i in found if i.target.split(".")[0] == PACKAGE and i.target not in allowed
                and not (pure and floor(i.target) in PURE)]


@pytest.mark.slow
def test_pure_half_imports_without_tensorflow() -> None:
    modules = [name for name in sorted(module_files(os.path.join(ROOT, PACKAGE))) if floor(name) in PURE]
    script = f"import sys\nfor name in {TENSORFLOW!r}: sys.modules[name] = None\n"
    script += "".join(f"import {name}\n" for name in modules)
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            universal_newlines=True)
    assert result.returncode == 0, result.stdout


class TestTheChecksThemselves:
    """Each check finds what it is there for."""

    KNOWN = {"whale_tf", "whale_tf.ir", "whale_tf.ir.graph", "whale_tf.api", "whale_tf.errors"}

    def found(self, module: str, source: str, is_package: bool = False) -> List[Import]:
        return list(imports_of(module, source, is_package, self.KNOWN))

    def test_upward_arrow(self) -> None:
        assert upward(self.found("whale_tf.ir.graph", "from whale_tf import api"))
        assert upward(self.found("whale_tf.ir.graph", "def f():\n    from ..api import init"))
        assert upward(self.found("whale_tf.ir.graph", "import whale_tf"))
        assert not upward(self.found("whale_tf.api", "from whale_tf.ir.graph import Op"))

    def test_cycle(self) -> None:
        one, other = "from whale_tf.errors import a", "from .ir import b"
        assert cycles(self.found("whale_tf.ir", one, True) + self.found("whale_tf.errors", other))
        assert not cycles(self.found("whale_tf.ir", one, True))

    def test_tensorflow(self) -> None:
        assert impure(self.found("whale_tf.ir.graph", "import tensorflow.compat.v1 as tf"))
        assert impure(self.found("whale_tf.ir.graph", "def f():\n    from tensorflow.python import ops"))
        assert not impure(self.found("whale_tf.api", "import tensorflow as tf"))

    @pytest.mark.parametrize("source", [
        "READS = ('Identity', 'ReadVariableOp', 'RefIdentity')",
        "READS = frozenset(['Identity', 'ReadVariableOp', 'RefIdentity'])",
        "COSTS = {'Relu': 1, 'Gelu': 10, 'Tanh': 3, 'Exp': 2}",
        "def f(op):\n    return op.type in {'Add', 'AddV2', 'Sub'}",
        "FREE = 'Const Identity Reshape'.split()",
        "FLOW = re.compile('^(Enter|Exit|Ref(Enter|Exit))$')",
        "@handles('Stack', 'StackV2', 'TensorArrayV3')\ndef f(op): ...",
    ])
    def test_table_of_op_types(self, source: str) -> None:
        assert [item.line for item in op_types("whale_tf.ir.region", source)]

    @pytest.mark.parametrize("source", [
        "PAIR = ('Enter', 'RefEnter')",
        "WORDS = ('Enter', 'the', 'Exit', 'or', 'Merge', 'it', 'all')",
        "MATRIX = [[1, 2], [3, 4]]\nNAMES = {'weights': 1, 'biases': 2, 'steps': 3}",
        "TEXT = 'Const Identity Reshape'",
    ])
    def test_what_is_no_table_of_op_types(self, source: str) -> None:
        assert not list(op_types("whale_tf.ir.region", source))
