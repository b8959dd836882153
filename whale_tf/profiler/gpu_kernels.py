"""Which ops TensorFlow can run on a GPU: the kernel registry of its CUDA builds, as data.

An op runs on a GPU if the registry has a kernel whose constraints its type attributes meet.  Such a kernel may still want some
arguments in the host's memory (shapes, axes, numbers of rows), and give some results there.  The rule is that of TensorFlow's
``FindKernelDef`` (tensorflow/core/framework/op_kernel.cc): kernels of the device's own type come first, then those registered for
any device.  ``python -m whale_tf.measure.registry`` makes the data files anew.
"""

from __future__ import annotations

import functools
import glob
import itertools
import json
import os
from typing import Any, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from whale_tf.errors import PlanError

FOLDER = os.path.join(os.path.dirname(__file__), "kernels")
OWN, ANY = "GPU", "DEFAULT"  # TensorFlow's names: kernels for GPUs, and for any kind of device
MOST_TYPES = 6  # to name in a message

Types = Mapping[str, Tuple[str, ...]]  # type attribute of an op -> its types, several for a list


class Kernel(NamedTuple):
    """Attributes:
    allows: type attribute -> the types for which the kernel is registered.
    host: names of the arguments and results that are in the host's memory.
    """

    allows: Mapping[str, FrozenSet[str]]
    host: FrozenSet[str]

    def suits(self, types: Types) -> bool:
        """Whether an op with these types may run it.  An attribute that the op does not have says nothing."""
        return all(allowed.issuperset(types.get(attr, ())) for attr, allowed in self.allows.items())


class Registered(NamedTuple):
    """A row of TensorFlow's registry; ``device``: :data:`OWN` or :data:`ANY`."""

    op: str
    device: str
    kernel: Kernel


class GpuKernels(NamedTuple):
    """``version``: the TensorFlow whose kernels these are; ``kernels``: op type -> its kernels, in the order of their turns."""

    version: str
    kernels: Mapping[str, Tuple[Kernel, ...]]

    def find(self, op_type: str, types: Types) -> Optional[Kernel]:
        """The kernel that an op runs on a GPU; None: there is none, so the op runs on the host."""
        return next((kernel for kernel in self.kernels.get(op_type, ()) if kernel.suits(types)), None)

    def why_none(self, op_type: str, types: Types) -> str:
        """Why :meth:`find` has found nothing, in words."""
        known = self.kernels.get(op_type, ())
        if not known:
            return f"TensorFlow {self.version} has no {op_type} for GPUs"
        attrs = dict.fromkeys(attr for kernel in known for attr, allowed in kernel.allows.items()
                              if not allowed.issuperset(types.get(attr, ())))
        said = []
        for attr in attrs:
            allowed = sorted({name for kernel in known for name in kernel.allows.get(attr, ())})
            more = f" and {len(allowed) - MOST_TYPES} more" * (len(allowed) > MOST_TYPES)
            said.append(f"{attr} {', '.join(types.get(attr, ()))} (it has {', '.join(allowed[:MOST_TYPES])}{more})")
        return f"TensorFlow {self.version} has no {op_type} for GPUs with " + ", ".join(said)

    def to_json(self) -> str:
        """The data file: every set of types is written once, and each op is a line."""
        numbers: Dict[str, int] = {}

        def row(kernel: Kernel) -> List[Any]:
            allows = {attr: numbers.setdefault(" ".join(sorted(allowed)), len(numbers))
                      for attr, allowed in sorted(kernel.allows.items())}
            return [allows, " ".join(sorted(kernel.host))]

        lines = [f"  {json.dumps(op)}: {json.dumps(list(map(row, known)))}" for op, known in sorted(self.kernels.items())]
        sets = ",\n  ".join(map(json.dumps, numbers))
        return '{{\n "tensorflow": {},\n "types": [\n  {}\n ],\n "kernels": {{\n{}\n }}\n}}\n'.format(
            json.dumps(self.version), sets, ",\n".join(lines))

    @classmethod
    def from_json(cls, text: str) -> GpuKernels:
        """What :meth:`to_json` wrote."""
        data = json.loads(text)
        sets = [frozenset(types.split()) for types in data["types"]]
        return cls(data["tensorflow"], {
            op: tuple(Kernel({attr: sets[number] for attr, number in allows.items()}, frozenset(host.split()))
                      for allows, host in rows) for op, rows in data["kernels"].items()})

    @classmethod
    def of(cls, version: str, rows: Iterable[Registered]) -> GpuKernels:
        """The table of a registry.  Kernels that differ in the types of one attribute become one."""
        found: Dict[str, Dict[str, List[Kernel]]] = {}
        for row in rows:
            found.setdefault(row.op, {}).setdefault(row.device, []).append(row.kernel)
        return cls(version, {op: _without_repetitions(itertools.chain(*(joined(devices.get(one, ())) for one in (OWN, ANY))))
                             for op, devices in found.items()})


def joined(kernels: Iterable[Kernel]) -> List[Kernel]:
    """Fewer kernels that allow the same: two that differ in the types of one attribute are one with the types of both."""
    found: List[Kernel] = []
    for kernel in kernels:
        again = True
        while again:
            again = False
            for other in found:
                union = _union(kernel, other)
                if union is not None:
                    found.remove(other)
                    kernel, again = union, True
                    break
        found.append(kernel)
    return sorted(found, key=lambda one: (sorted(one.host), sorted((attr, sorted(types)) for attr, types in one.allows.items())))


def _without_repetitions(kernels: Iterable[Kernel]) -> Tuple[Kernel, ...]:
    found: List[Kernel] = []
    for kernel in kernels:
        if kernel not in found:
            found.append(kernel)
    return tuple(found)


def _union(one: Kernel, other: Kernel) -> Optional[Kernel]:
    if one.host != other.host or set(one.allows) != set(other.allows):
        return None
    differ = [attr for attr in one.allows if one.allows[attr] != other.allows[attr]]
    if len(differ) > 1:
        return None
    return Kernel({attr: types | other.allows[attr] for attr, types in one.allows.items()}, one.host)


def versions() -> List[str]:
    """The TensorFlows whose tables the package has, oldest first."""
    names = [os.path.basename(path)[:-len(".json")] for path in glob.glob(os.path.join(FOLDER, "*.json"))]
    return sorted(names, key=_numbers)


def nearest(version: str, known: Sequence[str]) -> str:
    """The TensorFlow of ``known`` whose kernels stand for those of ``version``: the newest that is not newer, else the oldest."""
    before = [name for name in known if _numbers(name) <= _numbers(version)[:2]]
    return before[-1] if before else known[0]


@functools.lru_cache(maxsize=2)
def shipped(version: str) -> GpuKernels:
    """The table for a TensorFlow, such as ``"2.21.0"``; if the package has none for it, the :func:`nearest` one.

    Raises:
        PlanError: the package has no tables.
    """
    known = versions()
    if not known:
        raise PlanError(f"there are no kernel tables in {FOLDER!r}; install whale_tf again, or make one: "
                        "python -m whale_tf.measure.registry FILE")
    with open(os.path.join(FOLDER, nearest(version, known) + ".json"), encoding="utf8") as handle:
        return GpuKernels.from_json(handle.read())


def _numbers(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
