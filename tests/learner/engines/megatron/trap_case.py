"""The processes' work in `test_traps`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.weight_export import WeightExport
from rollmesh.learner.weights import PublishRules, WeightPublisher
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import DistributedSection, OptimizerSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import bucket_starts
from rollmesh.mesh.weights.delta import apply_bucket, spans_of
from rollmesh.mesh.weights.tensors import named_tensors
from rollmesh.protos import weights_pb2
from rollmesh.testing.contract_inference import infer
from rollmesh.testing.contract_state import Weights
from rollmesh.testing.engine_cases import gradient_of_step, make_sequences, make_spec, plain_step_spec, train, weights
from rollmesh.testing.worlds import Harness

_BUCKET_BYTES = 9000
_DEADLINE_S = 240.0


def gradient(harness: Harness, model: Path, sequences: Sequence[TrainSequence]) -> Weights:
    """The gradient of a step."""
    engine = harness.make(plain_step_spec(model))
    before = weights(engine)
    train(engine, sequences)
    return gradient_of_step(before, weights(engine))


def export(harness: Harness, model: Path, folder: Path) -> Tensor:
    """Exports a model after a step; gives its log-probs."""
    engine = harness.make(make_spec(model))
    train(engine, make_sequences(1))
    engine.export_hf(folder)
    return infer(engine, make_sequences(2))["log_probs"]


def publish_delta(harness: Harness, model: Path, folder: Path) -> tuple[Weights, Weights] | None:
    """Publishes two versions of a model, and the delta between them.

    Gives the second one as a receiver makes it of the first one, and the model's own tensors; in the leading process.
    """
    # A step changes few bits.
    optimizer = OptimizerSection(lr=1e-4, eps=1e-2)
    section = ModelSection(path=str(model), dtype="bfloat16")
    engine = harness.make(make_spec(model, model=section, optimizer=optimizer))
    export = WeightExport(engine, RankChannel(DistributedSection()), _BUCKET_BYTES)
    rules = PublishRules(transport="grpc", encoding="delta", bucket_bytes=_BUCKET_BYTES)
    publisher = WeightPublisher("run", {}, rules, directory=folder) if engine.layout.leads else None
    told = threading.Semaphore(0)
    if publisher is not None:
        publisher.subscribe(told.release)
    for version in range(2):
        train(engine, make_sequences(version))
        manifest = export.export(publisher, PolicyVersion(1, version)).result(_DEADLINE_S)
    own = {name: tensor.clone() for name, tensor in engine.export_weights()}
    export.close()
    if publisher is None or manifest is None:
        return None
    # Two versions, and the link between them.
    for _ in range(3):
        assert told.acquire(timeout=_DEADLINE_S)
    found = _received(publisher, manifest)
    publisher.close()
    return found, own


def refuse(harness: Harness, model: Path) -> str:
    """The error of this process where the last one alone finds its part of the files broken."""
    from rollmesh.learner.engines.megatron import engine as megatron_engine

    broken: Any = contextlib.nullcontext()
    if dist.get_rank() == dist.get_world_size() - 1:
        broken = patch.object(megatron_engine, "load_weights", side_effect=DataError("row 3 is broken"))
    with broken, pytest.raises(DataError) as refused:
        harness.make(make_spec(model))
    return refused.value.message


def _received(publisher: WeightPublisher, manifest: weights_pb2.Manifest) -> Weights:
    first, second = PolicyVersion(1, 0), PolicyVersion(1, 1)
    held = bytearray(publisher.version(first).data.view())
    spans = spans_of(manifest.tensors, len(manifest.buckets))
    for index, (start, of_bucket) in enumerate(zip(bucket_starts(manifest.buckets), spans, strict=False)):
        delta = publisher.bucket(second, index, first)
        apply_bucket(delta, memoryview(held)[start : start + manifest.buckets[index].nbytes], of_bucket)
    return {name: tensor.clone() for name, tensor in named_tensors(manifest, held)}
