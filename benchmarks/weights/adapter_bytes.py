"""Bytes of a push: all weights, and the adapter alone, next to the base that travels once.

    python -m benchmarks.weights.adapter_bytes --json bytes.json

The first model is that of the demonstration. Its pushes are real: the learner's engine exports it, and the publisher
announces it. A receiver in a process of its own fetches it over gRPC, and says how many bytes came. The other models
are counted by the sums of `rollmesh plan`, which have to agree with the pushes of the first to the byte. Half a minute
on a CPU, most of it the start of processes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from benchmarks.common import HelpFormatter, machine, table, write_json
from benchmarks.weights.push_ends import LearnerEnd
from examples.demo.model import write_model
from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.planning.architecture import build_on_meta, read_shape

_HOST = "127.0.0.1"
_DEMO_LORA = LoraSection(rank=8)


@dataclass(frozen=True, slots=True)
class PushBytes:
    """Bytes that reach one generator.

    Attributes:
        full: with each version, without an adapter, or with `push: full`.
        base: once, before the first adapter.
        adapter: with each version after it.
    """

    full: int
    base: int
    adapter: int

    @property
    def share(self) -> float:
        """The adapter's share of all weights."""
        return self.adapter / self.full


def planned(folder: Path, lora: LoraSection, dtype: torch.dtype) -> PushBytes:
    """By the sums of the planner.

    Args:
        folder: with the model's configuration.
        lora: adapter that is trained.
        dtype: of the weights that travel.
    """
    shape = read_shape(folder.name, build_on_meta(AutoConfig.from_pretrained(folder), lora))
    full = shape.merged * dtype.itemsize
    return PushBytes(full, full, shape.trained * dtype.itemsize)


def pushed(folder: Path, lora: LoraSection) -> PushBytes:
    """By real pushes, as the receiver reports them; float32."""
    with ExitStack() as stack:
        engine = stack.enter_context(_engine(folder, lora))
        bridge = AsyncBridge()
        stack.callback(bridge.close)
        whole, alone = LearnerEnd(bridge, _HOST, "full"), LearnerEnd(bridge, _HOST, "full", lora.scale)
        for end in (whole, alone):
            stack.callback(end.close)
        alone.publish_base(engine.export_weights(part="base"), torch.float32)
        for end in (whole, alone):
            stack.enter_context(end.receiver(lambda *command: command))
        full = whole.push(engine.export_weights(), torch.float32).report.bytes
        first = alone.push(engine.export_weights(part="adapter"), torch.float32).report.bytes
        # Weights that have not changed would not travel.
        changed = ((name, tensor + 1) for name, tensor in engine.export_weights(part="adapter"))
        adapter = alone.push(changed, torch.float32).report.bytes
        return PushBytes(full, first - adapter, adapter)


@contextmanager
def _engine(folder: Path, lora: LoraSection) -> Iterator[Engine]:
    model = ModelSection(path=str(folder), dtype="float32")
    engine = create_engine(EngineSpec(model, OptimizerSection(), total_steps=1, lora=lora))
    try:
        yield engine
    finally:
        engine.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--models",
        type=Path,
        nargs="*",
        default=[Path("tests/rollmesh/planning/architectures/qwen2.5-7b")],
        help="folders with configurations, counted in bfloat16",
    )
    parser.add_argument("--rank", type=int, default=16, help="of the adapters of these, on all linear layers")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        demo = Path(scratch, "demo")
        write_model(demo, seed=0)
        real = pushed(demo, _DEMO_LORA)
        counted = planned(demo, _DEMO_LORA, torch.float32)
    if real != counted:
        raise RuntimeError(f"{real} came, and the planner says {counted}")
    cells = [("demonstration", "float32", _DEMO_LORA.rank, real)]
    lora = LoraSection(rank=args.rank)
    cells += [(path.name, "bfloat16", args.rank, planned(path, lora, torch.bfloat16)) for path in args.models]
    header = ("model", "dtype", "rank", "all weights", "base, once", "adapter", "share")
    print(
        table(header, [(*cell, found.full, found.base, found.adapter, f"{found.share:.2%}") for *cell, found in cells])
    )
    if args.json:
        named = [{"model": model, "dtype": kind, "rank": rank, **asdict(found)} for model, kind, rank, found in cells]
        write_json(args.json, {"machine": machine(), "settings": vars(args), "cells": named})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
