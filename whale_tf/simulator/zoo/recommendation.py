"""DLRM as a layer table: embedding tables, dense towers, pairwise interactions."""

from __future__ import annotations

from typing import Tuple

from whale_tf.simulator.model_graph import Builder, ModelGraph


def _tower(b: Builder, x: int, widths: Tuple[int, ...]) -> int:
    """Dense layers with ReLU; tensor parallelism alternates between columns and rows."""
    for number, width in enumerate(widths):
        weight = b.parameter(f"fc{number}_w", "f o", (b.tensors[x].shape[-1], width))
        x = b.op(f"fc{number}", "matmul", "b f, f o -> b o", (x, weight), split="fo"[number % 2] if width > 1 else None)
        x = b.pointwise(f"fc{number}_relu", "relu", b.bias(f"fc{number}_bias", x))
    return x


def dlrm(batch: int, tables: int = 8, rows: int = 1_000_000, width: int = 64) -> ModelGraph:
    """DLRM with 8 tables of a million rows (512M of its 516M parameters), FlexFlow's configuration.

    All tables are one stacked tensor ``n v h``, and table-wise parallelism partitions ``n``.  Gradients of the tables are
    sparse.
    """
    b = Builder("dlrm", batch, optimizer="sgd")
    with b.scope("bottom"):
        dense = _tower(b, b.input("dense", "b f", (batch, width)), (512, 512, width))
    with b.scope("embedding"):
        ids = b.input("ids", "b n", (batch, tables))
        table = b.parameter("tables", "n v h", (tables, rows, width), sparse_rows=batch * tables)
        vectors = b.op("lookup", "embedding", "b n, n v h -> b n h", (ids, table), float(batch * tables * width), split="n")
    with b.scope("interaction"):
        pairs = b.op("pairs", "matmul", "b n h, b m h -> b n m", (vectors, vectors), whole=("n", "m", "h"))
        joined = b.op(
            "concat", "concat", "b f, b n m -> b c", (dense, pairs), float(batch * (width + tables**2)),
            whole=("f", "n", "m", "c"), sizes={"c": 576})
    with b.scope("top"):
        x = _tower(b, joined, (1024, 1024, 1024, 1))
        b.op("loss", "loss", "b o -> b", (x,), 6.0 * batch)
    return b.graph()
