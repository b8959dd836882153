"""``keras.distribution``: what Keras' mesh and layouts ask for becomes the strategy and the layouts of a training function.

Keras' own backend for TensorFlow ignores distributions.  Here a mesh becomes a default strategy, and layouts become attributes::

    DataParallel(8 devices)                          wh.replicate()
    ModelParallel(mesh ("batch", "model") of 2 x 4)  wh.split(4) on 8 devices: two model replicas
    layout_map["dense/kernel"] = (None, "model")     the variable is stored in parts along dimension 1
    layout_map["dense/kernel"] = ("model", "batch")  the variable is stored in tiles, by both model replicas
    layout_map["dense/output"] = ("batch", "model")  the activation is computed in parts along dimension 1

A variable has the layout that the distribution gives it when it is made, as under JAX, and a function is divided as the
distribution of its variables says.  Keras' variables are found when a function has been traced, like those of
:func:`whale_tf.capture.handles.note_variables`.
"""
from __future__ import annotations

import sys
import weakref
from typing import Any, Dict, Iterator, List, Mapping, MutableMapping, MutableSet, NamedTuple, Optional, Sequence, Tuple, Union

from whale_tf._tf_compat import tf, v1
from whale_tf.capture.annotations import GradientCall, annotations_of, set_default_strategy
from whale_tf.capture.callbacks import Callbacks, Function, Place
from whale_tf.capture.fitting import is_reading_aside
from whale_tf.capture.handles import inside, note_variables, own_handle
from whale_tf.capture.tapes import is_body
from whale_tf.errors import AnnotationError, ClusterError, PlanError, UnsupportedOpError
from whale_tf.garbage import instances
from whale_tf.ir.graph import LAYOUT_ATTR, LAYOUT_OF_ATTR, NOT_DIVIDED
from whale_tf.ir.traits import traits
from whale_tf.patterns.spread import Spread, tiles

_LIBRARY = "keras.src.distribution.distribution_lib"
_BACKEND = "keras.src.backend.tensorflow"


class _Kind(NamedTuple):
    """What a distribution makes of its mesh: the name of its class, whether it is DataParallel, and its batch axis."""

    name: str
    is_data_parallel: bool
    batch: Optional[str]

    @classmethod
    def of(cls, distribution: Any) -> _Kind:
        is_data_parallel = isinstance(distribution, sys.modules[_LIBRARY].DataParallel)
        return cls(type(distribution).__name__, is_data_parallel, distribution.batch_dim_name)


_made_under: MutableMapping[Any, _Kind] = weakref.WeakKeyDictionary()  # mesh -> distribution under which variables were made
_OWNER = "_whale_keras"  # attribute of a tf.Variable: a weak reference to the Keras variable that holds it
_optimizers: MutableSet[Any] = weakref.WeakSet()  # Keras' optimizers that have been found


class _Mesh(NamedTuple):
    """The mesh of a distribution.

    Attributes:
        sizes: axis -> number of devices along it.
        batch: the axis that divides examples.
        model: the axes that divide variables and have more than one device.
        devices: names, model replica by model replica.
    """

    sizes: Dict[str, int]
    batch: str
    model: Tuple[str, ...]
    devices: Tuple[str, ...]

    def __str__(self) -> str:
        return "DeviceMesh({}, {})".format(tuple(self.sizes.values()), tuple(self.sizes))

    @property
    def places(self) -> int:
        """Number of devices of a model replica."""
        return len(self.devices) // self.sizes[self.batch]

    def axes(self, layout: Any, shape: Sequence[Optional[int]], what: str) -> Dict[int, str]:
        """Dimension of a tensor -> the axis of several devices over which a layout divides it.

        Args:
            what: the tensor in words, with its layout.

        Raises:
            UnsupportedOpError: the layout cannot be kept.
        """
        axes = getattr(layout, "axes", None)
        if axes is None:
            raise UnsupportedOpError(f"{what} is not a keras.distribution.TensorLayout; give the layout as one, or as a tuple of "
                                     "axis names")
        if len(axes) > len(shape):
            raise UnsupportedOpError(f"{what} has {len(axes)} axes, but the tensor has {len(shape)} dimensions; give one axis, "
                                     "or None, for each dimension")
        found: Dict[int, str] = {}
        for dim, axis in enumerate(axes):
            if axis is None:
                continue
            if axis not in self.sizes:
                raise UnsupportedOpError(f"{what} names axis {axis!r}, but the mesh has {', '.join(map(repr, self.sizes))}")
            if axis in found.values():
                raise UnsupportedOpError(f"{what} names axis {axis!r} twice; an axis divides one dimension")
            size, count = shape[dim], self.sizes[axis]
            if count > 1:
                found[dim] = axis
            if size is not None and size < count:
                raise UnsupportedOpError(f"{what} divides dimension {dim}, which has {size} elements, over the {count} devices "
                                         f"of axis {axis!r}; divide a larger dimension, or none")
        return found

    def stored(self, axes: Mapping[int, str], shape: Sequence[int]) -> Union[int, Spread]:
        """How a variable is stored that is divided along these axes (:data:`whale_tf.ir.graph.LAYOUT_ATTR`)."""
        if not axes:
            return NOT_DIVIDED
        return next(iter(axes)) if tuple(axes.values()) == self.model and len(axes) == 1 else self._tiles(axes, shape)

    def _tiles(self, axes: Mapping[int, str], shape: Sequence[int]) -> Spread:
        def place(position: Dict[int, int]) -> Tuple[int, int]:
            along, device = {axis: position[dim] for dim, axis in axes.items()}, 0
            for axis in self.model:
                device = device * self.sizes[axis] + along.get(axis, 0)
            return device, along.get(self.batch, 0)
        return tiles(shape, {dim: self.sizes[axis] for dim, axis in axes.items()}, place)


