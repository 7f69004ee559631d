"""A kernel that is named runs or is refused with what it lacks; `auto` takes the best that is there."""

from __future__ import annotations

import pytest
import torch

from benchmarks.learner.tiny_models import save_model
from rollmesh.learner.engines.fsdp2.kernels import choice
from rollmesh.learner.engines.fsdp2.kernels.choice import choose_kernel
from rollmesh.mesh.errors import ConfigError
from tests.learner.engines.models import make_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NAMED = ("flash_attention_2", "flash_attention_3", "torch_varlen", "flex")


@pytest.fixture
def machine(monkeypatch):
    """A machine with CUDA devices of some capability, and some packages."""

    def have(capability: int = 9, *, flash_2: bool = False, flash_3: bool = False, torch_varlen: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (capability, 0))
        monkeypatch.setattr(choice, "is_flash_attn_2_available", lambda: flash_2)
        monkeypatch.setattr(choice, "is_flash_attn_3_available", lambda: flash_3)
        monkeypatch.setattr(choice, "_has_torch_varlen", lambda: torch_varlen)

    return have


@pytest.mark.parametrize("name", NAMED)
def test_on_a_cpu_all_but_the_exact_calls_are_refused(name, model_folder):
    with pytest.raises(ConfigError, match=f"learner.attention: {name} needs a CUDA device") as refused:
        make_engine(model_folder, attention=name)
    assert refused.value.hint == "set learner.attention: auto, which takes exact here"
    assert choose_kernel("auto", CPU, torch.bfloat16) == choose_kernel("exact", CPU, torch.float32) == "exact"


@pytest.mark.parametrize(
    ("have", "chosen", "refused"),
    [
        ({"flash_2": True, "flash_3": True}, "flash_attention_3", {}),
        ({"flash_2": True}, "flash_attention_2", {"flash_attention_3": "the package flash-attn-3"}),
        ({}, "torch_varlen", {"flash_attention_2": "the package flash-attn, 2.3.3 or later"}),
        ({"torch_varlen": False}, "exact", {"torch_varlen": "torch 2.11 or later"}),
        (
            {"capability": 10, "flash_2": True, "flash_3": True},
            "flash_attention_2",
            {"flash_attention_3": r"a device of compute capability 9\.x"},
        ),
        ({"capability": 8, "flash_3": True}, "torch_varlen", {"flash_attention_3": "a device of compute capability 9"}),
        ({"capability": 7, "flash_2": True}, "torch_varlen", {"flash_attention_2": "a device of compute capability 8"}),
    ],
)
def test_on_cuda_the_first_that_is_there_is_taken(machine, have, chosen, refused):
    machine(**have)
    assert choose_kernel("auto", CUDA, torch.bfloat16) == chosen
    assert choose_kernel(chosen, CUDA, torch.bfloat16) == chosen
    for name, lacks in refused.items():
        with pytest.raises(ConfigError, match=f"learner.attention: {name} needs {lacks}"):
            choose_kernel(name, CUDA, torch.bfloat16)


def test_what_auto_takes_is_what_a_refusal_names(machine):
    machine(capability=10)
    with pytest.raises(ConfigError) as refused:
        choose_kernel("flash_attention_3", CUDA, torch.bfloat16)
    taken = choose_kernel("auto", CUDA, torch.bfloat16)
    assert refused.value.hint == f"set learner.attention: auto, which takes {taken} here"


def test_kernels_of_half_precision_are_not_taken_for_float32(machine):
    machine(flash_2=True)
    assert choose_kernel("auto", CUDA, torch.float32) == "exact"
    with pytest.raises(ConfigError, match=r"needs learner\.param_dtype: bfloat16, and this is float32"):
        choose_kernel("flash_attention_2", CUDA, torch.float32)


def test_the_kernel_of_torch_is_not_taken_for_capped_scores(machine):
    machine()
    assert choose_kernel("auto", CUDA, torch.bfloat16, capped=True) == "exact"
    with pytest.raises(ConfigError, match="torch_varlen needs scores without a cap"):
        choose_kernel("torch_varlen", CUDA, torch.bfloat16, capped=True)


def test_models_in_rows_refuse_a_kernel_of_packed_attention(tmp_path, monkeypatch):
    save_model(tmp_path, "gpt_oss")
    monkeypatch.setattr("rollmesh.learner.engines.fsdp2.runner.choose_kernel", lambda name, *_, **__: name)
    with pytest.raises(ConfigError, match=r"learner\.attention: flex is for packed sequences, .* has sinks"):
        make_engine(tmp_path, attention="flex")
