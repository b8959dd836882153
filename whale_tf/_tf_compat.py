"""The one place that asks which TensorFlow this is.

Everything else imports ``tf`` and ``v1`` from here, so that a missing TensorFlow gives one clear message.  For differences
between releases there are functions here.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import re
import warnings
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from whale_tf.errors import UnsupportedTensorFlowError

try:
    import tensorflow as tf
except ImportError as error:
    if error.name != "tensorflow":
        raise  # it is there, and says what it lacks
    raise ImportError(
        "whale_tf rewrites TensorFlow graphs, but no TensorFlow was found. Install the build that fits the machine "
        "(tensorflow, tensorflow-cpu or tensorflow-gpu; 1.15 or 2.x), or run: pip install 'whale_tf[tf]'") from error

SUPPORTED = "1.15 and 2.4 to 2.21"
OLDEST_2, NEWEST = (2, 4), (2, 21)


def check_version() -> None:
    """Warns if TensorFlow is newer than the releases with which whale_tf was tested.

    Raises:
        UnsupportedTensorFlowError: it is older than the supported ones, or between them.
    """
    text = getattr(tf, "__version__", "of no version")
    match = re.match(r"(\d+)\.(\d+)", text)
    version = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if version < (1, 15) or (2, 0) <= version < OLDEST_2:
        raise UnsupportedTensorFlowError(
            f"TensorFlow {text} is installed, but whale_tf supports {SUPPORTED}; install one of these, e.g. "
            "pip install 'tensorflow>=2.4,<2.22'")
    if version > NEWEST:
        warnings.warn(f"TensorFlow {text} is newer than the releases with which whale_tf was tested ({SUPPORTED})")


def lacking(names: Iterable[str]) -> UnsupportedTensorFlowError:
    """The error for a TensorFlow that lacks undocumented names which whale_tf needs."""
    return UnsupportedTensorFlowError(
        f"TensorFlow {tf.__version__} does not have {', '.join(names)}, which whale_tf needs; it was tested with "
        f"{SUPPORTED}: install one of these, e.g. pip install 'tensorflow>=2.4,<2.22'")


def _undocumented(*places: str) -> List[Any]:
    """Objects (``module:name``) and modules below ``tensorflow.python``.

    Raises:
        UnsupportedTensorFlowError: this TensorFlow lacks some of them.
    """
    found, missing = [], []
    for place in places:
        module, _, name = place.partition(":")
        try:
            item = importlib.import_module("tensorflow.python." + module)
            found.append(getattr(item, name) if name else item)
        except (ImportError, AttributeError):
            missing.append("tensorflow.python." + place.replace(":", "."))
    if missing:
        raise lacking(missing)
    return found


def _check_methods() -> None:
    """Checks the methods that edits of graphs call.

    Raises:
        UnsupportedTensorFlowError: this TensorFlow lacks some of them.
    """
    needed = {tf.Graph: ("_attr_scope", "_unsafe_unfinalize"),
              tf.Operation: ("_add_control_inputs", "_clear_attr", "_control_outputs", "_get_control_flow_context",
                             "_remove_all_control_inputs", "_set_attr", "_set_control_flow_context", "_set_device",
                             "_update_input")}
    missing = [f"tf.{owner.__name__}.{name}" for owner, names in needed.items() for name in names if not hasattr(owner, name)]
    if missing:
        raise lacking(missing)


check_version()
_check_methods()
(BaseSession, FetchMapper, DatasetV1, DatasetV1Adapter, DatasetIterator, EventFileWriter, gradients_util, imperative_grad,
 _framework_ops, eager_outside_functions, _control_flow_graphs, eager_context, eager_mode, _kernels,
 ResourceVariable) = _undocumented(
    "client.session:BaseSession", "client.session:_FetchMapper", "data.ops.dataset_ops:DatasetV1",
    "data.ops.dataset_ops:DatasetV1Adapter", "data.ops.iterator_ops:Iterator",
    "summary.writer.event_file_writer:EventFileWriter", "ops.gradients_util", "eager.imperative_grad", "framework.ops",
    "framework.ops:executing_eagerly_outside_functions", "ops.control_flow_v2_func_graphs",
    "eager.context:context", "eager.context:eager_mode", "framework.kernels", "ops.resource_variable_ops:BaseResourceVariable")

# Names of protos for annotations: type checkers see all of TensorFlow as Any.
AttrValue = Any
FunctionDef = Any
GraphDef = Any
NodeDef = Any
OpDef = Any

v1 = tf.compat.v1

# Graphs of branches and loops inside functions, if TensorFlow has a class for them (2.x).
ControlFlowGraph: Any = getattr(_control_flow_graphs, "ControlFlowFuncGraph", ())


class FunctionTracing(NamedTuple):
    """The modules, classes and functions with which TensorFlow 2 traces tf.functions and differentiates them.

    Attributes:
        function: the class of the objects that ``tf.function`` returns.
        concrete: the class of traced functions, which run in ``_call_flat``.
        make: name of the method of ``concrete`` that gets each traced graph, and its attributes, before anything is made from it.
        graph: the class of the traced graphs.
        compilation: ``_create_concrete_function`` traces a function for a type of arguments; None before 2.15.
        loops: AutoGraph turns a loop over a dataset in a function into ``_general_purpose_scan``; None before 2.15.
        execute: ``record_gradient`` is called for each op that a tape sees.
        backprop: ``_gradient_function`` differentiates an op that a tape saw.
        register: tells TensorFlow's C++ half what to call instead of that function.
        record: gives an op to the tapes: op type, inputs, attributes, outputs, name of the scope in which it was made.
    """

    function: Any
    concrete: Any
    make: str
    graph: Any
    compilation: Any
    loops: Any
    execute: Any
    backprop: Any
    register: Callable[[Callable[..., Any]], Any]
    record: Callable[..., None]


@functools.lru_cache(maxsize=None)
def function_tracing() -> Optional[FunctionTracing]:
    """Where traced functions can be rewritten; None: this TensorFlow has no such place (1.15)."""
    if tf.__version__.startswith("1."):
        return None
    functions = _first("eager.polymorphic_function.polymorphic_function:Function", "eager.def_function:Function")
    concrete = _first(*(f"eager.{module}:ConcreteFunction" for module in (
        "polymorphic_function.concrete_function", "polymorphic_function.monomorphic_function", "function")))
    try:
        execute, backprop = [importlib.import_module("tensorflow.python.eager." + name) for name in ("execute", "backprop")]
        from tensorflow.python import pywrap_tfe
        from tensorflow.python.framework.func_graph import FuncGraph

        hooked = (functions.__call__, concrete.__init__, concrete._call_flat, FuncGraph.capture, execute.record_gradient,
                  backprop._gradient_function)
        register, record = pywrap_tfe.TFE_Py_RegisterGradientFunction, pywrap_tfe.TFE_Py_RecordGradient
    except (ImportError, AttributeError):
        return None
    make = "from_func_graph" if hasattr(concrete, "from_func_graph") else "__init__"  # moved in 2.14
    compilation = _module("eager.polymorphic_function.tracing_compilation", "_create_concrete_function")
    loops = _module("data.ops.dataset_autograph", "_general_purpose_scan") if compilation is not None else None
    found = FunctionTracing(functions, concrete, make, FuncGraph, compilation, loops, execute, backprop, register, record)
    return found if all(hooked) else None


def _module(name: str, attribute: str) -> Any:
    """A module of TensorFlow, if it exists and has the attribute; else None."""
    try:
        module = importlib.import_module("tensorflow.python." + name)
    except ImportError:
        return None
    return module if hasattr(module, attribute) else None


def _first(*places: str) -> Any:
    """The first object that this TensorFlow has."""
    for place in places:
        with contextlib.suppress(UnsupportedTensorFlowError):
            return _undocumented(place)[0]
    return None


class Estimators(NamedTuple):
    """The classes of ``tf.estimator``.

    Attributes:
        run_config: where the script runs, which it reads from TF_CONFIG.
        estimator: the base class of all estimators.
        executor: runs ``train_and_evaluate``.
        listener: evaluates whenever training has saved a checkpoint.
    """

    run_config: Any
    estimator: Any
    executor: Any
    listener: Any


def estimators() -> Optional[Estimators]:
    """The classes of ``tf.estimator`` in TensorFlow 1; None: another TensorFlow, or none that is known."""
    if not tf.__version__.startswith("1."):
        return None
    try:
        from tensorflow_estimator.python.estimator import estimator, run_config, training

        return Estimators(run_config.RunConfig, estimator.Estimator, training._TrainingExecutor,
                          training._NewCheckpointListenerForEvaluate)
    except (ImportError, AttributeError):
        return None


def traced_graphs(function: Any) -> List[Any]:
    """Graphs of a tf.function's traces so far."""
    parts = [function] + [getattr(function, name, None) for name in ("_stateful_fn", "_stateless_fn", "_variable_creation_fn",
                                                                     "_no_variable_creation_fn")]
    caches = [getattr(part, "_function_cache", None) for part in parts]
    return [concrete.graph for cache in caches if cache is not None
            for concrete in (cache.all_values() if hasattr(cache, "all_values") else cache.values())]


