"""All that is loaded before a service does anything: heavy packages by name, and what they start.

The server of forked commands loads it step by step, so that each is held to what it adds. Every start pays for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rollmesh.launcher.preloaded import PRELOADED_MODULES
from tests import fork_server

# Packages and modules that are heavy by themselves; others are so with this many modules.
HEAVY = (
    "PIL",
    "datasets",
    "matplotlib",
    "megatron",
    "mlflow",
    "pandas",
    "pyarrow",
    "sglang",
    "tensorboard",
    "torchvision",
    "trackio",
    "transformers.generation.continuous_batching",
    "triton",
    "vllm",
    "wandb",
)
MANY = 30
# For each step of the server, the heavy ones that it adds.
ADDED: tuple[set[str], ...] = (
    {"aiohttp", "cryptography", "google", "numpy", "pydantic", "rich"},
    set(),
    {"opentelemetry", "redis"},
    {"torch"},
    # Transformers itself brings the others.
    {
        "PIL",
        "accelerate",
        "botocore",
        "huggingface_hub",
        "mpmath",
        "sympy",
        "transformers",
        "transformers.generation.continuous_batching",
    },
    set(),
)


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """The account of a process forked from the server."""
    account: dict[str, Any] = json.loads(fork_server.run([], module="tests.devices_unwatched").stdout)
    return account


def _heavy(loaded: Sequence[str]) -> set[str]:
    counts = Counter(name.partition(".")[0] for name in loaded)
    many = {name for name, count in counts.items() if count >= MANY and name not in sys.stdlib_module_names}
    return (many | set(HEAVY) & set(loaded)) - {"rollmesh"}


def test_a_start_loads_what_is_heavy_by_name_alone(said: dict[str, Any]) -> None:
    loaded = said["loaded"]
    ends = [max(map(loaded.index, step)) + 1 for step in fork_server.STEPS]
    found = [_heavy(loaded[:end]) for end in ends]
    assert tuple(now - before for before, now in pairwise([set(), *found])) == ADDED


def test_every_shared_module_is_in_a_step() -> None:
    names = [name for step in fork_server.STEPS for name in step]
    assert sorted(PRELOADED_MODULES) == sorted(name for name in names if name in PRELOADED_MODULES)


def test_what_is_shared_starts_no_thread_and_calls_no_device(said: dict[str, Any]) -> None:
    assert said | {"loaded": []} == {"loaded": [], "called": [], "poisoned": False}
    process = Path("/proc", str(fork_server.server().pid))
    # A core of gRPC or a pool of OpenMP would have threads.
    assert len(list((process / "task").iterdir())) == 1
    opened = sorted(os.readlink(file).partition(":")[0] for file in (process / "fd").iterdir())
    assert opened == [os.devnull] * 3 + ["socket"], "that of its orders"
