"""The FSDP2 engine on a CUDA device: the CPU's results, and the variable-length kernels against the exact fallback."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import pin_memory_utils
from transformers import AutoConfig

from benchmarks.learner import tiny_models
from benchmarks.learner.tiny_models import save_model
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.distributed.roles_memory import RolesMemory
from rollmesh.mesh.config.learner import MemorySection
from rollmesh.testing.engine_cases import save_random
from tests.learner.engines.models import make_critic, make_engine, make_model, make_sequences
from tests.learner.engines.training import critic_loss, log_probs, train_step, values, weights
from tests.learner.ranks import run_two_ranks

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# Bytes of a device that no tensor has: those of cuBLAS, and blocks that are not empty.
WORKSPACES = 96 << 20


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_log_probs_agree_with_the_cpu(tmp_path, architecture):
    folder = make_model(tmp_path / "model", architecture)
    sequences = make_sequences(1)
    on_cpu = log_probs(make_engine(folder), pack(sequences))
    on_cuda = log_probs(make_engine(folder, device="cuda"), pack(sequences, device=CUDA))
    torch.testing.assert_close(on_cuda.cpu(), on_cpu, atol=1e-4, rtol=1e-4)


def test_the_kernels_know_values_that_are_narrower_than_keys(tmp_path):
    folder = save_model(tmp_path / "model", "deepseek_v3")
    sequences = make_sequences(2)
    exact = log_probs(make_engine(folder), pack(sequences))
    engine = make_engine(folder, device="cuda", param_dtype="bfloat16")
    # Near ties may send tokens to other experts: most tokens agree.
    apart = (log_probs(engine, pack(sequences, device=CUDA)).cpu() - exact).abs()
    assert float(apart.median()) < 5e-2


@pytest.mark.parametrize("kernel", ["torch_varlen", "flex"])
def test_a_kernel_by_name_gives_the_results_of_float32(tmp_path, kernel):
    # FlexAttention knows no heads that are narrower than 16.
    settings = tiny_models.ARCHITECTURES["qwen3"].settings | {"head_dim": 32}
    folder = save_random(AutoConfig.for_model("qwen3", **settings), tmp_path / "model")
    sequences = make_sequences(2)
    exact = make_engine(folder)
    engine = make_engine(folder, device="cuda", param_dtype="bfloat16", attention=kernel)
    for _ in range(2):
        before = log_probs(exact, pack(sequences))
        torch.testing.assert_close(log_probs(engine, pack(sequences, device=CUDA)).cpu(), before, atol=5e-2, rtol=5e-2)
        norms = [train_step(each, seed=3).metrics["grad_norm"] for each in (exact, engine)]
        assert norms[1] == pytest.approx(norms[0], rel=0.05)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_the_kernels_of_bfloat16_agree_with_float32(tmp_path, architecture):
    folder = make_model(tmp_path / "model", architecture)
    sequences = make_sequences(2)
    exact = log_probs(make_engine(folder), pack(sequences))
    engine = make_engine(folder, device="cuda", param_dtype="bfloat16")
    kernels = log_probs(engine, pack(sequences, device=CUDA))
    torch.testing.assert_close(kernels.cpu(), exact, atol=5e-2, rtol=5e-2)


def test_a_training_step_gives_the_cpus_weights(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3")
    engines = [make_engine(folder), make_engine(folder, device="cuda")]
    for engine in engines:
        train_step(engine, seed=3)
    on_cpu, on_cuda = (weights(engine) for engine in engines)
    for name, tensor in on_cpu.items():
        torch.testing.assert_close(on_cuda[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_values_agree_with_the_cpu_after_a_step(tmp_path, param_dtype):
    folder = make_model(tmp_path / "model", "qwen3")
    sequences = make_sequences(4)
    on_cpu, on_cuda = make_critic(folder), make_critic(folder, device="cuda", param_dtype=param_dtype)
    for engine in (on_cpu, on_cuda):
        train_step(engine, seed=3, loss=critic_loss)
    found = values(on_cuda, pack(sequences, device=CUDA))
    assert found.dtype == torch.float32
    tolerance = 1e-3 if param_dtype == "float32" else 1e-1
    torch.testing.assert_close(found.cpu(), values(on_cpu, pack(sequences)), atol=tolerance, rtol=tolerance)


def test_an_engine_that_sleeps_on_the_host_gives_its_memory_back_and_trains_on(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3")
    engines = [make_engine(folder), make_engine(folder, device="cuda", param_dtype="bfloat16")]
    for engine in engines:
        train_step(engine, seed=3)
    awake = torch.cuda.memory_allocated()
    state = sum(3 * tensor.nbytes for tensor in weights(engines[1]).values())
    engines[1].offload()
    # Masters and two moments. The memory of other tests stays, and that of cuBLAS for its work.
    assert awake - torch.cuda.memory_allocated() >= 0.9 * state
    engines[1].onload()
    for engine in engines:
        train_step(engine, seed=4)
    on_cpu, on_cuda = (weights(engine) for engine in engines)
    for name, tensor in on_cpu.items():
        torch.testing.assert_close(on_cuda[name], tensor, atol=5e-2, rtol=5e-2)


def test_all_roles_leave_the_device_to_others_and_come_back(tmp_path):
    """The workspace of cuBLAS alone stays reserved; neither way needs more memory than a turn itself."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 32768}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False}
    folder = save_random(AutoConfig.for_model("qwen3", **sizes, **heads), tmp_path / "model")
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_reserved()
    kinds = {"actor": make_engine, "critic": make_critic}
    losses = {"actor": {}, "critic": {"loss": critic_loss}}
    engines = {role: make(folder, device="cuda", param_dtype="bfloat16") for role, make in kinds.items()}
    memory = RolesMemory(engines)
    for turn in range(2):
        for role, engine in engines.items():
            train_step(engine, seed=turn, **losses[role])
        torch.cuda.reset_peak_memory_stats()
        trained = torch.cuda.memory_reserved()
        away = memory.offload()
        moved = sum(sum(engine.resting_bytes.values()) for engine in engines.values())
        assert torch.cuda.memory_reserved() - base <= WORKSPACES
        assert torch.cuda.max_memory_reserved() <= trained
        # Masters and two moments of two models with about 100 M parameters each.
        assert moved > 2 * 12 * 90_000_000
        assert away.freed_bytes > 0.9 * moved
        torch.cuda.reset_peak_memory_stats()
        memory.onload()
        assert not any(sum(engine.resting_bytes.values()) for engine in engines.values())
        assert torch.cuda.max_memory_reserved() - base <= 1.05 * moved + WORKSPACES


