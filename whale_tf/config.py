"""Configuration: one validated, frozen value.

Each key has one dotted name (``pipeline.num_micro_batch``); the papers' flat names (``num_micro_batch``) and the dotted
names of the open-source predecessor EPL (``pipeline.strategy``) are aliases.  docs/config.md is generated from this
file.
"""
from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Tuple, Type, Union

from whale_tf._typing_compat import Literal
from whale_tf.documents import Invalid, Record, expectations, field, json_object
from whale_tf.errors import ConfigError, did_you_mean, nearest

ALIASES: Mapping[str, str] = {
    "num_micro_batch": "pipeline.num_micro_batch",
    "num_task_graph": "pipeline.num_stages",
    "auto_parallel": "auto.auto_parallel",
    "pipeline.strategy": "pipeline.schedule",
    "gradient_checkpoint.type": "recompute",
    "zero.level": "zero",
    "offload.level": "offload",
    "amp": "amp.dtype",
    "amp.level": "amp.dtype",
}

VERIFIED = "WHALE_VERIFY_FIRST_STEP"  # environment variable that stands for verify: "first_step"

# Values of a key under the names that EPL uses, in upper or lower case, as EPL reads them.
VALUES: Mapping[str, Mapping[str, str]] = {
    "pipeline.schedule": {
        "PreferBackward": "backward_first", "PreferBackwardOptimizer": "backward_first", "PreferForward": "gpipe"},
    "gradient_checkpoint.type": {"": "none", "auto": "full", "collection": "full"},
    "zero": {"v0": "v1"},
    "zero.level": {"": "none", "v0": "v1", "v1": "v2", "v2": "v3"},  # EPL counts from zero
    "offload.level": {"": "none"},
    "amp.level": {"": "none", "O1": "float16"},
}


class Fixed(NamedTuple):
    """A key of EPL for which there is no choice here.

    Attributes:
        accepted: values that change nothing.
        reason: why other values are refused, and what to use instead.
    """

    accepted: Tuple[Any, ...]
    reason: str


# A value that describes what happens here anyway is accepted.  Names and defaults are from EPL's public documentation.
FIXED: Mapping[str, Fixed] = {
    "io.drop_last_files": Fixed((False,), "no file is dropped; drop files in the pipeline, or set io.slicing to true, which "
                                "shares elements instead of files"),
    "io.unbalanced_io_slicing": Fixed((False,), "all processes take the same number of steps, so the first one that runs out of "
                                      "files ends the others; set io.slicing to true, which shares elements instead of files"),
    "communication.max_splits": Fixed((), "gradients are put together by size; set communication.bucket_bytes"),
    "communication.num_communicators": Fixed((), "collectives run in parallel without a pool"),
    "communication.fp16_scale": Fixed((), "under communication.fp16 each bucket is scaled by its largest element"),
    "communication.clip_after_allreduce": Fixed((True,), "gradients are clipped where the script clips them, which is after "
                                                "they are summed over all replicas"),
    "communication.gradients_reduce_method": Fixed(("mean",), "gradients are those of the script's own loss on the whole "
                                                   "mini-batch; for a sum, use a loss that is a sum (tf.reduce_sum)"),
    "gradient_checkpoint.end_taskgraph": Fixed((-1,), "recompute is for all TaskGraphs; mark kept tensors with wh.checkpoint()"),
    "gradient_checkpoint.check_gradients": Fixed((False,), "recomputed values equal the original ones, including random "
                                                 "numbers; to check, compare with recompute 'none'"),
    "amp.debug_log": Fixed((False,), "print wh.explain(), which says which ops compute in which type"),
    "cluster.run_visible_devices": Fixed(("",), "set CUDA_VISIBLE_DEVICES, or list the devices in wh.init(cluster=...)"),
    "optimizer.num_apply_group": Fixed((1,), "an update waits only for the gradients of its own variable, so there are no "
                                       "groups to run one after the other"),
}


