"""``wh.Timeline``: a training run as a timeline of a few measured steps, and as curves in TensorBoard."""

from __future__ import annotations

import os
import warnings
from typing import Any, Callable, List, Optional, Tuple

from whale_tf._tf_compat import tf
from whale_tf.cluster import device_names
from whale_tf.diagnosis import scalars
from whale_tf.diagnosis.record import Record, to_json
from whale_tf.diagnosis.traces import measured_of, simulated_of
from whale_tf.documents import check_files
from whale_tf.errors import PlanError, WhaleError
from whale_tf.planner.auto.settings import batch_to_plan_for
from whale_tf.runtime.active import Active, require
from whale_tf.runtime.curves import Curves, memory_of
from whale_tf.runtime.doctor import WARM_UP, Collector, Step
from whale_tf.simulator.trace import write_chrome


class _Run:
    """What is known of this run of the program, which snapshots do not keep.

    Attributes:
        traced: the steps to trace; None: they have been.
        calls: of the training function, or runs of a Session.
        unwritten: steps that no scalar has yet.
    """

    def __init__(self, traced: range) -> None:
        self.traced: Optional[range] = traced
        self.calls = 0
        self.unwritten: List[Step] = []
        self.arithmetic: Optional[scalars.Arithmetic] = None


class Timeline:
    """Traces a few training steps, draws them as ``whale simulate`` draws simulated ones, and writes scalars for TensorBoard
    (docs/timeline.md).  It is a Keras callback, and a context manager around any other training loop::

        model.fit(dataset, callbacks=[wh.Timeline("step.svg", log_dir="logs")])

        timeline = wh.Timeline("step.svg", log_dir="logs")    # after wh.init, before the first step
        with timeline:
            for batch in dataset:
                step(batch)                                   # or session.run(train)

    It changes no number.  A traced step is slower than others.  In several processes each measures and writes its own devices:
    process 1 writes ``step_1.svg``, and scalars into ``logs/process_1``.

    Args:
        timeline: draw the traced step into this ``.svg`` or ``.png`` file: a row for each device, a bar for each call of the
            Program with its micro-batch, thin bars for messages.
        trace: write the step, op by op, into this file for Perfetto or ``chrome://tracing``.
        record: write what was measured into this file, for ``whale doctor``, which also draws several processes together.
        log_dir: write scalars there.
        steps: the first and the last step to trace, counted from 1; of a Session's, the one in the middle is drawn.
        simulated: also draw and write the simulated step, with the measured times of its ops.
        batch: examples of a mini-batch, if neither the graph, feeds, arguments nor the data of ``fit`` say it.
        update_freq: write ``step/...`` as means over so many steps.

    Raises:
        WhaleError: wh.init was not called.
        PlanError: an argument cannot be used so, or there is nothing to write.
        MissingPackageError: a picture is wanted, and matplotlib is not installed (``whale_tf[viz]``).
    """

    _supports_tf_logs = True  # asked by Keras 2

    def __init__(self, timeline: Optional[str] = None, trace: Optional[str] = None, record: Optional[str] = None,
                 log_dir: Optional[str] = None, steps: Tuple[int, int] = (10, 12), simulated: bool = True,
                 batch: Optional[int] = None, update_freq: int = 10) -> None:
        self._state: Active = require("wh.Timeline")
        if timeline is None and trace is None and record is None and log_dir is None:
            raise PlanError("wh.Timeline() has nothing to write; give it a file for timeline, trace or record, or a log_dir")
        check_files({"trace": trace, "record": record}, {"timeline": timeline})
        first, last = steps
        if not WARM_UP + 2 <= first <= last:
            raise PlanError(f"wh.Timeline(steps={steps!r}) needs the first and the last step to trace, the first at least "
                            f"{WARM_UP + 2}: steps before it warm up, and show how long an untraced step takes")
        if update_freq < 1:
            raise PlanError(f"wh.Timeline(update_freq={update_freq}) must be a number of steps, at least 1")
        if timeline is not None:
            import whale_tf.viz.diagnosis as _  # noqa: F401  # says now that matplotlib is missing
        self._timeline, self._trace, self._record = timeline, trace, record
        self._log_dir, self._simulated, self._batch, self._update_freq = log_dir, simulated, batch, update_freq
        self._run = _Run(range(first, last + 1))
        self._collector: Optional[Collector] = None
        self._curves: Optional[Curves] = None
        self._count = 0  # of steps; with snapshots, a run that goes on counts on
        self._of_call = 1  # steps
        self._state.may_measure = True

    def __enter__(self) -> Timeline:
        self._begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end()

    # ---- Keras -------------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Every Keras asks for other methods; those that are not below do nothing."""
        if name.startswith("on_"):
            return _nothing
        if name.startswith("_implements_"):
            return _no
        raise AttributeError(f"wh.Timeline has no attribute {name!r}")

    def set_params(self, params: Any) -> None:
        """Does nothing."""

    def set_model(self, model: Any) -> None:
        """Asks how many steps a call of the training function makes."""
        steps = getattr(model, "steps_per_execution", None)
        steps = getattr(model, "_steps_per_execution", None) if steps is None else steps  # Keras 2
        self._of_call = 1 if steps is None or isinstance(steps, str) else int(steps)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to measure."""
        self._begin()

    def on_test_begin(self, logs: Any = None) -> None:
        """Leaves validation out."""
        self._pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Leaves the time between epochs out."""
        self._pause()

    def on_train_end(self, logs: Any = None) -> None:
        """Ends measuring."""
        self._end()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        state = self._state = require("wh.Timeline")
        if state.doctor is not None and not state.doctor.is_over:
            if not state.doctor.is_asked:
                raise PlanError("wh.Timeline() cannot trace steps while wh.doctor() does; use one of them in a run")
            warnings.warn("an earlier wh.Timeline() ends, because only one can measure at a time; its training did not end")
            state.doctor.close()
        if self._run.traced is None and self._log_dir is None:
            return
        traced = self._run.traced or range(0)
        assumed = batch_to_plan_for(state.config, state.cluster, None)
        self._collector = state.doctor = Collector(
            traced.stop - 1 - WARM_UP, self._batch, assumed, state.cluster, state.processes, self._finished, traced,
            self._each if self._log_dir is not None else None, lambda: state.data_batch)
        if self._log_dir is not None and self._curves is None:
            self._curves = Curves(self._log_dir, state.processes)

    def _pause(self) -> None:
        if self._collector is not None:
            self._collector.pause()

    def _end(self) -> None:
        if self._collector is None:
            return
        self._collector.close()
        if self._state.doctor is self._collector:
            self._state.doctor = None
        self._collector = None
        traced = self._run.traced
        if traced is not None:
            self._state.say(f"wh.Timeline(steps={(traced.start, traced.stop - 1)}) has traced nothing, because it ended before "
                            f"step {traced.start} of a divided training; give smaller numbers, or train longer")
        if self._curves is not None:
            self._write()
            self._curves.flush()

    def _each(self, step: Step) -> None:
        """A training step has ended."""
        self._run.calls += 1
        self._count += self._of_call
        if self._run.calls > WARM_UP and not step.is_traced:
            self._run.unwritten.append(step)
        if len(self._run.unwritten) >= self._update_freq:
            self._write()

    def _write(self) -> None:
        """Writes means over the steps since the last time."""
        steps, self._run.unwritten = self._run.unwritten, []
        if not steps or self._curves is None:
            return
        seconds = sum(step.seconds for step in steps)
        count = len(steps) * self._of_call
        values = {scalars.SECONDS: seconds / count, scalars.STEPS_PER_S: count / seconds}
        known = [step.examples for step in steps if step.examples is not None]
        if len(known) == len(steps):
            rate = values[scalars.EXAMPLES_PER_S] = sum(known) * self._of_call / seconds
            mfu = self._run.arithmetic.mfu(rate) if self._run.arithmetic is not None else None
            if mfu is not None:
                values[scalars.MFU] = mfu
        values.update(memory_of(self._own_devices()))
        self._curves.write(self._count, values)

    def _own_devices(self) -> List[Tuple[int, str]]:
        """Numbers and TensorFlow's names of this process' devices."""
        names = device_names(self._state.cluster, self._state.processes)
        return [(device.index, names[device.index]) for device in self._state.own_devices]

    # ---- the traced steps ----------------------------------------------------------------------------------------------

    def _finished(self, record: Record) -> None:
        self._run.traced = None
        if self._record is not None:
            with open(self._own(self._record), "w", encoding="utf8") as handle:
                handle.write(to_json(record))
        if self._curves is not None:
            self._run.arithmetic = scalars.arithmetic_of(record, _computes_in_tf32())
            self._curves.write(self._count, scalars.traced(record))
        traces = [measured_of(record)]
        try:
            if self._curves is not None:
                own = {number for number, _ in self._own_devices()}
                self._curves.write(self._count, scalars.predicted(record, own))
            if self._simulated and (self._trace is not None or self._timeline is not None):
                traces.append(simulated_of(record))
        except WhaleError as error:  # training goes on
            warnings.warn(f"wh.Timeline() writes only what was measured, because the simulator cannot play the step: {error}")
        if self._trace is not None:
            write_chrome(self._own(self._trace), traces)
        if self._timeline is not None:
            from whale_tf.viz.diagnosis import step_figure  # matplotlib takes a second to load
            from whale_tf.viz.timeline import save
            save(step_figure(record, traces), self._own(self._timeline))

    def _own(self, path: str) -> str:
        """The file of this process."""
        root, suffix = os.path.splitext(path)
        rank = self._state.processes.rank
        return f"{root}_{rank}{suffix}" if rank else path


def _computes_in_tf32() -> bool:
    """Whether TensorFlow lets GPUs that can do so compute products of float32 in TF32."""
    asked = getattr(tf.config.experimental, "tensor_float_32_execution_enabled", None)
    return asked is not None and bool(asked())


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """A method of a Keras callback that does nothing."""


def _no(*arguments: Any, **keywords: Any) -> bool:
    return False


_nothing._is_default = True  # type: ignore[attr-defined]  # Keras 3 does not wait for such methods
