"""A model as the simulator sees it: ops over named dimensions, for one micro-batch size.

Every op lists its dimensions (a linear layer: ``b s h o``) and which of them are the axes of each tensor that it reads or
writes.  Partitioning an op means partitioning some of its dimensions (Proteus section II).  Backward ops are not listed,
because they follow from the kind of the forward op (:data:`KINDS`).
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple, Union

from whale_tf.errors import PlanError, did_you_mean

ACTIVATION = "activation"
PARAMETER = "parameter"
INPUT = "input"


class ModelTensor(NamedTuple):
    """``dims`` names the axes (as the producer does), ``shape`` has their sizes for the whole micro-batch; ``sparse``: the
    gradient covers only the rows that were looked up, ``sparse_rows`` in number."""

    name: str
    dims: Tuple[str, ...]
    shape: Tuple[float, ...]
    itemsize: int
    role: str
    sparse_rows: Optional[int] = None

    @property
    def size(self) -> float:
        """Number of elements."""
        size = 1.0
        for extent in self.shape:
            size *= extent
        return size

    @property
    def bytes(self) -> float:
        return self.size * self.itemsize

    @property
    def touched(self) -> float:
        """The fraction of a parameter that one step touches: all of it, or the rows that were looked up."""
        if self.sparse_rows is None:
            return 1.0
        return min(1.0, self.sparse_rows / (self.size / self.shape[-1]))

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a parameter's gradient."""
        return self.bytes * self.touched


class Use(NamedTuple):
    """A tensor as an op sees it: its number, and the op's name for each of its axes."""

    tensor: int
    dims: Tuple[str, ...]


class Kind(NamedTuple):
    """The backward pass of an op kind.

    ``backward``: ``each``: one op per differentiable input, as costly as the forward; ``one``: a single op for all
    inputs; ``alias``: no op, because the output's gradient is the input's.  ``factor``: flops of a ``one`` backward relative
    to the forward.  ``saved``: what the backward reads in addition to the output's gradient.
    """

    backward: str
    saved: str = ""
    factor: float = 1.0
    compute_bound: bool = False


KINDS: Dict[str, Kind] = {
    "matmul": Kind("each", "inputs", compute_bound=True),
    "convolution": Kind("each", "inputs", compute_bound=True),
    "bias": Kind("parameters"),
    "activation": Kind("one", "inputs"),
    "erf": Kind("one", "inputs"),  # GELU by the error function
    "relu": Kind("one", "outputs"),
    "dropout": Kind("one", "mask"),
    "scale": Kind("one"),
    "softmax": Kind("one", "outputs", 2.0),
    "norm": Kind("one", "inputs", 2.0),
    "pool": Kind("one", "inputs"),
    "multiply": Kind("one", "inputs", 2.0),
    "embedding": Kind("one"),
    "concat": Kind("one"),
    "add": Kind("alias"),
    "loss": Kind("one", "inputs"),
    "layer": Kind("one", factor=2.0, compute_bound=True),  # a whole layer of a profile
    "recorded": Kind("alias", compute_bound=True),  # an op of a captured graph, which also contains its backward ops
    "wire": Kind("alias"),  # the same tensor with another size: no task, no memory
}


class ModelOp(NamedTuple):
    """One forward op.

    Attributes:
        path: node names of the strategy tree down to this op; the last is the op's own.
        kind: a key of :data:`KINDS`.
        dims: size of each dimension.
        whole: dimensions that cannot be partitioned (the normalised axis of a softmax, the image axes of a convolution).
        flops: of the whole op's forward.
        split: the dimension that tensor parallelism partitions by default, or None.
        scratch_bytes: extra bytes that the forward writes and the backward reads (dropout masks, pooling indices).
    """

    path: Tuple[str, ...]
    kind: str
    dims: Dict[str, float]
    inputs: Tuple[Use, ...]
    outputs: Tuple[Use, ...]
    flops: float
    whole: Tuple[str, ...] = ()
    split: Optional[str] = None
    scratch_bytes: float = 0

    @property
    def name(self) -> str:
        return "/".join(self.path)


