"""Reads JSON, given as text or as the path of a file, into records.

A :class:`Record` is a frozen dataclass that checks its fields on construction: plans, configurations, calibrations, model
profiles and cluster descriptions are records.  The reader is our own because no library both does this and installs with
every TensorFlow: pydantic requires newer typing_extensions than TensorFlow 2.4 to 2.13 allow; dacite stops at the first
problem, accepts ``true`` as a whole number, and does not locate problems inside a list.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import os
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type, TypeVar, Union, get_type_hints

from whale_tf._typing_compat import Literal
from whale_tf.errors import PlanError, WhaleError, nearest

_R = TypeVar("_R", bound="Record")
_Reader = Callable[[Any], Any]  # given value -> the field's value; raises Invalid
PICTURES = (".png", ".svg")
_REQUIRED: Any = object()  # the default of a field without one: lets required fields follow optional ones

_KINDS: Mapping[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def check_files(files: Dict[str, Optional[str]], pictures: Dict[str, Optional[str]]) -> None:
    """Check paths by their options before the work whose result they hold; None: not given.

    Raises:
        PlanError: a directory does not exist, a path is a directory, or the name of a picture ends in something else than
            :data:`PICTURES`.
    """
    for option, path in {**files, **pictures}.items():
        if path is None:
            continue
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise PlanError(f"{option} is {path!r}, but there is no directory {folder!r}; make it, or write elsewhere")
        if os.path.isdir(path):
            raise PlanError(f"{option} is {path!r}, which is a directory; add a file name")
    for option, path in pictures.items():
        if path is not None and not path.endswith(PICTURES):
            raise PlanError(f"{option} is {path!r}, expected a name that ends in {' or '.join(PICTURES)}")


def read_text(path: str, what: str, error: Type[WhaleError]) -> str:
    """The text of a file, called ``what`` in messages.  Raises ``error`` if it is not UTF-8."""
    try:
        with open(path, encoding="utf8") as handle:
            return handle.read()
    except UnicodeDecodeError as problem:
        raise error(f"{what} is not text in UTF-8 (byte {problem.start} is {problem.object[problem.start]:#04x}); save it as "
                    "UTF-8, or give another file") from None


def json_object(source: str, what: str, error: Type[WhaleError], fix: str = "") -> Dict[str, Any]:
    """The JSON object in ``source``: text that begins with ``{``, otherwise the path of a file.

    Args:
        what: ``plan``, ``config``, ...
        error: raised if the file does not exist or does not hold a JSON object.
        fix: where to get such a file; used if it does not exist.
    """
    text, origin = source, f"the {what}"
    if not source.lstrip().startswith("{"):
        origin = f"{what} file {source!r}"
        if not os.path.isfile(source):
            raise error(f"{origin} does not exist; {fix}")
        text = read_text(source, origin, error)
    return object_in(text, origin, error)


def object_in(text: str, origin: str, error: Type[WhaleError], hint: str = "") -> Dict[str, Any]:
    """The JSON object that a text holds.

    Args:
        origin: of the text, for messages.
        error: raised if it holds no JSON object, or one with two members of a name.
        hint: the end of messages.
    """
    try:
        value = json.loads(text, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as problem:
        raise error(f"{origin} is not valid JSON: {problem}{hint}") from None
    if not isinstance(value, dict):
        raise error(f"{origin} holds {value!r:.40}, expected an object{hint}")
    return value


def _each_once(pairs: Sequence[Tuple[str, Any]]) -> Dict[str, Any]:
    """The members of a JSON object.  Python's reader takes the last one of several with a name.

    Raises:
        ValueError: there are several.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is there twice; keep one")
    return found


class FieldProblem(NamedTuple):
    """A problem and its place, as keys and numbers from the outside in.  ``reason`` follows the place's name."""

    place: Tuple[Union[str, int], ...]
    reason: str


class Invalid(ValueError):
    """All problems with the values of a record."""

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, given: Any, expected: str) -> Invalid:
        return cls([FieldProblem((), f" is {given!r:.80}, expected {expected}")])

    def below(self, key: Union[str, int]) -> List[FieldProblem]:
        """The same problems, relative to the value that contains this one at ``key``."""
        return [FieldProblem((key,) + problem.place, problem.reason) for problem in self.problems]

    def text(self, whole: str) -> str:
        """All problems with their dotted places; ``whole`` names the record itself."""
        return "; ".join((".".join(map(str, problem.place)) or whole) + problem.reason for problem in self.problems)

    def __str__(self) -> str:
        return self.text("the value")


