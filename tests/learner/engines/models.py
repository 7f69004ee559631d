"""Tiny random models of the architectures under test, and random batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoConfig

from benchmarks.learner import tiny_models
from benchmarks.learner.tiny_models import VOCABULARY
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.registry import create_engine
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.testing.engine_cases import ARCHITECTURES as CONTRACT
from rollmesh.testing.engine_cases import SMALL, save_random

# One of every kind of attention that takes packed rows; the probe's tests look at all others.
ARCHITECTURES = ("qwen3", "llama", "gemma3_text", "gemma2", "gpt2", "qwen3_moe")


def make_model(folder: Path, architecture: str, seed: int = 0, **changes: object) -> Path:
    """Writes a random model of an architecture; `changes` of its settings."""
    settings = tiny_models.ARCHITECTURES[architecture].settings
    return save_random(AutoConfig.for_model(architecture, **settings | changes), folder, seed)


def one_layer_models(folder: Path, *names: str) -> dict[str, Path]:
    """Models of the contract's architectures, or of some of them; each of one layer."""
    return {
        name: save_random(AutoConfig.for_model(kind, **SMALL | {"num_hidden_layers": 1}, **settings), folder / name)
        for name, (kind, settings) in CONTRACT.items()
        if not names or name in names
    }


def make_spec(folder: Path, **changes: object) -> EngineSpec:
    """A float32 CPU engine with a large learning rate."""
    values: dict[str, object] = {
        "model": ModelSection(path=str(folder)),
        "optimizer": OptimizerSection(lr=1e-2, max_grad_norm=1e9),
        "total_steps": 10,
    }
    return EngineSpec(**(values | changes))


def make_engine(folder: Path, **changes: object):
    """A language model's engine from `make_spec`."""
    return create_engine(make_spec(folder, **changes))


def make_critic(folder: Path, **changes: object):
    """A value model's engine from `make_spec`."""
    return create_engine(make_spec(folder, **changes), model_type="value_model")


def make_frozen(folder: Path, **changes: object):
    """A language model that is not trained."""
    return create_engine(make_spec(folder, optimizer=None, **changes))


def make_sequences(
    seed: int, groups: int = 4, members: int = 3, longest: int = 12, gaps: bool = True
) -> list[TrainSequence]:
    """Groups of random sequences that share their prompts; responses of 1 .. longest tokens, some masked in between."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(groups):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 9)).astype(np.int32)
        for _ in range(members):
            count = int(rng.integers(1, longest + 1))
            mask = np.ones(count, dtype=np.uint8)
            if gaps and count > 3:
                mask[rng.integers(0, count, 2)] = 0
            sequences.append(
                TrainSequence(
                    prompt,
                    rng.integers(3, VOCABULARY, count).astype(np.int32),
                    mask,
                    rng.normal(-3.0, 0.5, count).astype(np.float32),
                    float(rng.normal()),
                    int(rng.integers(0, 4)),
                )
            )
    return sequences
