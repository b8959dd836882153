"""What a training step becomes under four plans: its Program as text and as a picture.

    python -m examples.programs              prints the texts
    python -m examples.programs docs         writes docs/programs.md and its pictures
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional

import tensorflow.compat.v1 as tf

import whale_tf as wh


class Plan(NamedTuple):
    """``about``: a few words; ``annotate``: the context managers of the model's two halves."""

    about: str
    config: Dict[str, Any]
    first: Optional[Callable[[], Any]]
    second: Optional[Callable[[], Any]]


PLANS = {
    "data_parallel": Plan(
        "**Data parallel** on two devices: `with wh.replicate(2):` around the model.", {"variables": "mirrored"},
        lambda: wh.replicate(2), None),
    "pipeline": Plan(
        "**A pipeline** of two stages with four micro-batches (1F1B): `with wh.replicate(1):` around each half, and "
        "`num_micro_batch: 4`.", {"num_micro_batch": 4}, lambda: wh.replicate(1), lambda: wh.replicate(1)),
    "split_classifier": Plan(
        "**A split classifier**: `with wh.replicate(2):` around the features and `with wh.split(2):` around the classifier, on "
        "the same two devices.", {"cluster.colocate_split_and_replicate": True}, lambda: wh.replicate(2), lambda: wh.split(2)),
    "nested": Plan(
        "**Nested data parallelism**: two copies of the pipeline, with two micro-batches, on four devices.",
        {"num_micro_batch": 2, "io.nested_batch": "divide"}, lambda: wh.replicate(1), lambda: wh.replicate(1)),
}
DEVICES = {"data_parallel": 2, "pipeline": 2, "split_classifier": 2, "nested": 4}


def program_under(config: Dict[str, Any], devices: int, build: Callable[[], tf.Tensor]) -> Any:
    """The Program of a step that minimises the loss of a model, on logical CPU devices."""
    with tf.Graph().as_default():
        wh.init(config, cluster=f"cpu:{devices}")
        try:
            tf.train.GradientDescentOptimizer(0.1).minimize(build())
            wh.parallelize()
            program = wh.current_program()
            assert program is not None
            return program
        finally:
            wh.shutdown()


def write(folder: Path, name: str, text: str, programs: Dict[str, Any]) -> None:
    """A page and its pictures."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf8")
    for title, program in programs.items():
        wh.draw_program(str(folder / name / f"{title}.svg"), program)


def program_of(name: str) -> Any:
    """The Program of a small classifier under one of the plans."""
    plan = PLANS[name]

    def build() -> tf.Tensor:
        x, labels = tf.placeholder("float32", [16, 8], "x"), tf.placeholder("int32", [16], "labels")
        tf.set_random_seed(0)
        with plan.first() if plan.first else tf.name_scope(None):
            hidden = tf.nn.relu(tf.matmul(x, tf.get_variable("w", [8, 8], use_resource=True)), "hidden")
            if plan.second is None:
                return _loss(hidden, labels)
        with plan.second():
            return _loss(hidden, labels)

    return program_under(plan.config, DEVICES[name], build)


def _loss(hidden: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    logits = tf.matmul(hidden, tf.get_variable("v", [8, 4], use_resource=True), name="logits")
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits), name="loss")


def page(programs: Dict[str, Any]) -> str:
    """docs/programs.md."""
    parts = ["""# Programs

This page shows what a training step becomes under a plan: a *Program* of bodies and calls
([architecture](architecture.md#the-program)). The model is a small classifier: `x` times `w`, ReLU, times `v`, softmax loss.

To see the Program of your own step, print it with `wh.current_program().to_text()` or draw it with
`wh.draw_program("step.svg")`. `whale explain --program train.py --picture step.svg` does both before anything is trained.

The times in the pictures are nominal: a forward body takes one unit, a backward body two. `python -m examples.programs docs`
generates this page.
"""]
    for name, program in programs.items():
        parts.append(f"## {name.replace('_', ' ').capitalize()}\n\n{PLANS[name].about}\n\n"
                     f"![Each device's calls over time](programs/{name}.svg)\n\n```\n{program.to_text()}```\n")
    return "\n".join(parts)


def main() -> None:
    programs = {name: program_of(name) for name in PLANS}
    if len(sys.argv) < 2:
        for name, program in programs.items():
            print(f"-- {name}\n{program.to_text()}")
        return
    write(Path(sys.argv[1]), "programs", page(programs), programs)


if __name__ == "__main__":
    main()
