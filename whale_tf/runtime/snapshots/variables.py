"""Variables in eager execution and of tf.functions: which a run has, their values, and new values for them.

Of ``fit``: a model, its metrics and its optimizer know most variables.  What else a training step reads and writes (the slots of
further optimizers, a loss scale, generators of random numbers) is found in the functions that are traced meanwhile.

Of a loop of the script's own: all variables that were made since ``wh.init``, in their order; and those made before it that
functions read or write.
"""
from __future__ import annotations

import re
import sys
import weakref
from typing import Any, Callable, Container, Dict, Iterable, List, MutableSet, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.errors import SnapshotError
from whale_tf.runtime.snapshots.files import Piece, SnapshotValue
from whale_tf.runtime.variable_parts import VariableParts

_DIGITS = re.compile(r"(\d+)")
_NUMBER = re.compile(r"_\d+(?=[/_:]|$)")
OTHERS, MADE, SEED = "captured/", "made/", "seeds/0"
_WITHOUT_VALUE = (tf.resource, tf.variant)
OR_ELSE = "or set another snapshot.path"  # the end of messages


class Captured(NamedTuple):
    """Variables that functions have captured, and graphs of functions that were looked at."""

    variables: Dict[str, Callable[[], Any]]
    graphs: MutableSet[Any]


class Variables:
    """What both kinds have in common: variables that functions have captured, and values for those that do not exist yet.

    Args:
        parts: where the parts of variables are.
        is_chief: this process writes what all processes have.
        host: the device to which values are copied.
        or_else: what can be done in place of training the same model, for messages.
    """

    def __init__(self, parts: VariableParts, is_chief: bool, host: str, or_else: str = OR_ELSE) -> None:
        self._parts, self._is_chief, self._host, self._or_else = parts, is_chief, host, or_else
        self._captured, self._looked_at = Captured({}, weakref.WeakSet())
        self._pending: Dict[str, SnapshotValue] = {}  # values of variables that do not exist yet
        self._given: Optional[Set[str]] = None  # keys of all values that were given; None: none were

    def _known(self) -> List[Tuple[str, Any]]:
        """Variables that need not be found in functions, by their keys."""
        raise NotImplementedError

    def _makes(self, key: str) -> Sequence[Tuple[str, Any]]:
        """Makes the variable with a key, and maybe others, if it is known how."""
        return ()

    def traced(self, graph: tf.Graph) -> None:
        """Call when a function has been made from ``graph``: the trace may have made variables, which get their values."""
        if graph in self._looked_at:
            return
        self._looked_at.add(graph)
        known = {id(variable) for _, variable in self._known()}
        known |= {id(reference()) for reference in self._captured.values()}
        for variable in sorted(graph.variables, key=_in_order):  # TensorFlow has them in no order
            if id(variable) not in known:
                key = free_key(OTHERS, variable.name, self._captured)
                self._captured[key] = weakref.ref(variable)
                known.add(id(variable))
        if self._pending:
            variables = self._all()
            with tf.init_scope():
                for key in [key for key in self._pending if key in variables]:
                    if variables[key].is_initialized():  # else TensorFlow does that after this trace, and traces again
                        self._assign(variables[key], self._pending.pop(key))

    def keys(self) -> Dict[int, str]:
        """The keys of all variables, by the variables' ``id``."""
        return {id(variable): key for key, variable in self._all().items()}

    def read(self) -> Tuple[List[Piece], List[Any]]:
        """What this process holds, and is to write: whole variables and pieces, and tensors with their values."""
        pieces: List[Piece] = []
        values: List[Any] = []
        for key, variable in self._all().items():
            if variable.dtype in _WITHOUT_VALUE:
                continue
            held = self._parts.held(variable)
            shape = tuple(variable.shape.as_list())
            if held is not None:
                for number, start, value in held:
                    pieces.append(Piece(f"{key}/{number}", key, variable.name, shape, start, False))
                    values.append(self._on_host(value))
            elif self._is_chief and self._has_value(variable):
                value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
                whole = tuple(value.shape.as_list())
                pieces.append(Piece(key, key, variable.name, whole, (0,) * len(whole), True))
                values.append(self._on_host(value))
        return pieces, values

    def _has_value(self, variable: Any) -> bool:
        """Whether a variable was initialised."""
        return True

    def _decides(self, variable: Any) -> bool:
        """Whether a variable is part of what is trained."""
        return True

    def _on_host(self, value: Any) -> Any:
        """The value in the host's memory.  On CPU devices nothing is copied: the next update writes to new memory."""
        with tf.device(self._host):
            return tf.identity(value)

    def write(self, values: Iterable[SnapshotValue]) -> None:
        """Gives variables new values.  Those that do not exist yet get theirs when a trace has made them, or has met them.

        Raises:
            SnapshotError: a variable has another shape or type.
        """
        known = self._all()
        self._given = set()
        for value in values:
            self._given.add(value.key)
            if value.key not in known:
                known.update(self._makes(value.key))
            if value.key in known:
                self._assign(known[value.key], value)
            else:
                self._pending[value.key] = value

    @property
    def waiting(self) -> Sequence[str]:
        """Names of variables whose values have not found them yet."""
        return [value.name for value in self._pending.values()]

    def check(self) -> None:
        """Call after the first step.

        Raises:
            SnapshotError: the script has variables that the snapshot does not have.
        """
        if self._given is not None:
            missing = [variable.name for key, variable in self._all().items() if key not in self._given
                       and variable.dtype not in _WITHOUT_VALUE and self._has_value(variable) and self._decides(variable)]
            self._given = None
            if missing:
                raise SnapshotError("the snapshot has no value of {}; train the model that it was made of, {}".format(
                    ", ".join(missing), self._or_else))

    def _assign(self, variable: Any, value: SnapshotValue) -> None:
        """Raises:
            SnapshotError: the variable has another shape or type.
        """
        found = value.value
        if not variable.shape.is_compatible_with(found.shape) or variable.dtype.as_numpy_dtype != np.dtype(found.dtype):
            raise SnapshotError(
                f"variable {variable.name!r} is {variable.dtype.name} {variable.shape}, but {found.dtype} {found.shape} in the "
                f"snapshot; train the model that it was made of, {self._or_else}")
        variable.assign(found)

    def _all(self) -> Dict[str, Any]:
        found = dict(self._known())
        known = {id(variable) for variable in found.values()}
        for key, reference in self._captured.items():
            variable = reference()
            if variable is not None and id(variable) not in known:
                found[key] = variable
        return found