# -- hooks ------------------------------------------------------------------------------------------------------------
def places() -> Iterator[Place]:
    """(owner, attribute, wrapper) for the loaded Keras 3, if it runs on TensorFlow."""
    library, core = sys.modules.get(_LIBRARY), sys.modules.get(_BACKEND + ".core")
    if library is not None and core is not None and _is_of_tensorflow(library):
        yield library, "distribution_lib", _backend
        yield core.Variable, "_initialize", _initialize
        for kind in (library.Distribution, library.DataParallel, library.ModelParallel):
            if "distribute_dataset" in vars(kind):
                yield kind, "distribute_dataset", _distribute_dataset


def _is_of_tensorflow(library: Any) -> bool:
    backend = getattr(library, "distribution_lib", None)
    return isinstance(backend, Backend) or getattr(backend, "__name__", "") == _BACKEND + ".distribution_lib"


class Backend:
    """In place of Keras' module for TensorFlow, which has what is not here."""

    def __init__(self, original: Any, callbacks: Callbacks) -> None:
        self._original, self._callbacks = original, callbacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def list_devices(self, device_type: Optional[str] = None) -> List[str]:
        """The cluster's devices of one kind, those of all processes; by default the GPUs, if there are any."""
        names = [name.lower() for name in self._callbacks.devices()]
        kinds = [name.partition(":")[0] for name in names]
        kind = device_type.lower() if device_type else next((kind for kind in kinds if kind != "cpu"), "cpu")
        return [name for name, own in zip(names, kinds) if own == kind]

    def get_device_count(self, device_type: Optional[str] = None) -> int:
        return len(self.list_devices(device_type))

    def initialize(self, job_addresses: Optional[str], num_processes: Optional[int], process_id: Optional[int]) -> None:
        """Checks the number of processes; :func:`whale_tf.init` has found them, and starts what they need.

        Raises:
            ClusterError: it found another number of them, or another rank.
        """
        count, rank = self._callbacks.processes()
        if num_processes not in (None, count) or process_id not in (None, rank):
            raise ClusterError(
                f"keras.distribution.initialize(num_processes={num_processes}, process_id={process_id}), but wh.init() found "
                f"{count} process(es), of which this is {rank}; start the processes with whale run, or set TF_CONFIG for each "
                "before wh.init()")

    def num_processes(self) -> int:
        return self._callbacks.processes()[0]

    def process_id(self) -> int:
        return self._callbacks.processes()[1]

    def distribute_tensor(self, tensor: Any, layout: Any) -> Any:
        """Gives a tensor of a traced function a layout, which its step keeps; eager tensors stay where they are."""
        return tf.nest.map_structure(lambda part: _with_layout(part, layout), tensor)


def _backend(original: Any, callbacks: Callbacks) -> Any:
    return Backend(original, callbacks)


def _initialize(original: Function, callbacks: Callbacks) -> Function:
    """Gives a variable the layout that the current distribution has for it, as the JAX backend does."""

    def initialize(self: Any, value: Any) -> None:
        original(self, value)
        distribution = _current()
        if distribution is not None and getattr(self, "_layout", None) is None:
            if self._shape is None:
                self._shape = self._validate_shape(self._value.shape)
            self._layout = distribution.get_variable_layout(self)
        mesh = getattr(getattr(self, "_layout", None), "device_mesh", None)
        if distribution is not None and mesh is not None:
            _made_under.setdefault(mesh, _Kind.of(distribution))
    return initialize


