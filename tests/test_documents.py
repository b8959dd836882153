"""Records: what is taken and converted, every refusal with its place, and the way back to JSON."""
from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np
import pytest

from whale_tf._typing_compat import Literal
from whale_tf.documents import Invalid, Record, expectations, field, plain, read


@dataclasses.dataclass(frozen=True)
class Link(Record):
    latency_s: float = field(at_least=0, finite=True)
    name: str = ""

    @classmethod
    def canonical(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        if "latency_us" in values:
            if "latency_s" in values:
                raise ValueError("latency_s and latency_us say the same thing; keep one")
            values["latency_s"] = values.pop("latency_us") * 1e-6
        return values


@dataclasses.dataclass(frozen=True)
class Node(Record):
    count: int = field(1, at_least=1)
    devices: Tuple[str, ...] = field(not_empty=True)
    rows: Tuple[Tuple[int, ...], ...] = ()
    points: Tuple[Tuple[float, float], ...] = field((), check=lambda points: points != ((0, 0),), expected="no empty point")
    links: Tuple[Link, ...] = ()
    by_name: Dict[str, Link] = field(factory=dict)
    best: Optional[Link] = None
    share: Optional[float] = field(None, above=0)
    kind: Literal["CPU", "GPU"] = "GPU"
    search: Union[bool, Literal["amp"]] = False
    on: bool = True

    def check(self) -> None:
        if len(self.rows) > len(self.devices):
            raise ValueError(f"{len(self.rows)} rows for {len(self.devices)} devices")


FULL = {"count": 2, "devices": ["a", "b"], "rows": [[1, 2], []], "points": [[1.0, 2.5]],
        "links": [{"latency_s": 1.0, "name": "x"}], "by_name": {"y": {"latency_s": 0.0, "name": ""}},
        "best": {"latency_s": 3.0, "name": ""}, "share": 0.5, "kind": "CPU", "search": "amp", "on": False}


def problems(data: Any) -> List[str]:
    with pytest.raises(Invalid) as caught:
        read(Node, data)
    return caught.value.text("the node").split("; ")


def test_there_and_back() -> None:
    node = read(Node, FULL)
    assert node.rows == ((1, 2), ()) and node.links == (Link(1.0, "x"),) and node.by_name["y"].latency_s == 0
    assert plain(node) == FULL and list(plain(node)) == list(FULL), "in the order of the fields"
    assert read(Node, plain(node)) == node == read(Node, node) == copy.deepcopy(node) == pickle.loads(pickle.dumps(node))
    small = read(Node, {"devices": ["a"]})
    assert plain(small, defaults=False) == {"devices": ["a"], "by_name": {}}
    assert "best" in plain(small) and not {"best", "share"} & set(plain(small, nulls=False))


def test_values_become_what_the_annotations_say() -> None:
    given: Dict[str, Any] = {"count": np.int64(3), "devices": ["a"], "points": [[1, np.float32(2)]], "share": np.float64(1),
                             "best": {"latency_us": 5000}}
    for node in (read(Node, given), Node(**given)):
        assert (type(node.count), type(node.share), node.devices, node.best) == (int, float, ("a",), Link(0.005))
        assert [type(number) for number in node.points[0]] == [float, float]
    assert isinstance(Link(3).latency_s, float)


def test_every_problem_with_its_place() -> None:
    wrong = {"coun": 1, "count": 0, "rows": [[1], ["x", 2.0], 3], "points": [[1, 2, 3]],
             "links": [{"latency_s": -1, "nme": ""}, 4, {}], "by_name": {"y": {"latency_s": float("inf")}},
             "best": {"name": None}, "share": 0, "kind": "TPU", "search": "map", "on": 1}
    assert problems(wrong) == [
        "coun is an unknown key (did you mean 'count'?)",
        "count is 0, expected a whole number of at least 1",
        "devices is missing, expected a list that is not empty",
        "rows.1.0 is 'x', expected a whole number", "rows.1.1 is 2.0, expected a whole number", "rows.2 is 3, expected a list",
        "points.0 is [1, 2, 3], expected a list of 2",
        "links.0.nme is an unknown key (did you mean 'name'?)", "links.0.latency_s is -1, expected a finite number of at least 0",
        "links.1 is 4, expected an object", "links.2.latency_s is missing, expected a finite number of at least 0",
        "by_name.y.latency_s is inf, expected a finite number of at least 0",
        "best.latency_s is missing, expected a finite number of at least 0", "best.name is None, expected text",
        "share is 0, expected a number above 0, or null", "kind is 'TPU', expected 'CPU' or 'GPU'",
        "search is 'map', expected true or false, or 'amp'", "on is 1, expected true or false"]


@pytest.mark.parametrize("change, problem", [
    ({"count": True}, "count is True, expected a whole number of at least 1"),
    ({"count": "1"}, "count is '1', expected a whole number of at least 1"),
    ({"count": 1.0}, "count is 1.0, expected a whole number of at least 1"),
    ({"share": True}, "share is True, expected a number above 0, or null"),
    ({"share": float("nan")}, "share is nan, expected a number above 0, or null"),
    ({"share": 10 ** 400}, "share is 1" + "0" * 79 + ", expected a number above 0, or null"),
    ({"devices": []}, "devices is [], expected a list that is not empty"),
    ({"devices": "ab"}, "devices is 'ab', expected a list that is not empty"),
    ({"rows": [[True]]}, "rows.0.0 is True, expected a whole number"),
    ({"rows": None}, "rows is None, expected a list"),
    ({"points": [[0, 0]]}, "points is [[0, 0]], expected no empty point"),
    ({"by_name": [1]}, "by_name is [1], expected an object"),
    ({"by_name": {3: {"latency_s": 1}}}, "by_name.3 is a key, expected text"),
    ({"best": 3}, "best is 3, expected an object, or null"),
    ({"kind": ["CPU"]}, "kind is ['CPU'], expected 'CPU' or 'GPU'"),
    ({"search": 1}, "search is 1, expected true or false, or 'amp'"),
    ({"links": [{"latency_s": 1, "latency_us": 1}]}, "links.0: latency_s and latency_us say the same thing"),
    ({"rows": [[], [], []]}, "the node: 3 rows for 2 devices"),
])
def test_one_problem(change: Dict[str, Any], problem: str) -> None:
    assert problems(dict(FULL, **change))[0] == problem


def test_not_an_object() -> None:
    assert problems([1]) == ["the node is [1], expected an object"]


def test_replaced_and_made_values_are_checked_too() -> None:
    node = read(Node, FULL)
    assert dataclasses.replace(node, rows=[[3]]).rows == ((3,),)
    for make in (lambda: dataclasses.replace(node, count=0), lambda: Node(count=0, devices=("a",)), lambda: Node()):
        with pytest.raises(ValueError, match="expected a "):
            make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.count = 3  # type: ignore[misc]


def test_what_fields_take_in_words() -> None:
    assert expectations(Link) == {"latency_s": "a finite number of at least 0", "name": "text"}