class ModelVariables(Variables):
    """The variables of a Keras model and its training step.

    Args:
        model: a Keras model.
        captured: by functions of the model in calls of ``fit`` before, which are not traced again.
    """

    def __init__(self, model: Any, captured: Captured, parts: VariableParts, is_chief: bool, host: str,
                 or_else: str = OR_ELSE) -> None:
        super().__init__(parts, is_chief, host, or_else)
        self._model = model
        self._captured, self._looked_at = captured

    def check(self) -> None:
        """Call after the first step.

        Raises:
            SnapshotError: the model has other variables than the snapshot.
        """
        if self._pending:
            raise SnapshotError("the snapshot has values of {}, which this model and its training step do not have; train the "
                                "model that it was made of, {}".format(", ".join(self.waiting), self._or_else))
        super().check()

    def _known(self) -> List[Tuple[str, Any]]:
        return self._of_model(makes_seed=False)

    def _makes(self, key: str) -> Sequence[Tuple[str, Any]]:
        return self._of_model(makes_seed=True) if key == SEED else ()

    def _of_model(self, makes_seed: bool) -> List[Tuple[str, Any]]:
        found: List[Tuple[str, Any]] = []
        seen = set()
        groups = {"model": self._model.variables, "metrics": self._model.metrics_variables,
                  "optimizer": getattr(self._model.optimizer, "variables", ()), "seeds": _seeds(makes_seed)}
        for group, variables in groups.items():
            for number, variable in enumerate(variables):
                variable = getattr(variable, "_value", variable)  # Keras has a class of its own around TensorFlow's
                if id(variable) not in seen:
                    seen.add(id(variable))
                    found.append((f"{group}/{number}", variable))
        return found


class Made:
    """The variables that were made in eager execution or in functions since ``wh.init``, in the order in which they were made.
    Their order and their names without numbers are the same whenever the script runs, whatever the plan."""

    def __init__(self) -> None:
        self._references: Dict[str, Callable[[], Any]] = {}

    def note(self, variable: Any) -> str:
        """A variable has been made; returns its key."""
        key = free_key(MADE, variable.name, self._references)
        self._references[key] = weakref.ref(variable)
        return key

    def alive(self) -> List[Tuple[str, Any]]:
        found = ((key, reference()) for key, reference in self._references.items())
        return [(key, variable) for key, variable in found if variable is not None]


class LoopVariables(Variables):
    """The variables of a loop of the script's own.

    Args:
        made: all that were made since ``wh.init``.
    """

    def __init__(self, made: Made, parts: VariableParts, is_chief: bool, host: str) -> None:
        super().__init__(parts, is_chief, host)
        self._made = made

    def made(self, key: str, variable: Any) -> None:
        """Call when a variable has been made, which may have to go on with another value."""
        if key in self._pending:
            with tf.init_scope():
                if variable.is_initialized():  # else TensorFlow does that after the trace, and traces again
                    self._assign(variable, self._pending.pop(key))

    def position(self) -> Dict[str, int]:
        """Iterators are not among what is made: the loop has its own."""
        return {}

    def move(self, position: Dict[str, int], begins_anew: bool) -> None:
        """There are none to move."""

    def _known(self) -> List[Tuple[str, Any]]:
        return [(key, variable) for key, variable in self._made.alive() if not self._parts.is_part(variable)]

    def _has_value(self, variable: Any) -> bool:
        return bool(variable.is_initialized())

    def _decides(self, variable: Any) -> bool:
        """Not what the script makes beside its steps, and may have made only after the snapshot: the count of saves of a
        ``tf.train.Checkpoint``, for example."""
        return variable.trainable or any(one is variable for graph in self._looked_at for one in graph.variables)


def free_key(group: str, name: str, taken: Container[str]) -> str:
    """A key for a variable, without the numbers that Keras gives to names: it counts in the whole process, also what is not
    trained."""
    first = key = group + _NUMBER.sub("", name)
    number = 1
    while key in taken:
        key, number = f"{first}#{number}", number + 1
    return key


def _in_order(variable: Any) -> Tuple[List[Tuple[int, str]], int]:
    """Variables by their names, in which numbers count as such: ``dense_9`` before ``dense_10``; equal names (Keras 3) in the
    order in which the variables were made."""
    made = _DIGITS.findall(variable._unique_id)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(variable.name)], int((made or ["0"])[-1])


def _seeds(makes_one: bool) -> Sequence[Any]:
    """The state of Keras' generator for random numbers without a generator of their own, if there is one."""
    if makes_one:
        return [sys.modules["keras.src.random.seed_generator"].global_seed_generator().state]
    generator = sys.modules["keras.src.backend.common.global_state"].get_global_attribute("global_seed_generator")
    return () if generator is None else [generator.state]
