"""Runs a case locally and in parallel, each in a graph and a session of its own, and compares every number."""
from __future__ import annotations

import functools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow.compat.v1 as tf

import whale_tf as wh
from tests.numeric import section_cases  # noqa: F401 (registers cases)
from tests.numeric.cases import Case, find_case
from tests.numeric.plans import Parallel
from tests.numeric.races import no_races
from tests.numeric.script import Script, Setting, Stages, source

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
are_initial_equal = [True]  # on GPUs not: random numbers differ in the last bit between a GPU and the host


class Outcome(NamedTuple):
    """What a script computed.

    Attributes:
        initial: every global variable before the first step, by name.
        final: likewise after the last.
        losses: per name the values of all runs.
        outputs: likewise.
    """

    initial: Dict[str, np.ndarray]
    final: Dict[str, np.ndarray]
    losses: Dict[str, List[np.ndarray]]
    outputs: Dict[str, List[np.ndarray]]


# -- running -----------------------------------------------------------------------------------------------------------


def run_local(case: Case, setting: Setting, model_replicas: int = 1) -> Outcome:
    """The script as it is. Each of several model replicas takes a mini-batch of its own from a dataset, so the local
    script sees them one behind the other in one."""
    return run_script(case, setting, Stages(), 1, model_replicas if setting.dataset else 1)


@functools.lru_cache(maxsize=None)
def local_outcome(name: str, setting: Setting, model_replicas: int) -> Outcome:
    return run_local(find_case(name), setting, model_replicas)


def reference(setting: Setting) -> Setting:
    """The one of the settings that make no difference to a local script (``test_equality`` checks that they make none)."""
    return setting._replace(resource=True, static_batch=True, runner="session")


def run_parallel(case: Case, setting: Setting, parallel: Parallel) -> Outcome:
    """The same script with ``wh.init`` before it and ``wh.replicate`` around its stages."""
    wh.init(dict(parallel.config(), **(case.config or {})), cluster=f"cpu:{parallel.shape.devices}")
    try:
        scopes = [functools.partial(wh.replicate, count) for count in parallel.shape.counts]
        return run_script(case, setting, Stages(scopes, parallel.cuts), parallel.shape.model_replicas, 1)
    finally:
        wh.shutdown()


def _sizes(case: Case, setting: Setting) -> Tuple[int, ...]:
    """Examples of each mini-batch; a dataset's batches are equal but for the last."""
    if case.ragged and setting.dataset:
        return case.sizes[:1] * (len(case.sizes) - 1) + (min(case.sizes),)
    return case.sizes * (case.runs if setting.dataset else 1)


def run_script(case: Case, setting: Setting, stages: Stages, pulls: int, factor: int, container: str = "") -> Outcome:
    """Trains the script.

    Args:
        pulls: mini-batches that one run takes from a dataset.
        factor: size of a mini-batch, relative to the case's own.
        container: keeps the script's variables apart from others of the same names on one server.
    """
    sizes = _sizes(case, setting)
    if setting.dataset and case.ragged and max(pulls, factor) > 1:
        raise ValueError("a ragged last mini-batch of several replicas has no local counterpart")
    examples = case.examples(sum(sizes) * max(pulls if setting.dataset else 1, factor), setting.dtype)
    graph = tf.Graph()
    with graph.as_default(), graph.container(container), tf.variable_scope("", use_resource=setting.resource):
        tf.set_random_seed(1)
        if case.ragged:
            setting = setting._replace(static_batch=False)
        inputs, feeds = source(examples, [size * factor for size in sizes], setting)
        script = case.build(inputs, stages, setting.dtype)
        if not setting.outputs:
            script = script._replace(outputs={})
        return train(script, feeds if not setting.dataset else [{}] * len(case.sizes), setting)


def train(script: Script, feeds: Sequence[Dict], setting: Setting) -> Outcome:
    variables = {v.name: v for v in tf.global_variables()}
    trace: Dict[str, List[np.ndarray]] = {name: [] for name in list(script.losses) + list(script.outputs)}
    with no_races(), _session(setting) as session:
        initial = session.run(variables, feed_dict=feeds[0])
        calls = [_caller(session, dict(script.losses, **script.outputs), run, list(feeds[0]), setting)
                 for run in script.runs]
        for feed in feeds:
            for call in calls:
                for name, value in call(feed).items():
                    trace[name].append(value)
        final = session.run(variables, feed_dict=feeds[0])
    return Outcome(initial, final, {name: trace[name] for name in script.losses},
                   {name: trace[name] for name in script.outputs})


