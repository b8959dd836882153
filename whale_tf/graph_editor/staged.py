"""Collect new nodes and clones, then add all of them to a graph with one import.

A large rewrite is cheap because there is one ``tf.import_graph_def`` for everything: each import scans the whole graph, and
creating an op from Python costs three to four times as much as importing it.

::

    before     x ──> mul ──> add              edit.add("Mul", "half", ["x", "c"])
                      ^                       edit.clone([mul, add], "copy", input_map={"x:0": "half"})
               w ─────┘                       edit.commit()

    after      x ──┬─────────────> mul ──> add
                   │                ^
                   │         w ─────┤
                   │                v
                   └──> half ──> copy/mul ──> copy/add

Inputs from inside the cloned set come from the clones; all others still come from the originals (``w``), unless
``input_map`` says otherwise (``x``).

New edges and devices of existing ops can be staged too (``move_input``, ``move_waits``, ``place``); they get them after the new
nodes are added. An edit that is not committed leaves no trace: ``definitions`` says what it would do, and ``StagedEdit.after``
continues from there.
"""
from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Union

from whale_tf._tf_compat import FunctionDef, GraphDef, NodeDef, tf, v1
from whale_tf.errors import GraphEditError
from whale_tf.garbage import garbage_collection_paused
from whale_tf.graph_editor.commit import Commit, Place
from whale_tf.graph_editor.control_flow import Frame, check_whole_loops, frames, fresh_frame_names, function_def
from whale_tf.graph_editor.definitions import Definitions
from whale_tf.graph_editor.device import canonical_device
from whale_tf.graph_editor.edges import CloneEdges, canonical_edge, control_edges, follow_colocation
from whale_tf.graph_editor.names import free_name, function_exists, names_taken, some
from whale_tf.graph_editor.stage import Stage
from whale_tf.graph_editor.template import Device, Edit, Original, Template, Templates, place_and_edit
from whale_tf.ir.traits import ENTERS


