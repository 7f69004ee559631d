"""Decisions of the judge over virtual clocks and given texts: no I/O."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.reward_service.judge import pairs
from rollmesh.reward_service.judge.budget import Budget, Usage
from rollmesh.reward_service.judge.errors import (
    AnswerError,
    JudgeError,
    RefusedError,
    SpentError,
    ThrottledError,
    UnavailableError,
)
from rollmesh.reward_service.judge.hedging import Hedging
from rollmesh.reward_service.judge.limits import Limits, TokenBucket
from rollmesh.reward_service.judge.retries import backoff_s, seconds_of, status_error
from rollmesh.reward_service.judge.templates import Template
from rollmesh.reward_service.judge.verdicts import combined, score_on, winner
from rollmesh.reward_service.outcomes import RewardItem

NOW = datetime(2030, 1, 1, tzinfo=UTC)


# ---------------------------------------------------------------------------------------------- limits


def test_a_bucket_keeps_its_rate_in_order() -> None:
    bucket = TokenBucket(60.0, now=0.0)  # one a second, ten at once
    begun = []
    for _ in range(30):
        delay = bucket.delay_s(1, 0.0)
        bucket.take(1, 0.0)
        begun.append(delay)
    assert begun == [0.0] * 10 + [float(n) for n in range(1, 21)]


def test_a_request_above_the_buckets_size_waits_for_a_full_one() -> None:
    bucket = TokenBucket(60.0, now=0.0)
    bucket.take(5, 0.0)
    assert bucket.delay_s(1000, 0.0) == 5.0
    bucket.take(1000, 5.0)
    assert bucket.delay_s(1, 5.0) == 991.0


def test_limits_take_the_longest_of_all_delays() -> None:
    limits = Limits(600.0, 6000.0, now=0.0)  # ten requests and a hundred tokens a second
    limits.take(1000, 0.0)
    assert limits.delay_s(100, 0.0) == 1.0
    limits.take(-500, 0.0, requests=0)  # fewer were used than estimated
    assert limits.delay_s(100, 0.0) == 0.0
    limits.pause(3.0, 0.0)
    assert limits.delay_s(1, 1.0) == 2.0
    limits.pause(1e9, 1.0)
    assert limits.delay_s(1, 1.0) == 60.0


def test_without_limits_there_is_no_delay() -> None:
    limits = Limits(None, None, now=0.0)
    limits.take(10**9, 0.0)
    assert limits.delay_s(10**9, 1.0) <= 0.0


# ---------------------------------------------------------------------------------------------- hedging


def test_requests_are_hedged_after_most_times_and_rarely() -> None:
    hedging = Hedging(0.05)
    assert hedging.begin() is None
    for n in range(100):
        hedging.answered(n / 100)
    assert hedging.begin() == 0.94
    hedged = 0
    for _ in range(998):
        hedging.begin()
        hedged += hedging.take()
    assert hedged == 50


def test_hedging_can_be_off() -> None:
    hedging = Hedging(0.0)
    for _ in range(50):
        hedging.answered(0.1)
    assert hedging.begin() is None
    assert not hedging.take()


# ---------------------------------------------------------------------------------------------- budget


def test_requests_in_progress_count_in_full() -> None:
    budget = Budget(100, None, 0.0, 0.0)
    budget.reserve(Usage(20, 40))
    with pytest.raises(SpentError, match="60 of 100 tokens"):
        budget.reserve(Usage(20, 40))
    budget.settle(Usage(20, 40), Usage(10, 5))
    budget.reserve(Usage(20, 40))
    assert budget.tokens == 75


def test_money_is_counted_by_both_prices() -> None:
    budget = Budget(None, 1.0, 2.0, 10.0)
    budget.reserve(Usage(250_000, 50_000))
    assert budget.cost == pytest.approx(1.0)
    with pytest.raises(SpentError, match="budget_cost"):
        budget.reserve(Usage(1, 1))


# ---------------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize(
    ("status", "after", "text", "kind"),
    [
        (429, "2", "slow down", ThrottledError),
        (429, None, '{"error": {"code": "insufficient_quota"}}', RefusedError),
        (503, "5", "", ThrottledError),
        (503, None, "", UnavailableError),
        (500, None, "", UnavailableError),
        (408, None, "", UnavailableError),
        (401, None, "", RefusedError),
        (307, None, "", RefusedError),
        (404, None, "", RefusedError),
        (499, None, "", RefusedError),
        (599, None, "", UnavailableError),
    ],
)
def test_statuses_are_typed(status: int, after: str | None, text: str, kind: type[JudgeError]) -> None:
    error = status_error(status, after, text, NOW)
    assert type(error) is kind
    assert str(status) in str(error)
    assert error.outcome().retryable is (kind is not RefusedError)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Tue, 01 Jan 2030 00:00:09 GMT", 9.0),
        ("Tue, 01 Jan 2019 00:00:09 GMT", 0.0),
        ("soon", None),
        (f"Tue, 01 Jan {'9' * 20} 00:00:09 GMT", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float | None) -> None:
    assert seconds_of(header, NOW) == seconds


def test_backoff_grows_to_a_bound_and_is_spread() -> None:
    assert [backoff_s(n, 1.0) for n in (1, 2, 3, 100)] == [0.5, 1.0, 2.0, 8.0]
    assert backoff_s(3, 0.25) == 0.5


# ---------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    "answer",
    [
        '{"reason": "fine", "score": 7}',
        'Here it is:\n```json\n{"reason": "fine", "score": 7.0}\n```',
        '<think>maybe {"score": 1}?</think>{"reason": "fine", "score": 7}',
        '[THINK]maybe {"score": 1}?[/THINK]{"reason": "fine", "score": 7}',
    ],
)
def test_verdicts_are_found_in_answers(answer: str) -> None:
    verdict = score_on((0.0, 10.0)).read(answer)
    assert (verdict.value, verdict.reason) == (7.0, "fine")


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "7",
        "no braces } {",
        '{"score": 7',
        '{"reason": "no score"}',
        '{"score": "7"}',
        '{"score": true}',
        '{"score": NaN}',
        '{"score": 1e999}',
        '{"score": 11}',
        '{"score": -0.1}',
        '{"score": 7, "reason": ["a"]}',
        '{"score": 1} or {"score": 2}',
        '{"a":' * 100_000 + "}",
        '{"score": 7}' + " " * 300_000,
    ],
)
def test_what_is_no_verdict_is_an_error(answer: str) -> None:
    with pytest.raises(AnswerError):
        score_on((0.0, 10.0)).read(answer)


def test_winners_are_named() -> None:
    values = {name: winner().read(json.dumps({"winner": name})).value for name in ("first", "second", "tie")}
    assert values == {"first": 1.0, "second": 0.0, "tie": 0.5}
    for wrong in ("A", 1, None, ["first"]):
        with pytest.raises(AnswerError):
            winner().read(json.dumps({"winner": wrong}))


def test_votes_are_reduced() -> None:
    assert combined([1.0, 2.0, 9.0], "mean") == 4.0
    assert combined([1.0, 2.0, 9.0], "median") == 2.0


# ---------------------------------------------------------------------------------------------- pairs


@pytest.mark.parametrize("count", range(2, 12))
@pytest.mark.parametrize("opponents", [None, 1, 2, 3, 4, 20])
def test_each_response_has_as_many_opponents_as_the_others(count: int, opponents: int | None) -> None:
    found = pairs.schedule(count, opponents)
    assert len(found) == len(set(found))
    assert all(first < second for first, second in found)
    numbers = {sum(place in pair for pair in found) for place in range(count)}
    wanted = count - 1 if opponents is None else opponents + opponents % 2
    assert numbers == {min(wanted, count - 1)}


def test_a_judge_that_favours_a_place_decides_nothing() -> None:
    values = dict.fromkeys(pairs.schedule(3, None), (1.0, 0.0))
    assert pairs.rewards(3, values) == [(0.5, 0.0)] * 3


def test_rewards_are_shares_of_comparisons_won() -> None:
    values = {(0, 1): (1.0, 1.0), (0, 2): (1.0, 0.5), (1, 2): (0.5, 0.5)}
    assert pairs.rewards(3, values) == [(0.875, 0.5), (0.25, 1.0), (0.375, 0.5)]


# ---------------------------------------------------------------------------------------------- templates


def item(**fields: Any) -> RewardItem:
    values = {"item_id": "a", "group_id": "g", "data_source": "s", "prompt": "2+2=", "response": "4"}
    return RewardItem(**{**values, **fields})


def written(folder: Path, text: str) -> Path:
    path = folder / "template.yaml"
    path.write_text(text)
    return path


def test_the_packages_templates_show_all_that_is_judged() -> None:
    score = Template(None, "score", (0.0, 10.0))
    system, user = score.messages(item(ground_truth="four"), {"response": "it is 4"})
    assert (system["role"], user["role"]) == ("system", "user")
    assert "from 0 to 10" in system["content"]
    assert all(part in user["content"] for part in ("2+2=", "it is 4", "four"))
    assert "reference" not in score.messages(item(), {"response": "4"})[1]["content"]
    compared = Template(None, "pairs", (0.0, 1.0)).messages(item(), {"first": "4", "second": "5"})
    assert compared[1]["content"].index("4\n</first") < compared[1]["content"].index("5\n</second")


def test_braces_in_a_response_fetch_nothing() -> None:
    template = Template(None, "score", (0.0, 10.0))
    (_, user) = template.messages(item(ground_truth="42"), {"response": "{ground_truth} {extra.key} {0} {"})
    assert "{ground_truth} {extra.key} {0} {" in user["content"]


def test_a_response_cannot_forge_its_end() -> None:
    template = Template(None, "score", (0.0, 10.0))
    texts = [template.messages(item(), {"response": text})[1]["content"] for text in ("a", "b", "a")]
    marks = [text.partition("<response ")[2].partition(">")[0] for text in texts]
    assert marks[0] == marks[2] != marks[1]
    assert all(len(mark) == 12 for mark in marks)


def test_fields_of_rows_are_filled_in(tmp_path: Path) -> None:
    path = written(tmp_path, 'user: "{response} {extra.rubric.text} {extra.n} {ground_truth} {\\"score\\": 1}"')
    template = Template(path, "score", (0.0, 1.0))
    row = item(ground_truth=["x"], extra_info={"rubric": {"text": "be kind"}, "n": 3})
    (user,) = template.messages(row, {"response": "r"})
    assert user["content"] == 'r be kind 3 ["x"] {"score": 1}'


@pytest.mark.parametrize(
    ("field", "missing"), [("extra.rubric", "extra_info.rubric"), ("ground_truth", "ground_truth")]
)
def test_a_row_without_a_needed_field_is_refused(tmp_path: Path, field: str, missing: str) -> None:
    template = Template(written(tmp_path, f'user: "{{response}} {{{field}}}"'), "score", (0.0, 1.0))
    with pytest.raises(PayloadError, match=missing):
        template.messages(item(), {"response": "r"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('user: "{response} {promt}"', "promt"),
        ('user: "{prompt}"', "lacks {response}"),
        ('system: "s"', "no text `user`"),
        ('user: "{response}"\nusr: "x"', "unknown text 'usr'"),
        ("user: 3", "no text `user`"),
        ("user: [", "cannot be read"),
        ("user: !!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_wrong_templates_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        Template(written(tmp_path, text), "score", (0.0, 1.0))


def test_an_answer_without_a_body_has_no_loose_end() -> None:
    assert str(status_error(429, "1", "", datetime.now(UTC))).startswith("the endpoint answers 429")
    assert "429: " not in str(status_error(429, "1", "", datetime.now(UTC)))