def _session(setting: Setting) -> Any:
    if setting.runner == "monitored":
        return tf.train.MonitoredTrainingSession()
    session = tf.Session()
    session.run([tf.global_variables_initializer(), tf.tables_initializer()])
    return session


def _caller(session: Any, fetches: Dict[str, tf.Tensor], updates: Sequence[Any], fed: List[tf.Tensor],
            setting: Setting) -> Any:
    """A function from a feed dict to the values of ``fetches``, by Session.run or Session.make_callable."""
    if setting.runner != "callable":
        return lambda feed: session.run([fetches, list(updates)], feed_dict=feed)[0]
    names = list(fetches)
    callable_ = session.make_callable([fetches[name] for name in names] + list(updates), feed_list=fed)
    return lambda feed: dict(zip(names, callable_(*[feed[tensor] for tensor in fed])))


# -- comparing ---------------------------------------------------------------------------------------------------------


def deviation(value: np.ndarray, expected: np.ndarray) -> float:
    """``||value - expected|| / max(||expected||, 0.01 sqrt(n))``; infinite for another shape and for NaN."""
    value, expected = np.asarray(value, "float64"), np.asarray(expected, "float64")
    if value.shape != expected.shape or not (np.isfinite(value).all() and np.isfinite(expected).all()):
        return float("inf")
    return float(np.linalg.norm(value - expected) / max(np.linalg.norm(expected), 0.01 * value.size ** 0.5, 1e-300))


def relative(value: np.ndarray, expected: np.ndarray) -> float:
    """``|value - expected| / |expected|`` of a scalar loss; infinite for NaN and for anything but a scalar."""
    if np.shape(value) != () or np.shape(expected) != () or not (np.isfinite(value) and np.isfinite(expected)):
        return float("inf")
    return 0.0 if value == expected else float(abs(value - expected) / max(abs(expected), 1e-300))


def distance(outcome: Outcome, expected: Outcome) -> float:
    """The largest difference between two runs of one script, in the measures of :func:`differences`."""
    pairs = [(relative, value, other) for name, values in expected.losses.items()
             for value, other in zip(outcome.losses[name], values)]
    pairs += [(deviation, value, other) for name, values in expected.outputs.items()
              for value, other in zip(outcome.outputs[name], values)]
    pairs += [(deviation, outcome.final[name], other) for name, other in expected.final.items()]
    return max(measure(value, other) for measure, value, other in pairs)


def differences(outcome: Outcome, expected: Outcome, tolerance: float) -> List[str]:
    """Where the two differ, in words: the first run in which each loss or output does, and every such variable."""
    found = []
    if set(outcome.final) != set(expected.final):
        found.append(f"variables {sorted(outcome.final)} instead of {sorted(expected.final)}")
    for kind, measure in (("losses", relative), ("outputs", deviation)):
        for name, values in getattr(expected, kind).items():
            errors = [measure(value, other) for value, other in zip(getattr(outcome, kind)[name], values)]
            if len(getattr(outcome, kind)[name]) != len(values) or not values:
                found.append(f"{name} has {len(errors)} values instead of {len(values)}")
            wrong = [i for i, error in enumerate(errors) if not error <= tolerance]
            if wrong:
                found.append(f"{name} of run {wrong[0]} is off by {errors[wrong[0]]:.1e} ({len(wrong)} runs of {len(errors)})")
    for name in sorted(set(outcome.final) & set(expected.final)):
        for when, limit in (("initial", 0.0 if are_initial_equal[0] else tolerance), ("final", tolerance)):
            error = deviation(getattr(outcome, when)[name], getattr(expected, when)[name])
            if not error <= limit:
                found.append(f"{when} {name} is off by {error:.1e}")
    return found


def assert_equal(outcome: Outcome, expected: Outcome, tolerance: float) -> None:
    found = differences(outcome, expected, tolerance)
    assert not found, "differs from the local script (tolerance {}):\n  {}".format(tolerance, "\n  ".join(found))


def check(name: str, setting: Setting, parallel: Parallel, model_replicas: Optional[int] = None) -> None:
    """The case under ``parallel`` equals the local script."""
    replicas = parallel.shape.model_replicas if setting.dataset else 1
    expected = local_outcome(name, reference(setting), model_replicas or replicas)
    assert_equal(run_parallel(find_case(name), setting, parallel), expected, TOLERANCE[setting.dtype])
