"""The scorers that come with the package, by the names used in `reward.functions`.

Each is one small file with `score(item) -> Outcome`, pure. Some take an option from their name: `regex:PATTERN`.

Those in `LINEAR` may share a process with a service: their time is linear in the length of the texts, whatever a model
writes. They search and replace fixed words, compare numbers as decimals, count, or look at no more than the last few
hundred characters. Their regular expressions never try a part of a long text again from another place. `math`
gives the text to a computer algebra system, for which `9^{9^{9^{9}}}` is a number to compute. So it runs in worker
processes, which can be killed, and so does `auto` for the sources that it hands to `math`. Patterns and schemas are
written by others, and run there too. A scorer that is not proven linear does not belong into `LINEAR`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from rollmesh.reward_service.outcomes import Outcome, RewardItem
from rollmesh.reward_service.scorers import (
    arithmetic,
    auto,
    environment,
    exact_match,
    gsm8k,
    gsm8k_text,
    none,
    qa,
    strings,
)
from rollmesh.reward_service.scorers.forms import choice, json_schema, regex
from rollmesh.reward_service.scorers.instructions import ifeval
from rollmesh.reward_service.scorers.mathematics import math_dapo, math_string, math_value, self_test

ItemScorer = Callable[[RewardItem], Outcome]

SCORERS: Mapping[str, ItemScorer] = MappingProxyType(
    {
        "auto": auto.score,
        "arithmetic": arithmetic.score,
        "choice": choice.score,
        "environment": environment.score,
        "exact_match": exact_match.score,
        "gsm8k": gsm8k.score,
        "gsm8k_flexible": gsm8k_text.score_flexible,
        "gsm8k_strict": gsm8k_text.score_strict,
        "ifeval": ifeval.score,
        "ifeval_fraction": ifeval.score_fraction,
        "json_schema": json_schema.score,
        "json_schema_fraction": json_schema.score_fraction,
        "math": math_value.score,
        "math_dapo": math_dapo.score,
        "math_string": math_string.score,
        "none": none.score,
        "qa": qa.score,
        "regex": regex.score,
        "strings": strings.score,
    }
)

WITH_OPTION: Mapping[str, Callable[[str], ItemScorer]] = MappingProxyType(
    {
        "json_schema": partial(json_schema.with_file, fraction=False),
        "json_schema_fraction": partial(json_schema.with_file, fraction=True),
        "regex": regex.with_pattern,
    }
)
"""Scorers that take an option, `NAME:OPTION`: from the option to the scorer."""

LINEAR = frozenset(
    {
        "arithmetic",
        "choice",
        "environment",
        "exact_match",
        "gsm8k",
        "gsm8k_flexible",
        "gsm8k_strict",
        "math_dapo",
        "math_string",
        "none",
        "qa",
        "strings",
    }
)


def is_linear(name: str, data_source: str) -> bool:
    """Whether a scorer's time is linear for items of a source; see above."""
    return name in LINEAR or (name == "auto" and auto.scorer_of(data_source) is not math_value.score)


def reads_mathematics(name: str) -> bool:
    """Whether a scorer hands items to math-verify, all or those of some sources."""
    return name in ("auto", "math")


def takes_option(spec: object) -> bool:
    """Whether a reward function is a scorer with an option."""
    name, colon, _ = str(spec).partition(":")
    return bool(colon) and name in WITH_OPTION


def prepare(name: str, *, tested: bool) -> None:
    """Loads and tries the imports of a scorer's first call, so that no call is charged for that.

    Args:
        tested: another process of this service has graded the known pairs, so that loading is enough.

    Raises:
        RewardError: it grades otherwise here than where it was tested.
    """
    if reads_mathematics(name):
        self_test.load_library() if tested else self_test.run()
    if name.partition(":")[0] in ("json_schema", "json_schema_fraction"):
        json_schema.load_library()
