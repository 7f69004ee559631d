"""Settings, registries and user code: what can go wrong in a configuration is named at start."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest
import torch

from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.presets import GRPO
from rollmesh.learner.algorithms.registry import ADVANTAGES, ALGORITHMS, POLICY_LOSSES, Registry
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import Group, UpdatePlan
from tests.learner.algorithms.test_presets import a_batch

STALE = UpdatePlan(max_staleness=4)


@pytest.mark.parametrize(
    ("params", "field", "hint"),
    [
        ({"los": "ppo"}, "algorithm.los", "loss"),
        ({"loss": {"clip": 0.1}}, "algorithm.loss.clip", "clip_low"),
        ({"loss": "pppo"}, "algorithm.loss", "ppo"),
        ({"loss": {"clip_low": "wide"}}, "algorithm.loss.clip_low", ""),
        ({"loss": {"clip_low": 2.0}}, "algorithm.loss.clip_low", ""),
        ({"loss": {"clip_high": -0.1}}, "algorithm.loss.clip_high", ""),
        ({"loss": {"clip_high": float("nan")}}, "algorithm.loss.clip_high", ""),
        ({"loss": {"dual_clip": 0.5}}, "algorithm.loss.dual_clip", ""),
        ({"advantage": 3}, "algorithm.advantage", ""),
        ({"aggregation": "token-median"}, "algorithm.aggregation", "token_mean"),
        ({"correction": {"mode": "some"}}, "algorithm.correction.mode", ""),
        ({"correction": {"cap": 0.5}}, "algorithm.correction.cap", ""),
        ({"correction": {"mode": "none"}}, "algorithm.correction.mode", "truncated_is"),
        ({"horizon": 1.5}, "algorithm.horizon", ""),
    ],
)
def test_wrong_settings_are_named(params, field, hint):
    with pytest.raises(SettingsError) as caught:
        load_algorithm("grpo", params, STALE)
    assert caught.value.field == field
    assert hint in caught.value.hint


def test_no_correction_is_fine_where_nothing_is_stale_or_where_it_is_accepted():
    load_algorithm("grpo", {"correction": {"mode": "none"}}, UpdatePlan(max_staleness=0))
    load_algorithm("grpo", {"correction": {"mode": "none", "accept_uncorrected": True}}, STALE)


def test_familiar_spellings_and_short_forms():
    params = {
        "advantage": {"normalize_by_std": False},
        "loss": {"name": "ppo", "clip_high": 0.28, "dual_clip": None},
        "aggregation": "seq-mean-token-sum-norm",
    }
    algorithm = load_algorithm("grpo", params, STALE)
    batch = a_batch()
    algorithm.batch_stage(batch)
    data = batch.rollouts
    first = data.group_ids == 0
    centred = data.rewards[first] - data.rewards[first].mean()
    per_token = torch.repeat_interleave(centred, data.lengths[first])
    assert torch.allclose(data.advantages[: per_token.numel()], per_token)


@pytest.mark.parametrize("name", ["grop", "nowhere.module:Algorithm", "missing.py:Algorithm", "json:dumps", "json:x"])
def test_unknown_algorithms_are_named(name):
    with pytest.raises(SettingsError, match=r"algorithm\.name"):
        load_algorithm(name, {}, STALE)


@pytest.fixture
def own_registries(monkeypatch):
    """Removes after a test what it registers."""
    for registry in (ADVANTAGES, POLICY_LOSSES, ALGORITHMS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.usefixtures("own_registries")
def test_a_users_file_is_enough(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent(
            """
            import torch
            from dataclasses import dataclass
            from rollmesh.learner.algorithms.interface import Algorithm
            from rollmesh.learner.algorithms.metrics import Metrics
            from rollmesh.learner.algorithms.registry import register_advantage, register_algorithm
            from rollmesh.learner.algorithms.registry import register_policy_loss
            from rollmesh.learner.algorithms.settings import Settings
            from rollmesh.learner.algorithms.types import LossOutput

            @register_advantage("sign")
            def sign(rollouts, *, scale: float = 1.0):
                return scale * torch.sign(rollouts.rewards)

            @dataclass(frozen=True)
            class MySettings(Settings):
                weight: float = 1.0

            @register_algorithm("mine")
            class Mine(Algorithm):
                settings_type = MySettings

                def group_stage(self, group):
                    return "all_equal" if bool((group.rewards == group.rewards[0]).all()) else None

                def batch_stage(self, batch):
                    batch.rollouts.advantages = batch.rollouts.per_token(batch.rollouts.rewards)

                def loss(self, output, tokens, counts):
                    log_probs, _ = output.policy()
                    share = -self.settings.weight * (tokens.advantages * log_probs).sum() / counts.tokens
                    return LossOutput(share, Metrics())
            """
        )
    )
    mine = load_algorithm(f"{file}:Mine", {"weight": 2}, STALE)
    no = torch.tensor([False, False])
    equal = Group(torch.ones(2), ~no, torch.tensor([1, 1]), truncated=no)
    assert mine.group_stage(equal) == "all_equal"
    algorithm = load_algorithm("grpo", {"advantage": {"name": f"{file}:sign", "scale": 3}}, STALE)
    batch = a_batch()
    algorithm.batch_stage(batch)
    assert set(batch.rollouts.advantages.tolist()) <= {0.0, 3.0}
    # The file has registered its parts by name, too.
    load_algorithm("mine", {}, STALE)
    load_algorithm("grpo", {"advantage": "sign"}, STALE)


def test_an_estimator_says_by_its_kind_what_its_values_are_for(tmp_path):
    """One value per response, or an `Estimate` per token: a batch with as many tokens as responses changes nothing."""
    (tmp_path / "mine.py").write_text("def per_token(rollouts):\n    return rollouts.behaviour_log_probs\n")
    with pytest.raises(SettingsError, match="3 trained tokens") as caught:
        load_algorithm("grpo", {"advantage": f"{tmp_path / 'mine.py'}:per_token"}, STALE)
    assert caught.value.field == "algorithm.advantage"
    batch = a_batch()
    batch.rollouts.lengths = torch.tensor([2, 0, 1])
    batch.rollouts.behaviour_log_probs = torch.zeros(3)
    assert batch.rollouts.per_token(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1.0, 1.0, 3.0]


def test_a_selection_that_is_needed_and_missing_is_named(tmp_path):
    (tmp_path / "blind.py").write_text(
        textwrap.dedent(
            """
            from rollmesh.learner.algorithms.interface import Algorithm
            from rollmesh.learner.algorithms.types import Needs

            class Blind(Algorithm):
                needs = Needs(selection=True)

                def batch_stage(self, batch): ...

                def loss(self, output, tokens, counts): ...
            """
        )
    )
    with pytest.raises(SettingsError, match="selects nothing"):
        load_algorithm(f"{tmp_path / 'blind.py'}:Blind", {}, STALE)


def test_users_code_is_found_as_rewards_are(tmp_path, monkeypatch):
    """A file imports its neighbours, a module lies in the working directory."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "part_of_mine.py").write_text("def weigh(rollouts):\n    return rollouts.rewards\n")
    (tmp_path / "my_estimator.py").write_text("from part_of_mine import weigh as estimate\n")
    by_file = ADVANTAGES.get(f"{tmp_path / 'my_estimator.py'}:estimate", "algorithm.advantage")
    assert by_file.target.__module__ == "part_of_mine"
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "an_estimator_of_here.py").write_text("def estimate(rollouts):\n    return rollouts.rewards\n")
    monkeypatch.chdir(tmp_path / "here")
    by_module = ADVANTAGES.get("an_estimator_of_here:estimate", "algorithm.advantage")
    assert by_module.target.__module__ == "an_estimator_of_here"


def test_a_users_file_that_fails_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(SettingsError, match="ZeroDivisionError"):
        load_algorithm(f"{tmp_path / 'broken.py'}:Mine", {}, STALE)


def test_names_are_unique():
    registry: Registry[type] = Registry("thing")
    registry.register("a")(GRPO)
    with pytest.raises(ValueError, match="registered already"):
        registry.register("a")(GRPO)


def test_algorithms_import_torch_alone(monkeypatch):
    """As in a process that has imported nothing of this yet; what is here already comes back afterwards."""
    heavy = {"grpc", "redis", "transformers", "pydantic"}
    for name in [*sys.modules]:
        if name.partition(".")[0] in {*heavy, "rollmesh"}:
            monkeypatch.delitem(sys.modules, name)
    importlib.import_module("rollmesh.learner.algorithms.load")
    heavy |= {f"rollmesh.{name}" for name in ("mesh", "learner.engines", "learner.batching")}
    assert heavy & sys.modules.keys() == set()
