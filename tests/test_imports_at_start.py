"""All that is loaded before a service does anything, in one interpreter: heavy packages by name, and what they start.

The steps follow one another, so that each is held to what it adds. Every start pays for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from rollmesh.launcher.preloaded import PRELOADED_MODULES
from rollmesh.mesh.runtime.threads import thread_environment
from tests import fork_server
from tests.repository import REPOSITORY

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
# Modules -> the heavy ones that they add.
STEPS = {
    ("rollmesh.cli.app", *(name for name in PRELOADED_MODULES if ".launcher." in name or ".cli." in name)): {
        "aiohttp",
        "cryptography",
        "google",
        "numpy",
        "pydantic",
        "rich",
    },
    ("rollmesh.reward_service.server.service",): set(),
    ("rollmesh.buffer.server.process",): {"opentelemetry", "redis"},
    ("torch",): {"torch"},
    # Transformers itself brings the others.
    tuple(name for name in PRELOADED_MODULES if ".generators." in name): {
        "PIL",
        "accelerate",
        "botocore",
        "huggingface_hub",
        "mpmath",
        "sympy",
        "transformers",
        "transformers.generation.continuous_batching",
    },
    tuple(name for name in PRELOADED_MODULES if ".learner." in name): set(),
}
PROGRAM = """
import collections, json, os, sys
heavy, many, steps = json.loads(sys.argv[1])
called, added, seen, fds = [], [], set(), "/proc/self/fd"
def watch(owner, name):
    found = getattr(owner, name)
    def asked(*arguments, **options):
        called.append(name)
        return found(*arguments, **options)
    setattr(owner, name, asked)
for step in steps:
    for module in step:
        __import__(module)
    counts = collections.Counter(name.partition(".")[0] for name in sys.modules)
    found = {name for name, count in counts.items() if count >= many and name not in sys.stdlib_module_names}
    found = (found | set(heavy) & set(sys.modules)) - {"rollmesh"}
    added.append(sorted(found - seen))
    seen |= found
    if step == ["torch"]:
        torch = sys.modules["torch"]
        for name in ("is_available", "device_count", "_lazy_init"):
            watch(torch.cuda, name)
        if hasattr(torch._C, "_cuda_getDeviceCount"):  # not in a build for CPUs
            watch(torch._C, "_cuda_getDeviceCount")
print(json.dumps({
    "added": added,
    "threads": len(os.listdir("/proc/self/task")),
    "called": called,
    "poisoned": torch.cuda._is_in_bad_fork(),
    "files": [file for file in os.listdir(fds) if int(file) > 2 and os.path.exists(f"{fds}/{file}")],
}))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """The account of an interpreter that has loaded every step."""
    asked = json.dumps([HEAVY, MANY, list(STEPS)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, asked],
        env={**fork_server.environment(), **thread_environment(1)},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    account: dict[str, Any] = json.loads(done.stdout)
    return account


def test_a_start_loads_what_is_heavy_by_name_alone(said: dict[str, Any]) -> None:
    assert dict(zip(map(_short, STEPS), map(set, said["added"]), strict=True)) == {
        _short(step): heavy for step, heavy in STEPS.items()
    }


def test_every_shared_module_is_in_a_step() -> None:
    assert sorted(PRELOADED_MODULES) == sorted(name for step in STEPS for name in step if name in PRELOADED_MODULES)


def test_what_is_shared_starts_no_thread_and_calls_no_device(said: dict[str, Any]) -> None:
    # A core of gRPC or a pool of OpenMP would have threads.
    assert said | {"added": []} == {"added": [], "threads": 1, "called": [], "poisoned": False, "files": []}


def _short(step: Iterable[str]) -> str:
    return ", ".join(step)
