"""The program as its tests see it, though it runs elsewhere: what they ask of it, and what it has answered.

Tests are run again and again. Each time more answers are known, up to the first operation that has not been carried
out. From there on all results are `Unknown`. A test that needs the value of one is given up, for this time. Once no
operation is without its answer, the tests have been run in full.

An operation is a list: its kind, and values in the words of `values.py`. There `{"o": n}` is the result of operation
number n, and `{"r": n}` a value that stayed with the program.

Invariant: expected values reach the program only as arguments that the tests themselves hand over. An object of the
program is never asked whether it equals a value of the tests.
"""

from __future__ import annotations

import builtins
from typing import Any, NoReturn

from values import decode, encode

_MOST_OPS = 20_000


class NotKnownError(Exception):
    """A result is needed that is not known yet."""


class TooManyError(BaseException):
    """The tests ask more of the program than can be kept."""


class EndedError(BaseException):
    """The program has ended, or was ended, before it came to this."""


class Link:
    """Operations and their results.

    Attributes:
        issued: operations of this run.
        pending: one of them has no result yet.
        reason: why program and tests need one process; empty if they do not.
    """

    def __init__(self, ops: list[Any], results: list[Any]) -> None:
        self.issued: list[Any] = []
        self.pending = False
        self.reason = ""
        self._ops = ops
        self._results = results
        self._exceptions: dict[str, type[BaseException]] = {}
        self._answers: set[type[BaseException]] = set()

    def ask(self, kind: str, *given: Any) -> Any:
        """The result of an operation, or `Unknown`; raises what the program has raised."""
        number = len(self.issued)
        if number >= _MOST_OPS:
            raise TooManyError
        op = [kind, *(encode(value, self._other) for value in given)]
        self.issued.append(op)
        self.pending = self.pending or number >= len(self._results) or self._ops[number] != op
        if self.pending:
            return Unknown(self, number)
        result = self._results[number]
        if isinstance(result, dict) and "e" in result:
            error = self._exception_class(result["e"]["names"])(result["e"]["text"])
            error.of_program = True  # type: ignore[attr-defined]  # for `runner.py`
            raise error
        if isinstance(result, dict) and "ended" in result:
            raise EndedError(result["ended"])
        if isinstance(result, dict) and "m" in result:
            raise AttributeError(f"the program has no {given[0]}")
        return decode(result, lambda named: self._kept(named, number, whole=named is result))

    def _kept(self, named: dict[str, Any], number: int, *, whole: bool) -> Any:
        ((name, body),) = named.items()
        if name == "x":
            kind = self._exception_class(body["names"])
            self._answers.add(kind)
            return kind
        return Remote(self, {"o": number} if whole else {"r": body})

    def _other(self, value: Any) -> Any:
        words = getattr(type(value), "_words", None)
        if words is not None:
            return words(value)
        if isinstance(value, type) and value in self._answers:
            raise TypeError(f"the class {value.__name__}, which the program gave, cannot be handed to it")
        self.reason = self.reason or f"a value of class {type(value).__name__} is handed to the program"
        self.pending = True
        return None

    def _exception_class(self, names: list[str]) -> type[BaseException]:
        """Python's own class, or one for the program's, below the first of its bases that is Python's own."""
        first = names[0]
        own = getattr(builtins, first, None)
        if len(names) > 1 and isinstance(own, type) and issubclass(own, BaseException):
            return own
        if first not in self._exceptions:
            known = (getattr(builtins, name, None) for name in names[1:])
            base = next(
                (kind for kind in known if isinstance(kind, type) and issubclass(kind, BaseException)), Exception
            )
            self._exceptions[first] = type(first, (base,), {})
        return self._exceptions[first]


def _not_known(*_: Any, **__: Any) -> NoReturn:
    raise NotKnownError


class Unknown:
    """A result that is not known yet. It can be handed on, called, and asked for attributes."""

    # `isinstance()` asks for it.
    __class__ = property(_not_known)

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def _words(self) -> Any:
        return {"o": object.__getattribute__(self, "_number")}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise NotKnownError
        return self._link.ask("attribute", self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link.ask("call", self, list(arguments), named)


_DUNDERS = (
    "eq ne lt le gt ge hash bool len iter next contains getitem setitem delitem str repr format int float index "
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or ror xor rxor lshift "
    "rshift neg pos abs invert round complex bytes enter exit setattr delattr instancecheck subclasscheck reversed"
)
for _name in _DUNDERS.split():
    setattr(Unknown, f"__{_name}__", _not_known)


class Remote:
    """A value that stayed with the program: a function, a class, an object of the program's class."""

    def __init__(self, link: Link, words: dict[str, int]) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_said", words)

    def _words(self) -> Any:
        return self._said

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._link.ask("call", self, list(arguments), named)

    def __len__(self) -> int:
        return _of_kind(self._link.ask("len", self), int)

    def __bool__(self) -> bool:
        return _of_kind(self._link.ask("truth", self), bool)

    def __str__(self) -> str:
        return _of_kind(self._link.ask("text", self), str)

    def __repr__(self) -> str:
        return _of_kind(self._link.ask("words", self), str)

    def __iter__(self) -> Any:
        return iter(_of_kind(self._link.ask("list", self), list))

    def __contains__(self, value: Any) -> bool:
        return any(entry == value for entry in self)

    def __next__(self) -> Any:
        return self._link.ask("next", self)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.ask("put", self, key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set", self, name, value)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) in (Remote, Unknown) and self._link.ask("instance", self, value) is True

    def __hash__(self) -> int:
        return hash(str(self._said))


def _of_kind(value: Any, kind: type) -> Any:
    if type(value) is Unknown:
        raise NotKnownError
    if type(value) is not kind:
        raise TypeError(f"the program gives a {type(value).__name__} where a {kind.__name__} is due")
    return value


def _operator(name: str) -> Any:
    def operate(self: Remote, other: Any) -> Any:
        if type(other) not in (Remote, Unknown):
            # The program would be told what is expected, and judge itself.
            return {"eq": False, "ne": True}.get(name, NotImplemented)
        result = self._link.ask(name, self, other)
        return result if name in ("add", "sub", "mul", "truediv") else _of_kind(result, bool)

    return operate


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv"):
    setattr(Remote, f"__{_name}__", _operator(_name))
