"""``epl.Env.get()``: what a script asks about the job and its configuration."""

from __future__ import annotations

from typing import Any, Dict, MutableMapping, Optional
from weakref import WeakKeyDictionary

from whale_tf._tf_compat import tf, v1
from whale_tf.epl.config import Config
from whale_tf.runtime.active import current


class Env:
    """The state of ``epl.init``; there is one.

    Attributes:
        cluster: an :class:`whale_tf.epl.cluster.Cluster`; None before ``epl.init``.
        config: the :class:`whale_tf.epl.config.Config` of ``epl.init``; None before it.
    """

    _only: Optional[Env] = None

    def __init__(self) -> None:
        self.reset()

    @classmethod
    def get(cls) -> Env:
        if cls._only is None:
            cls._only = cls()
        return cls._only

    def reset(self) -> None:
        self.cluster: Any = None
        self.config: Optional[Config] = None
        self._information: MutableMapping[tf.Graph, Dict[str, Any]] = WeakKeyDictionary()

    @property
    def is_ready(self) -> bool:
        return self.config is not None and current() is not None

    @property
    def parallel_information(self) -> Optional[Dict[str, Any]]:
        """A script's own notes about the current graph, as in EPL; once the graph is divided, with ``"NUM_STAGES"``.  None before
        ``epl.init``."""
        if self.config is None:
            return None
        graph = v1.get_default_graph()
        notes = self._information.setdefault(graph, {})
        state = current()
        if state is not None and graph in state.done:
            notes["NUM_STAGES"] = len(state.done[graph].plan.task_graphs)
        return notes

    def get_config_proto(self, allow_growth: bool = True) -> Any:
        proto = v1.ConfigProto()
        proto.gpu_options.allow_growth = allow_growth
        return proto
