"""Lists tests whose names begin with an article instead of what they are about.

    python -m tests.names            the names
    python -m tests.names --rename   writes them without the article, wherever that name is free
"""
from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

TESTS = Path(__file__).parent
ARTICLE = re.compile(r"\btest_(?:a|an|the)_(\w+)")
DEFINED = re.compile(r"^\s*def (test_\w+)", re.MULTILINE)


def offenders(path: Path) -> Iterator[Tuple[str, str]]:
    """(name, name without its article) of the tests of a file."""
    names = DEFINED.findall(path.read_text())
    for name in names:
        found = ARTICLE.fullmatch(name)
        shorter = f"test_{found.group(1)}" if found else name
        if shorter not in names:
            yield name, shorter


def renamed(text: str, names: Dict[str, str]) -> str:
    return re.sub(r"\btest_\w+", lambda found: names.get(found.group(), found.group()), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rename", action="store_true")
    arguments = parser.parse_args()
    paths: List[Path] = sorted(TESTS.rglob("test_*.py"))
    for path in paths:
        names = dict(offenders(path))
        for name, shorter in names.items():
            print(f"{path.relative_to(TESTS)}: {name} -> {shorter}")
        if arguments.rename and names:
            path.write_text(renamed(path.read_text(), names))


if __name__ == "__main__":
    main()
