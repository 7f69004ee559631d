"""An answer is known again by its meaning, in whichever form it comes back, and a different one is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.openai_server.conversations.known_answers import (
    AnswerPlace,
    Followed,
    KnownAnswers,
)
from rollmesh.generators.openai_server.conversations.messages import normalize
from rollmesh.mesh.trajectory.branches import Cause

ASK = {"role": "user", "content": "Weather?"}
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
THOUGHTS, TEXT, ARGUMENTS = (
    "I look.\nTwice.",
    "Let me see.",
    {"city": "Paris", "days": [1, 2.5], "deep": {"b": 1, "a": None}},
)

AS_TEXT = json.dumps(ARGUMENTS)


class Turn:
    """A turn that knows its call alone."""

    def __init__(self, call: int) -> None:
        self.call = call


class Session:
    """Answers to messages, as an endpoint records them."""

    def __init__(self) -> None:
        self.known: KnownAnswers[Turn] = KnownAnswers()
        self.calls = 0

    def follow(self, messages: list[Any], tools: Any = ()) -> Followed[Turn]:
        return self.known.follow([normalize(message) for message in messages], tools)

    def answer(self, messages: list[Any], answer: Any, tools: Any = (), *told: Any) -> Turn:
        turn = Turn(self.calls)
        self.calls += 1
        place = AnswerPlace.of(self.follow(messages, tools).conversation, normalize(answer), tools, *told)
        self.known.add(turn, place)
        return turn


def call(name: str = "weather", arguments: Any = AS_TEXT, call_id: str | None = "call_1") -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call_id is None else {"id": call_id, **made}


def assistant(content: Any, calls: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({} if calls is None else {"tool_calls": calls}), **more}


def knows(answer: Any, back: Any, **of_answer: Any) -> bool:
    session = Session()
    turn = session.answer([ASK], answer, **of_answer)
    followed = session.follow([ASK, back])
    assert (followed.cause is None) == (followed.answer is not None)
    return followed.answer is not None and followed.answer.turn is turn


THOUGHT = assistant(f"<think>\n{THOUGHTS}\n</think>\n\n{TEXT}", [call()])
OPENED = assistant(f"{THOUGHTS}\n</think>\n\n{TEXT}", [call()])
CALL = assistant(None, [call()])
PLAIN = assistant(TEXT)
# As smolagents tells calls of tools.
RETOLD = f"Calling tools:\n{[call(arguments=ARGUMENTS)]}"
RUN = "Calling tools:\n[{'id': 'x', 'function': {'name': 'python', 'arguments': '1+1'}}]"
NOTHING = {
    "refusal": None, "annotations": [], "audio": None, "function_call": None, "reasoning_content": None,
    "reasoning": "", "thinking_blocks": None, "provider_specific_fields": {"refusal": None},
}  # fmt: skip


@pytest.mark.parametrize("answer", [THOUGHT, OPENED])
@pytest.mark.parametrize(
    "back",
    [
        assistant(TEXT, [call()], reasoning_content=THOUGHTS),
        assistant(f"\n\n{TEXT}", [call()], reasoning_content=f"\n{THOUGHTS}\n"),
        assistant(TEXT, [call()], reasoning=THOUGHTS),
        assistant(TEXT, [call()], thinking=THOUGHTS),
        assistant(TEXT, [call()], reasoning_content=THOUGHTS, reasoning=THOUGHTS, name="bot"),
        assistant([{"type": "thinking", "thinking": THOUGHTS}, {"type": "text", "text": TEXT}], [call()]),
        assistant([{"type": "reasoning", "text": THOUGHTS}, {"type": "text", "text": TEXT}], [call()]),
        assistant(f"<think>{THOUGHTS}</think>{TEXT}", [call()]),
        assistant(f"<think>\n{THOUGHTS}\n</think>\n\n{TEXT}", [call()], reasoning_content=THOUGHTS),
        assistant(TEXT, [call()], thinking_blocks=[{"type": "thinking", "thinking": THOUGHTS, "signature": ""}]),
        assistant(TEXT, [call()], reasoning_details=[{"type": "reasoning.text", "text": THOUGHTS}, {"type": "odd"}]),
        # As templates do with all thoughts but the last.
        assistant(TEXT, [call()]),
    ],
)  # fmt: skip
def test_thoughts_are_the_same_apart_or_within(answer: Any, back: Any) -> None:
    assert knows(answer, back)


@pytest.mark.parametrize(
    ("answer", "back"),
    [
        (PLAIN, assistant(f" {TEXT}\n")),
        (PLAIN, assistant([{"type": "text", "text": TEXT}])),
        (PLAIN, assistant(TEXT, name="weather_bot", **NOTHING)),
        (PLAIN, assistant(TEXT, [])),
        (CALL, assistant("", [call()])),
        (CALL, {"role": "assistant", "tool_calls": [call()]}),
        (CALL, assistant("\n", [call()], **NOTHING)),
        (CALL, assistant(None, [call(arguments=ARGUMENTS)])),
        (CALL, assistant(None, [call(arguments=json.dumps(ARGUMENTS, indent=2, sort_keys=True))])),
        (CALL, assistant(None, [call(call_id="toolu_01")])),
        (CALL, assistant(None, [call(call_id=None)])),
        (CALL, assistant(None, [{**call(), "index": 0}])),
        (CALL, assistant(RETOLD)),
        (assistant(TEXT, [call()]), assistant([{"type": "text", "text": f"{TEXT}\n{RETOLD}"}])),
        (assistant(None, [call(arguments="")]), assistant(None, [call(arguments={})])),
        (assistant(None, [call(arguments="not JSON")]), assistant(None, [call(arguments="not JSON")])),
        (assistant(None, [call(arguments='{"n": 1.0}')]), assistant(None, [call(arguments={"n": 1})])),
        (assistant("<think>cut"), assistant(None, reasoning_content="cut")),
        (assistant("[THINK]a[/THINK]b"), assistant("b", reasoning="a")),
        (assistant("<think></think>\n\nb"), assistant("b")),
        (assistant("<think>a</think>b<think>c</think>d"), assistant("b<think>c</think>d", reasoning_content="a")),
    ],
)  # fmt: skip
def test_an_answer_is_known_in_each_form_that_says_the_same(answer: Any, back: Any) -> None:
    assert knows(answer, back)
    assert knows(back, answer)


@pytest.mark.parametrize(
    ("answer", "back"),
    [
        (PLAIN, assistant(f"{TEXT} Now.")),
        (PLAIN, assistant(TEXT.replace(" ", "  "))),
        (PLAIN, assistant(TEXT.upper())),
        (PLAIN, assistant("")),
        (PLAIN, {**PLAIN, "role": "user"}),
        (PLAIN, assistant(TEXT, reasoning_content=THOUGHTS)),
        (PLAIN, assistant(TEXT, [call()])),
        (THOUGHT, assistant(TEXT, [call()], reasoning_content="Something else.")),
        (THOUGHT, assistant(TEXT, reasoning_content=THOUGHTS)),
        (THOUGHT, assistant(None, [call()], reasoning_content=THOUGHTS)),
        (THOUGHT, assistant(f"{THOUGHTS} {TEXT}", [call()])),
        (CALL, assistant(None, [call("other")])),
        (CALL, assistant(None, [call(arguments={**ARGUMENTS, "city": "Rome"})])),
        (CALL, assistant(None, [call(arguments={**ARGUMENTS, "days": [2.5, 1]})])),
        (CALL, assistant(None, [call(), call()])),
        (CALL, assistant(None)),
        (CALL, assistant(f"Calling tools:\n{[call('other', ARGUMENTS)]}")),
        (CALL, assistant("Calling tools:\n[get_weather]")),
        (assistant(None, [call(), call("other")]), assistant(None, [call("other"), call()])),
        (assistant(None, [call(arguments='{"n": 1}')]), assistant(None, [call(arguments={"n": True})])),
        (assistant(None, [call(arguments='{"n": 1}')]), assistant(None, [call(arguments={"n": "1"})])),
        (assistant(None, [call(arguments='{"n": null}')]), assistant(None, [call(arguments={})])),
    ],
)  # fmt: skip
def test_a_different_answer_stays_a_different_one(answer: Any, back: Any) -> None:
    assert not knows(answer, back)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, 2.0]) | st.text("ab ", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.sampled_from("xyz"), JSON, max_size=3)
SAID = st.text("ab \n", max_size=3)
ANSWERS = st.tuples(SAID, SAID, st.lists(st.tuples(st.sampled_from(["f", "g"]), OBJECTS), max_size=2))


def sent(thoughts: str, text: str, calls: Any) -> dict[str, Any]:
    """An answer as the endpoint sends it."""
    content = (f"<think>{thoughts}</think>" if thoughts.strip() else "") + text
    listed = [call(name, json.dumps(arguments), f"call_{index}") for index, (name, arguments) in enumerate(calls)]
    return assistant(content, listed or None)


def sent_back(draw: st.DrawFn, thoughts: str, text: str, calls: Any) -> dict[str, Any]:
    """The same in a form that some client may give it."""
    space = st.sampled_from(["", " ", "\n\n"])
    text = f"{draw(space)}{text.strip()}{draw(space)}"
    listed = [
        call(
            name,
            draw(st.sampled_from([arguments, json.dumps(arguments, indent=1), json.dumps(arguments, sort_keys=True)])),
            draw(st.sampled_from([None, f"id{index}"])),
        )
        for index, (name, arguments) in enumerate(calls)
    ]
    made = assistant(text, listed or None, **draw(st.sampled_from([{}, NOTHING, {"name": "me"}])))
    if not text.strip() and listed:
        made["content"] = draw(st.sampled_from([None, "", " "]))
    if thoughts.strip():
        way = draw(st.sampled_from(["reasoning_content", "reasoning", "thinking", "within"]))
        if way == "within":
            made["content"] = f"<think>{draw(space)}{thoughts.strip()}{draw(space)}</think>{text}"
        else:
            made[way] = draw(space) + thoughts + draw(space)
    return made


def plain(value: Any) -> Any:
    """A value in which Python's equality of True and 1 does not count."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else (isinstance(value, bool), value)


