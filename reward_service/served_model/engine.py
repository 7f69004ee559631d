"""The interface of engines: they compute the values of token sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listed
from typing import Protocol

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.served_model.messages import ModelOptions
from rollmesh.reward_service.served_model.texts import Sequence


class AwayError(RewardError):
    """The engine does not answer; the same batch may be asked later."""

    code = "model_away"


class RefusedError(RewardError):
    """The engine does not take these sequences, or one of them."""

    code = "model_refused"


class Engine(Protocol):
    """Computes values.

    Attributes:
        longest: most tokens of a sequence; None: it does not say.
        lanes: batches that it takes at a time.
    """

    longest: int | None
    lanes: int

    def values(self, batch: Listed[Sequence]) -> list[list[float]]:
        """Values of each sequence at its places.

        Raises:
            AwayError: there is no answer.
            RefusedError: there will be none for these.
        """
        ...


def label_index(options: ModelOptions, names: dict[int, str]) -> int:
    """The label that is the reward.

    Args:
        options: with the label's index or name.
        names: of all labels.

    Raises:
        RewardError: there is no such label, or several, and none is named.
    """
    if options.activation == "softmax" and len(names) == 1:
        raise RewardError(f"reward model {options.folder} has one label", hint="set `activation` to sigmoid or none")
    if not options.label:
        if len(names) == 1 or options.kind == "steps":
            return len(names) - 1
        raise RewardError(
            f"reward model {options.folder} has {len(names)} labels", hint=f"set `label` to one of {sorted(names)}"
        )
    for index, name in names.items():
        if options.label in (str(index), name):
            return index
    raise RewardError(f"reward model {options.folder} has no label {options.label!r}", hint=f"it has {names}")


def activated(logits: Listed[float], label: int, activation: str) -> float:
    """The value of a label.

    Args:
        logits: one per label.
        label: index.
        activation: none, sigmoid or softmax.
    """
    if activation == "softmax":
        largest = max(logits)
        powers = [math.exp(each - largest) for each in logits]
        return powers[label] / sum(powers)
    value = logits[label]
    if activation == "sigmoid":
        return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
    return value
