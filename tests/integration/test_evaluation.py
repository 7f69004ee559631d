"""`rollmesh eval`, `generate` and `compare` as commands, on a run's checkpoint that holds an adapter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import rollmesh as product
from rollmesh.learner.builders import build_actor
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.standalone.response_file import RESPONSES, read_responses
from rollmesh.mesh.config import load_config, save_config
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests import fork_server
from tests.command import Command
from tests.integration import holding
from tests.repository import REPOSITORY


@pytest.fixture(scope="module")
def run(demo_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose one checkpoint holds an adapter."""
    folder = tmp_path_factory.mktemp("runs") / "tuned"
    overrides = [
        f"run.dir={folder.parent}",
        f"run.name={folder.name}",
        f"model.path={demo_data / 'model'}",
        f"data.train={demo_data / 'train.parquet'}",
        f"data.eval={demo_data / 'eval.parquet'}",
        "learner.lora.rank=2",
        "rollout.replicas=1",
        "rollout.slots=8",
        "eval.n=8",
        "eval.temperature=1",
        *(argument.removeprefix("--") for argument in holding.ARGUMENTS),
    ]
    config = load_config(REPOSITORY / "examples/demo/demo.yaml", overrides)
    engine = build_actor(config)
    try:
        CheckpointStore(folder / "checkpoints").begin({"actor": engine}, PolicyVersion(1, 3), {}).result(240)
    finally:
        engine.close()
    save_config(config, folder / "config.yaml")
    return folder


def kill_generator(out: Path, evaluation: fork_server.RunningCommand) -> None:
    """Kills the generator of an evaluation as soon as it is there."""
    ready = out / "services" / "generator-0.json"
    while not ready.exists():
        assert evaluation.poll() is None
        time.sleep(0.02)  # another process's file: there is nothing to wait on
    os.kill(json.loads(ready.read_text())["pid"], signal.SIGKILL)


def test_a_checkpoint_is_evaluated_whatever_dies_and_compared_with_its_base(
    run: Path, rollmesh: Command, tmp_path: Path
) -> None:
    config, out = str(run / "config.yaml"), tmp_path / "tuned"
    arguments = ["eval", config, "--model", str(run), "--out", str(out)]
    # Nothing is scored before the generator has died.
    environment = {**os.environ, **holding.environment(tmp_path, after=0)}
    with fork_server.popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            kill_generator(out, process)
            holding.release(tmp_path)
            assert process.stdout is not None
            shown = process.stdout.read()
            process.wait()
        finally:
            process.kill()
    assert process.returncode == 0, shown
    assert "restarting" in shown
    assert "pass@8" in shown
    summary = json.loads((out / "evaluation.json").read_text())
    assert summary["name"] == "tuned-i0001-v00000003"
    assert summary["prompts"] == {"asked": 32, "answered": 32, "left_out": 0, "without_score": 0}
    assert (summary["scored"], summary["unscored"]) == (256, 0)
    whole = list(read_responses(out / RESPONSES))
    assert sorted(record["row"] for record in whole) == list(range(32))

    # Nothing is left to do. An evaluation of half the prompts is compared over these.
    lines = (out / RESPONSES).read_text().splitlines(keepends=True)
    logged = len((out / "logs" / "generator-0.log").read_bytes())
    base = tmp_path / "base"
    base.mkdir()
    identity = json.loads((out / "measurement.json").read_text())
    (base / "measurement.json").write_text(json.dumps({**identity, "name": "base"}))
    (base / RESPONSES).write_text("".join(lines[:16]))
    again = product.evaluate(config, run, out=out, quiet=True)
    assert again.to_json() == summary
    assert len((out / "logs" / "generator-0.log").read_bytes()) == logged
    compared = rollmesh("compare", str(base), str(out))
    assert compared.returncode == 0, compared.stderr
    assert "0/0/16" in compared.stdout
    assert "the same" in compared.stdout


def test_prompts_are_answered_on_stdout(run: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"prompt": "1+2="}\n')
    arguments = ["generate", str(run / "config.yaml"), "--prompt", "1+1=", "--prompts", "-", "--log-probs"]
    with (tmp_path / "more.jsonl").open() as stdin:
        done = fork_server.run([*arguments, "--eval.n=2"], stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert "generator-0 is up" in done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["1+1=", "1+2="]
    for record in records:
        assert len(record["responses"]) == 2
        for response in record["responses"]:
            assert response["tokens"] == len(response["token_ids"]) == len(response["log_probs"])
            assert "reward" not in response
