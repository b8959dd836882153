"""Sessions that ran before their graph was rewritten: it had no optimizer yet, or the ranks of its inputs were not known.

The graph has already been extended into such a session, which has the variables on their old devices.  If the plan only clones
ops, the session goes on: ops whose edges move are replaced with copies (``StagedEdit.copy_instead``).  If the plan divides
variables or puts them elsewhere, the session begins anew, which the script does not notice::

    read variables ──> rewrite ──> another session of TensorFlow's ──> initialise tables and iterators ──> load variables

Some states cannot be taken along, such as an iterator's position or a queue's elements.  A run that changed one is noted.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Collection, Dict, Optional, Sequence, Set, Tuple

from whale_tf._tf_compat import renew, tf
from whale_tf.emit.processes import ancestors
from whale_tf.errors import PlanError
from whale_tf.ir.traits import RANDOM, VARIABLES, Role, traits


class Early:
    """What a session has done so far.

    Attributes:
        kept: the first op that changed a state which a new session would not have; "": none.
        drawn: names of random ops that have drawn numbers.
    """

    def __init__(self) -> None:
        self.kept = ""
        self.drawn: Set[str] = set()
        self._initialised: Dict[Tuple[str, ...], Any] = {}  # tables and iterators, in this order -> what was fed
        self._noted: Dict[Tuple[str, ...], Tuple[str, ...]] = {}  # what was fetched -> what that initialises
        self._values: Optional[Dict[str, Any]] = None

    def note(self, fetched: Sequence[tf.Operation], feed_dict: Any) -> None:
        """Call before each run."""
        asked = tuple(op.name for op in fetched)
        if asked not in self._noted:
            needed = ancestors(fetched)
            self._noted[asked] = tuple(sorted(op.name for op in needed if traits(op.type).role is Role.INITIALIZE))
            self.kept = self.kept or next((op.name for op in needed if _changes_state(op)), "")
            self.drawn.update(op.name for op in needed if op.type in RANDOM)
        if self._noted[asked]:
            self._initialised.pop(self._noted[asked], None)
            self._initialised[self._noted[asked]] = feed_dict

    def read(self, graph: tf.Graph, run: Callable) -> None:
        """Keeps the variables' values.

        Args:
            run: TensorFlow's own ``session.run``.
        """
        variables = list(_variables(graph).items())
        try:
            self._values = dict(zip(dict(variables), run([variable for _, variable in variables])))
        except tf.errors.FailedPreconditionError:  # some are not initialised yet
            self._values = {}
            for name, variable in variables:
                with contextlib.suppress(tf.errors.FailedPreconditionError):
                    self._values[name] = run(variable)

    def renew(self, session: Any, original: Callable) -> None:
        """Makes the session begin anew, after the rewrite.

        Raises:
            PlanError: it runs on a server, which keeps the variables.
        """
        if session._target:
            raise PlanError(
                f"this Session ran before its graph was divided, and the server {session.sess_str!r} has the variables on their "
                "old devices; build the optimizer before the first run, and give all inputs their shapes")
        if self._values is None:
            self.read(session.graph, original)
        renew(session)
        for names, feed_dict in self._initialised.items():
            original([session.graph.get_operation_by_name(name) for name in names], feed_dict)
        variables = _variables(session.graph)
        for name, value in (self._values or {}).items():
            initializer = variables[name].initializer
            session.run(initializer, {initializer.inputs[1]: value})
        self._values = None


def check_renewable(early: Collection[Early], drawing: Collection[str]) -> None:
    """Call if sessions have to begin anew.

    Args:
        drawing: names of random ops whose numbers must be the local script's.

    Raises:
        PlanError: a session has a state that a new one would not have.
    """
    for each in early:
        changed = each.kept or min(each.drawn.intersection(drawing), default="")
        if changed:
            raise PlanError(
                f"a Session ran {changed!r} before the first training step. The plan divides variables or moves them (wh.split, "
                f"zero, offload), so the Session has to begin anew, and would lose the state of {changed!r}; build the optimizer "
                "before the first run, and give all inputs their shapes")


def _changes_state(op: tf.Operation) -> bool:
    """Whether an op changes something that is no variable: it takes an element, or writes to a queue or table."""
    row = traits(op.type)
    handles = any(tensor.dtype.base_dtype == tf.resource or tensor.dtype._is_ref_dtype for tensor in op.inputs)
    is_known = row.is_write or row.role in (Role.SAVE, Role.INITIALIZE)
    return row.role is Role.PULL or (handles and not op.outputs and not is_known)


def _variables(graph: tf.Graph) -> Dict[str, Any]:
    """The variables in the graph's collections, by the names of their ops.  What an assignment returns is a variable, too, but
    reading it assigns (updates of batch normalisation's averages)."""
    items = (each for key in graph.collections for each in graph.get_collection(key))
    return {each.op.name: each for each in items if isinstance(each, tf.Variable) and each.op.type in VARIABLES}
