"""Programs that another program confines: the shell's part without one, then bubblewrap and gVisor."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollmesh.reward_service.sandbox.interface import Job, Limits
from rollmesh.reward_service.sandbox.plugins.bubblewrap import Bubblewrap
from rollmesh.reward_service.sandbox.plugins.commands import FOLDER, SHOWN, CommandExecutor, Confined, _cause
from rollmesh.reward_service.sandbox.plugins.execution import Executed, execute
from rollmesh.reward_service.sandbox.plugins.gvisor import Gvisor
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

LIMITS = Limits(cpu_s=60.0, wall_s=120.0, memory=1 << 30)


class Bare(CommandExecutor):
    """Confines nothing, and has the folders elsewhere."""

    def __init__(self, folder: Path) -> None:
        super().__init__("/bin/sh", [], 2)
        self._folder = folder
        self.made: list[Path] = []

    def describe(self) -> str:
        return "bare"

    async def _execute(self, confined: Confined, stdin: bytes, most: int, wall_s: float) -> Executed:
        self.made.append(confined.files.parent)
        work = Path(tempfile.mkdtemp(dir=self._folder))
        work.chmod(0o777)
        script = confined.argv[2].replace(SHOWN, str(confined.files)).replace(FOLDER, str(work))
        # The account that programs get here has other processes, which count.
        script = "\n".join(line for line in script.split("\n") if "ulimit -p" not in line)
        return await execute([*confined.argv[:2], script, *confined.argv[3:]], stdin, most, wall_s)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For temporary folders: no other program's are in it, and every account may read it."""
    folder = Path(tempfile.mkdtemp(prefix="rollmesh-commands-"))
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def bare(folder: Path) -> Bare:
    return Bare(folder)


def _job(source: str, **given: object) -> Job:
    return Job("native", {"main.sh": source.encode()}, ["/bin/sh", "main.sh"], **{"limits": LIMITS, **given})  # type: ignore[arg-type]


async def test_runs_are_apart_and_their_end_is_known(bare: Bare) -> None:
    job = _job('[ -e left ] && echo left; touch left; read x; echo "$x" "$PWD" >&2; echo "<$x>"; exit "$x"')
    ran = await bare.run_all(job, [b"3\n", b"0\n", b"7\n"], stop=lambda each: each.code == 0)
    assert [(each.end, each.code, each.stdout) for each in ran] == [("exit", 3, b"<3>\n"), ("exit", 0, b"<0>\n")]
    assert (await bare.run(_job("kill -11 $$"))).end == "signal"
    ran = [await bare.run(_job("kill -24 $$")), await bare.run(_job("kill -31 $$"))]
    assert [each.end for each in ran] == ["cpu", "denied"]
    assert not any(folder.exists() for folder in bare.made)


@pytest.mark.parametrize(
    ("code", "cpu_s", "expected"), [(-9, 3.7, "cpu"), (-9, 1.0, ""), (-24, 4.0, "cpu"), (-11, 4.0, ""), (0, 4.0, "")]
)
def test_a_signal_at_the_limit_of_cpu_time_is_for_that(code: int, cpu_s: float, expected: str) -> None:
    assert _cause(code, cpu_s, Limits(cpu_s=4.0)) == expected


async def test_what_is_too_much_is_ended(bare: Bare) -> None:
    limits = Limits(cpu_s=60.0, wall_s=1.0, output=5000, memory=1 << 30)
    ran = await bare.run(_job("echo begun; sleep 600 & sleep 600", limits=limits))
    assert (ran.end, ran.stdout) == ("wall", b"begun\n")
    flood = Limits(cpu_s=60.0, wall_s=120.0, output=5000, memory=1 << 30)
    ran = await bare.run(_job("while :; do echo 123456789; done", limits=flood))
    assert (ran.end, ran.stdout) == ("output", b"123456789\n" * 500)
    ran = await bare.run(_job("sleep 600", deadline=time.monotonic() + 0.3))
    assert ran.end == "infrastructure"


async def test_files_that_a_program_makes_are_fetched(bare: Bare) -> None:
    source = "mkdir sub; printf 'a\\nb' > sub/x; head -c 70000 /dev/zero > y; ln -s y link; echo told; exit 3"
    ran = await bare.run(_job(source, outputs=["sub/*", "y", "link", "none"]))
    assert (ran.code, ran.stdout, ran.stderr) == (3, b"", b"told\n")
    assert ran.files == {"sub/x": b"a\nb", "y": bytes(70000)}


