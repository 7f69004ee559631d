"""mean@n, pass@k and maj@n against their definitions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.evaluation.metrics import (
    answer_of,
    majority_reward,
    pass_at_k,
    pass_k_values,
    pass_metrics,
    prompt_metrics,
    vote_of,
)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(case: tuple[int, int, int]) -> None:
    n, right, k = case
    drawn = list(itertools.combinations(range(n), k))
    assert pass_at_k(n, right, k) == pytest.approx(sum(min(d) < right for d in drawn) / len(drawn))


def test_the_majority_is_rewarded_and_ties_are_halved() -> None:
    assert majority_reward(["7", "8", "7"], [1.0, 0.0, 1.0]) == 1.0
    assert majority_reward(["8", "8", "7"], [0.0, 0.0, 1.0]) == 0.0
    assert majority_reward(["8", "7"], [0.0, 1.0]) == 0.5
    assert majority_reward(["7", "7"], [1.0, 0.5]) == 0.75, "equal answers may be rewarded differently"


def test_a_response_without_an_answer_does_not_vote_where_others_do() -> None:
    assert majority_reward(["", "", "7"], [0.0, 0.0, 1.0]) == 1.0
    assert majority_reward(["", ""], [0.0, 1.0]) == 0.5


def test_the_scorer_says_what_the_answer_is() -> None:
    assert vote_of("so 3 = 3", "7") == "7"
    assert vote_of("so 3 = 3", "") == ""
    assert vote_of("so 3 = 3", None) == "3"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{never closed", "neverclosed"),
        ("2 + 2 = 4\n#### 4 \nindeed", "4"),
        ("3+4=7", "7"),
        (" The answer  is four. ", "Theanswerisfour"),
        ("", ""),
        ("So it is.\nAnswer: 42.", "42"),
        ("**Answer:** 42\nAsk me more", "42"),
        ("<answer> Paris </answer> is it", "Paris"),
        ("#### 1,000.50", "1000.5"),
        ("#### $7$", "7"),
        ("x = 5 is one root.\nThe other one is 7", "x=5isoneroot.Theotheroneis7"),
        ("#### 0.0", "0"),
        ("...", "..."),
    ],
)
def test_what_a_response_says_in_the_end(response: str, answer: str) -> None:
    assert answer_of(response) == answer


def test_metrics_are_means_over_prompts() -> None:
    prompts = [
        [(1.0, "=3"), (0.0, "=4"), (0.0, "=4"), (1.0, "=3"), (1.0, "=3")],
        [(0.0, "=1"), (0.2, "=2"), (0.0, "=1")],
        [],
    ]
    found = pass_metrics(prompts, n=5, right_at=1.0)
    assert pass_k_values(5) == [1, 2, 4, 5]
    assert pass_k_values(4) == [1, 2, 4]
    assert found["mean@5"] == pytest.approx((3 / 5 + 0.2 / 3) / 2)
    assert found["maj@5"] == pytest.approx((1.0 + 0.0) / 2)
    assert found["best@5"] == pytest.approx((1.0 + 0.2) / 2)
    assert found["pass@1"] == pytest.approx((3 / 5 + 0) / 2)
    assert found["pass@2"] == pytest.approx((1 - 1 / 10 + 0) / 2)
    assert found["pass@4"] == found["pass@5"] == 1.0, "only the first prompt has so many scored responses"
    assert pass_metrics(prompts, n=5, right_at=0.1)["pass@1"] == pytest.approx((3 / 5 + 1 / 3) / 2)
    assert pass_metrics([[(1.0, "x")]], n=1, right_at=1.0) == {}


_RESPONSES = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from("abc")), max_size=7)


@given(_RESPONSES, st.integers(1, 7))
def test_metrics_of_one_prompt_are_those_of_all_draws(scored: list[tuple[float, str]], n: int) -> None:
    scored = scored[:n]
    found = prompt_metrics(scored, n=n, right_at=0.5)
    if not scored:
        assert found == {}
        return
    rewards = [reward for reward, _ in scored]
    assert found.pop(f"mean@{n}") == pytest.approx(sum(rewards) / len(rewards))
    if n > 1:
        assert found.pop(f"best@{n}") == max(rewards)
        most = max(sum(other == text for _, other in scored) for _, text in scored)
        winners = {text for _, text in scored if sum(other == text for _, other in scored) == most}
        of_each = [[reward for reward, other in scored if other == text] for text in winners]
        expected = sum(sum(given) / most for given in of_each) / len(winners)
        assert found.pop(f"maj@{n}") == pytest.approx(expected)
    assert set(found) == {f"pass@{k}" for k in pass_k_values(n) if k <= len(scored)}
    for name, value in found.items():
        drawn = list(itertools.combinations(rewards, int(name.partition("@")[2])))
        assert value == pytest.approx(sum(max(some) >= 0.5 for some in drawn) / len(drawn))