@given(st.data(), ANSWERS, ANSWERS)
def test_exactly_the_answers_that_say_the_same_are_known(data: st.DataObject, answer: Any, other: Any) -> None:
    def meaning(thoughts: str, text: str, calls: Any) -> Any:
        return thoughts.strip(), text.strip(), plain(calls)

    other = data.draw(st.sampled_from([answer, other, (answer[0], *other[1:]), (*answer[:2], other[2])]))
    back = data.draw(st.composite(sent_back)(*other))
    thoughts, *rest = meaning(*answer)
    # Thoughts may be left out, but not be others.
    same = rest == list(meaning(*other)[1:]) and meaning(*other)[0] in (thoughts, "")
    assert knows(sent(*answer), back) == same


def test_rewritten_ids_are_followed_through_results_of_tools() -> None:
    session = Session()
    twice = assistant("", [call(call_id="call_a"), call("other", "{}", "call_b")])
    session.answer([ASK], twice)

    def turn(first: str, second: str, result: str = "sunny") -> list[Any]:
        return [
            ASK,
            assistant(None, [call(call_id=first), call("other", {}, second)]),
            {"role": "tool", "tool_call_id": first, "content": result},
            {"role": "tool", "tool_call_id": second, "content": "5"},
        ]

    second = session.answer(turn("call_a", "call_b"), assistant("Sunny."))
    again = {"role": "user", "content": "Sure?"}
    followed = session.follow([*turn("000000000", "000000001"), assistant("Sunny."), again])
    assert followed.answer is not None
    assert (followed.answer.turn, followed.length) == (second, 5)
    crossed = session.follow([*turn("a", "b")[:2], *turn("b", "a")[2:], assistant("Sunny."), again])
    assert (crossed.length, crossed.cause) == (2, Cause.HISTORY)
    other = session.follow([*turn("a", "b", "rainy"), assistant("Sunny."), again])
    assert (other.length, other.cause) == (2, Cause.HISTORY)


