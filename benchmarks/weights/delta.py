"""Deltas instead of all bytes: how many they are, what making and applying them costs, and when they arrive.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python -m benchmarks.weights.delta --json delta.json

It makes network namespaces, for which it has to be root.

A decoder (Qwen3 architecture) is trained with AdamW in float32 and travels in bfloat16. It begins as a bfloat16
checkpoint would, with every weight on the grid (`first step`). After some steps the float32 weights lie between the
grid's points (`steady`), as in a run that continues for a while. Both contenders push the same versions to a receiver
on a link of a given rate (network namespace, token bucket): all bytes, and deltas. Times are those of the receiver's
reports: announcement to service, with the engine's copy of the weights in both.

Encode and apply are one thread, in MB of full weights per second; what comes out is compared with what went in.
"""

from __future__ import annotations

import argparse
import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.common import machine, summarize, table, write_json, yardstick
from benchmarks.netns import FarHost, far_host
from benchmarks.weights.push_ends import LearnerEnd, Push
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, keep_freed_memory
from rollmesh.mesh.weights.delta import apply_bucket, encode_bucket, spans_of

_WIRE = torch.bfloat16
_WARM_UP_STEPS = 20
_TOKENS = (8, 16)


class Training:
    """A small decoder under AdamW; weights begin on the grid of the wire's dtype."""

    def __init__(self, lr: float, *, hidden: int, layers: int) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=16_384,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=hidden // 8,
            tie_word_embeddings=True,
        )
        self.model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(_WIRE))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        ranks = torch.arange(1, config.vocab_size + 1, dtype=torch.float64)
        self._words = (1 / ranks) / (1 / ranks).sum()

    def step(self) -> None:
        """One optimizer step on next-token prediction of words drawn by Zipf's law."""
        tokens = torch.multinomial(self._words, _TOKENS[0] * _TOKENS[1], replacement=True).view(_TOKENS)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def codec(old: PublishedVersion, new: PublishedVersion) -> dict[str, float]:
    """Encodes and applies one delta, alone; checks what comes out."""
    spans = spans_of(new.manifest.tensors, len(new.manifest.buckets))
    full = sum(bucket.nbytes for bucket in new.manifest.buckets)
    began = time.perf_counter()
    encoded = [encode_bucket(old.bucket(i), new.bucket(i), spans[i]) for i in range(len(spans))]
    encode_s = time.perf_counter() - began
    targets = [bytearray(old.bucket(i)) for i in range(len(spans))]
    began = time.perf_counter()
    for data, target, of_bucket in zip(encoded, targets, spans, strict=True):
        apply_bucket(data, memoryview(target), of_bucket)
    apply_s = time.perf_counter() - began
    changed = 0
    for index, target in enumerate(targets):
        if target != new.bucket(index):
            raise RuntimeError(f"bucket {index} did not come out as it went in")
        before, after = (np.frombuffer(version.bucket(index), np.uint16) for version in (old, new))
        changed += int(np.count_nonzero(before != after))
    return {
        "changed": changed / (full / 2),
        "share": sum(map(len, encoded)) / full,
        "encode_mb_s": full / 1e6 / encode_s,
        "apply_mb_s": full / 1e6 / apply_s,
    }


