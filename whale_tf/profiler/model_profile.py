"""ModelProfile: a planner's view of a model, layer by layer, per sample.

The planners see a model as a chain of layers (DAPPLE section II-C: execution time, activation size and parameter size of
each).  Times are either measured on a device type or follow from FLOPs and memory traffic, see
:func:`whale_tf.profiler.layer_time.layer_seconds`.  On disk a profile is JSON; equal consecutive layers are written once with
a ``repeat``.
"""
from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from whale_tf.cluster import PRECISIONS
from whale_tf.documents import Record, field, json_object, parsed, plain
from whale_tf.errors import PlanError, did_you_mean

VERSION = 1


@dataclass(frozen=True)
class Measurement(Record):
    """One timed run of a layer: ``batch`` samples on a device of type ``device``, split over ``tensor_parallel`` devices.

    Attributes:
        has_sums: whether the times include the layer's own tensor-parallel collectives.
    """

    device: str
    tensor_parallel: int = field(1, at_least=1)
    batch: float = field(above=0, finite=True)
    forward_s: float = field(at_least=0, finite=True)
    backward_s: float = field(at_least=0, finite=True)
    has_sums: bool = True


@dataclass(frozen=True)
class LayerProfile(Record):
    """One layer; everything is per sample unless noted otherwise.

    Attributes:
        forward_flops: floating-point operations of the forward pass (a multiply-add is two).
        backward_flops: those of the backward pass; None means twice the forward pass.
        traffic_bytes: device memory read and written by the forward pass outside its matrix products and convolutions
            (normalisation, activation functions, dropout, look-ups); the backward pass moves twice as much.
        overhead_s: seconds per forward pass independent of the batch: launching its kernels; the backward pass takes twice that.
        utilization: share of the device's peak FLOP rate the layer reaches; above 1 if an algorithm needs fewer
            multiplications than the textbook count (Winograd convolution).
        parameter_bytes: bytes of all its parameters (not per sample).
        output_bytes: bytes that cross a cut after this layer in the forward direction, including skip connections;
            as many return as gradients.
        activation_bytes: bytes kept from the forward to the backward pass.
        tensor_parallel_bytes: bytes all-reduced over the devices in the forward pass if the layer is split (as many
            again in the backward pass); None if the layer cannot be split, so that every device computes all of it.
        tied: name of a parameter this layer shares with other layers; a stage that holds several of them stores and
            synchronises it once.
        measured: timed runs; a run for a device type takes precedence over FLOPs.
        ops: names of the layer's graph ops, if the profile was recorded from a graph.
    """

    name: str = field(not_empty=True)
    forward_flops: float = field(0.0, at_least=0, finite=True)
    backward_flops: Optional[float] = field(None, at_least=0, finite=True)
    traffic_bytes: float = field(0.0, at_least=0, finite=True)
    overhead_s: float = field(0.0, at_least=0, finite=True)
    utilization: float = field(0.75, above=0, finite=True)
    parameter_bytes: int = field(0, at_least=0)
    output_bytes: int = field(0, at_least=0)
    activation_bytes: int = field(0, at_least=0)
    tensor_parallel_bytes: Optional[int] = field(None, at_least=0)
    tied: Optional[str] = None
    measured: Tuple[Measurement, ...] = ()
    ops: Tuple[str, ...] = ()

    def check(self) -> None:
        runs = Counter((point.device, point.tensor_parallel, point.batch) for point in self.measured)
        twice = next((run for run, count in runs.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"layer {self.name!r} is measured twice on {twice[0]!r} (tensor_parallel {twice[1]}) with a batch "
                             f"of {twice[2]:g}; keep one")


@dataclass(frozen=True)
class ModelProfile(Record):
    """A chain of layers.

    Attributes:
        name: used in tables and messages.
        source: the origin of the numbers.
        precision: key of ``Device.peak_flops_per_s``.
        batch_granularity: smallest number of samples that a device computes efficiently; a smaller slice takes as long.  The
            planners need it; None if unknown.
        optimizer: the optimizer for which memory is counted.
        optimizer_bytes_per_parameter_byte: its state, without the parameter and its gradient.
        graph: fingerprint of the graph the profile was recorded from; empty for a built-in one.
    """

    version: int = VERSION
    name: str = field(not_empty=True)
    source: str = ""
    precision: str = field("fp32", among=PRECISIONS)
    batch_granularity: Optional[int] = field(None, at_least=1)
    optimizer: str = "adam"
    optimizer_bytes_per_parameter_byte: float = field(2.0, at_least=0, finite=True)
    graph: str = ""
    layers: Tuple[LayerProfile, ...] = field(not_empty=True)

    @classmethod
    def canonical(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        return _unfolded(values)

    def check(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"profile version is {self.version}, but this whale_tf reads version {VERSION}")
        twice = sorted(name for name, count in Counter(layer.name for layer in self.layers).items() if count > 1)
        if twice:
            raise ValueError(f"two layers are called {twice[0]!r}")
        shared: Dict[str, LayerProfile] = {}
        for layer in self.layers:
            first = layer if layer.tied is None else shared.setdefault(layer.tied, layer)
            if first.parameter_bytes != layer.parameter_bytes:
                raise ValueError(f"layers {first.name!r} and {layer.name!r} share parameter {layer.tied!r}, but have "
                                 f"{first.parameter_bytes} and {layer.parameter_bytes} parameter_bytes; give both the same")

    @property
    def parameter_bytes(self) -> int:
        """Parameter bytes of the whole model, counting a tied parameter once."""
        return self.stage_parameter_bytes(0, len(self.layers))

    @property
    def bytes_per_parameter_byte(self) -> float:
        """Parameter, gradient and optimizer state."""
        return 2.0 + self.optimizer_bytes_per_parameter_byte

    def distinct(self, first: int, end: int) -> List[LayerProfile]:
        """Layers ``first`` to ``end - 1``; of those with the same tied parameter only the first."""
        kept: Dict[object, LayerProfile] = {}
        for number, layer in enumerate(self.layers[first:end]):
            kept.setdefault(number if layer.tied is None else layer.tied, layer)
        return list(kept.values())

    def stage_parameter_bytes(self, first: int, end: int) -> int:
        """Parameter bytes of layers ``first`` to ``end - 1``, counting a tied parameter once."""
        return sum(layer.parameter_bytes for layer in self.distinct(first, end))

    def to_json(self) -> str:
        """JSON text; equal consecutive layers are written once, with ``repeat``."""
        head = plain(self, defaults=False)
        *rows, last = head.pop("layers")
        rows = [row if "output_bytes" in row else dict(row, output_bytes=0) for row in rows] + [last]
        layers = ",\n  ".join(map(json.dumps, _folded(rows)))
        text = json.dumps(dict({"version": self.version}, **head), indent=1)
        return f"{text[:-2]},\n \"layers\": [\n  {layers}\n ]\n}}\n"

    @classmethod
    def parse(cls, source: Union[ModelProfile, Mapping[str, Any], str]) -> ModelProfile:
        """A profile from a ModelProfile, a dict, JSON text, the path of a JSON file or the name of a built-in profile.

        Raises:
            PlanError: unknown name, unreadable file, unknown or missing key, or wrong value; the message gives the place.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, str):
            source = _load(source)
        profile = parsed(cls, source, "model profile", PlanError)
        assert isinstance(source, Mapping)
        rows = [row for row in source["layers"] if isinstance(row, dict)]  # from JSON; records have said it
        for number, row in enumerate(rows, 1):
            is_last = number == len(rows) and row.get("repeat", 1) == 1
            if not is_last and "output_bytes" not in row:
                raise PlanError("not a valid model profile: layer {!r} does not give its output_bytes, which cross a cut after "
                                "it; add them (0: nothing crosses; only the last layer needs none)".format(row["name"]))
        return profile


def builtin_names() -> Tuple[str, ...]:
    """Names of the profiles that come with the package."""
    return tuple(sorted(name[:-len(".json")] for name in os.listdir(_BUILTIN) if name.endswith(".json")))


def load_builtin(name: str) -> ModelProfile:
    """The built-in profile of that name.  Raises PlanError for an unknown one."""
    known = builtin_names()
    if name not in known:
        raise PlanError("there is no model profile {!r}; built-in ones are {}.{}".format(
            name, ", ".join(known), did_you_mean(name, known)))
    return ModelProfile.parse(os.path.join(_BUILTIN, name + ".json"))


_BUILTIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "builtin")


def _load(source: str) -> Dict[str, Any]:
    if not source.lstrip().startswith("{") and not os.path.isfile(source):
        known = builtin_names()
        if source not in known:
            raise PlanError("model profile {!r} is neither a file nor a built-in name; built-in ones are {}.{}".format(
                source, ", ".join(known), did_you_mean(source, known)))
        source = os.path.join(_BUILTIN, source + ".json")
    return json_object(source, "model profile", PlanError)


def _folded(layers: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Folds each run of layers that differ only in the number at the end of their names into one row with ``repeat``."""
    rows: List[Dict[str, Any]] = []
    for row in layers:
        stem, number = _numbered(row["name"])
        if rows and number is not None and "ops" not in row:
            last = rows[-1]
            if dict(row, name=stem + "{}") == {key: value for key, value in last.items() if key not in ("repeat", "start")} \
                    and last["start"] + last["repeat"] == number:
                last["repeat"] += 1
                continue
        if number is not None and "ops" not in row:
            row = dict(row, name=stem + "{}", repeat=1, start=number)
        rows.append(row)
    return [_single(row) if row.get("repeat") == 1 else row for row in rows]


def _single(row: Dict[str, Any]) -> Dict[str, Any]:
    name = row["name"].format(row["start"])
    return dict({key: value for key, value in row.items() if key not in ("repeat", "start")}, name=name)


def _numbered(name: str) -> Tuple[str, Optional[int]]:
    """``layer_12`` to (``layer_``, 12); no number: (name, None).  Names with braces or leading zeros are left alone."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem):]
    if not digits or str(int(digits)) != digits or "{" in name or "}" in name:
        return name, None
    return stem, int(digits)


def _unfolded(values: Dict[str, Any]) -> Dict[str, Any]:
    """The values with every ``repeat`` expanded into its layers."""
    rows = values.get("layers")
    if not isinstance(rows, (list, tuple)):
        return values
    layers: List[Any] = []
    for row in rows:
        if not isinstance(row, dict) or "repeat" not in row:
            layers.append(row)
            continue
        count, start, name = row["repeat"], row.get("start", 0), row.get("name")
        if not isinstance(count, int) or count < 1 or not isinstance(start, int) or not isinstance(name, str) \
                or name.count("{}") != 1:
            raise ValueError("a layer with \"repeat\" needs a count of at least 1 and a name with one {} for its number, got "
                             f"{row!r:.80}")
        body = {key: value for key, value in row.items() if key not in ("repeat", "start")}
        layers += [dict(body, name=name.replace("{}", str(start + index))) for index in range(count)]
    return dict(values, layers=layers)
