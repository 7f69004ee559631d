"""The tool: plain Python with type hints and a docstring, from which its schema is made."""

import ast
import operator

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> str:
    """Calculates.

    Args:
        expression: whole numbers with +, - and *.
    """
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            result: int = _OPERATIONS[type(op)](_value(left), _value(right))
            return result
    raise ValueError("only whole numbers with +, - and *")
