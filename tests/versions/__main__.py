"""``make test-versions``: a plain installation of this tree beside one TensorFlow after another.

    python -m tests.versions            # all of them
    python -m tests.versions 2.4 2.15

Each version has an environment of its own, .venv/versions/<version>: TensorFlow first, then this tree by ``pip install``. What
was there before must keep its version, ``pip check`` must find nothing new, and the numeric core (core.py) must pass. An
environment is made again when setup.py or the list below has changed; else only the package in it is replaced.

A version without a Python is skipped, and fails where CI is "true".
"""
from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.join(ROOT, "tests", "versions")
ENVIRONMENTS = os.path.join(ROOT, ".venv", "versions")
PACKAGE = ("setup.py", "pyproject.toml", "README.md", "whale_tf")
CORE_SECONDS = 120
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


class Version(NamedTuple):
    """A TensorFlow, the Pythons it is tried on (the first that is there), and what it needs to load itself: its own requirements
    allow releases that came later and that it does not work with."""

    name: str
    pythons: Tuple[str, ...]
    packages: Tuple[str, ...]


def _cpu(name: str, pythons: str, *more: str) -> Version:
    """tensorflow-cpu is the same code as tensorflow, in a wheel a third as large."""
    return Version(name, tuple(pythons.split()), (f"tensorflow-cpu=={name}.*", *more))


VERSIONS = (
    Version("1.15.5", ("3.7",), ("tensorflow==1.15.5", "protobuf<3.21")),
    _cpu("2.4", "3.8"),
    _cpu("2.8", "3.9 3.8", "numpy<2"),
    _cpu("2.10", "3.10 3.9 3.8", "numpy<2"),
    _cpu("2.12", "3.8 3.11 3.10 3.9"),
    _cpu("2.15", "3.11 3.10 3.9"),
    _cpu("2.16", "3.12 3.11 3.10 3.9", "tf_keras==2.16.*"),
    _cpu("2.18", "3.9 3.12 3.11 3.10"),
    _cpu("2.20", "3.13 3.12 3.11 3.10 3.9"),
    _cpu("2.21", "3.10 3.13 3.12 3.11"),
)


class Failed(Exception):
    """A step went wrong; the message is what to show."""


class Row(NamedTuple):
    """One line of the table."""

    version: str
    python: str = "-"
    numpy: str = "-"
    protobuf: str = "-"
    changed: str = "-"
    result: str = "passed"
    seconds: float = 0.0


