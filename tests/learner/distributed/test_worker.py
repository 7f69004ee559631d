"""Training of a batch: the same whatever the ranks and micro-batches, and exact about what is left out or repeated."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollmesh.learner.algorithms.types import Rollouts
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.distributed.worker import UpdateRefused
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.dataflow import (
    LINEAGE,
    OPTIMIZER,
    VERSION,
    Plain,
    Probe,
    make_engines,
    make_groups,
    make_plan,
    make_worker,
    seen_token_rewards,
    train_on_two_ranks,
    train_probe,
    weights,
)
from tests.learner.divided import train_probe as train_divided
from tests.learner.engines.models import make_model, make_spec
from tests.learner.resuming import resume

TWO_RANKS = EngineLayout("two_ranks", processes=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    seen, result, worker, *_ = train_probe(model, tmp_path_factory.mktemp("one"), token_budget=1 << 20)
    worker.close()
    return seen, result


@pytest.fixture(scope="module")
def two_ranks(model: Path, engine_worlds: GetWorld, tmp_path_factory: pytest.TempPathFactory) -> Any:
    first, second = engine_worlds(TWO_RANKS).run(train_on_two_ranks, model, tmp_path_factory.mktemp("two"))
    return first | {"states": [first["state"], second["state"]]}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def assert_all_same(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for role in expected:
        assert_same(found[role], expected[role])


def test_micro_batches_change_nothing(model: Path, tmp_path: Path, one_rank: Any) -> None:
    seen, result, worker, *_ = train_probe(model, tmp_path, token_budget=20)
    worker.close()
    assert_all_same(seen, one_rank[0])
    assert result.metrics == pytest.approx(one_rank[1].metrics, rel=1e-3, abs=1e-5)


def test_ranks_change_nothing_also_where_one_comes_to_other_results(two_ranks: Any, one_rank: Any) -> None:
    assert_all_same(two_ranks["weights"], one_rank[0])
    differing = two_ranks["metrics"].pop("ranks/differing")
    assert differing == 5, "advantages, keep, repeats, and both extra values"
    assert two_ranks["metrics"] == pytest.approx(one_rank[1].metrics, rel=1e-3, abs=1e-5)
    first, second = two_ranks["states"]
    assert first == second
    assert len(first["history"]) == 1


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rank 0 cannot make the folder", "data: cannot write checkpoint .*Not a directory .rank 0 on "),
        ("each its own folder, at the start", "config: cannot write checkpoints .*No such file .*rank 1 on .*nodes"),
        ("each its own folder, later", "data: cannot write checkpoint .*No such file .*rank 1 on "),
        ("rank 1 cannot write", "data: cannot write checkpoint .*rank 1 on "),
        ("what is left", r"^\[\]$"),
        ("rank 1 can write again", "^i0001-v00000001$"),
    ],
)
def test_ranks_save_together_or_fail_together(two_ranks: Any, case: str, words: str) -> None:
    told = two_ranks["told"][case]
    assert len(told) == 2
    assert all(re.search(words, message) for message in told), told


def test_what_one_rank_cannot_read_all_ranks_leave_out(two_ranks: Any) -> None:
    failing = two_ranks["failing"]
    assert list(failing["unusable"]) == [failing["bad"]]
    assert "response_ids" in failing["unusable"][failing["bad"]]
    assert failing["again"] == {}
    assert failing["trained"]


@pytest.mark.parametrize(
    "divided",
    [
        ("critic", "reference"),
        pytest.param(("actor",), marks=pytest.mark.exhaustive),
        pytest.param(("actor", "critic", "reference", "scorer"), marks=pytest.mark.exhaustive),
    ],
)
def test_models_may_be_laid_out_in_different_ways(
    model: Path, engine_worlds: GetWorld, tmp_path: Path, one_rank: Any, divided: tuple[str, ...]
) -> None:
    """Some are one replica over both processes, with results in the second alone; the others two ranks."""
    found = engine_worlds(TWO_RANKS).run(train_divided, model, tmp_path, divided)
    assert_all_same(found[0][0], one_rank[0])
    for _, metrics, state in found:
        assert metrics.pop("ranks/differing") == 5
        assert metrics == pytest.approx(one_rank[1].metrics, rel=1e-3, abs=1e-5)
        assert state == found[0][2]


def test_metrics_of_all_roles_have_their_names(one_rank: Any) -> None:
    metrics = one_rank[1].metrics
    for name in ("actor/loss", "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/grad_norm", "scorer/loss"):
        assert name in metrics
    assert metrics["probe/repeated"] > 1
    assert "probe/ratio" in metrics
    assert one_rank[1].skipped == 0


def test_speed_is_known_by_role_and_without_a_known_peak_there_is_no_mfu(one_rank: Any) -> None:
    speed = one_rank[1].speed
    for name in ("timing_s/infer/critic", "timing_s/update/actor", "timing_s/update/critic", "perf/max_rss_gb"):
        assert speed[name] > 0, name
    assert speed["perf/tflops/actor"] > 0
    assert not any("mfu" in name or "memory" in name for name in speed), "of a device that is not here"


def test_rewards_of_tokens_reach_the_algorithm_from_whatever_rank_has_them(
    model: Path, tmp_path: Path, two_ranks: Any
) -> None:
    engines = make_engines(model, Plain())
    seen = seen_token_rewards(engines["actor"], tmp_path)
    *others, last = [member.trajectory for group in make_groups() for member in group.scored_members]
    trained = [float(place + 1) for place, mask in enumerate(last.response_mask) if mask]
    assert seen == [[0.0] * sum(int(each.response_mask.sum()) for each in others) + trained, None]
    assert two_ranks["rewarded"] == seen
    engines["actor"].close()


def test_mfu_is_model_flops_over_time_and_peak(model: Path, tmp_path: Path) -> None:
    algorithm, groups = Plain(), make_groups()
    engines = make_engines(model, algorithm)
    engines["actor"].peak_tflops = 0.5
    worker = make_worker(algorithm, engines, groups, tmp_path)
    worker.prepare(make_plan(groups))
    speed = worker.train(lambda: None).speed
    worker.close()
    assert speed["perf/mfu/actor"] == pytest.approx(speed["perf/tflops/actor"] / 0.5)


def test_a_checkpoint_holds_critic_and_algorithm(model: Path, tmp_path: Path, two_ranks: Any) -> None:
    algorithm, groups = Probe(), make_groups()
    engines = make_engines(model, algorithm)
    worker = make_worker(algorithm, engines, groups, tmp_path)
    extra = worker.load(Path(two_ranks["checkpoint"]))
    assert extra["version"] == VERSION + 1
    assert algorithm.batches == 1
    assert len(algorithm.history) == 1
    for role, expected in two_ranks["weights"].items():
        assert_same(weights(engines[role]), expected)
    plain = make_worker(Plain(), {"actor": engines["actor"]}, groups, tmp_path)
    with pytest.raises(DataError, match="state of the algorithm Probe, not of Plain"):
        plain.load(Path(two_ranks["checkpoint"]))
    path = plain.begin_checkpoint(PolicyVersion(1, 1), {}).result(240)
    with pytest.raises(DataError, match="holds no state of critic"):
        worker.load(path)
    worker.close()


def test_a_refused_batch_changes_nothing(model: Path, tmp_path: Path) -> None:
    algorithm, groups = Probe(), make_groups()
    engines = make_engines(model, algorithm)
    worker = make_worker(algorithm, engines, groups, tmp_path)
    before = {role: weights(engine) for role, engine in engines.items()}
    asked = []

    def refuse() -> None:
        asked.append(len(algorithm.history))
        raise UpdateRefused

    worker.prepare(make_plan(groups))
    with pytest.raises(UpdateRefused):
        worker.train(refuse)
    assert len(asked) == 1
    assert algorithm.state() == {"batches": 0, "history": []}
    for role, engine in engines.items():
        assert_same(weights(engine), before[role])
    # The same batch may be trained afterwards: the claim is asked for once for all roles and steps.
    worker.prepare(make_plan(groups, minibatches=2))
    worker.train(lambda: asked.append(0))
    assert len(asked) == 2
    assert algorithm.batches == 1
    worker.close()


def test_a_batch_that_trains_the_critic_alone_is_claimed_and_leaves_the_actor(model: Path, tmp_path: Path) -> None:
    algorithm, groups = Probe(), make_groups()
    engines = make_engines(model, algorithm)
    before = weights(engines["actor"])
    worker = make_worker(algorithm, engines, groups, tmp_path)
    asked: list[int] = []
    worker.prepare(dataclasses.replace(make_plan(groups), version=VERSION - 1))
    result = worker.train(lambda: asked.append(1))
    assert asked == [1]
    assert_same(weights(engines["actor"]), before)
    assert "critic/vf_loss" in result.metrics
    assert "actor/loss" not in result.metrics
    worker.close()


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 1), (3, 2)])
def test_the_rate_follows_from_the_runs_step_into_however_many_a_batch_is_divided(
    model: Path, tmp_path: Path, minibatches: int, epochs: int
) -> None:
    optimizer = dataclasses.replace(make_spec(model), optimizer=OPTIMIZER.model_copy(update={"schedule": "linear"}))
    groups = make_groups()
    worker = make_worker(Plain(), {"actor": create_engine(optimizer)}, groups, tmp_path, epochs=epochs)
    plan = dataclasses.replace(make_plan(groups, minibatches=minibatches), version=6, end=8)
    worker.prepare(TrainPlan.from_bytes(plan.to_bytes()))
    assert worker.train(lambda: None).metrics["actor/lr"] == pytest.approx(OPTIMIZER.lr * 0.25)
    worker.close()


class Trainer:
    """One actor that goes back to its first weights for every batch."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.engine: Engine = make_engines(model, Plain())["actor"]
        self.folder = folder
        self.start = (
            make_worker(Plain(), {"actor": self.engine}, [], folder)
            .begin_checkpoint(PolicyVersion(1, 0), {})
            .result(240)
        )

    def reset(self) -> None:
        self.engine.load_checkpoint(self.start)

    def train(self, algorithm: Plain, groups: Any, token_budget: int) -> dict[str, Tensor]:
        self.reset()
        worker = make_worker(algorithm, {"actor": self.engine}, groups, self.folder, token_budget=token_budget)
        worker.prepare(make_plan(groups, token_budget=token_budget))
        worker.train(lambda: None)
        return weights(self.engine)


