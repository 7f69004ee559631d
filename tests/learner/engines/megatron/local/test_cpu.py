"""Torch answers for CUDA while Megatron's code runs, and is as before afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.learner.engines.megatron.local.cpu import on_cpu


def test_what_is_asked_of_cuda_is_answered_by_the_cpu() -> None:
    before = torch.cuda.current_device, torch.cuda.Stream, Tensor.cuda
    with on_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.empty(1, device=torch.cuda.current_device(), pin_memory=True).cuda().device.type == "cpu"
        assert torch.zeros(1).type() == "torch.FloatTensor"
    assert (torch.cuda.current_device, torch.cuda.Stream, Tensor.cuda) == before


def test_types_of_tensors_are_those_of_cuda_also_within_one_another() -> None:
    with on_cpu(types=True):
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        with on_cpu(types=True):
            assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
            assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type() == "torch.FloatTensor"
