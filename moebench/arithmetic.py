"""Formulas in data files: numbers, names, + - * / // and brackets, computed without running any code.

Knows no names of its own and no units.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from moebench.errors import UsageError

Number = int | float
OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
LONGEST = 500  # characters of a formula


def evaluate(formula: object, names: Mapping[str, Number]) -> Number:
    """The value of a formula, whole numbers exactly; raises ``UsageError`` naming what it cannot be made of."""
    text = str(formula) if isinstance(formula, int | float) and not isinstance(formula, bool) else formula
    if not isinstance(text, str) or len(text) > LONGEST:
        raise UsageError(f"{str(text)[:60]!r} is not a formula of at most {LONGEST} characters")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, names)
    except UsageError as error:
        raise UsageError(f"formula {text!r}: {error}") from None
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise UsageError(f"formula {text!r} cannot be computed: {str(error) or type(error).__name__}") from None


def whole(formula: object, names: Mapping[str, Number]) -> int:
    """The value of a formula, cut to a whole number, at least 0."""
    value = evaluate(formula, names)
    if not 0 <= value < float("inf"):
        raise UsageError(f"formula {formula!r} gives {value}, which counts nothing")
    return int(value)


def _value(node: ast.expr, names: Mapping[str, Number]) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise UsageError(f"unknown name {node.id!r}; valid: {', '.join(sorted(names))}")
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    raise UsageError("only numbers, names, + - * / // and brackets may stand in it")
