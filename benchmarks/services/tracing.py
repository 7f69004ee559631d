"""The cost of traces to the services that report them, in microseconds.

    python -m benchmarks.services.tracing --json tracing.json

Off: the calls of one trajectory where there is no collector. On: the ten spans of one trajectory, as all services
together report them. `report` is the time of the thread that works. `processor` adds the thread that encodes and sends
them. They go over gRPC to a collector in a process of its own, which throws them away.
Sampled: the same where one trajectory in a hundred is kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.common import HelpFormatter, machine, table, write_json, yardstick
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.telemetry import TelemetrySection
from rollmesh.mesh.telemetry.span import Event
from rollmesh.mesh.telemetry.tracing import Tracer, no_traces, open_tracer

_REPEATS = 5
_TRAJECTORIES = 2000
# Longest time for what waits.
_SEND_S = 60.0
# Names of a trajectory's spans, and the number of attributes of each.
_SPANS = {
    "admit": 5,
    "generate": 7,
    "reward": 2,
    "write": 1,
    "store": 3,
    "queue": 2,
    "claim": 2,
    "train": 2,
    "commit": 3,
    "trajectory": 9,
}


class _Sink(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ARG002 - the contract's signature
        return trace_service_pb2.ExportTraceServiceResponse()


def _collect(ready: Connection) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Sink(), server)
    ready.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def _trajectory(tracer: Tracer, number: int, now_ns: int) -> None:
    """Reports what all services report of one trajectory."""
    group = f"train-{number}"
    for name, count in _SPANS.items():
        trace = tracer.trajectory(group, 3)
        if trace is None:
            continue
        events = [Event("weights", now_ns, {"version": "1:7", "tokens": 500})] if name == "generate" else ()
        attributes = {f"attribute_{index}": "1:7" if index % 2 else index for index in range(count)}
        trace.record(name, now_ns, now_ns + 1000, attributes, number=1, events=events)


def _measure(tracer: Tracer) -> tuple[float, float]:
    """Microseconds per trajectory: of the reporting thread, and of the whole process until all is sent."""
    now_ns = time.time_ns()
    processor, thread = time.process_time(), time.thread_time()
    for number in range(_TRAJECTORIES):
        _trajectory(tracer, number, now_ns)
    reported = time.thread_time() - thread
    tracer.close(_SEND_S)
    return reported / _TRAJECTORIES * 1e6, (time.process_time() - processor) / _TRAJECTORIES * 1e6


def _opened(url: str, share: float) -> Tracer:
    section = TelemetrySection(otlp=url, sample=share, queue=_TRAJECTORIES * len(_SPANS) + 1)
    return open_tracer(section, SecuritySection(), run="benchmark", service="generator", instance="one")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    collector = context.Process(target=_collect, args=(theirs,), daemon=True)
    collector.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    _measure(_opened(url, 1.0))
    found = {}
    for name, opened in (
        ("off", no_traces),
        ("sample 0.01", lambda: _opened(url, 0.01)),
        ("sample 1", lambda: _opened(url, 1.0)),
    ):
        runs = [_measure(opened()) for _ in range(_REPEATS)]
        report, processor = (statistics.median(values) for values in zip(*runs, strict=True))
        found[name] = {"report_us": report, "processor_us": processor, "processor_per_span_us": processor / len(_SPANS)}
    collector.terminate()
    print(
        table(
            ["traces", "report, us", "processor, us", "per span, us"],
            [[name, *(f"{value:.1f}" for value in values.values())] for name, values in found.items()],
        )
    )
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "yardstick": yardstick(), "traces": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