class StagedEdit(Stage):
    """Nodes that refer to each other and to tensors already in the graph; ``commit`` adds them all at once.

    Tensors are named as in a NodeDef: ``"op:1"``, and ``"op"`` or ``"op:0"`` for the first output. A name may be used
    before its node is staged, so cycles (``NextIteration`` to ``Merge``) can be built. Names in the graph are always those
    that were staged.

    Scopes that are open when ``commit`` runs (device, control dependencies, colocation, names, control-flow contexts) do not
    affect the new ops.

    Differentiate first, and clone forward and backward together: an import makes no control-flow contexts (the Python
    objects that ``tf.while_loop`` and ``tf.cond`` of version 1 attach to their ops), and clones of While and If share
    the originals' functions, so ``tf.gradients`` through a cloned loop or conditional raises inside TensorFlow (seen on
    1.15.5 and 2.21). Clones of all other ops can be differentiated, including those with custom gradients.

    Args:
      graph: the graph to add to.
      graph_def: ``graph.as_graph_def()`` if the caller has it and the graph has not changed since.
    """

    def __init__(self, graph: tf.Graph, graph_def: Optional[GraphDef] = None) -> None:
        super().__init__(graph)
        self._originals: Dict[str, NodeDef] = {} if graph_def is None else {node.name: node for node in graph_def.node}
        self._graph_def = v1.GraphDef()
        self._graph_def.versions.CopyFrom(graph.graph_def_versions)
        self._staged: Dict[str, NodeDef] = {}
        self._taken = names_taken(graph)
        self._loops: Optional[Dict[str, Frame]] = None
        self._frame_names: Set[str] = set()  # of loops staged here
        self._functions: Set[str] = set()
        self._changed: Dict[str, NodeDef] = {}
        self._before: Dict[str, Sequence[str]] = {}  # the inputs in the graph of an op in ``_changed``
        self._places: List[Place] = []
        self._definitions: Optional[Definitions] = None
        self._committed = False
        self.copies: Dict[str, str] = {}  # node -> the op from which it differs only in edges, device and colocation

    @classmethod
    def after(cls, definitions: Definitions) -> StagedEdit:
        """An edit that begins with the additions and moves of another one; new nodes can be cloned like ops of the graph."""
        edit = cls(definitions.graph)
        edit._definitions = definitions
        if definitions.additions is not None:
            edit._graph_def.CopyFrom(definitions.additions)  # all at once, which is faster than node by node
            edit._functions = {function.signature.name for function in definitions.functions}
            edit._staged = dict(zip(definitions.added, edit._graph_def.node))
        edit._originals = {**definitions.originals, **edit._staged}
        for name, node in definitions.changed.items():
            edit.change(name).CopyFrom(node)
        return edit

    def definitions(self) -> Definitions:
        """The definitions as a commit would change them.  The edit must not be used afterwards."""
        self._check_open()
        self._committed = True
        assert self._definitions is not None, "the edit began without definitions"
        return self._definitions._replace(added=self._staged, changed=self._changed, additions=self._graph_def)

    def __len__(self) -> int:
        return len(self._staged)

    def __contains__(self, name: str) -> bool:
        return name in self._staged

    def nodes(self) -> List[NodeDef]:
        """All staged NodeDefs, in the order of staging."""
        return list(self._staged.values())

    def node(self, name: str) -> NodeDef:
        """The staged NodeDef of that name, which may still be changed (not its name).

        Raises:
          GraphEditError: no such node is staged.
        """
        try:
            return self._staged[name]
        except KeyError:
            raise GraphEditError(f"no node {name!r} is staged") from None

    def dtypes(self, name: str) -> Sequence[Any]:
        """The dtypes of a staged node's outputs; for a reference, the dtype of the value that it refers to."""
        node = self.node(name)
        return self._signature(node.op, name).output_dtypes(node)

    def output_count(self, name: str) -> int:
        """How many outputs a staged node has."""
        node = self.node(name)
        return self._signature(node.op, name).output_count(node)

    # ---------------------------------------------------------------------------------------------------- new nodes
    def add(self, op_type: str, name: str, inputs: Sequence[str] = (), *, device: str = "",
            control_inputs: Sequence[str] = (), attrs: Optional[Mapping[str, Any]] = None) -> str:
        """Stage one new node.

        Type and number attributes that follow from the inputs (``T``, ``N``) may be left out, unless they follow from
        a node that is staged later.

        Args:
          inputs: names of tensors, staged or in the graph.
          control_inputs: names of ops, staged or in the graph.

        Returns:
          The op's name: ``name``, or ``name_1``, ``name_2``, ... if it is taken.
        """
        self._check_open()
        signature = self._signature(op_type, name)
        with self._all_or_nothing():
            node = self._new_node(free_name(name, lambda one: one in self._taken or one in self._staged))
            node.op = op_type
            node.device = canonical_device(device)
            signature.set_attrs(node, attrs or {})
            data = [canonical_edge(edge) for edge in inputs]
            signature.infer_attrs(node, data, self._dtype)
            node.input.extend(data + control_edges(control_inputs))
        if op_type in ENTERS:
            self._frame_names.add(node.attr["frame_name"].s.decode())
        return node.name

    def insert(self, node: NodeDef) -> NodeDef:
        """Stage an unchanged copy of a node.

        Raises:
          GraphEditError: its name is taken.
        """
        self._check_open()
        self._check_free([node.name])
        return self._new_node(node.name, node)

    def original(self, op: Original) -> NodeDef:
        """The NodeDef of an op of the graph, which must not be changed."""
        return self._original_nodes([op])[op.name]

    # ------------------------------------------------------------------------------------------------- existing ops
    def change(self, name: str) -> NodeDef:
        """The definition of an op, whose inputs may be changed: that of a staged node itself, or, for an op of the graph, a copy
        that the commit applies."""
        if name in self._staged:
            return self._staged[name]
        if name not in self._changed:
            original = self._original_nodes([self.graph.get_operation_by_name(name)])[name]
            copy = v1.NodeDef()
            copy.CopyFrom(original)
            self._before[name], self._changed[name], self._originals[name] = list(original.input), copy, copy
        return self._changed[name]

    def move_input(self, name: str, position: int, tensor: str) -> None:
        """Let data input ``position`` of an op, staged or in the graph, read another tensor."""
        self.change(name).input[position] = canonical_edge(tensor)

    def move_waits(self, name: str, olds: Collection[str], news: Iterable[str]) -> None:
        """Let an op, staged or in the graph, wait for ``news`` instead of ``olds``."""
        node = self.change(name)
        gone = {"^" + old for old in olds}
        kept = [edge for edge in node.input if edge not in gone]
        present = set(kept)
        del node.input[:]
        node.input.extend(kept + [edge for edge in control_edges(news) if edge not in present])

    def place(self, op: Original, device: str, alone: bool = False) -> None:
        """Let an op, staged or in the graph, run on a device.

        Args:
          alone: it need no longer run where the ops run that its ``_class`` names.
        """
        if isinstance(op, tf.Operation):
            self._places.append((op, canonical_device(device), alone))
            return
        op.device = canonical_device(device)
        if alone and "_class" in op.attr:
            del op.attr["_class"]

    def copy_instead(self, prefix: str) -> Dict[str, str]:
        """Leave the graph's ops as they are: copy those whose edges were to move, and all ops that depend on these, and give the
        copies the moved edges.  This is for a graph already extended into a Session, which ignores moves but sees new ops.

        Returns:
          Name of the original -> name of the copy.

        Raises:
          GraphEditError: only a part of a v1 while loop depends on them.
        """
        follows, ops = set(self._changed), []
        for op in self.graph.get_operations():
            sources = [tensor.op.name for tensor in op.inputs] + [control.name for control in op.control_inputs]
            if op.name in follows or not follows.isdisjoint(sources):
                follows.add(op.name)
                ops.append(op)
        staged = list(self._staged.values())
        names = self.clone(ops, prefix)
        self._changed.clear()
        for node in staged:
            for position, edge in enumerate(node.input):
                name, colon, index = edge.lstrip("^").partition(":")
                if name in names:
                    node.input[position] = ("^" if edge[0] == "^" else "") + names[name] + colon + index
        return names

    # ---------------------------------------------------------------------------------------------------- functions
    def has_function(self, name: str) -> bool:
        """Whether a function's name is taken, staged or in the graph's library."""
        return name in self._functions or function_exists(self.graph, name)

    def add_function(self, function: FunctionDef) -> str:
        """Stage a function for the graph's library, which staged nodes may call; returns its name.

        Raises:
          GraphEditError: the name is taken.
        """
        self._check_open()
        name = str(function.signature.name)
        if self.has_function(name):
            raise GraphEditError(f"the graph's library already has a function {name!r}; choose another name")
        self._functions.add(name)
        self._graph_def.library.function.add().CopyFrom(function)
        return name

    def function(self, name: str) -> FunctionDef:
        """A function, staged or in the graph's library.

        Raises:
          GraphEditError: there is none of that name.
        """
        staged = next((function for function in self._graph_def.library.function if function.signature.name == name), None)
        return function_def(self.graph, name) if staged is None else staged

    # ------------------------------------------------------------------------------------------------------- clones
    def templates(self, ops: Iterable[Original]) -> Templates:
        """Ops to clone several times, in place of which :meth:`clone` takes them as they are defined now.

        Raises:
          GraphEditError: an op belongs to another graph.
        """
        ops = list(ops)
        self._check_own(ops)
        return Templates(ops, self._original_nodes(ops))

    def clone(self, ops: Union[Templates, Iterable[Original]], prefix: str, *, input_map: Optional[Mapping[str, str]] = None,
              control_map: Optional[Mapping[str, Optional[str]]] = None, device: Device = None,
              edit: Optional[Edit] = None, control_inputs: Optional[Mapping[str, Sequence[str]]] = None) -> Dict[str, str]:
        """Stage a copy of each op of a set.

        An input from inside the set comes from the clone; any other still comes from the original. Loops of version 1 get new
        frame names. ``_class`` entries ("run where X runs") follow X if X is cloned too, and are dropped otherwise. All
        other attributes stay as they are, including ``shared_name``: a cloned VarHandleOp or queue that has one shares its
        resource with the original on the same device. If attributes contain shapes of another batch size (Placeholder's
        ``shape``, While's ``output_shapes``), the caller has to change them in ``edit``.

        Args:
          prefix: of the new names; ``"copy"`` makes ``copy/name``.
          input_map: tensor -> the tensor to read instead, ``{"x:0": "half:0"}``, also inside the set.
          control_map: op -> the op to wait for instead, ``{"init": "copy_init"}``; None drops the edge.
          device: the clones' device: one for all, or a function of the original op. None keeps the original's.
          edit: called last with each new NodeDef and its original op, to change attributes, device or inputs in place.
          control_inputs: op -> names of more ops to wait for, ``{"x": ["ready"]}``.

        Returns:
          Original name -> new name.

        Raises:
          GraphEditError: a new name is taken, an op belongs to another graph, or the set cuts through a v1 while loop.
        """
        self._check_open()
        with garbage_collection_paused():
            templates = ops if isinstance(ops, Templates) else self.templates(ops)
            names = self._clone_names(templates, prefix)
            edges = CloneEdges(names, input_map or {}, control_map or {})
            with self._all_or_nothing():
                clones = self._copy_nodes(templates, names, edges, control_inputs or {})
                enters = [node for template, node in zip(templates, clones) if template.node.op in ENTERS]
                if enters:
                    self._separate_loops(enters, set(names))
                place_and_edit(templates, clones, device, edit)
        return names

    def copy(self, op: Union[Original, Template], name: str, inputs: Sequence[str], *, device: str = "",
             control_inputs: Sequence[str] = (), same_attrs: bool = False) -> NodeDef:
        """Stage a copy of one op with its own inputs and control inputs; for many single copies, because ``clone`` is expensive.

        Args:
          op: the op, or its template if it is copied several times.
          name: the copy's.
          inputs: names of all tensors that it reads.
          device: ``""`` for none.
          control_inputs: names of the ops that it waits for.
          same_attrs: the caller will change none of its attributes.

        Returns:
          The copy, which may still be changed (not its name).

        Raises:
          GraphEditError: the name is taken, the op belongs to another graph, or it enters a v1 while loop.
        """
        self._check_open()
        template = op if isinstance(op, Template) else self.templates([op])[0]
        if name in self._taken or name in self._staged:
            self._check_free([name])
        if template.node.op in ENTERS:
            raise GraphEditError(
                f"op {template.name!r} ({template.node.op}) enters a while loop, which is cloned as a whole; use clone()")
        where, edges = canonical_device(device), [canonical_edge(edge) for edge in inputs] + control_edges(control_inputs)
        node = self._new_node(name, template.node)
        node.device = where
        node.input.extend(edges)
        if template.colocation:
            follow_colocation(node, template.colocation, {})
        if same_attrs:
            self.copies[name] = template.name
        return node

    def _copy_nodes(self, templates: Templates, names: Mapping[str, str], edges: CloneEdges,
                    extra: Mapping[str, Sequence[str]]) -> List[NodeDef]:
        clones = templates.copy_to(self._graph_def)
        for new, node in zip(names.values(), clones):
            node.name = new
        self._staged.update(zip(names.values(), clones))
        for template, node in zip(templates, clones):
            inputs = [edges[edge] for edge in template.inputs]
            if edges.drops:
                inputs = [edge for edge in inputs if edge]
            if template.name in extra:
                inputs += [edge for edge in control_edges(extra[template.name]) if edge not in inputs]
            node.input.extend(inputs)
            if template.colocation:
                follow_colocation(node, template.colocation, names)
        return clones

    def _separate_loops(self, enters: Sequence[NodeDef], originals: Set[str]) -> None:
        if self._loops is None:
            self._loops = frames(self.graph)
            self._frame_names.update(self._loops)
        check_whole_loops(self._loops, originals, self._still_reads)
        fresh_frame_names(enters, self._frame_names)

    def _still_reads(self, reader: tf.Operation, op: tf.Operation) -> bool:
        """Whether an op of the graph uses another one once the staged edges have moved."""
        node = self._originals.get(reader.name)
        return node is None or any(edge.lstrip("^").partition(":")[0] == op.name for edge in node.input)

    def _clone_names(self, templates: Sequence[Template], prefix: str) -> Dict[str, str]:
        """Old name -> new name, in the order of ``templates``; refuses names that are taken."""
        count = Counter(template.name for template in templates)
        if len(count) < len(templates):
            raise GraphEditError(f"ops to clone are listed more than once: {some([name for name in count if count[name] > 1])}")
        names = {name: f"{prefix.rstrip('/')}/{name}" for name in count}
        self._check_free(names.values())
        return names

    def _check_own(self, ops: Iterable[Original]) -> None:
        foreign = [op.name for op in ops if isinstance(op, tf.Operation) and op.graph is not self.graph]
        if foreign:
            raise GraphEditError(f"ops to clone belong to another graph: {some(foreign)}; clone them in an edit of that graph")

    def _check_free(self, names: Collection[str]) -> None:
        clash = [new for new in names if new in self._taken or new in self._staged]
        if clash or len(set(names)) < len(names):
            raise GraphEditError(f"names of clones are taken: {some(clash or sorted(names))}; choose another prefix")

    def _original_nodes(self, ops: Sequence[Original]) -> Mapping[str, NodeDef]:
        """NodeDefs of the originals.  One export of the whole graph is cheaper than many single ones."""
        missing = [op for op in ops if op.name not in self._originals]
        if missing and (len(self._originals) + len(missing)) * 8 >= len(self._taken):
            self._originals = {**{node.name: node for node in self.graph.as_graph_def().node}, **self._originals}
        else:
            self._originals.update((op.name, op.node_def) for op in missing)
        return self._originals

    # ------------------------------------------------------------------------------------------------------- commit
    def commit(self) -> Dict[str, tf.Operation]:
        """Add everything to the graph, move edges and place ops as staged, and return the new ops by name. An edit can be
        committed only once.

        Garbage collection is paused meanwhile, because the collector would walk the many new objects again and again.

        Raises:
          GraphEditError: a name has been taken meanwhile, an input does not exist, or TensorFlow refused a node (the message
            says which and why); the graph is then as it was. An edge cannot move to a tensor of another static shape; then the
            new ops are in the graph, but nothing that was there reads them.
        """
        self._check_open()
        self._committed = True
        if not self._staged and not self._changed and not self._places:
            return {}
        if self.graph.finalized:
            raise GraphEditError("the graph is finalized; commit edits before finalize() or a MonitoredSession")
        commit = Commit(self.graph, self._graph_def, self._staged, self._changed, self._before, self._places, self._dtype)
        with garbage_collection_paused():
            return commit.run()

    # -------------------------------------------------------------------------------------------------------- names
    def _check_open(self) -> None:
        if self._committed:
            raise GraphEditError("this edit has been committed; start a new StagedEdit")

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If the code inside fails, undo what it has staged."""
        n_before = len(self._staged)
        try:
            yield
        except BaseException:
            for name in list(self._staged)[n_before:]:
                del self._staged[name]
            del self._graph_def.node[n_before:]
            raise

    def _new_node(self, name: str, original: Optional[NodeDef] = None) -> NodeDef:
        node = self._graph_def.node.add()
        if original is not None:
            node.CopyFrom(original)
        node.name = name
        self._staged[name] = node
        return node

    def _dtype(self, edge: str) -> Any:
        """dtype of a tensor that is staged or in the graph; None if it is not known yet."""
        name, _, index = edge.partition(":")
        node = self._staged.get(name)
        if node is not None:
            dtypes = self._signature(node.op, name).output_dtypes(node)
            return dtypes[int(index or 0)] if int(index or 0) < len(dtypes) else None
        try:
            return self.graph.get_tensor_by_name(f"{name}:{index or 0}").dtype
        except KeyError:
            return None