def release(graph: Any, outer: Any) -> None:
    """Makes a function's graph no longer capture a tensor of outside."""
    captures: Any = getattr(graph, "function_captures", None)
    if hasattr(captures, "pop"):  # TensorFlow 2.13 and later
        captures.pop(id(outer))
    else:
        graph.reset_captures([pair for pair in graph.captures if pair[0] is not outer])


def is_unlifted(variable: Any) -> bool:
    """Whether a variable was made in a tf.function."""
    kind = _first("eager.polymorphic_function.polymorphic_function:UnliftedInitializerVariable",
                  "eager.def_function:UnliftedInitializerVariable")
    return kind is not None and isinstance(variable, kind)


def variable_value(handle: tf.Tensor) -> Optional[Tuple[tf.TensorShape, tf.DType]]:
    """Shape and type of the variable that a resource handle in a graph stands for; None: it stands for something else."""
    from tensorflow.python.ops import handle_data_util

    data = handle_data_util.get_resource_handle_data(handle)
    if not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.TensorShape(data.shape_and_type[0].shape), tf.as_dtype(data.shape_and_type[0].dtype)


def make_logical_cpus(count: int) -> Callable[[], None]:
    """Gives eager execution and tf.functions ``count`` logical CPU devices.  This is possible until TensorFlow 2 executes its
    first op; after that there is a warning.  If there are as many already, nothing happens.

    Returns:
        A function that undoes this, if it is still possible.
    """
    cpus = tf.config.list_physical_devices("CPU")
    before = len(tf.config.get_logical_device_configuration(cpus[0]) or [None]) if cpus else count

    def configure(number: int) -> None:
        if before < count:
            with contextlib.suppress(RuntimeError):
                tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * number)

    configure(count)
    now = len(tf.config.get_logical_device_configuration(cpus[0]) or [None]) if cpus else count
    if now < count:
        warnings.warn(
            f"the cluster has {count} CPU devices, but TensorFlow has already begun with {now} and can make no more: tf.function "
            "and Keras cannot train on this cluster in this process. Restart it (in Jupyter, the kernel), and call wh.init() "
            "before TensorFlow runs its first op, makes its first variable or lists its devices. Sessions have the devices",
            stacklevel=3)
    return lambda: configure(before)


