"""Flags by which rows say which turns are trained.

OpenAI's rows have `weight`, those of other trainers `train`, `loss_mask` and the like. True and 1 train a turn, false
and 0 do not. Flags that cannot be obeyed are refused: a fraction, or a turn of the user that is to be trained.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from rollmesh.learner.data.chat_turns import Messages
from rollmesh.learner.data.records import Record
from rollmesh.mesh.errors import DataError

_TRAINED = (
    "weight",
    "train",
    "trainable",
    "is_trainable",
    "trained",
    "is_trained",
    "training",
    "train_on_turn",
    "loss",
    "loss_mask",
    "loss_weight",
    "compute_loss",
    "mask",
    "supervised",
    "learnable",
)
# The opposite: true for turns that are not trained.
_INVERTED = ("masked", "is_masked", "ignore_loss", "no_loss")
_LIKE_FLAGS = re.compile(r"train|loss|mask|weight|supervis|learn|ignore|skip", re.IGNORECASE)
_YES_OR_NO = frozenset({"true", "false", "yes", "no", "0", "1"})
# The share of a row that counts; fractions by other names are measurements.
_SHARES = ("weight", "loss_weight")


def trained_turns(messages: Messages, first: int) -> list[int]:
    """Places of the assistant's messages that are trained, ascending.

    Args:
        messages: the conversation of a row, with its flags.
        first: place of the first message that may be trained; those before are the prompt.

    Raises:
        DataError: a flag says neither yes nor no, or says yes of a message that cannot be trained.
    """
    trained = []
    for place, message in enumerate(messages):
        name, flag = _flag_of(message, place)
        if place >= first and message["role"] == "assistant":
            trained += [place] if flag is not False else []
        elif flag:
            whose = f"{message['role']}, in the prompt" if place < first else message["role"]
            raise DataError(
                f"message {place} ({whose}) has `{name}`: {message[name]!r}, as if it were trained",
                hint=f"leave `{name}` out there, or write 0: only answers of the assistant are trained",
            )
    return trained


def refuse_row_flags(record: Record) -> None:
    """Refuses a row with flags next to its messages: of its turns in a list, or of all of it.

    A list may count turns, answers or tokens. A row as a whole is trained like any other.

    Raises:
        DataError: it has one.
    """
    for name, value in record.items():
        if isinstance(value, list) and value and (_is_flag(name) or _may_count_turns(name, value)):
            raise DataError(
                f"field `{name}` is a list next to the messages",
                hint="write the flag of each turn into its message, as `train`, or leave the field out",
            )
        if _is_flag(name) and isinstance(value, int | float) and _leaves_out(name, value):
            raise DataError(
                f"field `{name}` of the row is {value!r}, and rows are trained as a whole, each like the others",
                hint="remove the row, or leave the field out; a source has a weight of its own (docs/data.md)",
            )


def _leaves_out(name: str, value: float) -> bool:
    """Whether a row's own flag says that it is not trained, or less than others."""
    return value != 1 if name in _SHARES else value in (0, 1) and bool(value) == (name in _INVERTED)


def without_flags(messages: Messages) -> Messages:
    """The messages as templates see them."""
    return [{name: value for name, value in message.items() if not _is_flag(name)} for message in messages]


def _is_flag(name: str) -> bool:
    return name in _TRAINED or name in _INVERTED


def _may_count_turns(name: str, values: list[Any]) -> bool:
    """Whether a list of another name looks as if it had a flag for each turn, as `weights` does."""
    return _LIKE_FLAGS.search(name) is not None and all(isinstance(value, int | float) for value in values)


def _says_something(value: Any) -> bool:
    """Whether a value may be a flag, or a list of flags; a text is one if it says yes or no."""
    if isinstance(value, str):
        return value.strip().lower() in _YES_OR_NO
    return isinstance(value, int | float) or (isinstance(value, list) and bool(value))


def _flag_of(message: Mapping[str, Any], place: int) -> tuple[str, bool | None]:
    """The flag of a message by its name; None without one."""
    found: list[tuple[str, bool]] = []
    for name, value in message.items():
        if value is None:
            continue
        if _is_flag(name):
            # 1.0 and 0.0 come from tables, which have one type for a column.
            if not isinstance(value, int | float) or value not in (0, 1):
                raise DataError(
                    f"message {place}: `{name}` is {reprlib.repr(value)}, expected true or false (or 1 or 0)",
                    hint="write 1 for a turn that is trained, 0 for one that is not, or leave the field out",
                )
            found.append((name, bool(value) != (name in _INVERTED)))
        elif _LIKE_FLAGS.search(name) and _says_something(value):
            raise DataError(
                f"message {place}: `{name}` looks as if it said whether the turn is trained, and is not known",
                hint="name it `train` (1 for a turn that is trained), or leave it out",
            )
    if len({flag for _, flag in found}) > 1:
        names = " and ".join(f"`{name}`" for name, _ in found)
        raise DataError(f"message {place} has {names}, which contradict each other", hint="keep one of them")
    return found[0] if found else ("", None)