def _distribute_dataset(original: Function, callbacks: Callbacks) -> Function:
    """Gives a process its part of each mini-batch on which it trains, as under JAX, unless all processes run parts of one step,
    which divides a mini-batch itself.  Evaluation is whole in every process."""

    def distribute_dataset(self: Any, dataset: Any) -> Any:
        if is_reading_aside() or _is_one_step(self, len(callbacks.devices()), callbacks.processes()[0]):
            return dataset
        found = original(self, dataset)
        if found is not dataset and isinstance(dataset, tf.data.Dataset) and int(dataset.cardinality()) > 0:
            # Keras' pipeline does not say how many there are, and its loop then tries one step too many
            found = found.apply(tf.data.experimental.assert_cardinality(int(dataset.cardinality())))
        return found
    return distribute_dataset


def _is_one_step(distribution: Any, devices: int, processes: int) -> bool:
    """Whether all processes run parts of one step: a model replica has devices of several, or several keep parts of a variable.

    Args:
        devices: of all processes.
    """
    mesh = _mesh_of(distribution.device_mesh, _Kind.of(distribution))
    over_batch = any(mesh.batch in layout.axes for layout in getattr(distribution, "_layout_map", {}).values())
    return processes > 1 and (mesh.places * processes > devices or (over_batch and bool(mesh.model)))


def is_set() -> bool:
    """Whether there is a distribution now, which says what part of a dataset a process reads."""
    return _current() is not None


def _current() -> Any:
    """The distribution that is set; None: there is none."""
    library = sys.modules.get(_LIBRARY)
    return library.distribution() if library is not None and _is_of_tensorflow(library) else None


def _with_layout(tensor: Any, layout: Any) -> Any:
    graph = getattr(tensor, "graph", None) if isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy") else None
    if graph is None:
        return tensor
    what = f"layout {getattr(layout, 'axes', layout)} of tensor {tensor.name!r}"
    if is_body(graph):
        raise UnsupportedOpError(f"{what} is given inside the loop, condition or inner function {graph.name!r}, which is not "
                                 "divided; give it to the result of the whole loop")
    distribution, mesh = _current(), getattr(layout, "device_mesh", None)
    if distribution is not None:
        found = _mesh_of(distribution.device_mesh, _Kind.of(distribution))
    elif mesh is not None and mesh in _made_under:
        found = _mesh_of(mesh, _made_under[mesh])
    else:
        raise UnsupportedOpError(f"{what} cannot be kept, because no distribution is set; call "
                                 "keras.distribution.set_distribution() before the model is built")
    if tensor.shape.rank is None:
        raise UnsupportedOpError(f"{what} cannot be kept, because the rank of the tensor is not known")
    shape = [None, *tensor.shape.as_list()[1:]] if tensor.shape.rank else []  # the first dimension may be examples
    axes = found.axes(layout, shape, what)
    wrong = [dim for dim, axis in axes.items() if axis == found.batch and dim > 0]
    if wrong:
        raise UnsupportedOpError(f"{what} divides dimension {wrong[0]} over the batch axis {found.batch!r}, which divides "
                                 "examples, the first dimension; leave it out")
    if not found.model:
        return tensor
    dims = [dim for dim, axis in axes.items() if axis != found.batch]
    # of several dimensions, the one that all devices of a model replica divide best
    dim = max(dims, key=lambda one: shape[one] or 0) if dims else NOT_DIVIDED
    with graph._attr_scope({LAYOUT_ATTR: v1.AttrValue(i=dim), LAYOUT_OF_ATTR: v1.AttrValue(s=what.encode())}):
        return tf.identity(tensor, name="layout")


