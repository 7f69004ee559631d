"""Versions of the scorers: one number for each, raised whenever it may judge an answer in another way.

With it a reward can be compared from run to run. It stands in the server's Info and in the summary of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rollmesh.reward_service.scorers import auto
from rollmesh.reward_service.scorers.mathematics import self_test

VERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "4",
        "arithmetic": "2",
        "choice": "2",
        "code": "2",
        "code_fraction": "2",
        "environment": "1",
        "exact_match": "2",
        "gsm8k": "2",
        "gsm8k_flexible": "2",
        "gsm8k_strict": "2",
        "ifeval": "1",
        "ifeval_fraction": "1",
        "json_schema": "1",
        "json_schema_fraction": "1",
        "math": "2",
        "math_dapo": "2",
        "math_string": "2",
        "none": "1",
        "qa": "3",
        "regex": "2",
        "strings": "2",
    }
)


def versions_of(functions: Iterable[str]) -> dict[str, str]:
    """Versions by name of the scorers among reward functions; with `auto`, of all to which it may hand an item.

    Functions of the user's have none. An option (`regex:PATTERN`) is left out of the name.
    """
    names = {function.partition(":")[0] for function in functions}
    if "auto" in names:
        names |= {*auto.SCORERS, "environment"}
    return {name: VERSIONS[name] for name in sorted(names & VERSIONS.keys())}


def versions_with_packages(functions: Iterable[str]) -> dict[str, str]:
    """Versions of the scorers among reward functions, and with `math` those of the packages that it uses.

    The version of `rollmesh` comes first; empty without a scorer.
    """
    scorers = versions_of(functions)
    if not scorers:
        return {}
    used = self_test.packages() if "math" in scorers else {}
    return {"rollmesh": self_test.installed_version("rollmesh"), **scorers, **used}