@pytest.mark.parametrize("rests", ["nothing", "offload_optimizer"])
def test_a_checkpoint_is_of_its_moment_and_pins_no_memory_again(tmp_path, rests, monkeypatch):
    pinned, pin = [], pin_memory_utils.pin_memory

    def noted(address: int, size: int) -> None:
        pinned.append(size)
        pin(address, size)

    monkeypatch.setattr(pin_memory_utils, "pin_memory", noted)
    folder = make_model(tmp_path / "model", "qwen3")
    memory = MemorySection(**({} if rests == "nothing" else {rests: True}))
    engine, loaded = make_engine(folder, device="cuda", memory=memory), make_engine(folder, device="cuda")
    train_step(engine, seed=1)
    for number in (1, 2):
        checkpoint, at_begin = tmp_path / str(number), weights(engine)
        checkpoint.mkdir()
        pinned.clear()
        written = engine.begin_checkpoint(checkpoint, {})
        pins = len(pinned)
        for seed in (2, 3):
            train_step(engine, seed=seed)
        written.result(240)
        loaded.load_checkpoint(checkpoint)
        for name, tensor in weights(loaded).items():
            assert torch.equal(tensor, at_begin[name]), name
        assert bool(pins) == (number == 1)


def test_the_devices_generator_continues_from_a_checkpoint(tmp_path):
    engine = make_engine(make_model(tmp_path / "model", "qwen3"), device="cuda")
    for number in (1, 2):
        checkpoint = tmp_path / str(number)
        checkpoint.mkdir()
        engine.begin_checkpoint(checkpoint, {}).result(240)
        drawn = torch.rand(3, device="cuda")
        torch.cuda.manual_seed(7)
        engine.load_checkpoint(checkpoint)
        assert torch.equal(torch.rand(3, device="cuda"), drawn)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_over_nccl_give_the_weights_of_one_cpu(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3")
    alone = make_engine(folder)
    train_step(alone, seed=3)
    run_two_ranks("tests.learner.engines.test_cuda", folder, tmp_path / "weights.pt")
    together = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(together[name], tensor, atol=1e-4, rtol=1e-3)


def main(folder: Path, out: Path) -> None:
    """The work of each of two ranks."""
    engine = make_engine(folder, device="cuda")
    train_step(engine, seed=3)
    found = weights(engine)
    if engine.layout.leads:
        torch.save(found, out)
    engine.close()