@dataclass(frozen=True)
class Pipeline(Record):
    """Micro-batches and their order."""

    num_micro_batch: Optional[int] = field(
        None, at_least=1,
        description="Micro-batches per mini-batch. With one TaskGraph this is gradient accumulation. null: 1 for an annotated "
        "model; chosen by the search for an automatic plan.")
    num_stages: Optional[int] = field(
        None, at_least=1,
        description="Number of TaskGraphs that an unannotated model is divided into (Whale's num_task_graph), each on a device "
        "of its own. Under the schedules interleaved and zero_bubble_v, number of stages, each of which is divided into several "
        "TaskGraphs on the same device. null: no division, or chosen by the search under auto.auto_parallel.")
    schedule: Literal["backward_first", "gpipe", "interleaved", "zero_bubble_h1", "zero_bubble_h2", "zero_bubble_v",
                      "auto"] = field(
        "backward_first",
        description="Order of micro-batches. backward_first: 1F1B (also PreferBackward and PreferBackwardOptimizer; warmup "
        "decides how many forward passes run ahead); gpipe: all forward passes first (also PreferForward); zero_bubble_h1: "
        "1F1B that delays gradients of weights to times when a stage would wait; zero_bubble_h2: the same with more forward "
        "passes ahead, which needs more memory; interleaved: several TaskGraphs per device, in turn; zero_bubble_v: two "
        "TaskGraphs per device, down the pipeline and back. The last two need more TaskGraphs than the pipeline has devices. "
        "auto: the fastest of these that fits the devices' memory according to the simulation.")
    warmup: Literal["auto", "PA", "PB"] = field(
        "auto",
        description="Number of forward micro-batches that stage i of S starts before its first backward one: PA = min(S-i, D), "
        "PB = min(2(S-i)-1, D), with D from device memory (DAPPLE V-C). auto: by the activation-communication ratio.")


@dataclass(frozen=True)
class Auto(Record):
    """Automatic planning."""

    auto_parallel: Union[bool, Literal["dapple", "amp", "rhino"]] = field(
        False,
        description="Find a plan: with one search, or with true all of them, and use the best. If no plan fits the devices as "
        "it is, recompute and zero become auto, unless they are set.")
    stage_tolerance: float = field(
        0.2, at_least=0,
        description="Rhino's epsilon: by which fraction of an equal share its pipeline stages may differ from that share in "
        "order to send fewer bytes.")
    batch_size: Optional[int] = field(
        None, at_least=1,
        description="Mini-batch size, in examples, that the search assumes. null: the size in the graph's shapes, or 32.")


@dataclass(frozen=True)
class Io(Record):
    """Input pipelines."""

    nested_batch: Literal["own", "divide"] = field(
        "own",
        description="Under nested data parallelism: each model replica takes its own mini-batch (own), or the replicas divide "
        "one mini-batch (divide).")
    batch: Literal["mini", "micro"] = field(
        "mini",
        description="What a batch of the input pipeline of a Session's graph is. mini: a mini-batch, which num_micro_batch "
        "divides. micro: a micro-batch, as in EPL: every micro-batch of every model replica takes a batch of its own, so a step "
        "has num_micro_batch times as many examples. What is fed is divided either way. wh.explain() says how many examples a "
        "step has.")
    slicing: Union[bool, Literal["file"]] = field(
        True, description="How several processes share a tf.data pipeline. true: each takes its own mini-batches, the i-th of "
        "every n, and a remainder at the end is dropped. file: each reads only its own files, the i-th of every n, if the "
        "pipeline reads files. false: each takes all mini-batches.")


@dataclass(frozen=True)
class Placement(Record):
    """The placement of TaskGraphs on devices."""

    colocate_split_and_replicate: bool = field(
        False,
        description="All TaskGraphs use the same devices, even if there are enough for each to have its own.")
    device_place_prefer_intra_node: bool = field(
        True,
        description="true: a model replica stays within a node. false: the replicas of one TaskGraph stay within a node, and "
        "stages span nodes (DAPPLE Fig. 2).")


@dataclass(frozen=True)
class Communication(Record):
    """Gradient synchronisation."""

    backend: Literal["auto", "local", "collective", "horovod"] = field(
        "auto",
        description="local: sums inside one process; collective: TensorFlow's ring or NCCL collectives; horovod: Horovod's "
        "collectives between the processes of its launcher. auto: collective if there are several processes.")
    bucket_bytes: Optional[int] = field(
        None, at_least=1,
        description="Between processes, gradients smaller than this many bytes are sent together, up to about that many bytes "
        "at a time. null: both limits follow from the cluster's latency and bandwidths.")
    fp16: bool = field(
        False,
        description="Between processes, send dense float32 and float64 gradients as float16, scaled by their largest element "
        "so that no sum overflows. They keep 11 bits.")
    start_timeout_s: int = field(
        300, at_least=1,
        description="Seconds that the first Session of a process waits for all other processes to start.")
    lost_after_s: int = field(
        5, at_least=2,
        description="Seconds without an answer after which another process counts as lost: it is stopped, or its host or the "
        "network is down. A process that computes or loads data answers. One that has ended counts as lost within 2 seconds.")
    sparse_as_dense: bool = field(
        False,
        description="Convert sparse gradients to dense ones when they are computed, so that they are summed like all others. "
        "An optimizer with momentum then also changes rows without a gradient, and a global norm adds up repeated rows first.")