def test_forms_may_change_from_call_to_call() -> None:
    """Some clients keep the thoughts of the last answer alone."""
    session = Session()
    session.answer([ASK], THOUGHT)
    apart = assistant(TEXT, [call()], reasoning_content=THOUGHTS)
    tool = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    second = session.answer([ASK, apart, tool], assistant("<think>Good.</think>Sunny."))
    last = [ASK, assistant(TEXT, [call()]), tool, assistant("Sunny.", reasoning="Good."), ASK]
    followed = session.follow(last)
    assert followed.answer is not None
    assert followed.answer.turn is second


def test_of_answers_that_differ_by_thoughts_each_is_known_by_its_own() -> None:
    session = Session()
    turns = {said: session.answer([ASK], assistant(f"<think>{said}</think>{TEXT}")) for said in "abc"}
    for said, turn in turns.items():
        followed = session.follow([ASK, assistant(TEXT, reasoning=said), ASK])
        assert followed.answer is not None
        assert followed.answer.turn is turn
    bare = session.follow([ASK, assistant(TEXT), ASK])
    assert bare.answer is not None
    assert bare.answer.turn is turns["c"], "of several the latest"


def test_tools_are_no_part_of_a_conversation_but_decide_between_equals() -> None:
    session, other = Session(), [{"type": "function", "function": {"name": "other"}}]
    first = session.answer([ASK], PLAIN, TOOLS)
    second = session.answer([ASK], PLAIN, other)
    for tools, turn in ((TOOLS, first), (other, second), ([], second), ([*TOOLS, *other], second)):
        followed = session.follow([ASK, PLAIN, ASK], tools)
        assert followed.answer is not None
        assert followed.answer.turn is turn
        assert followed.answer.place.tools == (TOOLS if turn is first else other)


