"""The variable that a culprit's line puts the blame on: ``count`` of ``mean_loss = loss / count``."""

from __future__ import annotations

import ast
import warnings

_LIBRARIES = {"torch", "nn", "F", "functional", "np", "numpy", "math", "linalg", "special", "fft"}
_OWN = {"self", "cls"}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_OPENERS = {")": "_(", "]": "[", "}": "{"}
_SECOND = {"div", "reciprocal", "nll_loss", "nll_loss2d", "xlogy"}
"""Operations whose second operand is the one at fault: the divisor, the target."""


def guilty_variable(source: str, columns: tuple[int, int], op: str) -> str:
    """An identifier of the source; empty where none can be told.

    Args:
        source: the guilty line, stripped or not; it may be part of a longer statement.
        columns: the first and last character in the whole line, counted from 1, of the expression that ran; (0, 0)
            where unknown.
        op: the operation's short name, such as ``div``.
    """
    tree = _parse(source.strip())
    if tree is None:
        return ""
    found = _subject(_operand(_by_columns(tree, columns) or _by_op(tree, op) or _value(tree), op))
    return found or next((_subject(node.targets[0]) for node in ast.walk(tree) if isinstance(node, ast.Assign)), "")


def _parse(line: str) -> ast.AST | None:
    """The line as a tree, also where it is only the beginning, the middle or the end of a statement."""
    line = line.removeprefix("else:").strip()
    if line.startswith("elif"):
        line = line[2:]
    closed = _balanced(line)
    for text in (line, f"{line} pass", closed, f"{closed} pass", _balanced(f"_ {line}"), closed.rstrip("+-*/@, ")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about strings and comparisons in somebody else's code
                return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _balanced(line: str) -> str:
    opened: list[str] = []
    before = ""
    for sign in line:
        if sign in _CLOSERS:
            opened.append(_CLOSERS[sign])
        elif opened and sign == opened[-1]:
            opened.pop()
        elif sign in _OPENERS:
            before = _OPENERS[sign] + before
    return before + line + "".join(reversed(opened))


def _by_columns(tree: ast.AST, columns: tuple[int, int]) -> ast.AST | None:
    """The expression as long as the columns say; the line's indentation is not known, but is probably by fours."""
    first, width = columns[0] - 1, columns[1] - columns[0] + 1
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.AugAssign)
        and (node.end_col_offset or 0) - node.col_offset == width
        and node.col_offset <= first
    ]
    return min(found, key=lambda node: (first - node.col_offset) % 4 != 0, default=None)


def _by_op(tree: ast.AST, op: str) -> ast.AST | None:
    for node in ast.walk(tree):
        if op in ("div", "reciprocal") and isinstance(getattr(node, "op", None), ast.Div):
            return node
        if isinstance(node, ast.Call) and _last_name(node.func).rstrip("_") == op:
            return node
    return None


def _value(tree: ast.AST) -> ast.AST:
    """What the first statement computes."""
    statement = next(ast.iter_child_nodes(tree), tree)
    return getattr(statement, "value", None) or getattr(statement, "test", None) or statement


def _operand(node: ast.AST, op: str) -> ast.AST:
    """The part of the operation that is at fault."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.right if isinstance(node, ast.BinOp) else node.value
    if isinstance(node, ast.Call) and op in _SECOND:
        if len(node.args) > 1:
            return node.args[1]
        if node.args and _is_method(node.func) and _last_name(node.func).startswith("div"):
            return node.args[0]
    return node


def _subject(node: ast.AST) -> str:
    """The variable that an expression is about."""
    if isinstance(node, ast.Name):
        return "" if node.id in _LIBRARIES | _OWN else node.id
    if isinstance(node, ast.Attribute):
        return "" if _last_name(node.value) in _LIBRARIES else node.attr
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return key if isinstance(key, str) and key.isidentifier() else _subject(node.value)
    if isinstance(node, ast.Call):
        own = isinstance(node.func, ast.Attribute) and _last_name(node.func.value) in _OWN
        parts = [node.func] if own else [node.func.value] if _is_method(node.func) else []  # type: ignore[attr-defined]
        return _first([*parts, *node.args]) or _last_name(node.func)
    return _first(list(ast.iter_child_nodes(node)))


def _first(nodes: list[ast.AST]) -> str:
    """The subject of the first node that has one; a word is preferred to a letter."""
    names = [name for node in nodes if (name := _subject(node))]
    return next((name for name in names if len(name) > 1), names[0] if names else "")


def _is_method(function: ast.AST) -> bool:
    return isinstance(function, ast.Attribute) and _last_name(function.value) not in _LIBRARIES


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
