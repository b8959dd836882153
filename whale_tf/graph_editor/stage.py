"""Where nodes are staged: in a StagedEdit or a copy of a function."""
from __future__ import annotations

import abc
from typing import Any, Dict, Mapping, Optional, Sequence

from whale_tf._tf_compat import op_def, tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.graph_editor.attrs import OpSignature


class Stage(abc.ABC):
    """Args:
    graph: the graph whose op types and functions the nodes use.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.graph = graph
        self._signatures: Dict[str, OpSignature] = {}

    @abc.abstractmethod
    def add(self, op_type: str, name: str, inputs: Sequence[str] = (), *, device: str = "",
            control_inputs: Sequence[str] = (), attrs: Optional[Mapping[str, Any]] = None) -> str:
        """Stage one node.

        Args:
          attrs: Python values (see ``attrs.to_attr_value``).

        Returns:
          The name under which other nodes read its first output.

        Raises:
          GraphEditError: unknown op type or attribute, or a value that does not fit.
        """

    def output(self, name: str, index: int) -> str:
        """The name under which other nodes read a further output of a node whose outputs are one list.

        Args:
            name: what :meth:`add` returned.
        """
        return f"{name}:{index}"

    def const(self, value: Any, name: str, *, dtype: Any = None, device: str = "", control_inputs: Sequence[str] = ()) -> str:
        """Stage a Const with ``value`` (array-like; ``dtype`` converts it) and return its name."""
        proto = v1.make_tensor_proto(value, dtype=dtype)
        return self.add("Const", name, device=device, control_inputs=control_inputs, attrs={"dtype": proto.dtype, "value": proto})

    def _signature(self, op_type: str, name: str) -> OpSignature:
        if op_type not in self._signatures:
            try:
                self._signatures[op_type] = OpSignature(op_def(self.graph, op_type))
            except LookupError as error:
                raise GraphEditError(f"node {name!r}: {error.args[0]}") from error
        return self._signatures[op_type]