def divides_gpus(config: Any) -> bool:
    """Whether a ConfigProto makes several logical devices of a GPU."""
    return any(len(gpu.memory_limit_mb) > 1 for gpu in config.gpu_options.experimental.virtual_devices)


def serve_eagerly(addresses: Sequence[str], job: str, rank: int, leader: str) -> bool:
    """Makes TensorFlow 2 start this process's server with its first op, so that collectives in tf.functions reach the other
    processes (``tf.distribute`` does the same for its workers).

    Args:
        addresses: ``host:port`` of every process.
        leader: prefix of the devices of the process that forms the groups.

    Returns:
        False: TensorFlow has already executed its first op.
    """
    from tensorflow.core.protobuf import tensorflow_server_pb2

    context = eager_context()
    if context._context_handle is not None:
        return False
    own = f"/job:{job}/task:{rank}"
    context._collective_leader = None  # from a previous call: nothing has been started yet
    context.configure_collective_ops(leader, scoped_allocator_enabled_ops=(), device_filters=(own,))
    context.enable_collective_ops(tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({job: list(addresses)}).as_cluster_def(), job_name=job, task_index=rank, protocol="grpc",
        default_session_config=context.config))
    return True


def serves_eagerly(may_start: bool = True) -> bool:
    """Whether eager execution has started this process's server; if not, and not ``may_start``, it will not start it later."""
    context = eager_context()
    if not may_start and context._context_handle is None:
        context._collective_ops_server_def = context._collective_leader = context._collective_device_filters = None
        context._collective_scoped_allocator_enabled_ops = None
    return getattr(context, "_collective_ops_server_def", None) is not None and context._context_handle is not None


def global_seed() -> Optional[int]:
    """The last seed given to ``tf.random.set_seed``; None: there is none."""
    seed: Optional[int] = eager_context()._seed
    return seed


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Gives random ops that are made in eager execution this global seed."""
    context = eager_context()
    before = context._seed, getattr(context, "_rng", None)
    context._set_global_seed(seed)
    try:
        yield
    finally:
        context._seed, context._rng = before


def collectives_carry_float16() -> bool:
    """Whether sums over processes can be of float16: 1.15 has no such kernel on CPU."""
    return not tf.__version__.startswith("1.")


def collectives_gather_any_size() -> bool:
    """Whether a gather may have another size in each step: ``CollectiveGatherV2`` may (tested from 2.15 on)."""
    return tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 15)


def collectives_send_from_any() -> bool:
    """Whether a broadcast may come from another process than the group's leader: in 1.15 it fails with "no source for
    broadcast"."""
    return not tf.__version__.startswith("1.")


