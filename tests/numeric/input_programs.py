"""Small training programs over several inputs, as text: run locally and under a plan, and judged.

What runs is what a failure prints: the body of a program is its source, with the annotations in it.
"""
from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python.eager import context

import whale_tf as wh
from tests.functions.equality import Way
from tests.numeric.equality import Outcome, differences, distance
from tests.numeric.races import no_races
from tests.numeric.script import rng
from whale_tf._tf_compat import function_tracing, make_logical_cpus

WIDTH = 3  # columns of every matrix
FEATURES = 4  # columns of sparse inputs
VOCABULARY = 7
DEVICES = 5
TOLERANCE = 1e-9  # float64; positions and sums over the batch make large numbers of small ones
MOST_TOLERANCE = 1e-4  # a program whose rounding errors grow beyond this shows nothing
HAS_FUNCTIONS = function_tracing() is not None

if HAS_FUNCTIONS:
    make_logical_cpus(DEVICES)  # before TensorFlow executes anything


class Input(NamedTuple):
    """``kind`` of ``SPECS``; ``sizes``: its rows in each step."""

    name: str
    kind: str
    sizes: Tuple[int, ...]


def names_in(code: str) -> List[str]:
    """The inputs, weights and values that code reads."""
    return re.findall(r"(?<![.\w])(?:[a-z]|[vw]\d+)\b(?!=)", code)


class Line(NamedTuple):
    """``names = code``, where the code reads ``operands``."""

    names: Tuple[str, ...]
    code: str
    operands: Tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.names)} = {self.code}"


class Program(NamedTuple):
    """A model, its plan and its data.

    Attributes:
        weights: variables and their shapes.
        terms: whose sum is the loss.
        cuts: numbers of the first line of each stage, and of the first behind the last (the loss, if there are as many lines).
        outputs: values that are fetched beside the loss.
        is_function: whether the step is a ``tf.function``, else a Session runs it.
        is_optimized: whether TensorFlow's graph optimizer is on.
        is_signed: whether a function has a signature with open sizes; else every step's sizes are known.
    """

    inputs: Tuple[Input, ...]
    weights: Tuple[Tuple[str, Tuple[int, ...]], ...]
    lines: Tuple[Line, ...]
    terms: Tuple[str, ...]
    cuts: Tuple[int, ...]
    outputs: Tuple[str, ...]
    optimizer: str
    way: Way
    is_function: bool
    is_resource: bool = True
    is_optimized: bool = False
    is_signed: bool = True

    @property
    def steps(self) -> int:
        return len(self.inputs[0].sizes)

    def tidy(self) -> Program:
        """Without lines, weights and inputs that neither the loss nor an output needs."""
        needed, lines = {name for text in (*self.terms, *self.outputs) for name in names_in(text)}, []
        for number in reversed(range(len(self.lines))):
            line = self.lines[number]
            if needed.intersection(line.names):
                needed.update(line.operands)
                lines.append(number)
        return self._replace(
            inputs=tuple(item for item in self.inputs if item.name in needed),
            weights=tuple(item for item in self.weights if item[0] in needed),
            lines=tuple(self.lines[number] for number in reversed(lines)),
            cuts=tuple(sum(number < cut for number in lines) for cut in self.cuts))

    def source(self) -> str:
        """The model as a function ``build(stage, <inputs and weights>)``, which returns the loss and the outputs."""
        names = [item.name for item in self.inputs] + [name for name, _ in self.weights]
        text = [f"def build({', '.join(['stage'] + names)}):"]
        is_inside = False
        for number, line in enumerate([str(line) for line in self.lines] + ["loss = " + " + ".join(self.terms)]):
            if number in self.cuts[:-1]:
                text.append("    with stage[{}]():".format(self.cuts.index(number)))
                is_inside = True
            if self.cuts and number == self.cuts[-1] and number < len(self.lines):
                is_inside = False
            text.append("    " * (1 + is_inside) + line)
        return "\n".join([*text, f"    return loss, [{', '.join(self.outputs)}]"])

    def __str__(self) -> str:
        kind = f"tf.function{'' if self.is_signed else ' without signature'}" if self.is_function else \
            f"Session, {'resource' if self.is_resource else 'reference'} variables"
        inputs = ", ".join(f"{item.name}: {item.kind} {list(item.sizes)}" for item in self.inputs)
        weights = ", ".join(f"{name} {list(shape)}" for name, shape in self.weights)
        split = f", stages {list(self.way.split)} split" if self.way.split else ""
        return (f"# {kind}, {self.optimizer}, {'' if self.is_optimized else 'no '}graph optimizer; cpu:{self.way.devices}, "
                f"stages of {list(self.way.counts)}{split}, {self.way.config}\n# inputs {inputs}; weights {weights}\n"
                f"{self.source()}")


