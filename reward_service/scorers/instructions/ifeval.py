"""Verifiable instructions (IFEval; Zhou et al., arXiv:2311.07911): what the response keeps of those that its row has.

A row has `instruction_id_list` and `kwargs`, one object of arguments for each. They stand in `extra_info`, or in the
ground truth: an object, a list with it, or its JSON. `ifeval` gives 1 where all are kept, `ifeval_fraction` the share.
Both read the response as it is (strict). The component `loose` is the benchmark's loose measure. An instruction may
also be kept by the response without its first line, its last line or its asterisks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.instructions.kinds import is_kept
from rollmesh.reward_service.scorers.truths import TruthError, uses_row

# The names of the list of instructions; the second is that of rows with a ground truth of their own.
FIELDS = ("instruction_id_list", "instruction_id")
Instruction = tuple[str, Mapping[str, Any]]
# A text by which arguments are tried: an empty one looks at none.
_PROBE = "A text."


def instructions_of(item: RewardItem) -> list[Instruction]:
    """The instructions of a row: kind and arguments.

    Raises:
        ValueError: it has none, or none that can be read.
    """
    source: Any = item.extra_info
    if not any(name in source for name in FIELDS):
        source = item.ground_truth
        if isinstance(source, str):
            try:
                source = json.loads(source)
            except ValueError as error:
                raise ValueError(f"the ground truth is not JSON: {error}") from error
        if isinstance(source, list) and len(source) == 1:
            source = source[0]
    kinds = next((source[name] for name in FIELDS if name in source), None) if isinstance(source, Mapping) else None
    if not isinstance(kinds, list) or not kinds:
        raise ValueError(f"the row has no instructions: give extra_info.{FIELDS[0]} and extra_info.kwargs")
    arguments = source.get("kwargs") or [{}] * len(kinds)
    if not isinstance(arguments, list) or len(arguments) != len(kinds):
        raise ValueError(f"{len(kinds)} instructions, and kwargs that is no list of as many objects")
    if not all(entry is None or isinstance(entry, Mapping) for entry in arguments):
        raise ValueError("kwargs has entries that are no objects")
    # Tables of rows have a column for every argument: null in those that an instruction has not.
    return [
        (str(kind), {name: value for name, value in (given or {}).items() if value is not None})
        for kind, given in zip(kinds, arguments, strict=True)
    ]


def usable_instructions(item: RewardItem) -> list[Instruction]:
    """The same, each tried.

    Raises:
        TruthError: there are none, one is not known, or its arguments do not fit.
    """
    try:
        instructions = instructions_of(item)
        for kind, arguments in instructions:
            is_kept(kind, _PROBE, arguments)
    except ValueError as error:
        raise TruthError(str(error)) from error
    return instructions


@uses_row(usable_instructions)
def score(item: RewardItem, instructions: Sequence[Instruction]) -> Outcome:
    """1.0 where all instructions are kept, else 0.0; components `fraction` and `loose`."""
    kept, loose = _kept(item.response, instructions)
    everything, share = float(all(kept)), sum(kept) / len(kept)
    return Scored(everything, {"fraction": share, "loose": loose})


@uses_row(usable_instructions)
def score_fraction(item: RewardItem, instructions: Sequence[Instruction]) -> Outcome:
    """The share of instructions that are kept; components `all` and `loose`."""
    kept, loose = _kept(item.response, instructions)
    return Scored(sum(kept) / len(kept), {"all": float(all(kept)), "loose": loose})


def _kept(response: str, instructions: Sequence[Instruction]) -> tuple[list[bool], float]:
    """For each instruction whether it is kept; and the share that is, by the loose measure."""
    kept = [is_kept(kind, response, arguments) for kind, arguments in instructions]
    variants = _variants(response)
    loose = [
        strict or any(is_kept(kind, variant, arguments) for variant in variants)
        for strict, (kind, arguments) in zip(kept, instructions, strict=True)
    ]
    return kept, sum(loose) / len(loose)


def _variants(response: str) -> list[str]:
    """The response without its first line, last line, both, and all of them without asterisks too."""
    lines = response.split("\n")
    cut = [
        "\n".join(lines[first : len(lines) - last]).strip()
        for first, last in product((0, 1), repeat=2)
        if first or last
    ]
    shorter = [response, *cut]
    return [*cut, *(text.replace("*", "") for text in shorter)]
