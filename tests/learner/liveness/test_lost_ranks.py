"""The rank that has left the others waiting: decided from what ranks say, and found among real ones."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.engines.rendezvous import open_board
from rollmesh.learner.engines.world import World
from rollmesh.learner.liveness import rank_watch
from rollmesh.learner.liveness.lost_ranks import SilenceTimer, all_explained, describe_cause, describe_silent
from rollmesh.learner.liveness.rank_watch import RankId, RankWatch, is_collective_failure
from rollmesh.mesh.config.learner import DistributedSection
from rollmesh.mesh.errors import RankLostError, StalledError
from rollmesh.mesh.runtime.rank_board import FileBoard, RankState
from rollmesh.mesh.runtime.ranks import Node, choose_interface, environment_of, environment_on
from rollmesh.testing.worlds import IMPORTED_ONCE

_DEADLINE_S = 240.0
_HERE = RankState("node7", 4711, phase="train")


def _silence_of(*seconds: float) -> SilenceTimer:
    silence = SilenceTimer(len(seconds))
    for now in range(10):
        states = {rank: dataclasses.replace(_HERE, beat=0 if s else now) for rank, s in enumerate(seconds)}
        silence.observe(float(now), states)
    return silence


def test_silence_is_counted_by_the_watchers_clock_and_not_while_it_slept() -> None:
    silence = SilenceTimer(1)
    for now, beat in [(0.0, 1), (4.0, 1), (1000.0, 1)]:
        silence.observe(now, {0: dataclasses.replace(_HERE, beat=beat)})
    assert silence.of(0) == 4.0 + 10.0
    assert "rank 0 (process 4711 on node7, train for 0 s) has not been heard for 14 s" in describe_silent(
        {0: _HERE}, silence, 13.0
    )
    silence.observe(1001.0, {0: dataclasses.replace(_HERE, beat=2)})
    assert describe_silent({0: _HERE}, silence, 1.0) == ""


def test_errors_of_a_ranks_own_come_before_silence_and_that_before_one_that_is_busy() -> None:
    waits = dataclasses.replace(_HERE, failed="RuntimeError: gloo", echo=True)
    own = dataclasses.replace(_HERE, failed="OutOfMemoryError: 3 GiB")
    silence = _silence_of(0, 1, 0, 0)
    ranks = {0: waits, 1: _HERE, 2: own, 3: _HERE}
    assert describe_cause(ranks, silence, 5.0, range(4)).endswith("train for 0 s) has failed: OutOfMemoryError: 3 GiB")
    assert not all_explained(ranks, silence, 5.0, 4)
    del ranks[2]
    assert describe_cause(ranks, silence, 5.0, range(4)).startswith("rank 1 (process 4711 on node7")
    del ranks[1]
    assert describe_cause(ranks, silence, 5.0, range(4)).startswith("rank 1, 2 has not been heard at all")
    assert "rank 3 (process 4711 on node7, train for 0 s) runs, and does not" in describe_cause(
        ranks, silence, 5.0, [0, 3]
    )
    assert describe_cause({0: waits}, silence, 5.0, [0]) == ""


def test_a_board_holds_what_fits_and_reads_no_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "board"
    with contextlib.closing(FileBoard(path)) as board:
        board.write(3, dataclasses.replace(_HERE, failed='"\\\0' * 1000))
        found = board.read(range(5))
        assert found.keys() == {3}
        assert len(found[3].failed) == 600
        assert path.stat().st_mode & 0o777 == 0o600
        os.truncate(path, path.stat().st_size - 8000)
        assert board.read(range(5)) == {}


def test_rank_0_ends_by_its_own_error_where_the_store_is_gone_too() -> None:
    class Board:
        def __init__(self) -> None:
            self.gone = False

        def write(self, _rank: int, _state: RankState) -> None:
            if self.gone:
                raise ConnectionResetError("Connection reset by peer")

        def read(self, _ranks: Sequence[int]) -> dict[int, RankState]:
            return {}

    board = Board()
    with pytest.raises(StalledError, match="nothing moved"), RankWatch(board, RankId(0, 2), silent_s=1.0):
        board.gone = True
        raise StalledError("nothing moved")


def _rank(rank: int, environment: Mapping[str, str], scene: str, pipe: Connection) -> None:
    os.environ.update(environment)
    choose_interface(None)
    rank_watch._BEAT_S, rank_watch._GONE_S, rank_watch._EXPLAIN_S = 0.1, 1.5, 4.0
    torch.set_num_threads(1)
    by_silence = scene == "stopped for long"
    limits = DistributedSection(timeout_s=60.0 if by_silence else 3.0)
    world = World("cpu", need_group=True, timeout_s=limits.timeout_s)
    channel = RankChannel(limits)

    def end(status: int) -> None:
        pipe.send((status, ""))
        os._exit(0)

    watch = RankWatch(open_board(world.timeout), RankId(rank, 2), silent_s=1.5 if by_silence else 60.0, end=end)
    try:
        with watch, watch.phase("train"):
            world.barrier()
            if rank == int(scene.endswith("rank 0")):
                ports = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
                pipe.send([tuple(port) for port in ports])
            if rank == int(not scene.endswith("rank 0")):
                # The other one has said where it listens.
                world.barrier()
                _leave(scene)
            world.barrier()
            match scene:
                case "stopped":
                    channel.send(b"order")
                case "killed amid a publication":
                    # In the background, while the main thread waits for groups or for the version.
                    ThreadPoolExecutor(1).submit(channel.gather, b"copied").result(_DEADLINE_S)
                case _:
                    world.barrier()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test sees it
        pipe.send((type(error).__name__, str(error)))
    os._exit(0)


def _leave(scene: str) -> None:
    match scene:
        case "killed" | "killed amid a publication" | "killed rank 0":
            os.kill(os.getpid(), signal.SIGKILL)
        case "failed":
            raise ValueError("no such token")
        case "hangs":
            threading.Event().wait(_DEADLINE_S)
        case _:
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("scene", "nodes", "error", "said"),
    [
        ("killed amid a publication", 1, "RankLostError", "has not been heard for"),
        # In the middle of an order, and amid a collective that would wait for longer.
        ("stopped", 1, "RankLostError", "has not been heard for"),
        ("stopped for long", 1, RankLostError.exit_code, ""),
        pytest.param(
            *("failed", 1, "RankLostError", "has failed: ValueError: no such token"), marks=pytest.mark.exhaustive
        ),
        ("hangs", 1, "RankLostError", "runs, and does not take part"),
        ("killed", 2, "RankLostError", "has not been heard for"),
        ("failed", 2, "RankLostError", "has failed: ValueError: no such token"),
        ("killed rank 0", 2, "RankLostError", "rank 0 is gone"),
    ],
)
def test_rank_0_names_the_rank_that_is_lost_within_the_time_out(
    tmp_path: Path, scene: str, nodes: int, error: str | int, said: str
) -> None:
    """Also where the ranks are on nodes of their own: two launches that meet at an address of loopback."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    ends = [context.Pipe() for _ in range(2)]
    with socket.socket() as held:
        held.bind(("127.0.0.7", 0))
        meeting = f"127.0.0.7:{held.getsockname()[1]}"
    if nodes == 1:
        environments = [environment_of(rank, 2, tmp_path / "meeting") for rank in range(2)]
    else:
        environments = [environment_on(Node(rank, 2, meeting), 0, 2) for rank in range(2)]
    ranks = [
        context.Process(target=_rank, args=(rank, environment, scene, ends[rank][1]), daemon=True)
        for rank, environment in enumerate(environments)
    ]
    survivor = int(scene.endswith("rank 0"))
    heard = ends[survivor][0]
    try:
        for rank in ranks:
            rank.start()
        assert heard.poll(_DEADLINE_S), "the ranks do not meet"
        listens = heard.recv()
        assert heard.poll(_DEADLINE_S), "the other rank waits on"
        kind, message = heard.recv()
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()
    assert kind == error
    assert said in message
    assert (f"rank 1 (process {ranks[1].pid} on " in message) == ("has" in said or "runs" in said)
    assert {host for host, _ in listens} <= {"127.0.0.1", "127.0.0.7"}
    assert (meeting in [f"{host}:{port}" for host, port in listens]) == (nodes == 2 and survivor == 0)


