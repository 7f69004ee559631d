"""Particulars of a server of SGLang: its transfers, its prefix cache, its life and its end."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from rollmesh.generators.engine_watch import FrozenEngineError, watch
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.liveness.process_state import read_processes
from tests.generators.engines.collector import Collector
from tests.generators.engines.harness import V1, V2, request
from tests.generators.engines.sglang.server import START_S, SglangHarness, SharedServer
from tests.generators.engines.tiny import ContractModel
from tests.sockets import assert_on_loopback, listeners

pytestmark = [pytest.mark.engine("sglang")]


@pytest.mark.parametrize(
    ("kv", "transfer"),
    [
        ("recompute", "tensor"),
        ("keep", "disk"),
        ("recompute", "distributed"),
        pytest.param("keep", "tensor", marks=pytest.mark.exhaustive),
        pytest.param("recompute", "disk", marks=pytest.mark.exhaustive),
        pytest.param("keep", "distributed", marks=pytest.mark.exhaustive),
    ],
)
def test_every_transfer_brings_the_weights_and_no_cache_outlives_them(
    transfer: str, kv: str, contract_model: ContractModel, sglang_server: SharedServer
) -> None:
    """The same prompt, before and after, concurrently with a request that runs through the update."""
    harness = SglangHarness(contract_model, sglang_server, kv, transfer)  # type: ignore[arg-type] # literals
    try:
        prompt = list(range(3, 40))
        for version, seed in ((V1, 1), (V2, 2)):
            weights = harness.random_weights(seed)
            if version == V2:
                harness.freeze([request("through", prompt, max_tokens=harness.long)])
            harness.update(version, weights)
            harness.engine.resume().result(harness.deadline_s)
            asked = [request(f"{version}.{index}", prompt, max_tokens=6) for index in range(3)]
            for result in harness.run(asked):
                assert result.sampled.versions.versions == (version,)
                harness.check_log_probs(result, weights, prompt)
            found = harness.engine.probe(prompt).result(harness.deadline_s)
            np.testing.assert_allclose(found.log_probs, harness.log_probs(weights, prompt), atol=1e-3)
        [through] = harness.collector.wait(["through"])
        assert through.sampled.versions.versions == (V1, V2)
        assert_on_loopback(listeners(os.getpid()))
    finally:
        harness.close()


def test_a_server_answers_those_alone_who_have_its_key(sglang_server: SharedServer) -> None:
    """Else every user of its host could call it, and a call of weights runs code."""
    with httpx.Client(base_url=sglang_server.address, timeout=240) as client:
        found = {
            (path, key): client.post(path, json={}, headers=headers).status_code
            for path in ("/generate", "/update_weights_from_tensor", "/update_weights_from_disk", "/pause_generation")
            for key, headers in (("none", {}), ("wrong", {"Authorization": "Bearer wrong"}))
        }
        assert set(found.values()) == {401}, found
        assert client.get("/server_info").status_code == 401
    key = sglang_server.key_file.read_text().strip()
    assert not [process for process in sglang_server.traces().processes if key in " ".join(process.cmdline())]


def test_a_scheduler_that_is_stopped_is_found_and_continued_goes_on(
    contract_model: ContractModel, sglang_server: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its front answers all the while; the tokens are the same."""
    harness = SglangHarness(contract_model, sglang_server, "keep")
    try:
        harness.update(V1, harness.random_weights(1))
        asked = request("a", max_tokens=harness.long, temperature=0.0)
        [undisturbed] = harness.run([asked])
        processes, scheduler = sglang_server.traces().processes, sglang_server.scheduler()
        with monkeypatch.context() as patched:
            # As the process that has started it sees it.
            owned = SimpleNamespace(process_state=lambda: read_processes(*[process.pid for process in processes]))
            patched.setattr(harness.engine._backend._server, "process", owned)  # type: ignore[attr-defined]
            harness.engine.ping().result(harness.deadline_s)
            harness.engine.submit([replace(asked, request_id="b", stream=True)])
            harness.collector.when_streamed({"b": 1}, scheduler.suspend)
            harness.collector.wait_streamed({"b": 1})
            with pytest.raises(FrozenEngineError, match="stopped by a signal"):
                asyncio.run(asyncio.wait_for(watch(harness.engine, 0.1), harness.deadline_s))
            scheduler.resume()
            harness.engine.ping().result(harness.deadline_s)
        [result] = harness.collector.wait(["b"])
        assert result.sampled.response_ids.tolist() == undisturbed.sampled.response_ids.tolist()
    finally:
        harness.close()


