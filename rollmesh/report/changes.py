"""Changes of a configuration since the run was last taken over that are reported to the user.

Other models and other data are another matter: `learner.recovery.run_identity` refuses them by their content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keys that do not affect what a run learns: their changes are not reported. Sections end with a dot.
_HARMLESS = (
    *("run.", "logging.", "network.", "security.", "resources.", "checkpoint.", "weights."),
    *("buffer.python", "buffer.fronts", "buffer.side_dir", "learner.python", "reward.python", "rollout.python"),
    *("rollout.sglang.python", "rollout.endpoint.", "rollout.draft_every_s", "rollout.draft_every_tokens"),
    # Reported by name where it lowers a guarantee.
    "buffer.durability",
)
# Exceptions among the harmless sections: the order of the prompts follows from the seed.
_TOLD = ("run.seed", "weights.kv", "checkpoint.best")
_CHARACTERS = 60


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`learner.optimizer.lr 1e-06 -> 0.001` and the like, for all that may change what the run learns.

    Args:
        before, now: configurations as JSON, with every default.
    """
    old, new = dict(_leaves(before)), dict(_leaves(now))
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key} {_short(old.get(key))} -> {_short(new.get(key))}"
        for key in keys
        if old.get(key) != new.get(key) and (key in _TOLD or not key.startswith(_HARMLESS))
    ]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from _leaves({str(number): item for number, item in enumerate(value)}, f"{prefix}{name}.")
        elif value not in ({}, None):
            yield f"{prefix}{name}", value


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ..."