def op_def(graph: tf.Graph, op_type: str) -> OpDef:
    """The OpDef of an op type: a registered op, or a function of the graph's library called as an op.

    Raises:
      LookupError: there is none.
    """
    lookup = getattr(graph, "op_def_for_type", None) or graph._get_op_def  # renamed within the 2.x releases
    try:
        return lookup(op_type)
    except (tf.errors.OpError, RuntimeError) as error:  # 1.x and 2.x, in this order
        raise LookupError(f"no op type {op_type!r} in TensorFlow {tf.__version__}") from error


@functools.lru_cache(maxsize=None)
def has_kernel(op_type: str, device_type: str, dtype: Any = None) -> bool:
    """Whether TensorFlow has a kernel of an op type for a type of devices ("CPU", "GPU", "XLA_CPU_JIT").  ``dtype`` is the value
    of the op's type attribute ``T`` or ``Tparams``, if it has one."""
    number = None if dtype is None else dtype.as_datatype_enum
    return any(
        kernel.device_type in (device_type, "DEFAULT") and all(
            number is None or limit.name not in ("T", "Tparams") or number in limit.allowed_values.list.type
            for limit in kernel.constraint)
        for kernel in _kernels.get_registered_kernels_for_op(op_type).kernel)


def function_graph(definition: FunctionDef, shapes: Sequence[Any], with_library: bool = False) -> Any:
    """The graph of a function of the current graph's library.

    Args:
        shapes: of its arguments.
        with_library: the graph also has the functions that this one calls.
    """
    also = {"include_library_functions": True} if with_library else {}
    return _undocumented("framework.function_def_to_graph")[0].function_def_to_graph(
        definition, input_shapes=list(shapes), **also)


def flat_function(graph: Any, name: str) -> Optional[Callable[..., Sequence[Any]]]:
    """A function of flat arguments, and of what is captured, that computes what a function's graph computes now. It is never
    inlined. None: before TensorFlow 2.15 there are none.

    Args:
        name: the beginning of its name.
    """
    tracing = function_tracing()
    if tracing is None or tracing.compilation is None:
        return None
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    atomic = _undocumented("eager.polymorphic_function.atomic_function")[0]
    made = atomic.from_func_graph(f"{name}_{_framework_ops.uid()}", graph, {"_noinline": AttrValue(b=True)})
    call: Callable[..., Sequence[Any]] = made.call_flat
    return call


def packed_results(function: Any, flat: Sequence[Any]) -> Any:
    """What a concrete function returns if these are its flat results; since TensorFlow 2.15."""
    return function.function_type.pack_output(list(flat))


def add_function(body: Any, graph: Any) -> str:
    """Adds a function with the inputs and outputs of graph ``body`` to the library of ``graph``; returns its name, a new one."""
    body.name, body.outer_graph = f"{body.name}_divided_{_framework_ops.uid()}", graph
    name: str = _undocumented("ops.control_flow_util_v2")[0].create_new_tf_function(body)
    return name


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Makes a resource handle stand for a variable of the shape and type of another handle's."""
    from tensorflow.python.ops import handle_data_util

    handle_data_util.copy_handle_data(source, target)


def profiled_space(path: str) -> Any:
    """A file of TensorFlow's profiler, as an XSpace."""
    for place in ("tensorflow.tsl.profiler.protobuf.xplane_pb2", "tsl.profiler.protobuf.xplane_pb2",
                  "tensorflow.core.profiler.protobuf.xplane_pb2"):  # moved twice within 2.x
        with contextlib.suppress(ImportError):
            space = importlib.import_module(place).XSpace()
            with open(path, "rb") as handle:
                space.ParseFromString(handle.read())
            return space
    raise lacking(["tensorflow.tsl.profiler.protobuf.xplane_pb2"])


def registered_kernels() -> Any:
    """All KernelDefs of TensorFlow's registry."""
    return _kernels.get_all_registered_kernels().kernel


def has_xla(device_type: str) -> bool:
    """Whether XLA compiles a function that a PartitionedCall calls on devices of a type.  If so, XLA's kernels are registered,
    and :func:`has_kernel` knows them."""
    if tf.__version__.startswith("1."):
        return False  # seen on 1.15.5: the call runs op by op, whatever its attributes say
    try:
        _undocumented("util.pywrap_xla_ops")[0].get_cpu_kernel_names()
    except UnsupportedTensorFlowError:
        return False
    has_kernel.cache_clear()
    return has_kernel("MatMul", f"XLA_{device_type}_JIT")


