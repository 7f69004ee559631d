"""A run that continues says from where and with what; an attempt that fails changes nothing of it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollmesh.launcher import folder, local
from rollmesh.launcher.console.view import SilentView
from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.preflight.continuing import Continuation
from rollmesh.launcher.run_secrets import with_own_secrets
from rollmesh.launcher.services import ServiceCatalogue
from rollmesh.learner.evaluation.measurement_identity import measured_by
from rollmesh.learner.recovery.run_identity import LEARNER_JSON, RunRecord
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError, DataError, RollmeshError, RunBusyError
from rollmesh.mesh.rpc.held_ports import HeldPorts
from rollmesh.mesh.runtime.threads import ThreadPlan
from rollmesh.report.changes import describe_changes
from rollmesh.report.summary import FinalState, write_summary
from rollmesh.run_files import read_config, read_launch
from tests.rollmesh.fake_run import Catalogue

PREPARED = Preparation(DevicePlan())


def make(tmp_path: Path, *overrides: str) -> Config:
    return load_config(
        {"run": {"dir": str(tmp_path)}, "model": {"path": "a/model"}, "data": {"train": "t.jsonl"}}, overrides
    )


class Told(SilentView):
    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)


def train(config: Config, step: int, checkpoint: str = "") -> None:
    """Leaves what a learner would have."""
    RunRecord(config, None).write()
    records = [{"step": number, "critic/score/mean": 0.5} for number in range(1, step + 1)]
    (config.run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if checkpoint:
        (config.run.folder / "checkpoints" / checkpoint).mkdir(parents=True, exist_ok=True)


def test_it_says_from_which_step_and_what_has_changed(tmp_path: Path) -> None:
    config = make(tmp_path)
    assert Continuation.of(config) is None
    train(config, 25, "i0001-v00000020")
    now = make(
        tmp_path, "learner.optimizer.lr=1e-3", "rollout.replicas=2", "network.port=5", "algorithm.loss.clip_low=1"
    )
    found = Continuation.of(now)
    assert found is not None
    first, trap, changes = found.lines(named=False)
    assert first == "continues from step 20, its newest checkpoint; 5 later steps are trained again"
    assert "--run.name=NAME" in trap
    assert "--fresh" in trap
    assert set(changes.removeprefix("changed since the last launch: ").split("; ")) == {
        "learner.optimizer.lr 1e-06 -> 0.001",
        "rollout.replicas 1 -> 2",
        "algorithm.loss.clip_low none -> 1",
    }
    same = Continuation.of(config)
    assert same is not None
    assert same.lines(named=True) == [first]


def test_going_back_says_so_and_is_never_finished(tmp_path: Path) -> None:
    config = make(tmp_path)
    train(config, 25, "i0001-v00000020")
    train(config, 25, "i0001-v00000010")
    start = config.run.folder / "checkpoints" / "i0001-v00000010"
    found = Continuation.of(config, start_from=start)
    assert found is not None
    assert found.finished == ""
    assert found.lines(named=True) == ["continues from step 10, checkpoint i0001-v00000010; 15 later steps are undone"]
    with pytest.raises(DataError, match="has no checkpoint 'i0001-v00000015'"):
        local.LocalRun(config, SilentView(), PREPARED, from_checkpoint="i0001-v00000015")
    both = local.LocalRun(config, SilentView(), PREPARED, from_checkpoint="i0001-v00000010", fresh=True)
    with pytest.raises(ConfigError, match="--fresh"):
        asyncio.run(both.run(handle_signals=False))


def test_a_learner_goes_back_once(tmp_path: Path) -> None:
    """Started again, it continues from what it has trained since."""
    config = make(tmp_path)
    train(config, 25, "i0001-v00000010")
    start = config.run.folder / "checkpoints" / "i0001-v00000010"
    plan = ThreadPlan(1, 1, 1)
    with HeldPorts(config.network.host) as ports:
        catalogue = ServiceCatalogue(
            config, tmp_path / "c.yaml", plan, PREPARED, ports, allow_changes=False, start_from=start
        )
    [learner] = [spec for spec in catalogue.others("host:1") if spec.name == "learner"]
    for restart in (False, True):
        command = learner.command(restart)
        assert command[command.index("--from-checkpoint") + 1] == start.name, "it has not taken the run over yet"
    taken_over = folder.takeover_stamp(config.run.folder) + 1
    os.utime(config.run.folder / folder.CONFIG, ns=(taken_over, taken_over))
    assert "--from-checkpoint" not in learner.command(True)


def test_other_rewards_are_no_matter_of_the_groups_that_were_scored_before(tmp_path: Path) -> None:
    train(make(tmp_path), 25, "i0001-v00000020")
    found = Continuation.of(make(tmp_path, "reward.functions=[math]", "buffer.max_staleness=3"))
    assert found is not None
    told = found.lines(named=True)[-1]
    assert "sampled before train first, in up to 4 steps: from step 25 on at the latest" in told
    assert "--fresh" in told
    edited = Continuation.of(make(tmp_path), ["reward.py"])
    assert edited is not None
    assert edited.lines(named=True)[1] == "changed since the last launch: reward.py (edited)"
    assert "sampled before train first" in edited.lines(named=True)[2]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.n=6", "rollout.n"),
        ("rollout.temperature=0.5", "rollout.temperature"),
        ("rollout.stop=['.']", "rollout.stop"),
        ("run.seed=3", "run.seed"),
    ],
)
def test_queued_prompts_keep_how_they_are_sampled_and_the_first_step_without_them_is_told(
    tmp_path: Path, override: str, key: str
) -> None:
    """Continued from step 20 of 25: 5 + 1 batches queued, 3 in progress and 5 trained since; batches are halved."""
    sizes = ("buffer.max_staleness=2", "buffer.seed_ahead=5", "learner.batch.groups=8")
    train(make(tmp_path, *sizes), 25, "i0001-v00000020")
    found = Continuation.of(make(tmp_path, *sizes[:2], "learner.batch.groups=4", override))
    assert found is not None
    assert found.former is not None
    assert (found.former.keys, found.former.steps) == ((key,), 28)
    assert f"from step 49 on at the latest all are of the new {key}; --fresh" in found.lines(named=True)[-1]


def test_a_queue_that_ended_with_its_redis_leaves_no_groups(tmp_path: Path) -> None:
    """Then a change holds at once; one of other keys, or of held-out data, always does."""
    for former, now in (
        (["buffer.durability=none"], ["buffer.durability=none", "rollout.n=6", "reward.functions=[math]"]),
        ([], ["learner.optimizer.lr=1", "rollout.slots=3", "data.eval=e.jsonl"]),
    ):
        train(make(tmp_path, *former), 25, "i0001-v00000020")
        found = Continuation.of(make(tmp_path, *now))
        assert found is not None
        assert found.former is None


def test_a_run_without_a_checkpoint_says_that_it_begins_at_0(tmp_path: Path) -> None:
    train(make(tmp_path), 60)
    found = Continuation.of(make(tmp_path))
    assert found is not None
    assert found.lines(named=True) == ["continues from step 0: it has no checkpoint; 60 later steps are trained again"]


def test_what_changes_the_learning_is_told_and_nothing_else() -> None:
    before = {"run": {"seed": 0, "name": "a"}, "weights": {"kv": "keep", "streams": 2}, "reward": {"functions": ["a"]}}
    now = {
        "run": {"seed": 1, "name": "b"},
        "weights": {"kv": "recompute", "streams": 3},
        "reward": {"functions": ["b"]},
    }
    assert describe_changes(before, now) == [
        "run.seed 0 -> 1",
        "weights.kv keep -> recompute",
        "reward.functions ['a'] -> ['b']",
    ]
    assert describe_changes(before, before) == []


def test_changes_of_one_source_among_several_name_its_setting() -> None:
    before = {"data": {"train": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 1.0}]}}
    now = {"data": {"train": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]}}
    assert describe_changes(before, now) == ["data.train.1.weight 1.0 -> 2.0"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("always", "everysec", "buffer.durability always -> everysec"),
        ("everysec", "always", ""),
        ("none", "none", ""),
        ("always", "none", None),
    ],
)
def test_less_durability_is_told_or_refused(tmp_path: Path, before: str, now: str, said: str | None) -> None:
    train(make(tmp_path, f"buffer.durability={before}"), 0)
    config = make(tmp_path, f"buffer.durability={now}")
    if said is None:
        with pytest.raises(ConfigError, match="its groups would not be read"):
            Continuation.of(config)
        return
    found = Continuation.of(config)
    assert found is not None
    told = "; ".join(found.changes)
    assert told.startswith(said)
    assert bool(told) == bool(said)


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"3", b"buffer: {}", b"buffer: {durability: none}\nrun: 3", b"buffer: {durability: [", b"\xff"],
)
def test_a_damaged_configuration_is_named_and_what_to_do(tmp_path: Path, text: bytes) -> None:
    config = make(tmp_path)
    train(config, 0)
    (config.run.folder / folder.CONFIG).write_bytes(text)
    with pytest.raises(DataError, match=r"config\.yaml is damaged: \w+") as refused:
        Continuation.of(config)
    assert "--fresh" in refused.value.hint


@pytest.mark.parametrize(
    "change", ["model.path=b/model", "algorithm=dapo", "reward.functions=[math]", "data.shuffle=no"]
)
def test_only_a_run_of_which_something_was_trained_is_bound_to_what_it_is_of(tmp_path: Path, change: str) -> None:
    config = make(tmp_path)
    train(config, 0, "i0001-v00000000")
    for overrides, over in (([change], True), ([], False), (["learner.steps=7", "rollout.replicas=2"], False)):
        found = Continuation.of(make(tmp_path, *overrides))
        assert found is not None
        assert found.starts_over == over
    moved = Continuation.of(config, inputs_differ=True)
    assert moved is not None
    assert moved.starts_over, "the same path holds another model"
    (config.run.folder / "consumption.jsonl").write_text("{}\n")
    trained = Continuation.of(make(tmp_path, change))
    assert trained is not None
    assert not trained.starts_over


def finish(config: Config, version: int, reason: str = "steps", evaluated: int | None = None) -> None:
    """Leaves what a run that ended by itself does."""
    train(config, version, f"i0001-v{version:08d}")
    eval_last = None if evaluated is None else {"version": evaluated, "measured_by": measured_by(config)}
    said = {"incarnation": 1, "version": version, "stop_reason": reason, "eval_last": eval_last}
    (config.run.folder / LEARNER_JSON).write_text(json.dumps(said))
    write_summary(config.run.folder, config, FinalState(ended="finished"))


HELD_OUT = ("data.eval=e.jsonl", "eval.stop_at=0.9")


@pytest.mark.parametrize(
    ("reason", "before", "change", "finished"),
    [
        ("steps", (), (), True),
        ("steps", (), ("learner.steps=3",), True),
        ("steps", (), ("learner.optimizer.lr=1.0", "reward.functions=[math]"), True),
        ("steps", (), ("learner.steps=6",), False),
        ("steps", (), ("data.eval=e.jsonl",), False),
        ("steps", HELD_OUT, (), True),
        ("steps", HELD_OUT, ("eval.every_steps=2", "learner.optimizer.lr=1.0"), True),
        ("steps", HELD_OUT, ("reward.functions=[math]",), False),
        ("stop_at", HELD_OUT, (), True),
        ("stop_at", HELD_OUT, ("learner.steps=6",), False),
        ("stop_at", HELD_OUT, ("eval.stop_at=0.95",), False),
        ("end_of_data", (), (), False),
        ("SIGTERM", (), (), False),
    ],
)
def test_a_run_has_finished_where_its_files_leave_no_doubt(
    tmp_path: Path, reason: str, before: tuple[str, ...], change: tuple[str, ...], finished: bool
) -> None:
    config = make(tmp_path, "learner.steps=5", *before)
    finish(config, 5, reason, evaluated=5 if before else None)
    found = Continuation.of(make(tmp_path, "learner.steps=5", *before, *change))
    assert found is not None
    assert bool(found.finished) == finished


@pytest.mark.parametrize("doubt", ["evaluation", "takeover", "checkpoint", "summary", "damage"])
def test_a_run_of_which_there_is_a_doubt_has_not_finished(tmp_path: Path, doubt: str) -> None:
    config = make(tmp_path, "learner.steps=5", *HELD_OUT)
    finish(config, 5, evaluated=4 if doubt == "evaluation" else 5)
    last = config.run.folder / LEARNER_JSON
    if doubt == "takeover":
        at = folder.takeover_stamp(config.run.folder) - 1
        os.utime(last, ns=(at, at))
    elif doubt == "checkpoint":
        (config.run.folder / "checkpoints" / "i0002-v00000004").mkdir()
    elif doubt == "summary":
        write_summary(config.run.folder, config, FinalState(ended="interrupted"))
    elif doubt == "damage":
        last.write_text("{")
    found = Continuation.of(config)
    assert found is not None
    assert not found.finished


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a launcher whose services are fake, and whose learner fails at once."""

    def run(config: Config, *learner: str, **how: bool) -> list[str]:
        monkeypatch.setattr(local, "ServiceCatalogue", lambda *_, **__: Catalogue(config.run.folder, learner))
        view = Told()
        asyncio.run(local.LocalRun(config, view, PREPARED, **how).run(handle_signals=False))
        return view.events

    return run


