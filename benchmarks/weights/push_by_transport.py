"""From the announcement to the last generator that has verified everything, by transport and number of generators.

    python -m benchmarks.weights.push_by_transport --json ways.json

Learner and generators are processes of one machine, with the mesh's own publisher, service and transports; generators
have no engine. Without `--mbit` nothing limits them but the machine, whose cores they share: the more generators, the
less is left for each. With it every process is a host of its own on a switch (network namespaces, as root). Its link
has that many megabits each way. There is no shared memory and no shared disk. `disk` is written below a temporary
folder, fsync included, before the announcement; that time has a column of its own. The group of gloo is formed before
the first measured push, as in a run that continues. Cells of one number of generators alternate.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import machine, summarize, table, write_json, yardstick
from benchmarks.netns import StarHost, star
from benchmarks.weights.node_process import Host

_HEADER = ("generators", "way", "publish s", "completion s", "GB/s and generator")


class Ends:
    """A learner and its generators, all with one transport."""

    def __init__(
        self, stack: ExitStack, way: str, count: int, hosts: list[StarHost], args: argparse.Namespace, folder: str
    ) -> None:
        def start(role: str, number: int, *options: str) -> Host:
            host = hosts[number] if hosts else None
            own = ["--bind", host.address if host else "127.0.0.1", "--transport", way, "--dir", folder, *options]
            return stack.enter_context(Host(role, own, host.command() if host else ()))

        self._way = way
        self._learner = start("learner", 0, "--mib", str(args.mib), "--bucket-mib", str(args.bucket_mib))
        self._generators = [
            start("generator", number, "--learner", self._learner.address, "--name", f"g{number}")
            for number in range(1, count + 1)
        ]

    def push(self) -> dict[str, float]:
        """One version to all."""
        began = time.perf_counter()
        manifest = self._learner.ask({})["manifest"]
        announced = time.perf_counter()
        for generator in self._generators:
            generator.send({"manifest": manifest, "relay": self._way == "grpc", "verify": True})
        answers = [generator.receive() for generator in self._generators]
        seconds = time.perf_counter() - announced
        return {
            "publish_s": announced - began,
            "seconds": seconds,
            "gb_s": answers[0]["nbytes"] / seconds / 1e9,
        }


def measure(count: int, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """All ways with one number of generators."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.dir))
        hosts = stack.enter_context(star(args.mbit * 1e6, count + 1)) if args.mbit else []
        ends = {way: Ends(stack, way, count, hosts, args, folder) for way in args.ways}
        for end in ends.values():
            end.push()
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        for repetition in range(args.repetitions):
            for way in random.Random(repetition).sample(args.ways, len(args.ways)):
                runs[way].append(ends[way].push())
    return runs


def main(argv: list[str] | None = None) -> int:
    """Prints the table and writes every repetition to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ways", nargs="+", default=["shm", "grpc", "gloo", "disk"])
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--mbit", type=float, help="of each host's link; none: no limit")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where the folder of `disk` is made")
    args = parser.parse_args(argv)
    rows: list[tuple[Any, ...]] = []
    cells, moods = [], []
    for count in args.counts:
        moods.append(yardstick())
        for way, runs in measure(count, args).items():
            found = {key: summarize(run[key] for run in runs) for key in ("publish_s", "seconds", "gb_s")}
            rows.append((count, way, found["publish_s"], found["seconds"], found["gb_s"]))
            cells.append({"generators": count, "way": way, "runs": runs, **found})
    print(table(_HEADER, rows))
    if args.json:
        write_json(args.json, {"machine": machine(), "settings": vars(args), "yardsticks": moods, "cells": cells})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
