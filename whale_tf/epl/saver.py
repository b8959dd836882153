"""``epl.runtime.saver``: initial values of variables from a checkpoint, or from a part of its tensors."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional, Sequence

from whale_tf._tf_compat import tf, v1
from whale_tf.errors import AnnotationError


class ShardingLoader:
    """Makes variables start with values of a checkpoint: ``ShardingLoader(path, ...).restore()`` before the Session.

    Args:
        ckpt_file: path prefix of the checkpoint; None: nothing is restored.
        var_list: default: all variables of the graph.
        assign_map: name of a variable -> name in the checkpoint, if they differ.
        sharding_info: name in the checkpoint -> ``{"begin": [...], "size": [...]}``, the part of it that the variable holds.

    Raises:
        AnnotationError: the checkpoint has no such tensor, or it, or the part, has another shape.
    """

    def __init__(self, ckpt_file: Optional[str], var_list: Optional[Sequence[Any]] = None,
                 assign_map: Optional[Mapping[str, str]] = None,
                 sharding_info: Optional[Mapping[str, Mapping[str, Sequence[int]]]] = None) -> None:
        self.ckpt_file, self.var_list = ckpt_file, list(var_list or v1.global_variables())
        self.assign_map, self.sharding_info = dict(assign_map or {}), dict(sharding_info or {})

    def restore(self) -> None:
        """Replaces the variables' initializers.  Each tensor is read once."""
        if self.ckpt_file is None:
            v1.logging.warning("ShardingLoader: there is no checkpoint to restore (ckpt_file is None)")
            return
        shapes = dict(tf.train.list_variables(self.ckpt_file))
        read: Dict[Any, Any] = {}
        for variable in self.var_list:
            name = self.assign_map.get(variable.op.name, variable.op.name)
            part, dtype = self.sharding_info.get(name), variable.dtype.base_dtype
            found = None if name not in shapes else list(part["size"]) if part else list(shapes[name])
            if found != variable.shape.as_list():
                raise AnnotationError(
                    f"ShardingLoader: variable {variable.op.name!r} has the shape {variable.shape.as_list()}, but {name!r} in "
                    f"{self.ckpt_file} {'is not there' if found is None else f'has {found}'}; use assign_map to name another "
                    "tensor, sharding_info to take a part, or var_list to leave it out")
            if (name, dtype) not in read:
                value = v1.raw_ops.RestoreV2(prefix=self.ckpt_file, tensor_names=[name], shape_and_slices=[""], dtypes=[dtype])[0]
                value = tf.slice(value, part["begin"], part["size"]) if part else value
                value.set_shape(variable.shape)
                read[name, dtype] = value
            variable._initializer_op = v1.assign(variable, read[name, dtype]).op
