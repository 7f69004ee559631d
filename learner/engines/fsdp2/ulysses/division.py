"""The number of processes over which a model's sequences can be divided."""

from __future__ import annotations

import math
from typing import NoReturn

from rollmesh.mesh.errors import ConfigError

KEY = "learner.parallel.sp"


def check_division(parts: int, *, heads: int, processes: int, name: str, key: str = KEY) -> None:
    """Refuses a number of parts into which a model's heads, or the learner's processes, cannot be divided.

    Heads of keys and values need not divide: each part gets copies of those that its queries see.

    Args:
        parts: processes that share a micro-batch.
        heads: of the model's queries; 0: not known.
        processes: of the learner.
        name: the model, for the error.
        key: of the configuration, for the error.

    Raises:
        ConfigError: names the nearest number that works.
    """
    if heads % parts == 0 and processes % parts == 0:
        return
    both = math.gcd(heads, processes)
    works = [number for number in range(1, both + 1) if both % number == 0]
    nearest = min(works, key=lambda number: (abs(number - parts), -number))
    what = f"the {heads} attention heads of model {name!r}" if heads % parts else f"the learner's {processes} ranks"
    raise ConfigError(
        f"{key}: {parts} does not divide {what}", hint=f"set {key}: {nearest}, the nearest that divides both"
    )


def refuse_division(name: str, why: str) -> NoReturn:
    """Refuses to divide the sequences of a model.

    Args:
        name: the model.
        why: they cannot be divided.
    """
    raise ConfigError(f"the sequences of model {name!r} cannot be divided over processes: {why}", hint=f"set {KEY}: 1")
