"""Variables of tf.functions in parts.  If ``wh.split`` or ``zero`` divides a variable, each part is on its own device; a whole
variable with a home (``zero``, ``offload``) is a single part there.  Each part is a variable of its own.

Everybody else still reads, assigns, saves and restores the user's variable.  Its value is in one place at a time: in its own
resource, or in the parts of one division::

    step(batch)           whole ── slices ──> parts, which the step reads and updates; the whole takes no memory
    v.numpy(), v.assign   parts ── concat ──> whole, from which the next step takes its slices

Whoever reads or writes a variable takes its handle: eager ops from the variable, functions from their captures.  The handle of a
divided variable is a property that puts the parts together; calls of functions that captured the handle put them together, too.

In several processes, a part may be in one of them, which alone updates it: an optimizer's variable under ``zero``, a variable
of a stage, a shard.  In the others it takes no memory during steps, and any access to the variable returns the value of that part
over the network.  So a part keeps its value until the next step, which replaces it with what the script has written since only
when all processes have come there::

    owner of m       step: part of m           m.numpy(): whole = part
    other processes  step: nothing             m.numpy(): whole = part of the owner, read by its name
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf._tf_compat import tf
from whale_tf.capture.handles import own_handle
from whale_tf.errors import PlanError
from whale_tf.patterns.spread import Spread
from whale_tf.processes.functions import Functions

_RECORD = "_whale_parts"  # attribute of a divided variable


class _Division(NamedTuple):
    """Attributes:
    spread: ``once`` if one part is the whole variable.
    devices: TensorFlow's names, one for each part.
    owners: for each part the device in the process that has it, if that is another one, or an empty string; with one process, ().
    names: by which other processes read the parts; with one process, ().
    """

    spread: Spread
    devices: Tuple[str, ...]
    owners: Tuple[str, ...] = ()
    names: Tuple[str, ...] = ()

    def is_elsewhere(self, part: int) -> bool:
        """Whether another process has a part."""
        return bool(self.owners and self.owners[part])

    def parts_of(self, whole: tf.Tensor) -> List[tf.Tensor]:
        spread, shape = self.spread, tuple(whole.shape.as_list())
        if not spread.is_divided:
            return [whole]
        return [tf.slice(whole, start, part) for start, part in zip(self.starts(len(shape)), spread.shapes(shape))]

    def starts(self, rank: int) -> List[Tuple[int, ...]]:
        """The first element of each part of a variable with this number of dimensions."""
        starts = [{one.dim: one.start for one in part.ranges} for part in self.spread.parts]
        return [tuple(start.get(dim, 0) for dim in range(rank)) for start in starts]

    def whole_of(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        if not self.spread.is_divided:
            return tf.identity(parts[0])
        whole: tf.Tensor = self.spread.whole_of(parts, tf.concat)
        return whole


class _Named(NamedTuple):
    """A part that other processes find by its name."""

    handle: tf.Tensor
    device: str

    @classmethod
    def of(cls, name: str, whole: _Divided, shape: Sequence[Optional[int]]) -> _Named:
        handle = tf.raw_ops.VarHandleOp(dtype=whole.dtype, shape=shape, shared_name=name)
        if tuple(shape) == whole.shape:
            handle._handle_data = whole.handle._handle_data
        return cls(handle, handle.device)

    def destroy(self) -> None:
        with tf.init_scope():
            tf.raw_ops.DestroyResourceOp(resource=self.handle)


class _Divided:
    """A divided variable.

    Args:
        job: see :class:`VariableParts`.

    Attributes:
        variable: the user's, as long as it lives.
        handle: of the whole.
        parts: of each division that a function asked for.
        held: the division that has the value; None: the whole has it.
        is_in_use: a function is running on the parts, those of ``used``.
    """

    def __init__(self, variable: Any, job: Optional[Functions]) -> None:
        self.variable, self._job = weakref.ref(variable), job
        self.handle, self.device, self.name, self.dtype = variable.handle, variable.device, variable.name, variable.dtype
        self.shape = tuple(variable.shape.as_list())
        self.parts: Dict[_Division, List[Any]] = {}
        self.held: Optional[_Division] = None
        self.is_in_use = False
        self.used: Optional[_Division] = None

    def divided(self, division: _Division) -> Sequence[Any]:
        """The division's parts, which are made if there are none yet; they hold nothing until :meth:`divide`."""
        if division not in self.parts:
            self.parts[division] = []
            for i, (device, shape) in enumerate(zip(division.devices, division.spread.shapes(self.shape))):
                with tf.init_scope(), tf.device(device):
                    if division.names:
                        part: Any = _Named.of(division.names[i], self, shape)
                    else:
                        part = tf.Variable(tf.zeros([size or 0 for size in shape], self.dtype), trainable=False, shape=shape,
                                           name=f"{self.name.partition(':')[0]}/part{i}")
                        _empty(part.handle, self.dtype)
                self.parts[division].append(part)
        return self.parts[division]

    def divide(self, division: _Division) -> None:
        """Moves the value to the parts."""
        if self.held == division:
            return
        self.put_together()
        with tf.init_scope():
            with tf.device(self.device):
                here = [number for number in range(len(division.devices)) if not division.is_elsewhere(number)]
                pieces = division.parts_of(tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)) if here else []
            for number in here:
                part = self.parts[division][number]
                with tf.device(part.device):
                    if division.names and self._was_read(part, pieces[number]):
                        self._job.wait_for_readers()  # type: ignore[union-attr]
                    tf.raw_ops.AssignVariableOp(resource=part.handle, value=pieces[number])
            with tf.device(self.device):  # only now: a device may have too little memory
                _empty(self.handle, self.dtype)
        self.held = division

    def _was_read(self, part: _Named, value: tf.Tensor) -> bool:
        """Whether other processes may still read another value from a part, because the variable was written between steps."""
        if not tf.raw_ops.VarIsInitializedOp(resource=part.handle):
            return False
        left = tf.raw_ops.ReadVariableOp(resource=part.handle, dtype=self.dtype)
        return left.shape == value.shape and not bool(tf.reduce_all(tf.equal(left, value)))

    def put_together(self) -> None:
        """Moves the value to the whole.  While a function is running on the parts, the whole gets a copy."""
        if self.held is None:
            return
        division = self.held
        with tf.init_scope():
            with tf.device(self.device):
                tf.raw_ops.AssignVariableOp(resource=self.handle, value=self.value(division))
            self.held = None  # only now: the process that has a part may have ended
            for part in self.parts[division] if not (self.is_in_use or division.names) else ():
                _empty(part.handle, self.dtype)

    def value(self, division: _Division) -> tf.Tensor:
        """The whole, put together from a division's parts."""
        return division.whole_of([self._part(division, number) for number in range(len(division.devices))])

    def _part(self, division: _Division, number: int) -> tf.Tensor:
        if division.is_elsewhere(number):
            assert self._job is not None
            return tf.constant(self._job.bring(division.names[number], division.owners[number], self.dtype), self.dtype)
        return tf.raw_ops.ReadVariableOp(resource=self.parts[division][number].handle, dtype=self.dtype)

    @contextlib.contextmanager
    def in_use(self, division: _Division) -> Iterator[None]:
        """The parts have the value, and a function is running on them."""
        self.divide(division)
        self.is_in_use, self.used = True, division
        try:
            yield
        finally:
            self.is_in_use = False
            if self.held is None:  # an open tape took the handle before the function ran
                self.held = division
                with tf.init_scope():
                    _empty(self.handle, self.dtype)


