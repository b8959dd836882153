"""``.. public:: MODULE``: the public names of a module of whale_tf with their docstrings, for the pages of ``docs/api``.

The source is read and not run (griffe), so that the site is built where TensorFlow is not installed.
"""
from __future__ import annotations

import ast
import os
import textwrap
from typing import Any, Dict, Iterator, List, Set

import griffe
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.docutils import SphinxDirective

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PARAMETERS = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}


def whole_package() -> griffe.Object:
    return griffe.load("whale_tf", search_paths=[ROOT], allow_inspection=False)  # type: ignore[return-value]


def public_names(module: griffe.Object) -> List[str]:
    """The names of ``__all__``; without one, what the module itself defines."""
    if "__all__" not in module.members:
        return [name for name, member in module.members.items() if not name.startswith("_") and not member.is_alias]
    return sorted(_strings(ast.parse(str(module.members["__all__"].value), mode="eval").body, module))


def _strings(tree: ast.expr, module: griffe.Object) -> Iterator[str]:
    """``["a", "b"] + list(_NAMES)``, where ``_NAMES`` is a tuple of the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Name) and node.id in module.members:
            yield from _strings(ast.parse(str(module.members[node.id].value), mode="eval").body, module)


class Public(SphinxDirective):
    """All public names, or with an option only the errors among them, or only the others."""

    required_arguments = 1
    option_spec = {"errors": directives.flag, "without-errors": directives.flag}

    def run(self) -> List[nodes.Node]:
        package: griffe.Object = self.env.app.whale_package  # type: ignore[attr-defined]
        name = self.arguments[0]
        module = package if name == "whale_tf" else package[name[len("whale_tf."):]]
        path = os.path.join(ROOT, *name.split("."))
        for folder, _, files in os.walk(path):  # a changed docstring is a changed page
            for file in files:
                if file.endswith(".py"):
                    self.env.note_dependency(os.path.join(folder, file))
        lines = [f".. py:{'currentmodule' if 'errors' in self.options else 'module'}:: {name}", ""]
        if "errors" not in self.options and name != "whale_tf":
            lines += self._docstring(module, "module", name) + [""]
        names = {each: self._meant(each, module, package) for each in public_names(module)}
        for each, found in sorted(names.items(), key=lambda item: (not item[1].is_function, item[1].is_attribute)):
            is_error = found.is_class and found.path.startswith("whale_tf.errors.")
            if is_error if "without-errors" in self.options else not is_error if "errors" in self.options else False:
                continue
            lines += self._described(each, found, name, module) + [""]
        return self.parse_text_to_nodes("\n".join(lines), offset=self.content_offset)

    @staticmethod
    def _meant(name: str, module: griffe.Object, package: griffe.Object) -> Any:
        found = module.members[name].final_target if module.members[name].is_alias else module.members[name]
        # whale_tf.parallelize is a function, which hides the module of that name
        return package["api"].members[name] if found.is_module else found

    def _described(self, name: str, found: Any, module: str, parent: Any) -> List[str]:
        full = f"{module}.{name}"
        if found.is_function:
            return self._directive("function", name + _signature(found), self._docstring(found, "function", full))
        if found.is_attribute:
            value = str(found.value)
            text = [f"Another name of :func:`~{module}.{value}`."] if value in parent.members else [
                "", "::", "", "   " + value, ""]
            return self._directive("data", name, self._docstring(found, "data", full) or text)
        bases = [str(base) for base in found.bases]
        is_error = found.path.startswith("whale_tf.errors.")
        body = [f"Base{'s' if len(bases) > 1 else ''}: {', '.join(f'``{base}``' for base in bases)}", ""] if bases else []
        body += self._docstring(found, "exception" if is_error else "class", full) + [""]
        if not is_error:
            for inner, member in found.members.items():
                if not inner.startswith("_") and not member.is_alias:
                    body += self._member(inner, member, full) + [""]
        return self._directive("exception" if is_error else "class", name + ("" if is_error else _made(found)), body)

    def _member(self, name: str, member: Any, owner: str) -> List[str]:
        text = self._docstring(member, "method", f"{owner}.{name}")
        if member.is_attribute and "property" in member.labels:
            return self._directive("property", name, text, f":type: {member.annotation}" if member.annotation else "")
        if not member.is_function:
            return []  # fields are in the docstring of their class
        kind = next((label for label in ("classmethod", "staticmethod") if label in member.labels), "")
        head = name + _signature(member, skip_first=kind != "staticmethod")
        return self._directive("method", head, text, f":{kind}:" if kind else "")

    @staticmethod
    def _directive(kind: str, head: str, body: List[str], option: str = "") -> List[str]:
        options = ["   " + option] if option else []
        return [f".. py:{kind}:: {head}", *options, "", *textwrap.indent("\n".join(body), "   ").split("\n")]

    def _docstring(self, found: Any, what: str, name: str) -> List[str]:
        if found.docstring is None:
            return []
        return GoogleDocstring(found.docstring.value, self.config, self.env.app, what, name).lines()


def _made(found: Any) -> str:
    """The arguments that make an object of a class."""
    if "__init__" in found.members:
        return _signature(found.members["__init__"])
    if not any(str(base) == "NamedTuple" for base in found.bases):
        return ""
    fields = [member for member in found.members.values() if member.is_attribute and "property" not in member.labels]
    return "({})".format(", ".join(
        f"{field.name}: {field.annotation}" + (f" = {field.value}" if field.value is not None else "") for field in fields))


def _signature(function: Any, skip_first: bool = False) -> str:
    parts: List[str] = []
    seen: Set[Any] = set()
    given = [parameter for parameter in function.parameters if parameter.name not in ("self", "cls")] if (
        skip_first or function.name == "__init__") else list(function.parameters)
    for parameter in given:
        if parameter.kind is griffe.ParameterKind.keyword_only and not seen & {
                griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional}:
            parts.append("*")
        seen.add(parameter.kind)
        text = PARAMETERS.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and parameter.kind not in PARAMETERS:
            text += f" = {parameter.default}"
        parts.append(text)
    returns = f" -> {function.returns}" if function.returns is not None and function.name != "__init__" else ""
    return f"({', '.join(parts)}){returns}"


def _load(app: Sphinx) -> None:
    app.whale_package = whole_package()  # type: ignore[attr-defined]


def setup(app: Sphinx) -> Dict[str, Any]:
    app.add_directive("public", Public)
    app.connect("builder-inited", _load)
    return {"parallel_read_safe": False}