def test_a_server_on_a_cpu_forks_its_processes(sglang_server: SharedServer) -> None:
    """Python's own helpers of a spawn are not there."""
    commands = [" ".join(process.cmdline()) for process in sglang_server.traces().processes]
    for name in ("scheduler", "detokenizer"):
        assert any(f"sglang::{name}" in line for line in commands)
    assert not [line for line in commands if "from multiprocessing" in line]


def test_a_paused_scheduler_sleeps(contract_model: ContractModel, sglang_server: SharedServer) -> None:
    """Amid a response; else it would look for requests in a loop, on a core that others could use."""
    harness = SglangHarness(contract_model, sglang_server, "keep")
    try:
        harness.update(V1, harness.constant_weights(10))
        harness.freeze([request("a", max_tokens=harness.long)])
        scheduler = sglang_server.scheduler()
        sleeps, computed = scheduler.num_ctx_switches().voluntary, sum(scheduler.cpu_times()[:2])
        end = time.monotonic() + harness.deadline_s
        # It sleeps before each call of its front, and a second at most.
        while scheduler.num_ctx_switches().voluntary < sleeps + 3 and time.monotonic() < end:
            sglang_server.ping()
        assert scheduler.num_ctx_switches().voluntary >= sleeps + 3
        assert sum(scheduler.cpu_times()[:2]) - computed < 0.5
        harness.resume()
        [result] = harness.collector.wait(["a"])
        assert result.sampled.response_ids.tolist() == [10] * harness.long
    finally:
        harness.close()


def test_an_interpreter_without_sglang_is_named(contract_model: ContractModel) -> None:
    collector = Collector(START_S)
    section = SglangSection(python=Path(sys.executable).with_name("no-such-python"))
    engine = create_engine("sglang", contract_model.folder, EngineSettings(sglang=section), collector)
    engine.start()
    assert "no-such-python" in str(collector.wait_failure())
    engine.stop()


def test_an_environment_without_sglang_is_named(contract_model: ContractModel, tmp_path: Path) -> None:
    """The interpreter is there; the package is not."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    collector = Collector(START_S)
    section = SglangSection(python=python)
    engine = create_engine("sglang", contract_model.folder, EngineSettings(sglang=section), collector)
    engine.start()
    failure = str(collector.wait_failure())
    assert "sglang" in failure
    assert "rollout.sglang.python" in failure
    engine.stop()


def test_no_one_at_an_address(contract_model: ContractModel) -> None:
    collector = Collector(START_S)
    section = SglangSection(address="http://127.0.0.1:9", start_timeout_s=0.5)
    engine = create_engine("sglang", contract_model.folder, EngineSettings(sglang=section), collector)
    engine.start()
    assert "127.0.0.1:9" in str(collector.wait_failure())
    engine.stop()


def test_a_bad_setting_is_refused_at_once(contract_model: ContractModel) -> None:
    bad = SglangSection(data_parallel=2, transfer="tensor")
    with pytest.raises(ConfigError, match="data_parallel"):
        create_engine("sglang", contract_model.folder, EngineSettings(sglang=bad), Collector(1.0))


def test_nothing_is_left_of_a_server_whose_owner_is_gone(
    contract_model: ContractModel, sglang_server: SharedServer
) -> None:
    """Amid a response, which another client has asked for; last, for it takes the session's server."""
    harness = SglangHarness(contract_model, sglang_server, "keep")
    try:
        harness.update(V1, harness.constant_weights(10))
        harness.freeze([request("cut", max_tokens=harness.long)])
        traces = sglang_server.traces()
        sglang_server.abandon()
        assert len(traces.processes) >= 3
        assert traces.shared
        assert survivors([process.pid for process in traces.processes], 60) == set()
        assert not [path for path in traces.shared if path.exists()]
        assert not traces.scratch.exists()
        assert "SGLang server" in str(harness.collector.wait_failure())
    finally:
        harness.close()
