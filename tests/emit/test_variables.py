"""One copy of the variables for all replicas, or one for each."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import pytest

import whale_tf as wh
from tests.graph_editor.graphs import control_flow
from tests.numeric.script import dense
from whale_tf._tf_compat import v1
from whale_tf.cluster import Cluster
from whale_tf.config import Config
from whale_tf.decide.decide import decide_graph

pytestmark = pytest.mark.half
WORDS, WIDTH, BATCH = 7, 6, 8


@pytest.fixture(autouse=True)
def _shutdown() -> Any:
    yield
    wh.shutdown()


def look_up(resource: bool, colocate: bool) -> Dict[str, Any]:
    """An embedding, whose op takes the variable's handle, and a dense layer; gradients beside their forward ops if asked."""
    tokens = v1.placeholder("int32", [None, 3], name="tokens")
    with v1.variable_scope("", use_resource=resource):
        words = v1.get_variable("words", [WORDS, WIDTH], "float64", v1.random_normal_initializer(seed=1))
        rows = v1.reduce_mean(v1.nn.embedding_lookup(words, tokens), 1)
        loss = v1.reduce_mean(v1.square(dense(rows, 4, "logits")))
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    return {"tokens": tokens, "loss": loss, "train": optimizer.minimize(loss, colocate_gradients_with_ops=colocate)}


def loop(resource: bool, colocate: bool, waits: Callable[[v1.Variable], List[Any]] = lambda kernel: []) -> Dict[str, Any]:
    """A loop of version 1 that reads a variable in every iteration, which ``waits`` for other uses of the variable."""
    def body(i: Any, h: Any) -> Any:
        with v1.control_dependencies(waits(kernel)):
            return i + 1, v1.tanh(v1.matmul(h, kernel))

    tokens = v1.placeholder("int32", [None, 3], name="tokens")
    with v1.variable_scope("", use_resource=resource):
        kernel = v1.get_variable("kernel", [3, 3], "float64", v1.random_normal_initializer(seed=1))
        is_v2 = v1.control_flow_v2_enabled()
        v1.disable_control_flow_v2()
        try:
            out = v1.while_loop(lambda i, h: i < 3, body, [0, v1.cast(tokens, "float64")])[1]
        finally:
            if is_v2:
                v1.enable_control_flow_v2()
        loss = v1.reduce_mean(v1.square(out))
    return {"tokens": tokens, "loss": loss, "train": v1.train.GradientDescentOptimizer(0.1).minimize(loss)}


def run(build: Any, resource: bool = True, colocate: bool = False, config: Optional[Dict[str, Any]] = None) -> List[Any]:
    """Three losses, the final variables, and how many variable ops the graph has; without a config: of the local script."""
    examples = np.random.RandomState(0).randint(0, WORDS, [3, BATCH, 3])
    if config is not None:
        wh.init(config, cluster="cpu:2")
    with v1.Graph().as_default() as graph:
        if config is None:
            model = build(resource, colocate)
        else:
            with wh.replicate(2):
                model = build(resource, colocate)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            losses = [session.run([model["loss"], model["train"]], {model["tokens"]: x})[0] for x in examples]
            final = np.concatenate([np.ravel(value) for value in session.run(v1.global_variables())])
        count = sum(op.type in ("VarHandleOp", "VariableV2") for op in graph.get_operations())
    return [losses, final, count]


@pytest.mark.half
@pytest.mark.parametrize("resource", [True, False])
@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize("variables", ["auto", "mirrored", "shared"])
def test_replicas_share_variables_or_have_their_own(variables: str, colocate: bool, resource: bool) -> None:
    losses, final, count = run(look_up, resource, colocate)
    parallel = run(look_up, resource, colocate, {"variables": variables})
    assert np.allclose(parallel[0], losses, rtol=1e-12) and np.allclose(parallel[1], final, rtol=1e-12)
    assert parallel[2] == (2 * count if variables == "mirrored" else count)
    assert wh.current_plan().task_graphs[0].variables == ("mirrored" if variables == "mirrored" else "shared")


@pytest.mark.parametrize("resource", [True, False])
def test_loops_read_shared_variables(resource: bool) -> None:
    losses, final, _ = run(loop, resource)
    parallel = run(loop, resource, config={})
    assert np.allclose(parallel[0], losses, rtol=1e-12) and np.allclose(parallel[1], final, rtol=1e-12)
    assert wh.current_plan().task_graphs[0].variables == "shared"


