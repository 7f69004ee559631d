"""Sessions: what is recorded, and that tokens once sampled stay as they were."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from rollmesh.generators.engines.types import SamplingParams
from rollmesh.generators.openai_server.conversations.sessions import RunningAnswer, SamplingPolicy, Session, Sessions
from rollmesh.generators.openai_server.conversations.turn_tree import transcript
from rollmesh.generators.openai_server.errors import ApiError
from rollmesh.mesh.config.rollout import EndpointSection
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import VersionRuns
from tests.generators.openai_server.world import TOOL, Serving

ASK: Any = {"role": "user", "content": "the quick fox"}
IDS: Any = {"return_token_ids": True}


def client_of(serving: Serving, session: Session | str) -> OpenAI:
    if isinstance(session, str):
        return OpenAI(base_url=f"{serving.url}/sessions/{session}/v1", api_key="none", max_retries=0)
    return OpenAI(base_url=f"{serving.url}/sessions/{session.name}/v1", api_key=session.key, max_retries=0)


def trained(serving: Serving, prompt: str = "<user>", **sampling: Any) -> Session:
    policy = SamplingPolicy(
        tuple(serving.tokenizer.encode(prompt)), SamplingParams(**{"max_tokens": 250, "seed": 9, **sampling})
    )
    return serving.endpoint.sessions.open_training(policy)


def ask(client: OpenAI, messages: list[Any], **more: Any) -> Any:
    [choice] = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=10, extra_body=IDS, **more
    ).choices
    return choice


def test_sampled_tokens_are_never_made_of_text_again(serving: Serving) -> None:
    session = trained(serving)
    client = client_of(serving, session)
    messages, expected, kept, drifted = [ASK], None, [], 0
    for turn in range(4):
        choice = ask(client, messages)
        ids, prompt = choice.token_ids, choice.prompt_token_ids
        if expected is not None:
            assert prompt[: len(expected)] == expected
            between = serving.tokenizer.decode(prompt[len(expected) :])
            assert between.removeprefix("<eot>") == f"<user>{turn}<eot><assistant>"
            assert between.startswith("<eot>") == (expected[-1] not in (1, 2)), "one end ends a turn"
        expected = [*prompt, *ids]
        kept.append(ids)
        drifted += serving.tokenizer.encode(choice.message.content) != ids
        # As agents do: the package's own object, a dictionary of it, or what matters.
        said = choice.message
        message = (said, said.model_dump(), {"role": "assistant", "content": said.content + " "})[turn % 3]
        messages = [*messages, message, {"role": "user", "content": str(turn + 1)}]
    assert drifted, "some answer would have been tokenised otherwise"
    chain = session.record.chain()
    assert [turn.sampled.response_ids.tolist() for turn in chain] == kept
    assert session.policy is not None
    found = transcript(chain, session.policy.prompt_ids)
    assert found is not None
    tokens = found.sampled()
    assert tokens is not None
    assert [*session.policy.prompt_ids, *tokens.response_ids.tolist()] == expected
    assert tokens.response_ids[tokens.response_mask == 1].tolist() == [token for ids in kept for token in ids]
    assert not tokens.log_probs[tokens.response_mask == 0].any()
    every = [*session.policy.prompt_ids, *tokens.response_ids.tolist()]
    chances = [serving.log_chances[last, new] for last, new in itertools.pairwise(every)]
    np.testing.assert_allclose(
        tokens.log_probs[tokens.response_mask == 1], np.array(chances)[tokens.response_mask == 1], atol=1e-3
    )
    serving.endpoint.sessions.forget(session)


def test_only_sessions_of_training_sample_for_groups(serving: Serving) -> None:
    """Calls from outside must not make a run that stands still look alive."""

    def sampled(session: Session | str) -> tuple[int, int]:
        before = serving.engine.status()
        choice = ask(client_of(serving, session), [ASK])
        after = serving.engine.status()
        assert after.tokens_generated - before.tokens_generated == len(choice.token_ids) > 0
        return after.tokens_for_groups - before.tokens_for_groups, len(choice.token_ids)

    session = trained(serving)
    for_groups, every = sampled(session)
    assert for_groups == every
    assert sampled("somebody")[0] == 0
    serving.endpoint.sessions.forget(session)


def test_a_tools_answer_goes_on_from_the_call(serving: Serving) -> None:
    session = trained(serving, "<system>")
    client = client_of(serving, session)
    call = ask(client, [ASK], tools=[TOOL])
    result = {"role": "tool", "tool_call_id": call.message.tool_calls[0].id, "content": "5"}
    answer = ask(client, [ASK, call.message, result], tools=[TOOL])
    assert answer.prompt_token_ids[: len(call.prompt_token_ids) + 2] == [*call.prompt_token_ids, *call.token_ids]
    assert len(session.record.chain()) == 2
    serving.endpoint.sessions.forget(session)


OTHER: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "later",
    [{}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tools": [OTHER, TOOL]}, {"tools": [OTHER]}],
    ids=["without", "none", "empty", "more", "others"],
)
def test_tools_of_a_later_call_leave_the_conversation_whole(serving: Serving, later: Any) -> None:
    session = trained(serving, "<system>")
    client = client_of(serving, session)
    call = ask(client, [ASK], tools=[TOOL])
    result = {"role": "tool", "tool_call_id": call.message.tool_calls[0].id, "content": "5"}
    answer = ask(client, [ASK, call.message, result], **later)
    assert answer.prompt_token_ids[: len(call.prompt_token_ids) + 2] == [*call.prompt_token_ids, *call.token_ids]
    last = ask(client, [ASK, call.message, result, answer.message, ASK], tools=[TOOL])
    assert last.prompt_token_ids[: len(answer.prompt_token_ids)] == answer.prompt_token_ids
    assert len(session.record.chain()) == 3
    assert not session.causes
    assert session.hidden_tools == ({"other"} if OTHER in later.get("tools", ()) else set())
    serving.endpoint.sessions.forget(session)


def test_the_first_tools_of_a_conversation_begin_a_branch(serving: Serving) -> None:
    """The model has to see them."""
    session = trained(serving, "<")
    client = client_of(serving, session)
    plan = ask(client, [ASK])
    call = ask(client, [ASK, plan.message, ASK], tools=[TOOL])
    assert call.message.tool_calls
    assert session.causes == {"tools": 1}
    serving.endpoint.sessions.forget(session)


def test_tools_stay_in_the_prompt_where_none_may_be_called(serving: Serving) -> None:
    client = client_of(serving, "none-may-be-called")
    shown, none, without = (
        ask(client, [ASK], **more) for more in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {})
    )
    assert none.prompt_token_ids == shown.prompt_token_ids != without.prompt_token_ids
    # The model may write one all the same: it is text.
    assert (none.finish_reason, none.message.tool_calls, shown.finish_reason) == ("stop", None, "tool_calls")
    assert "<tool_call>" in none.message.content


def test_text_that_an_agent_adds_after_a_stop_string_is_masked(serving: Serving) -> None:
    session = trained(serving)
    client = client_of(serving, session)
    first = ask(client, [ASK])
    text = first.message.content.strip()
    session = trained(serving)
    client = client_of(serving, session)
    # Text that ends with a token: the sampled tokens hold nothing behind it.
    pieces = [serving.tokenizer.decode(token).strip() for token in first.token_ids[1:]]
    stop = next(piece for piece in pieces if len(piece) > 1 and text.count(piece) == 1)
    cut = ask(client, [ASK], stop=[stop])
    assert cut.message.content == text[: text.index(stop)]
    rewritten = {"role": "assistant", "content": cut.message.content + stop + " and"}
    second = ask(client, [ASK, rewritten, ASK])
    before = [*cut.prompt_token_ids, *cut.token_ids]
    assert second.prompt_token_ids[: len(before)] == before
    between = serving.tokenizer.decode(second.prompt_token_ids[len(before) :])
    assert between.endswith(" and<eot><user>the quick fox<eot><assistant>")
    third = ask(client, [ASK, rewritten, ASK, second.message, ASK])
    assert third.prompt_token_ids[: len(second.prompt_token_ids)] == second.prompt_token_ids
    assert len(session.record.chain()) == 3
    serving.endpoint.sessions.forget(session)


def test_rewritten_history_begins_a_branch_and_the_last_call_decides(serving: Serving) -> None:
    session = trained(serving)
    client = client_of(serving, session)
    first = ask(client, [ASK])
    again = {"role": "user", "content": "again"}
    second = ask(client, [ASK, first.message, again])
    forgotten = ask(client, [ASK, {"role": "assistant", "content": "something else"}, again])
    assert [turn.sampled.response_ids.tolist() for turn in session.record.chain()] == [forgotten.token_ids]
    assert len(session.record.dropped(session.record.chain())) == 2
    third = ask(client, [ASK, first.message, again, second.message, again])
    chain = session.record.chain()
    assert [turn.sampled.response_ids.tolist() for turn in chain] == [
        first.token_ids, second.token_ids, third.token_ids,
    ]  # fmt: skip
    serving.endpoint.sessions.forget(session)


def test_text_completions_go_on_too(serving: Serving) -> None:
    session = trained(serving, "the")
    client = client_of(serving, session)
    first: Any = client.completions.create(model="tiny", prompt="the", max_tokens=8, extra_body=IDS).choices[0]
    so_far = [*first.prompt_token_ids, *first.token_ids]
    text: Any = client.completions.create(
        model="tiny", prompt=f"the{first.text} lazy", max_tokens=8, extra_body=IDS
    ).choices[0]
    assert text.prompt_token_ids == [*so_far, *serving.tokenizer.encode(" lazy")]
    tokens: Any = client.completions.create(
        model="tiny", prompt=[*text.prompt_token_ids, *text.token_ids, 7], max_tokens=8
    ).choices[0]
    assert tokens.finish_reason in ("length", "stop")
    assert len(session.record.chain()) == 3
    serving.endpoint.sessions.forget(session)


def test_training_decides_how_tokens_are_drawn(serving: Serving) -> None:
    def first_ids(**asked: Any) -> list[int]:
        session = trained(serving)
        ids: list[int] = ask(client_of(serving, session), [ASK], **asked).token_ids
        serving.endpoint.sessions.forget(session)
        return ids

    before = serving.figure("sampling_ignored_total", parameter="temperature")
    plain = first_ids()
    assert plain == first_ids(temperature=0.1, top_p=0.2, seed=1, presence_penalty=1.0, logit_bias={"5": 50})
    assert serving.figure("sampling_ignored_total", parameter="temperature") == before + 1
    greedy = trained(serving, temperature=0.0)
    ids = ask(client_of(serving, greedy), [ASK], temperature=1.5).token_ids
    assert ids[0] == int(serving.log_chances[serving.tokenizer.convert_tokens_to_ids("<assistant>")].argmax())
    any_model = client_of(serving, greedy).chat.completions.create(model="gpt-4o", messages=[ASK], max_tokens=1)
    assert any_model.model == "tiny"
    serving.endpoint.sessions.forget(greedy)


def test_a_session_of_training_has_a_key_a_budget_and_an_end(serving: Serving) -> None:
    session = trained(serving, max_tokens=30)
    with pytest.raises(openai.AuthenticationError):
        ask(client_of(serving, session.name), [ASK])
    client = client_of(serving, session)
    with pytest.raises(openai.BadRequestError, match="may have at most 31") as refused:
        ask(client, [{"role": "user", "content": "to be or not to be " * 9}])
    assert refused.value.code == "context_length_exceeded"
    choice = client.chat.completions.create(model="tiny", messages=[ASK], extra_body=IDS).choices[0]
    assert len(choice.prompt_token_ids) + len(choice.token_ids) <= 31  # type: ignore[attr-defined]
    session.over = True
    with pytest.raises(openai.APIStatusError) as over:
        ask(client, [ASK])
    assert over.value.status_code == 410
    serving.endpoint.sessions.forget(session)


def test_a_recorded_beginning_is_repeated_while_the_client_asks_the_same(serving: Serving) -> None:
    again = {"role": "user", "content": "again"}
    for seed in itertools.count(1):
        first = trained(serving, seed=seed)
        client = client_of(serving, first)
        one = ask(client, [ASK])
        if len(ask(client, [ASK, one.message, again]).token_ids) > 4:
            break
    assert first.policy is not None
    found = transcript(first.record.chain(), first.policy.prompt_ids)
    assert found is not None
    whole = found.sampled()
    assert whole is not None
    # As a draft that ends within the second answer; drawn by another seed, nothing else would come out alike.
    cut = len(whole) - 4
    draft = whole.part(0, cut)
    policy = SamplingPolicy(first.policy.prompt_ids, SamplingParams(max_tokens=250, seed=77), replay=draft)
    later = serving.endpoint.sessions.open_training(policy)
    client = client_of(serving, later)
    repeated = ask(client, [ASK])
    assert repeated.token_ids == one.token_ids
    streamed = client.chat.completions.create(
        model="tiny", messages=[ASK, repeated.message, again], max_tokens=10, stream=True, extra_body=IDS
    )
    ids = [token for part in streamed for token in getattr(part.choices[0], "token_ids", None) or []]
    last = first.record.chain()[-1].sampled.response_ids.tolist()
    assert ids[: len(last) - 4] == last[:-4]
    continued = transcript(later.record.chain(), policy.prompt_ids)
    assert continued is not None
    tokens = continued.sampled()
    assert tokens is not None
    assert tokens.response_ids[:cut].tolist() == draft.response_ids.tolist()
    np.testing.assert_array_equal(tokens.log_probs[:cut], draft.log_probs)
    assert ask(client, [{"role": "user", "content": "another"}]).token_ids != one.token_ids
    for session in (first, later):
        serving.endpoint.sessions.forget(session)


def test_a_clients_own_session_is_shown_and_deleted(serving: Serving) -> None:
    client = client_of(serving, "mine")
    choice = ask(client, [ASK], temperature=0.5)
    http = openai.OpenAI(base_url=serving.url, api_key="none")
    shown = http.get("/sessions/mine", cast_to=object)
    assert isinstance(shown, dict)
    [turn] = shown["turns"]
    assert turn["response_ids"] == choice.token_ids
    assert turn["versions"] == [[len(choice.token_ids), 1, 0]]
    http.delete("/sessions/mine", cast_to=object)
    with pytest.raises(openai.NotFoundError):
        http.get("/sessions/mine", cast_to=object)


def test_the_figure_of_sessions_is_that_of_now(serving: Serving) -> None:
    before = serving.figure("sessions")
    session = trained(serving)
    assert serving.figure("sessions") == before + 1
    serving.endpoint.sessions.forget(session)
    assert serving.figure("sessions") == before == len(serving.endpoint.sessions)


def test_sessions_are_forgotten_in_time_but_for_those_at_work() -> None:
    now = 0.0
    sessions = Sessions(EndpointSection(max_sessions=2, session_s=60.0), lambda: now)
    idle, busy = sessions.get_or_create("idle"), sessions.get_or_create("busy")
    training = sessions.open_training(SamplingPolicy((5,), SamplingParams()))
    with busy.sampling({"request": RunningAnswer(0, 0, None)}):
        now = 60.0
        assert (sessions.find("idle"), sessions.find("busy")) == (idle, busy)
        with pytest.raises(ApiError, match="recorded already"):
            sessions.get_or_create("new")
        now = 61.0
        assert (sessions.find("idle"), sessions.find("busy")) == (None, busy)
        assert idle.over
        assert sessions.get_or_create("idle") is not idle
    assert sessions.find("busy") is None
    assert sessions.find(training.name) is training
    assert len(sessions) == 2


def test_full_sessions_take_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(EndpointSection(session_answers=3), lambda: 0.0)
    session = sessions.get_or_create("mine")
    tokens = Trajectory.sampled(np.zeros(4, np.int32), np.zeros(4, np.float32), VersionRuns(()))
    for call in range(2):
        session.record.add(call, 0, session.record.locate(None, [call]), tokens, "stop")
    session.check_room(1, 100)
    with pytest.raises(ApiError, match="at most 3") as full:
        session.check_room(2, 100)
    assert (full.value.status, full.value.reason) == (400, "session_full")
    # A response that is being sampled has its room already.
    with session.sampling({"request": RunningAnswer(2, 0, None)}), pytest.raises(ApiError, match="at most 3"):
        session.check_room(1, 100)
    assert session.counts["no_room"] == 2
    monkeypatch.setattr("rollmesh.generators.openai_server.conversations.sessions._SESSION_TOKENS", 10)
    session.check_room(1, 1)
    monkeypatch.setattr("rollmesh.generators.openai_server.conversations.sessions._LONGEST_CONVERSATIONS", 1)
    with pytest.raises(ApiError, match="10 tokens recorded"):
        session.check_room(1, 1)
    monkeypatch.setattr("rollmesh.generators.openai_server.conversations.sessions._ALL_TOKENS", 10)
    for name in ("mine", "another"):
        with pytest.raises(ApiError, match="with 10 tokens") as crowded:
            sessions.get_or_create(name)
        assert crowded.value.status == 429
    sessions.forget(session)
    assert sessions.get_or_create("another").record.tokens == 0