# -- functions --------------------------------------------------------------------------------------------------------
def enter(graph: tf.Graph, devices: Sequence[str], processes: int, has_zero: bool, alone: bool = False) -> bool:
    """Gives a training function the strategy and the layouts of its variables' distribution, or of the current one.

    Returns:
        Whether layouts say which model replica keeps a part of a variable.

    Args:
        devices: the cluster's, such as ``CPU:0``.
        processes: number of processes.
        has_zero: whether ZeRO keeps each variable on one of the model replicas.
        alone: whether the first model replica computes for all, so that a mini-batch need not divide over them.

    Raises:
        AnnotationError: the function also has annotations.
        PlanError, UnsupportedOpError: the mesh or a layout cannot be kept.
    """
    current = _current()
    if current is None and not len(_made_under):
        return False
    variables = _variables_of(graph)
    mesh = _mesh_in_use(variables, current)
    if mesh is None:
        return False
    annotations = annotations_of(graph)
    if annotations.items:
        raise AnnotationError(
            f"tf.function {graph.name!r} has annotations ({annotations.items[0].name!r}) beside a keras.distribution with "
            f"{mesh}; use one of the two to say how it is divided")
    _check_mesh(mesh, [name.lower() for name in devices])
    for placeholder, variable in variables.items():
        layout = variable._layout
        if layout is None and current is not None:
            layout = current.get_variable_layout(variable)
        if layout is None:
            continue
        what = f"layout {getattr(layout, 'axes', layout)} of variable {variable.path!r}"
        shape = [int(size) for size in variable.shape]
        axes = mesh.axes(layout, shape, what)
        if axes and not mesh.model and not has_zero:
            raise UnsupportedOpError(
                f"{what} divides dimension {next(iter(axes))} over axis {mesh.batch!r} of {mesh}, which divides examples, and "
                "the mesh has no other axis of several devices. ZeRO does this variable by variable: use wh.init({'zero': 'v3'}, "
                "...), or leave the axis out of the layout")
        annotations.layouts[placeholder] = mesh.stored(axes, shape), what
    if not mesh.model:
        set_default_strategy(graph, "replicate", None, "data_parallel")
        annotations.layouts.clear()
        return False
    if all(layout == NOT_DIVIDED for layout, _ in annotations.layouts.values()):
        raise PlanError(
            f"the layout map of {mesh} divides no variable of tf.function {graph.name!r}, so the {mesh.places} devices of a "
            "model replica would all do the same; give a variable a layout (keys are regular expressions of whole paths, such as "
            f"{next((variable.path for variable in variables.values()), 'dense/kernel')!r}), or use DataParallel")
    has_tiles = any(isinstance(layout, Spread) for layout, _ in annotations.layouts.values())
    one_step = processes > 1 and (has_tiles or (current is not None and _is_one_step(current, len(devices), processes)))
    set_default_strategy(graph, "split", mesh.places, "model_parallel", one_step, alone)
    return has_tiles


def divided_variables(graph: tf.Graph) -> List[str]:
    """Placeholders of the variables that a function uses, and that layouts divide over the devices of a model replica, or over
    several of these."""
    current = _current()
    if current is None and not len(_made_under):
        return []
    variables = _variables_of(graph)
    mesh = _mesh_in_use(variables, current) if variables else None
    return [] if mesh is None or not mesh.model else [
        name for name, one in variables.items()
        if any(mesh.sizes.get(axis, 1) > 1 for axis in getattr(one._layout, "axes", ()))]


def evaluate(graph: tf.Graph) -> None:
    """Says that a function which does not train is divided like a step: what it returns, and what it adds to metrics, is
    computed on the devices; what follows from such a variable afterwards is not."""
    known, after, found = annotations_of(graph), set(), {}  # type: Any, Any, Dict[str, None]
    results = {tensor.name for tensor in graph.outputs}
    for op in graph.get_operations():
        is_write = traits(op.type).is_write
        waits = not after.isdisjoint(one.name for one in op.control_inputs)
        follows = [tensor.op.name in after for tensor in op.inputs]
        if is_write or waits or any(follows):
            after.add(op.name)
        returned = [tensor for tensor in op.outputs if tensor.name in results]
        if is_write:
            found.update((tensor.name, None) for tensor, is_after in zip(op.inputs, follows)
                         if tensor.dtype.is_floating and not is_after)
        elif not any(follows):  # a result that only waits for a write, as in a loop's body, is computed beforehand
            found.update((tensor.name, None) for tensor in (op.inputs if waits else returned)
                         if returned and tensor.dtype not in (tf.resource, tf.variant))
    known.evaluates = True
    known.gradient_calls.append(GradientCall(known.calls_started, list(found), []))


def _variables_of(graph: tf.Graph) -> Dict[str, Any]:
    """Placeholder -> Keras' variable, for those that a function captured and uses, without those of optimizers: these follow."""
    note_variables(graph)
    placeholders, used = inside(graph), {}
    for value in graph.variables:
        inner = placeholders.get(id(own_handle(value)))
        if inner is not None and inner.consumers():
            used[inner.op.name] = value
    if any(_OWNER not in vars(value) for value in used.values()):
        _find_owners()
    kept = {id(one) for optimizer in _optimizers for one in vars(optimizer).get("_variables", ())}
    owners = {name: vars(used[name]).setdefault(_OWNER, _nobody)() for name in sorted(used)}
    return {name: owner for name, owner in owners.items() if owner is not None and id(owner) not in kept}


