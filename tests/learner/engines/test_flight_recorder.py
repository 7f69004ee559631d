"""The settings of NCCL's flight recorder: names that torch knows, in the run's folder, under the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rollmesh.learner.engines.flight_recorder import record_collectives

HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


def test_collectives_are_recorded_into_the_run_and_what_the_user_has_set_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_FR", "TORCH_NCCL"))}
    monkeypatch.setattr(os, "environ", {**before, "TORCH_FR_BUFFER_SIZE": "7"})
    record_collectives(tmp_path)
    assert os.environ == {**before, "TORCH_FR_BUFFER_SIZE": "7"}, "a CPU has no NCCL"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    record_collectives(tmp_path)
    added = os.environ.keys() - before.keys()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/nccl/rank_"
    assert (tmp_path / "nccl").is_dir()
    known = "".join((HEADERS / name).read_text() for name in ("FlightRecorder.hpp", "ProcessGroupNCCL.hpp"))
    # The library alone knows the name of the file.
    assert [name for name in added if name not in known] == ["TORCH_FR_DUMP_TEMP_FILE"]
