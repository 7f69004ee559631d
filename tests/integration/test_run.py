"""A run from its first to its last step: what it writes, and what the commands say of it."""

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollmesh as product
from rollmesh.dashboard.page_data import PageData
from rollmesh.doctor.live import diagnosis
from rollmesh.launcher.mesh_client import MeshClient
from rollmesh.launcher.page.live_runs import RemoteRun
from rollmesh.learner.callbacks import StepEnd
from rollmesh.learner.recovery.consumption_log import read_log, surviving_uses
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.runtime.fork_server import decision
from rollmesh.run_files import config_path
from tests import fork_server
from tests.collector import Collector, collecting
from tests.command import Command, briefly
from tests.integration import holding, poisoning
from tests.integration.intruders import answer_to_a_member, audit_intruders
from tests.integration.mesh import MeshRun, audit
from tests.integration.traces import audit_metrics, audit_traces
from tests.report_page import read_charts
from tests.secrets_here import files_with, plant, told
from tests.sockets import Listener, assert_on_loopback, listeners, ports
from tests.strangers import audit_privacy, open_to_strangers

# Where its services answer over HTTP; and the reward service, where there is one.
_DOORS = {
    *("buffer metrics", "learner metrics"),
    *("generator-0 metrics", "generator-0 endpoint"),
}

# The run is looked at after some of its steps.
_STEPS, _HELD, _MORE = 6, 2, 2