def sharded_by_file(dataset: Any, count: tf.Tensor, index: tf.Tensor) -> Any:
    """A tf.data pipeline that reads only every ``count``-th of its files, starting with the ``index``-th.  This is tf.data's own
    rewrite, which finds the reader and divides its input."""
    from tensorflow.python.data.experimental.ops.distribute import _AutoShardDataset

    if not tf.__version__.startswith("1."):  # 1.15 knows no other policy
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
        dataset = dataset.with_options(options)
    return _AutoShardDataset(dataset, count, index)


def relaxed_type(function_type: Any) -> Any:
    """The type of a tf.function's arguments with the batch size left open: the first dimension of tensors (also in tuples, lists
    and dicts) if it has the most common size."""
    from tensorflow.core.function.trace_type import default_types

    sizes = [spec.shape[0] for spec in function_type.flat_inputs if isinstance(spec, tf.TensorSpec) and spec.shape.rank]
    if not sizes or None in sizes:
        return function_type
    batch = max(sizes, key=sizes.count)  # the first of the most common ones

    def relaxed(item: Any) -> Any:
        if type(item) is tf.TensorSpec and item.shape.rank and item.shape[0] == batch:
            return tf.TensorSpec([None, *item.shape[1:]], item.dtype, item.name)
        if type(item) is default_types.Tuple:
            return default_types.Tuple(*map(relaxed, item.components))
        if type(item) is default_types.List:
            return default_types.List(*map(relaxed, item.components_tuple.components))
        if type(item) is default_types.Dict:
            return default_types.Dict({key: relaxed(value) for key, value in item.mapping.items()}, item._placeholder_type)
        return item

    parameters = [type(each)(each.name, each.kind, each.optional, relaxed(each.type_constraint))
                  for each in function_type.parameters.values()]
    return type(function_type)(parameters, function_type.captures, return_annotation=function_type.output)


def renew(session: Any) -> None:
    """Lets a Session continue with another one of TensorFlow's own, which knows the graph as it is now and has no state."""
    other = tf.compat.v1.Session(session._target, session.graph, session._config)
    session._session, other._session = other._session, session._session
    other.close()


def static_dims(tensor: tf.Tensor) -> Optional[Sequence[Optional[int]]]:
    """The static shape; None: the rank is unknown.  If TensorFlow has the sizes without a TensorShape around them (2.x), they are
    taken directly, because large graphs have many tensors."""
    if isinstance(tensor, _PLAIN_TENSORS):
        dims, is_unknown = tensor._shape
        return None if is_unknown else dims
    shape = tensor.shape
    return None if shape.rank is None else shape.as_list()


_PLAIN_TENSORS: Any = getattr(_framework_ops, "SymbolicTensor", ())


@contextlib.contextmanager
def imported_as_written(graph: tf.Graph, graph_def: GraphDef) -> Iterator[None]:
    """Makes imports of ``graph_def`` into the graph take each node as it is.

    ``tf.import_graph_def`` goes through all nodes in Python before the import to write attributes' defaults into the caller's
    GraphDef, and through all new ops after it to apply what scopes ask for (devices, colocations, control dependencies,
    control-flow contexts).  This takes two thirds of its time.  The import knows the defaults, and no scope is open.  A
    TensorFlow whose importer is built differently still does so here.
    """
    try:
        from tensorflow.python.framework import c_api_util, importer

        process, complete = importer._ProcessNewOps, importer._ProcessGraphDefParam
        new_operations = graph.new_operations if hasattr(graph, "new_operations") else functools.partial(
            c_api_util.new_tf_operations, graph)  # moved within the 2.x releases
        create = graph._create_op_from_tf_operation
    except (ImportError, AttributeError):
        yield
        return

    def process_new_ops(target: tf.Graph) -> None:
        if target is not graph:
            process(target)
            return
        for operation in new_operations():
            create(operation, compute_device=False)

    def without_defaults(given: GraphDef, *rest: Any) -> GraphDef:
        return given if given is graph_def else complete(given, *rest)

    importer._ProcessNewOps, importer._ProcessGraphDefParam = process_new_ops, without_defaults
    graph._create_op_helper = lambda op, compute_device=True: None  # which applies other scopes (attributes, gradients)
    try:
        yield
    finally:
        del graph._create_op_helper
        importer._ProcessNewOps, importer._ProcessGraphDefParam = process, complete
