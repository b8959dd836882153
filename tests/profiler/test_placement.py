"""Where ops run on a machine with GPUs, and what crosses between it and its host, on hand-made graphs."""
from __future__ import annotations

from typing import Any, List, Optional, Tuple

from tests.profiler.test_gpu_kernels import kernel
from whale_tf.profiler.gpu_kernels import OWN, GpuKernels, Registered
from whale_tf.profiler.placement import (
    ARGUMENT,
    HOST,
    INPUT,
    NO_KERNEL,
    GraphOp,
    GraphTensor,
    crossings,
    lacking,
    place,
    total,
)

KNOWN = GpuKernels.of("9.9", [
    Registered(name, OWN, kernel(host, **allows)) for name, host, allows in [
        ("MatMul", (), {"T": "float32"}), ("Reshape", ("shape",), {"T": "float32"}), ("Variable", (), {}),
        ("Update", (), {"T": "float32"}), ("Size", ("output",), {})]])


def op(name: str, kind: str, asks: Optional[int], *inputs: Tuple[int, str], dtype: str = "float32", size: Optional[float] = 8.0,
       **more: Any) -> GraphOp:
    return GraphOp(name, kind, {"T": (dtype,)}, asks, tuple((source, 0, argument) for source, argument in inputs),
                   (GraphTensor(dtype, size, "output"),), **more)


def test_op_without_a_kernel_between_gpu_ops() -> None:
    """Its operand goes to the host and its result back, and a second reader there costs nothing more."""
    ops = [op("a", "MatMul", 1, size=100.0), op("b", "Sort", 1, (0, "x"), size=40.0), op("c", "MatMul", 1, (1, "x")),
           op("d", "MatMul", 1, (1, "x")), op("e", "MatMul", 0, (1, "x"))]
    placed = place(ops, KNOWN)
    assert [one.device for one in placed] == [1, HOST, 1, 1, 0]
    found = crossings(ops, placed)
    assert [(one.to_host, one.device, one.bytes, one.why) for one in found] == [
        (True, 1, 100.0, NO_KERNEL), (False, 1, 40.0, NO_KERNEL), (False, 0, 40.0, NO_KERNEL)]
    row, = lacking(ops, placed, found)
    assert (row.type, row.ops, row.to_host, row.to_gpu, row.comes_back) == ("Sort", (1,), 100.0, 80.0, True)
    assert "has no Sort" in row.why


def test_op_that_only_prints_does_not_come_back() -> None:
    ops = [op("loss", "MatMul", 0), op("print", "PrintV2", 0, (0, "input"))]
    placed = place(ops, KNOWN)
    row, = lacking(ops, placed, crossings(ops, placed))
    assert row.to_host == 8.0 and not row.comes_back


def test_update_without_a_kernel_takes_its_variable_to_the_host() -> None:
    ops = [op("w", "Variable", 0, dtype="resource"), op("read", "Update", None, (0, "resource")),
           op("y", "MatMul", 0, (1, "a"), size=20.0), op("update", "Update", 0, (0, "var"), (2, "grad"), dtype="int8")]
    placed = place(ops, KNOWN)
    assert [one.device for one in placed] == [HOST, HOST, 0, HOST] and {one.blames for one in placed} == {3, -1}
    found = crossings(ops, placed)
    assert [(one.op, one.to_host) for one in found] == [(1, False), (2, True)]
    row, = lacking(ops, placed, found)
    assert row.ops == (3,) and row.beside == (0, 1) and row.comes_back


def test_reference_variables_and_colocation_group_ops() -> None:
    reference = GraphTensor("float32", 8.0, "ref", is_ref=True)
    ops = [op("w", "Variable", None)._replace(outputs=(reference,)), op("update", "Update", None, (0, "var"), dtype="int8"),
           op("beside", "MatMul", None, follows=0)]
    assert [one.device for one in place(ops, KNOWN)] == [HOST] * 3


def test_arguments_in_host_memory() -> None:
    """A shape that a GPU computed goes to the host; one that is there anyway does not."""
    ops = [op("x", "MatMul", 0), op("shape", "MatMul", 0), op("y", "Reshape", 0, (0, "tensor"), (1, "shape")),
           op("n", "Size", 0, (0, "input")), op("z", "Reshape", 0, (0, "tensor"), (3, "shape"))]
    found = crossings(ops, place(ops, KNOWN))
    assert [(one.op, one.to_host, one.why) for one in found] == [(1, True, ARGUMENT)]


def test_mini_batch_goes_to_gpus_also_in_parts() -> None:
    ops = [op("x", "Placeholder", HOST, is_input=True), op("parts", "Split", HOST, (0, "value"), size=16.0),
           op("y", "MatMul", 1, (1, "a"))]
    found = crossings(ops, place(ops, KNOWN))
    assert [(one.op, one.device, one.to_host, one.why) for one in found] == [(1, 1, False, INPUT)]


def test_sizes_that_are_not_known_are_said() -> None:
    ops = [op("a", "MatMul", 0, size=None), op("b", "Sort", 0, (0, "x"))]
    placed = place(ops, KNOWN)
    found = crossings(ops, placed)
    assert total(found, lambda one: one.to_host) == (1, 0.0, True)
    assert lacking(ops, placed, found)[0].is_open


def test_loops_lead_back() -> None:
    """An op may read the result of a later one."""
    ops: List[GraphOp] = [op("enter", "MatMul", 0, (1, "next")), op("next", "Sort", 0, (0, "x"))]
    assert len(crossings(ops, place(ops, KNOWN))) == 2