@dataclass(frozen=True)
class Amp(Record):
    """Mixed precision."""

    dtype: Literal["none", "float16", "bfloat16"] = field(
        "none",
        description="Matrix products, convolutions and the ops between them compute in this type, forward and backward. "
        "Variables, sums, losses and updates stay float32. EPL's amp.level O1 means float16.")
    loss_scale: Union[None, float, Literal["dynamic"]] = field(
        None, at_least=1,
        description="Factor for gradients while they pass through the low-precision type, so that small ones do not vanish. A "
        "step whose gradients are not finite is skipped. dynamic: halved after such a step, doubled after 2000 others. 1: no "
        "scaling. null: dynamic with float16, no scaling with bfloat16.")


@dataclass(frozen=True)
class Patterns(Record):
    """Sharding patterns of ops under split."""

    force: Union[str, Dict[str, str], None] = field(
        None, expected="a name, or an object of names, or null",
        description="Use this sharding pattern instead of the cheapest one: one name for every unit, or one name per unit: "
        "{\"unit\": \"pattern\"}.")


@dataclass(frozen=True)
class Balance(Record):
    """Load on unequal devices."""

    algorithm: Literal["exact", "proportional", "even"] = field(
        "exact",
        description="exact: smallest step time within memory; proportional: in proportion to speed, ignoring memory; even: "
        "equal loads.")


@dataclass(frozen=True)
class Snapshots(Record):
    """Snapshots of training."""

    path: Optional[str] = field(
        None, not_empty=True,
        description="Directory for snapshots of fit (Keras 3), MonitoredTrainingSessions and loops over wh.resume, which all "
        "processes can reach, or which each host has for itself. If it holds one, the same command goes on at the next example "
        "([docs/long_runs.md](long_runs.md)). null: no snapshots.")
    every_steps: Optional[int] = field(None, at_least=1, description="Steps between two snapshots. null: not by steps.")
    every_s: Optional[float] = field(None, above=0, description="Seconds between two snapshots. null: not by time.")
    budget: float = field(
        0.035, above=0,
        description="If neither of these is set: which share of the time training may wait for snapshots. The more one costs, "
        "the longer is the time to the next.")
    keep: int = field(2, at_least=1, description="How many complete snapshots to keep of each of these.")
    neighbour: bool = field(
        True,
        description="Whether, if hosts have directories of their own, what a process has written is also kept on the next host, "
        "so that the loss of one loses no snapshot. In a directory that all processes reach there is nothing to copy.")


