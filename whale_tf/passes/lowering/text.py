"""A Program as text, with the primitives to which its recipes are lowered."""

from __future__ import annotations

from typing import Callable, Dict, List, Sequence

from whale_tf.passes.lowering.lowering import Lowering
from whale_tf.passes.lowering.primitive import (
    ASSIGN,
    BROADCAST,
    CUT,
    EXTENT_OF,
    HOST,
    OP,
    PART,
    READ,
    SCALE,
    SHARE,
    SHIFT,
    VALUE,
    Broadcast,
    Cut,
    Primitive,
    Reduction,
    in_order,
)
from whale_tf.program import Clone

GIVEN = {VALUE: "", PART: "part of ", EXTENT_OF: "extent of "}  # operands that are no ops, as OP


def lowered_text(lowering: Lowering, devices: Sequence[str] = ()) -> str:
    """The Program's text, with the primitives of each recipe below its call.  ``%n`` is the result of one.

    Args:
        devices: names of the cluster's devices; by default their numbers are shown.
    """
    lines = lowering.program.to_text(devices).splitlines()
    head = len(lines) - len(lowering.program.calls)
    numbers: Dict[Primitive, int] = {}
    found = lines[:head]
    for number, line in enumerate(lines[head:]):
        found.append(line)
        for each in in_order(lowering.values_of(number), numbers):
            if each.kind != OP and each.kind not in GIVEN:
                numbers[each] = len(numbers)
                found.append("      " + _line(each, numbers, lowering, devices))
    return "\n".join(found) + "\n"


def _line(each: Primitive, numbers: Dict[Primitive, int], lowering: Lowering, devices: Sequence[str]) -> str:
    name = lowering.program.graph.tensor_name

    def operand(read: Primitive) -> str:
        if read.kind == OP:
            return lowering.program.graph.ops[read.detail].name
        if read.kind not in GIVEN:
            return f"%{numbers[read]}"
        return f"{GIVEN[read.kind]}{name(read.tensor)}@{_coordinates(read.clone)}"

    where = "host" if each.device == HOST else devices[each.device] if devices else str(each.device)
    waits = f"  after {', '.join(map(operand, each.waits))}" if each.waits else ""
    operands = ", ".join([name(each.tensor)] * (each.kind in (READ, ASSIGN)) + list(map(operand, each.operands)))
    detail = _sent(each.detail, name) if each.kind == BROADCAST else _detail(each)
    return f"%{numbers[each]} = {each.kind}{detail}({operands})  on {where}{waits}"


def _coordinates(clone: Clone) -> str:
    return "_".join(f"{letter}{number}" for letter, number in zip("gmr", clone) if number >= 0) or "all"


def _sent(what: Broadcast, name: Callable[[int], str]) -> str:
    return "[{}]".format(" ".join([", ".join(map(name, what.tensors))] * bool(what.tensors) + [f"from process {what.root}"]))


def _detail(each: Primitive) -> str:
    found: List[str] = []
    if isinstance(each.detail, Reduction):
        found = [each.detail.kind] + ["float16"] * each.detail.fp16
    elif each.kind == CUT:
        cut: Cut = each.detail
        found = [f"{_coordinates(each.clone)} of {'+'.join(map(_coordinates, cut.pieces))}"]
    elif each.kind in (SCALE, SHARE, SHIFT):
        found = [f"t{each.task_graph}", _coordinates(each.clone)] + [f"^{each.detail}"] * (each.kind == SCALE)
    elif isinstance(each.detail, int):
        found = [str(each.detail)]
    return f"[{' '.join(found)}]" if found else ""
