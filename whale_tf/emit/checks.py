"""What the step itself checks of a mini-batch, because sizes are known only when it runs, and what the checks say."""

from __future__ import annotations

import re
from typing import Sequence, Union

from whale_tf._tf_compat import tf
from whale_tf.graph_editor.nodes import Nodes

_NOT_EXAMPLES = "if the rows of {!r} are not examples, say so with wh.batch_axis(tensor, None)"
_TOO_FEW = ("whale_tf: the mini-batch has fewer examples{} than the {} parts it is divided into; use a larger batch, drop the "
            "remainder, or use fewer micro-batches{}. Examples:")
_OTHER_ROWS = "whale_tf: {!r} does not have the rows of the mini-batch; {}. Rows:"
_FOUND = r"\] \[(\d+)\]"  # what Assert appends
_SIZES = "whale_tf sizes: "  # begins a message; {0} and {1} stand for the sizes that were compared
_ADDED = re.compile(r"\[\[(?:\{\{node |node )?whale(?:_\d+)?/")  # TensorFlow names an op that the rewrite added
_NODE = re.compile(r"\{\{node ([^}]*)\}\}|\[\[(?:node )?([^\s\]{]+)")
_CLONE = re.compile(r"^whale(?:_\d+)?/(?:g\d+(?:_m\d+)?_r\d+|section)/(?:t\d+_(?:forward|backward)\w*/)?")
_SIZE_WORDS = re.compile(r"shape|dimension|size|rank|length|number of|broadcast|split|compatible", re.IGNORECASE)
_NO_DEVICE = "Cannot assign a device"
_OWN = re.compile(r"assertion failed|Tensor had (?:NaN|-?Inf)|Traceback \(", re.IGNORECASE)  # found by the script's own checks
_CHECK = ("Check that inputs whose rows are combined one by one have the same number of rows, and declare with "
          "wh.batch_axis(tensor, None) inputs whose rows are not examples; verify: \"first_step\" shows the first tensor that "
          "differs from the local script")
_CANCELLED = re.compile(r"RecvAsync is cancelled|Function was cancelled before it was started|^\[_Derived_\]$")
_REPORTED_SIZES = re.compile(_SIZES + "(.*?)" + _FOUND + r" \[(\d+)\]", re.DOTALL)
_REPORTED_FEW = re.compile(_TOO_FEW.format(r"( \(.*? each\))?", r"(\d+)", "(; .*?)?") + _FOUND)
_REPORTED_ROWS = re.compile(_OTHER_ROWS.replace("{!r}", "{}").format("('.*?')", "(.*?)") + _FOUND + r" \[(\d+)\]")


def at_least(parts: int) -> str:
    return (f"use a batch size of at least {parts}, and leave out a last mini-batch that is smaller "
            "(dataset.batch(n, drop_remainder=True))")


def check_examples(nodes: Nodes, sizes: str, total: str, count: int, source: str, rows: int, is_computed: bool, scope: str,
                   device: str) -> str:
    """An op that fails if a part would get no example.

    Args:
        sizes: examples of each part: int32 `[count]`.
        total: examples of the mini-batch.
        source: name of the input that is divided, with ``rows`` rows for each example.
        is_computed: a Python function (or a table) returned it.
    """
    everything = nodes.const([0], scope + "/all", tf.int32, device)
    least = nodes.add("Min", scope + "/least", [sizes, everything], device, T=tf.int32, Tidx=tf.int32, keep_dims=False)
    one = nodes.const(1, scope + "/one", tf.int32, device)
    enough = nodes.add("GreaterEqual", scope + "/enough", [least, one], device, T=tf.int32)
    each = f" ({rows} rows of {source!r} each)" if rows > 1 else ""
    hint = f"; {_NOT_EXAMPLES.format(source)}" if is_computed else ""
    return _assert(nodes, enough, _TOO_FEW.format(each, count, hint), [total], scope, device)


