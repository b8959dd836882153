"""Numbers of groups of processes and of their collectives.

TensorFlow remembers the shape that a collective's instance has had in its first step, and refuses others.  So a collective whose
tensors have another shape in another step has an instance for each shape, whose number is computed when the step runs::

    shape of the tensor ──> weighted sum ──> modulo ──> instance_key of a collective of version 2
"""

from __future__ import annotations

from typing import Dict, Tuple

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import Nodes

AGREEMENT_KEYS = 1 << 24  # more than the collectives of any graph
# An instance's number tells the collective from others of its group, and its shapes from each other.  Shapes that differ in one
# dimension, by less than SHAPES, have different numbers.  If others have the same one, TensorFlow refuses the step.
FIRST, COLLECTIVES, SHAPES = 1 << 30, 1 << 10, 1 << 20
WEIGHT = 1034  # a dimension d counts 1 + 1034 d, which is odd


class Keys:
    """Numbers groups and collectives.

    TensorFlow's server remembers both for its lifetime, so one object serves all graphs of a process.  Processes that stage
    the same graphs in the same order assign the same numbers.
    """

    def __init__(self) -> None:
        self._groups: Dict[Tuple, int] = {}  # groups, and their name -> the first one's number
        self._next_group = 1
        self._instances = 0
        self._agreements = 0
        self._sequences = 0
        self._open = 0

    def group(self, groups: Tuple[Tuple[int, ...], ...], number: int, *name: str) -> int:
        """The number of a group of processes.

        Args:
            groups: processes of each of the groups with this name; no process is a member of two.
            number: which of them it is.
        """
        key = (groups, *name)
        if key not in self._groups:
            self._groups[key] = self._next_group
            self._next_group += len(groups)
        return self._groups[key] + number

    def instance(self, count: int = 1) -> int:
        """The first of ``count`` numbers of collectives."""
        self._instances += count
        return self._instances - count + 1

    def open_instance(self) -> Tuple[str, int]:
        """The name of a group, and the number in it, of a collective whose tensors' shape is open."""
        self._open += 1
        block, number = divmod(self._open - 1, COLLECTIVES)
        return f"open {block}", number

    def sequence(self, count: int = 1) -> int:
        """The first of ``count`` numbers of sequences by which steps are numbered."""
        self._sequences += count
        return self._sequences - count + 1

    @property
    def count(self) -> int:
        """How many collectives have a number."""
        return self._instances + self._open

    def agreement(self) -> Tuple[int, int]:
        """Group and instance of a graph's agreement, which are the same in all processes even if other keys differ."""
        self._agreements += 1
        return AGREEMENT_KEYS, AGREEMENT_KEYS + self._agreements


def number_of_shape(nodes: Nodes, sizes: str, scope: str, device: str) -> str:
    """Name of an int32 scalar that tells a shape from others.

    Args:
        sizes: the shape, an int32 vector.
        scope: name of the new ops.
    """
    def const(value: int, what: str) -> str:
        return nodes.const(value, f"{scope}/{what}", tf.int32, device)

    zero, one = const(0, "zero"), const(1, "one")
    rank = nodes.add("Size", scope + "/rank", [sizes], device, T=tf.int32, out_type=tf.int32)
    found = nodes.add("Range", scope + "/dims", [zero, rank, one], device, Tidx=tf.int32)
    for kind, operand, what in (("Mul", const(WEIGHT, "weight"), "steps"), ("Add", one, "weights"), ("Mul", sizes, "weighted")):
        found = nodes.binary(kind, found, operand, f"{scope}/{what}", tf.int32, device)
    found = nodes.add("Sum", scope + "/sum", [found, zero], device, T=tf.int32, Tidx=tf.int32, keep_dims=False)
    return nodes.binary("FloorMod", found, const(SHAPES, "shapes"), scope + "/number", tf.int32, device)


def instance_of_shape(nodes: Nodes, number: int, shape: str, scope: str, device: str) -> str:
    """Name of an int32 scalar: the instance of a collective for tensors of a shape.

    Args:
        number: of the collective, which no other one of its group has.
        shape: the shape's number.
        scope: name of the new ops.
    """
    first = nodes.const(FIRST + number * SHAPES, scope + "/first", tf.int32, device)
    return nodes.binary("Add", shape, first, scope + "/instance", tf.int32, device)
