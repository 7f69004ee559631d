"""A training step and a swap as they would run on CUDA: devices, dtypes, and how often the host waits for the device.

In a process of its own, for rank 0 of 4 to 64, on tensors without values. It needs no GPU, and says nothing of kernels,
streams and NCCL.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.learner.engines.fake_cuda.device import build
from tests.repository import REPOSITORY

CASES: dict[str, dict[str, object]] = {
    "dense": {"swap": True},
    "64 ranks, twice all, no kernel": {"world": 64, "micro_batches": 2, "layers": 2, "dtype": "float32"},
    "experts": {"experts": True, "world": 4, "swap": True},
    "rows, micro-batches": {"rows": True, "micro_batches": 2, "logits_mib": 0},
    "sequences over 4 ranks, 8 bits": {"sp": 4, "optimizer": {"state_dtype": "8bit"}},
    "4 copies of 2 shards, at rest": {"shards": 2, "micro_batches": 2, "layers": 2, "resting": True},
    "2 copies, sequences over 2 ranks, 8 bits, at rest": {
        "shards": 4,
        "sp": 2,
        "layers": 2,
        "resting": True,
        "optimizer": {"state_dtype": "8bit"},
    },
    "experts, muon, at rest": {"experts": True, "layers": 3, "resting": True, "optimizer": {"name": "muon"}},
    "misplaced": {"misplaced": True},
}
# The others have all that these have, in other combinations.
EXHAUSTIVE = (
    "dense",
    "64 ranks, twice all, no kernel",
    "sequences over 4 ranks, 8 bits",
    "4 copies of 2 shards, at rest",
    "experts, muon, at rest",
)
SOUND = [
    pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ())
    for name in CASES
    if name != "misplaced"
]
SWAPPED = [case for case in SOUND if case.values[0] in ("dense", "experts")]
AT_REST = [case for case in SOUND if "at rest" in str(case.values[0])]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to build a device with"),
]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The cases of this tier in one process."""
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has CUDA: another device cannot take its name")
    # Kept from one run of the suite to the next.
    library = build(
        request.config.cache.mkdir("fake_cuda") if request.config.cache else tmp_path_factory.mktemp("built")
    )
    left_out = () if request.config.getoption("all_tiers") else EXHAUSTIVE
    cases = {name: case for name, case in CASES.items() if name not in left_out}
    command = [sys.executable, "-m", "tests.learner.engines.fake_cuda", library, json.dumps(cases)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    results: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return results


def test_a_tensor_on_the_wrong_device_is_found(seen: dict[str, Any]) -> None:
    assert seen["misplaced"]["error"].startswith("FakeTensorDeviceMismatchError")


@pytest.mark.parametrize("case", SOUND)
def test_a_step_runs_on_the_device(seen: dict[str, Any], case: str) -> None:
    assert seen[case]["error"] == ""
    facts = seen[case]["facts"]
    assert facts["skipped"] is False
    assert facts["log_probs"] == ["cuda:0", "torch.float32"]


@pytest.mark.parametrize("case", SOUND)
def test_a_step_waits_as_often_whatever_the_ranks_layers_and_micro_batches(seen: dict[str, Any], case: str) -> None:
    waits = seen[case]["waits"]
    assert waits["pack"] == {"reads": {}, "to_host": {}, "to_device": {}}
    step = waits["step"]
    # The counts of the batch, the number of micro-batches, the gradient's norm, the loss, the metrics.
    assert sum(step["reads"].values()) == 5, step["reads"]
    # The loads of all experts, once.
    assert list(step["to_host"].values()) == [1] * ("experts" in case)
    assert all("/experts/routers.py:" in place for place in step["to_host"])
    # Two of them are numbers of the host's, agreed on before the first forward pass.
    assert set(step["to_device"]) == {place for place in step["to_device"] if "/world.py:" in place}
    assert sum(step["to_device"].values()) == 2
    assert sum(waits["infer"]["reads"].values()) == 1


@pytest.mark.parametrize("case", SWAPPED)
def test_an_export_copies_messages_not_parameters(seen: dict[str, Any], case: str) -> None:
    facts, waits = seen[case]["facts"], seen[case]["waits"]["export"]
    assert facts["exported"] == [["cpu", "torch.bfloat16"]]
    assert facts["exported_tensors"] == facts["parameters"]
    assert 0 < sum(waits["to_host"].values()) <= facts["rounds"]
    assert waits["reads"] == {}


@pytest.mark.parametrize("case", SWAPPED)
def test_a_swap_gives_memory_back_without_a_wait_for_each_tensor_and_trains_on(seen: dict[str, Any], case: str) -> None:
    facts, waits = seen[case]["facts"], seen[case]["waits"]
    assert facts["offloaded"] == [0]
    assert waits["offload"]["to_host"] == waits["onload"]["to_device"] == {}
    assert waits["step after"] == waits["step"]


@pytest.mark.parametrize("case", AT_REST)
def test_of_an_optimizers_state_at_rest_two_pieces_are_on_the_device(seen: dict[str, Any], case: str) -> None:
    state = seen[case]["facts"]["state"]
    assert state["most"] <= state["two pieces"] < 0.8 * state["all"]
    assert state["between steps"] == 0


def test_moments_are_kept_as_asked(seen: dict[str, Any]) -> None:
    for name in CASES.keys() & seen.keys() - {"misplaced"}:
        expected = ["torch.float32", *["torch.uint8"] * ("8 bits" in name)]
        assert seen[name]["facts"]["state"]["dtypes"] == expected, name


def test_weights_of_a_generator_go_to_the_host_and_back_without_a_wait_for_each(seen: dict[str, Any]) -> None:
    for part in ("to_host", "to_device"):
        assert seen["sleep"]["waits"][part] == {"to_host": {}, "to_device": {}}


def test_a_batch_stage_waits_for_what_the_host_draws_alone(seen: dict[str, Any]) -> None:
    facts, waits = seen["batch stage"]["facts"], seen["batch stage"]["waits"]
    assert facts == {"groups": "cuda:0", "resampling": "cuda:0"}
    assert waits["groups"] == {"reads": {}, "to_host": {}, "to_device": {}}
    # The weights there, and how often each was drawn back; and whether there is any weight at all, known on the host.
    drawn = waits["resampling"]
    assert [sum(drawn[kind].values()) for kind in ("reads", "to_host", "to_device")] == [0, 1, 1]
