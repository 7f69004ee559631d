"""A fault at the start of a learner is said in one typed line, before anything touches the mesh."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from rollmesh.launcher.preflight.trial import try_learner
from rollmesh.learner.builders import set_learner_threads
from rollmesh.learner.engine_specs import device_of
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.learner.service import run
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import ConfigError, DataError, UnreachableError
from tests.joining import NOWHERE, when_it_waits
from tests.learner.live.tiny import make_config


@pytest.fixture(autouse=True)
def _keep_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_the_starter_hears_of_a_learner_before_it_fetches_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download may take longer than the starter waits for a process that does not answer."""

    def fetch(_model: ModelSection) -> ModelSection:
        assert (tmp_path / "ready-0").exists()
        raise DataError("fetched nothing")

    monkeypatch.setattr("rollmesh.learner.service.resolve_model", fetch)
    assert run(make_config(tmp_path, {}), NOWHERE, ready_file=tmp_path / "ready") == DataError.exit_code


def test_steps_that_are_profiled_after_the_last_one_are_said_to_be_without_effect(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"learner.steps": 3, "learner.profile.steps": [2, 4, 9]})
    (notice,) = [notice for notice in try_learner(config, fresh=True) if "profile" in notice]
    assert notice == "without effect: learner.profile.steps 4, 9. The run ends after step 3 (learner.steps)"


def test_an_end_that_the_model_does_not_name_is_told_before_a_run(tmp_path: Path) -> None:
    config = make_config(tmp_path, {})
    assert not [notice for notice in try_learner(config, fresh=True) if "end" in notice]
    (Path(config.model.path) / "generation_config.json").write_text("{}")
    (notice,) = [notice for notice in try_learner(config, fresh=True) if "end" in notice]
    assert notice.startswith("model.path: its files name no end token, and training ends turns or texts with")


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        ({"model.path": "/absent/model"}, DataError.exit_code, "model.path: no such folder: /absent/model"),
        ({"data.train": "/absent.parquet"}, DataError.exit_code, "dataset /absent.parquet does not exist"),
        ({"data.prompt_key": "question"}, DataError.exit_code, "row 0: field `question` is missing"),
        ({"rollout.max_prompt_tokens": 2, "data.on_long_prompt": "refuse"}, DataError.exit_code, "row 0: long prompt"),
        (
            {"model.path": "/absent/model", "security.token_file": "/absent.token"},
            ConfigError.exit_code,
            "security.token_file /absent.token: No such file",
        ),
        ({"rollout.max_response_tokens": 60}, ConfigError.exit_code, "that the model takes has 64 tokens"),
        ({"algorithm.name": "grppo"}, ConfigError.exit_code, "did you mean 'grpo'"),
        (
            {"buffer.order": "priority", "buffer.max_reuse": 2, "buffer.priority": "/absent.py:mine"},
            ConfigError.exit_code,
            "buffer.priority /absent.py:mine: no file",
        ),
        ({"network.retry_s": 0.2, "network.rpc_timeout_s": 0.2}, UnreachableError.exit_code, "joining the mesh"),
    ],
)
def test_bad_input_ends_with_its_code_and_one_line(
    tmp_path: Path, capfd: Any, overrides: dict[str, Any], code: int, words: str
) -> None:
    assert run(make_config(tmp_path, overrides), NOWHERE) == code
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    errors = [line for line in lines if line["level"] == "error"]
    assert len(errors) == 1
    assert words in errors[0]["message"]


def test_sigterm_ends_the_wait_for_a_mesh_that_does_not_answer(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"data.eval": None})
    with when_it_waits(lambda: os.kill(os.getpid(), signal.SIGTERM)) as said:
        assert run(config, NOWHERE) == 0
    assert said[0].startswith(f"waits for the mesh at {NOWHERE}, 20 s at most: ")
    assert "refused" in said[0]


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        resolve_model(ModelSection(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        resolve_model(ModelSection(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="has no weights"):
        resolve_model(ModelSection(path=str(tmp_path)))


def test_a_hub_id_is_looked_for_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    asked: list[tuple[str, str | None]] = []

    def snapshot(name: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        if name != "org/known":
            raise LocalEntryNotFoundError("offline")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = resolve_model(ModelSection(path="org/known", revision="abc"))
    assert (found.path, found.revision) == (str(tmp_path), None)
    assert asked == [("org/known", "abc")]
    with pytest.raises(DataError, match="neither a local folder nor"):
        resolve_model(ModelSection(path="org/unknown"))


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert device_of("auto") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_of("cpu") == "cpu"
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 1, and this rank sees 1 CUDA device\(s\)"):
        device_of("cuda")


def test_a_learner_computes_with_the_threads_of_its_environment_though_torch_was_loaded_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", str(before + 2))
        set_learner_threads(make_config(tmp_path, {}))
        assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)