def find_python(version: str) -> Optional[str]:
    """``pythonX.Y`` where that runs (pyenv leaves shims that do not), else the newest that pyenv has."""
    name = f"python{version}"
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = glob.glob(os.path.join(pyenv, "versions", f"{version}.*", "bin", "python"))
    for candidate in [name] + sorted(found, key=lambda path: [int(digits) for digits in re.findall(r"\d+", path)], reverse=True):
        path = shutil.which(candidate)
        if path and subprocess.run([path, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
            return path
    return None


def run(command: Sequence[str], folder: str, seconds: Optional[float] = None, check: bool = True) -> str:
    """What a command prints, with nothing of this tree on its path.

    Raises:
        Failed: it fails, and ``check``; or it takes too long.
    """
    environment = dict(os.environ, **QUIET)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    try:
        result = subprocess.run(list(command), cwd=folder, env=environment, timeout=seconds, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, universal_newlines=True)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(command)}: more than {seconds} seconds\n{error.output or ''}")
    if check and result.returncode:
        raise Failed(f"{' '.join(command)}: exit status {result.returncode}\n{result.stdout}")
    return result.stdout


class Installed(NamedTuple):
    """Versions of all packages before and after the installation, and what only then ``pip check`` complains of."""

    before: Dict[str, str]
    after: Dict[str, str]
    complaints: List[str]

    def changed(self) -> str:
        return ", ".join(f"{name} {old} -> {self.after.get(name, 'gone')}" for name, old in self.before.items()
                         if self.after.get(name) != old)


class Environment:
    """One version's."""

    def __init__(self, version: Version, interpreter: str, tree: str) -> None:
        self.version, self.interpreter, self.tree = version, interpreter, tree
        self.folder = os.path.join(ENVIRONMENTS, version.name)
        self.python = os.path.join(self.folder, "bin", "python")

    def pip(self, *arguments: str, check: bool = True) -> str:
        return run([self.python, "-m", "pip", *arguments], self.tree, check=check)

    def versions(self) -> Dict[str, str]:
        """Of all packages, by name."""
        return {one["name"].lower().replace("_", "-"): one["version"]
                for one in json.loads(self.pip("list", "--format", "json").splitlines()[-1])}

    def complaints(self) -> List[str]:
        return [line for line in self.pip("check", check=False).splitlines() if "No broken requirements" not in line]

    def set_up(self) -> Installed:
        """The installation, made unless it is there.

        Raises:
            Failed: a command fails, or TensorFlow does not load by itself.
        """
        stamp = os.path.join(self.folder, "stamp.json")
        key = self._key()
        if os.path.exists(stamp):
            with open(stamp, encoding="utf8") as handle:
                known = json.load(handle)
            if known.pop("key") == key:
                self.pip("install", "--quiet", "--no-deps", "--force-reinstall", self.tree)
                return Installed(**known)
        shutil.rmtree(self.folder, ignore_errors=True)
        run([self.interpreter, "-m", "venv", self.folder], self.tree)
        self.pip("install", "--quiet", *self.version.packages)
        before, complaints = self.versions(), self.complaints()
        run([self.python, "-c", "import tensorflow"], self.tree)
        self.pip("install", "--quiet", self.tree)
        found = Installed(before, self.versions(), [line for line in self.complaints() if line not in complaints])
        with open(stamp, "w", encoding="utf8") as handle:
            json.dump(dict(found._asdict(), key=key), handle)
        return found

    def _key(self) -> str:
        """What the installed packages depend on."""
        with open(os.path.join(ROOT, "setup.py"), "rb") as handle:
            setup = handle.read()
        return hashlib.sha256(setup + repr((self.version, self.interpreter)).encode()).hexdigest()

    def core(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run([self.python, os.path.join(HERE, "core.py")], folder, CORE_SECONDS)


def check(version: Version, tree: str) -> Row:
    """A row of the table; prints what failed."""
    interpreter = next(filter(None, map(find_python, version.pythons)), None)
    if interpreter is None:
        is_failure = os.environ.get("CI") == "true"
        return Row(version.name, result=f"{'FAILED' if is_failure else 'skipped'}: no Python {' or '.join(version.pythons)}")
    row, began = Row(version.name), time.monotonic()
    try:
        environment = Environment(version, interpreter, tree)
        row = row._replace(python=run([interpreter, "-c", "import platform; print(platform.python_version())"], tree).strip())
        found = environment.set_up()
        after = found.after
        tensorflow = next(after[name] for name in ("tensorflow-cpu", "tensorflow") if name in after)
        row = row._replace(version=tensorflow, numpy=after["numpy"], protobuf=after["protobuf"],
                           changed=found.changed() or "nothing")
        if found.complaints or found.changed():
            raise Failed("\n".join(["the installation is no addition only", found.changed(), *found.complaints]))
        environment.core()
    except Failed as error:
        print(f"TensorFlow {version.name}: {error}", flush=True)
        row = row._replace(result="FAILED")
    return row._replace(seconds=time.monotonic() - began)


def table(rows: Sequence[Row]) -> str:
    cells = [("TensorFlow", "Python", "NumPy", "protobuf", "changed", "result", "seconds")]
    cells += [(*row[:-1], f"{row.seconds:.0f}") for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    cells.insert(1, tuple("-" * width for width in widths))
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help=f"of {' '.join(version.name for version in VERSIONS)}; default: all")
    names = parser.parse_args().versions
    unknown = sorted(set(names) - {version.name for version in VERSIONS})
    if unknown:
        parser.error(f"{', '.join(unknown)} is not in the list: {' '.join(version.name for version in VERSIONS)}")
    rows = []
    with tempfile.TemporaryDirectory() as tree:  # a copy, for pip leaves folders where it builds
        for name in PACKAGE:
            source, target = os.path.join(ROOT, name), os.path.join(tree, name)
            if os.path.isdir(source):
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        for version in VERSIONS:
            if not names or version.name in names:
                print(f"TensorFlow {version.name} ...", flush=True)
                rows.append(check(version, tree))
    print(table(rows))
    return int(any(row.result.startswith("FAILED") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
