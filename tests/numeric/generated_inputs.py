"""Random programs over inputs of independent open sizes, which are joined and cut again.

``python -m tests.numeric.generated_inputs --count 2000 --seed 1`` judges that many, without stopping at failures, and prints a
table. Program ``--number`` of a seed runs alone, and prints its source; ``--shrink`` makes it as small as it still fails. The
last line of a failure, given to ``--program``, runs it again.
"""
from __future__ import annotations

import argparse
import collections
import faulthandler
import itertools
import json
import random as random_
import re
import subprocess
import sys
import threading
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import hypothesis.strategies as st
import numpy as np
import tensorflow.compat.v1 as tf

from tests import conftest  # noqa: F401 (sets what TensorFlow reads in the processes started below)
from tests.functions.equality import Way
from tests.numeric import input_programs
from tests.numeric.input_programs import FEATURES, HAS_FUNCTIONS, VOCABULARY, WIDTH, Input, Line, Program
from tests.numeric.input_rules import DRAWS, GROUPS, JOINS, OPENED, TERMS, Rows, Rule
from tests.numeric.shrink_inputs import shrink

STEPS = 3
LEAST, MOST = 4, 12  # rows of an input
MOST_ROWS = 60  # of any value


class Value(NamedTuple):
    """A matrix `[rows, WIDTH]`: its rows in each step, and whether it depends on a weight."""

    name: str
    sizes: Tuple[int, ...]
    is_trained: bool


# -- drawing -----------------------------------------------------------------------------------------------------------


