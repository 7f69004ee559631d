"""The executor: how programs end, what is left of them, and what happens to jobs when a sandbox is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rollmesh.reward_service.sandbox import executor
from rollmesh.reward_service.sandbox.executor import Sandbox
from rollmesh.reward_service.sandbox.interface import Job, Limits
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError
from tests.reward_service.sandbox.conftest import Run, opened

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _job(source: str, **given: float) -> Job:
    deadline = given.pop("deadline", float("inf"))
    limits = Limits(**{"cpu_s": 60.0, "wall_s": 120.0, **given})  # type: ignore[arg-type]
    return Job("python", {"main.py": source.encode()}, ["main.py"], limits=limits, deadline=deadline)


async def _ended(processes: list[psutil.Process]) -> None:
    """Waits until none of them runs; where the host's first process reaps none, orphans stay zombies."""
    async with asyncio.timeout(60):
        for process in processes:
            while process.is_running():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() == psutil.STATUS_ZOMBIE:
                        break
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("source", "code", "stdout"),
    [
        ("print(sum(map(int, input().split())))", 0, b"3\n"),
        ("import sys; sys.exit(7)", 7, b""),
        ("exit()", 0, b""),
        ("import os; os._exit(9)", 9, b""),
        ("import sys; sys.exit('why')", 1, b""),
        ("1 / 0", 1, b""),
        ("def f(:", 1, b""),
        ("if __name__ == '__main__': print(__file__, __import__('sys').argv)", 0, b"main.py ['main.py']\n"),
        ("import atexit; atexit.register(print, 'end')", 0, b"end\n"),
        ("import threading as t; t.Thread(target=print, args=['thread']).start()", 0, b"thread\n"),
        ("import os; print(dict(os.environ).keys() - {'LC_CTYPE'}, os.getuid() > 0)", 0, b"set() True\n"),
        ("import sys; print('rollmesh' in sys.modules)", 0, b"False\n"),
        ("import json, re, heapq, decimal, collections; print(json.dumps([1]))", 0, b"[1]\n"),
        ("import sys; sys.stdout.close()", 120, b""),
    ],
)
async def test_programs_end_as_python_does(run: Run, source: str, code: int, stdout: bytes) -> None:
    ran = await run(source, stdin=b"1 2\n")
    assert (ran.end, ran.code, ran.stdout, ran.reason) == ("exit", code, stdout, "")


async def test_errors_are_shown(run: Run) -> None:
    ran = await run("def f():\n    return 1 / 0\nf()")
    assert b'File "main.py", line 2, in f' in ran.stderr
    assert ran.stderr.endswith(b"ZeroDivisionError: division by zero\n")
    assert (await run("import os; os.abort()")).end == "signal"


async def test_limits_end_programs_by_name(run: Run, sandbox: Sandbox) -> None:
    ran = await run("while True: pass", cpu_s=0.1)
    assert (ran.end, ran.code) == ("cpu", signal.SIGKILL)
    # The kernel's own count of CPU time decides, whatever the precise one says.
    spin = _job("import os\nif input(): print('fine')\nelse:\n  while True: os.getpid()", cpu_s=0.9)
    spun, after = await sandbox.run_all(spin, [b"\n", b"1\n"])
    assert (spun.end, spun.code) == ("cpu", signal.SIGKILL)
    assert (after.end, after.stdout) == ("exit", b"fine\n")
    ran = await run("import os; os.kill(os.getpid(), 9)", cpu_s=1.0)
    assert (ran.end, ran.code) == ("signal", signal.SIGKILL)
    ran = await run("print('begun', flush=True)\nimport time; time.sleep(600)", wall_s=0.5)
    assert (ran.end, ran.code) == ("wall", signal.SIGKILL)
    assert (ran.stalled_s is not None) == os.access("/proc/pressure/cpu", os.R_OK)
    ran = await run("import os\nos.kill(os.getpid(), 19)", wall_s=0.2)
    assert ran.end == "wall"
    ran = await run("x = bytearray(1 << 30)", memory=256 << 20)
    assert ran.end == "memory"
    ran = await run("while True: print('x' * 1000)", output=5000)
    assert (ran.end, ran.stdout) == ("output", (b"x" * 1000 + b"\n")[:1001] * 4 + b"x" * 996)
    ran = await run("import sys\nwhile True: print('y' * 1000, file=sys.stderr)", output=5000)
    assert (ran.end, len(ran.stderr)) == ("output", 5000)
    ran = await run("f = []\nwhile True: f.append(open('main.py'))", files=16)
    assert b"Too many open files" in ran.stderr


async def test_the_disk_is_bounded(run: Run, sandbox: Sandbox) -> None:
    program = "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 16)); f.flush()"
    ran = await run(program, disk=1 << 20)
    assert (b"PermissionError" if sandbox.rung == 2 else b"Error: [Errno") in ran.stderr
    if sandbox.rung > 2:
        ran = await run("n = 0\nwhile True: open(f'x{n}', 'w').close(); n += 1")
        assert b"No space left" in ran.stderr
        ran = await run("import os; print(os.listdir('.'))")
        assert ran.stdout == b"['main.py']\n"


