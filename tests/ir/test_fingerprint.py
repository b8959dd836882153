"""Which graphs accept the same plan."""
from __future__ import annotations

from tests.planner.rhino.graphs import Network
from whale_tf.ir.graph import same_graph


def test_batch_does_not_count_and_variables_shapes_do() -> None:
    one, other, wider = (Network(batch, widths).graph.fingerprint() for batch, widths in (
        (8, [6, 6, 4]), (16, [6, 6, 4]), (8, [6, 8, 4])))
    assert one == other != wider
    assert same_graph(one, other) and not same_graph(one, wider)
    assert one.split("-")[0] == wider.split("-")[0], "the ops are the same"


def test_other_ops_are_another_graph() -> None:
    short, long = (Network(8, widths).graph.fingerprint() for widths in ([6, 6], [6, 6, 6]))
    assert not same_graph(short, long)


def test_old_fingerprints_have_no_shapes() -> None:
    now = Network(8, [6, 6, 4]).graph.fingerprint()
    assert same_graph(now.split("-")[0], now) and same_graph(now, now.split("-")[0])
    assert not same_graph("0" * 16, now)