@pytest.mark.parametrize(
    ("how", "command"),
    [
        ({}, "the same command"),
        ({"from_checkpoint": "i0001-v00000003"}, "the same command without --from-checkpoint"),
        ({"fresh": True}, "the same command without --fresh"),
    ],
)
def test_an_interrupted_run_names_the_command_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], command: str
) -> None:
    config = make(tmp_path)
    train(config, 3, "i0001-v00000003")
    monkeypatch.setattr(local, "ServiceCatalogue", lambda *_, **__: Catalogue(config.run.folder, ()))

    class Interrupting(Told):
        def event(self, text: str) -> None:
            super().event(text)
            if text.startswith("learner is up"):
                RunRecord(config, None).write()
                run.interrupt()

    view = Interrupting()
    run = local.LocalRun(config, view, PREPARED, **how)
    asyncio.run(run.run(handle_signals=False))
    where = "from its beginning: it has no checkpoint" if "fresh" in how else "from step 3, its newest checkpoint"
    assert view.events[-1] == f"{command} continues the run {where}"


def test_an_attempt_that_fails_changes_nothing_of_a_finished_run(launch: Any, tmp_path: Path) -> None:
    config = make(tmp_path)
    train(config, 3, "i0001-v00000003")
    write_summary(config.run.folder, config, FinalState(ended="finished"))
    before = {path: path.read_bytes() for path in config.run.folder.iterdir() if path.is_file()}
    wrong = make(tmp_path, "algorithm=dapo")
    with pytest.raises(RollmeshError):
        launch(wrong, "--exit", "3")
    assert read_config(config.run.folder) == config
    assert read_launch(config.run.folder) == with_own_secrets(wrong)
    assert {path: path.read_bytes() for path in before} == before
    assert (config.run.folder / "summary.json") in before


