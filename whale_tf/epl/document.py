"""docs/epl.md: every public name and configuration key of EPL, and what it is here."""

from __future__ import annotations

import json
from typing import NamedTuple, Tuple

from whale_tf.epl.config import HINT, KEYS, MAPPED, REFUSED, SAME

KINDS = {SAME: "same", MAPPED: "mapped", HINT: "accepted, changes nothing", REFUSED: "refused"}


class Name(NamedTuple):
    """A public name of EPL: ``name`` below the package, its kind (as for keys), and a remark."""

    name: str
    kind: str
    text: str


NAMES: Tuple[Name, ...] = (
    Name("init", SAME, "`wh.init` with the configuration below and `io.batch: \"micro\"`. Eager execution is refused, as in EPL"),
    Name("Config", SAME, "EPL's keys, defaults and environment variables. An unknown key is an error (EPL ignores it), and so is "
         "setting one after `epl.init` (EPL takes it without effect)"),
    Name("Env.get", SAME, "`cluster`, `config`, `is_ready`, `parallel_information`, `get_config_proto`, `reset`"),
    Name("Cluster", MAPPED, "Devices are taken in EPL's order. A layout that says so is accepted, any other refused; see below"),
    Name("replicate", SAME, "`wh.replicate`. Every block is a TaskGraph, whatever its name"),
    Name("split", SAME, "`wh.split`. Variables stay whole in checkpoints, and all ops are divided that can be"),
    Name("set_default_strategy", SAME, "Each call opens a TaskGraph. Ops before the first call are in the first TaskGraph"),
    Name("add_to_collection", MAPPED, "As in EPL for what `Session.run` returns; summaries keep the local script's value. A "
         "tensor in two collections is an error"),
    Name("get_collection", SAME, ""),
    Name("get_all_collections", SAME, ""),
    Name("GraphKeys", SAME, "See below"),
    Name("VERSION", MAPPED, "whale_tf's version"),
    Name("Graph", REFUSED, "EPL's record of the graph; see `wh.op_graph()`, `wh.current_plan()` and `wh.current_program()`"),
    Name("strategies.replicate.Replicate", SAME, ""),
    Name("strategies.split.Split", SAME, ""),
    Name("ops.distributed_dense.distributed_dense", MAPPED, "One variable `kernel` and one `bias`, not one for each device"),
    Name("ops.distributed_losses.distributed_sparse_softmax_cross_entropy_with_logits", MAPPED,
         "Without EPL's 1e-8 under the logarithm"),
    Name("ops.distributed_ops.distributed_argmax", SAME, ""),
    Name("ops.distributed_ops.distributed_equal", SAME, ""),
    Name("ops.bridging_layer.Replica2Split", MAPPED, "An identity; bridges are found without it"),
    Name("ops.bridging_layer.Replica2Replica", MAPPED, "The same; EPL leaves it unimplemented"),
    Name("ops.bridging_layer.Split2Split", MAPPED, "The same; EPL leaves it unimplemented"),
    Name("ops.adam_weight_decay_optimizer.AdamWeightDecayOptimizer", SAME, "Gradients of look-ups are made dense first"),
    Name("profiler.memory_profiler_hook.MemoryProfilerHook", MAPPED, "Writes JSON, no pictures and no pickled files"),
    Name("profiler.memory_profiler_hook.profile_memory", MAPPED, "The same"),
    Name("profiler.flops.FlopsProfilerHook", MAPPED, "Counts the script's own graph, not its copies on devices"),
    Name("profiler.flops.profile_flops", MAPPED, "The same"),
    Name("profiler.profiler.profile_flops", MAPPED, "By whale_tf's cost model; a multiply-add is two operations"),
    Name("profiler.profiler.profile_memory", MAPPED, "Bytes by type; EPL counts four for each element"),
    Name("runtime.saver.ShardingLoader", SAME, "A missing tensor or another shape is an error that names it"),
    Name("runtime.saver.MemoryEfficientBuilder", REFUSED, "Checkpoints are written variable by variable already; use "
         "`tf.train.Saver`"),
    Name("ir.graph.GraphKeys", SAME, ""),
    Name("ir.graph.Graph", REFUSED, "The same"),
    Name("utils.common.get_device_string", SAME, ""),
    Name("utils.constant.REDUCE_METHOD_MEAN", SAME, "And `REDUCE_METHOD_SUM`, `GC_AUTO`, `GC_COLLECTION`, `GC_COLLECTION_NAME`, "
         "`DEFAULT_TASK_NAME`, `ENV_TF_CONFIG`; the others name EPL's own nodes"),
    Name("parallel", REFUSED, "EPL's rewriter"),
    Name("communicators", REFUSED, "EPL's NCCL operations; collectives are TensorFlow's or Horovod's (`communication.backend`)"),
)