@dataclass(frozen=True, init=False)
class Config(Record):
    """All settings, e.g. ``Config({"num_micro_batch": 8, "pipeline.schedule": "gpipe"})``.

    Attributes:
        given: dotted names of the keys that were set, even if to their defaults.

    Raises:
        ConfigError: an unknown key, a wrong type, an invalid value, or one key set twice with different values.
    """

    pipeline: Pipeline = Pipeline()
    auto: Auto = Auto()
    io: Io = Io()
    cluster: Placement = Placement()
    communication: Communication = Communication()
    amp: Amp = Amp()
    patterns: Patterns = Patterns()
    balance: Balance = Balance()
    snapshot: Snapshots = Snapshots()
    init: Literal["exact", "sharded"] = field(
        "exact",
        description="Initial values of variables that split divides. exact: computed whole and sliced, as in the local model. "
        "sharded: generated on each shard, for variables too large for one device. The values are the same unless the "
        "generator cannot be advanced; wh.explain() names these variables.")
    emit: Literal["auto", "inline", "call"] = field(
        "auto",
        description="How the step is written into the graph. inline: every op of every clone. call: each clone has one op for "
        "its forward pass and one for its backward pass, which call functions; wh.explain() says where that is not possible. "
        "auto: call if the inlined step would have many thousands of ops, which are slow to start, unless only "
        "the inlined step fits in memory.")
    xla: bool = field(
        False,
        description="XLA compiles the functions of forward and backward passes if it has kernels for all their ops. The step "
        "is then called, not inlined. wh.explain() names the functions that are not compiled, and why.")
    variables: Literal["auto", "mirrored", "shared", "stage"] = field(
        "auto",
        description="mirrored: every replica has and updates its own copies of its variables. shared: the replicas of a "
        "process read one copy, on the first replica's device; in a tf.function, where the script made it. stage: shared, and "
        "in a tf.function on the first replica's device too; there, the step moves the variable and its optimizer state. auto: "
        "shared if the replicas are CPU devices of one process, which share one memory, or if a condition or function "
        "updates the variables; in a tf.function of one process, stage if the devices have memories of their own.")
    recompute: Literal["none", "full", "auto"] = field(
        "none",
        description="Recompute activations in the backward pass instead of keeping them (gradient checkpointing). full: keep "
        "as few as possible. auto: keep as many as the device's memory has room for, at the least cost of time. If the script "
        "calls wh.checkpoint(), or adds tensors to the graph's collection 'checkpoints', only these are kept. Random numbers "
        "are never drawn twice, and variables are never updated twice. EPL's auto and collection mean full.")
    zero: Literal["none", "v1", "v2", "v3", "auto"] = field(
        "none",
        description="ZeRO divides what data parallelism otherwise keeps on every replica. Each variable has a home, the device "
        "of one replica, where it is stored and updated and where its optimizer keeps its state. A variable that is larger than "
        "a device's share is divided into parts, which have homes of their own. v1: gradients go there once a step. v2: the "
        "gradients of each micro-batch go there at once, so no other replica adds them up. v3: replicas also read variables "
        "again for every micro-batch, forward and backward, instead of holding the values for a whole step. Over several "
        "processes, one process updates a variable, keeps its optimizer state, and sends the new value to the others; under v3 "
        "only that process stores the variable, and it sends the value before the forward pass. auto: as little as makes the "
        "step fit the devices' memory according to the simulation. EPL's zero.level counts from zero: its v0, v1 and v2 are v1, "
        "v2 and v3.")
    offload: Literal["none", "states", "v0", "auto"] = field(
        "none",
        description="Use the host's memory instead of the devices'. states: variables are kept and updated on the host, and "
        "devices read each once a step. v0: devices read them again for every micro-batch, forward and backward (EPL's offload "
        "of weights). auto: as little as makes the step fit according to the simulation. If the devices are CPU devices "
        "themselves, an additional logical CPU device stands for the host. Each of several processes has all variables on its "
        "own host.")
    sync_batch_norm: bool = field(
        False,
        description="Batch normalisation uses the statistics of the whole mini-batch instead of each replica's part.")
    random: Literal["own", "local"] = field(
        "own",
        description="Random numbers that depend on the examples (dropout, noise). own: every clone draws its part with its own "
        "seed. local: the script's own op draws once per step for the whole mini-batch, and clones take their rows, so a "
        "seeded script trains with the local numbers. The draws then run on one device, which sends the others their rows.")
    on_inexact: Literal["warn", "error", "allow"] = field(
        "warn",
        description="What to do about an op whose result differs from the local script's (batch normalisation of each "
        "replica's part). warn: one wh.InexactWarning for all layers when the graph is rewritten. error: refuse before anything "
        "runs. allow: only wh.explain() mentions it.")
    on_idle: Literal["warn", "error", "allow"] = field(
        "warn",
        description="What to do if less than half of the step's floating-point operations are divided over the plan's devices, "
        "or of the parameter bytes under wh.split. warn: one wh.IdleWarning when the graph is rewritten. error: refuse before "
        "anything runs. allow: only wh.explain() mentions it.")
    verify: Literal["off", "first_step"] = field(
        "off",
        description="first_step: the local step runs beside the first training step on the same mini-batch; if its losses, "
        "gradients or new values of variables differ by more than rounding, wh.MismatchError names the first tensor that does "
        "([docs/verify.md](verify.md)). It costs about one local step, once. off: nothing is compared.")
    given: FrozenSet[str] = dataclasses.field(init=False, compare=False, repr=False)

    def __init__(self, values: Optional[Mapping[str, Any]] = None, **keys: Any) -> None:
        given = dict(values) if isinstance(values, Mapping) else values
        if given is not None and not isinstance(given, dict):
            raise ConfigError(f'Config takes a dict such as {{"num_micro_batch": 8}}, got {values!r}; Config.parse also reads '
                              "JSON text and files")
        leaves = _flatten(dict(given or {}, **keys))
        nested = dict(_nest(leaves), given=frozenset(leaves))
        for item in dataclasses.fields(self):
            object.__setattr__(self, item.name, nested.get(item.name, item.default))
        try:
            self.__post_init__()
        except Invalid as error:
            raise _readable(error, leaves) from None

    @classmethod
    def parse(cls, source: Union[Config, Mapping[str, Any], str, None] = None,
              environ: Mapping[str, str] = os.environ) -> Config:
        """A config from a Config, a dict (flat, dotted or nested), JSON text, or the path of a JSON file.

        Without a source, from ``WHALE_CONFIG`` (JSON text or a path), else all defaults.  Raises ConfigError.
        """
        if source is None:
            source = environ.get("WHALE_CONFIG") or {}
        if isinstance(source, Config):
            return source
        if isinstance(source, os.PathLike):
            source = os.fspath(source)
        if isinstance(source, str):
            source = json_object(
                source, "config", ConfigError, 'give the path of a JSON file, or JSON text such as {"num_micro_batch": 8}')
        return cls(source)

    @property
    def precision(self) -> str:
        """The type in which ops compute if that is safe."""
        return "float32" if self.amp.dtype == "none" else self.amp.dtype

    @property
    def loss_scale(self) -> Union[None, float, Literal["dynamic"]]:
        """The factor for gradients in that type: a number, "dynamic", or None."""
        scale = self.amp.loss_scale
        if scale is None:
            return "dynamic" if self.amp.dtype == "float16" else None
        return None if self.amp.dtype == "none" or scale == 1 else scale

    def without_loss_scale(self) -> Config:
        """For a script that scales its loss itself."""
        return self.changed(amp__loss_scale=1.0)

    def to_dict(self) -> Dict[str, Any]:
        """Every key by its dotted name."""
        return {row.key: self[row.key] for row in self.table()}

    def changed(self, **keys: Any) -> Config:
        """A copy with other values for some keys of sections, such as ``pipeline__schedule="gpipe"``."""
        return Config({**self.given_values(), **{key.replace("__", "."): value for key, value in keys.items()}})

    def given_values(self) -> Dict[str, Any]:
        """The keys that were set, by their dotted names."""
        return {key: self[key] for key in sorted(self.given)}

    def to_json(self, indent: Optional[int] = 1) -> str:
        """The keys that were set.  Other keys depend on what is not set, so a reader must not take defaults for requests."""
        return json.dumps(self.given_values(), indent=indent)

    def __getitem__(self, key: str) -> Any:
        """The value of a key by its dotted name or an alias.  Raises ConfigError for an unknown key."""
        value: Any = self
        for part in _canonical(key).split("."):
            value = getattr(value, part)
        return value

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))

    @classmethod
    def table(cls) -> Tuple[Row, ...]:
        """One row per key, in the order of the sections."""
        return _ROWS