class ModelGraph(NamedTuple):
    """A model at one micro-batch size.

    Attributes:
        batch: examples in a micro-batch (the size of dimension ``b``).
        precision: the precision of arithmetic (a key of a device's ``peak_flops_per_s``).
        optimizer: says what an update keeps and moves.
    """

    name: str
    batch: int
    precision: str
    optimizer: Optimizer
    tensors: Tuple[ModelTensor, ...]
    ops: Tuple[ModelOp, ...]

    @property
    def parameter_count(self) -> float:
        return sum(t.size for t in self.tensors if t.role == PARAMETER)

    def backward_flops(self, op: ModelOp) -> float:
        """FLOPs of the whole op's backward."""
        kind = KINDS[op.kind]
        if kind.backward == "each":
            return op.flops * len(self.gradients_of(op))
        return 0.0 if kind.backward == "alias" else op.flops * kind.factor

    def gradients_of(self, op: ModelOp) -> Tuple[Use, ...]:
        """The inputs of ``op`` that get a gradient: parameters, and activations."""
        return tuple(use for use in op.inputs if self.tensors[use.tensor].role != INPUT)


class Optimizer(NamedTuple):
    """Per parameter: ``state_bytes`` that are kept besides value and gradient, and an update's ``passes`` over memory (in
    parameters read or written).

    ``fused_passes``: the same under XLA, where that fuses the update; 0: as many.  ``kernels``: of a variable's update, op by op.
    ``early_bytes``: of the results of an update's ops that wait for no gradient (a moment times its decay, a variable times that
    of weights): TensorFlow runs them at the start of the step, so they are in memory until the update.
    """

    name: str
    state_bytes: float
    passes: float
    kernels: float = 1
    early_bytes: float = 0
    fused_passes: float = 0


OPTIMIZERS: Dict[str, Optimizer] = {
    "sgd": Optimizer("sgd", 0, 3),
    "momentum": Optimizer("momentum", 4, 5),
    "adagrad": Optimizer("adagrad", 4, 5),
    "rmsprop": Optimizer("rmsprop", 8, 7),
    "adam": Optimizer("adam", 8, 7),
    # Written with elementary ops (BERT's released code, and DAPPLE's): like LAMB without corrections, norms and clipping.  Fused:
    # gradient, value and moments 7, the gradient's norm and test for finite numbers 2, assignments 6.
    "adamw": Optimizer("adamw", 8, 39, 15, 12, 15),
    # Written with elementary ops (NVIDIA's optimization.py).  Tensors read and written: moments 16, their corrections 4,
    # direction 7, decay 5, norms 6, step 5, assignments 6, clipping and unscaling 6.  Fused: like Adam, and the
    # direction is written, and read for its norm and for the step, 5.
    "lamb": Optimizer("lamb", 8, 55, 31, 12, 20),
    "adafactor": Optimizer("adafactor", 0, 4),  # row and column sums only: about sqrt(size) numbers
}


