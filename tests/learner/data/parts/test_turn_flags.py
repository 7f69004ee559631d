"""Flags of single turns: obeyed where they can be, and refused by name otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.learner.data.parts.turn_flags import refuse_row_flags, trained_turns, without_flags
from rollmesh.mesh.errors import DataError

ROLES = ("user", "assistant", "user", "assistant")
NAMES = ["weight", "train", "trainable", "is_trainable", "loss_mask", "mask", "loss", "train_on_turn", "trained"]


def chat(*flags: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": "x", **more} for role, more in zip(ROLES, flags, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("yes", "no"), [(True, False), (1, 0), (1.0, 0.0)])
def test_answers_are_trained_as_their_flags_say(name: str, yes: Any, no: Any) -> None:
    assert trained_turns(chat({}, {name: no}, {}, {name: yes}), 0) == [3]
    assert trained_turns(chat({}, {name: yes}, {}, {name: no}), 0) == [1]
    assert trained_turns(chat({name: no}, {}, {name: no}, {name: no}), 0) == [1]
    assert trained_turns(chat({}, {name: None}, {}, {}), 0) == [1, 3]
    assert trained_turns(chat({}, {name: no}, {}, {name: no}), 0) == []


def test_masked_turns_are_not_trained() -> None:
    assert trained_turns(chat({"masked": True}, {"masked": True}, {}, {"masked": False}), 0) == [3]


@pytest.mark.parametrize("value", [0.5, 2, -1, "1", "true", [1, 0], {"a": 1}, float("nan")])
@pytest.mark.parametrize("name", ["weight", "loss_mask"])
def test_a_flag_that_says_neither_is_named_and_its_remedy_is_right(name: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"message 1: `{name}` is .*, expected true or false") as caught:
        trained_turns(chat({}, {name: value}, {}, {}), 0)
    assert "write 1 for a turn that is trained, 0 for one that is not, or leave the field out" in caught.value.hint
    assert trained_turns(chat({}, {name: 0}, {}, {}), 0) == [3]
    assert trained_turns(chat({}, {}, {}, {}), 0) == [1, 3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, 2])
def test_turns_of_others_cannot_be_trained(name: str, place: int) -> None:
    flags: list[dict[str, Any]] = [{}, {}, {}, {}]
    flags[place] = {name: 1}
    with pytest.raises(DataError, match=rf"message {place} \(user\) has `{name}`: 1, as if it were trained") as caught:
        trained_turns(chat(*flags), 0)
    assert "write 0" in caught.value.hint
    flags[place] = {name: 0}
    assert trained_turns(chat(*flags), 0) == [1, 3]


def test_the_prompt_cannot_be_trained() -> None:
    with pytest.raises(DataError, match=r"message 1 \(assistant, in the prompt\) has `weight`: 1"):
        trained_turns(chat({}, {"weight": 1}, {}, {}), 2)
    assert trained_turns(chat({}, {"weight": 0}, {}, {}), 2) == [3]


@pytest.mark.parametrize("name", ["should_train", "lossMask", "sample_weight", "is_supervised"])
def test_a_flag_of_another_name_is_refused_and_its_remedy_is_right(name: str) -> None:
    with pytest.raises(DataError, match=f"message 1: `{name}` looks as if .* is not known") as caught:
        trained_turns(chat({}, {name: 0}, {}, {}), 0)
    assert "name it `train`" in caught.value.hint
    assert trained_turns(chat({}, {"train": 0}, {}, {}), 0) == [3]
    assert trained_turns(chat({}, {name: "a note"}, {}, {}), 0) == [1, 3], "a text is no flag"


def test_flags_may_not_contradict_each_other() -> None:
    with pytest.raises(DataError, match="message 1 has `weight` and `train`, which contradict"):
        trained_turns(chat({}, {"weight": 1, "train": 0}, {}, {}), 0)
    assert trained_turns(chat({}, {"weight": 0, "train": False}, {}, {}), 0) == [3]


def test_templates_see_no_flags() -> None:
    said = chat({"weight": 0, "name": "a"}, {"mask": None}, {"masked": True}, {"train": 1})
    assert [set(message) for message in without_flags(said)] == [{"role", "content", "name"}] + [
        {"role", "content"}
    ] * 3


@pytest.mark.parametrize("name", ["loss_mask", "weight", "weights", "train_turns"])
def test_flags_in_a_list_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"field `{name}` is a list next to the messages") as caught:
        refuse_row_flags({"messages": [], name: [0, 1]})
    assert "into its message, as `train`" in caught.value.hint
    assert trained_turns(chat({}, {"train": 0}, {}, {"train": 1}), 0) == [3]
    refuse_row_flags({"messages": [], name: 1.0, "loss": 0.5, "skipped": ["a text"]})


@pytest.mark.parametrize(
    ("name", "value"), [("weight", 0.3), ("weight", 0), ("train", False), ("trainable", 0), ("masked", True)]
)
def test_a_row_that_says_that_it_is_not_trained_as_others_are_is_refused(name: str, value: float) -> None:
    with pytest.raises(DataError, match=f"field `{name}` of the row is {value}") as caught:
        refuse_row_flags({"messages": [], name: value})
    assert "leave the field out" in caught.value.hint
    refuse_row_flags({"messages": []})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train_detail", [{"begin_offset": 0, "end_offset": 3, "train": False}]),
        ("do_train", "no"),
        ("learn", False),
        ("ignore", True),
        ("skip", 1),
    ],
)
def test_flags_of_parts_of_a_turn_and_in_words_are_refused(name: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"message 1: `{name}` looks as if it said whether"):
        trained_turns(chat({}, {name: value}, {}, {}), 0)
