"""A service as the launcher sees one: a process with a ready file and a health answer. Behaviour by arguments.

`python fake_service.py READY_FILE [--exit STATUS] [--log LINE] [--die-after-ready STATUS] [--die-unasked STATUS]
                       [--die-asked STATUS] [--asked STATUS] [--complete-on FILE] [--child PIDFILE] [--own-session]
                       [--ignore-term] [--drained FILE NAME] [--spin THREADS] [--writes FILE] [--reason TEXT]
                       [--answers-first READY_FILE --loads FILE]`

SIGUSR1: holds its interpreter and computes. SIGUSR2: holds its interpreter and sleeps.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.protos import learner_pb2, learner_pb2_grpc


def hold_and_compute(*_: object) -> None:
    """One call into C that takes hours and lets no one else run."""
    _ = 3 ** (10**10)


def hold_and_sleep(*_: object) -> None:
    ctypes.PyDLL(None).sleep(3600)


def spin() -> None:
    while True:
        pass


class Telling(health.HealthServicer):
    """Tells when its first answer has been sent."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = threading.Event()

    def Check(self, request: object, context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
        context.add_callback(self.answered.set)
        return super().Check(request, context)


class Dying(Telling):
    """Ends the process instead of answering."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self._status = status

    def Check(self, _request: object, _context: object) -> health_pb2.HealthCheckResponse:
        os._exit(self._status)


class Writing(learner_pb2_grpc.LearnerControlServicer):
    """A learner that writes its checkpoint until a file is there."""

    def __init__(self, until: Path, reason: str) -> None:
        self._until = until
        self._reason = reason

    def Status(self, _request: object, _context: object) -> learner_pb2.LearnerStatusResponse:
        if self._until.exists():
            return learner_pb2.LearnerStatusResponse(phase="ending")
        return learner_pb2.LearnerStatusResponse(phase="checkpointing", reason=self._reason)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ready", type=Path)
    parser.add_argument("--exit", type=int, help="end with this status before being ready")
    parser.add_argument("--log", help="line to write to stderr first")
    parser.add_argument("--die-after-ready", type=int, help="end with this status once it has answered")
    parser.add_argument("--die-unasked", type=int, help="end with this status once ready, before any answer")
    parser.add_argument("--die-asked", type=int, help="end with this status when asked for the first time")
    parser.add_argument("--die-times", type=int, default=10**6, help="with --die-after-ready: only so many times")
    parser.add_argument("--counter", type=Path, help="file that counts the starts")
    parser.add_argument("--child", type=Path, help="start a child and write its process id here")
    parser.add_argument("--own-session", action="store_true", help="the child ends by SIGTERM when this process dies")
    parser.add_argument("--spin", type=int, default=0, help="threads that compute all the time, once ready")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--asked", type=int, default=0, help="end with this status after SIGTERM")
    parser.add_argument("--drained", type=Path, help="append the name to this file on SIGTERM")
    parser.add_argument("--writes", type=Path, help="write a checkpoint until this file is there, whoever asks")
    parser.add_argument("--answers-first", type=Path, help="the ready file of the time before it has loaded")
    parser.add_argument("--loads", type=Path, help="with it: is ready once this file is there")
    parser.add_argument("--reason", default="", help="with --writes: what it waits for")
    parser.add_argument("--name", default="fake")
    options = parser.parse_args()

    if options.log:
        print(options.log, file=sys.stderr, flush=True)
    starts = 1
    if options.counter:
        starts = (int(options.counter.read_text()) if options.counter.exists() else 0) + 1
        options.counter.write_text(str(starts))
    if options.exit is not None:
        return options.exit
    # An event could be set by the handler during its own wait, and block forever.
    over: list[bool] = []

    def on_term(*_args: object) -> None:
        if options.drained:
            with options.drained.open("a") as file:
                file.write(f"{options.name}\n")
        if not options.ignore_term:
            over.append(True)

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGUSR1, hold_and_compute)
    signal.signal(signal.SIGUSR2, hold_and_sleep)
    if options.child:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        if options.own_session:
            command = die_with_parent(command, signal.SIGTERM)
        child = subprocess.Popen(command, start_new_session=options.own_session)
        options.child.write_text(str(child.pid))
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = Telling() if options.die_asked is None else Dying(options.die_asked)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if options.writes:
        learner_pb2_grpc.add_LearnerControlServicer_to_server(Writing(options.writes, options.reason), server)
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    if options.die_unasked is None:
        server.start()
    for ready in filter(None, (options.answers_first, options.ready)):
        while ready == options.ready and options.loads and not options.loads.exists():
            time.sleep(0.05)
        scratch = ready.with_suffix(".tmp")
        scratch.write_text(json.dumps({"address": f"127.0.0.1:{port}", "pid": os.getpid()}))
        scratch.replace(ready)
    if options.die_unasked is not None:
        return options.die_unasked
    for _ in range(options.spin):
        threading.Thread(target=spin, daemon=True).start()
    if options.die_after_ready is not None and starts <= options.die_times:
        # Seen to be up, and no more.
        servicer.answered.wait()
        return options.die_after_ready
    # Python's handlers run in the main thread; a signal that the kernel gives to another thread does not wake it.
    while not over:
        time.sleep(0.02)
    while options.writes and not options.writes.exists():
        time.sleep(0.02)
    server.stop(None)
    return options.asked


if __name__ == "__main__":
    sys.exit(main())