async def test_a_confining_program_that_fails_is_no_failed_program(bare: Bare) -> None:
    bare.program = "/bin/false"

    async def fails(*arguments: object) -> Executed:
        del arguments
        return await execute(["/bin/sh", "-c", "echo no namespaces >&2; exit 1"], b"", 1000, 60.0)

    bare._execute = fails  # type: ignore[method-assign]
    ran = await bare.run(_job("exit 0"))
    assert (ran.end, ran.reason) == ("infrastructure", "/bin/false: no namespaces")
    with pytest.raises(UnavailableError, match="does not work here: /bin/false: no namespaces"):
        await bare.try_out()
    with pytest.raises(UnavailableError, match="no programs in 'cpp'"):
        await bare.run(Job("cpp", {"main.cpp": b""}, ["main.cpp"]))


@pytest.fixture(params=[(Bubblewrap, "bwrap"), (Gvisor, "runsc")], ids=["bubblewrap", "gvisor"])
async def confining(request: pytest.FixtureRequest, folder: Path) -> CommandExecutor:
    """An executor of each program that confines, where it runs."""
    del folder
    plugin, program = request.param
    if (path := shutil.which(program)) is None:
        pytest.skip(f"there is no {program}")
    sandbox: CommandExecutor = plugin(path, [], 1)
    try:
        await sandbox.try_out()
    except UnavailableError as error:
        pytest.skip(str(error))
    return sandbox


async def test_a_program_reaches_nothing(confining: CommandExecutor) -> None:
    source = b"""
import os, socket
print(sorted(os.listdir(".")), os.getuid())
for attempt in (
    lambda: open("/etc/passwd"),
    lambda: open("/usr/new", "w"),
    lambda: open("/box/job/new", "w"),
    lambda: socket.create_connection(("127.0.0.1", 22)),
    lambda: socket.create_connection(("1.1.1.1", 53), 1),
    lambda: os.kill(os.getppid(), 9) if os.getppid() > 1 else open("/no"),
    lambda: open("large", "wb").write(bytes(100 << 20)),
):
    try:
        attempt()
        print("ESCAPED")
    except OSError:
        pass
print(int(input()) + 1)
"""
    ran = await confining.run_all(Job("python", {"main.py": source}, ["main.py"], limits=LIMITS), [b"1", b"2"])
    assert [each.stdout for each in ran] == [b"['main.py'] 1000\n2\n", b"['main.py'] 1000\n3\n"], ran
    await _until_nothing_is_left(confining)


async def test_a_program_that_sleeps_leaves_nothing(confining: CommandExecutor) -> None:
    source = b"import os, time; os.fork(); os.setsid() if os.fork() == 0 else 0; os.write(1, b'.'); time.sleep(600)"
    asleep, wall_s = b"", 0.5
    # A slow machine takes longer until all of its processes sleep, or even until they run.
    while asleep != b"....":
        limits = Limits(cpu_s=60.0, wall_s=wall_s, memory=1 << 30, processes=4)
        ran = await confining.run(Job("python", {"main.py": source}, ["main.py"], limits=limits))
        await _until_nothing_is_left(confining)
        asleep, wall_s = ran.stdout, 3 * wall_s
    assert ran.end == "wall"


async def _until_nothing_is_left(confining: CommandExecutor) -> None:
    async with asyncio.timeout(60):
        while _left(confining):
            await asyncio.sleep(0.05)


def _left(confining: CommandExecutor) -> list[str]:
    """Remains of runs: processes of the confining program or of Python in it, and folders."""
    found = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("rollmesh-sandbox-")]
    name = os.path.basename(confining.program)
    for process in psutil.process_iter(["name", "cmdline"]):
        words = process.info["cmdline"] or []
        if (process.info["name"] or "").startswith(name) or "/box/work" in words:
            found.append(f"{process.pid}: {' '.join(words)}")
    return found


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap")
async def test_bubblewrap_filters_system_calls() -> None:
    sandbox = Bubblewrap(str(shutil.which("bwrap")), [], 1)
    try:
        await sandbox.try_out()
    except UnavailableError as error:
        pytest.skip(str(error))
    attack = b"import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)"
    assert (await sandbox.run(Job("python", {"main.py": attack}, ["main.py"], limits=LIMITS))).end == "denied"
