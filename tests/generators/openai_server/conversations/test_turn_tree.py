"""The record of a session is the straight one's, whatever is recorded, and costs no more the longer it gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.openai_server.conversations import prefix_index
from rollmesh.generators.openai_server.conversations.conversation_keys import (
    extend_key,
    text_symbols,
    totals_of_text,
)
from rollmesh.generators.openai_server.conversations.known_answers import AnswerPlace
from rollmesh.generators.openai_server.conversations.turn_tree import Turn, TurnTree, branches, transcript
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from tests.generators.openai_server.conversations.straight_record import StraightRecord, StraightTurn

# Few symbols: prompts that begin alike, and answers that are alike, are the rule.
IDS = st.lists(st.integers(0, 2), max_size=4)
ANSWERS = st.lists(st.integers(0, 2), min_size=1, max_size=3)
MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.sampled_from("ab")), min_size=1, max_size=3)


def sampled(ids: list[int]) -> Trajectory:
    version = PolicyVersion(1, sum(ids))
    log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Trajectory.sampled(np.array(ids, np.int32), log_probs, VersionRuns(((len(ids), version),)))


class Both:
    """The same calls on either."""

    def __init__(self) -> None:
        self.record, self.straight = TurnTree(), StraightRecord()
        self.alike: dict[int, StraightTurn] = {}

    def same(self, turn: Turn | None, straight: StraightTurn | None) -> None:
        assert (turn is None) == (straight is None)
        if turn is not None:
            assert self.alike[id(turn)] is straight

    def call(self, number: int, draw: Any) -> None:
        kind = draw(st.sampled_from(["ids", "text", "chat"]))
        before, asked, tools, text = None, [], "", ""
        told: Any = None
        if kind == "chat":
            known = [list(turn.messages) for turn in self.straight.turns if turn.messages]
            asked = [*draw(st.sampled_from([[], *known])), *draw(MESSAGES)]
            tools = draw(st.sampled_from(["", "x"]))
            followed = self.record.follow([{"role": role, "content": said} for role, said in asked], list(tools))
            before, told = followed.answer.turn if followed.answer is not None else None, followed.conversation
            self.same(before, self.straight.longest_known(asked, tools))
            assert before is None or followed.length == len(self.alike[id(before)].messages)
        elif kind == "text":
            text = draw(st.sampled_from(["", *(turn.text for turn in self.straight.turns)])) + draw(
                st.text("ab", max_size=2)
            )
            told = totals_of_text(text)
            found = self.record.longest_known(told)
            before = found[1] if found is not None else None
            self.same(before, self.straight.extended_by_text(text))
            assert found is None or found[0] - 1 == len(self.alike[id(found[1])].text)
        known_ids = [turn.ids for turn in self.straight.turns]
        new = [*draw(st.sampled_from([(), *known_ids])), *draw(IDS)] if before is None else draw(IDS)
        prompt = (*(self.alike[id(before)].ids if before is not None else ()), *new)
        position, parent = self.record.locate(before, new), self.straight.parent_of(prompt)
        self.same(position.parent, parent)
        # Answers may come in another order than calls, and there may be several.
        for choice in draw(st.permutations(range(draw(st.integers(1, 2))))):
            answer = draw(ANSWERS)
            key, place, messages, whole = None, None, asked, ""
            if kind == "chat":
                messages = [*asked, ("assistant", draw(st.sampled_from("ab")))]
                place = AnswerPlace.of(told, {"role": "assistant", "content": messages[-1][1]}, list(tools))
            elif kind == "text":
                said = draw(st.text("ab", max_size=2))
                whole = text + said
                key = extend_key(told, text_symbols(said)) if whole else None
            turn = self.record.add(
                number,
                choice,
                position,
                sampled(answer),
                "stop",
                key=key,
                place=place,
                messages=messages,  # type: ignore[arg-type]  # pairs are compared as well
            )
            straight = StraightTurn(number, choice, prompt, tuple(answer), parent, messages, tools, whole)
            self.straight.turns.append(straight)
            self.alike[id(turn)] = straight

    def check(self, prompt: list[int]) -> None:
        turns, straight = self.record.turns, self.straight
        assert [turn.ids().tolist() for turn in turns] == [list(turn.ids) for turn in straight.turns]
        last, chain = straight.last(), self.record.chain()
        self.same(self.record.last(), last)
        for turn, expected in zip(chain, last.chain(), strict=True):
            self.same(turn, expected)
        assert list(self.record.messages) == list(last.messages)
        dropped = [turn for turn in straight.turns if turn not in last.chain()]
        assert [self.alike[id(turn)] for turn in self.record.dropped(chain)] == dropped
        parents = [turn.parent for turn in dropped]
        assert branches(self.record.dropped(chain)) == sum(turn not in parents for turn in dropped)
        shown = self.record.to_json()
        assert [
            {name: turn[name] for name in expected} for turn, expected in zip(shown, straight.to_json(), strict=True)
        ] == (straight.to_json())
        assert self.record.tokens == sum(len(turn["prompt_ids"]) + len(turn["response_ids"]) for turn in shown)
        found, expected_trajectory = transcript(chain, prompt), straight.trajectory(tuple(prompt))
        assert (found is None) == (expected_trajectory is None)
        tokens = found.sampled() if found is not None else None
        if tokens is not None and expected_trajectory is not None:
            assert (tokens.response_ids.tolist(), tokens.response_mask.tolist()) == expected_trajectory


@given(st.data())
def test_every_record_is_the_straight_ones(data: st.DataObject) -> None:
    both = Both()
    for number in data.draw(st.permutations(range(data.draw(st.integers(1, 8))))):
        both.call(number, data.draw)
    both.check(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_of_calls_that_say_the_same_the_latest_is_continued(order: tuple[int, ...]) -> None:
    record, told = TurnTree(), totals_of_text("a")
    for call in order:
        record.add(call, 0, record.locate(None, [call]), sampled([5]), "stop", key=extend_key(told, text_symbols("b")))
    found = record.longest_known(totals_of_text("abc"))
    assert found is not None
    assert (found[0] - 1, found[1].call) == (2, 2)


@given(st.lists(st.integers(0, 2**63), max_size=9), st.integers(0, 9))
def test_totals_continue_from_any_beginning(symbols: list[int], cut: int) -> None:
    cut = min(cut, len(symbols))
    whole = prefix_index.totals(symbols)
    first = prefix_index.totals(symbols[:cut])
    assert [*first, *prefix_index.totals(symbols[cut:], cut, int(first[-1]))[1:]] == list(whole)
    assert len(set(whole.tolist())) == len(whole)


def test_a_longer_session_makes_no_call_costlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the symbols that are gone through for a call, and the tokens that are kept of it."""
    gone_through = 0
    totals = prefix_index.totals

    def counting(symbols: Any, start: int = 0, total: int = 0) -> prefix_index.Totals:
        nonlocal gone_through
        gone_through += len(symbols)
        return totals(symbols, start, total)

    monkeypatch.setattr("rollmesh.generators.openai_server.conversations.turn_tree.totals", counting)
    record, before, costs, kept = TurnTree(), None, [], []
    for number in range(300):
        gone_through, held = 0, record.tokens
        position = record.locate(before, [5] * 7)
        before = record.add(number, 0, position, sampled([1, 2, 3]), "stop")
        costs.append(gone_through)
        kept.append(record.tokens - held)
    assert set(costs) == set(kept) == {10}
    assert before is not None
    assert before.length == len(before.ids()) == 3000
