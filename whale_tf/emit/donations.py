"""What a forward function leaves to the functions of its backward pass, in an array of the clone (``whale_tf.passes.donate``).

::

    graph       array = TensorArray()                      one for each clone and type
    forward     whale_t0_forward(x, w, array)              { ...; flow = write(array, 0, relu) }      -> ..., flow
    backward    whale_t0_backward(dy, w, array, flow)      { relu = read(array, 0, flow); ... }       -> ...

Reading clears the array's slot, so that only the ops of the backward function hold the tensor.  The array belongs to one run of
the step: whatever is left when the run ends or fails goes with it.
"""

from __future__ import annotations

from typing import Callable, Dict, Hashable, List, Tuple

import numpy as np

from whale_tf._tf_compat import tf
from whale_tf.emit.context import Clone, Context
from whale_tf.graph_editor.function_copy import FunctionCopy
from whale_tf.graph_editor.nodes import Nodes
from whale_tf.program import FORWARD, Body

AddArgument = Callable[[Hashable, tf.DType, Callable[[Clone], str]], str]  # (key, type, tensor of a clone) -> name in a function


class Donations:
    """The arrays, and the ops of functions that write and read them.

    Args:
        nodes: stages the arrays.
    """

    def __init__(self, context: Context, nodes: Nodes) -> None:
        self._context = context
        self._nodes = nodes
        self._donors: Dict[str, Body] = {}  # function of a backward pass -> the body that donates to it
        self._members: Dict[str, Dict[str, List[Tuple[int, str]]]] = {}  # forward body -> type -> (tensor, function) by slot
        self._arrays: Dict[Tuple[str, str, Clone], str] = {}
        program = context.program
        for body in program.bodies:
            donor = program.body(body.task_graph, FORWARD) if body.donated else None
            if donor is None:
                continue
            members_of = self._members.setdefault(donor.name, {})
            for function in program.functions(body):
                self._donors[function.name] = donor
                for tensor, _ in function.donated:
                    members_of.setdefault(context.dtype(tensor).name, []).append((tensor, function.name))
        for members_of in self._members.values():
            for members in members_of.values():
                members.sort()  # in the order in which they are made

    def write(self, body: Body, copy: FunctionCopy, add: AddArgument, value: Callable[[int], str]) -> List[str]:
        """Adds the ops by which a forward function donates.

        Args:
            value: tensor -> its name in the function.

        Returns:
            A tensor for each array, which exists when everything is written.  The function returns them after its results.
        """
        flows = []
        for dtype, members in self._members.get(body.name, {}).items():
            array = self._argument(body, dtype, add)
            flow = copy.const(np.float32(0), f"whale/donated/{dtype}")
            for slot, (tensor, _) in enumerate(members):
                index = copy.const(np.int32(slot), f"whale/donated/{dtype}/{slot}/index")
                flow = copy.add("TensorArrayWriteV3", f"whale/donated/{dtype}/{slot}", [array, index, value(tensor), flow],
                                attrs={"T": tf.as_dtype(dtype)})
            flows.append(flow)
        return flows

    def read(self, function: Body, copy: FunctionCopy, add: AddArgument) -> Dict[int, str]:
        """Adds the ops by which a function takes what is donated to it.

        Returns:
            Tensor -> its name in the function.
        """
        found: Dict[int, str] = {}
        donor = self._donors.get(function.name)
        if donor is None:
            return found
        for number, (dtype, members) in enumerate(self._members[donor.name].items()):
            own = [(slot, tensor) for slot, (tensor, reader) in enumerate(members) if reader == function.name]
            if not own:
                continue
            array = self._argument(donor, dtype, add)
            written = add(("donated", dtype), tf.float32, self._flow(donor, number))
            for slot, tensor in own:
                index = copy.const(np.int32(slot), f"whale/donated/{dtype}/{slot}/index")
                found[tensor] = copy.add("TensorArrayReadV3", f"whale/donated/{dtype}/{slot}", [array, index, written],
                                         attrs={"dtype": tf.as_dtype(dtype)})
        return found

    def _flow(self, donor: Body, number: int) -> Callable[[Clone], str]:
        """What the forward call of a clone returns when an array is written."""
        return lambda clone: f"{self._context.scope(clone)}/{donor.name}:{len(donor.outputs) + number}"

    def _argument(self, donor: Body, dtype: str, add: AddArgument) -> str:
        """The array as an argument of a function."""
        return add(("array", dtype), tf.resource, lambda clone: self._array(donor, dtype, clone))

    def _array(self, donor: Body, dtype: str, clone: Clone) -> str:
        key = donor.name, dtype, clone
        if key not in self._arrays:
            context = self._context
            scope, device = f"{context.scope(clone)}/{donor.name}/donated_{dtype}", context.device(donor.task_graph, clone)
            size = self._nodes.const(len(self._members[donor.name][dtype]), f"{scope}/size", tf.int32, device)
            self._arrays[key] = self._nodes.add("TensorArrayV3", scope, [size], device, dtype=tf.as_dtype(dtype))
        return self._arrays[key]
