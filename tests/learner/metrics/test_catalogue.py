"""The catalogue: one meaning per name, second names, and its page."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from rollmesh.learner.algorithms import losses  # noqa: F401 - importing them fills the registry
from rollmesh.learner.algorithms.metrics import distribution, summarize
from rollmesh.learner.algorithms.registry import POLICY_LOSSES, build_policy_loss
from rollmesh.learner.algorithms.settings import Component
from rollmesh.learner.algorithms.types import TokenBatch
from rollmesh.learner.metrics.catalogue import CATALOGUE, catalogue_markdown, describe
from rollmesh.learner.metrics.writer import with_aliases

METRICS = [metric for section in CATALOGUE.values() for metric in section]


def test_a_name_has_one_meaning() -> None:
    names = Counter(name for metric in METRICS for name in (metric.name, *metric.aliases))
    assert [name for name, count in names.items() if count > 1] == []
    for metric in METRICS:
        for alias in metric.aliases:
            assert set(re.findall(r"<(\w+)>", alias)) <= set(re.findall(r"<(\w+)>", metric.name)), metric.name


def test_records_carry_the_peers_names_too() -> None:
    record = {"critic/score/mean": 0.5, "actor/loss": 1.0, "timing_s/step": 2.0, "eval/reward": 0.25, "unheard/of": 3}
    written = with_aliases(record)
    assert record.items() <= written.items()
    second = {"reward": 0.5, "loss": 1.0, "step_time": 2.0, "eval_reward": 0.25}
    assert written == {**record, **second}
    assert with_aliases({"critic/score/mean": 0.5, "reward": 9})["reward"] == 9


def test_families_describe_their_members() -> None:
    found = describe("rewards/file.py:style/mean")
    assert found is not None
    assert (found.name, found.trl) == ("rewards/<function>/mean", "rewards/<function>/mean")
    assert describe("rewards/a/b/c/mean") is None
    assert describe("nonsense") is None
    assert describe("actor/is_masked") is describe("actor/is_masked_low") is not None
    assert describe("actor/is_masked_left") is None
    for name in distribution("critic/values", torch.arange(3.0)) | distribution("reward/raw", torch.arange(3.0)):
        assert describe(name) is not None, name


@pytest.mark.parametrize("name", POLICY_LOSSES.names)
def test_what_losses_report_is_described(name: str) -> None:
    lengths = torch.tensor([3, 2])
    values = torch.linspace(-2.0, -0.5, 5)
    tokens = TokenBatch(
        sequence_ids=torch.repeat_interleave(lengths),
        sequence_lengths=lengths,
        behaviour_log_probs=values,
        advantages=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        staleness=torch.zeros(5, dtype=torch.int32),
        sequence_rewards=torch.ones(2),
        selected=torch.ones(5, dtype=torch.bool),
    )
    loss, _, _ = build_policy_loss(Component(name))
    _, metrics = loss(values + 0.1, values, tokens)
    assert {name for name in summarize([metrics], 5) if describe(name) is None} == set()


def test_the_page_lists_every_metric_once() -> None:
    page = catalogue_markdown()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| `")]
    assert rows == [f"`{metric.name}`" for metric in METRICS]
    assert (
        "| `response_length/mean` | Mean length of the responses. | tokens | same | `completions/mean_length` |" in page
    )
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in page.splitlines() if line.startswith("|"))
