"""Ops that structure the graph: data sources, control flow, functions, containers, saving."""
from __future__ import annotations

from typing import Any

from whale_tf.ir.traits.row import Buffer, Cost, Gives, OpTraits, Role, VariableUse, merged, table

_SOURCE = OpTraits(rule="state.source", cost=Cost.FREE)
_UNDIVIDED = OpTraits(rule="state.undivided", cost=Cost.FREE)


def _flow(role: Role, batch: str, rule: str, value: str = "", **more: Any) -> OpTraits:
    """An op of v1 control flow."""
    row = OpTraits(rule=rule, batch=batch, value=value, role=role, cost=Cost.FREE, passes_reference=True)
    return row._replace(**more)


_DATA = table(
    ("Const", _SOURCE._replace(role=Role.CONSTANT, arity=(0, 1))),
    ("ImmutableConst Empty", _SOURCE._replace(cost=Cost.RESULT)),
    ("Placeholder PlaceholderV2", _SOURCE._replace(role=Role.PLACEHOLDER)),
    ("PlaceholderWithDefault", OpTraits(rule="elementwise.elementwise m", role=Role.PLACEHOLDER, buffer=Buffer.OVERWRITES,
                                        cost=Cost.FREE, has_shape_attr=True)),
    ("IteratorGetNext", _SOURCE._replace(role=Role.PULL)),
    ("IteratorGetNextSync IteratorGetNextAsOptional QueueDequeueV2 QueueDequeueManyV2 QueueDequeueUpToV2 QueueDequeue "
     "QueueDequeueMany QueueDequeueUpTo", OpTraits(role=Role.PULL)),
    ("PyFunc PyFuncStateless EagerPyFunc", OpTraits(role=Role.HOST)),
    ("LookupTableFind LookupTableFindV2", OpTraits(rule="gather.in_table", role=Role.TABLE)),
    ("IteratorV2 OneShotIterator", _SOURCE._replace(role=Role.INPUT)),
    ("MakeIterator", OpTraits(role=Role.INITIALIZE)),
    ("OptionalFromValue", OpTraits(batch="optional")),
    ("OptionalGetValue", OpTraits(batch="optional", role=Role.INPUT)),
    ("OptionalHasValue", OpTraits(batch="list_length", role=Role.INPUT)),
    ("OptionalNone", _SOURCE._replace(batch="no_value", role=Role.EMPTY_LIST, cost=Cost.RESULT)),
    ("RestoreV2 Restore RestoreSlice", OpTraits(role=Role.RESTORE)),
    ("SaveV2 Save SaveSlices MergeV2Checkpoints ShardedFilename ShardedFilespec", OpTraits(role=Role.SAVE)),
    ("Assert", _UNDIVIDED._replace(batch="look")),
    ("Abort", _UNDIVIDED._replace(batch="look", cost=Cost.RESULT)),
    ("Print PrintV2", OpTraits(rule="elementwise.per_row", batch="look", buffer=Buffer.OVERWRITES)),
    ("NoOp", _UNDIVIDED._replace(role=Role.NO_OP)),
    ("ControlTrigger", _UNDIVIDED),
)

_CONTROL_FLOW = table(
    ("Enter", _flow(Role.ENTER, "enter", "control_flow.passing", "first", arity=(1, 1))),
    ("RefEnter", _flow(Role.ENTER, "enter", "control_flow.passing", arity=(1, 1))),
    ("Exit", _flow(Role.EXIT, "leave", "control_flow.passing", "first", arity=(1, 1))),
    ("RefExit", _flow(Role.EXIT, "leave", "control_flow.passing", arity=(1, 1))),
    ("NextIteration RefNextIteration", _flow(Role.NEXT_ITERATION, "next_iteration", "control_flow.passing", arity=(1, 1))),
    ("Switch RefSwitch", _flow(Role.SWITCH, "switch", "control_flow.switch", arity=(2, 2))),
    ("Merge RefMerge", _flow(Role.MERGE, "merge", "control_flow.merge")),
    ("LoopCond", _UNDIVIDED._replace(batch="loop_condition", role=Role.LOOP_COND, arity=(1, 1))),
    ("RefSelect", OpTraits(passes_reference=True)),
    ("While StatelessWhile", OpTraits(batch="while_loop", role=Role.WHILE, cost=Cost.BODY)),
    ("If StatelessIf Case StatelessCase", OpTraits(batch="branches", role=Role.CONDITIONAL, cost=Cost.BODY)),
    ("PartitionedCall StatefulPartitionedCall RemoteCall", OpTraits(batch="call", role=Role.CALL, cost=Cost.BODY)),
    ("_Arg", _SOURCE._replace(role=Role.ARGUMENT, arity=(0, 1))),
    ("_Retval", OpTraits(role=Role.RESULT, cost=Cost.FREE, arity=(1, 0))),
)