class HeardHere(product.Callback):
    """Hears of a run in the process of the test."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.steps: list[StepEnd] = []
        self.ids: set[str] = set()

    def _hear(self, run: Any, event: Any) -> None:
        self.kinds.append(type(event).__name__)
        self.ids.add(run.run_id)

    on_run_start = on_checkpoint_committed = on_run_end = _hear

    def on_step_end(self, run: Any, step: StepEnd, /) -> None:
        self._hear(run, step)
        self.steps.append(step)


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with collecting() as found:
        yield found


def assert_examined(told_as_json: str) -> None:
    """The doctor asks every service: all ways are open, but for that to a server that is nowhere."""
    findings = json.loads(told_as_json)["findings"]
    (missed,) = (found for found in findings if found["check"] == "reachability" and found["severity"] == "problem")
    assert missed["evidence"]["peer"] == "grpc://127.0.0.1:9"
    assert "generator" in missed["what"]
    (ways,) = (found["evidence"]["ways"] for found in findings if "ways" in found["evidence"])
    # A generator to learner, reward service and front; the learner to front and generator.
    assert ways == 5, findings
    clocks = [found for found in findings if found["check"] == "clocks"]
    # Four services, and this process.
    assert [found["severity"] for found in clocks] == ["ok"] * 5, clocks
    assert {found["severity"] for found in findings if found["check"] == "ledger"} == {"ok"}


def page_of(run: MeshRun) -> str:
    """The data of the page that the run in progress serves; its mesh is there."""
    shown = re.search(r"page of the run: (http://127\.0\.0\.1:\d+)/#key=(\S+)", "\n".join(run.lines))
    assert shown is not None, run.tail()
    at, key = shown.groups()
    assert httpx.get(f"{at}/api/index", timeout=60).status_code == 401
    assert key not in (run.folder / "logs" / "launcher.log").read_text()
    asked = {"headers": {"Authorization": f"Bearer {key}"}, "timeout": 60}
    (panels,) = (one["panels"] for one in httpx.get(f"{at}/api/index", **asked).json()["runs"])
    assert {"head", "attention", "mesh", "charts", "ledger", "settings"} <= set(panels)
    texts = {name: httpx.get(f"{at}/api/runs/0/{name}", **asked).text for name in panels}
    assert json.loads(texts["head"])["state"]["kind"] == "running"
    mesh = json.loads(texts["mesh"])
    assert (mesh["generators"]["count"], mesh["rewards"]["count"], mesh["buffer"]["groups_per_step"]) == (1, 1, 8)
    return "".join(texts.values())


async def page_of_mesh(address: str, token: Path) -> str:
    """The data of the page of a mesh whose run folder is elsewhere."""
    runs = RemoteRun(MeshClient(address, SecuritySection(token_file=token)), "elsewhere")
    try:
        data, panels = PageData(), dict[str, Any]()
        # The learner tells its metrics with its heartbeats.
        while "charts" not in panels:
            await runs.ask()
            data.update(runs.read())
            (panels,) = data.document()["panels"]
            await asyncio.sleep(0.05)
    finally:
        await runs.close()
    assert panels["mesh"]["learner"]["id"].startswith("learner")
    assert panels["head"]["state"]["kind"] == "running"
    assert {"reward", "throughput"} <= {chart["name"] for chart in panels["charts"]["charts"]}
    assert panels["ledger"]["tables"][0]["discrepancies"] == []
    return json.dumps(panels)


@pytest.mark.slow
def test_a_run_writes_what_it_promises(
    start_mesh: Callable[..., MeshRun],
    demo_data: Path,
    rollmesh: Command,
    tmp_path: Path,
    collector: tuple[Collector, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a token: no one without it hears anything, and no one on another machine can ask. No secret gets out. The
    engine fails at one prompt, and nothing else does. A collector gets the whole way of each trajectory."""
    planted = plant(tmp_path)
    traces, collector_url = collector
    traces.key = planted.texts["telemetry"]
    token, secrets = planted.token_file, planted.texts.values()
    # Libraries read these as late as they need them. So the run can be forked.
    monkeypatch.setattr(decision, "_READ_LATE", decision._READ_LATE | planted.environment.keys())
    run = start_mesh(
        f"--learner.steps={_STEPS}",
        "--learner.batch.groups=8",
        "--logging.samples_per_step=2",
        f"--eval.every_steps={_STEPS // 2}",
        "--rollout.replicas=1",
        "--rollout.endpoint.enabled=true",
        f"--telemetry.otlp={collector_url}",
        "--logging.dashboard_port=0",
        # Whose data no one has: they are never asked.
        "--reward.by_data_source={elsewhere: ['grpc://127.0.0.1:9'], judged: [judge]}",
        *holding.ARGUMENTS,
        *planted.arguments,
        module=poisoning.MODULE,
        env={**poisoning.environment(demo_data), **planted.environment, **holding.environment(tmp_path, _HELD)},
    )
    run.wait_step(_HELD)
    audit_privacy(run.folder, run.process.pid)
    audit_intruders(run.address(), token)
    doors = run.doors()
    assert doors.keys() == _DOORS | {"reward metrics"}
    assert_on_loopback(listeners(run.process.pid), with_ports=ports(doors))
    refused = rollmesh("status", "--mesh", run.address())
    assert refused.returncode == 2, refused.stdout
    assert "token" in refused.stderr
    status = rollmesh("status", "--mesh", run.address(), "--token-file", str(token))
    assert status.returncode == 0, status.stderr
    assert len(re.findall(r"generator +127\.0\.0\.1:\d+", status.stdout)) == 1, status.stdout
    ledger = rollmesh("ledger", "--mesh", run.address(), "--token-file", str(token))
    assert ledger.returncode == 0
    # Nothing of it moves meanwhile.
    monkeypatch.setattr(diagnosis, "diagnose_mesh", briefly(diagnosis.diagnose_mesh))
    doctor = rollmesh("doctor", "--mesh", run.address(), "--token-file", str(token), "--json")
    assert_examined(doctor.stdout)
    shown = [status.stdout, ledger.stdout, doctor.stdout, answer_to_a_member(run.address(), token)]
    for service, metric in (
        ("buffer", "rollmesh_buffer_groups_admitted_total"),
        ("learner", "rollmesh_learner_steps_total"),
        ("generator-0", "rollmesh_generator_tokens_generated_total"),
        ("reward", "rollmesh_reward"),
    ):
        url = doors[f"{service} metrics"]
        assert httpx.get(url, timeout=60).status_code == 401
        page = httpx.get(url, headers={"Authorization": f"Bearer {planted.texts['metrics']}"}, timeout=60).text
        assert metric in page
        audit_metrics(page)
        shown.append(page)
    shown += [page_of(run), asyncio.run(page_of_mesh(run.address(), token))]
    assert told(secrets, run.folder, [run.process.pid], shown) == []
    handle = product.Run(run.folder)
    assert handle.request_checkpoint(timeout_s=60).is_dir(), "it answers while its learner waits"
    holding.release(tmp_path)
    assert run.finish() == 0, run.tail()
    audit(run)
    uses = surviving_uses(list(read_log(run.folder / "consumption.jsonl")))
    audit_traces(traces, sum(len(group.members) for use in uses for group in use.groups), reward_service=True)
    summary = run.summary()
    for key in ("held_out_first", "held_out_last", "steps", "training_s", "tokens_per_s_generated", "staleness"):
        assert summary[key] is not None, key
    assert set(summary["peak_memory_mb"]) >= {"buffer", "learner", "generator-0", "reward"}
    assert max(int(age) for age in summary["staleness"]) <= 2
    poisoning.audit_poisoned(run, demo_data)
    evaluated = [row["step"] for row in summary["held_out"]]
    assert (evaluated[0], evaluated[-1]) == (0, _STEPS)
    # On a busy machine the generator may pass over the version that was due: a later one is evaluated instead.
    assert all(_STEPS // 2 <= step < _STEPS for step in evaluated[1:-1]), evaluated
    samples = rollmesh("samples", str(run.folder), "--worst")
    assert samples.returncode == 0, samples.stderr
    assert "reward" in samples.stdout
    assert rollmesh("report", str(run.folder)).returncode == 0
    audited = rollmesh("reward", "audit", str(run.folder), "--all")
    assert audited.returncode == 0, audited.stderr
    assert "distribution:" in audited.stdout
    assert {"reward", "staleness", "throughput"} <= read_charts(run.folder / "report.html")
    assert (run.folder / "wandb").is_dir()
    assert (run.folder / "tensorboard").is_dir()
    assert told(secrets, run.folder, shown=(*run.lines, samples.stdout)) == []
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "critic/score/mean" in row] == list(range(1, _STEPS + 1))
    assert (handle.export(run.folder / "again", handle.checkpoints()[-1].name) / "config.json").exists()
    exported = rollmesh("export", str(run.folder), str(run.folder / "hf"))
    assert exported.returncode == 0, exported.stderr
    assert (run.folder / "hf" / "model.safetensors").stat().st_mode & 0o777 == 0o644, "a model is for others"

    # It continues where a program asks more of it. There are two fronts, ranks and generators, at zero staleness,
    # and rewards that are computed here.
    threads: set[str] = set()
    listening: list[Listener] = []
    exposed: list[str] = []

    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        threads.add(threading.current_thread().name)
        if not listening:
            listening.extend(listeners(os.getpid()))
            exposed.extend(open_to_strangers(run.folder, os.getpid()))
        return float(len(solution_str) % 2)

    heard = HeardHere()
    changes = [
        *(f"learner.steps={_STEPS + _MORE}", "learner.ranks=2", "buffer.fronts=2", "buffer.max_staleness=0"),
        *("rollout.replicas=2", "eval.stop_at=null", "logging.wandb=false"),
        *(f"security.{name}=null" for name in ("token_file", "endpoint_key_file", "metrics_key_file")),
        *("security.telemetry_key_file=null", "telemetry.otlp=null"),
    ]
    fork_server.lend_server(monkeypatch)
    longer = product.train(config_path(run.folder), reward, callbacks=[heard], overrides=changes, quiet=True)
    audit(run)
    assert threads
    assert [event.step for event in heard.steps] == list(range(_STEPS + 1, _STEPS + _MORE + 1))
    assert heard.kinds[0] == "RunStart"
    assert heard.kinds[-1] == "RunEnd"
    assert heard.ids == {handle.run_id}
    # The former launch has told of the reward service.
    doors = {name: url for name, url in run.doors().items() if name != "reward metrics"}
    further = {"buffer-1 metrics", "generator-1 metrics", "generator-1 endpoint"}
    assert doors.keys() == _DOORS | further
    assert_on_loopback(listening, with_ports=ports(doors))
    assert exposed == []
    own = {(run.folder / name).read_text().strip(): name for name in ("token", "endpoint.key", "metrics.key")}
    assert sorted(files_with(own, run.folder)) == sorted(own.values())
    assert (longer.steps, longer.ended, longer.restarts) == (_STEPS + _MORE, "finished", {})
    # No reward service was started: the function was called here.
    assert longer.peak_memory_mb.keys() == {"buffer", "buffer-1", "generator-0", "generator-1", "learner"}
    assert longer.held_out_last is not None
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    later = [row for row in steps if row["step"] > _STEPS and "critic/score/mean" in row]
    assert [row["step"] for row in later] == list(range(_STEPS + 1, _STEPS + _MORE + 1))
    assert all(row["staleness/max"] == 0 for row in later)
