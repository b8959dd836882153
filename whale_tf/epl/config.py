"""EPL's configuration: its keys, its defaults, and what each of them means here.

Names, types and defaults are those of EPL's public documentation (docs/en/api/config.md of alibaba/EasyParallelLibrary).
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, Mapping, NamedTuple, Optional, Tuple

from whale_tf.config import FIXED
from whale_tf.config import Config as WhaleConfig
from whale_tf.errors import ConfigError, did_you_mean

SAME, MAPPED, HINT, REFUSED = "same", "mapped", "hint", "refused"


class Key(NamedTuple):
    """A key of EPL.

    Attributes:
        default: EPL's.
        kind: :data:`SAME`: a key of whale_tf has this name and meaning; :data:`MAPPED`: other names or values; :data:`HINT`: the
            value is accepted and changes nothing; :data:`REFUSED`: only the default, or what does the same, is accepted.
        text: what it means here, as a phrase.
        here: the value -> keys of whale_tf; for those that are mapped.
    """

    default: Any
    kind: str
    text: str
    here: Callable[[Any], Dict[str, Any]] = lambda value: {}


def _as(key: str) -> Callable[[Any], Dict[str, Any]]:
    return lambda value: {key: value}


def _slicing(value: bool) -> Dict[str, Any]:
    return {"io.slicing": "file" if value else False}


KEYS: Mapping[str, Key] = {
    "auto.auto_parallel": Key(
        False, MAPPED, "with pipeline.num_stages above 1, a model without annotations is divided into that many TaskGraphs "
        "(`pipeline.num_stages`); otherwise it is trained data parallel, as in EPL. A search over strategies "
        "(`auto.auto_parallel` of whale_tf) is not what EPL means"),
    "pipeline.num_stages": Key(-1, MAPPED, "read together with auto.auto_parallel; alone it changes nothing, as in EPL"),
    "pipeline.num_micro_batch": Key(1, SAME, "`pipeline.num_micro_batch`", _as("pipeline.num_micro_batch")),
    "pipeline.strategy": Key(
        "PreferBackward", MAPPED, "`pipeline.schedule`: PreferBackward and PreferBackwardOptimizer are backward_first (1F1B; how "
        "many micro-batches run ahead follows from `pipeline.warmup`), PreferForward is gpipe", _as("pipeline.strategy")),
    "gradient_checkpoint.type": Key("", MAPPED, "`recompute`: auto and collection are full. In collection only tensors in the "
                                    "graph's collection \"checkpoints\" are kept", _as("gradient_checkpoint.type")),
    "gradient_checkpoint.end_taskgraph": Key(-1, REFUSED, FIXED["gradient_checkpoint.end_taskgraph"].reason,
                                             _as("gradient_checkpoint.end_taskgraph")),
    "gradient_checkpoint.check_gradients": Key(False, HINT, "recomputed values equal the original ones; `verify: "
                                               "\"first_step\"` compares a whole step with the local one"),
    "zero.level": Key("", MAPPED, "`zero`: v0 is v1, v1 is v2, v2 is v3 (EPL counts from zero)", _as("zero.level")),
    "offload.level": Key("", MAPPED, "`offload`", _as("offload.level")),
    "amp.level": Key("", MAPPED, "`amp.dtype`: O1 is float16", _as("amp.level")),
    "amp.debug_log": Key(False, HINT, "`wh.explain()` says how many ops compute in which type"),
    "amp.loss_scale": Key("dynamic", SAME, "`amp.loss_scale`", _as("amp.loss_scale")),
    "cluster.device_place_prefer_intra_node": Key(True, SAME, "`cluster.device_place_prefer_intra_node`",
                                                  _as("cluster.device_place_prefer_intra_node")),
    "cluster.run_visible_devices": Key("", REFUSED, FIXED["cluster.run_visible_devices"].reason,
                                       _as("cluster.run_visible_devices")),
    "cluster.colocate_split_and_replicate": Key(False, SAME, "`cluster.colocate_split_and_replicate`",
                                                _as("cluster.colocate_split_and_replicate")),
    "communication.num_communicators": Key(2, HINT, FIXED["communication.num_communicators"].reason),
    "communication.sparse_as_dense": Key(False, SAME, "`communication.sparse_as_dense`", _as("communication.sparse_as_dense")),
    "communication.max_splits": Key(5, HINT, FIXED["communication.max_splits"].reason),
    "communication.fp16": Key(False, SAME, "`communication.fp16`", _as("communication.fp16")),
    "communication.fp16_scale": Key(128, HINT, FIXED["communication.fp16_scale"].reason),
    "communication.clip_after_allreduce": Key(False, HINT, FIXED["communication.clip_after_allreduce"].reason),
    "communication.gradients_reduce_method": Key(
        "mean", REFUSED, FIXED["communication.gradients_reduce_method"].reason, _as("communication.gradients_reduce_method")),
    "io.slicing": Key(False, MAPPED, "`io.slicing`: true is file (each process reads its own files). The default is false: "
                      "every process takes all mini-batches, and the script shares data itself", _slicing),
    "io.unbalanced_io_slicing": Key(False, REFUSED, FIXED["io.unbalanced_io_slicing"].reason, _as("io.unbalanced_io_slicing")),
    "io.drop_last_files": Key(False, REFUSED, FIXED["io.drop_last_files"].reason, _as("io.drop_last_files")),
    "optimizer.num_apply_group": Key(1, HINT, FIXED["optimizer.num_apply_group"].reason),
}

BATCH = "micro"  # EPL's num_micro_batch counts batches of the dataset


class Section:
    """The keys of one section, as attributes.  Values can be set until ``epl.init``."""

    def __init__(self, name: str, values: Dict[str, Any]) -> None:
        self.__dict__.update(_name=name, _values=values, _closed=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"epl.Config has no key {self._name + '.' + name!r}")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        key = f"{self._name}.{name}"
        if name not in self._values:
            raise AttributeError(f"epl.Config has no key {key!r}")
        if self._closed:
            raise AttributeError(f"epl.Config key {key!r} is set to {value!r} after epl.init(), when it has no effect any more; "
                                 "set it before, or call epl.init() again with another epl.Config")
        self._values[name] = _checked(key, value)

    def __dir__(self) -> Any:
        return sorted(self._values)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name} = {value!r}" for name, value in sorted(self._values.items())) + "}"


class Config:
    """EPL's configuration: ``Config({"pipeline.num_micro_batch": 4})``, then ``config.pipeline.num_micro_batch``.

    A key that is not given has the value of the environment variable ``EPL_<SECTION>_<KEY>``, else EPL's default.

    Raises:
        ConfigError: an unknown key, or a value of a wrong type.
    """

    def __init__(self, param_dict: Optional[Mapping[str, Any]] = None, environ: Mapping[str, str] = os.environ) -> None:
        given = dict(param_dict or {})
        unknown = next((key for key in given if key not in KEYS), None)
        if unknown is not None:
            hint = did_you_mean(str(unknown), list(KEYS))
            raise ConfigError(f"epl.Config has no key {unknown!r}.{hint} Known keys: {', '.join(KEYS)}")
        sections: Dict[str, Dict[str, Any]] = {}
        for key, known in KEYS.items():
            section, name = key.split(".")
            variable = f"EPL_{section}_{name}".upper()
            value = given.get(key, _read(variable, key, environ[variable]) if variable in environ else known.default)
            sections.setdefault(section, {})[name] = _checked(key, value)
        self.__dict__.update({name: Section(name, values) for name, values in sections.items()}, _closed=False)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"epl.Config has no key {name!r}; set one of a section, such as config.pipeline.num_micro_batch")

    def __getattr__(self, name: str) -> Section:  # only for names that are not there
        raise AttributeError(f"epl.Config has no section {name!r}; sections: {', '.join(self.sections())}")

    def __repr__(self) -> str:
        return "Config {\n" + "".join(f"    {name} = {getattr(self, name)!r}\n" for name in self.sections()) + "}"

    @staticmethod
    def sections() -> Tuple[str, ...]:
        return tuple(dict.fromkeys(key.split(".")[0] for key in KEYS))

    def __getitem__(self, key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def close(self) -> None:
        """From now on, setting a key raises AttributeError."""
        for name in self.sections():
            self.__dict__[name].__dict__["_closed"] = True

    def reopened(self) -> Config:
        """A copy that can be changed."""
        return Config({key: self[key] for key in KEYS}, {})

    def hints(self) -> Dict[str, Any]:
        """The keys that change nothing here and do not have their defaults."""
        return {key: self[key] for key, known in KEYS.items() if known.kind == HINT and self[key] != known.default}

    def here(self, environ: Mapping[str, str] = os.environ) -> WhaleConfig:
        """The same request in whale_tf's keys.  ``WHALE_CONFIG`` adds keys that EPL does not have, and wins over those it has.

        Raises:
            ConfigError: a value that cannot be had here.
        """
        keys: Dict[str, Any] = {"io.batch": BATCH}
        for key, known in KEYS.items():
            value = self[key]
            if known.kind == REFUSED and value == known.default:
                continue
            keys.update(known.here(value))
        if self["amp.level"] == "":
            del keys["amp.loss_scale"]
        if self["auto.auto_parallel"] and self["pipeline.num_stages"] > 1:
            keys["pipeline.num_stages"] = self["pipeline.num_stages"]
        return WhaleConfig({**WhaleConfig(keys).given_values(), **WhaleConfig.parse(None, environ).given_values()})


def _checked(key: str, value: Any) -> Any:
    """A value as EPL keeps it: text in lower case.

    Raises:
        ConfigError
    """
    default = KEYS[key].default
    if isinstance(value, str):
        value = value.lower()
    if key == "amp.loss_scale":
        if value == "dynamic":
            return value
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"epl.Config key {key!r} is {value!r}, expected \"dynamic\" or a number") from None
    is_right = isinstance(value, type(default)) and (isinstance(default, bool) or not isinstance(value, bool))
    if not is_right:
        raise ConfigError(f"epl.Config key {key!r} is {value!r}, expected a value such as {default!r}, of type "
                          f"{type(default).__name__}")
    if key == "communication.gradients_reduce_method" and value not in ("mean", "sum"):
        raise ConfigError(f"epl.Config key {key!r} is {value!r}, expected 'mean' or 'sum'")
    return value


def _read(variable: str, key: str, text: str) -> Any:
    """The value of an environment variable.

    Raises:
        ConfigError
    """
    default = KEYS[key].default
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"environment variable {variable} is {text!r}, expected true or false")
        return text.lower() == "true"
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"environment variable {variable} is {text!r}, expected a whole number") from None
    return text