def measure(lr: float, host: FarHost, bridge: AsyncBridge, arguments: argparse.Namespace) -> dict[str, Any]:
    """All of one learning rate."""
    training = Training(lr, hidden=arguments.hidden, layers=arguments.layers)
    rows: dict[str, list[dict[str, float]]] = {"first step": [], "steady": []}
    moods = []
    with ExitStack() as stack:
        full, delta = (LearnerEnd(bridge, host.near, name) for name in ("full", "delta"))
        for end in (full, delta):
            stack.callback(end.close)
            stack.enter_context(end.receiver(host.command))

        def push() -> dict[str, float]:
            pushes = {end: end.push(training.model.state_dict().items(), _WIRE) for end in (full, delta)}
            return _times(pushes[full], pushes[delta])

        def step(kind: str) -> None:
            old = delta.newest
            training.step()
            found = push()
            rows[kind].append({**codec(old, delta.newest), **found})

        push()
        step("first step")
        for _ in range(_WARM_UP_STEPS):
            training.step()
        push()
        for _ in range(arguments.steps):
            moods.append(yardstick(0.1))
            step("steady")
        nbytes = sum(bucket.nbytes for bucket in delta.newest.manifest.buckets)
    return {
        "lr": lr,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "full_bytes": nbytes,
        "rows": {kind: {key: summarize(row[key] for row in found) for key in found[0]} for kind, found in rows.items()},
        "runs": rows,
        "yardsticks": moods,
    }


def _times(full: Push, delta: Push) -> dict[str, float]:
    return {
        "by_delta": float(delta.report.encoding == "delta"),
        "moved_share": delta.report.bytes / full.report.bytes,
        "publish_full_s": full.publish_s,
        "publish_delta_s": delta.publish_s,
        "full_s": full.service_s,
        "delta_s": delta.service_s,
        "full_received_s": full.received_s,
        "delta_received_s": delta.received_s,
        "times_faster": full.service_s / delta.service_s,
        "kept_bytes": float(delta.report.kept_bytes),
    }


@contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    """Holds a lock that others who measure on this machine hold as well."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _show(results: list[dict[str, Any]], gbit_s: float) -> str:
    header = ["learning rate", "", "elements changed", "bytes / full", "encode MB/s", "apply MB/s"]
    header += [f"full at {gbit_s:g} Gbit/s, s", "delta, s", "times faster"]
    rows = []
    for result in results:
        for kind, row in result["rows"].items():
            shares = [f"{100 * row[key].median:.2f} %" for key in ("changed", "share")]
            rates = [f"{row[key].median:.0f}" for key in ("encode_mb_s", "apply_mb_s")]
            spans = [f"{row[key].median:.3f}" for key in ("full_s", "delta_s")]
            rows.append([f"{result['lr']:g}", kind, *shares, *rates, *spans, str(row["times_faster"])])
    return table(header, rows)


def _circumstances(document: dict[str, Any]) -> str:
    """Circumstances by which a reader can judge the run."""
    lines = [f"commit {document['machine']['commit']}, {document['machine']['started_utc']}"]
    for result in document["results"]:
        rates = summarize(mood["matmul_gflops"] for mood in result["yardsticks"])
        load = summarize(mood["load_1min"] for mood in result["yardsticks"])
        pushes = [row for rows in result["runs"].values() for row in rows]
        by_delta = sum(row["by_delta"] for row in pushes)
        lines.append(
            f"{result['lr']:g}: yardstick {rates} GFLOP/s, load {load}; {by_delta:.0f} of {len(pushes)} pushes by "
            f"delta; times faster, one by one: {', '.join(format(row['times_faster'], '.1f') for row in pushes)}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and prints the table, and the load of the machine meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each learning rate")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--gbit-s", type=float, default=1.0, help="rate of the link")
    parser.add_argument("--lock", type=Path, help="file to lock during each learning rate, where others measure too")
    arguments = parser.parse_args()
    document: dict[str, Any] = {"machine": machine(), "gbit_s": arguments.gbit_s, "results": []}
    keep_freed_memory(TENSOR_BYTES)  # as the services do
    bridge = AsyncBridge("benchmark")
    try:
        with far_host(arguments.gbit_s * 1e9) as host:
            for lr in arguments.lr:
                with _alone(arguments.lock):
                    document["results"].append(measure(lr, host, bridge, arguments))
                if arguments.json:
                    write_json(arguments.json, document)
    finally:
        bridge.close()
    print(_show(document["results"], arguments.gbit_s))
    print(_circumstances(document))


if __name__ == "__main__":
    main()