async def test_files_of_a_job_are_its_own(sandbox: Sandbox) -> None:
    files = {
        "main.py": b"import sub.part; print(open('data').read(), sub.part.X)",
        "data": b"d",
        "sub/part.py": b"X = 1",
    }
    ran = await sandbox.run(Job("python", files, ["main.py"]))
    assert ran.stdout == b"d 1\n"
    ran = await sandbox.run(_job("import os; print(sorted(os.listdir('.')))"))
    assert ran.stdout == b"['main.py']\n"


async def test_a_program_runs_once_for_each_input(sandbox: Sandbox) -> None:
    source = b"import sys; n = int(input()); print(n * n); sys.exit(n)"
    job = Job("python", {"main.py": source}, ["main.py"], limits=Limits(cpu_s=60.0, wall_s=120.0))
    inputs = [b"%d\n" % n for n in range(12)]
    ran = await sandbox.run_all(job, inputs)
    assert [(each.end, each.code, each.stdout) for each in ran] == [("exit", n, b"%d\n" % n**2) for n in range(12)]
    ran = await sandbox.run_all(job, inputs, stop=lambda each: each.code == 3)
    assert [each.code for each in ran] == [0, 1, 2, 3]
    assert await sandbox.run_all(job, []) == []
    job = Job("native", {}, ["/bin/cat"], limits=job.limits)
    assert [each.stdout for each in await sandbox.run_all(job, inputs)] == inputs


async def test_runs_of_a_job_know_nothing_of_each_other(sandbox: Sandbox) -> None:
    source = b"""
import builtins, fcntl, os
n = int(input())
print(sorted(os.listdir(".")), open("main.py").read(6), hasattr(builtins, "mark"), fcntl.fcntl(1, 3))
builtins.mark = True
fcntl.fcntl(1, 4, os.O_NONBLOCK)
try:
    with open("left", "w") as file, open("main.py", "r+") as own:
        own.write("# gone")
except OSError:
    pass
"""
    job = Job("python", {"main.py": source}, ["main.py"], limits=Limits(cpu_s=60.0, wall_s=120.0))
    first, *others = [each.stdout for each in await sandbox.run_all(job, [b"1", b"2", b"3"])]
    assert first.startswith(b"['main.py'] \nimpor False")
    assert others == [first, first]


async def test_no_run_has_a_descriptor_of_its_keeper(sandbox: Sandbox) -> None:
    source = b'for n in 3 4 5 6 7 8 9; do eval "echo forged >&$n"; done 2>/dev/null; echo done'
    limits = Limits(cpu_s=60.0, wall_s=120.0)
    job = Job("native", {"main.sh": source}, ["/bin/bash", "main.sh"], limits=limits)
    ran = await sandbox.run_all(job, [b"", b"", b""])
    assert [(each.end, each.stdout, each.reason) for each in ran] == [("exit", b"done\n", "")] * 3


async def test_each_run_ends_for_itself(sandbox: Sandbox) -> None:
    source = """
import os, sys, time
match sys.stdin.read():
    case "sleep":
        time.sleep(600)
    case "flood":
        while True: print("x" * 1000)
    case "memory":
        bytearray(1 << 30)
    case "attack":
        import ctypes
        ctypes.CDLL(None).ptrace(0, 0, 0, 0)
    case "stop":
        os.kill(os.getpid(), 19)
print("fine")
"""
    inputs = [b"flood", b"memory", b"", b"attack", b""]
    ran = await sandbox.run_all(_job(source, memory=256 << 20, output=5000), inputs)
    assert [each.end for each in ran] == ["output", "memory", "exit", "denied", "exit"]
    assert [each.stdout for each in ran if each.end == "exit"] == [b"fine\n"] * 2
    ran = await sandbox.run_all(_job(source, wall_s=0.5), [b"sleep", b"", b"stop", b""])
    assert [ran[0].end, ran[2].end] == ["wall", "wall"]
    assert {ran[1].end, ran[3].end} <= {"wall", "exit"}, "on a machine with much else to do"


async def test_a_program_that_is_no_python_fails_each_time(sandbox: Sandbox) -> None:
    ran = await sandbox.run_all(Job("python", {"main.py": b"def f(:"}, ["main.py"]), [b"", b"", b""])
    assert [(each.end, each.code) for each in ran] == [("exit", 1)] * 3
    assert {each.stderr.splitlines()[-1] for each in ran} == {b"SyntaxError: invalid syntax"}


async def test_files_that_a_program_makes_are_fetched(sandbox: Sandbox) -> None:
    source = b"""
import os
os.mkdir("sub")
open("made", "wb").write(bytes(70000))
open("sub/made", "w").write(input())
os.symlink("made", "link")
os.symlink("sub", "linked")
"""
    outputs = ["made", "sub/made", "link", "linked/made", "sub", "none"]
    job = Job("python", {"main.py": source}, ["main.py"], outputs=outputs, limits=Limits(cpu_s=60.0, wall_s=120.0))
    if sandbox.rung == 2:
        with pytest.raises(UnavailableError, match="makes files needs rung 3"):
            await sandbox.run(job)
        return
    first, second = await sandbox.run_all(job, [b"1", b"2"])
    assert first.files == {"made": bytes(70000), "sub/made": b"1"}
    assert second.files == {"made": bytes(70000), "sub/made": b"2"}


