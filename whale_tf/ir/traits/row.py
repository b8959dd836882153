"""The fields of a row of the op traits table."""
from __future__ import annotations

from enum import Enum
from typing import Dict, NamedTuple, Optional, Tuple


class Role(Enum):
    """An op's role in the graph."""

    COMPUTE = "compute"
    CONSTANT = "constant"
    NO_OP = "no op"  # control edges only
    PLACEHOLDER = "placeholder"
    INPUT = "input"  # produces, moves or describes external data, or a shared table; never cloned
    PULL = "pull"  # takes the next elements from an iterator or queue
    HOST = "host"  # a Python function of its process; it brings in data if it depends on no variable
    TABLE = "table"  # a look-up in a table of its process, which runs where the table is
    INITIALIZE = "initialize"  # initialises an iterator or look-up table
    SAVE = "save"
    RESTORE = "restore"
    RANDOM = "random"  # draws numbers
    ENTER, EXIT, NEXT_ITERATION = "enter", "exit", "next iteration"  # v1 while loops
    LOOP_COND = "loop condition"
    SWITCH, MERGE = "switch", "merge"  # v1 conditionals and while loops
    WHILE = "while"  # functional
    CONDITIONAL = "conditional"  # functional; operand 0 chooses the branch
    CALL = "call"  # functional
    ARGUMENT, RESULT = "argument", "result"  # of a function body
    CONTAINER = "container"  # creates a stack or a tensor array
    CONTAINER_GRADIENT = "container gradient"  # creates the handle of a tensor array's gradients from the array's
    EMPTY_LIST = "empty list"  # creates a tensor list or an optional without values


FLOW = (Role.ENTER, Role.EXIT, Role.NEXT_ITERATION, Role.SWITCH, Role.MERGE)


class VariableUse(Enum):
    """What an op does to the variable that an operand refers to (by a reference or a resource handle)."""

    NONE = "none"
    VARIABLE = "variable"  # it is the variable
    TEMPORARY = "temporary"  # a variable that exists only within one step
    READ = "read"  # reads the whole value (an Identity does if its operand is a reference)
    IS_INITIALIZED = "is initialized"
    HANDLE = "handle"  # neither reads nor writes the value
    ASSIGN = "assign"  # writes every element: assigns, adds or subtracts a tensor with the variable's shape
    WRITE = "write"  # writes some elements, or increments a counter
    UPDATE = "update"  # an optimizer's update
    DRAW = "draw"  # advances a random generator's own variable
    ACCUMULATE = "accumulate"  # adds to a gradient accumulator


class Gives(Enum):
    """How the result's elements follow from the first operand, without arithmetic."""

    OTHER = "other"
    SAME = "same"  # the operand
    RESHAPED = "reshaped"  # its elements in the same order
    REORDERED = "reordered"
    ELEMENTS = "elements"  # some of its elements, perhaps repeated
    SIZES = "sizes"  # reads only its shape, and returns it
    LIKE = "like"  # reads only its shape, and returns a constant of that shape


class Buffer(Enum):
    """The memory of the result."""

    NEW = "new"
    SAME = "same"  # passes on the first operand's buffer
    OVERWRITES = "overwrites"  # may overwrite an operand that has no later readers


class Cost(Enum):
    """How an op's cost is counted; ``OpTraits.flops`` is the number per element."""

    FREE = "free"  # passes on a buffer or computes nothing
    BODY = "body"  # the cost of its function body
    MOVE = "move"  # reads and writes memory, computes nothing
    LOOK_UP = "look up"  # like MOVE, for the rows that it returns
    RESULT = "result"  # FLOPs per element of the first result
    OPERAND = "operand"  # FLOPs per element of the first operand: reductions, losses, normalisation
    ADDS = "adds"  # one per element and operand, except the first operand
    POOL = "pool"  # one per element of a window
    CONTRACTION = "contraction"  # two per combination of the rule's factors
    CONVOLUTION = "convolution"  # ... except for the factors of the image
    SPARSE = "sparse"  # two per element that the matrix has and column of the result
    UPDATE = "update"  # FLOPs per element of the variable; also reads and writes its slots


class Recipe(Enum):
    """Special ways to divide an op along a dimension that its rule needs whole."""

    NONE = "none"
    CLASSES = "classes"  # cross-entropy, along the classes
    SOFTMAX = "softmax"  # along the last dimension
    LOOK_UP = "look up"  # along the rows of the table


class Precision(Enum):
    """Whether an op computes in a type with half the bytes under mixed precision."""

    FIXED = "fixed"  # its types do not change
    LOW = "low"  # always: limited by arithmetic, and sums are float32 inside
    INFERRED = "inferred"  # between low ones, but not after one that needs float32
    NEUTRAL = "neutral"  # next to a low one: moves, picks or compares elements, so that nothing is lost
    HIGH = "high"  # never: float32