def test_loop_on_its_own_device_cannot_share() -> None:
    def asks(resource: bool, colocate: bool) -> Dict[str, Any]:
        return loop(resource, colocate, lambda kernel: [kernel.is_initialized()])

    with pytest.raises(wh.ConfigError, match="while loop reads 'kernel' on the loop's own device"):
        run(asks, config={"variables": "shared"})
    wh.shutdown()
    losses, final, _ = run(asks)
    parallel = run(asks, config={})
    assert np.allclose(parallel[0], losses, rtol=1e-12) and np.allclose(parallel[1], final, rtol=1e-12)
    assert wh.current_plan().task_graphs[0].variables == "mirrored"


def test_collective_has_mirrored_variables() -> None:
    run(look_up, config={"communication.backend": "collective"})
    assert wh.current_plan().task_graphs[0].variables == "mirrored"
    with pytest.raises(wh.ConfigError, match="use communication.backend 'auto', or variables 'mirrored'"):
        run(look_up, config={"communication.backend": "collective", "variables": "shared"})


# -- copies stay equal ---------------------------------------------------------------------------------------------------
def product() -> Tuple[Any, Any, Any, Any]:
    """An input of 4 examples, a variable ``w`` of two replicas, their product, and its loss."""
    x = v1.placeholder("float32", [4, 3])
    with wh.replicate(2):
        w = v1.get_variable("w", [3, 2])
        h = v1.matmul(x, w)
        return x, w, h, v1.reduce_mean(v1.square(h))


def copies(session: Any, resource: bool) -> List[Any]:
    """The value of ``w`` in each replica."""
    read = v1.raw_ops.ReadVariableOp if resource else v1.raw_ops.Identity
    where = [session.graph.get_tensor_by_name(name) for name in ("w:0", "whale/g0_r1/w:0")]
    return session.run([read(resource=each, dtype=v1.float32) if resource else read(input=each) for each in where])


@pytest.mark.slow
@pytest.mark.parametrize("resource", [False, True], ids=["reference", "resource"])
def test_write_that_waits_for_clones_still_reaches_all_copies(resource: bool) -> None:
    wh.init({"variables": "mirrored"}, cluster="cpu:2")
    with v1.Graph().as_default(), v1.variable_scope("", use_resource=resource):
        x, w, h, loss = product()
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        ones, feed = v1.ones([3, 2]), {x: np.ones([4, 3])}
        with v1.control_dependencies([h]):
            reset = v1.assign(w, ones)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train, feed)
            session.run(reset.op if isinstance(reset, v1.Tensor) else reset, feed)
            np.testing.assert_array_equal(copies(session, resource), np.ones([2, 3, 2]))


@pytest.mark.parametrize("resource", [True, False])
def test_copies_of_a_variable_get_the_same_noise(resource: bool) -> None:
    """Noise of a shape that is read from the gradient at run time."""
    wh.init({"variables": "mirrored"}, cluster="cpu:2")
    with v1.Graph().as_default(), v1.variable_scope("", use_resource=resource):
        x, w, _, loss = product()
        noise = v1.random_normal(v1.raw_ops.Shape(input=v1.gradients(loss, w)[0]))
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        train = optimizer.apply_gradients([(gradient + noise, w) for gradient, w in optimizer.compute_gradients(loss, [w])])
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            before = session.run(w)
            session.run(train, {x: np.ones([4, 3])})
            one, other = copies(session, resource)
    np.testing.assert_array_equal(one, other)
    assert np.all(one != before)


WRITES: Dict[str, Callable[[Any, Any], Any]] = {
    "condition": lambda w, flag: v1.cond(flag, lambda: v1.identity(v1.assign(w, w * 0.5)), lambda: v1.identity(w)),
    "loop": lambda w, flag: v1.while_loop(
        lambda i: i < 2, lambda i: i + v1.cast(v1.reduce_sum(v1.assign(w, w * 0.5)) > 0.0, "int32"), [0]),
    "chain": lambda w, flag: v1.assign_add(v1.assign(w, w * 0.5), v1.ones_like(w)),
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind, version, resource", [
    ("condition", 2, True), ("condition", 1, True), ("condition", 1, False), ("loop", 2, True), ("chain", 1, False)])
def test_writes_that_copies_could_not_follow(kind: str, version: int, resource: bool, is_late: bool) -> None:
    """They would leave the copies as they were."""
    with v1.Graph().as_default() as graph, control_flow(version), v1.variable_scope("", use_resource=resource):
        wh.init({"variables": "mirrored"}, cluster="cpu:2")
        flag = v1.placeholder_with_default(True, [])
        x, w, _, loss = product()
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        if is_late:
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(train, {x: np.ones([4, 3])})
                WRITES[kind](w, flag)
                with pytest.raises(wh.UnsupportedOpError, match="writes variable 'w' .*every replica has a copy of it"):
                    session.run(train, {x: np.ones([4, 3])})
            return
        gpus, config = Cluster.parse("V100-32GB:2"), Config({})
        without = decide_graph(graph, gpus, config, None, ())
        WRITES[kind](w, flag)
        lowered = decide_graph(graph, gpus, config, None, ())
        assert [each.plan.task_graphs[0].variables for each in (without, lowered)] == ["mirrored", "shared"]
        with pytest.raises(wh.ConfigError, match="'mirrored', .* a condition, function or chain of writes updates 'w'"):
            wh.parallelize()