class Builder:
    """Builds a :class:`ModelGraph` op by op; ``scope`` nests nodes of the strategy tree."""

    def __init__(self, name: str, batch: int, precision: str = "fp32", optimizer: Union[str, Optimizer] = "adam") -> None:
        """``optimizer``: a key of :data:`OPTIMIZERS`, or an Optimizer.

        Raises:
            PlanError: an unknown optimizer.
        """
        if isinstance(optimizer, str):
            if optimizer not in OPTIMIZERS:
                raise PlanError("model {!r} uses optimizer {!r}, known ones are {}.{}".format(
                    name, optimizer, ", ".join(sorted(OPTIMIZERS)), did_you_mean(optimizer, OPTIMIZERS)))
            optimizer = OPTIMIZERS[optimizer]
        self.name, self.batch, self.precision, self.optimizer = name, batch, precision, optimizer
        self.itemsize = 2 if precision in ("fp16", "bf16") else 4
        self.tensors: List[ModelTensor] = []
        self.ops: List[ModelOp] = []
        self._scope: Tuple[str, ...] = ()

    def graph(self) -> ModelGraph:
        return ModelGraph(self.name, self.batch, self.precision, self.optimizer, tuple(self.tensors), tuple(self.ops))

    def scope(self, name: str) -> _Scope:
        return _Scope(self, name)

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def tensor(self, name: str, dims: str, shape: Tuple[float, ...], role: str, itemsize: Optional[int] = None,
               sparse_rows: Optional[int] = None) -> int:
        self.tensors.append(ModelTensor(
            "/".join(self._scope + (name,)), tuple(dims.split()), tuple(shape), itemsize or self.itemsize, role, sparse_rows))
        return len(self.tensors) - 1

    def input(self, name: str, dims: str, shape: Tuple[float, ...], itemsize: int = 4) -> int:
        return self.tensor(name, dims, shape, INPUT, itemsize)

    def parameter(self, name: str, dims: str, shape: Tuple[float, ...], sparse_rows: Optional[int] = None) -> int:
        """Add a parameter.  Parameters and their gradients are kept in the model's precision; the optimizer keeps masters."""
        return self.tensor(name, dims, shape, PARAMETER, sparse_rows=sparse_rows)

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def op(self, name: str, kind: str, spec: str, inputs: Tuple[int, ...], flops: Optional[float] = None,
           whole: Tuple[str, ...] = (), split: Optional[str] = None, sizes: Optional[Dict[str, float]] = None,
           scratch_bytes: float = 0, itemsize: Optional[int] = None) -> int:
        """An op with one output.  ``spec`` is ``"b s h, h o -> b s o"``; ``sizes``: sizes of dimensions that no input has.

        ``flops`` None: two per point of the iteration space.
        """
        left, right = spec.split("->")
        terms = [tuple(term.split()) for term in left.split(",")]
        out = tuple(right.split())
        dims: Dict[str, float] = dict(sizes or {})
        for tensor, term in zip(inputs, terms):
            shape = self.tensors[tensor].shape
            assert len(shape) == len(term), (name, spec, shape)
            for dim, extent in zip(term, shape):
                assert dims.setdefault(dim, extent) == extent, (name, spec, dim, extent, dims)
        if flops is None:
            flops = 2.0
            for extent in dims.values():
                flops *= extent
        output = self.tensor(name, " ".join(out), tuple(dims[dim] for dim in out), ACTIVATION, itemsize)
        self.ops.append(ModelOp(
            self._scope + (name,), kind, dims, tuple(map(Use, inputs, terms)), (Use(output, out),), flops, whole, split,
            scratch_bytes))
        return output

    def pointwise(self, name: str, kind: str, x: int, flops: float = 1.0, whole: Tuple[str, ...] = (),
                  split: Optional[str] = None, mask: bool = False) -> int:
        """An op on one tensor that keeps its shape; ``flops``: per element; ``mask``: one byte per element is kept."""
        dims = " ".join(self.tensors[x].dims)
        size = self.tensors[x].size
        return self.op(name, kind, f"{dims} -> {dims}", (x,), flops * size, whole, split, scratch_bytes=size if mask else 0)

    def add(self, name: str, x: int, y: int) -> int:
        dims = " ".join(self.tensors[x].dims)
        return self.op(name, "add", f"{dims}, {dims} -> {dims}", (x, y), float(self.tensors[x].size))

    def bias(self, name: str, x: int, axes: int = 1) -> int:
        """Add a parameter over the last ``axes`` axes."""
        tensor = self.tensors[x]
        dims = " ".join(tensor.dims)
        last = " ".join(tensor.dims[-axes:])
        bias = self.parameter(name + "_b", last, tensor.shape[-axes:])
        return self.op(name, "bias", f"{dims}, {last} -> {dims}", (x, bias), float(tensor.size))

    def layer_norm(self, name: str, x: int) -> int:
        tensor = self.tensors[x]
        dims, last = " ".join(tensor.dims), tensor.dims[-1]
        gamma = self.parameter(name + "_gamma", last, tensor.shape[-1:])
        beta = self.parameter(name + "_beta", last, tensor.shape[-1:])
        return self.op(name, "norm", f"{dims}, {last}, {last} -> {dims}", (x, gamma, beta), 8.0 * tensor.size, whole=(last,))


class _Scope:
    def __init__(self, builder: Builder, name: str) -> None:
        self._builder = builder
        self._name = name

    def __enter__(self) -> None:
        self._builder._scope += (self._name,)

    def __exit__(self, *error: object) -> None:
        self._builder._scope = self._builder._scope[:-1]