class OpTraits(NamedTuple):
    """One row: everything that the package knows about an op type.  Unknown types get the defaults.

    Attributes:
        rule: maker of the sharding rule (factors, roles, aliases): ``module.function arguments`` in
            :mod:`whale_tf.ir.rules`; "" for none.
        batch: handler in :mod:`whale_tf.ir.batch_axis`, if the rule alone does not determine the batch axis.
        value: evaluator in :mod:`whale_tf.ir.evaluate`, for integer operands.
        measure: sizes and values of the results in the whole mini-batch, if they do not follow from the rule: a function in
            :mod:`whale_tf.ir.batch_axis.sections`; or, as in ``"splits 0 = rows 1"``, that result 0 has as many rows as
            operand 1.  On either side, ``rows`` are those of the first dimension, ``splits`` is a vector of where rows begin and
            end, and ``shape`` a vector that begins with the number of rows; ``elements`` are all of an operand's.  ``1|2`` is
            the first of these operands that is no scalar; ``matrix`` at the end: only if the operand has two dimensions.
        rows_from: operands from whose rows those of the results follow, although there is no rule that says it: their numbers, as
            in ``"0 1"``.
        role, state, gives, buffer, recipe: see the enumerations.
        precision: the type under mixed precision, given by :mod:`whale_tf.ir.traits.precision`.
        cost: what to count; ``flops`` is the cost of each.
        is_dear: takes several times as long as a product of as many elements, although ``flops`` says 1.
        passes_terms: terms of a sum may pass through; before any other op they are added up, so that the sum is made once.
        stops_gradient: its result has no gradient, although it has the operand's elements.
        adds: assigns the variable's value plus or minus the operand.
        passes_reference: results refer to the variable that the operand refers to.
        jumps: its floating-point result is not continuous in the operands, so that a rounding error may change it much.
        generates: the result's shape is an operand, and its rows can be produced independently.
        drops_ones: the attribute ``squeeze_dims`` names the dimensions of size one that it drops; empty: all, of which a part of
            the operand may have more.
        has_shape_attr: the attribute ``shape`` is the result's shape, which must not have the whole batch's size in a clone.
        philox: a random op whose numbers are determined by a Philox generator's counter.
        stateful_op: the op type that draws the same numbers from its own generator's state.
        of_value: the op type that does to a value what this one does to a variable, by its handle.
        fails_empty: its kernel returns memory as it was if operands have no elements.
        arity: numbers of inputs and outputs, if they are the same for every op of the type.
    """

    rule: str = ""
    batch: str = ""
    value: str = ""
    measure: str = ""
    rows_from: str = ""
    role: Role = Role.COMPUTE
    state: VariableUse = VariableUse.NONE
    gives: Gives = Gives.OTHER
    buffer: Buffer = Buffer.NEW
    cost: Cost = Cost.RESULT
    flops: float = 1.0
    recipe: Recipe = Recipe.NONE
    precision: Precision = Precision.FIXED
    is_dear: bool = False
    passes_terms: bool = False
    stops_gradient: bool = False
    adds: bool = False
    passes_reference: bool = False
    jumps: bool = False
    generates: bool = False
    drops_ones: bool = False
    has_shape_attr: bool = False
    philox: bool = False
    stateful_op: str = ""
    of_value: str = ""
    fails_empty: bool = False
    arity: Optional[Tuple[int, int]] = None

    @property
    def is_input(self) -> bool:
        """Brings in data, or is a shared table."""
        return self.role in (Role.PLACEHOLDER, Role.INPUT, Role.PULL)

    @property
    def is_write(self) -> bool:
        """Changes a variable of the model."""
        return self.state in (VariableUse.ASSIGN, VariableUse.WRITE, VariableUse.UPDATE)

    @property
    def is_update(self) -> bool:
        """An optimizer's update of variables, or of the accumulators that precede one."""
        return self.state in (VariableUse.UPDATE, VariableUse.ACCUMULATE)

    @property
    def only_moves(self) -> bool:
        """The result has all of the operand's elements."""
        return self.gives in (Gives.SAME, Gives.RESHAPED, Gives.REORDERED)

    @property
    def is_contraction(self) -> bool:
        """Limited by arithmetic: a matrix product, an einsum or a convolution."""
        return self.cost in (Cost.CONTRACTION, Cost.CONVOLUTION)

    @property
    def is_product(self) -> bool:
        """A contraction, or the product of a sparse matrix, which memory limits."""
        return self.is_contraction or self.cost is Cost.SPARSE


Table = Dict[str, OpTraits]


def table(*rows: Tuple[str, OpTraits]) -> Table:
    """A section of the table, from rows and the op types (separated by spaces) that share a row.

    Raises:
        ValueError: an op type has two rows.
    """
    return merged(*({name: row} for names, row in rows for name in names.split()))


def merged(*sections: Table) -> Table:
    """Merge sections into one table.

    Raises:
        ValueError: an op type has two rows.
    """
    result: Table = {}
    for section in sections:
        double = result.keys() & section.keys()
        if double:
            raise ValueError(f"op type {sorted(double)[0]!r} has two rows; an op type has one")
        result.update(section)
    return result
