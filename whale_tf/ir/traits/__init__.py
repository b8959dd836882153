"""The table of op traits: one row per op type, with everything that the package knows about it.

``traits(op.type)`` returns the row; :func:`types_where` and the sets below are views of the table.  To add an op type, add
a row to one of the sections ``graph``, ``variables``, ``arithmetic`` and ``moving``.  The row states its sharding rule, its
handler along the batch axis, its role and effect on variables, its memory, its precision and its cost.  Rule makers, handlers and
evaluators are functions elsewhere, referred to by name.

Open-ended families of types (datasets, readers, custom optimizers) are recognised by name.  A type that is neither in the
table nor in a family has the default row, which claims nothing.
"""
from __future__ import annotations

import re
from typing import Callable, Dict, FrozenSet, Pattern, Tuple

from whale_tf.ir.traits.arithmetic import ARITHMETIC
from whale_tf.ir.traits.graph import GRAPH
from whale_tf.ir.traits.moving import MOVING
from whale_tf.ir.traits.precision import with_precision
from whale_tf.ir.traits.row import FLOW, Buffer, Cost, Gives, OpTraits, Recipe, Role, VariableUse, merged
from whale_tf.ir.traits.variables import STATE

TABLE = with_precision(merged(GRAPH, STATE, ARITHMETIC, MOVING))
UNKNOWN = OpTraits()

# They are tried in this order for types without a row.
FAMILIES: Tuple[Tuple[Pattern[str], OpTraits], ...] = tuple((re.compile(pattern), row) for pattern, row in (
    (r"^InitializeTable|^LookupTableImport", OpTraits(role=Role.INITIALIZE)),
    (r"^Placeholder", OpTraits(role=Role.PLACEHOLDER)),
    (r"^Iterator|OneShotIterator|MultiDeviceIterator|AnonymousIterator|^Optional(Get|Has)Value|Dataset|Queue|^Reader|Reader(V2)?$"
     r"|HashTable", OpTraits(role=Role.INPUT)),
    (r"^(Resource)?(Sparse)?Apply[A-Z]", OpTraits(state=VariableUse.UPDATE, cost=Cost.UPDATE)),
    (r"^(Resource)?(Sparse)?AccumulatorApply[A-Z]", OpTraits(state=VariableUse.ACCUMULATE)),
    (r"^Assign", OpTraits(state=VariableUse.WRITE, cost=Cost.MOVE)),
    (r"^ResourceScatter", OpTraits(state=VariableUse.WRITE)),
    (r"^TensorArray|^TensorList", OpTraits(cost=Cost.MOVE)),
))


class _Rows(Dict[str, OpTraits]):
    """The table, plus a cache of rows from families."""

    def __missing__(self, op_type: str) -> OpTraits:
        row = next((row for pattern, row in FAMILIES if pattern.search(op_type)), UNKNOWN)
        self[op_type] = row
        return row


_ROWS = _Rows(TABLE)


# The row of an op type: from the table, else its family's, else the default.  Every pass asks for it, often several times an op,
# so this is the look-up itself.
traits: Callable[[str], OpTraits] = _ROWS.__getitem__


def types_where(accepts: Callable[[OpTraits], bool]) -> FrozenSet[str]:
    """The table's op types whose row is accepted."""
    return frozenset(op_type for op_type, row in TABLE.items() if accepts(row))


def first_argument(op_type: str) -> int:
    """The input of an op that is the first argument of the functions which it calls: a condition has its predicate first."""
    return int(traits(op_type).role is Role.CONDITIONAL)


def types_of(*roles: Role) -> FrozenSet[str]:
    """The table's op types with one of the roles."""
    return types_where(lambda row: row.role in roles)


# v1 control flow and functions
ENTERS, EXITS, NEXT_ITERATIONS = types_of(Role.ENTER), types_of(Role.EXIT), types_of(Role.NEXT_ITERATION)
SWITCHES, MERGES, LOOP_CONDS = types_of(Role.SWITCH), types_of(Role.MERGE), types_of(Role.LOOP_COND)
WHILES, CONDITIONALS, CALLS = types_of(Role.WHILE), types_of(Role.CONDITIONAL), types_of(Role.CALL)
CONTROL_FLOW = types_of(*FLOW, Role.LOOP_COND) | WHILES | CONDITIONALS | CALLS
CONTAINERS = types_of(Role.CONTAINER)
FILLS = types_where(lambda row: row.batch in ("array_write", "array_scatter", "push")) | {"TensorArraySplitV3"}
HANDLES_OF_CONTAINERS = CONTAINERS | types_of(Role.CONTAINER_GRADIENT)
PULLS = types_of(Role.PULL)

# variables
VARIABLES = types_where(lambda row: row.state is VariableUse.VARIABLE)
READS = types_where(lambda row: row.state is VariableUse.READ)
ASSIGNS = types_where(lambda row: row.state is VariableUse.ASSIGN)

# values
MOVES = types_where(lambda row: row.only_moves and not row.stops_gradient)  # cheap to recompute at each use
SHAPE_ONLY = types_where(lambda row: row.gives is Gives.SIZES)
RANDOM = types_of(Role.RANDOM)
GENERATORS = types_where(lambda row: row.generates)
PASSES_TERMS = types_where(lambda row: row.passes_terms)
DROPS_ONES = types_where(lambda row: row.drops_ones)
SHAPE_ATTRS = types_where(lambda row: row.has_shape_attr)

# memory and arithmetic
SAME_BUFFER = types_where(lambda row: row.buffer is Buffer.SAME)
OVERWRITES = types_where(lambda row: row.buffer is Buffer.OVERWRITES)
SUMS = types_where(lambda row: row.cost is Cost.ADDS)  # of any number of operands
JOINS = types_where(lambda row: row.cost is Cost.ADDS or row.rule in ("shape.pack", "shape.concat"))  # sums and concatenations
CONTRACTIONS = types_where(lambda row: row.cost is Cost.CONTRACTION)
CONVOLUTIONS = types_where(lambda row: row.cost is Cost.CONVOLUTION)

# divided by special recipes
LOOK_UPS = types_where(lambda row: row.recipe is Recipe.LOOK_UP)
VARIABLE_LOOK_UPS = types_where(lambda row: row.recipe is Recipe.LOOK_UP and bool(row.of_value))
LOSSES = types_where(lambda row: row.recipe is Recipe.CLASSES)
BATCH_NORMS = types_where(lambda row: row.rule == "normalisation.fused_batch_norm")
BATCH_NORM_GRADIENTS = types_where(lambda row: row.rule == "normalisation.fused_batch_norm_grad")