class Row(NamedTuple):
    """A key as shown in documentation and messages."""

    key: str
    aliases: Tuple[str, ...]
    allowed: str
    default: Any
    meaning: str


def render_docs() -> str:
    """The text of docs/config.md."""
    lines = [
        "# Configuration", "",
        "This page lists every configuration key. `wh.init(config)` takes a `wh.Config`, a dict, JSON text or the path of a",
        "JSON file. Without an argument it reads the environment variable `WHALE_CONFIG` (JSON text or a path). Keys are flat,",
        "dotted or nested:", "",
        "```python",
        'wh.init(wh.Config({"num_micro_batch": 8, "pipeline.schedule": "gpipe", "io": {"slicing": False}}))',
        "```", "",
        "An unknown key, a wrong type, an invalid value, or a key set twice with different values raises an error that names",
        "the key, the nearest valid key and the allowed values.", "",
        "This page is generated: `python -m whale_tf.config > docs/config.md`.", "",
        "| key | also | values | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for row in Config.table():
        also = ", ".join(f"`{alias}`" for alias in row.aliases)
        allowed = row.allowed.replace("'", "`")
        lines.append(f"| `{row.key}` | {also} | {allowed} | `{json.dumps(row.default)}` | {row.meaning} |")
    return "\n".join(lines) + "\n"


# ---- keys -----------------------------------------------------------------------------------------------------------

def _section_rows(section: Type[Record], prefix: str) -> List[Row]:
    rows: List[Row] = []
    allowed = expectations(section)
    for item in dataclasses.fields(section):
        if isinstance(item.default, Record):
            rows += _section_rows(type(item.default), item.name + ".")
        elif item.init:
            key = prefix + item.name
            aliases = tuple(alias for alias, target in ALIASES.items() if target == key)
            rows.append(Row(key, aliases, allowed[item.name], item.default, item.metadata["description"]))
    return rows


_ROWS: Tuple[Row, ...] = tuple(_section_rows(Config, ""))
_KEYS: Mapping[str, Row] = {row.key: row for row in _ROWS}
_SECTIONS = tuple(sorted({key.split(".")[0] for key in _KEYS if "." in key}))
_PREFIXES = {name.split(".")[0] for name in (*_KEYS, *ALIASES, *FIXED) if "." in name}  # EPL's sections too


def _canonical(key: str) -> str:
    """The dotted name of ``key``.  Raises ConfigError with the nearest valid key."""
    name = ALIASES.get(key, key)
    if name in _KEYS:
        return name
    known = list(_KEYS) + list(ALIASES)
    by_tail = {known_key.split(".")[-1]: known_key for known_key in reversed(known)}
    tail = nearest(key.split(".")[-1], by_tail)
    hint = f" Did you mean {by_tail[tail]!r}?" if tail else ""
    raise ConfigError("unknown config key {!r}.{} Known keys: {}".format(key, hint, ", ".join(known)))


def _flatten(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Converts nested, dotted and flat names to canonical dotted ones."""
    leaves: Dict[str, Any] = {}
    spelled: Dict[str, str] = {}
    for key, value in _leaves(values, ""):
        if key in FIXED:
            _check_fixed(key, value)
            continue
        name = _canonical(key)
        others = {other.lower(): own for other, own in VALUES.get(key, VALUES.get(name, {})).items()}
        value = others.get(value.lower(), value) if isinstance(value, str) else value
        if name in leaves and (leaves[name] != value or type(leaves[name]) is not type(value)):
            raise ConfigError(f"config keys {spelled[name]!r} and {key!r} are the same key but have different values, "
                              f"{leaves[name]!r} and {value!r}; keep one")
        leaves[name], spelled[name] = value, key
    return leaves


def _check_fixed(key: str, value: Any) -> None:
    """Raises:
        ConfigError: the value of EPL's key describes something other than what happens here.
    """
    fixed = FIXED[key]
    if any(value == one and type(value) is type(one) for one in fixed.accepted):
        return
    or_accepted = "".join(f", or set it to {one!r}" for one in fixed.accepted)
    raise ConfigError(f"config key {key!r} is {value!r}, which exists in EPL, but not in whale_tf: {fixed.reason}. "
                      f"Leave it out{or_accepted}")


def _leaves(values: Mapping[str, Any], prefix: str) -> List[Tuple[str, Any]]:
    found: List[Tuple[str, Any]] = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError("config key {!r} is not text; known keys: {}".format(key, ", ".join(_KEYS)))
        full = prefix + key
        if isinstance(value, Mapping) and full in _PREFIXES:
            found += _leaves(value, full + ".")
        elif full in _SECTIONS and full not in ALIASES:
            inside = [name for name in _KEYS if name.startswith(full + ".")]
            raise ConfigError("config section {!r} is {!r}, expected an object with the keys {}".format(
                full, value, ", ".join(inside)))
        else:
            found.append((full, value))
    return found


def _nest(leaves: Mapping[str, Any]) -> Dict[str, Any]:
    nested: Dict[str, Any] = {}
    for key, value in leaves.items():
        section, dot, name = key.partition(".")
        if dot:
            nested.setdefault(section, {})[name] = value
        else:
            nested[key] = value
    return nested


def _readable(error: Invalid, leaves: Mapping[str, Any]) -> ConfigError:
    place = [str(part) for part in error.problems[0].place]
    key = next(name for name in (".".join(place[:2]), place[0]) if name in _KEYS)
    row = _KEYS[key]
    value = leaves[key]
    hint = did_you_mean(value, row.allowed.replace("'", "").split(" or ")) if isinstance(value, str) else ""
    return ConfigError("config key {!r} is {!r}, expected {}.{}".format(key, value, row.allowed, hint))


if __name__ == "__main__":
    print(render_docs(), end="")
