"""Every published shape of preference rows gives each message once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import Example
from rollmesh.learner.data.parts.answers import split_prompt
from rollmesh.learner.data.parts.template_marks import TemplateMarks
from rollmesh.learner.data.preference_rows import LabeledForm, PairForm, ScoredPairForm
from rollmesh.learner.data.supervised_rows import Conversation, SupervisedForm
from rollmesh.mesh.config.trainers.sections import RowsSection, SupervisedRowsSection
from rollmesh.mesh.errors import DataError
from tests import chat_templates as of
from tests.learner.data.test_chat_turns import PLAIN, make_tokenizer

CHAT = ChatEncoder(make_tokenizer(PLAIN))
SECTION = RowsSection.model_validate({"train": "x"})
ASKED, SYSTEM = {"role": "user", "content": "why so"}, {"role": "system", "content": "be good"}
MORE = {"role": "user", "content": "and then"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


YES, NO = said("yes"), said("no")
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


def rendered(sequence: Any) -> tuple[str, str]:
    tokens = CHAT.tokenizer.convert_ids_to_tokens
    return "".join(tokens(sequence.prompt_ids.tolist())), "".join(tokens(sequence.response_ids.tolist()))


def pair(record: dict[str, Any]) -> list[tuple[str, str]]:
    form = PairForm(CHAT, SECTION, "prompt")
    form.check(Path("f"), 0, record, tuple(record))
    example = form.encode(record)
    assert isinstance(example, Example)
    return [rendered(sequence) for sequence in example.sequences]


def labeled(record: dict[str, Any]) -> tuple[str, str]:
    example = LabeledForm(CHAT, SECTION, "prompt").encode({"label": True, **record})
    assert isinstance(example, Example)
    return rendered(example.sequences[0])


ONCE = [("[u]why so|[a]", "yes|"), ("[u]why so|[a]", "no|")]
WITH_SYSTEM = [(f"[s]be good|{prompt}", response) for prompt, response in ONCE]
CHATTING = SECTION.model_copy(update={"as_chat": True})
SHAPES: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"prompt": "why so", "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, ONCE),
    ({"prompt": " why so\n", "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, ONCE),
    ({"prompt": [ASKED], "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, ONCE),
    ({"chosen": [ASKED, YES], "rejected": [ASKED, NO]}, ONCE),
    ({"prompt": " ", "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, ONCE),
    ({"prompt": None, "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, ONCE),
    ({"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}, ONCE),
    ({"prompt": [ASKED], "chosen": YES, "rejected": NO}, ONCE),
    ({"prompt": [ASKED], "chosen": "yes", "rejected": "no"}, ONCE),
    ({"prompt": "why so", "chosen": [YES], "rejected": [NO]}, ONCE),
    ({"prompt": "why so", "chosen": [ASKED, YES], "rejected": [NO]}, ONCE),
    ({"prompt": "why so", "chosen": [ASKED, YES], "rejected": "no"}, ONCE),
    ({"prompt": "why so", "chosen": [SYSTEM, ASKED, YES], "rejected": [SYSTEM, ASKED, NO]}, WITH_SYSTEM),
    ({"prompt": [ASKED], "chosen": [SYSTEM, ASKED, YES], "rejected": [SYSTEM, ASKED, NO]}, WITH_SYSTEM),
    ({"prompt": [SYSTEM, ASKED], "chosen": [SYSTEM, ASKED, YES], "rejected": [SYSTEM, ASKED, NO]}, WITH_SYSTEM),
    ({"prompt": [SYSTEM, ASKED], "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, WITH_SYSTEM),
    ({"prompt": [SYSTEM], "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, WITH_SYSTEM),
    ({"system": "be good", "prompt": "why so", "chosen": [ASKED, YES], "rejected": [ASKED, NO]}, WITH_SYSTEM),
    ({"system": "be good", "chosen": [SYSTEM, ASKED, YES], "rejected": [SYSTEM, ASKED, NO]}, WITH_SYSTEM),
    (
        {"prompt": "q: why so a:", "chosen": "q: why so a: yes", "rejected": "q: why so a: no"},
        [("q: why so a:", " yes|"), ("q: why so a:", " no|")],
    ),
    (
        {"prompt": "why is it so", "chosen": "u: why is it so a: yes", "rejected": "u: why is it so a: no"},
        [("u: why is it so a:", " yes|"), ("u: why is it so a:", " no|")],
    ),
    (
        {"prompt": "whyisitsowhyisitso", "chosen": "whyisitsowhyisitso yes", "rejected": "whyisitsowhyisitso no"},
        [("whyisitsowhyisitso", " yes|"), ("whyisitsowhyisitso", " no|")],
    ),
    (
        {"prompt": "why is it so", "chosen": "why is it so yes", "rejected": "no"},
        [("why is it so", "why is it so yes|"), ("why is it so", "no|")],
    ),
    ({"prompt": "hi", "chosen": "hi yes", "rejected": "hi no"}, [("hi", "hi yes|"), ("hi", "hi no|")]),
    (
        {"prompt": "why so", "chosen": [ASKED, said("so"), MORE, YES], "rejected": [ASKED, said("so"), MORE, NO]},
        [("[u]why so|[a]so|[u]and then|[a]", "yes|"), ("[u]why so|[a]so|[u]and then|[a]", "no|")],
    ),
    (
        {"prompt": "why so", "chosen": [said("hey"), ASKED, YES], "rejected": [said("hey"), ASKED, NO]},
        [("[a]hey|[u]why so|[a]", "yes|"), ("[a]hey|[u]why so|[a]", "no|")],
    ),
    (
        {"prompt": [said("hey"), ASKED], "chosen": [said("hey"), ASKED, YES], "rejected": [NO]},
        [("[a]hey|[u]why so|[a]", "yes|"), ("[a]hey|[u]why so|[a]", "no|")],
    ),
    (
        {"prompt": [ASKED], "chosen": [YES, MORE, said("so")], "rejected": [NO, MORE, said("then")]},
        [("[u]why so|[a]", "yes|[u]and then|[a]so|"), ("[u]why so|[a]", "no|[u]and then|[a]then|")],
    ),
    (
        {"prompt": [ASKED, said("so"), MORE], "chosen": [MORE, YES], "rejected": [MORE, NO]},
        [("[u]why so|[a]so|[u]and then|[a]", "yes|"), ("[u]why so|[a]so|[u]and then|[a]", "no|")],
    ),
    (
        {"prompt": "and then", "chosen": [ASKED, said("so"), MORE, YES], "rejected": [ASKED, said("so"), MORE, NO]},
        [("[u]why so|[a]so|[u]and then|[a]", "yes|"), ("[u]why so|[a]so|[u]and then|[a]", "no|")],
    ),
]


def test_texts_are_divided_before_a_word() -> None:
    assert split_prompt("say one", "say on") == ("say on", "e", "")
    assert split_prompt("say one", "say only") == ("say", " one", " only")
    assert split_prompt("one", "two") == ("", "one", "two")


@pytest.mark.parametrize(("record", "expected"), SHAPES)
def test_pairs(record: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert pair(record) == expected


@pytest.mark.parametrize(("record", "expected"), SHAPES)
def test_reward_models_see_the_same_prompts(record: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    example = ScoredPairForm(CHAT, SECTION, "prompt").encode(record)
    assert isinstance(example, Example)
    for sequence, (prompt, response) in zip(example.sequences, expected, strict=True):
        before, said = rendered(sequence)
        # A reward model scores the end of the last answer.
        assert (before + said[:-1]).rstrip("?") == prompt + response


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "why so", "completion": [ASKED, YES]},
        {"prompt": [ASKED], "completion": [ASKED, YES]},
        {"completion": [ASKED, YES]},
        {"prompt": None, "completion": [ASKED, YES]},
        {"prompt": [ASKED], "completion": [YES]},
        {"prompt": [ASKED], "completion": "yes"},
        {"prompt": "why so", "completion": [YES]},
    ],
)
def test_labeled_responses(record: dict[str, Any]) -> None:
    assert labeled(record) == ONCE[0]
    conversation = SupervisedForm(CHAT, SupervisedRowsSection.model_validate({"train": "x"}), "prompt")
    if record.get("prompt") is not None:
        found = conversation.read(record)
        assert isinstance(found, Conversation)
        assert (list(found.messages), list(found.turns)) == ([ASKED, YES], [1])


def dropped(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "prompt"}


def alone(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "chosen": record["chosen"][-1:], "rejected": record["rejected"][-1:]}


@pytest.mark.parametrize("remedy", [dropped, alone])
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "what", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
        {"prompt": [MORE], "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
        {"prompt": [SYSTEM, MORE], "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
        {"prompt": [MORE], "chosen": [SYSTEM, ASKED, YES], "rejected": [SYSTEM, ASKED, NO]},
        {
            "prompt": [{**SYSTEM, "content": "be bad"}, ASKED],
            "chosen": [SYSTEM, ASKED, YES],
            "rejected": [SYSTEM, ASKED, NO],
        },
        {"prompt": [MORE, said("so")], "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    ],
)
def test_a_prompt_that_contradicts_the_conversations_is_refused(
    record: dict[str, Any], remedy: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    with pytest.raises(DataError, match="field `prompt` is not how the conversation of `chosen` begins") as caught:
        pair(record)
    assert "leave `prompt` out" in caught.value.hint
    assert "begin it with the assistant's answer" in caught.value.hint
    assert [response for _, response in pair(remedy(record))] == ["yes|", "no|"]


@pytest.mark.parametrize(
    "begun", [([SYSTEM, ASKED], [ASKED]), ([ASKED], [SYSTEM, ASKED]), ([SYSTEM, ASKED], [SYSTEM, MORE])]
)
def test_conversations_that_differ_before_an_answer_are_refused(begun: tuple[list[Any], list[Any]]) -> None:
    first, second = begun
    with pytest.raises(DataError, match="`chosen` and `rejected` differ before an answer") as caught:
        pair({"chosen": [*first, YES], "rejected": [*second, NO]})
    assert "the same messages before the answer" in caught.value.hint
    for same in begun:
        pair({"chosen": [*same, YES], "rejected": [*same, NO]})


def test_conversations_of_one_prompt_begin_alike() -> None:
    record = {"prompt": "why so", "chosen": [SYSTEM, ASKED, YES], "rejected": [ASKED, NO]}
    with pytest.raises(DataError, match="`chosen` and `rejected` begin with other messages") as caught:
        pair(record)
    assert caught.value.hint == "give both the same beginning"
    assert pair({**record, "rejected": [SYSTEM, ASKED, NO]}) == WITH_SYSTEM


@pytest.mark.parametrize(
    ("key", "value", "chosen", "rejected"),
    [
        ("conversations", [ASKED], YES, NO),
        ("context", [ASKED], [YES], [NO]),
        ("question", "why so", "yes", "no"),
        ("question", "why so", "the yes", "the no"),
        ("instruction", "why so", [YES], [NO]),
    ],
)
def test_answers_without_a_prompt_are_refused(key: str, value: Any, chosen: Any, rejected: Any) -> None:
    """They would be trained without the question; what they have in common by chance is no prompt."""
    record = {key: value, "chosen": chosen, "rejected": rejected}
    with pytest.raises(DataError, match="its answers stand alone, without the prompt") as caught:
        pair(record)
    assert caught.value.hint == f"set data.prompt_key: {key}"
    example = PairForm(CHAT, SECTION, key).encode(record)
    assert isinstance(example, Example)
    assert all("why so" in rendered(sequence)[0] for sequence in example.sequences)


@pytest.mark.parametrize("answers", [("yes", "no"), ([YES], [NO])])
def test_answers_without_any_prompt_are_refused(answers: tuple[Any, Any]) -> None:
    record = dict(zip(("chosen", "rejected"), answers, strict=True))
    with pytest.raises(DataError, match="its answers stand alone") as caught:
        pair(record)
    assert caught.value.hint == "data.prompt_key names the field with the prompt"
    example = PairForm(CHAT, SECTION, "asked").encode({**record, "asked": [ASKED]})
    assert isinstance(example, Example)
    assert [rendered(sequence) for sequence in example.sequences] == ONCE


def test_whole_texts_may_have_their_question_in_a_field_too() -> None:
    record = {"question": "why so", "chosen": "q: why so a: yes", "rejected": "q: why so a: no"}
    assert pair(record) == [("q: why so a:", " yes|"), ("q: why so a:", " no|")]


def test_labels_of_several_answers_need_a_prompt() -> None:
    completion = [ASKED, said("so"), MORE, YES]
    with pytest.raises(DataError, match="field `completion` has several answers") as caught:
        labeled({"completion": completion})
    assert caught.value.hint == "give the messages before the answer as `prompt`"
    assert labeled({"prompt": completion[:3], "completion": completion[3:]})[1] == "yes|"
    with pytest.raises(DataError, match="no field has the prompt of `completion`"):
        labeled({"completion": "yes"})


@pytest.mark.parametrize("field", ["tools", "system"])
def test_texts_alone_show_neither_tools_nor_system_prompts(field: str) -> None:
    value = {"tools": [{"type": "function", "function": {"name": "f"}}], "system": "be good"}[field]
    record = {"prompt": "why so", "chosen": "yes", "rejected": "no", field: value}
    with pytest.raises(DataError, match=f"field `{field}` belongs to a conversation") as caught:
        pair(record)
    assert f"set data.as_chat: true, or leave {field} out" in caught.value.hint
    template = "{% for tool in tools or [] %}{{ tool.function.name }}: {% endfor %}" + PLAIN
    followed = PairForm(ChatEncoder(make_tokenizer(template)), CHATTING, "prompt").encode(record)
    assert isinstance(followed, Example)
    shown = {"tools": "f: ", "system": "[s]be good|"}[field]
    assert rendered(followed.sequences[0]) == (f"{shown}[u]why so|[a]", "yes|")
    assert pair({**record, field: None})[0][1] == "yes|"
    whole = {"chosen": "q: why so a: yes", "rejected": "q: why so a: no", field: value}
    with pytest.raises(DataError, match=f"field `{field}` belongs to a conversation") as caught:
        pair(whole)
    assert f"write the prompt and the responses as messages, or leave {field} out" in caught.value.hint
    written = PairForm(ChatEncoder(make_tokenizer(template)), SECTION, "prompt").encode({**record, "prompt": [ASKED]})
    assert isinstance(written, Example)
    assert rendered(written.sequences[0]) == rendered(followed.sequences[0])
    section = SupervisedRowsSection.model_validate({"train": "x"})
    supervised = {"prompt": "why so", "completion": "yes", field: value}
    with pytest.raises(DataError, match=f"field `{field}` belongs to a conversation") as caught:
        SupervisedForm(CHAT, section, "prompt").read(supervised)
    assert "set data.as_chat: true" in caught.value.hint
    found = SupervisedForm(CHAT, section.model_copy(update={"as_chat": True}), "prompt").read(supervised)
    assert isinstance(found, Conversation)
    assert (found.tools or found.messages[0]["content"]) in (value, "be good")


TEXTS = {"prompt": "why so", "chosen": "yes", "rejected": "no", "completion": "yes", "label": True}
FORMS: list[tuple[type[PairForm | LabeledForm | SupervisedForm], int]] = [
    (PairForm, 2),
    (ScoredPairForm, 2),
    (LabeledForm, 1),
    (SupervisedForm, 1),
]


def made(form: type[PairForm | LabeledForm | SupervisedForm], record: dict[str, Any], *, as_chat: bool) -> Example:
    section = SupervisedRowsSection.model_validate({"train": "x", "as_chat": as_chat})
    example = form(CHAT, section, "prompt").encode(record)
    assert isinstance(example, Example)
    return example


@pytest.mark.parametrize(("form", "sequences"), FORMS)
def test_texts_go_through_the_chat_template_where_it_is_asked_for(form: Any, sequences: int) -> None:
    """The same tokens as of messages, for every trainer; and rows say where a template is not used."""
    messages = {"prompt": [ASKED], "chosen": [YES], "rejected": [NO], "completion": [YES], "label": True}
    chatting, meant = (made(form, record, as_chat=True) for record in (TEXTS, messages))
    assert len(chatting.sequences) == sequences
    for found, expected in zip(chatting.sequences, meant.sequences, strict=True):
        assert rendered(found) == rendered(expected)
        assert found.response_mask.tolist() == expected.response_mask.tolist()
    plain = made(form, TEXTS, as_chat=False)
    assert rendered(plain.sequences[0])[0] == "why so"
    assert [each.misses_template for each in (plain, chatting, meant)] == [True, False, False]


@pytest.mark.parametrize(("form", "sequences"), FORMS)
def test_whole_texts_of_preferences_are_divided_for_chats_too(form: Any, sequences: int) -> None:
    """Answers of `sft` stand as they are, with and without a template."""
    asked = "the end of it is"
    whole = {"prompt": asked, **dict.fromkeys(("chosen", "rejected", "completion"), f"{asked} a"), "label": True}
    example = made(form, whole, as_chat=True)
    assert len(example.sequences) == sequences
    said = f"{asked} a|" if form is SupervisedForm else "a|"
    for sequence in example.sequences:
        assert "".join(rendered(sequence)).startswith(f"[u]{asked}|[a]{said}")


def test_whole_texts_have_no_prompt_that_would_be_a_message() -> None:
    whole = {"chosen": "q: why is it so a: yes", "rejected": "q: why is it so a: no"}
    assert not made(PairForm, whole, as_chat=False).misses_template
    asked = {**whole, "prompt": "why is it so"}
    assert not made(PairForm, asked, as_chat=False).misses_template
    for record in (whole, asked):
        with pytest.raises(DataError, match=r"its answers are whole texts, and data\.as_chat") as caught:
            made(PairForm, record, as_chat=True)
        assert caught.value.hint == "give the prompt as `prompt` and the answers without it, or leave data.as_chat out"
    assert made(PairForm, TEXTS, as_chat=True)
    assert not made(SupervisedForm, {"text": "why so"}, as_chat=False).misses_template


@pytest.mark.parametrize("as_chat", [False, True])
def test_a_text_beside_a_message_is_a_message(as_chat: bool) -> None:
    """Otherwise one response of a pair would be trained with the template, and the other one without."""
    example = made(PairForm, {"prompt": "why so", "chosen": "yes", "rejected": [NO]}, as_chat=as_chat)
    assert [rendered(sequence) for sequence in example.sequences] == ONCE


def test_texts_that_were_written_with_a_template_miss_none() -> None:
    marks = TemplateMarks(of.tokenizer_for(of.NEXT_ROLE))
    assert marks.are_missing("why so")
    assert not marks.are_missing("<|user|>why so<|assistant|>")
    without = make_tokenizer(PLAIN)
    without.chat_template = None
    assert not TemplateMarks(without).are_missing("why so")


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]])
def test_pairs_show_their_tools(tools: Any) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }}: {% endfor %}" + PLAIN
    form = PairForm(ChatEncoder(make_tokenizer(template)), SECTION, "prompt")
    example = form.encode({"prompt": [ASKED], "chosen": [YES], "rejected": [NO], "tools": tools})
    assert isinstance(example, Example)
    assert [rendered(sequence)[0] for sequence in example.sequences] == ["find: [u]why so|[a]"] * 2


def test_flags_count_for_the_answers_of_pairs() -> None:
    answers = [{**said("so"), "weight": 0}, MORE, {**YES, "weight": 1}]
    record = {"prompt": [ASKED], "chosen": answers, "rejected": [*answers[:2], NO]}
    example = PairForm(CHAT, SECTION, "prompt").encode(record)
    assert isinstance(example, Example)
    assert rendered(example.sequences[0]) == ("[u]why so|[a]so|[u]and then|[a]", "yes|")
    record["chosen"] = [*answers[:1], {**MORE, "weight": 1}, YES]
    with pytest.raises(DataError, match=r"message 2 \(user\) has `weight`: 1"):
        PairForm(CHAT, SECTION, "prompt").read(record)