@pytest.fixture(scope="module")
def trainer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(model, tmp_path_factory.mktemp("trainer"))


def sequences_of(groups: Any) -> list[TrainSequence]:
    return [
        TrainSequence(
            group.prompt_ids,
            found.response_ids,
            found.response_mask.copy(),
            found.log_probs,
            staleness=LINEAGE.per_token(found.versions, VERSION),
            reward=member.meta.reward,
        )
        for group in groups
        for member in group.members
        if (found := member.trajectory) is not None
    ]


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 16), budget=st.sampled_from([16, 40, 1 << 20]), silent=st.booleans())
def test_rejected_repeated_and_silent_sequences_are_exactly_that(
    trainer: Trainer, seed: int, budget: int, silent: bool
) -> None:
    """Against a batch in which tokens are masked, sequences copied, and nothing is left out."""
    groups = make_groups(seed % 7, groups=4)
    sequences = sequences_of(groups)
    rng = np.random.default_rng(seed)
    repeats = rng.integers(0, 3, len(sequences))
    repeats[rng.integers(len(sequences))] = 2
    keep = [rng.random(int(s.response_mask.sum())) < 0.7 for s in sequences]
    advantages = [rng.normal(size=len(k)).astype(np.float32) * (rng.random() < 0.7) for k in keep]

    def change(rollouts: Rollouts) -> None:
        assert rollouts.lengths.tolist() == [len(k) for k in keep]
        rollouts.keep = torch.from_numpy(np.concatenate(keep))
        rollouts.repeats = torch.from_numpy(repeats)
        rollouts.advantages = torch.from_numpy(np.concatenate(advantages))

    found = trainer.train(Plain(change, silent=silent), groups, budget)
    explicit = []
    for sequence, times, kept, values in zip(sequences, repeats, keep, advantages, strict=True):
        places = np.flatnonzero(sequence.response_mask)
        spread = np.zeros(len(sequence.response_mask), dtype=np.float32)
        spread[places] = values
        mask = np.zeros_like(sequence.response_mask)
        mask[places[kept]] = 1
        explicit += [dataclasses.replace(sequence, response_mask=mask, advantages=spread)] * int(times)
    trainer.reset()
    packed = pack(explicit)
    trainer.engine.accumulate([packed], Plain().loss, trainer.engine.global_counts([packed]))
    trainer.engine.apply()
    assert_same(found, weights(trainer.engine))