@pytest.mark.parametrize("scope, config", [(wh.split, {}), (wh.replicate, {"zero": "v1"})], ids=["split", "zero"])
def test_divided_variable_has_no_chain_of_writes(scope: Any, config: Dict[str, Any]) -> None:
    wh.init(config, cluster="cpu:2")
    with v1.Graph().as_default(), v1.variable_scope("", use_resource=False):
        with scope(2):
            w = v1.get_variable("w", [4, 6])
            loss = v1.reduce_mean(v1.square(v1.matmul(v1.placeholder("float32", [8, 4]), w)))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        WRITES["chain"](w, None)
        with pytest.raises(wh.UnsupportedOpError, match="writes to what op .* returns, a variable that wh.split or zero divides"):
            wh.parallelize()


# -- updates that wait for each other ------------------------------------------------------------------------------------
def adversaries(resource: bool, colocate: bool) -> Dict[str, Any]:
    """The second loss is computed with what the first update made of the variables."""
    tokens = v1.placeholder("int32", [None, 3], name="tokens")
    with v1.variable_scope("", use_resource=resource):
        variables = [v1.get_variable(name, [3, 3], "float64", v1.random_normal_initializer(seed=1)) for name in "ab"]

    def loss(target: float) -> Any:
        hidden = v1.tanh(v1.matmul(v1.cast(tokens, "float64"), variables[0].read_value()))
        return v1.reduce_mean((v1.matmul(hidden, variables[1].read_value()) - target) ** 2)

    optimizer = v1.train.GradientDescentOptimizer(0.1)
    with v1.control_dependencies([optimizer.minimize(loss(1.0), var_list=variables[:1])]):
        second = loss(-1.0)
    return {"tokens": tokens, "loss": second, "train": optimizer.minimize(second, var_list=variables[1:])}


@pytest.mark.parametrize("resource", [True, False])
def test_update_that_waits_for_another(resource: bool) -> None:
    local, parallel = run(adversaries, resource), run(adversaries, resource, config={"num_micro_batch": 2, "variables": "shared"})
    for one, other in zip(local[:-1], parallel[:-1]):
        np.testing.assert_allclose(other, one, rtol=1e-12)
    with pytest.raises(wh.PlanError, match="reads a variable after its update in the same step, and there are 2 copies"):
        run(adversaries, resource, config={"variables": "mirrored"})


# -- updates that another run makes ---------------------------------------------------------------------------------------
def accumulated(optimizer: Any, resource: bool, config: Optional[Dict[str, Any]] = None) -> np.ndarray:
    """A weight after two updates with gradients that a variable has added up in two runs each."""
    if config is not None:
        wh.init(config, cluster="cpu:2")
    try:
        with v1.Graph().as_default(), v1.variable_scope("", use_resource=resource):
            x = v1.placeholder("float64", [None, 3])
            w = v1.get_variable("w", initializer=np.linspace(-1.0, 1.0, 6).reshape(3, 2))
            total = v1.get_variable("total", initializer=np.zeros([3, 2]), trainable=False)
            ((grad, _),) = optimizer.compute_gradients(v1.reduce_mean(v1.square(v1.matmul(x, w) - 1.0)), [w])
            add, update, zero = total.assign_add(grad), optimizer.apply_gradients([(total / 2.0, w)]), total.assign(0.0 * total)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for step in range(4):
                    session.run(add, {x: np.cos(np.arange(12.0) + step).reshape(4, 3)})
                    if step % 2:
                        session.run(update)
                        session.run(zero)
                found: np.ndarray = session.run(w)
                return found
    finally:
        wh.shutdown()


@pytest.mark.parametrize("resource", [True, False])
def test_update_in_a_run_of_its_own(resource: bool) -> None:
    adam, plain = v1.train.AdamOptimizer(0.1), v1.train.GradientDescentOptimizer(0.1)
    np.testing.assert_allclose(accumulated(adam, resource, {"variables": "shared"}), accumulated(adam, resource), rtol=1e-12)
    np.testing.assert_allclose(accumulated(plain, resource, {"variables": "mirrored"}), accumulated(plain, resource), rtol=1e-12)
    with pytest.raises(wh.UnsupportedOpError, match="'w', of which every replica has a copy, together with 'w/Adam', which"):
        accumulated(adam, resource, {"variables": "mirrored"})