async def test_a_program_that_cannot_be_run_is_no_failed_program(sandbox: Sandbox) -> None:
    ran = await sandbox.run(Job("native", {}, ["/bin/no-such-program"]))
    assert (ran.end, "No such file" in ran.reason) == ("infrastructure", True)
    ran = await sandbox.run(_job("", deadline=time.monotonic() - 1))
    assert ran.end == "infrastructure"
    ran = await sandbox.run(_job("import time; time.sleep(600)", deadline=time.monotonic() + 1))
    assert ran.end == "infrastructure"
    if sandbox.rung == 2:
        with pytest.raises(UnavailableError, match="2 processes needs rung 3"):
            await sandbox.run(_job("", processes=2))


async def test_files_that_cannot_be_laid_out_leave_room_for_the_next_job(sandbox: Sandbox) -> None:
    limits = Limits(disk=1 << 20)
    files = {"main.py": b"", "long" * 100: b""} if sandbox.rung == 2 else {"main.py": b"", "large": bytes(2 << 20)}
    ran = await sandbox.run_all(Job("python", files, ["main.py"], limits=limits), [b"", b""])
    assert [(each.end, "cannot be prepared" in each.reason) for each in ran] == [("infrastructure", True)] * 2
    assert (await sandbox.run(_job("import os; print(os.listdir('.'))"))).stdout == b"['main.py']\n"


async def test_an_end_at_the_last_moment_is_not_taken_for_another_run(sandbox: Sandbox) -> None:
    source = "import time; time.sleep(0.05); print(input())"
    for wall_s in (0.048, 0.05, 0.052, 0.054, 0.056):
        ran = await sandbox.run_all(_job(source, wall_s=wall_s), [b"1", b"2", b"3"])
        assert all(each.end == "wall" or each.stdout == b"%d\n" % n for n, each in enumerate(ran, 1)), ran


async def test_a_lost_sandbox_is_replaced_and_nothing_is_left_of_it(sandbox: Sandbox) -> None:
    await sandbox.run(_job(""))
    stub = psutil.Process(sandbox._idle[-1].pid)
    folder = Path(sandbox._idle[-1]._folder)
    running = asyncio.create_task(sandbox.run(_job("import time; time.sleep(600)")))
    async with asyncio.timeout(60):
        while len(family := stub.children(recursive=True)) < 3:
            await asyncio.sleep(0.01)
    stub.kill()
    ran = await running
    assert (ran.end, bool(ran.reason)) == ("infrastructure", True)
    await _ended(family)
    assert not folder.exists()
    assert (await sandbox.run(_job("print(1)"))).stdout == b"1\n"


async def test_the_rest_of_a_job_whose_sandbox_is_lost_runs_in_another(sandbox: Sandbox) -> None:
    await sandbox.run(_job(""))
    stub = psutil.Process(sandbox._idle[-1].pid)

    def lost_after_the_second(_: object) -> bool:
        seen.append(None)
        if len(seen) == 2:
            stub.kill()
        return False

    seen: list[None] = []
    # The third run ends only with its sandbox, however late that is killed.
    source = "import time; n = input(); n == '3' and time.sleep(600); print(n)"
    ran = await sandbox.run_all(_job(source), [b"1", b"2", b"3", b"4"], stop=lost_after_the_second)
    assert [each.end for each in ran] == ["exit", "exit", "infrastructure", "exit"]
    assert [each.stdout for each in ran] == [b"1\n", b"2\n", b"", b"4\n"]


async def test_a_cancelled_job_leaves_nothing(sandbox: Sandbox) -> None:
    await sandbox.run(_job(""))
    stubs = [psutil.Process(idle.pid) for idle in sandbox._idle]
    running = asyncio.create_task(sandbox.run(_job("import time; time.sleep(600)")))
    async with asyncio.timeout(60):
        while len(family := max(([stub, *stub.children(recursive=True)] for stub in stubs), key=len)) < 4:
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await _ended(family)
    assert (await sandbox.run(_job("print(1)"))).stdout == b"1\n"


async def test_an_owner_that_dies_leaves_nothing(sandbox: Sandbox) -> None:
    other = await opened(sandbox.rung, size=1)
    (zygote,) = other._idle
    family = [psutil.Process(zygote.pid), *psutil.Process(zygote.pid).children(recursive=True)]
    assert zygote._writer is not None
    # Its end of the connection is all that the kernel closes.
    zygote._writer.transport.abort()
    assert await asyncio.to_thread(zygote._process.wait, 60) == 0
    await _ended(family)
    assert not Path(zygote._folder).exists()
    await other.close()


async def test_less_than_required_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="rung 4 or above"):
        await Sandbox.open(require=4)
    monkeypatch.setattr(executor, "MACHINE", "riscv64")
    with pytest.raises(UnavailableError, match="rung 3: Linux on x86_64 or aarch64; rung 2: Linux"):
        await Sandbox.open()