def test_others_end_as_rank_0_does_where_that_ends_by_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_watch, "_BEAT_S", 0.05)
    ended: Future[int] = Future()
    board = FileBoard(tmp_path / "board")
    with RankWatch(board, RankId(1, 2), silent_s=_DEADLINE_S, end=ended.set_result):
        leader = RankWatch(board, RankId(0, 2), silent_s=_DEADLINE_S)
        with pytest.raises(StalledError), leader, leader.phase("lead"):
            raise StalledError("nothing has moved")
        assert ended.result(_DEADLINE_S) == StalledError.exit_code


def test_an_error_within_a_phase_within_another_is_explained_once() -> None:
    watch = RankWatch(None, RankId(0, 1), silent_s=1.0)
    with pytest.raises(RankLostError, match="rank 7"), watch.phase("lead"), watch.phase("train"):
        raise RankLostError("rank 7")


def test_only_what_says_no_more_than_that_others_were_away_is_explained() -> None:
    assert is_collective_failure(RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"))
    # Where a rank never comes.
    assert is_collective_failure(dist.DistStoreError("wait timeout after 45000ms, keys: /0//cpu//0/1"))
    assert is_collective_failure(RuntimeError("Wait timeout"))
    assert not is_collective_failure(RuntimeError("shape '[3]' is invalid for input of size 2"))
    assert not is_collective_failure(ConnectionError("gloo"))
