"""What docs/epl.md says of EPL's names, and how `import epl` becomes whale_tf.epl."""
from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.epl.test_config import DEFAULTS
from whale_tf import epl
from whale_tf.epl import document, installed
from whale_tf.epl.config import HINT, KEYS, REFUSED, Config
from whale_tf.errors import MissingPackageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def as_epl(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "epl"}
    for name in before:
        del sys.modules[name]
    yield epl.install
    for name in [name for name in sys.modules if name.split(".")[0] == "epl"]:
        del sys.modules[name]
    sys.modules.update(before)


def found(name: str) -> Any:
    """What ``epl.<name>`` is."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(["epl", *parts[:length - 1]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length - 1:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


def test_page() -> None:
    assert (ROOT / "docs" / "epl.md").read_text(encoding="utf8") == document.render()


@pytest.mark.parametrize("name", [one.name for one in document.NAMES if one.kind != REFUSED])
def test_names_are_there(name: str, as_epl: Any) -> None:
    as_epl()
    assert callable(found(name)) or isinstance(found(name), str)


@pytest.mark.parametrize("name", [one.name for one in document.NAMES if one.kind == REFUSED])
def test_refused_names_are_not_there(name: str, as_epl: Any) -> None:
    as_epl()
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        found(name)


def test_every_exported_name_has_a_row() -> None:
    assert set(epl.__all__) - {"install"} <= {one.name.partition(".")[0] for one in document.NAMES}
    assert set(DEFAULTS) == set(KEYS)


@pytest.mark.parametrize("key", [key for key, known in KEYS.items() if known.kind == HINT])
def test_hints_change_nothing(key: str) -> None:
    default = KEYS[key].default
    value = not default if isinstance(default, bool) else default + 7
    assert Config({key: value}, {}).here({}) == Config(environ={}).here({})


def test_modules_are_the_same_objects(as_epl: Any) -> None:
    as_epl()
    as_epl()
    import epl as again  # type: ignore[import-not-found]
    from epl.ir.graph import GraphKeys  # type: ignore[import-not-found]
    from epl.utils.version import VERSION  # type: ignore[import-not-found]

    assert again is epl and GraphKeys is epl.GraphKeys and VERSION == epl.VERSION


def test_other_package_is_never_hidden(as_epl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "epl").mkdir()
    (tmp_path / "epl" / "__init__.py").write_text("own = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingPackageError, match="would hide another package epl, .*epl/__init__.py"):
        as_epl()
    assert importlib.import_module("epl").own
    monkeypatch.undo()
    with pytest.raises(MissingPackageError, match="would hide"):
        as_epl()


SCRIPT = """
import sys
import epl
from epl.profiler.memory_profiler_hook import MemoryProfilerHook
print("ran", epl.__name__, MemoryProfilerHook.__module__, sys.argv[1:])
"""


RAN = "ran whale_tf.epl whale_tf.epl.profiler ['--some', 'flag']"


def test_module_runs_a_script(tmp_path: Path, as_epl: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from whale_tf.epl import __main__ as entry

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["epl", str(script), "--some", "flag"])
    entry.main()
    assert RAN in capsys.readouterr().out and sys.path[0] == str(tmp_path)
    monkeypatch.setattr(sys, "argv", ["epl", "--path"])
    entry.main()
    assert capsys.readouterr().out.strip() == installed.PATH


def test_directory_on_the_path(as_epl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed.PATH)
    assert importlib.import_module("epl") is epl
    assert importlib.import_module("epl.env") is importlib.import_module("whale_tf.epl.env")


@pytest.mark.once
def test_task_has_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from whale_tf.epl import __main__ as entry

    started = []
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}')
    monkeypatch.setattr(sys, "argv", ["epl", "--task", str(tmp_path), "run.sh"])
    monkeypatch.setattr(os, "execvp", lambda *arguments: started.append(arguments) or sys.exit(0))
    with pytest.raises(SystemExit):
        entry.main()
    assert started == [("bash", ["bash", "run.sh", str(tmp_path / "1")])] and (tmp_path / "1").is_dir()
