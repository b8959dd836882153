"""The tables of TensorFlow's GPU kernels: what is found in them, how they are written, and that they are the registry's."""
from __future__ import annotations

from typing import Any

import pytest

from whale_tf.profiler.gpu_kernels import ANY, OWN, GpuKernels, Kernel, Registered, joined, nearest, shipped, versions

SHAPE = frozenset({"shape"})


def kernel(host: Any = (), **allows: str) -> Kernel:
    return Kernel({attr: frozenset(types.split()) for attr, types in allows.items()}, frozenset(host))


def table(*rows: Registered) -> GpuKernels:
    return GpuKernels.of("9.9", rows)


def test_own_kernels_come_before_those_for_any_device() -> None:
    own = kernel(["shape"], T="float32")
    known = table(Registered("Reshape", ANY, kernel(["tensor", "shape"])), Registered("Reshape", OWN, own))
    found = known.find("Reshape", {"T": ("float32",)})
    assert found is not None and found.host == SHAPE
    other = known.find("Reshape", {"T": ("string",)})
    assert other is not None and other.host == {"tensor", "shape"}


def test_all_types_of_a_list_must_be_allowed() -> None:
    known = table(Registered("IdentityN", OWN, kernel(T="float32 int64")))
    assert known.find("IdentityN", {"T": ("float32", "int64")}) is not None
    assert known.find("IdentityN", {"T": ("float32", "string")}) is None


def test_why_none_names_the_types_and_those_that_there_are() -> None:
    known = table(Registered("Mod", OWN, kernel(T="int32")))
    assert known.why_none("Mod", {"T": ("float32",)}) == "TensorFlow 9.9 has no Mod for GPUs with T float32 (it has int32)"
    assert known.why_none("Mode", {}) == "TensorFlow 9.9 has no Mode for GPUs"


def test_joined_kernels_allow_what_the_single_ones_allow() -> None:
    single = [kernel(T=t, I=i) for t in ("float16", "float32", "float64") for i in ("int32", "int64")]
    single.append(kernel(["shape"], T="int32", I="int32"))
    one, other = joined(single)
    assert (one, other) == (kernel(T="float16 float32 float64", I="int32 int64"), single[-1])
    uneven = [kernel(T="float16", I="int32"), kernel(T="float32", I="int64")]
    assert len(joined(uneven)) == 2


def test_json_has_everything() -> None:
    known = table(Registered("Reshape", OWN, kernel(["shape"], T="float32 int64", S="int32")), Registered("NoOp", ANY, kernel()))
    assert GpuKernels.from_json(known.to_json()) == known


def test_nearest_table() -> None:
    assert nearest("1.15.5", ["1.15", "2.21"]) == "1.15"
    assert nearest("2.15.0", ["1.15", "2.21"]) == "1.15"
    assert nearest("2.21.1", ["1.15", "2.21"]) == "2.21"
    assert nearest("1.14.0", ["1.15", "2.21"]) == "1.15"


@pytest.mark.parametrize("version", versions())
def test_shipped_tables_hold_what_is_known_of_tensorflow(version: str) -> None:
    """MatMul computes floats, shapes are read on the host, strings are not for GPUs."""
    known = shipped(version)
    assert known.find("MatMul", {"T": ("float32",)}) is not None and known.find("MatMul", {"T": ("int32",)}) is None
    reshape = known.find("Reshape", {"T": ("float32",), "Tshape": ("int32",)})
    assert reshape is not None and reshape.host == SHAPE
    assert known.find("StringJoin", {}) is None
    assert known.find("ResourceSparseApplyMomentum", {"T": ("float32",), "Tindices": ("int32",)}) is None
    assert known.find("ResourceApplyMomentum", {"T": ("float32",)}) is not None
