"""The agent's one tool: exact arithmetic with +, -, *, / and parentheses."""

import ast
import operator
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200


def calculate(expression: str) -> str:
    """Compute an expression such as 2 * (3 + 4)."""
    try:
        return written(value(expression))
    except (ValueError, ArithmeticError) as error:
        return f"Error: {error}"


def value(expression: str) -> Fraction:
    """Return the exact value of an expression of numbers.

    Raises: ValueError: it is none; ZeroDivisionError: it divides by 0
    """
    if len(expression) > LONGEST:
        raise ValueError("the expression is too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no expression of numbers") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no expression of numbers")


def written(number: Fraction) -> str:
    """Return whole numbers without a point, others with at most ten digits."""
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.10g}"