def test_advantages_reach_the_weights(trainer: Trainer) -> None:
    trainer.train(Plain(), make_groups(1), 40)
    trained = weights(trainer.engine)
    trainer.reset()
    start = weights(trainer.engine)
    assert all((trained[name] - start[name]).abs().max() > 1e-4 for name in start)


def test_rollouts_are_those_of_the_plan(trainer: Trainer) -> None:
    groups = make_groups(2)
    seen: list[Rollouts] = []
    trainer.train(Plain(seen.append), groups, 20)
    (rollouts,) = seen
    sequences = sequences_of(groups)
    trained = [s.response_mask.astype(bool) for s in sequences]
    metas = [(i, m.meta) for i, g in enumerate(groups) for m in g.scored_members]
    expected = np.concatenate([s.behaviour_log_probs[t] for s, t in zip(sequences, trained, strict=True)])
    np.testing.assert_array_equal(rollouts.behaviour_log_probs.numpy(), expected)
    ages = [np.broadcast_to(s.staleness, t.shape)[t] for s, t in zip(sequences, trained, strict=True)]
    np.testing.assert_array_equal(rollouts.staleness.numpy(), np.concatenate(ages))
    assert rollouts.group_ids.tolist() == [group for group, _ in metas]
    assert rollouts.rewards.tolist() == pytest.approx([meta.reward for _, meta in metas])
    assert rollouts.components["style"].tolist() == [meta.components["style"] for _, meta in metas]
    assert rollouts.truncated.tolist() == [meta.member == 2 for _, meta in metas]
    assert rollouts.baseline_rewards is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: setattr(r, "advantages", torch.zeros(r.num_sequences)), "left `advantages` with the shape"),
        (lambda r: setattr(r, "repeats", torch.ones(r.num_tokens + 1, dtype=torch.int64)), "left `repeats`"),
        (lambda r: r.extra.update(mine=torch.zeros(2, 2)), "extra.mine"),
    ],
)
def test_fields_of_a_wrong_size_are_named(trainer: Trainer, change: Callable[[Rollouts], None], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer.train(Plain(change), make_groups(1), 1 << 20)


def test_a_role_that_is_not_needed_is_named(model: Path, trainer: Trainer, tmp_path: Path) -> None:
    class Greedy(Plain):
        def batch_stage(self, batch: Any) -> None:
            batch.infer("oracle")

    with pytest.raises(ConfigError, match="'oracle', which it does not name"):
        trainer.train(Greedy(), make_groups(1), 1 << 20)


# In `make test` the contract of engines has it of two ranks, and tests above of critic and algorithm.
@pytest.mark.exhaustive
def test_a_deterministic_learner_of_two_ranks_continues_bit_by_bit(
    model: Path, engine_worlds: GetWorld, tmp_path: Path
) -> None:
    for uninterrupted, resumed in engine_worlds(TWO_RANKS).run(resume, model, tmp_path):
        assert resumed[:2] == uninterrupted[:2]
        assert len(resumed[1]["history"]) == 2
        for role, expected in uninterrupted[2].items():
            assert_same_bits(resumed[2][role], expected)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