def test_text_after_a_stop_string_belongs_to_the_answer() -> None:
    """Agents put the stop string back, and write what they have found after it."""
    session = Session()
    turn = session.answer([ASK], assistant("Code: 1+1"), [], "Code: 1+1</code>")
    for content, added in (
        ("Code: 1+1", ""),
        ("Code: 1+1</code>", ""),
        (f"Code: 1+1</code>\n{RUN}", f"\n{RUN}"),
        ("Code: 1+1</code> 2", " 2"),
    ):  # fmt: skip
        followed = session.follow([ASK, assistant(content), ASK])
        assert followed.answer is not None
        assert (followed.answer.turn, followed.added) == (turn, added)
        # The next answer is found after just that text.
        later = session.answer([ASK, assistant(content), ASK], PLAIN)
        followed = session.follow([ASK, assistant(content), ASK, PLAIN, ASK])
        assert followed.answer is not None
        assert followed.answer.turn is later
    assert session.follow([ASK, assistant("Code: 1+1 is 2"), ASK]).cause is Cause.REWRITTEN


@pytest.mark.parametrize(
    ("content", "same"),
    [
        ("Code: 1+1</code>", True),
        ("Code: 1+1\n</code>\n", True),
        (f"Code: 1+1</code>\n{RUN}", True),
        (f"Code: 1+1\n{RUN}", True),
        ("Code: 1+1</code> and more", False),
        ("Code: 1+1 is 2</code>", False),
        (f"Code: 1+1</code>\n{RUN.replace('1+1', '2+2')}", False),
    ],
)
def test_a_stop_string_that_the_model_has_not_written_may_be_added(content: str, same: bool) -> None:
    """The API does not tell whether one has ended an answer. No other text can follow an answer that has ended."""
    session = Session()
    turn = session.answer([ASK], assistant("Code: 1+1"), [], "Code: 1+1", ("Observation:", "</code>"))
    followed = session.follow([ASK, assistant(content), ASK])
    assert (followed.answer is not None and followed.answer.turn is turn) == same
    assert not followed.added


@pytest.mark.parametrize(
    ("code", "retold", "same"),
    [
        ("half = f('a')\nprint(half)", "half = f('a')\nprint(half)", True),
        ('print("ü")', 'print("ü")', True),
        ("print(1)", "print(2)", False),
    ],
)
def test_code_that_an_answer_in_json_holds_may_be_told_again(code: str, retold: str, same: bool) -> None:
    """As smolagents' CodeAgent does with `use_structured_outputs_internally`."""
    for spelt in (json.dumps, lambda value: json.dumps(value, ensure_ascii=False, indent=1)):
        told = spelt({"thought": "Look.", "deep": [{"code": code}]})
        session, run = Session(), [{"id": "call_1", "function": {"name": "python_interpreter", "arguments": retold}}]
        turn = session.answer([ASK], assistant(told), [], told, ("Observation:", "Calling tools:", "</code>"))
        followed = session.follow([ASK, assistant(f"{told}\nCalling tools:\n{run}"), ASK])
        assert (followed.answer is not None and followed.answer.turn is turn) == same


@pytest.mark.parametrize(
    ("messages", "cause"),
    [
        ([ASK, PLAIN, ASK, PLAIN, ASK], None),
        ([ASK, PLAIN, {"role": "user", "content": "Another."}], None),
        ([ASK, assistant("else"), ASK], Cause.REWRITTEN),
        ([ASK, PLAIN, ASK, assistant("else"), ASK], Cause.REWRITTEN),
        ([ASK], Cause.REPEATED),
        ([ASK, PLAIN, ASK], Cause.REPEATED),
        ([{"role": "user", "content": "A summary."}], Cause.ANOTHER),
        ([{"role": "user", "content": "Cut."}, PLAIN, ASK], Cause.HISTORY),
        ([ASK, PLAIN, {"role": "user", "content": "Cut."}, PLAIN, ASK], Cause.HISTORY),
    ],
)
def test_causes_of_branches_are_named(messages: list[Any], cause: Cause | None) -> None:
    session = Session()
    assert session.follow(messages).cause is None, "the first call of a session continues nothing"
    session.answer([ASK], PLAIN)
    session.answer([ASK, PLAIN, ASK], PLAIN)
    assert session.follow(messages).cause is cause