def field(default: Any = _REQUIRED, *, factory: Optional[Callable[[], Any]] = None, at_least: Optional[float] = None,
          above: Optional[float] = None, finite: bool = False, not_empty: bool = False, among: Sequence[str] = (),
          check: Optional[Callable[[Any], bool]] = None, expected: str = "", description: str = "") -> Any:
    """A record's field with limits beyond its type.  It is required if it has neither a default nor a default factory.

    Args:
        among: all values that are allowed.
        check: whether a value of the right type is allowed.
        expected: the allowed values in words, if type and bounds do not say it.
        description: text for the documentation.
    """
    if among:
        check, expected = among.__contains__, " or ".join(map(repr, among))
    metadata = dict(at_least=at_least, above=above, finite=finite, not_empty=not_empty, check=check, expected=expected,
                    description=description)
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Record:
    """Base of frozen dataclasses that check and convert their fields by annotation on construction: lists to tuples, JSON
    objects to records, whole numbers to floats, NumPy's numbers to Python's.  :func:`read` creates one from JSON.

    Raises:
        Invalid: holds all problems.
    """

    def __post_init__(self) -> None:
        wrong: List[FieldProblem] = []
        for item in _fields(type(self)):
            given = getattr(self, item.name)
            if given is item.default:
                if given is _REQUIRED:
                    wrong.append(FieldProblem((item.name,), f" is missing, expected {item.expected}"))
                continue
            try:
                value = item.reader(given)
            except Invalid as error:
                wrong += error.below(item.name)
                continue
            if value is not given:
                object.__setattr__(self, item.name, value)
        if wrong:
            raise Invalid(wrong)
        _as_problem(self.check)

    def check(self) -> None:
        """Raises ValueError if fields are inconsistent."""

    @classmethod
    def canonical(cls, values: Dict[str, Any]) -> Dict[str, Any]:
        """A JSON object with its short forms (units, derived defaults) expanded to fields.  Raises ValueError."""
        return values


def read(cls: Type[_R], data: Any, expected: str = "an object") -> _R:
    """A record from a parsed JSON document.  Raises Invalid with all problems."""
    if isinstance(data, cls):
        return data
    if not isinstance(data, Mapping):
        raise Invalid.of(data, expected)
    values = _as_problem(lambda: cls.canonical(dict(data)))
    fields = _fields(cls)
    names = [item.name for item in fields]
    wrong = [FieldProblem((key,), " is an unknown key" + _like(key, names)) for key in values if key not in names]
    try:
        made = cls(**{name: values.get(name, item.default) for name, item in zip(names, fields)
                      if name in values or item.default is _REQUIRED})
    except Invalid as error:
        raise Invalid(wrong + list(error.problems)) from None
    if wrong:
        raise Invalid(wrong)
    return made


def parsed(cls: Type[_R], source: Any, what: str, error: Type[WhaleError], fix: str = "") -> _R:
    """A record from a record, a mapping, JSON text or the path of a JSON file; for ``what`` and ``fix`` see :func:`json_object`.

    Raises:
        WhaleError: the class ``error``: unreadable, unknown or missing key, or a wrong value; the message names the place.
    """
    if isinstance(source, str):
        source = json_object(source, what, error, fix)
    try:
        return read(cls, source)
    except Invalid as problem:
        raise error(f"not a valid {what}: " + problem.text(f"the {what}")) from None


def plain(value: Any, defaults: bool = True, nulls: bool = True) -> Any:
    """A record as JSON objects and lists, optionally without fields at their defaults or null fields."""
    if isinstance(value, Record):
        rows = ((item, getattr(value, item.name)) for item in _fields(type(value)))
        return {item.name: plain(held, defaults, nulls) for item, held in rows
                if (defaults or held != item.default) and (nulls or held is not None)}
    if isinstance(value, dict):
        return {key: plain(held, defaults, nulls) for key, held in value.items()}
    if isinstance(value, (list, tuple)):  # of one type, as annotated
        return list(value) if value and type(value[0]) in _KINDS else [plain(held, defaults, nulls) for held in value]
    return value


def expectations(cls: Type[Record]) -> Dict[str, str]:
    """The values each field accepts, in words."""
    return {item.name: item.expected for item in _fields(cls)}


# ---- reading annotations ---------------------------------------------------------------------------------------------

class _Field(NamedTuple):
    name: str
    default: Any  # _REQUIRED if there is none
    expected: str  # accepted values, in words
    reader: _Reader


_FIELDS: Dict[type, List[_Field]] = {}


def _fields(cls: Type[Record]) -> List[_Field]:
    """The fields of a class, from its annotations; computed at first use."""
    if cls in _FIELDS:
        return _FIELDS[cls]
    hints, rows = get_type_hints(cls), []
    for item in dataclasses.fields(cls):
        if item.init:
            required = item.default is item.default_factory is dataclasses.MISSING
            expected = item.metadata.get("expected") or _words(hints[item.name], item.metadata)
            rows.append(_Field(item.name, _REQUIRED if required else item.default, expected,
                               _reader(hints[item.name], item.metadata, expected)))
    _FIELDS[cls] = rows
    return rows


def _parts(hint: Any) -> Tuple[Any, Tuple[Any, ...]]:
    """``Tuple[int, str]`` to ``tuple`` and ``(int, str)``; a type without parts to None and ``()``."""
    return getattr(hint, "__origin__", None), getattr(hint, "__args__", ())


