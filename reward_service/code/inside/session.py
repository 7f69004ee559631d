"""Carries out, next to the program, what its tests have asked of it elsewhere, and puts the results out.

Input: `{"ops": [...]}`, see `link.py`. Output: a row `{"loaded": true}`, and a row for each result. A result that has
no words stays here, and is named by its number.
"""

from __future__ import annotations

import builtins
import json
import operator
import sys
from typing import Any

from loading import load_solution, private_channel, put
from values import decode, encode, plain

_OPERATORS = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")
}

_ASKED: dict[str, Any] = {"len": len, "text": str, "words": repr, "list": list, "truth": bool, "next": next}


class _Missing:
    """A name that the program lacks."""


class _Session:
    def __init__(self, module: Any) -> None:
        self._module = module
        self._results: list[Any] = []
        self._kept: list[Any] = []

    def carry_out(self, op: list[Any]) -> Any:
        """The result of one operation, in words."""
        try:
            result = self._result(op[0], op[1:])
        except BaseException as error:  # noqa: BLE001  # the tests are told
            self._results.append(None)
            return {"e": {"names": _names(type(error)), "text": _text(error)}}
        self._results.append(result)
        if result is _Missing:
            return {"m": 1}
        try:
            return encode(result, self._other)
        except RecursionError:
            return self._keep(result)

    def _result(self, kind: str, given: list[Any]) -> Any:
        if kind == "get":
            return getattr(self._module, given[0], _Missing)
        value, *arguments = (decode(text, self._kept_or_result) for text in given)
        if kind == "call":
            return value(*arguments[0], **arguments[1])
        if kind == "attribute":
            return getattr(value, arguments[0])
        if kind == "item":
            return value[arguments[0]]
        if kind == "instance":
            return bool(isinstance(arguments[0], value))
        if kind == "put":
            return operator.setitem(value, *arguments)
        if kind == "set":
            return setattr(value, *arguments)
        if kind in _OPERATORS:
            return _OPERATORS[kind](value, arguments[0])
        return _ASKED[kind](value)

    def _kept_or_result(self, named: dict[str, Any]) -> Any:
        ((name, number),) = named.items()
        return self._results[number] if name == "o" else self._kept[number]

    def _other(self, value: Any) -> Any:
        as_base = plain(value)
        return self._keep(value) if as_base is value else encode(as_base, self._other)

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        number = len(self._kept) - 1
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"x": {"names": _names(value), "r": number}}
        return {"r": number}


def _names(kind: type) -> list[str]:
    """Names of an exception's class and of its bases; of those, only Python's own are known elsewhere."""
    return [
        base.__name__ if base is getattr(builtins, base.__name__, None) or number == 0 else f".{base.__name__}"
        for number, base in enumerate(kind.__mro__[:-1])
    ]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception:  # noqa: BLE001  # the program's own class
        return ""


def main() -> None:
    """Reads, loads, carries out."""
    ops = json.loads(sys.stdin.buffer.read())["ops"]
    channel = private_channel()
    session = _Session(load_solution("solution.py"))
    put(channel, '{"loaded": true}\n')
    for op in ops:
        put(channel, json.dumps(session.carry_out(op)) + "\n")
