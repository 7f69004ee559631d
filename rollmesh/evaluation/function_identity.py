"""The identity of a reward function that a program holds as an object: the same code with the same values has the same.

A function counts by its compiled code, by the values that it encloses, and by what it uses of its own module. Objects
of other modules count by their names alone: an installed library, or a model in memory, is not looked into. A function
whose values have changed since, as those of a counter, is another one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import xxhash


def function_identity(function: Callable[..., Any]) -> str:
    """The name of a function, and a digest of what it does; equal in another process of the same Python.

    Args:
        function: a function, a method, a partial application, or an object that can be called.
    """
    named = function.func if isinstance(function, functools.partial) else function
    name = getattr(named, "__qualname__", type(named).__qualname__)
    module = getattr(named, "__module__", "")
    return f"{name}:{xxhash.xxh3_64_hexdigest(json.dumps(_Reading(module).value(function)).encode())}"


class _Reading:
    """One reading of an object's parts, as far as its module has made them.

    Args:
        module: name of the module that is looked into.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        # With the objects themselves, so that no id is given twice.
        self._met: dict[int, tuple[int, Any]] = {}

    def value(self, value: Any) -> Any:
        """An object as JSON."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if id(value) in self._met:
            return self._met[id(value)][0]
        self._met[id(value)] = len(self._met), value
        if isinstance(value, Mapping):
            return [[self.value(key), self.value(one)] for key, one in value.items()]
        if isinstance(value, list | tuple):
            return [self.value(one) for one in value]
        if isinstance(value, set | frozenset):
            return sorted(json.dumps(self.value(one)) for one in value)
        if isinstance(value, functools.partial):
            return [self.value(value.func), self.value(value.args), self.value(value.keywords)]
        if isinstance(value, MethodType):
            return [self.value(value.__func__), self.value(value.__self__)]
        if isinstance(value, FunctionType):
            return self._function(value)
        return self._fields(value)

    def _function(self, function: FunctionType) -> Any:
        if function.__module__ != self._module:
            return _name(function)
        used = function.__globals__
        names = sorted({name for code in _codes(function.__code__) for name in code.co_names if name in used})
        return [
            self._code(function.__code__),
            self.value(function.__defaults__),
            self.value(function.__kwdefaults__),
            [self.value(_content(cell)) for cell in function.__closure__ or ()],
            [[name, self.value(used[name])] for name in names],
        ]

    def _code(self, code: CodeType) -> Any:
        constants = [self._code(one) if isinstance(one, CodeType) else self.value(one) for one in code.co_consts]
        return [code.co_code.hex(), list(code.co_names), constants]

    def _fields(self, value: Any) -> Any:
        if isinstance(value, type) and self._is_own(value):
            return [_name(value), [[name, self.value(one)] for name, one in vars(value).items() if callable(one)]]
        if hasattr(value, "__qualname__") or isinstance(value, ModuleType):
            return _name(value)
        kind = type(value)
        return [
            self.value(kind),
            self.value(vars(value)) if self._is_own(kind) and hasattr(value, "__dict__") else None,
        ]

    def _is_own(self, kind: type) -> bool:
        return kind.__module__ == self._module


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
