"""A graph as it was recorded once, and as a pass over its ops leaves it: capture starts from this."""

from __future__ import annotations

import copy
from typing import Any, Collection, List, Mapping, NamedTuple, Optional, Sequence, Set

from whale_tf._tf_compat import tf
from whale_tf.capture.annotations import Annotations, GradientCall, annotations_of
from whale_tf.capture.phases import Phases, find_phases
from whale_tf.capture.record import NO_COPIES, NO_TAGS, Tags, record, record_anew
from whale_tf.capture.sizes import of_unknown_rank
from whale_tf.graph_editor.definitions import Definitions, definitions_of
from whale_tf.graph_editor.staged import StagedEdit
from whale_tf.ir.graph import OpGraph, Shape


class Recording(NamedTuple):
    """A step as single ops.  A pass over ops takes one and returns another; neither it nor the tf.Graph is edited.

    Attributes:
        graph: the ops, with their phases.
        phases: what else was found with the phases.
        annotations: the TaskGraphs' annotations and the gradient calls, with names of ``graph``.
        definitions: NodeDefs of the ops, which emission clones.
        replaced: tensor or op of the user's graph -> what is computed instead.
        returned: names of a tf.function's results; None: Sessions run the graph.
        copies: op that the last pass made -> an op before it, from which it differs only in edges, device, colocation and tags.
    """

    graph: OpGraph
    phases: Phases
    annotations: Annotations
    definitions: Definitions
    replaced: Mapping[str, Any] = {}
    returned: Optional[Sequence[str]] = None
    copies: Mapping[str, str] = {}

    @property
    def results(self) -> Optional[List[int]]:
        """A tf.function's results; None: this is not a function."""
        return None if self.returned is None else [self.graph.tensor(self.computed(name)) for name in self.returned]

    @property
    def done(self) -> Set[str]:
        """Ops of the user's graph whose work others do."""
        return {name for name in self.replaced if ":" not in name}

    def computed(self, name: str) -> str:
        """The tensor that is computed instead of tensor ``name``."""
        while name in self.replaced:
            name = self.replaced[name]
        return name

    def after(self, edit: StagedEdit, calls: List[GradientCall], successors: Mapping[str, str], shapes: Mapping[str, Shape],
              replaced: Mapping[str, Any], kept: Collection[str] = (), tags: Mapping[str, Tags] = NO_TAGS,
              before_ops: Mapping[str, str] = NO_COPIES) -> Recording:
        """The step after a pass.

        Args:
            edit: what it staged, begun after ``definitions``; never committed.
            calls: the gradient calls, with names of the new ops.
            successors: op whose work others do now -> the op to which its gradients belong.
            shapes: shapes of new tensors, by name.
            replaced: that of the step after the pass.
            kept: ops with a successor that others still read, and that stay in the step.
            tags, before_ops: see :func:`record_anew`.
        """
        definitions = edit.definitions()
        annotations = copy.copy(self.annotations)
        annotations.gradient_calls = calls
        annotations.checkpoints = [new for new in renamed(self.annotations.checkpoints, replaced) if isinstance(new, str)]
        annotations.axes = {replaced.get(name, name): dim for name, dim in self.annotations.axes.items()
                            if isinstance(replaced.get(name, name), str)}
        gone = {name for name in self.definitions.added if name not in self.graph}  # added by a pass, dropped by a later one
        dropped = gone.union(successors).difference(kept)
        graph = record_anew(self.graph, definitions, successors, dropped, shapes, edit.copies, tags, before_ops)
        return Recording(graph, find_phases(graph, annotations), annotations, definitions, replaced, self.returned, edit.copies)


CHECKPOINTS = "checkpoints"  # collection of tensors that scripts mark like wh.checkpoint, under EPL's and older names


def recording_of(graph: tf.Graph) -> Recording:
    """Records a graph."""
    annotations = copy.copy(annotations_of(graph))
    annotations.checkpoints = list(dict.fromkeys(
        [*annotations.checkpoints, *(tensor.name for tensor in graph.get_collection(CHECKPOINTS))]))
    definitions = definitions_of(graph, dict(annotations.shapes))
    annotations.items, annotations.gradient_calls = list(annotations.items), list(annotations.gradient_calls)
    ops = record(graph, definitions.export, of_unknown_rank(definitions))
    returned = [tensor.name for tensor in graph.outputs] if graph.building_function else None
    return Recording(ops, find_phases(ops, annotations), annotations, definitions, returned=returned)


def renamed_call(call: GradientCall, ys: List[str], xs: List[str], grads: List[Any]) -> GradientCall:
    """The same gradient call with other tensors."""
    new = GradientCall(call.index, ys, xs, call.given)
    new.grads, new.first_op, new.last_op = grads, call.first_op, call.last_op
    return new


def renamed(names: Any, replaced: Mapping[str, str]) -> Any:
    """Names of a gradient call, each replaced if it is in ``replaced``."""
    if isinstance(names, (list, tuple)):
        return type(names)([renamed(name, replaced) for name in names])
    return replaced.get(names, names)