_CONTAINER = OpTraits(batch="make_container", role=Role.CONTAINER)
_ELEMENT = OpTraits(cost=Cost.MOVE)

_CONTAINERS = table(
    ("StackV2", _CONTAINER._replace(rule="state.source", cost=Cost.FREE)),
    ("Stack", _CONTAINER),
    ("StackPushV2", OpTraits(rule="control_flow.element 1", batch="push", cost=Cost.FREE)),
    ("StackPush", OpTraits(batch="push")),
    ("StackPopV2", OpTraits(rule="control_flow.element -1", batch="pop", cost=Cost.FREE)),
    ("StackPop", OpTraits(batch="pop")),
    ("StackCloseV2", OpTraits(rule="state.undivided", batch="array_size")),
    ("StackClose", OpTraits(batch="array_size")),
    ("TensorArrayV3", _CONTAINER._replace(rule="state.source", cost=Cost.FREE)),
    ("TensorArrayV2 TensorArray", _CONTAINER._replace(cost=Cost.MOVE)),
    ("TensorArrayGradV3", OpTraits(rule="state.undivided", batch="array_gradient", role=Role.CONTAINER_GRADIENT,
                                   cost=Cost.FREE)),
    ("TensorArrayGradV2", _ELEMENT._replace(role=Role.CONTAINER_GRADIENT)),
    ("TensorArrayGradWithShape", _ELEMENT._replace(batch="array_gradient", role=Role.CONTAINER_GRADIENT)),
    ("TensorArrayWriteV3", _ELEMENT._replace(rule="control_flow.element 2", batch="array_write")),
    ("TensorArrayWriteV2", _ELEMENT._replace(batch="array_write")),
    ("TensorArrayReadV3", _ELEMENT._replace(rule="control_flow.element -1", batch="array_read")),
    ("TensorArrayReadV2", _ELEMENT._replace(batch="array_read")),
    ("TensorArrayScatterV3", _ELEMENT._replace(rule="control_flow.element 2 1", batch="array_scatter")),
    ("TensorArrayScatterV2", _ELEMENT._replace(batch="array_scatter")),
    ("TensorArrayGatherV3", _ELEMENT._replace(rule="control_flow.element -1 1", batch="array_gather")),
    ("TensorArrayGatherV2", _ELEMENT._replace(batch="array_gather")),
    ("TensorArrayConcatV3 TensorArraySplitV3", _ELEMENT._replace(batch="array_join")),
    ("TensorArraySizeV3 TensorArrayCloseV3", _ELEMENT._replace(rule="state.undivided", batch="array_size")),
    ("EmptyTensorList TensorListReserve", _SOURCE._replace(batch="make_list", role=Role.EMPTY_LIST)),
    ("TensorListPushBack", _ELEMENT._replace(rule="control_flow.element 1", batch="list_write")),
    ("TensorListSetItem", _ELEMENT._replace(rule="control_flow.element 2", batch="list_write")),
    ("TensorListPopBack TensorListGetItem", _ELEMENT._replace(rule="control_flow.element -1", batch="list_read")),
    ("TensorListStack TensorListGather", _ELEMENT._replace(rule="control_flow.element -1 1", batch="list_stack")),
    ("TensorListFromTensor", _ELEMENT._replace(rule="control_flow.element 0 1", batch="list_from_tensor")),
    ("TensorListResize", _ELEMENT._replace(batch="list_resize")),
    ("TensorListLength TensorListElementShape", _ELEMENT._replace(rule="state.undivided", batch="list_length")),
)

_IDENTITY = OpTraits(rule="elementwise.elementwise m", gives=Gives.SAME, buffer=Buffer.SAME, cost=Cost.FREE)
_COPY = OpTraits(rule="elementwise.elementwise m", buffer=Buffer.OVERWRITES)

_IDENTITIES = table(
    ("Identity", _IDENTITY._replace(batch="identity", value="first", state=VariableUse.READ, passes_terms=True,
                                    passes_reference=True, arity=(1, 1))),
    ("RefIdentity", _COPY._replace(batch="identity", state=VariableUse.READ, cost=Cost.FREE, passes_reference=True)),
    ("IdentityN", OpTraits(rule="elementwise.each", batch="identities", cost=Cost.FREE, passes_reference=True)),
    ("PreventGradient", _IDENTITY._replace(value="first", passes_terms=True)),
    ("StopGradient", _IDENTITY._replace(value="first", passes_terms=True, stops_gradient=True)),
    ("Snapshot", _IDENTITY._replace(value="first")),
    ("EnsureShape", _IDENTITY._replace(has_shape_attr=True)),
    ("CheckNumerics CheckNumericsV2 DeepCopy DebugGradientIdentity DebugIdentity Copy CopyHost XlaSharding", _COPY),
)

GRAPH = merged(_DATA, _CONTROL_FLOW, _CONTAINERS, _IDENTITIES)
