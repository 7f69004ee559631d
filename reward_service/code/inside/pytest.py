"""The part of pytest that test files use, for a place where there is none."""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

_approx_relative, _approx_absolute = 1e-6, 1e-12


class _Raised:
    """The exception that `raises` has met."""

    value: BaseException

    @property
    def type(self) -> type[BaseException]:
        return builtins.type(self.value)


class _Raises:
    def __init__(self, expected: Any, match: str | None) -> None:
        self._expected = expected
        self._match = match
        self._raised = _Raised()

    def __enter__(self) -> _Raised:
        return self._raised

    def __exit__(self, kind: Any, error: BaseException | None, _trace: Any) -> bool:
        if error is None:
            raise AssertionError(f"did not raise {self._expected}")
        if not issubclass(kind, self._expected):
            return False
        self._raised.value = error
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError(f"{self._match!r} does not match {str(error)!r}")
        return True


def raises(expected: Any, *arguments: Any, match: str | None = None, **named: Any) -> Any:
    """Expects an exception: of a block, or of a call."""
    block = _Raises(expected, match)
    if not arguments:
        return block
    with block as raised:
        arguments[0](*arguments[1:], **named)
    return raised


class approx:  # noqa: N801  # pytest's name
    """Equals numbers that are close, also in lists and mappings."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:  # noqa: A002
        self._expected = expected
        self._bounds = (rel, abs)
        self._nan_ok = nan_ok

    def __eq__(self, found: object) -> bool:
        return self._same(found, self._expected)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    __hash__ = None  # type: ignore[assignment]

    def _same(self, found: Any, expected: Any) -> bool:
        if isinstance(expected, Mapping):
            return (
                isinstance(found, Mapping)
                and found.keys() == expected.keys()
                and all(self._same(found[name], value) for name, value in expected.items())
            )
        if isinstance(expected, Sequence) and not isinstance(expected, str):
            return isinstance(found, Sequence) and len(found) == len(expected) and all(map(self._same, found, expected))
        if isinstance(expected, float | int) and isinstance(found, float | int):
            if math.isnan(expected):
                return self._nan_ok and math.isnan(found)
            relative, absolute = self._bounds
            if relative is None:
                relative = _approx_relative if absolute is None else 0.0
            return math.isclose(found, expected, rel_tol=0.0, abs_tol=0.0) or (
                math.isfinite(expected)
                and abs(found - expected)
                <= max(relative * abs(expected), _approx_absolute if absolute is None else absolute)
            )
        return bool(found == expected)


class _Mark:
    """`pytest.mark`: parameters are kept, other marks say nothing here."""

    def parametrize(self, names: str | Sequence[str], rows: Sequence[Any], **_: Any) -> Callable[[Any], Any]:
        listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def keep(function: Any) -> Any:
            given = [row.values if isinstance(row, _Param) else row for row in rows]
            given = [
                row if len(listed) > 1 or isinstance(source, _Param) else (row,)
                for row, source in zip(given, rows, strict=True)
            ]
            function._parameters = [*getattr(function, "_parameters", ()), (listed, given)]
            return function

        return keep

    def __getattr__(self, _name: str) -> Any:
        def mark(*arguments: Any, **_: Any) -> Any:
            if len(arguments) == 1 and callable(arguments[0]):
                return arguments[0]
            return lambda function: function

        return mark


mark = _Mark()


class _Param:
    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values


def param(*values: Any, **_: Any) -> Any:
    """A row of parameters."""
    return _Param(values)


def fixture(function: Any = None, **_: Any) -> Any:
    """Marks a function whose result a test gets by its name."""
    if function is None:
        return fixture
    function._is_fixture = True
    return function


def fail(reason: str = "") -> NoReturn:
    """Fails the test."""
    raise AssertionError(reason)


def main(*_: Any, **__: Any) -> int:
    """Does nothing: the tests are run already."""
    return 0


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"pytest.{name} is not here")