def _words(hint: Any, limits: Mapping[str, Any]) -> str:
    """``Optional[int]`` with ``at_least=1`` is ``a whole number of at least 1, or null``."""
    origin, members = _parts(hint)
    if origin is Union:
        return ", or ".join(_words(member, limits) for member in members)
    if origin is Literal:
        return " or ".join(map(repr, members))
    if origin is tuple and Ellipsis not in members:
        return f"a list of {len(members)}"
    kind = _KINDS.get(hint, "a list" if origin is tuple else "an object")
    if hint in (int, float):
        least, bound = limits.get("at_least"), limits.get("above")
        return (kind.replace("a ", "a finite ", 1) if limits.get("finite") else kind) \
            + (f" of at least {least}" if least is not None else "") + (f" above {bound}" if bound is not None else "")
    return kind + " that is not empty" if limits.get("not_empty") else kind


def _reader(hint: Any, limits: Mapping[str, Any], expected: str) -> _Reader:
    origin, members = _parts(hint)
    if origin is Union:
        return _either([_reader(member, limits, expected) for member in members if member is not type(None)],
                       type(None) in members, expected)
    if origin is dict:
        reader = _mapping(_item_reader(members[1]), expected)
    elif origin is tuple:
        reader = _sequence(members, expected)
    elif origin is Literal:
        reader = _literal(members, expected)
    elif issubclass(hint, Record):
        reader = functools.partial(read, hint, expected=expected)
    else:
        reader = _scalar(hint, expected)
    return _limited(reader, limits, expected)


def _item_reader(hint: Any) -> _Reader:
    return _reader(hint, {}, _words(hint, {}))


def _scalar(kind: Any, expected: str) -> _Reader:
    wide = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)  # NumPy's numbers are instances of these

    def reader(value: Any) -> Any:
        if type(value) is kind:
            return value
        if not isinstance(value, wide) or isinstance(value, bool):
            raise Invalid.of(value, expected)
        try:
            return kind(value)
        except OverflowError:  # a whole number too large for a float
            raise Invalid.of(value, expected) from None

    return reader


def _literal(members: Sequence[Any], expected: str) -> _Reader:
    def reader(value: Any) -> Any:
        if not isinstance(value, str) or value not in members:
            raise Invalid.of(value, expected)
        return value

    return reader


def _limited(reader: _Reader, limits: Mapping[str, Any], expected: str) -> _Reader:
    """``reader``, followed by a check of its result against ``limits``.  A word in place of a number is not compared."""
    tests: List[Callable[[Any], Any]] = []
    if limits.get("at_least") is not None:
        tests.append(lambda value: isinstance(value, str) or value >= limits["at_least"])
    if limits.get("above") is not None:
        tests.append(lambda value: isinstance(value, str) or value > limits["above"])
    if limits.get("finite"):
        tests.append(math.isfinite)
    if limits.get("not_empty"):
        tests.append(len)
    if limits.get("check"):
        tests.append(limits["check"])
    if not tests:
        return reader

    def limited(given: Any) -> Any:
        value = reader(given)
        for test in tests:
            if not test(value):
                raise Invalid.of(given, expected)
        return value

    return limited


def _either(readers: Sequence[_Reader], optional: bool, expected: str) -> _Reader:
    def reader(value: Any) -> Any:
        if optional and value is None:
            return None
        if len(readers) == 1:
            return readers[0](value)  # its problems give the place inside
        for one in readers:
            try:
                return one(value)
            except Invalid:
                pass
        raise Invalid.of(value, expected)

    return reader


def _sequence(members: Sequence[Any], expected: str) -> _Reader:
    """``Tuple[int, ...]`` of any length, ``Tuple[int, int]`` of two."""
    item, length = members[0], None if Ellipsis in members else len(members)
    assert length is None or set(members) == {item}, f"items of different types: {members}"
    read_item, as_it_is = _item_reader(item), {item} & set(_KINDS)

    def reader(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or length not in (None, len(value)):
            raise Invalid.of(value, expected)
        if {held.__class__ for held in value} <= as_it_is:
            return tuple(value)
        found, wrong = [], []
        for number, held in enumerate(value):
            try:
                found.append(read_item(held))
            except Invalid as error:
                wrong += error.below(number)
        if wrong:
            raise Invalid(wrong)
        return tuple(found)

    return reader


def _mapping(read_item: _Reader, expected: str) -> _Reader:
    def reader(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Invalid.of(value, expected)
        found, wrong = {}, []
        for key, held in value.items():
            if not isinstance(key, str):
                wrong.append(FieldProblem((key,), " is a key, expected text"))
                continue
            try:
                found[key] = read_item(held)
            except Invalid as error:
                wrong += error.below(key)
        if wrong:
            raise Invalid(wrong)
        return found

    return reader


def _like(key: Any, names: Sequence[str]) -> str:
    near = nearest(str(key), names)
    return f" (did you mean {near!r}?)" if near else ""


def _as_problem(step: Callable[[], Any]) -> Any:
    """The result of a record's ``check`` or ``canonical``; its ValueError becomes a problem of the whole record."""
    try:
        return step()
    except Invalid:
        raise
    except ValueError as error:
        raise Invalid([FieldProblem((), f": {error}")]) from None
