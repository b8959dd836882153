"""Changes the code that decides numbers, one operator at a time, and lists the changes that no test notices.

    python -m tests.mutation                            every target
    python -m tests.mutation whale_tf.bridges           one module, or several
    python -m tests.mutation whale_tf.bridges --show    with each surviving change as code

A change within a function runs in a forked process, on the tests that call this function (:class:`_Fast`).  What these do not
notice, and every other change, runs on all tests with the package loaded anew (:func:`survives`).  A change that makes no
difference (sorting what is sorted, say) is listed in ``EQUIVALENT`` with its reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.util
import io
import os
import pickle
import resource
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

ROOT = Path(__file__).parents[1]
PASSES = ("tests/passes",)
TARGETS: Dict[str, Tuple[str, ...]] = {
    "whale_tf.bridges": ("tests/bridges",) + PASSES,
    "whale_tf.passes.outline": PASSES,
    "whale_tf.passes.fuse": PASSES,
    "whale_tf.passes.replicate": PASSES,
    "whale_tf.passes.communicate": PASSES,
    "whale_tf.passes.collect": PASSES,
    "whale_tf.passes.schedule": PASSES,
    "whale_tf.ir.training_step": ("tests/ir/test_training_step.py",) + PASSES,
    "whale_tf.schedule.backward_first": ("tests/schedule",) + PASSES,
    "whale_tf.schedule.gpipe": ("tests/schedule",) + PASSES,
    "whale_tf.schedule.warmup": ("tests/schedule",) + PASSES,
    "whale_tf.schedule.greedy": ("tests/schedule",) + PASSES,
    "whale_tf.schedule.zero_bubble": ("tests/schedule",) + PASSES,
    "whale_tf.schedule.zero_bubble_v": ("tests/schedule",) + PASSES,
    "whale_tf.schedule.interleaved": ("tests/schedule",) + PASSES,
    "whale_tf.passes.homes": PASSES,
    "whale_tf.passes.lowering.lowering": ("tests/passes/test_lowering.py",) + PASSES,
    "whale_tf.passes.lowering.values": ("tests/passes/test_lowering.py",) + PASSES,
    "whale_tf.passes.lowering.bridges": ("tests/passes/test_lowering.py",) + PASSES,
    "whale_tf.passes.lowering.messages": ("tests/passes/test_lowering.py",) + PASSES,
    "whale_tf.passes.lowering.levels": ("tests/passes/test_lowering.py",) + PASSES,
    "whale_tf.emit.order": ("tests/emit/test_barriers.py",),
    "whale_tf.planner.bounds": ("tests/planner/test_bounds.py",),
    "whale_tf.planner.stage_costs": ("tests/planner/test_stage_costs.py", "tests/planner/test_dapple_cost.py",
                                     "tests/planner/test_amp_cost.py"),
    "whale_tf.planner.homes": ("tests/planner/test_homes.py",),
    "whale_tf.planner.play": ("tests/planner/test_play.py",),
    "whale_tf.ir.batch_axis.positions": ("tests/ir/test_positions.py",),
    "whale_tf.planner.recompute": ("tests/planner/test_recompute.py", "tests/planner/test_recompute_rows.py"),
    "whale_tf.balance.exact": ("tests/balance",),
    "whale_tf.balance.partition": ("tests/balance",),
    "whale_tf.balance.proportional": ("tests/balance",),
    "whale_tf.balance.stages": ("tests/balance",),
    "whale_tf.simulator.memory": ("tests/simulator/test_curves.py",),
}
SORTED_THERE = "the network sorts a group's devices"
ONE, NO_OP = "there is one only", "neither is the number of an op or of a device"
ORDERED = "sets of small numbers are in order"
FIRST, LAST = "still before all others", "still behind all others"
SAME_NAMES = "a scope names its tensor by a placeholder, so those of one message are equal"
EQUIVALENT: Dict[Tuple[str, str], str] = {  # (module, line, without spaces around, and change) -> why no test can notice
    ("whale_tf.passes.lowering.values",
     "if blocks is not None and len(blocks) > 1 and len(pieces) > 1:  # each block from all clones  # Gt -> GtE"):
        "a single block is the whole value, and a single value's blocks are in order",
    ("whale_tf.passes.lowering.lowering", "self._are_synchronised = True  # True -> False"): "each is lowered once in any case",
    ("whale_tf.passes.lowering.lowering", "return self._homes.get(tensor, 0)  # 0 -> 1"): "only whether there is a home counts",
    ("whale_tf.passes.lowering.lowering",
     "return self._values.scaled(total, self._values.power(tensor), chains(self._plan, task_graph, 0)[0][0], task_graph, scope)"
     "  # 0 -> 1"): "all clones have the same weight, and any home all of them in one chain",
    ("whale_tf.passes.lowering.lowering",
     "packed = Primitive(PACK, tensor, device, here, scopes[0], call=number)  # 0 -> 1"): SAME_NAMES,
    ("whale_tf.passes.lowering.lowering",
     'total = self._values.between(ALL_REDUCE, packed, device, scopes[0] + "/bucket", detail, number)  # 0 -> 1'): SAME_NAMES,
    ("whale_tf.passes.lowering.lowering",
     "tensor, detail = members[0].tensor, Reduction(SUM, devices=tuple(devices))  # 0 -> 1"): "all are of one tensor",
    ("whale_tf.passes.lowering.lowering",
     "every = clones(self._plan, home)[:1 if how.kind == SAME else None]  # 1 -> 2"): "the first one is taken",
    ("whale_tf.passes.lowering.values",
     "return Primitive(kind, values[0].tensor, device, values, scope, call=number)  # 0 -> 1"): "all are of one tensor",
    ("whale_tf.bridges", "sizes = list(slices or [1] * count)  # 1 -> 2"): "only the proportion counts",
    ("whale_tf.passes.communicate", "for tensor in sorted({tensor for _, tensor in readers}):  # sorted -> list"): ORDERED,
    ("whale_tf.passes.communicate",
     "sources = tuple(sorted({t for body in readers for t in body.inputs if t in step.sources}))  # sorted -> list"): ORDERED,
    ("whale_tf.passes.communicate",
     "tuple(sorted(tensors[source, consumer])), tuple(sorted(tensors[source, consumer])))  # sorted -> list"): ORDERED,
    ("whale_tf.passes.communicate",
     "if (body_of.get(op, -1), tensor) in found and (op, position) not in combined:  # 1 -> 2"):
        "neither is the number of a body",
    ("whale_tf.passes.collect",
     "found[tensor] = Leaving(tuple(sorted(targets)), is_merged, is_applied)  # sorted -> list"): ORDERED,
    ("whale_tf.passes.outline", "NO_HOME = -1  # instead of a device  # 1 -> 2"): "no device has either number",
    ("whale_tf.passes.outline",
     "for op in region.graph.ops[min(raising.union(returned, least), default=0):]:  # 0 -> 1"): "nothing is raised then",
    **{("whale_tf.ir.batch_axis.positions", f"if span * delta < 0:  # {change}"): "neither is zero"
       for change in ("Lt -> LtE", "Mult -> FloorDiv", "0 -> 1")},
    ("whale_tf.passes.schedule",
     "first = {step.task_graph: (number, -1) for step, (number, _) in places.items()}  # 1 -> 2"): FIRST,
    ("whale_tf.passes.homes",
     "variables = {variable: plan.here(home.device) if step.processes > 1 else home.device  # Gt -> GtE"):
        "a process that is alone has all devices",
    ("whale_tf.passes.homes", "count = -1  # 1 -> 2"): "less than any number",
    ("whale_tf.passes.homes", "found, before = [], -1  # type: List[Tuple[int, int]], int  # 1 -> 2"): NO_OP,
    ("whale_tf.passes.homes",
     "known = {position: homes.tensors.get(tensor, homes.ops.get(producers[position], -1))  # 1 -> 2"): NO_OP,
    ("whale_tf.passes.homes",
     "written = _kept_in_body(one, {place: min(single) for place, single in enumerate(own) if len(single) == 1})  # min -> max"):
        ONE,
    ("whale_tf.passes.homes", "written = dict.fromkeys(range(len(one.inputs)), min(homes))  # min -> max"): ONE,
    ("whale_tf.ir.batch_axis.positions", "power, _ = plan.settle(True)  # True -> False"): "no operand is a sum by then",
    ("whale_tf.ir.batch_axis.positions",
     "return blocks[0] if blocks is not None and len(blocks) == 1 and blocks[0] > 0 else None  # Gt -> GtE"):
        "an example has at least one row",
    ("whale_tf.planner.bounds", "slices = task.slices or (1,) * len(row)  # 1 -> 2"): "only the proportion counts",
    ("whale_tf.planner.bounds",
     "algorithms = self.network.algorithms_of(ALL_REDUCE, Group(tuple(sorted(row))))  # sorted -> list"): SORTED_THERE,
    ("whale_tf.planner.bounds",
     "algorithms = self.network.algorithms_of(ALL_REDUCE, Group(tuple(sorted(members))))  # sorted -> list"): SORTED_THERE,
    ("whale_tf.simulator.memory",
     "bounds = np.searchsorted(table.slot[by_slot], np.arange(len(graph.devices) + 1))  # 1 -> 2"): "one more is not read",
    ("whale_tf.simulator.memory",
     "order_key = np.concatenate([np.where(brief, 2, 0), np.ones(len(rows), np.int64)])  # 2 -> 3"): LAST,
    ("whale_tf.simulator.memory",
     "order_key = np.concatenate([np.where(brief, 2, 0), np.ones(len(rows), np.int64)])  # 0 -> 1"):
        "what is freed comes first in the list, and equal ones stay in order",
    ("whale_tf.planner.play",
     "shares = [part if part < 1.0 and self._batch.layout(t).is_sharded else 1.0 for t in op.inputs + op.outputs]"
     "  # Lt -> LtE"): "a part of all is all",
    ("whale_tf.planner.play",
     "shares = [part if part < 1.0 and self._batch.layout(t).is_sharded else 1.0 for t in op.inputs + op.outputs]"
     "  # 1.0 -> 2.0"): "no part is more than all",
    ("whale_tf.planner.homes", "load, found = [0] * plan.num_devices, []  # 0 -> 1"): "all begin equal",
    ("whale_tf.passes.schedule", "return 2, AFTER.index(body.step), number  # 2 -> 3"): LAST,
    ("whale_tf.passes.schedule",
     "order, place = next((places[step] for step in steps if step in places), first.get(body.task_graph, (body.task_graph, -1)))"
     "  # 1 -> 2"): FIRST,
}
LATER = "all begins one unit later, or one more place has nothing to do"
SAME: Sequence[Tuple[str, str, Sequence[str], str]] = (  # likewise, for several changes of a line
    ("greedy", "near = range(max(0, step.task_graph - 1), min(len(homes), step.task_graph + 2))",
     ("max -> min", "1 -> 2", "2 -> 3"), "more places are looked at again than have to be"),
    ("greedy",
     "free, found = [0] * (max(homes) + 1), [[] for _ in range(max(homes) + 1)]  # type: List[int], List[List[Step]]",
     ("0 -> 1", "1 -> 2"), LATER),
    ("greedy", "return None if None in times else max([0] + times)  # type: ignore[type-var]", ("0 -> 1",), LATER),
    ("greedy", "start, _, step = min((one for one in following if one is not None), default=(0, (), None))", ("0 -> 1",),
     "nobody reads when nothing starts"),
    ("greedy", "ends[step] = free[place] = start + (2 if step.kind == BACKWARD and not splits else 1)",
     ("1 -> 2", "2 -> 3", "Eq -> NotEq"), "where W is apart all steps take the same; interleaved orders follow from turns"),
    ("zero_bubble_v", "is_second = mine[0] > mine[1]", ("Gt -> GtE",), "the two are never equal"),
    ("zero_bubble_v", "return (1, not is_second) if step.kind == BACKWARD else (2, is_second)", ("2 -> 3",), LAST),
    ("interleaved", "return (1,)", ("1 -> 2",), LAST),
)
EQUIVALENT.update({(f"whale_tf.schedule.{module}", f"{line}  # {change}"): why
                   for module, line, changes, why in SAME for change in changes})
LARGER, EITHER = "one more place stays empty", "of equal ones either will do"
RECOMPUTE: Sequence[Tuple[str, str, str]] = (
    ("MOST_CUTS = 64  # number of places in one TaskGraph to consider", "64 -> 65", "any number like it will do"),
    ("BOUNDS = 24  # number of bounds on the largest dropped segment to try", "24 -> 25", "any number like it will do"),
    ("if len(sizes) <= BOUNDS:", "LtE -> Lt", "of as many, all are taken in any case"),
    ("if cost < best[q + 1][:2]:", "Lt -> LtE", EITHER),
    ("if cost < best[q + 1][:2]:", "2 -> 3", EITHER),
    ("came = np.zeros((self.size + 1, STEPS + 1, 3), int)  # (parts done, memory used, whether dropped) before", "1 -> 2",
     LARGER),
    ("better = np.flatnonzero(new < time[q + 1, used:])", "Lt -> LtE", EITHER),
    ("crossing, held_before = np.zeros(len(mine) + 1), np.zeros(len(mine) + 1)", "1 -> 2", LARGER),
    ("share = max(float(held_before[-1]), 1.0) / MOST_CUTS", "1.0 -> 2.0", "it stands against a division by zero only"),
    ("all_made, unread = np.zeros((size, size + 1)), np.zeros((size, size + 1))  # [part, last part that reads it]", "1 -> 2",
     LARGER),
)
EQUIVALENT.update({("whale_tf.planner.recompute", f"{line}  # {change}"): why for line, change, why in RECOMPUTE})
CPU_SECONDS = 10  # a mutant that takes more hangs, which a user would notice
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
              ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}


class Mutant(NamedTuple):
    """``apply`` changes the ``place``-th node of the module's tree."""

    line: int
    place: int
    about: str
    apply: Callable[[Any], None]


