"""The models whose decode steps are replayed from a recording, and recordings that follow the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.hf.model.loading import load_model
from rollmesh.generators.engines.hf.model.traced_forward import DirectForward, ForwardPass, TracedForward
from tests.generators.engines import tiny

pytestmark = [pytest.mark.usefixtures("recorded")]


def forward_pass(folder: Path, name: str) -> ForwardPass:
    """A decoder's choice for an architecture once it has weights."""
    torch.set_num_threads(1)
    model = tiny.build_model(tiny.configs()[name])
    loaded = load_model(tiny.save_folder(folder, model, None), dtype="float32", device="cpu")
    loaded.model.load_state_dict(model.state_dict())
    decoder = Decoder(loaded, slots=4)
    with torch.inference_mode():
        decoder.prepare()
    return decoder._forward_pass


@pytest.mark.parametrize("name", sorted(tiny.configs()))
def test_models_are_recorded(name: str, tmp_path: Path) -> None:
    assert isinstance(forward_pass(tmp_path, name), TracedForward)


def test_a_short_context_is_not_exceeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.configs()["gpt2"]
    config.n_positions = 6
    monkeypatch.setattr(tiny, "configs", lambda: {"gpt2": config})
    assert isinstance(forward_pass(tmp_path, "gpt2"), TracedForward)


def by_truth(x: torch.Tensor) -> bool:
    return bool(x.abs().max() < 1e9)


def by_list(x: torch.Tensor) -> bool:
    return max(x.flatten().tolist()) < 1e9


def by_mask(x: torch.Tensor) -> bool:
    return x[x.abs() > 1e9].numel() == 0


@pytest.mark.parametrize("decide", [by_truth, by_list, by_mask])
def test_a_decision_by_value_is_noticed(
    decide: Callable[[torch.Tensor], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch that the trial inputs do not take would be lost in a recording."""
    original = Qwen3MLP.forward

    def branching(self: Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
        return original(self, x) if decide(x) else x

    monkeypatch.setattr(Qwen3MLP, "forward", branching)
    assert isinstance(forward_pass(tmp_path, "qwen3"), DirectForward)


def test_a_recording_with_fixed_sizes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python numbers made from sizes stay what they were when recorded: other batch sizes then differ or fail."""
    original = Qwen3MLP.forward

    def scaled_by_rows(self: Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
        return original(self, x) * float(int(x.shape[0])) / x.shape[0]

    monkeypatch.setattr(Qwen3MLP, "forward", scaled_by_rows)
    assert isinstance(forward_pass(tmp_path, "qwen3"), DirectForward)


def test_untraceable_code_is_called_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Qwen3MLP.forward

    def untraceable(self: Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            raise NotImplementedError("no tracing here")
        return original(self, x)

    monkeypatch.setattr(Qwen3MLP, "forward", untraceable)
    assert isinstance(forward_pass(tmp_path, "qwen3"), DirectForward)