class Verdict(NamedTuple):
    """``kind``: ``divided``, ``whole``, ``inexact`` or ``refused``, which are right; ``invalid``, if the local script fails; or
    one of ``FAILURES``."""

    kind: str
    detail: str = ""


FAILURES = ("wrong", "raw", "error", "hang", "crash")


# -- inputs ------------------------------------------------------------------------------------------------------------


def _ragged(random: np.random.RandomState, count: int) -> List[np.ndarray]:
    lengths = random.randint(1, 4, count)
    return [random.randint(0, VOCABULARY, int(lengths.sum())), lengths]


def _hollow(random: np.random.RandomState, count: int) -> List[np.ndarray]:
    lengths = random.randint(0, 3, count)
    return [random.randint(0, VOCABULARY, int(lengths.sum())), lengths]


def _numbers(random: np.random.RandomState, count: int) -> List[np.ndarray]:
    lengths = random.randint(1, 4, count)
    return [random.randn(int(lengths.sum())), lengths]


def _sparse(random: np.random.RandomState, count: int) -> List[np.ndarray]:
    kept = random.rand(count, FEATURES) < 0.5
    return [np.argwhere(kept), random.randn(int(kept.sum())), np.array([count, FEATURES])]


# kind -> a row count -> what an input of that many rows is made of
VALUES: Dict[str, Callable[[np.random.RandomState, int], List[np.ndarray]]] = {
    "open": lambda random, count: [random.randn(count, WIDTH)],
    "static": lambda random, count: [random.randn(count, WIDTH)],
    "columns": lambda random, count: [random.randn(count, WIDTH)],
    "weights": lambda random, count: [random.rand(count) + 0.1],
    "static_weights": lambda random, count: [random.rand(count) + 0.1],
    "ids": lambda random, count: [random.randint(0, VOCABULARY, count)],
    "labels": lambda random, count: [random.randint(0, WIDTH, count)],
    "ragged": _ragged,
    "hollow": _hollow,
    "numbers": _numbers,
    "sparse": _sparse,
}

# kind -> the static shape of dense ones; `rows` where it is known
SHAPES: Dict[str, Callable[[int], List[Optional[int]]]] = {
    "open": lambda rows: [None, WIDTH],
    "static": lambda rows: [rows, WIDTH],
    "columns": lambda rows: [None, None],
    "weights": lambda rows: [None],
    "static_weights": lambda rows: [rows],
    "ids": lambda rows: [None],
    "labels": lambda rows: [None],
}


RAGGED = ("ragged", "hollow", "numbers")


def _dtype(kind: str) -> Any:
    return tf.int64 if kind in ("ids", "labels", "ragged", "hollow") else tf.float64


def _parts(program: Program, step: int, moved: bool) -> List[List[np.ndarray]]:
    """What each input is made of in a step; ``moved``: numbers differ in the last bit, if at all."""
    found = []
    for item in program.inputs:
        random = rng(f"{item.name} {step}")
        parts = VALUES[item.kind](random, item.sizes[step])
        if moved:
            parts = [part * (1 + np.finfo(part.dtype).eps * random.randint(-1, 2, part.shape)) if part.dtype.kind == "f" else part
                     for part in parts]
        found.append(parts)
    return found


def _placeholder(item: Input) -> Any:
    if item.kind in RAGGED:
        return tf.ragged.placeholder(_dtype(item.kind), 1, [])
    if item.kind == "sparse":
        return tf.sparse_placeholder(tf.float64, [None, FEATURES])
    return tf.placeholder(_dtype(item.kind), SHAPES[item.kind](item.sizes[0]), name=item.name)


def _fed(kind: str, parts: Sequence[np.ndarray]) -> Any:
    if kind in RAGGED:
        rows = [row.tolist() for row in np.split(parts[0], np.cumsum(parts[1])[:-1])]
        return tf.ragged.constant_value(rows, ragged_rank=1, dtype=parts[0].dtype, row_splits_dtype="int64")
    return tf.SparseTensorValue(*parts) if kind == "sparse" else parts[0]