def test_a_finished_run_starts_nothing_and_says_what_would_continue_it(launch: Any, tmp_path: Path) -> None:
    config = make(tmp_path, "learner.steps=5")
    finish(config, 5)
    told = launch(config, "--exit", "3")
    assert "nothing is started, the run has finished: it has trained 5 steps, and learner.steps is 5" in told[-1]
    assert not (config.run.folder / "services").exists()


def test_an_attempt_at_which_nothing_was_trained_gives_its_name_to_the_next(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(tmp_path)
    train(config, 0)

    def stop(*_: Any, **__: Any) -> None:
        raise ConfigError("far enough")

    with monkeypatch.context() as patched:
        patched.setattr(local, "thread_plan", stop)
        with pytest.raises(ConfigError, match="far enough"):
            launch(make(tmp_path, "model.path=b/model"))
    [kept] = set(tmp_path.iterdir()) - {config.run.folder}
    assert read_config(kept) == config
    assert not (config.run.folder / folder.CONFIG).exists()
    train(config, 0)
    with pytest.raises(ConfigError, match="was begun with something else"):
        launch(make(tmp_path, "model.path=b/model", "buffer.redis=redis://127.0.0.1:1"))


def test_a_run_that_begins_anew_keeps_what_it_was(launch: Any, tmp_path: Path) -> None:
    config = make(tmp_path)
    train(config, 3)
    with folder.locked(config.run.folder), pytest.raises(RunBusyError):
        folder.set_aside(config.run.folder, "x")
    kept = folder.set_aside(config.run.folder, "x")
    assert kept is not None
    assert read_config(kept) == config
    assert not config.run.folder.exists()
    assert folder.set_aside(config.run.folder, "x") is None
    with pytest.raises(ConfigError, match=r"are in buffer\.redis"):
        launch(make(tmp_path, "buffer.redis=redis://127.0.0.1:1"), fresh=True)
