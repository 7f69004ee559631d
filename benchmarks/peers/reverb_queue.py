"""Reverb under the same load: a FIFO table whose items are sampled once; server, writers, reader as processes.

Runs in an environment of its own: `pip install dm-reverb==0.14.0 tensorflow-cpu==2.15.1 "numpy<2" "setuptools<81"`
(Python 3.11), with this repository on PYTHONPATH for the trajectories. It is used the way that was fastest. One
trajectory is one step whose columns are the arrays, a writer has 16 unacknowledged items. The reader lets tf.data batch
32 items in C++ (one at a time when paced, for the least latency).

Reads one JSON plan per line ({"tokens", "writers", "seconds", "warmup", "rate"}), answers one JSON result per line.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np

from benchmarks.buffer.arrays import DISTINCT, make_arrays

TABLE = "queue"
CAPACITY = 512
MAX_WRITERS = 4
_IN_FLIGHT = 16
_READ_BATCH = 32
_COLUMNS = ("ids", "log_probs", "mask", "versions", "reward", "stamp")


def server(conn: Any, port: int) -> None:
    """The replay server."""
    import reverb  # type: ignore[import-not-found]

    table = reverb.Table(
        name=TABLE,
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=CAPACITY,
        max_times_sampled=1,
        rate_limiter=reverb.rate_limiters.Queue(CAPACITY),
    )
    running = reverb.Server([table], port=port)
    conn.send("up")
    conn.recv()
    running.stop()


def writer(conn: Any, port: int) -> None:
    """Inserts until the plan's end; answers (items, the moment of the last)."""
    import reverb

    client = reverb.Client(f"127.0.0.1:{port}")
    conn.send("up")
    while (plan := conn.recv()) is not None:
        items = [make_arrays(plan["tokens"], seed) for seed in range(DISTINCT)]
        pause = plan["writers"] / plan["rate"] if plan["rate"] else 0.0
        count = 0
        with client.trajectory_writer(num_keep_alive_refs=1) as stream:
            time.sleep(max(0.0, plan["start"] - time.time()))
            due = plan["start"]
            while time.time() < plan["end"]:
                if pause:
                    due += pause
                    time.sleep(max(0.0, due - time.time()))
                stream.append(dict(items[count % DISTINCT], stamp=np.float64(time.time())))
                stream.create_item(TABLE, 1.0, {name: stream.history[name][-1:] for name in _COLUMNS})
                stream.flush(block_until_num_items=0 if pause else _IN_FLIGHT)
                count += 1
            stream.flush()
        conn.send((count, time.time()))


def reader(conn: Any, port: int) -> None:
    """Samples until nothing comes for a while; answers arrival times and latencies."""
    import reverb
    import tensorflow as tf  # type: ignore[import-untyped]

    tf.config.threading.set_inter_op_parallelism_threads(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    types = dict(zip(_COLUMNS, (tf.int32, tf.float32, tf.uint8, tf.int32, tf.float32, tf.float64), strict=True))
    conn.send("up")
    while (plan := conn.recv()) is not None:
        tokens, paced = plan["tokens"], bool(plan["rate"])
        shapes = {name: tf.TensorShape([None] if name in ("reward", "stamp") else [None, tokens]) for name in _COLUMNS}
        dataset = reverb.TrajectoryDataset(
            f"127.0.0.1:{port}",
            TABLE,
            types,
            shapes,
            max_in_flight_samples_per_worker=1 if paced else 64,
            num_workers_per_iterator=1,
            rate_limiter_timeout_ms=int(1500 + 1000 * max(0.0, plan["start"] - time.time())),
        )
        arrivals: list[float] = []
        latencies: list[float] = []
        source = dataset if paced else dataset.batch(_READ_BATCH)
        total = 0
        for sample in source.as_numpy_iterator():
            now = time.time()
            stamps = sample.data["stamp"].reshape(-1)
            assert sample.data["ids"].shape[-1] == tokens
            total += len(stamps)
            if paced or len(stamps) == _READ_BATCH:  # a partial batch waited for the time-out: not timed
                arrivals += [now] * len(stamps)
                latencies += (now - stamps).tolist()
        conn.send((total, arrivals, latencies))


def cpu_seconds(pids: list[int]) -> float:
    """User and system time that processes have used so far."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            fields = stat.read().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def run(plan: dict[str, Any], writers: list[Any], read: Any, pids: dict[str, list[int]]) -> dict[str, Any]:
    """One cell."""
    start = time.time() + 0.5
    plan = {**plan, "start": start, "end": start + plan["warmup"] + plan["seconds"]}
    read.send(plan)
    for conn in writers[: plan["writers"]]:
        conn.send(plan)
    low, high = start + plan["warmup"], plan["end"]
    used = []
    for moment in (low, high):
        time.sleep(max(0.0, moment - time.time()))
        used.append({role: cpu_seconds(found) for role, found in pids.items()})
    inserted = [conn.recv() for conn in writers[: plan["writers"]]]
    sampled, arrivals, latencies = read.recv()
    if sampled != sum(count for count, _ in inserted):
        raise RuntimeError(f"{sampled} sampled of {inserted} inserted")
    latencies.sort()
    count = sum(low <= at < high for at in arrivals)
    return {
        "items_s": count / (high - low),
        "cpu_us": {role: (used[1][role] - used[0][role]) / max(1, count) * 1e6 for role in pids},
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
        "latencies_ms": [value * 1e3 for value in latencies] if plan["rate"] else [],
    }


def main() -> int:
    """Serves plans from standard input."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []

    def start(target: Any) -> Any:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, port), daemon=True)
        process.start()
        processes.append(process)
        assert ours.recv() == "up"
        return ours

    serving = start(server)
    writers = [start(writer) for _ in range(MAX_WRITERS)]
    read = start(reader)
    ids = [process.pid or 0 for process in processes]
    pids = {"server": ids[:1], "writers": ids[1:-1], "reader": ids[-1:]}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), writers, read, pids)), flush=True)
    for conn in [*writers, read, serving]:
        conn.send(None)
    for process in processes:
        process.join(10)
    return 0


if __name__ == "__main__":
    sys.exit(main())
