"""Arguments of a function, chosen from what there is by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollmesh.mesh.errors import PayloadError


@dataclass(frozen=True, slots=True)
class Signature:
    """A function with its parameters.

    Attributes:
        function: the user's.
        parameters: by name.
        bound: names of the arguments that the configuration gives; no column of the data replaces them.
    """

    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    bound: frozenset[str]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Signature:
        """Reads it.

        Raises:
            TypeError, ValueError: it cannot be read.
        """
        bound = frozenset(function.keywords) if isinstance(function, partial) else frozenset()
        return cls(function, inspect.signature(function).parameters, bound)

    def call(self, given: Mapping[str, Any]) -> Any:
        """Calls the function with those of the given arguments that it takes, by keyword.

        Raises:
            PayloadError: it requires another one.
        """
        for parameter in self.parameters.values():
            variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not variable and parameter.name not in given:
                raise PayloadError(
                    parameter.name,
                    f"the function requires it, but the data has only: {', '.join(sorted(given))}",
                    hint="add it to extra_info of the dataset's rows",
                )
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        return self.function(
            **{
                name: value
                for name, value in given.items()
                if (takes_all or name in self.parameters) and name not in self.bound
            }
        )
