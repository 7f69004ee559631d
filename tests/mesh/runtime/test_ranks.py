"""Ranks that a program starts of itself: how they end, who hears signals, and which ranks are refused."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmesh.mesh.config.learner import DistributedSection
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.runtime import ranks
from tests.repository import REPOSITORY

DEADLINE_S = 240.0
PROGRAM = """
import os, pathlib, signal, sys
from rollmesh.mesh.runtime import ranks
ranks._TOGETHER_S = float(sys.argv[3])
ranks.become_ranks(2)
rank = os.environ["RANK"]
def answer(number, frame):
    sys.exit(int(sys.argv[2]))
def die(number, frame):
    sys.exit(3)
signal.signal(signal.SIGTERM, answer)
signal.signal(signal.SIGUSR1, die)
folder = pathlib.Path(os.environ[ranks.MEETING]).parent
# At once: the other rank writes too.
os.write(1, f"{rank} {os.getpid()} {oct(folder.stat().st_mode & 0o777)}\\n".encode())
if rank == sys.argv[1]:
    sys.exit(0)
while True:
    signal.pause()
"""


@contextmanager
def program(
    leaves: str = "", status: int = 0, *, together_s: float = 0.2
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The program and the process ids of its ranks.

    Args:
        leaves: a rank that ends in order at once.
        status: with which rank 0 answers SIGTERM.
        together_s: for the last work of a rank.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, leaves, str(status), str(together_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    try:
        said = sorted(process.stdout.readline().split() for _ in range(2))
        assert [(rank, mode) for rank, _, mode in said] == [("0", "0o700"), ("1", "0o700")]
        yield process, [int(pid) for _, pid, _ in said]
        assert survivors((int(pid) for _, pid, _ in said), DEADLINE_S) == set()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("status", [0, 40])
def test_an_end_is_asked_of_rank_0_and_its_status_is_the_programs(status: int) -> None:
    with program(leaves="1", status=status) as (process, _):
        process.terminate()
        assert process.wait(DEADLINE_S) == status


def test_a_rank_that_fails_ends_all() -> None:
    with program() as (process, pids):
        os.kill(pids[1], signal.SIGUSR1)
        assert process.wait(DEADLINE_S) == 3


def test_no_last_work_is_expected_of_a_stopped_rank() -> None:
    with program(together_s=3600) as (process, pids):
        os.kill(pids[0], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGUSR1)
        assert process.wait(DEADLINE_S) == 3


def test_a_rank_that_is_killed_ends_all_and_is_told() -> None:
    with program() as (process, pids):
        os.kill(pids[1], signal.SIGKILL)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_ranks_die_with_their_program_stopped_or_not() -> None:
    with program() as (process, pids):
        os.kill(pids[0], signal.SIGSTOP)
        process.kill()
        process.wait(DEADLINE_S)


def test_a_killed_programs_folder_is_removed_by_the_next_one_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with program() as (killed, _):
        killed.kill()
        killed.wait(DEADLINE_S)
    (left,) = tmp_path.iterdir()
    with program() as (living, _), program(leaves="1") as (other, _):
        assert left not in set(tmp_path.iterdir())
        assert len(list(tmp_path.iterdir())) == 2
        for process in (living, other):
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([0, 0], 0),
        ([0, 3], 3),
        # A crash may be the echo of what another tells.
        ([1, 40], 40),
        ([1, 1], 1),
        ([3, 1], 3),
        ([-9], -9),
    ],
)
def test_the_status_is_the_first_that_says_more_than_a_crash(ends: list[int], status: int) -> None:
    assert ranks.status_of(ends) == status


def test_ranks_that_others_reach_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As torchrun starts them, on one machine or on several."""
    ranks.check_ranks(SecuritySection())
    torchrun = {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "::1", "MASTER_PORT": "7"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun.*neither token nor TLS.*learner\.ranks.*allow_insecure"):
        ranks.check_ranks(SecuritySection())
    ranks.check_ranks(SecuritySection(allow_insecure=True))
    ranks.become_ranks(4)  # is one already
    for name, value in ranks.environment_of(1, 2, tmp_path / "meeting").items():
        monkeypatch.setenv(name, value)
    ranks.check_ranks(SecuritySection())


def test_ranks_of_several_machines_are_refused_off_loopback_and_without_a_place_to_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A copy, which the ranks' variables may change.
    unset = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", ranks.MEETING)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in unset})
    os.environ["WORLD_SIZE"] = "4"
    with pytest.raises(ConfigError, match=r"rank of 4, and MASTER_ADDR and MASTER_PORT"):
        ranks.check_ranks(SecuritySection())
    node = ranks.Node(1, 2, "10.0.0.5:29500")
    os.environ.update(ranks.environment_on(node, 1, 4))
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["3", "1", "2"]
    with pytest.raises(ConfigError, match=r"refusing to meet other ranks at 10\.0\.0\.5"):
        ranks.check_ranks(SecuritySection())
    ranks.check_ranks(SecuritySection(allow_insecure=True))
    with pytest.raises(ConfigError, match=r"no network interface 'eth77'.*one of .*lo"):
        ranks.choose_interface("eth77")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    ranks.check_ranks(SecuritySection())
    ranks.choose_interface(None)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == ranks._INTERFACE


def test_a_node_is_numbered_by_the_command_line_or_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    two = DistributedSection(nodes=2, rendezvous="a:1")
    assert ranks.node_of(DistributedSection(), None) == ranks.Node()
    with pytest.raises(ConfigError, match="nothing says which node this is"):
        ranks.node_of(two, None)
    with pytest.raises(ConfigError, match="there is no node 2"):
        ranks.node_of(two, 2)
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert ranks.node_of(two, None) == ranks.Node(1, 2, "a:1")
    assert ranks.node_of(two, 0).number == 0


def test_ranks_are_executed_where_the_kernel_lets_none_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Executed(Exception):
        pass

    def execute(environments: object) -> None:
        raise Executed

    monkeypatch.setattr(ranks, "_load", lambda _: {})
    monkeypatch.setattr(ranks, "has_one_thread", lambda: True)
    monkeypatch.setattr(ranks, "can_fork_here", lambda: False)
    monkeypatch.setattr(ranks, "_execute", execute)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(Executed):
        ranks.become_ranks(2)


def test_collectives_stay_on_this_machine_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    [(name, interface)] = ranks.on_loopback().items()
    assert name == "NCCL_SOCKET_IFNAME"
    assert interface in {name for _, name in socket.if_nameindex()}