class Writer:
    """A program while it is written. Every choice comes from ``random``."""

    def __init__(self, random: Any, way: Way, parts: int) -> None:
        self.random, self.way, self.parts = random, way, parts
        self.inputs: List[Input] = []
        self.weights: List[Tuple[str, Tuple[int, ...]]] = []
        self.lines: List[Line] = []
        self.values: List[Value] = []
        self.is_local = dict(way.config).get("random") == "local"
        self.layout = random.choice(["open"] * 6 + ["half", "half", "columns", "static"])
        self.accident = random.choice(["none", "none", "all", "some"])
        self.is_even = random.random() < 0.6
        self.is_steady = random.random() < 0.3
        self.is_few = random.random() < 0.04

    def sizes(self, is_static: bool = False) -> Tuple[int, ...]:
        """Rows of a new input: independent of others', but where sizes are equal by accident."""
        if self.inputs and self.accident != "none" and not is_static:
            if self.accident == "all" or self.random.random() < 0.5:
                return self.random.choice(self.inputs).sizes
        least = max(LEAST, self.parts)
        if is_static and self.random.random() < 0.8:
            return (self.parts * self.random.randint(-(-LEAST // self.parts), max(1, MOST // self.parts)),) * STEPS
        rows = [self.random.randint(least, MOST) for _ in range(STEPS)]
        if self.is_even:
            rows = [count - count % 2 for count in rows]
        if self.is_few and not is_static:
            self.is_few = False
            rows[self.random.randrange(STEPS)] = 2
        return (rows[0],) * STEPS if self.is_steady or is_static else tuple(rows)

    def input(self, kind: str, sizes: Optional[Tuple[int, ...]] = None) -> Input:
        item = Input("uxyzstrqpo"[len(self.inputs)], kind, sizes or self.sizes(kind == "static"))
        self.inputs.append(item)
        return item

    def weight(self, *shape: int) -> str:
        self.weights.append((f"w{len(self.weights)}", shape))
        return self.weights[-1][0]

    def write(self, code: str, operands: Sequence[str], rows: Sequence[Rows], is_trained: bool) -> List[Value]:
        """A line; ``rows`` of its result in each step."""
        sizes = [count if isinstance(count, tuple) else (count,) for count in rows]
        values = [Value(f"v{len(self.values) + i}", each, is_trained) for i, each in enumerate(zip(*sizes))]
        self.values += values
        self.lines.append(Line(tuple(value.name for value in values), code, tuple(operands)))
        return values

    def open(self, kind: str) -> None:
        """A new input of the kind, as a matrix; maybe two of it, joined before that."""
        code, count = self.random.choice(OPENED[kind])
        if count > 1 and len(self.inputs) > 2:
            code, count = OPENED[kind][0]
        items = [self.input(kind) for _ in range(count)]
        names = dict(zip("ab", (item.name for item in items)))
        if "{t}" in code:
            names["t"] = self.weight(VOCABULARY, WIDTH)
        if "{f}" in code:
            names["f"] = self.weight(FEATURES, WIDTH)
        self.write(code.format(**names), list(names.values()), [sum(rows) for rows in zip(*(item.sizes for item in items))], True)

    def dense(self) -> None:
        value = self.values[-1] if self.random.random() < 0.7 else self.random.choice(self.values)
        shared = [(one, other) for (one, shape), (other, _) in zip(self.weights, self.weights[1:])
                  if shape == (WIDTH, WIDTH) and dict(self.weights)[other] == (WIDTH,)]
        if shared and self.random.random() < 0.5:  # one layer for several values
            names = (value.name, *self.random.choice(shared))
        else:
            names = value.name, self.weight(WIDTH, WIDTH), self.weight(WIDTH)
        code = self.random.choice(["tf.tanh(tf.matmul({}, {}) + {})", "tf.nn.bias_add(tf.matmul({}, {}), {})"])
        self.write(code.format(*names), names, value.sizes, True)

    def matching(self, rule: Rule, is_trained: bool = False) -> Optional[List[Value]]:
        """Operands of a rule: the first one is mostly of the newest, the others anything that fits in every step."""
        firsts = [value for value in self.values[-3:] if value.is_trained or not is_trained]
        firsts = firsts or [value for value in self.values if value.is_trained]
        found = []
        for chosen in itertools.product(firsts, *[self.values] * (rule.arity - 1)):
            rows = list(zip(*(value.sizes for value in chosen)))
            if all(rule.fits(*each) for each in rows):
                results = np.ravel([rule.rows(*each) for each in rows])
                if 2 <= results.min() and results.max() <= MOST_ROWS and len(set(chosen)) == len(chosen):
                    found.append(list(chosen))
        return self.random.choice(found) if found else None

    def text(self, rule: Rule, chosen: Sequence[Value]) -> str:
        return rule.code.format(k=self.random.randint(1, 9), **dict(zip("abc", (value.name for value in chosen))))

    def apply(self, group: Dict[str, Rule]) -> None:
        """A line of a rule that has operands."""
        names = sorted(group)
        for _ in range(4):
            rule = group[self.random.choice(names)]
            chosen = self.matching(rule)
            if chosen:
                self.write(self.text(rule, chosen), [value.name for value in chosen],
                           [rule.rows(*rows) for rows in zip(*(value.sizes for value in chosen))],
                           any(value.is_trained for value in chosen))
                return

    def anything(self) -> None:
        roll = self.random.random()
        if roll < 0.1 and len(self.inputs) < 7:
            self.example_input()
        elif roll < 0.3 and self.is_local:
            self.apply(DRAWS)
        else:
            self.apply(GROUPS[self.random.choice(["joins", "cuts", "cuts", "positions", "whole"])])

    def example_input(self) -> None:
        """Weights or targets of the examples of a value: an input of as many rows."""
        value = self.random.choice(self.values)
        is_static = self.layout == "static" and len(set(value.sizes)) == 1
        if self.random.random() < 0.2:
            item = self.input("labels", value.sizes)
            code = (f"{value.name} * tf.nn.sparse_softmax_cross_entropy_with_logits(labels={item.name}, "
                    f"logits={value.name})[:, None]")
        elif self.random.random() < 0.5:
            item = self.input("static_weights" if is_static else "weights", value.sizes)
            code = f"{value.name} * {item.name}[:, None]"
        else:
            item = self.input("static" if is_static else "open", value.sizes)
            code = f"{value.name} - {item.name}"
        self.write(code, [value.name, item.name], value.sizes, value.is_trained)

    def term(self, is_trained: bool) -> str:
        names = sorted(TERMS)
        while True:
            rule = TERMS[self.random.choice(names)]
            chosen = self.matching(rule, is_trained)
            if chosen:
                return self.text(rule, chosen)


def _way(random: Any) -> Tuple[Way, int]:
    """A plan, and into how many parts it divides the mini-batch."""
    counts, devices = random.choice([((), 2), ((), 2), ((), 3), ((), 4), ((), 1), ((2,), 2), ((2,), 2), ((3,), 3),
                                     ((1, 1), 2), ((1, 1), 2), ((1, 1), 4), ((1, 2), 3)])
    stages = len(counts) or 1
    micro = random.choice([2, 2, 3] if stages > 1 or devices == 1 else [1, 1, 1, 2])
    config: Dict[str, Any] = {}
    if micro > 1:
        config["num_micro_batch"] = micro
    if random.random() < 0.4:
        config["emit"] = random.choice(["call", "inline"])
    split: Tuple[int, ...] = ()
    if counts == (2,) and micro == 1 and random.random() < 0.4:
        split = (0,)
    elif random.random() < 0.1 and devices > stages:
        config["zero"] = "v1"
    elif random.random() < 0.1:
        config["recompute"] = "full"
    if random.random() < 0.4:
        config["random"] = "local"
    nested = devices // sum(counts) if counts else 1
    across = (devices if not counts else int(np.lcm.reduce(counts))) * nested
    return Way(counts, devices, config, split), micro * (1 if split else across)


def program(random: Any) -> Program:
    """A program of 5 to 14 lines over 2 to 4 inputs (and some of examples' weights or targets)."""
    way, parts = _way(random)
    writer = Writer(random, way, parts)
    kinds = random.choice([("plain",), ("plain",), ("plain",), ("plain", "plain", "ids"), ("plain", "ragged"),
                           ("plain", "ragged", "hollow", "numbers"), ("plain", "sparse")])
    for number in range(random.choice([2, 2, 2, 3, 3, 4])):
        kind = random.choice(kinds)
        if kind != "plain":
            writer.open(kind)
            continue
        layout = ("static" if number == 0 else "open") if writer.layout == "half" else writer.layout
        item = writer.input(layout)
        if layout == "columns":  # the width follows from what it is multiplied with
            name = writer.weight(WIDTH, WIDTH)
            writer.write(f"tf.matmul({item.name}, {name})", [item.name, name], item.sizes, True)
        else:
            writer.values.append(Value(item.name, item.sizes, False))
    if random.random() < 0.9:
        writer.apply({name: JOINS[name] for name in ("concat", "concat of three", "concat with itself")})
    for _ in range(random.choice([0, 0, 1, 2])):
        writer.anything()
    writer.dense()
    for _ in range(random.choice([1, 2, 3])):
        writer.anything()
    if random.random() < 0.6:
        writer.dense()
        for _ in range(random.choice([0, 1, 2])):
            writer.anything()
    terms = tuple(writer.term(number == 0) for number in range(random.choice([1, 1, 2, 3])))
    outputs = tuple(random.choice(["{}", "{}", "tf.shape({})[0]"]).format(value.name) for value in writer.values
                    if value.name.startswith("v") and random.random() < 0.1)
    is_function = HAS_FUNCTIONS and random.random() < 0.6
    is_resource = is_function or random.random() < 0.7
    if way.config.get("emit") == "call" and not is_resource:
        outputs = ()  # results only: tests/emit/test_calls.py shows why
    is_optimized = random.random() < 0.1 or (is_function and bool(way.split))  # in functions, wh.split needs the optimizer
    found = Program(tuple(writer.inputs), tuple(writer.weights), tuple(writer.lines), terms, (), outputs,
                    random.choice(["sgd", "sgd", "adam"]), way, is_function, is_resource, is_optimized,
                    not is_function or random.random() < 0.92).tidy()
    return found._replace(cuts=_filled_cuts(random, found))


def _filled_cuts(random: Any, made: Program) -> Tuple[int, ...]:
    """Cuts after which every stage has something of the loss, if a few tries find some."""
    needed = made._replace(outputs=()).tidy().lines
    for _ in range(8):
        cuts = _cuts(random, len(made.way.counts), len(made.lines))
        if all(set(needed).intersection(made.lines[first:last]) for first, last in zip(cuts, cuts[1:])):
            break
    return cuts


def _cuts(random: Any, stages: int, lines: int) -> Tuple[int, ...]:
    """Some lines stand before the first stage, and some behind the last, which may hold the loss. Every stage has a line, if
    there are as many."""
    if not stages:
        return ()
    first = random.choice([0, 0, random.randint(0, max(0, lines - stages))])
    last = random.choice([lines, lines, random.randint(min(first + stages, lines), lines)])
    inner = [min(lines, first + 1)] if stages == 2 and last - first < 2 else \
        sorted(random.sample(range(first + 1, last), stages - 1)) if stages > 1 else []
    return (first, *inner, last)


def numbered(seed: int, number: int) -> Program:
    """A program of a seed, always the same on one Python."""
    return program(random_.Random(f"{seed}/{number}"))


programs = st.randoms(use_true_random=False).map(program)


# -- the command -------------------------------------------------------------------------------------------------------

PATIENCE_S = 90  # for one program
CHUNK = 200  # programs of a process: graphs and functions of TensorFlow are not all freed


def _judge_here(seed: int, numbers: Sequence[int], is_shrinking: bool) -> None:
    """Judges programs, one line of JSON each. One that hangs ends the process."""
    tf.get_logger().setLevel("ERROR")
    for number in numbers:
        faulthandler.dump_traceback_later(PATIENCE_S * (10 if is_shrinking else 1), exit=True)
        start = time.monotonic()
        made = numbered(seed, number)
        with input_programs.quiet():
            verdict = input_programs.judge(made)
            is_failure = verdict.kind in input_programs.FAILURES
            if is_failure and is_shrinking:
                made, verdict = shrink(made, verdict, input_programs.judge)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"number": number, "kind": verdict.kind, "detail": verdict.detail, "seconds": time.monotonic() - start,
                          "source": f"{made}\n# {made!r}" if is_failure else ""}), flush=True)


