"""Whatever a run writes is in the catalogue of metrics, and what verl's and TRL's dashboards look for is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.learner.live.test_every_algorithm import assert_trained
from tests.learner.live.test_runs import ledger, records, undescribed
from tests.learner.live.tiny import make_config, mesh_of, run_learner

# Settings that make an algorithm speak of as much as it can.
TALKATIVE = {
    "learner.batch.minibatches": 2,
    "algorithm.kl": {"where": "reward", "target": 0.1},
    "algorithm.entropy": {"coefficient": 0.01, "target": 1.0},
    "algorithm.reward": {"overlong_buffer_tokens": 3, "truncation_penalty": 0.1, "clip": 1.0, "normalize": "running"},
    "algorithm.filter": {"truncated": "mask"},
    "algorithm.correction": {"normalize": True, "reject": {"seq_mean_k1": 100.0, "token_k3": 9.0}, "veto": 1e-9},
}
# Names on the panels that users of the two come with.
PANELS = {
    "critic/score/mean", "critic/rewards/mean", "critic/advantages/max", "actor/pg_loss", "actor/entropy",
    "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm", "actor/lr", "response_length/mean",
    "response_length/clip_ratio", "prompt_length/max", "timing_s/step", "timing_s/gen", "perf/throughput",
    "reward", "reward_std", "frac_reward_zero_std", "rewards/compute_score/mean", "completions/mean_length",
    "completions/clipped_ratio", "entropy", "loss", "grad_norm", "learning_rate", "step_time", "clip_ratio/region_mean",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "vapo",
            TALKATIVE | {"algorithm.critic_warmup": 0},
            {"critic/vf_loss", "critic/grad_norm", "critic/values/mean", "critic/returns/max", "actor/kl_coef"}
            | {"critic/vf_explained_var", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_masked_fraction"},
        ),
        (
            "remax",
            {"algorithm.correction": {"mode": "masked_is", "level": "sequence"}, "algorithm.off_policy_mask": 0.5}
            | {"algorithm.kl": {"where": "loss"}, "learner.roles.reference.offload": True},
            {"reward/greedy/mean", "actor/kl_loss", "kl", "masked/off_policy"},
        ),
    ],
)
def test_names_of_a_run(tmp_path: Path, name: str, changes: dict[str, Any], expected: set[str]) -> None:
    config = make_config(tmp_path, {**changes, "algorithm.name": name, "learner.steps": 2})
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
        assert ledger(mesh).recounted.trained == 2 * 4
    written = records(config)
    steps = [record for record in written if "critic/score/mean" in record]
    assert_trained(steps)
    assert [record["samples"] for record in steps] == [4 * 4] * 2, "a greedy baseline is no sample"
    assert undescribed(written) == set()
    last = next(record for record in reversed(written) if "critic/score/mean" in record)
    assert sorted((PANELS | expected) - last.keys()) == []
    assert last["reward"] == last["critic/score/mean"]
