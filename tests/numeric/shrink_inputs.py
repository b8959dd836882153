"""Makes a failing program as small as it still fails in the same way."""
from __future__ import annotations

import re
from typing import Callable, Iterator, Tuple

from tests.functions.equality import Way
from tests.numeric.input_programs import Line, Program, Verdict, names_in
from tests.numeric.input_rules import TERMS

MOST_TRIES = 150


def shrink(program: Program, verdict: Verdict, judge: Callable[[Program], Verdict]) -> Tuple[Program, Verdict]:
    """The first smaller program of the same kind of failure, again and again."""
    tries = 0
    while True:
        for candidate in _smaller(program):
            tries += 1
            if tries > MOST_TRIES:
                return program, verdict
            found = judge(candidate)
            if found.kind == verdict.kind:
                program, verdict = candidate, found
                break
        else:
            return program, verdict


def _smaller(program: Program) -> Iterator[Program]:
    if program.steps > 1:
        for step in range(program.steps):
            yield program._replace(inputs=tuple(item._replace(sizes=item.sizes[step:step + 1]) for item in program.inputs))
    yield from (program._replace(terms=program.terms[:i] + program.terms[i + 1:]).tidy()
                for i in range(len(program.terms)) if len(program.terms) > 1)
    yield from (program._replace(outputs=program.outputs[:i] + program.outputs[i + 1:]).tidy()
                for i in range(len(program.outputs)))
    way = program.way
    plainest = Way((), 2, {key: value for key, value in way.config.items() if key == "random"})  # else draws differ, as they may
    if way.counts:
        yield program._replace(way=plainest, cuts=())
        yield program._replace(way=way._replace(counts=(), split=()), cuts=())
        if way.devices > sum(way.counts):
            yield program._replace(way=way._replace(devices=sum(way.counts)))
    elif way != plainest:
        yield program._replace(way=plainest)
    for key in set(way.config) - {"random"}:
        yield program._replace(way=way._replace(config={name: value for name, value in way.config.items() if name != key}))
    for number, line in enumerate(program.lines):
        for operand in line.operands:
            if operand[0] != "w":
                yield _without(program, number, operand)
    for number, term in enumerate(program.terms):
        for rule in ("mean", "sum"):
            for name in dict.fromkeys(names_in(term)):
                code = TERMS[rule].code.format(a=name)
                if len(code) < len(term):
                    yield program._replace(terms=program.terms[:number] + (code,) + program.terms[number + 1:]).tidy()
    if program.optimizer != "sgd" or program.is_optimized or not program.is_resource:
        yield program._replace(optimizer="sgd", is_optimized=False, is_resource=True)
    for number, item in enumerate(program.inputs):
        if item.kind in ("static", "columns"):
            smaller = item._replace(kind="open")
            yield program._replace(inputs=program.inputs[:number] + (smaller,) + program.inputs[number + 1:])


def _without(program: Program, number: int, operand: str) -> Program:
    """An operand of a line stands for its results."""
    def replaced(text: str) -> str:
        return re.sub(r"\b(?:%s)\b" % "|".join(program.lines[number].names), operand, text)

    lines = [Line(line.names, replaced(line.code), tuple(replaced(name) for name in line.operands))
             for line in program.lines[:number] + program.lines[number + 1:]]
    outputs = tuple(code for code in program.outputs if not set(names_in(code)).intersection(program.lines[number].names))
    return program._replace(lines=tuple(lines), terms=tuple(replaced(term) for term in program.terms), outputs=outputs,
                            cuts=tuple(cut - (number < cut) for cut in program.cuts)).tidy()
