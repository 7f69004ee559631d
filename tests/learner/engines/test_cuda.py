"""The FSDP2 engine on a CUDA device: the CPU's results, and the variable-length kernels against the exact fallback."""

from __future__ import annotations

import pytest
import torch

from learner.batching.pack import pack
from tests.learner.engines.models import make_engine, make_model, make_sequences
from tests.learner.engines.training import train_step, weights

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_log_probs_agree_with_the_cpu(tmp_path, architecture):
    folder = make_model(tmp_path / "model", architecture)
    sequences = make_sequences(1)
    (on_cpu,) = make_engine(folder).infer_batch([pack(sequences)])
    (on_cuda,) = make_engine(folder, device="cuda").infer_batch([pack(sequences, device=CUDA)])
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_the_kernels_of_bfloat16_agree_with_float32(tmp_path, architecture):
    folder = make_model(tmp_path / "model", architecture)
    sequences = make_sequences(2)
    (exact,) = make_engine(folder).infer_batch([pack(sequences)])
    engine = make_engine(folder, device="cuda", param_dtype="bfloat16")
    (kernels,) = engine.infer_batch([pack(sequences, device=CUDA)])
    torch.testing.assert_close(kernels.cpu().float(), exact, atol=5e-2, rtol=5e-2)


def test_a_training_step_gives_the_cpus_weights(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3")
    engines = [make_engine(folder), make_engine(folder, device="cuda")]
    for engine in engines:
        train_step(engine, seed=3)
    on_cpu, on_cuda = (weights(engine) for engine in engines)
    for name, tensor in on_cpu.items():
        torch.testing.assert_close(on_cuda[name], tensor, atol=1e-4, rtol=1e-3)