def render() -> str:
    """The text of docs/epl.md."""
    lines = [TEXT.strip(), "", "## Public names", "", "| name in EPL | here | remark |", "| --- | --- | --- |"]
    lines += [f"| `epl.{one.name}` | {KINDS[one.kind]} | {one.text} |" for one in NAMES]
    lines += ["", "## Configuration keys", "", KEYS_TEXT.strip(), "", "| key | default | here | meaning |"]
    lines.append("| --- | --- | --- | --- |")
    lines += [f"| `{key}` | `{json.dumps(known.default)}` | {KINDS[known.kind]} | {_sentence(known.text)} |"
              for key, known in KEYS.items()]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return text if text.startswith("`") else text[:1].upper() + text[1:]


TEXT = """
# Scripts for EPL

This page says how scripts written for EPL (EasyParallelLibrary, the open-source part of Whale) run with whale_tf, unedited, and
what is different. It is generated: `python -m whale_tf.epl.document > docs/epl.md`.

## Running a script

```
python -m whale_tf.epl resnet_dp.py --class_num=1000          # one process
whale run --epl --workers 2 --devices-per-worker 2 script.py  # several
whale epl-launch --num_workers 2 --gpu_per_worker 1 run.sh    # with the arguments of epl-launch
PYTHONPATH=$(python -m whale_tf.epl --path) python script.py  # for scripts that start Python themselves
```

In a notebook, or a script that may be edited, `import whale_tf.epl; whale_tf.epl.install()` does the same before `import epl`.

Only processes started like this have a module `epl`. No distribution of whale_tf contains one: a pip extra can only install
other distributions, and a distribution with a top-level package `epl` would overwrite the files of a real EPL, which pip does
without a word. For the same reason all of these ways refuse to start where another `epl` can be imported, and name its place.

Devices are those of `WHALE_CLUSTER`, or all GPUs, or one CPU device. EPL's "GPUs" are these devices, so a script for eight GPUs
runs on a laptop: `WHALE_CLUSTER=cpu:8 python -m whale_tf.epl script.py`. Keys of whale_tf that EPL does not have are set in
`WHALE_CONFIG`, which also wins over the script's: `WHALE_CONFIG='{"verify": "first_step"}'` compares the first step with the
local one.

Scripts build graphs, with TensorFlow 1.15, or 2.x through `tf.compat.v1` after `disable_eager_execution()`.

## What a batch is

EPL takes one batch of the dataset for each micro-batch of each model replica; whale_tf divides one mini-batch into
micro-batches. Under `epl` the key `io.batch` is therefore `micro`: with `N` model replicas, `pipeline.num_micro_batch = M` and
batches of `B` examples, a step has `N M B` examples, and its numbers are those of the local script with batches of that size.
If a TaskGraph has `replicate(n)` with `n > 1`, these `n` devices divide a batch. What is fed, instead of taken from a pipeline,
is divided. `wh.explain()` says how many examples a step has.

With one TaskGraph and `M > 1`, EPL takes one batch in each `Session.run` and updates in every `M`-th; `global_step` counts
updates. Here one run takes `M` batches and updates. Both make the same updates of the same batches, so a script that ends at a
`global_step` trains the same, and one that counts runs makes `M` times as many updates.

## Collections

A fetched tensor has the local script's value. In one of EPL's collections it has EPL's, over what each clone (micro-batch and
replica) would compute alone:

| collection | value |
| --- | --- |
| `GLOBAL_MEAN_OBJECTS`, `GLOBAL_SUM_OBJECTS` | mean or sum over the micro-batches and replicas of all processes |
| `GLOBAL_CONCAT_OBJECTS` | their values one after the other |
| `LOCAL_MEAN_OBJECTS`, `LOCAL_SUM_OBJECTS`, `LOCAL_CONCAT_OBJECTS` | the same over this process's first replica's micro-batches |

Values over several processes are computed in runs that train; a run without the update has this process's part. A loss that
divides by a count of examples (`tf.losses`) has the mean that equal counts in all clones give. A tensor that is not part of
what is differentiated (a metric) is computed once, from all examples: a mean or a sum in it is recognised by its ops, and
anything else is refused by name, as is the concatenation of scalars, and a sum over examples to which something else is added (a
penalty on weights). So is a collection under a plan whose model replicas span processes.

## Processes

`Cluster(worker_hosts, ...)` with several hosts makes this process one of that job, as `TF_CONFIG` would. Layouts: `"all"`,
`"auto"` and None describe the order in which devices are taken anyway; `{"aware_row": n}` and `{"specific": ...}` are accepted
if they do, given `cluster.device_place_prefer_intra_node`, and are otherwise refused with the way out. `Session(target)` and a
server of the script's own are refused by name. As under EPL, a `RunConfig` of an Estimator does not see TF_CONFIG's cluster,
and its `train_distribute` and `device_fn` are left out with a warning.

`whale epl-launch` maps EPL's arguments: `--num_workers` and `--gpu_per_worker` are `--workers` and `--devices-per-worker` of
`whale run`, `--machine_list` and `--machine_rank` are `--rdzv` (the first machine) and `--nodes`, with a worker on each
machine. Output is printed with the number of its worker instead of being written to files. GPUs are named with `--cluster`.

## FastNN's scripts

These scripts of EPL's model zoo (alibaba/FastNN) were run on TensorFlow 1.15.5 with logical CPU devices, `verify: "first_step"`
and small sizes. In each, results, gradients and all new values of variables of the first step equal those of the local step on
the same examples. BERT has four layers of width 16 without dropout (`bert_config_file`), and a generated `train_file`. In
ResNet's scripts three constants are changed, because they are no arguments: `batch_size` 4, images of 33 x 33, three steps.

| script | arguments | devices | compared |
| --- | --- | --- | --- |
| `resnet_dp.py` | `--class_num=50`; also with `--gc`, and with `--zero` | `cpu:2` | 108 gradients, 327 values |
| `resnet_split.py` | `--class_num=50` | `cpu:2` | 108 gradients, 327 values |
| `scripts/train_dp.sh` (ResNet) | `epl-launch --num_workers 2 --gpu_per_worker 1` | two processes | 108 gradients, 654 values |
| `run_squad_dp.py` | `--train_batch_size=8`; also with `--gc --zero`, and `--do_predict` | `cpu:2` | 73 gradients, 214 values |
| `run_squad_pipe.py` | `--train_batch_size=8 --num_pipe_stages=2 --num_micro_batch=2` | `cpu:4` | 73 gradients, 214 values |
| `run_squad_auto_pipe.py` | the same | `cpu:4` | 73 gradients, 214 values |
| `moe_ffn.py`, in a model of one layer | `--op_split=1`, and `--op_split=0` | `cpu:4` | 5 gradients, 18 values |

The command is `WHALE_CLUSTER=cpu:2 WHALE_CONFIG='{"verify": "first_step"}' python -m whale_tf.epl SCRIPT ARGUMENTS`, for ResNet
with `"sync_batch_norm": true`, without which each replica normalises its own batch, as under EPL. `trainer.py` of MoE needs
tensor2tensor and was not run.

### Six steps

Some of them were also trained for six steps in float32 beside the local script (on one device, without whale_tf), with the same
initial values and the same eight examples in each step. Compared are the losses of all steps, and at the end all variables of the
script (216 for BERT, 327 for ResNet, of which two thirds are Adam's).

| script | devices | largest relative difference of a loss | of a variable of the model, median |
| --- | --- | --- | --- |
| `run_squad_dp.py` | `cpu:2` | 6.8e-8 | 2.7e-7 |
| `run_squad_pipe.py --num_pipe_stages=2 --num_micro_batch=2` | `cpu:4` | 1.4e-7 | 3.2e-7 |
| `run_squad_auto_pipe.py`, the same | `cpu:4` | 1.4e-7 | 3.2e-7 |
| `run_squad_dp.py --amp=True`, beside the local script in float32 | `cpu:2` | 3.5e-5 | 2.5e-3 |
| the same, beside itself on one device | `cpu:2`, `cpu:1` | 5.1e-5 | 3.1e-4 |
| `resnet_split.py` | `cpu:2` | 2.9e-6 | 5.9e-6 |
| `resnet_dp.py` | `cpu:2` | 2.2e-4 | 6.1e-3 |

A variable's difference is that of its elements which is largest, divided by its largest element. BERT's biases of keys and of the
output, which have no gradient but rounding errors, are left out.

In `resnet_dp.py` the first three losses are equal to nine digits, and the fourth differs by 2.5e-5. Sides of ReLUs and maxima,
which rounding errors can change, are the likely reason: the local script beside itself, with images up to 255.00005 instead of
255, has losses that differ by 1.6e-3, and variables by 1.4e-2.

Besides sizes, two things are changed in the scripts. ResNet's learning rate is 1e-4: with the 0.9 of `resnet_split.py` the second
loss is NaN, on one device too. And `optimization.py` counts the step after the updates: as it is written, `global_step.assign`
may come before or after the learning rate reads `global_step`, and two local runs differ.
"""

KEYS_TEXT = """
A key that is not given has the value of the environment variable `EPL_<SECTION>_<KEY>`, else EPL's default. Values of the kind
"accepted, changes nothing" are hints for EPL's own implementation; `epl.init` says once which of them a script sets.
"""


if __name__ == "__main__":
    print(render(), end="")
