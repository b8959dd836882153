"""Where TensorFlow runs the ops of a step on a machine with GPUs, and what goes between the host and a GPU because of it.

The rules are those of TensorFlow's placer with soft placement (tensorflow/core/common_runtime/placer.cc, colocation_graph.cc):
an op runs on the GPU that it asks for if there is a kernel for its types, else on the host; an op that asks for nothing runs on
the first GPU if there is a kernel; all ops of a variable run where the variable is, so that one of them without a kernel takes
the variable to the host.  A tensor is in the memory of its device, or in the host's if the kernel says so::

    GPU:0  MatMul ──> a ──┐              a: to the host, as many bytes as it has
    host   FractionalMaxPool ──> b ──┐   it has no kernel for GPUs
    GPU:0                  Conv2D <──┘   b: back to GPU:0
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf.profiler.gpu_kernels import GpuKernels, Kernel, Types

HOST = -1
NO_KERNEL, ARGUMENT, INPUT, ASKED = "no kernel", "argument", "input", "host op"
HANDLES = ("resource", "variant")


class GraphTensor(NamedTuple):
    """An op's result.

    Attributes:
        dtype: name of the type; of a reference, the type to which it refers.
        bytes: None: the size is not known before the step runs.
        argument: name of the result in the op's definition.
    """

    dtype: str
    bytes: Optional[float]
    argument: str = ""
    is_ref: bool = False


class GraphOp(NamedTuple):
    """An op of the graph that runs.

    Attributes:
        types: its type attributes.
        asks: number of the GPU, or :data:`HOST`, that it asks for; None: nothing.
        inputs: (number of the op, which of its results, name of the argument in this op's definition).
        is_input: whether it takes examples from outside.
        follows: number of an op beside which it asks to be; -1: none.
    """

    name: str
    type: str
    types: Types
    asks: Optional[int]
    inputs: Tuple[Tuple[int, int, str], ...]
    outputs: Tuple[GraphTensor, ...]
    is_input: bool = False
    follows: int = -1


class Placed(NamedTuple):
    """Where an op runs.

    Attributes:
        device: number of the GPU, or :data:`HOST`.
        kernel: the kernel; None: it runs on the host.
        why_host: why it runs on the host although it asks for a GPU or for nothing; "" if it does not.
        blames: number of the op without a kernel, which may be another one that uses the same variable.
    """

    device: int
    kernel: Optional[Kernel] = None
    why_host: str = ""
    blames: int = -1


class Crossing(NamedTuple):
    """A tensor that goes from the host to a GPU or back, once a step.

    Attributes:
        op, output: the tensor.
        reader: the first op that needs it there.
        device: the GPU.
        to_host: whether it goes to the host.
        bytes: None: not known.
        why: :data:`NO_KERNEL`, :data:`ARGUMENT` (the reader's kernel takes it from the host's memory), :data:`INPUT`, or
            :data:`ASKED` (the other op asks to be on the host).
    """

    op: int
    output: int
    reader: int
    device: int
    to_host: bool
    bytes: Optional[float]
    why: str


def place(ops: Sequence[GraphOp], kernels: GpuKernels) -> List[Placed]:
    """Where each op runs."""
    found: List[Placed] = [Placed(HOST)] * len(ops)
    for members in _groups(ops):
        asked = next((ops[number].asks for number in members if ops[number].asks is not None), None)
        known = {number: kernels.find(ops[number].type, ops[number].types) for number in members} if asked != HOST else {}
        lacking = [number for number in members if asked != HOST and known[number] is None]
        for number in members:
            if asked == HOST:
                continue
            if lacking:
                blamed = number if number in lacking else lacking[0]
                found[number] = Placed(HOST, None, kernels.why_none(ops[blamed].type, ops[blamed].types), blamed)
            else:
                found[number] = Placed(asked or 0, known[number])
    return found


def _groups(ops: Sequence[GraphOp]) -> List[List[int]]:
    """The ops that run on one device together: those of a variable, and those that ask to be beside each other."""
    leader = list(range(len(ops)))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    for number, op in enumerate(ops):
        beside = [source for source, output, _ in op.inputs
                  if ops[source].outputs[output].is_ref or ops[source].outputs[output].dtype == "resource"]
        for other in beside + [op.follows] * (op.follows >= 0):
            first, second = sorted((find(number), find(other)))
            leader[second] = first
    groups: Dict[int, List[int]] = {}
    for number in range(len(ops)):
        groups.setdefault(find(number), []).append(number)
    return list(groups.values())


def crossings(ops: Sequence[GraphOp], placed: Sequence[Placed]) -> List[Crossing]:
    """What goes between the host and GPUs in a step.  A tensor goes once to a device, whatever number of ops read it there."""
    found: Dict[Tuple[int, int, int], Crossing] = {}
    inputs = _of_inputs(ops, placed)
    for reader, op in enumerate(ops):
        for source, output, argument in op.inputs:
            tensor = ops[source].outputs[output]
            if tensor.dtype in HANDLES:
                continue
            here = _memory(placed[source], tensor.argument)
            there = _memory(placed[reader], argument)
            key = source, output, there
            if here == there or HOST not in (here, there) or key in found:
                continue
            to_host = there == HOST
            found[key] = Crossing(source, output, reader, here if to_host else there, to_host, tensor.bytes,
                                  _why(source in inputs, placed[source], placed[reader], to_host))
    return list(found.values())


def _memory(one: Placed, argument: str) -> int:
    """Where an op has its argument of this name."""
    return HOST if one.kernel is not None and argument in one.kernel.host else one.device


def _of_inputs(ops: Sequence[GraphOp], placed: Sequence[Placed]) -> Set[int]:
    """The inputs, and the ops on the host that only divide or rename them there."""
    found: Set[int] = set()
    more = True
    while more:
        before = len(found)
        for number, op in enumerate(ops):
            fed = {source for source, _, _ in op.inputs if ops[source].inputs or ops[source].is_input}
            if op.is_input or (placed[number].device == HOST and not placed[number].why_host and fed and fed <= found):
                found.add(number)
        more = len(found) > before
    return found


def _why(is_input: bool, made: Placed, read: Placed, to_host: bool) -> str:
    if made.why_host or read.why_host:
        return NO_KERNEL
    if to_host and read.device != HOST or not to_host and made.device != HOST:
        return ARGUMENT
    return INPUT if is_input and not to_host else ASKED


class Lacking(NamedTuple):
    """Ops of one type that run on the host for one reason.

    Attributes:
        ops: their numbers.
        beside: numbers of the ops that run there because they use the same variables.
        to_host, to_gpu: bytes that go to them from GPUs, and from them to GPUs, in a step; sizes that are not known do not count.
        is_open: whether some sizes are not known.
        comes_back: whether a GPU reads their results.
    """

    type: str
    why: str
    ops: Tuple[int, ...]
    beside: Tuple[int, ...]
    to_host: float
    to_gpu: float
    is_open: bool
    comes_back: bool


def lacking(ops: Sequence[GraphOp], placed: Sequence[Placed], found: Sequence[Crossing]) -> List[Lacking]:
    """The ops that run on the host because TensorFlow has no kernel for them, and that exchange something with a GPU; those that
    move most bytes first."""
    rows: Dict[Tuple[str, str], List[int]] = {}
    for number, one in enumerate(placed):
        if one.why_host:
            rows.setdefault((ops[one.blames].type, one.why_host), []).append(number)
    table = []
    for (kind, why), members in rows.items():
        here = set(members)
        to_host = [one for one in found if one.to_host and one.reader in here]
        to_gpu = [one for one in found if not one.to_host and one.op in here]
        if not to_host and not to_gpu:
            continue
        own = tuple(number for number in members if placed[number].blames == number)
        beside = tuple(number for number in members if placed[number].blames != number)
        table.append(Lacking(kind, why, own, beside, _sum(to_host), _sum(to_gpu),
                             any(one.bytes is None for one in (*to_host, *to_gpu)), bool(to_gpu) and bool(to_host)))
    return sorted(table, key=lambda row: (-(row.to_host + row.to_gpu), row.type))


def _sum(found: Sequence[Crossing]) -> float:
    return sum(one.bytes or 0.0 for one in found)


def total(found: Sequence[Crossing], wanted: Callable[[Crossing], bool]) -> Tuple[int, float, bool]:
    """The number of the crossings that are wanted, their bytes, and whether some sizes are not known."""
    rows = [one for one in found if wanted(one)]
    return len(rows), _sum(rows), any(one.bytes is None for one in rows)