def _judged(seed: int, numbers: Sequence[int], is_shrinking: bool) -> Iterator[Dict[str, Any]]:
    """Judges programs in processes of their own, and goes on behind one that hangs or crashes."""
    rest = list(numbers)
    while rest:
        command = [sys.executable, "-m", "tests.numeric.generated_inputs", "--seed", str(seed), "--of",
                   ",".join(map(str, rest[:CHUNK]))] + ["--shrink"] * is_shrinking
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True) as process:
            ended: List[str] = []
            reader = threading.Thread(target=lambda: ended.extend(process.stderr))
            reader.start()
            for line in process.stdout:
                if line.startswith("{"):
                    found = json.loads(line)
                    rest.remove(found["number"])
                    yield found
            code = process.wait()
            reader.join()
        if code and rest:
            is_hang = any(line.startswith("Timeout") for line in ended)
            number = rest.pop(0)
            yield {"number": number, "kind": "hang" if is_hang else "crash", "detail": "".join(ended)[-2000:],
                   "seconds": PATIENCE_S, "source": str(numbered(seed, number))}


def _sentence(detail: str) -> str:
    """A message without the names and numbers in it."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'|\([^)]*\)|\[\[.*", "...", detail))[:110]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--number", type=int, help="only this program; prints its source")
    parser.add_argument("--shrink", action="store_true", help="make each failing program as small as it still fails")
    parser.add_argument("--program", help="only this program: Program(...), as a failure prints it")
    parser.add_argument("--of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.program:
        made = eval(arguments.program.lstrip("# "), {"Program": Program, "Input": Input, "Line": Line, "Way": Way})
        verdict = input_programs.judge(made)
        print(f"{made}\n\n{verdict.kind}: {verdict.detail}")
        return int(verdict.kind in input_programs.FAILURES)
    if arguments.of:
        _judge_here(arguments.seed, [int(number) for number in arguments.of.split(",")], arguments.shrink)
        return 0
    numbers = [arguments.number] if arguments.number is not None else \
        range(arguments.first, arguments.first + arguments.count)
    if arguments.number is not None:
        print(numbered(arguments.seed, arguments.number))
    found: List[Dict[str, Any]] = []

    def collect(part: Sequence[int]) -> None:
        for verdict in _judged(arguments.seed, part, arguments.shrink):
            found.append(verdict)
            if verdict["kind"] in input_programs.FAILURES:
                print(f"\n## {verdict['kind']}: --seed {arguments.seed} --number {verdict['number']}: {verdict['detail']}\n"
                      f"{verdict['source']}", flush=True)

    threads = [threading.Thread(target=collect, args=(list(numbers)[i::arguments.workers],)) for i in range(arguments.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(_table(found))
    return int(any(verdict["kind"] in input_programs.FAILURES for verdict in found))


def _table(found: Sequence[Dict[str, Any]]) -> str:
    kinds = collections.Counter(verdict["kind"] for verdict in found)
    lines = ["", f"TensorFlow {tf.__version__}: {len(found)} programs, "
             f"{sum(verdict['seconds'] for verdict in found) / max(1, len(found)):.2f} s each", "", "| outcome | programs |",
             "|---|---|"]
    lines += [f"| {kind} | {count} |" for kind, count in sorted(kinds.items(), key=lambda item: -item[1])]
    sentences = collections.Counter((verdict["kind"], _sentence(verdict["detail"])) for verdict in found
                                    if verdict["kind"] not in ("divided", "whole", "wrong"))
    lines += ["", "| outcome | message | programs |", "|---|---|---|"]
    lines += [f"| {kind} | {text} | {count} |" for (kind, text), count in sentences.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