def _spec(item: Input) -> Any:
    if item.kind in RAGGED:
        return tf.RaggedTensorSpec([None, None], _dtype(item.kind), 1)
    if item.kind == "sparse":
        return tf.SparseTensorSpec([None, FEATURES], tf.float64)
    return tf.TensorSpec(SHAPES[item.kind](item.sizes[0]), _dtype(item.kind))


def _argument(kind: str, parts: Sequence[np.ndarray]) -> Any:
    if kind in RAGGED:
        return tf.RaggedTensor.from_row_lengths(parts[0], parts[1])
    return tf.SparseTensor(*parts) if kind == "sparse" else tf.constant(parts[0])


# -- running -----------------------------------------------------------------------------------------------------------


def _initial(name: str, shape: Tuple[int, ...]) -> np.ndarray:
    return rng(name).randn(*shape) * 0.6


def _model(program: Program) -> Callable[..., Any]:
    tables: List[Any] = []  # TensorFlow frees one that nobody holds

    def table() -> Any:
        with tf.init_scope():
            keys = np.arange(VOCABULARY - 1)
            tables.append(tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, keys[::-1].copy()), VOCABULARY - 1))
        return tables[-1]

    namespace: Dict[str, Any] = {"tf": tf, "table": table}
    exec(program.source(), namespace)
    return namespace["build"]


def _behind_loss(program: Program) -> Set[str]:
    """The lines' results from which the loss follows."""
    found = {name for text in program.terms for name in names_in(text)}
    for line in reversed(program.lines):
        if found.intersection(line.names):
            found.update(line.operands)
    return found


def _in_session(program: Program, scopes: Sequence[Any], moved: bool) -> Outcome:
    optimizer = {"sgd": lambda: tf.train.GradientDescentOptimizer(0.05),
                 "adam": lambda: tf.train.AdamOptimizer(0.01, epsilon=1e-3)}[program.optimizer]()
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        tensors = [_placeholder(item) for item in program.inputs]
        with tf.variable_scope("", use_resource=program.is_resource):
            weights = [tf.get_variable(name, initializer=_initial(name, shape)) for name, shape in program.weights]
            loss, outputs = _model(program)(scopes, *tensors, *weights)
            ordered = _behind_loss(program)  # in a Session, what else reads a weight may do so before or after its update
            outputs = [tensor if text.startswith("tf.shape(") or ordered.issuperset(names_in(text)) else loss
                       for text, tensor in zip(program.outputs, outputs)]
            update = optimizer.minimize(loss)
        config = tf.ConfigProto()
        config.MergeFrom(context.context().config)
        config.graph_options.rewrite_options.disable_meta_optimizer = not program.is_optimized
        variables = {variable.op.name: variable for variable in tf.global_variables()}
        returned = []
        with tf.Session(config=config) as session:
            session.run([tf.global_variables_initializer(), tf.tables_initializer()])
            for step in range(program.steps):
                feed = {tensor: _fed(item.kind, parts)
                        for tensor, item, parts in zip(tensors, program.inputs, _parts(program, step, moved))}
                returned.append(session.run([loss, outputs, update], feed)[:2])
            final = session.run(variables, feed)
    return _outcome(program, returned, final)


