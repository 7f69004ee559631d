"""Sandboxes of other machines: our own server, and one that answers as SandboxFusion does."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Job, Limits, Ran
from rollmesh.reward_service.sandbox.plugins.json_jobs import job_from_json, job_to_json, ran_from_json, ran_to_json
from rollmesh.reward_service.sandbox.plugins.remote import RemoteSandbox
from rollmesh.reward_service.sandbox.plugins.sandbox_fusion import SandboxFusion
from rollmesh.reward_service.sandbox.plugins.server import sandbox_server
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

LIMITS = Limits(cpu_s=60.0, wall_s=120.0)
ADDS = Job("python", {"main.py": b"print(int(input()) + 1)"}, ["main.py"], limits=LIMITS)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("k" * 32)
    path.chmod(0o600)
    return path


async def test_a_job_runs_on_another_machine(key_file: Path) -> None:
    try:
        sandbox = await Sandbox.open(size=1)
    except UnavailableError as error:
        pytest.skip(str(error))
    try:
        async with sandbox_server(sandbox, "127.0.0.1", 0, key_file, SecuritySection()) as url:
            remote = RemoteSandbox(url, key_file, 2)
            ran = await remote.run_all(ADDS, [b"1", b"2", b"x", b"4"], stop=lambda each: each.code == 1)
            assert [(each.end, each.stdout) for each in ran] == [("exit", b"2\n"), ("exit", b"3\n"), ("exit", b"")]
            assert b"ValueError" in ran[2].stderr
            late = Job(
                "python", {"main.py": b"import time; time.sleep(600)"}, ["main.py"], deadline=time.monotonic() + 1
            )
            assert (await remote.run(late)).end == "infrastructure"
            # The other machine has ended that job: its one sandbox takes the next.
            assert (await remote.run_all(ADDS, [b"5"]))[0].stdout == b"6\n"
            await remote.close()
            with pytest.raises(ConfigError, match=r"refusing to run programs for others at 0.0.0.0 without TLS"):
                await sandbox_server(sandbox, "0.0.0.0", 0, key_file, SecuritySection()).__aenter__()
            async with aiohttp.ClientSession() as stranger:
                for headers, body, status in (
                    ({}, b"{}", 401),
                    ({"Authorization": "Bearer wrong"}, b"{}", 401),
                    ({"Authorization": "Bearer " + "k" * 32}, b"[" * 100_000, 400),
                    ({"Authorization": "Bearer " + "k" * 32}, b'{"limits": {"files": 1}}', 400),
                ):
                    headers["Content-Type"] = "application/json"
                    async with stranger.post(f"{url}/v1/run", data=body, headers=headers) as answer:
                        assert answer.status == status
    finally:
        await sandbox.close()


async def test_a_machine_that_is_not_there_is_no_failed_program(key_file: Path) -> None:
    remote = RemoteSandbox("http://127.0.0.1:9", key_file, 1)
    ran = await remote.run_all(ADDS, [b"1", b"2"])
    assert [each.end for each in ran] == ["infrastructure", "infrastructure"]
    assert "http://127.0.0.1:9" in ran[0].reason
    await remote.close()
    with pytest.raises(ConfigError, match="would be sent in clear"):
        RemoteSandbox("http://192.0.2.1:80", key_file, 1)


def test_jobs_and_ends_survive_json() -> None:
    job = Job("native", {"a": b"\0\xff"}, ["/bin/x", "é"], limits=LIMITS, outputs=["o"], environment={"A": "b"})
    assert job_from_json(json.loads(json.dumps(job_to_json(job, [b"\xfe"])))) == (job, [b"\xfe"])
    ran = Ran("wall", 9, b"\xff", b"e", 0.5, 7, 0.25, {"o": b"\0"}, "why")
    assert ran_from_json(json.loads(json.dumps(ran_to_json(ran)))) == ran
    with pytest.raises(ValueError, match="end 'won'"):
        ran_from_json({"end": "won"})


@asynccontextmanager
async def _fusion(*answers: Any) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that gives these answers, and the requests that it has had."""
    asked: list[Any] = []
    given = iter(answers)

    async def run_code(request: web.Request) -> web.Response:
        asked.append(await request.json())
        answer = next(given)
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

    app = web.Application()
    app.router.add_post("/run_code", run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


def _answer(status: str, run: Any, compiled: Any = None, **more: Any) -> dict[str, Any]:
    return {"status": status, "message": "", "compile_result": compiled, "run_result": run, "files": {}, **more}


def _result(status: str = "Finished", code: int | None = 0, stdout: str = "") -> dict[str, Any]:
    return {"status": status, "execution_time": 0.25, "return_code": code, "stdout": stdout, "stderr": "e"}


async def test_sandbox_fusion_answers_are_ends() -> None:
    answers = (
        _answer("Success", _result(stdout="2\n"), files={"o": base64.b64encode(b"made").decode()}),
        _answer("Failed", _result(code=1)),
        _answer("Failed", _result("TimeLimitExceeded", None)),
        _answer("Failed", None, _result(code=1)),
        _answer("Failed", _result(code=-11)),
        _answer("SandboxError", None, message="no pod"),
        504,
        {"status": "Success"},
    )
    async with _fusion(*answers) as (url, asked):
        sandbox = SandboxFusion(url, None, 2)
        job = Job("cpp", {"main.cpp": b"int x;", "data/in": b"\xff"}, ["main.cpp"], limits=LIMITS, outputs=["o"])
        ran = await sandbox.run_all(job, [b"%d" % n for n in range(len(answers))])
        await sandbox.close()
    assert [(each.end, each.code) for each in ran] == [
        *(("exit", 0), ("exit", 1), ("wall", 0), ("exit", 1), ("signal", 11)),
        *[("infrastructure", 0)] * 3,
    ]
    assert ran[0] == Ran("exit", 0, b"2\n", b"e", 0.25, files={"o": b"made"})
    assert ["no pod" in ran[5].reason, "504" in ran[6].reason, "not understood" in ran[7].reason] == [True] * 3
    assert asked[0] == {
        "code": "int x;",
        "language": "cpp",
        "stdin": "0",
        "files": {"data/in": "/w=="},
        "fetch_files": ["o"],
        "compile_timeout": 60.0,
        "run_timeout": 120.0,
        "memory_limit_MB": 512,
    }
