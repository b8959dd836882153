"""Checkpoints of divided variables, slice by slice: no device reads or writes a whole variable.

The file contains the local script's names and full shapes (TensorFlow's own slice info, as for partitioned variables), so that
it can be restored locally and under any other plan.  Every device writes its own file, one after the other, and the files become
the data shards of a single checkpoint::

    before   v ──> SaveV2(path)              after   v/0 ──> SaveV2(path_part0: "v", "4 10 -:0,5") ──┬─> MergeV2Checkpoints(path)
                                                     v/1 ──> SaveV2(path_part1: "v", "4 10 -:5,5") ──┘

    before   RestoreV2(path) ──> Assign(v)   after   RestoreV2(path: "v", "4 10 -:0,5") ──> Assign(v/0)   and so on

If a checkpoint contains the whole tensor, as the local script writes it, TensorFlow's kernel reads the whole for each part.
Savers of another form (version 1, a Reshape after the restore, computed names) keep working on the whole value.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.ir.traits import READS
from whale_tf.patterns.spread import Spread

Home = Tuple[int, int]  # TaskGraph, number of the device in it


class DividedVariable(NamedTuple):
    """A divided variable: the names of its parts' ops, how they form the whole, its TaskGraph, and its kind, type and shape.

    In a tf.function ``op`` is the placeholder of its handle.
    """

    op: tf.Operation
    names: Tuple[str, ...]
    spread: Spread
    task_graph: int
    is_resource: bool
    dtype: tf.DType
    shape: Tuple[int, ...]

    def home(self, i: int) -> Home:
        return self.task_graph, i


class Entry(NamedTuple):
    """A tensor or a slice of one in a checkpoint."""

    name: bytes
    spec: bytes
    dtype: tf.DType


class _Restore:
    """A RestoreV2's outputs for divided variables (by number), and what each device reads instead, with the part that it is
    for."""

    def __init__(self) -> None:
        self.divided: Set[int] = set()
        self.slots: Dict[Home, List[Tuple[Entry, str]]] = {}


class Checkpoints:
    """Stages the ops that save and restore the parts.

    Args:
        nodes: stages them; new nodes are on the host until their ``placed`` part has a device.
        variables: by op.
        read: ``(variable, part, scope, ops to wait for)`` stages a read of a part.
        edges: names of the tensors that an op reads.
        controls: names of the ops to wait for instead of an op's own control inputs.

    Attributes:
        placed: new node -> the part near whose device it runs.
        reads: (tensor, name of the tensor that its readers read instead).
    """

    def __init__(self, nodes: Nodes, root: str, variables: Mapping[tf.Operation, DividedVariable],
                 read: Callable[[DividedVariable, str, str, Sequence[str]], str], edges: Callable[[tf.Operation], Sequence[str]],
                 controls: Callable[[tf.Operation], List[str]]) -> None:
        self._nodes, self._root, self._variables, self._read, self._edges = nodes, root, variables, read, edges
        self._controls = controls
        self.placed: Dict[str, str] = {}
        self.reads: List[Tuple[tf.Tensor, str]] = []
        self._restores: Dict[tf.Operation, _Restore] = {}

    # -- saving -------------------------------------------------------------------------------------------------------
    def save(self, op: tf.Operation) -> Optional[str]:
        """Name of the last of the ops that replace a ``SaveV2``; None: it saves no divided variable."""
        entries = _entries(op, [tensor.dtype.base_dtype for tensor in op.inputs[3:]])
        found = {k: self._variable(tensor) for k, tensor in enumerate(op.inputs[3:])}
        if entries is None or not any(variable for variable, _ in found.values()):
            return None
        scope, waits = f"{self._root}/{op.name}", self._controls(op)
        rest = [k for k, (variable, _) in found.items() if variable is None]
        groups: Dict[Home, List[Tuple[Entry, Callable[[Sequence[str]], str], str]]] = {}
        for k, (variable, passed) in found.items():
            for i, part in enumerate(variable.names if variable is not None else ()):
                assert variable is not None
                entry = entries[k]._replace(spec=_slice(entries[k].spec, variable, i))
                read = self._reader(variable, part, f"{scope}/read{k}_{i}", [*passed, *waits])
                groups.setdefault(variable.home(i), []).append((entry, read, part))
        files, saves = [], []  # type: List[str], List[str]
        if rest:
            files.append(self._file(op, scope, len(files)))
            saves.append(self._save(op, files[-1], [entries[k] for k in rest], [self._edges(op)[3 + k] for k in rest], waits))
        for home in sorted(groups):
            files.append(self._file(op, scope, len(files)))
            own, reads, parts = zip(*groups[home])
            saves.append(self._save(op, files[-1], own, [read(saves[-1:]) for read in reads], waits + saves[-1:]))
            self.placed[saves[-1]] = parts[0]
        packed = self._nodes.add("Pack", scope + "/files", files, op.device, T=tf.string, N=len(files), axis=0)
        return self._nodes.add("MergeV2Checkpoints", scope + "/merge", [packed, op.inputs[0].name], op.device, saves,
                               delete_old_dirs=False)

    def _reader(self, variable: DividedVariable, part: str, scope: str, waits: Sequence[str]) -> Callable[[Sequence[str]], str]:
        return lambda before: self._read(variable, part, scope, [*waits, *before])

    def _file(self, op: tf.Operation, scope: str, number: int) -> str:
        """Name of a file next to the one that the ``SaveV2`` would write."""
        name = f"{scope}/file{number}"
        end = self._nodes.const(f"_part{number}", name + "/end", tf.string, op.device)
        return self._nodes.add("StringJoin", name, [op.inputs[0].name, end], op.device, N=2, separator="")

    def _save(self, op: tf.Operation, file: str, entries: Sequence[Entry], tensors: Sequence[str], waits: Sequence[str]) -> str:
        name = file + "/save"
        return self._nodes.add("SaveV2", name, [file, *self._listed(entries, name), *tensors], op.device, waits,
                               dtypes=[entry.dtype for entry in entries])

    def _listed(self, entries: Sequence[Entry], scope: str) -> List[str]:
        return [self._nodes.const([entry[field] for entry in entries], scope + "/" + Entry._fields[field], tf.string, "")
                for field in (0, 1)]

    def _variable(self, tensor: tf.Tensor) -> Tuple[Optional[DividedVariable], List[str]]:
        """The divided variable of which a tensor is the plain value, and what its reads wait for."""
        waits: List[str] = []
        while tensor.op.type in READS:
            waits += self._controls(tensor.op)
            tensor = tensor.op.inputs[0]
        return self._variables.get(tensor.op), waits

    # -- restoring ----------------------------------------------------------------------------------------------------
    def restored(self, variable: DividedVariable, value: tf.Tensor) -> Optional[List[str]]:
        """Names of the parts of a value from a checkpoint; None: the value is from elsewhere."""
        while value.op.type == "Identity" and not value.op.control_inputs:
            value = value.op.inputs[0]
        entries = _entries(value.op, value.op.get_attr("dtypes")) if value.op.type == "RestoreV2" else None
        if entries is None:
            return None
        entry, restore = entries[value.value_index], self._restores.setdefault(value.op, _Restore())
        restore.divided.add(value.value_index)
        names = []
        for i, part in enumerate(variable.names):
            slots = restore.slots.setdefault(variable.home(i), [])
            names.append(f"{self._restore_name(value.op, variable.home(i))}:{len(slots)}")
            slots.append((entry._replace(spec=_slice(entry.spec, variable, i)), part))
        return names

    def _restore_name(self, op: tf.Operation, home: Home) -> str:
        return "{}/{}/restore{}_{}".format(self._root, op.name, *home)

    def finish(self) -> None:
        """Stages the ops that restore: one for each device, and one for everything that is not divided."""
        for op, restore in self._restores.items():
            waits = self._controls(op)
            for home, slots in restore.slots.items():
                name = self._restore(op, self._restore_name(op, home), [entry for entry, _ in slots], waits)
                self.placed[name] = slots[0][1]
            entries = _entries(op, op.get_attr("dtypes")) or []
            rest = [k for k in range(len(entries)) if k not in restore.divided]
            if rest:
                name = self._restore(op, f"{self._root}/{op.name}/restore", [entries[k] for k in rest], waits)
                self.reads += [(op.outputs[k], f"{name}:{slot}") for slot, k in enumerate(rest)]

    def _restore(self, op: tf.Operation, name: str, entries: Sequence[Entry], waits: Sequence[str]) -> str:
        return self._nodes.add("RestoreV2", name, [op.inputs[0].name, *self._listed(entries, name)], op.device, waits,
                               dtypes=[entry.dtype for entry in entries])


def host_of(device: str) -> str:
    """The device that reads or writes a part's slice: the part's own logical CPU.  For GPUs, and in a job of several processes
    (which may not share a file system), it is the local script's."""
    return device if device.startswith("/job:localhost/") and "CPU" in device else ""


def _entries(op: tf.Operation, dtypes: Sequence[Any]) -> Optional[List[Entry]]:
    """The entries that a SaveV2 or RestoreV2 lists; None: they are computed."""
    names, specs = (tf.get_static_value(tensor) for tensor in op.inputs[1:3])
    if names is None or specs is None:
        return None
    return [Entry(name, spec, tf.as_dtype(dtype)) for name, spec, dtype in zip(names, specs, dtypes)]


def _slice(spec: bytes, variable: DividedVariable, i: int) -> bytes:
    """TensorFlow's description of a part: full shape, then ``start,length`` or ``-`` of each dimension.

    Args:
        spec: the variable's; empty or, if the variable is itself a slice, in this form.
    """
    *full, ranges = spec.decode().split(" ") if spec else [*map(str, variable.shape), ":".join("-" for _ in variable.shape)]
    pieces = ranges.split(":")
    for dim, start, size in variable.spread.parts[i].ranges:
        offset = 0 if pieces[dim] == "-" else int(pieces[dim].partition(",")[0])
        pieces[dim] = f"{offset + start},{size}"
    return " ".join([*full, ":".join(pieces)]).encode()