@contextlib.contextmanager
def _graph_optimizer(is_on: bool) -> Iterator[None]:
    """TensorFlow's graph optimizer of functions; afterwards it is on, as it is for other tests of the process."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not is_on})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def _in_function(program: Program, scopes: Sequence[Any], moved: bool) -> Outcome:
    model = _model(program)
    with context.eager_mode(), _graph_optimizer(program.is_optimized):
        tf.random.set_random_seed(1)
        variables = {name: tf.Variable(_initial(name, shape)) for name, shape in program.weights}
        weights = list(variables.values())
        moments = [[tf.Variable(tf.zeros_like(weight)) for weight in weights] for _ in range(2)]

        def step(*tensors: Any) -> Any:
            with tf.GradientTape() as tape:
                loss, outputs = model(scopes, *tensors, *weights)
            gradients = tape.gradient(loss, weights)
            if all(grad is None for grad in gradients):
                raise ValueError("no gradients")
            for weight, mean, square, grad in zip(weights, *moments, gradients):
                if grad is None:
                    continue
                grad = tf.convert_to_tensor(grad)
                if program.optimizer == "adam":
                    mean.assign(0.9 * mean + 0.1 * grad)
                    square.assign(0.99 * square + 0.01 * tf.square(grad))
                    grad = mean.read_value() / (tf.sqrt(square.read_value()) + 1e-3)
                weight.assign_sub(0.05 * grad)
            return loss, outputs

        signature = [_spec(item) for item in program.inputs] if program.is_signed else None
        function = tf.function(step, input_signature=signature, autograph=False)
        returned = []
        for number in range(program.steps):
            parts = _parts(program, number, moved)
            returned.append(function(*[_argument(item.kind, part) for item, part in zip(program.inputs, parts)]))
        return _outcome(program, returned, {name: variable.numpy() for name, variable in variables.items()})


def _outcome(program: Program, returned: Sequence[Any], final: Dict[str, Any]) -> Outcome:
    losses = {"loss": [np.array(loss) for loss, _ in returned]}
    outputs = {name: [np.array(found[i]) for _, found in returned] for i, name in enumerate(program.outputs)}
    variables = {name: np.array(value) for name, value in final.items()}
    return Outcome(dict.fromkeys(variables, np.zeros(())), variables, losses, outputs)


def run(program: Program, scopes: Sequence[Any] = (contextlib.nullcontext,) * 4, moved: bool = False) -> Outcome:
    return (_in_function if program.is_function else _in_session)(program, scopes, moved)


# -- judging -----------------------------------------------------------------------------------------------------------


def judge(program: Program) -> Verdict:
    """Runs the program locally and under its plan."""
    try:
        expected = run(program)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        return Verdict("invalid", _first_line(error))
    if differences(expected, expected, 0.0):
        return Verdict("invalid", "not a number")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        wh.init(program.way.config, cluster=f"cpu:{program.way.devices}")
        try:
            with no_races():
                outcome = run(program, program.way.scopes())
            text = wh.explain()
        except AssertionError as error:
            return Verdict("wrong", str(error))
        except wh.WhaleError as error:
            return Verdict("refused" if _is_clear(str(error)) else "raw", f"{type(error).__name__}: {error}")
        except tf.errors.OpError as error:
            return Verdict("raw", _op_error(error))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
            return Verdict("raw" if "tensorflow" in where.filename else "error",
                           f"{type(error).__name__}: {_first_line(error)} ({place})")
        finally:
            wh.shutdown()
    if any(issubclass(warning.category, wh.InexactWarning) for warning in warned) or "Not exactly the local result" in text:
        return Verdict("inexact", next((str(warning.message) for warning in warned), ""))
    found = _wrong(program, outcome, expected)
    if found is None:
        return Verdict("invalid", "rounding errors grow")
    if found:
        return Verdict("wrong", "; ".join(found))
    return Verdict("whole" if is_whole(text) else "divided")


def _wrong(program: Program, outcome: Outcome, expected: Outcome) -> Optional[List[str]]:
    """Differences from the local script, as its own sensitivity to rounding allows; None if it is too sensitive to tell."""
    found = differences(outcome, expected, TOLERANCE)
    if found:
        tolerance = max(TOLERANCE, 100.0 * distance(run(program, moved=True), expected))
        if tolerance >= MOST_TOLERANCE:
            return None
        found = differences(outcome, expected, tolerance)
    return found


def is_whole(text: str) -> bool:
    """Whether ``wh.explain()`` lists ops on whole tensors of examples, and not only on sums over them."""
    match = re.search(r"need all examples together and run once per mini-batch\. They take (.*?) from the clones",
                      re.sub(r"\s+", " ", text))
    taken = match.group(1) if match else "8 B"
    small = re.fullmatch(r"([\d.]+) B", taken)
    return not (small and float(small.group(1)) < 8 * WIDTH * 4)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]


def _op_error(error: Any) -> str:
    """TensorFlow's own words, without the names of nodes around them."""
    text = re.sub(r"\s+", " ", error.message)
    text = re.sub(r"Graph execution error:|Detected at node .*?<stack traces unavailable>", "", text)
    found = re.search(r"\(0\) (.*?)(?: \(1\)|$)", text)
    return f"{type(error).__name__}: {(found.group(1) if found else text)[:300]}"


def _is_clear(message: str) -> bool:
    return 20 < len(message) < 1500 and "root error(s)" not in message and "Traceback" not in message


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, which local scripts raise too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