def mutants(tree: ast.AST) -> Iterator[Mutant]:
    """Every change of one operator, constant or function; annotations, docstrings and messages of errors are left alone."""
    skipped = {id(inner) for node in ast.walk(tree) for part in _left_alone(node) for inner in ast.walk(part)}
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Compare):
            for index, operator in enumerate(node.ops):
                new = COMPARISONS[type(operator)]
                yield Mutant(node.lineno, place, f"{type(operator).__name__} -> {new.__name__}", _set_at("ops", index, new()))
        elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
            new = ARITHMETIC[type(node.op)]
            yield Mutant(node.lineno, place, f"{type(node.op).__name__} -> {new.__name__}", _set("op", new()))
        elif isinstance(node, ast.BoolOp):
            other: Any = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield Mutant(node.lineno, place, f"-> {type(other).__name__}", _set("op", other))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutant(node.lineno, place, "not dropped", _set("op", ast.UAdd()))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool, float):
            value: Any = (not node.value) if isinstance(node.value, bool) else node.value + 1
            yield Mutant(node.lineno, place, f"{node.value} -> {value}", _set("value", value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            name = FUNCTIONS[node.func.id]
            yield Mutant(node.lineno, place, f"{node.func.id} -> {name}", _call(name))


def _left_alone(node: ast.AST) -> List[ast.AST]:
    if isinstance(node, ast.Raise):
        return [node]
    if isinstance(node, (ast.AnnAssign, ast.arg)):
        return [node.annotation] if node.annotation is not None else []
    if isinstance(node, ast.FunctionDef):
        return [node.returns] if node.returns is not None else []
    return []


def _set(field: str, value: Any) -> Callable[[Any], None]:
    return lambda node: setattr(node, field, value)


def _set_at(field: str, index: int, value: Any) -> Callable[[Any], None]:
    return lambda node: getattr(node, field).__setitem__(index, value)


def _call(name: str) -> Callable[[Any], None]:
    def apply(node: Any) -> None:
        node.func.id = name
        if name == "list":
            node.keywords = []

    return apply


class _Loader:
    """Puts a changed tree in the place of one module."""

    def __init__(self, module: str, tree: ast.AST, path: str) -> None:
        self._module, self._tree, self._path = module, tree, path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._module:
            return None
        is_package = self._path.endswith("__init__.py")
        return importlib.util.spec_from_file_location(
            name, self._path, loader=self, submodule_search_locations=[os.path.dirname(self._path)] if is_package else None)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        exec(compile(self._tree, self._path, "exec"), module.__dict__)


def _in_child(work: Callable[[], Any], limit_s: int = CPU_SECONDS) -> Any:
    """What ``work`` returns in a process of its own, without anything it prints; None: it failed, or took more than ``limit_s``
    of the CPU."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(io.StringIO()):
            with contextlib.suppress(BaseException):
                os.write(write, pickle.dumps(work()))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as end:
        answer = end.read()
    os.waitpid(child, 0)
    return pickle.loads(answer) if answer else None


def survives(module: str, path: str, tree: ast.AST, tests: Sequence[str]) -> bool:
    """Whether all tests pass with a changed module that is loaded anew, as are all that read it."""
    def work() -> bool:
        import pytest

        for name in [name for name in sys.modules if name.split(".")[0] in ("whale_tf", "tests")]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Loader(module, tree, path))  # type: ignore[arg-type]
        return int(pytest.main(["-x", *OPTIONS, *tests])) == 0

    return bool(_in_child(work))


class _Fast:
    """Tries changes within functions on tests that are loaded already: puts new code into the function, and runs the tests that
    call it.  What was computed while the tests were loaded is the unchanged module's, so that only a failure counts.

    Attributes:
        callers: first line of an outermost function -> places of the tests that call it, those that failed before first.
    """

    def __init__(self, module: str, path: str, tree: ast.AST) -> None:
        self._path, self._namespace = path, sys.modules[module].__dict__
        self._functions = dict(_outermost(tree, ()))
        self.items: List[Any] = []
        self.callers: Dict[int, List[int]] = {}

    def listen(self, items: List[Any]) -> None:
        self.items = items
        for place, lines in enumerate(_in_child(self._called, resource.RLIM_INFINITY)):
            for first in {self._first(line) for line in lines}:
                self.callers.setdefault(first, []).append(place)

    def _called(self) -> List[Set[int]]:
        found = []
        for item in self.items:
            lines: Set[int] = set()

            def trace(frame: Any, event: str, argument: Any, lines: Set[int] = lines) -> None:
                if frame.f_code.co_filename == self._path:
                    lines.add(frame.f_code.co_firstlineno)

            sys.settrace(trace)
            passes = _passes(item)
            sys.settrace(None)
            found.append(lines if passes else set())  # what fails without any change says nothing about one
        return found

    def _first(self, line: int) -> int:
        """The first line of the outermost function around a line; 0: none."""
        return next((first for first, (end, _) in self._functions.items() if first <= line <= end), 0)

    def notices(self, mutant: Mutant, changed: ast.AST) -> bool:
        """Whether a test fails."""
        first = self._first(mutant.line)
        if first not in self.callers:
            return False
        code, function, places = compile(changed, self._path, "exec"), None, self.callers[first]  # type: Any, Any, List[int]
        for part in self._functions[first][1]:
            code = next(c for c in code.co_consts if getattr(c, "co_name", None) == part)
            function = self._namespace[part] if function is None else vars(function)[part]
        for wrapper in ("fget", "__func__", "__wrapped__"):
            function = getattr(function, wrapper, None) or function
        if function.__code__.co_firstlineno != first or code.co_firstlineno != first:
            return False  # another function of the same name

        def work() -> int:
            function.__code__ = code
            return next((place for place in places if not _passes(self.items[place])), -1)

        failed = _in_child(work)
        if failed is not None and failed >= 0:
            places.remove(failed)
            places.insert(0, failed)
        return failed is None or failed >= 0


def _outermost(tree: ast.AST, scope: Tuple[str, ...]) -> Iterator[Tuple[int, Tuple[int, Tuple[str, ...]]]]:
    """(first line of the body, (last line, name within the module)) of functions that stand in no other."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield first, (node.end_lineno or node.lineno, (*scope, node.name))
        elif isinstance(node, ast.ClassDef):
            yield from _outermost(node, (*scope, node.name))


def _passes(item: Any) -> bool:
    from _pytest.runner import runtestprotocol

    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def run(module: str, tests: Sequence[str], show: bool) -> Tuple[int, List[str]]:
    """How many changes were tried, and those that no test noticed."""
    import pytest

    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None
    path = found.origin
    source = Path(path).read_text(encoding="utf8")
    tree, lines, survivors, count, ended = ast.parse(source), source.splitlines(), [], 0, False
    if not survives(module, path, tree, tests):
        raise SystemExit(f"{module}: its tests fail without any change: {' '.join(tests)}")
    importlib.import_module(module)
    fast = _Fast(module, path, tree)

    class Loop:
        def pytest_runtestloop(self, session: Any) -> bool:
            nonlocal count, ended
            fast.listen(session.items)
            for mutant in mutants(tree):
                changed = copy.deepcopy(tree)
                for place, node in enumerate(ast.walk(changed)):
                    if place == mutant.place:
                        mutant.apply(node)
                count += 1
                text = lines[mutant.line - 1].strip()
                if (module, f"{text}  # {mutant.about}") not in EQUIVALENT and not fast.notices(mutant, changed) and survives(
                        module, path, changed, tests):
                    survivors.append(f"{module}:{mutant.line}  {mutant.about}" + (f"\n    {text}" if show else ""))
            ended = True
            return True

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        pytest.main([*OPTIONS, *tests], plugins=[Loop()])
    if not ended:
        raise SystemExit(f"{module}: the run broke off\n{output.getvalue()}")
    return count, survivors


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", help="those to change; default: all targets")
    parser.add_argument("--show", action="store_true", help="print the line of each survivor")
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    import networkx  # noqa: F401 every child would load it
    import pytest  # noqa: F401

    everything, left = 0, 0
    for module in given.modules or TARGETS:
        began = time.monotonic()
        count, survivors = run(module, TARGETS[module], given.show)
        everything, left = everything + count, left + len(survivors)
        print(f"{module}: {count} changes, {len(survivors)} survive, {time.monotonic() - began:.0f} s", flush=True)
        for survivor in survivors:
            print("  " + survivor, flush=True)
    print(f"{everything} changes, {left} survive")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
