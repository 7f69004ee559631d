"""The service harness: signals, exit codes and the ready file."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from rollmesh.mesh.runtime.service import end_task, write_ready_file


def _program(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "service_under_test.py"
    path.write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "from rollmesh.mesh.runtime.service import run_service, write_ready_file\n"
        "from rollmesh.mesh.errors import StoreError\n" + textwrap.dedent(body)
    )
    return [sys.executable, str(path)]


def test_sigterm_asks_and_the_service_ends_by_itself(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    body = f"""
    async def main(shutdown):
        open({str(ready)!r}, "w").close()
        await shutdown.requested.wait()
        return 7 if shutdown.reason == "SIGTERM" else 1
    sys.exit(run_service("t", main))
    """
    process = subprocess.Popen(_program(tmp_path, body), stderr=subprocess.PIPE)
    ready.read_bytes()
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 7


def test_the_signal_that_follows_a_notice_does_not_cut_the_drain_short(tmp_path: Path) -> None:
    """Clouds and clusters give notice, and send SIGTERM too."""
    asked, drained = tmp_path / "asked", tmp_path / "drained"
    for path in (asked, drained):
        os.mkfifo(path)
    body = f"""
    import asyncio
    async def main(shutdown):
        shutdown.request("a notice", 30.0)
        open({str(asked)!r}, "w").close()
        await asyncio.to_thread(lambda: open({str(drained)!r}).read())
        return 7 if shutdown.reason == "a notice" else 1
    sys.exit(run_service("t", main))
    """
    process = subprocess.Popen(_program(tmp_path, body), stderr=subprocess.PIPE, text=True)
    asked.read_bytes()
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert "asked to end by SIGTERM" in process.stderr.readline()
    drained.write_bytes(b"")
    assert process.wait(180) == 7


def test_an_expected_failure_is_one_line_and_its_exit_code(tmp_path: Path) -> None:
    body = """
    async def main(shutdown):
        raise StoreError("redis is full", hint="free memory")
    sys.exit(run_service("t", main))
    """
    done = subprocess.run(_program(tmp_path, body), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 7
    (line,) = done.stderr.strip().splitlines()
    assert json.loads(line)["message"] == "redis is full (free memory)"
    assert "Traceback" not in done.stderr


def test_ready_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write_ready_file(path, "127.0.0.1:5")
    assert json.loads(path.read_text()) == {"address": "127.0.0.1:5", "pid": os.getpid()}
    assert list(tmp_path.iterdir()) == [path]


async def test_a_task_that_takes_a_cancellation_for_its_own_is_cancelled_again() -> None:
    async def stubborn() -> None:
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_task(task, again_s=0.01), 180)
    assert task.done()