def _find_owners() -> None:
    """Lets each tf.Variable know its Keras variable.  This looks at all objects, so it is done only for new variables."""
    core = sys.modules[_BACKEND + ".core"]
    optimizers = sys.modules.get("keras.src.optimizers.base_optimizer")
    for item in instances(core.Variable, *([] if optimizers is None else [optimizers.BaseOptimizer])):
        if not isinstance(item, core.Variable):
            _optimizers.add(item)
        elif isinstance(vars(item).get("_value"), tf.Variable):
            vars(vars(item)["_value"])[_OWNER] = weakref.ref(item)


def _nobody() -> None:
    """In place of a reference to the Keras variable of a tf.Variable that has none."""


def _mesh_in_use(variables: Dict[str, Any], current: Any) -> Optional[_Mesh]:
    """The mesh on which a function's variables have layouts, else that of the current distribution; None: there is none.

    Raises:
        PlanError: there are several meshes.
    """
    meshes: Dict[str, Tuple[Any, str]] = {}
    for variable in variables.values():
        mesh = getattr(variable._layout, "device_mesh", None)
        if mesh is not None:
            meshes.setdefault(_text_of(mesh), (mesh, variable.path))
    if current is not None:
        meshes.setdefault(_text_of(current.device_mesh), (current.device_mesh, ""))
    if len(meshes) > 1:
        (one, path), (other, _) = list(meshes.values())[:2]
        raise PlanError(f"variable {path!r} has a layout on {one}, but {other} is in use, too; make the variables of a model and "
                        "train it under one distribution")
    if current is not None:
        return _mesh_of(current.device_mesh, _Kind.of(current))
    if not meshes:
        return None
    (mesh, path), = meshes.values()
    if mesh not in _made_under:
        raise PlanError(f"variable {path!r} has a layout on {mesh}, but it was made under no distribution, so the batch axis is "
                        "not known; call keras.distribution.set_distribution() before the model is built")
    return _mesh_of(mesh, _made_under[mesh])


def _text_of(mesh: Any) -> str:
    return f"{tuple(mesh.shape)} {tuple(mesh.axis_names)} {mesh.devices.tolist()}"


def _mesh_of(mesh: Any, kind: _Kind) -> _Mesh:
    """Raises:
    PlanError: the mesh has no batch axis, or DataParallel has another axis, too.
    """
    batch = kind.batch
    names, shape = list(mesh.axis_names), [int(size) for size in mesh.shape]
    sizes = dict(zip(names, shape))
    if batch is None or batch not in sizes:
        raise PlanError(f"{kind.name} has the batch axis {batch!r}, but its mesh has {', '.join(map(repr, names))}; "
                        "give batch_dim_name the name of an axis")
    model = [name for name in names if name != batch and sizes[name] > 1]
    if kind.is_data_parallel and model:
        raise PlanError(f"DataParallel divides examples over the first axis, {batch!r}, so the devices along {model[0]!r} would "
                        f"all do the same; use a mesh of one axis: DeviceMesh(({mesh.devices.size},), ('batch',))")
    place = names.index(batch)
    devices = [str(name) for row in _moved_first(mesh.devices, place) for name in row]
    return _Mesh(sizes, batch, tuple(model), tuple(devices))


def _moved_first(devices: Any, axis: int) -> Any:
    """``[model replica, place]`` device names."""
    order = (axis, *(other for other in range(devices.ndim) if other != axis))
    return devices.transpose(order).reshape(devices.shape[axis], -1)


def _check_mesh(mesh: _Mesh, devices: Sequence[str]) -> None:
    """Raises:
    PlanError: the mesh is not all of the cluster's devices in order.
    """
    asked = [name.lower() for name in mesh.devices]
    if asked == list(devices):
        return
    if sorted(asked) == sorted(devices):
        raise PlanError(
            f"the mesh puts model replicas on the devices {', '.join(asked)} in this order, but whale_tf takes them in the order "
            f"{', '.join(devices)}; name the batch axis first, and give DeviceMesh the devices in this order, or none")
    raise PlanError(f"the mesh has the devices {', '.join(asked)}, but wh.init() was given {', '.join(devices)}; give both the "
                    f"same: wh.init(cluster=\"cpu:{len(asked)}\"), or DeviceMesh without devices")