def check_rows(nodes: Nodes, source: str, dim: int, dtype: tf.DType, rows: Union[int, str], scope: str, device: str) -> str:
    """An op that fails if a Python function returned another number of rows than the mini-batch has: ``rows``, or the scalar of
    that name."""
    shape = nodes.shape(source, scope + "/shape", dtype, device)
    found = nodes.slice_dim(shape, 0, 1, dim, 1, scope + "/found", tf.int32, device)
    expected = rows if isinstance(rows, str) else nodes.const(rows, scope + "/expected", tf.int32, device)
    same = nodes.add("Equal", scope + "/same", [found, expected], device, T=tf.int32)
    everything = nodes.const([0], scope + "/all", tf.int32, device)
    right = nodes.add("All", scope + "/right", [same, everything], device, Tidx=tf.int32, keep_dims=False)
    return _assert(nodes, right, _OTHER_ROWS.format(source, _NOT_EXAMPLES.format(source)), [found, expected], scope, device)


def check_equal(nodes: Nodes, one: str, other: str, message: str, scope: str, device: str) -> str:
    """An op that fails if two int32 scalars differ.

    Args:
        message: what is wrong, in which ``{0}`` and ``{1}`` stand for the two values.
    """
    same = nodes.add("Equal", scope + "/same", [one, other], device, T=tf.int32)
    return _assert(nodes, same, _SIZES + message, [one, other], scope, device)


def _assert(nodes: Nodes, is_right: str, message: str, values: Sequence[str], scope: str, device: str) -> str:
    text = nodes.const(message, scope + "/message", tf.string, device)
    types = [tf.string] + [tf.int32] * len(values)
    return nodes.add("Assert", scope + "/check", [is_right, text, *values], device, T=types, summarize=3)


def reported(text: str) -> str:
    """What a check found, without all that TensorFlow says around it.

    Args:
        text: of TensorFlow's error; the result is empty if it is another one.
    """
    text = text.replace("\\'", "'")  # Assert escapes quotation marks
    sizes = _REPORTED_SIZES.search(text)
    if sizes is not None:
        return sizes.group(1).replace("{0}", sizes.group(2)).replace("{1}", sizes.group(3))
    few = _REPORTED_FEW.search(text)
    if few is not None:
        each, parts, hint, batch = few.groups()
        return (f"a mini-batch of {batch} examples{each or ''} does not divide over {parts} parts; "
                f"{at_least(int(parts))}{hint or ''}")
    other = _REPORTED_ROWS.search(text)
    if other is None:
        return ""
    source, fix, found, rows = other.groups()
    return f"{source} has {found} rows, but the mini-batch has {rows}; {fix}"


def misfit(text: str) -> str:
    """A sentence about an op in a part of the mini-batch whose operands do not fit each other.

    Args:
        text: of TensorFlow's error; the result is empty if it is about something else, such as an assertion of the script.
    """
    if _ADDED.search(text) is None:
        return ""
    head, _, _ = text.partition("[[")
    detail = next((line.strip() for line in reversed(head.splitlines()) if line.strip()), "")
    detail = re.sub(r"^\(\d+\) [A-Za-z_ ]+:\s*", "", re.sub(r"\{\{function_node [^}]*\}\}\s*", "", detail)).strip()
    if _CANCELLED.search(detail) is not None:
        return ("an op fails in a part of the mini-batch, and TensorFlow only says that others were cancelled; set emit to "
                f"'inline', so that it names the op. Most often, operands do not fit each other. {_CHECK}")
    if _OWN.search(head) is not None or _SIZE_WORDS.search(detail) is None or _NO_DEVICE in detail:
        return ""
    found = _NODE.search(text)
    name = "" if found is None else _CLONE.sub("", found.group(1) or found.group(2))
    return (f"op {name!r} fails in a part of the mini-batch, because its operands do not fit each other: {detail.rstrip('.')}. "
            f"{_CHECK}")