def _empty(handle: tf.Tensor, dtype: tf.DType) -> None:
    """Makes a variable hold nothing, so that a read that bypasses this module fails."""
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([0], dtype))


class _Handle:
    """A divided variable's ``_handle``, which TensorFlow's C++ half reads by this name, too."""

    def __get__(self, variable: Any, owner: Any) -> Any:
        if tf.executing_eagerly():
            variable.__dict__[_RECORD].put_together()
        return variable.__dict__["_handle"]

    def __set__(self, variable: Any, handle: Any) -> None:
        variable.__dict__["_handle"] = handle


_classes: Dict[type, type] = {}


def _divided_class(of: type) -> type:
    """A class of variables that is like ``of`` except for the handle."""
    if of not in _classes:
        _classes[of] = type(of)(of.__name__, (of,), {"_handle": _Handle(), "__module__": of.__module__})
    return _classes[of]


class VariableParts:
    """All divided variables since ``wh.init``.

    Args:
        job: functions that several processes run together; None: there is one process.
    """

    def __init__(self, job: Optional[Functions] = None) -> None:
        self._job = job
        self._wholes: Dict[int, _Divided] = {}  # by ``id`` of the handle
        self._parts: Dict[int, Tuple[_Divided, _Division, int]] = {}  # by ``id`` of the handle, with the number of the part
        self._closed = False

    def divide(self, variable: Any, spread: Spread, devices: Sequence[str]) -> Sequence[Any]:
        """Variables for the parts.  They have the value whenever a function that captured them runs."""
        return self._parts_in(self._record(variable), _Division(spread, tuple(devices)))

    def keep(self, variable: Any, spread: Spread, devices: Sequence[str], owners: Sequence[str]) -> Sequence[Any]:
        """Variables for the parts, each of which one of several processes has.

        Args:
            devices: of the parts, or of what stands for them here.
            owners: for each part the device in the process that has it; empty: it is this one.
        """
        assert self._job is not None
        record, where = self._record(variable), (spread, tuple(devices), tuple(owners))
        known = next((division for division in record.parts if division.names and division[:3] == where), None)
        return self._parts_in(record, known or _Division(*where, tuple(self._job.new_name() for _ in devices)))

    def _record(self, variable: Any) -> _Divided:
        record: Optional[_Divided] = variable.__dict__.get(_RECORD)
        if record is None:
            record = _Divided(variable, self._job)
            variable.__dict__[_RECORD] = record
            variable.__class__ = _divided_class(type(variable))
            self._wholes[id(record.handle)] = record
            weakref.finalize(variable, self._forget, record).atexit = False
        return record

    def _parts_in(self, record: _Divided, division: _Division) -> Sequence[Any]:
        parts = record.divided(division)
        self._parts.update({id(part.handle): (record, division, number) for number, part in enumerate(parts)})
        return parts

    def _forget(self, record: _Divided) -> None:
        self._wholes.pop(id(record.handle), None)
        for division, parts in record.parts.items():
            for number, part in enumerate(parts):
                self._parts.pop(id(part.handle), None)
                if division.names and not division.is_elsewhere(number) and self._job is not None:
                    self._job.later(part.destroy)  # another process may still read it

    def before_call(self, captured: Sequence[Any]) -> None:
        """Call before a function runs: puts captured variables together."""
        if self._wholes and tf.executing_eagerly():
            for handle in captured:
                record = self._wholes.get(id(handle))
                if record is not None:
                    record.put_together()

    def bring(self, handles: Sequence[Any]) -> None:
        """Moves the values of variables to those of their parts that have these handles, for a reader that is no function."""
        for handle in handles:
            if id(handle) in self._parts:
                record, division, _ = self._parts[id(handle)]
                if not record.is_in_use:
                    record.divide(division)

    def value(self, handle: Any, dtype: tf.DType) -> Any:
        """The value of the variable with this handle, also while a function is running on its parts."""
        record = self._wholes.get(id(handle))
        if record is not None and record.is_in_use and record.used is not None:
            return record.value(record.used).numpy()
        self.before_call([handle])
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype).numpy()

    def held(self, variable: Any) -> Optional[List[Tuple[int, Tuple[int, ...], tf.Tensor]]]:
        """The parts of a variable that this process holds during steps, with their numbers and first elements; None: it holds the
        whole."""
        record = self._wholes.get(id(own_handle(variable)))
        if record is None or record.used is None:
            return None
        division = record.used
        record.divide(division)  # for an evaluation, it was put together
        return [(number, start, tf.raw_ops.ReadVariableOp(resource=record.parts[division][number].handle, dtype=record.dtype))
                for number, start in enumerate(division.starts(len(record.shape))) if not division.is_elsewhere(number)]

    def is_part(self, variable: Any) -> bool:
        """Whether a variable is a part of another one."""
        return id(own_handle(variable)) in self._parts

    def is_elsewhere(self, handle: Any) -> bool:
        """Whether this handle is of a part that another process has."""
        if id(handle) not in self._parts:
            return False
        _, division, number = self._parts[id(handle)]
        return division.is_elsewhere(number)

    def parts_of(self, handle: Any, among: Sequence[Any]) -> Tuple[List[Any], Spread]:
        """The handles of a variable's parts in their order, and how it is divided.

        Args:
            handle: of the whole.
            among: handles that a function captured, with those of one division.
        """
        record, division, _ = next(self._parts[id(part)] for part in among
                                   if id(part) in self._parts and self._parts[id(part)][0].handle is handle)
        return [part.handle for part in record.parts[division]], division.spread

    def watch(self, function: Any) -> None:
        """Makes each call of a concrete function that captured parts find the value in them.

        Raises:
            PlanError: the function also reads the whole variable, or other parts of it.
        """
        captured = [self._parts[id(handle)][:2] for handle in function.captured_inputs if id(handle) in self._parts]
        if not captured:
            return
        needed: Dict[int, Tuple[_Divided, _Division]] = {}
        for record, division in captured:
            if needed.setdefault(id(record), (record, division))[1] != division:
                raise PlanError(
                    f"tf.function {function.graph.name!r} calls functions that divide variable {record.name!r} differently or "
                    "keep it on different devices (wh.split, zero, offload, variables 'stage'); call them one after the other, "
                    "outside of a function")
        for handle in function.captured_inputs:
            whole = self._wholes.get(id(handle))
            if whole is not None and id(whole) in needed:
                raise PlanError(
                    f"tf.function {function.graph.name!r} reads or writes variable {whole.name!r} and calls a function that "
                    "divides it (wh.split) or keeps it on another device (zero, offload, variables 'stage'); do one of these "
                    "outside of the function, or both in the function that trains")
        function._call_flat = self._caller(function._call_flat, list(needed.values()), function)

    def _caller(self, original: Callable[..., Any], needed: Sequence[Tuple[_Divided, _Division]],
                function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not tf.executing_eagerly():
                if self._closed:
                    raise PlanError(
                        "a function whose variables are divided (wh.split) or on other devices (zero, offload, variables "
                        "'stage') is called in another function, which is traced after wh.shutdown(); call wh.init() and create "
                        "both functions again")
                return original(*args, **kwargs)
            try:
                with contextlib.ExitStack() as stack:
                    if self._job is not None:
                        stack.enter_context(self._job.begun(function))
                    for record, division in needed:
                        stack.enter_context(record.in_use(division))
                    return original(*args, **kwargs)
            finally:
                for record, _ in needed if self._closed else ():
                    record.put_together()
        return call

    def close(self) -> None:
        """Restores all variables.  Functions that divide them now do so only during a call."""
        self._closed = True
        for handle in list(self._wholes):
            record = self._wholes.pop(handle)
            variable = record.variable()
            record.put_together()
            if variable is not None:
                del variable.__dict__[_RECORD]
                variable.__class__ = type(variable).__mro__[1]
