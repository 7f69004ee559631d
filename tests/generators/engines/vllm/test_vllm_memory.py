"""Memory that goes to vLLM's workers, and the process whose life they share; without vLLM."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rollmesh.generators.engines.allocator import without_growing_segments
from rollmesh.generators.engines.checkpoint_names import CheckpointLayout
from rollmesh.generators.engines.external.model_info import read_folder
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.generators.engines.vllm.engine_args import check_features, engine_arguments, transfer_of
from rollmesh.generators.engines.vllm.environment import check_build
from rollmesh.generators.engines.vllm.shared_weights import SharedWeights, map_tensors
from rollmesh.mesh.config.load import load_config
from rollmesh.mesh.config.rollout import RolloutSection, VllmSection
from rollmesh.mesh.errors import ConfigError, WeightsError
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.weights.shared_files import FILE_PREFIX, SHARED_MEMORY
from rollmesh.mesh.weights.tensors import bytes_of
from tests.generators.engines import tiny
from tests.generators.engines.tiny import ContractModel
from tests.repository import REPOSITORY


def test_weights_are_mapped_as_they_were_and_gone_when_closed() -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7).to(torch.bfloat16), "empty": torch.zeros(0, 2)}
    shared = SharedWeights(tensors)
    for name, tensor in map_tensors(shared.layout):
        assert torch.equal(tensor, tensors[name])
        tensor.add_(1)
    assert torch.equal(dict(map_tensors(shared.layout))["a"], tensors["a"]), "writing to a mapping changes it alone"
    for wrong in ({"nbytes": shared.layout.nbytes + 64}, {"offsets": [0, 64, 10**6]}, {"dtypes": ["x"] * 3}):
        with pytest.raises(WeightsError):
            map_tensors(replace(shared.layout, **wrong))
    shared.close()
    shared.close()
    with pytest.raises(WeightsError):
        map_tensors(shared.layout)


def test_the_learners_file_is_handed_on_and_not_copied() -> None:
    tensors = {"a": torch.randn(300, 50), "b": torch.arange(7).to(torch.bfloat16), "empty": torch.zeros(0, 2)}
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix=FILE_PREFIX, delete=False) as file:
        offsets = []
        for tensor in tensors.values():
            file.write(bytes(-file.tell() % 64))
            offsets.append(file.tell())
            file.write(bytes_of(tensor))
        file.flush()
        area = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped = {
        name: torch.frombuffer(area, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
        if tensor.numel()
        else tensor
        for (name, tensor), offset in zip(tensors.items(), offsets, strict=True)
    }
    shared = SharedWeights(mapped)
    assert shared.copied_bytes == 0
    assert Path(shared.layout.path).samefile(file.name)
    mixed = SharedWeights({**mapped, "c": torch.ones(3)})
    assert mixed.copied_bytes > 0, "all or none"
    Path(file.name).unlink()
    late = SharedWeights(mapped)
    assert late.copied_bytes > 0, "the learner has released it"
    for weights in (shared, late):
        for name, tensor in map_tensors(weights.layout):
            assert torch.equal(tensor, tensors[name])
    for weights in (shared, mixed, late):
        weights.close()
        with pytest.raises(WeightsError):
            map_tensors(weights.layout)


def test_a_set_of_weights_is_complete_and_has_the_names_of_a_checkpoint() -> None:
    config = tiny.configs()["qwen3_moe"]
    weights = tiny.build_model(config).state_dict()
    arranged = CheckpointLayout(config, torch.float32).to_checkpoint(weights.items())
    fused = weights["model.layers.0.mlp.experts.gate_up_proj"][1]
    for place, name in ((0, "gate_proj"), (1, "up_proj")):
        one = arranged[f"model.layers.0.mlp.experts.1.{name}.weight"]
        assert torch.equal(one, fused.chunk(2)[place])
    for wrong in (
        list(weights.items())[1:],
        [*weights.items(), ("no.such", torch.zeros(1))],
        [("lm_head.weight", torch.zeros(1, 1)), *weights.items()],
    ):
        with pytest.raises(WeightsError):
            CheckpointLayout(config, torch.float32).to_checkpoint(wrong)


def test_settings_become_arguments(contract_model: ContractModel) -> None:
    section = VllmSection(tensor_parallel=2, data_parallel=2, expert_parallel=True, options={"block_size": 32})
    chosen = EngineSettings(slots=5, device="cuda", vllm=section)
    arguments = engine_arguments(contract_model.folder, chosen, context=64, tokenizer=True)
    expected = {"max_num_seqs": 3, "tensor_parallel_size": 2, "data_parallel_size": 2, "block_size": 32}
    assert expected.items() <= arguments.items()
    assert (arguments["enable_expert_parallel"], arguments["enforce_eager"]) == (True, False)
    sharing = replace(chosen, release="memory")
    arguments_sharing = engine_arguments(contract_model.folder, sharing, context=64, tokenizer=True)
    assert arguments_sharing == arguments | {"enable_nccl_comm_suspend": True}, "several workers give theirs back too"
    # A key that is set here cannot be set twice. On CUDA the size of the KV cache is not.
    for name in arguments.keys() - {"block_size"}:
        with pytest.raises(ValidationError, match=f"{name}: "):
            VllmSection(options={name: 1})
    reasons = {"max_num_seqs": "rollout.slots", "pipeline_parallel_size": "tensor_parallel", "nnodes": "one host"}
    reasons |= dict.fromkeys(("hf_overrides", "quantization"), "another than the one that is trained")
    reasons |= {"logits_processors": "another distribution"}
    for name, why in reasons.items():
        with pytest.raises(ConfigError, match=f"rollout.vllm.options: {name}: .*{why}"):
            load_config({"rollout": {"vllm": {"options": {name: 2}}}})
    with pytest.raises(ValidationError, match="at 2 at most"):
        RolloutSection(engine="vllm", temperature=2.1)
    assert transfer_of(EngineSettings(device="cuda")) == "ipc"
    assert transfer_of(chosen) == transfer_of(EngineSettings()) == "shm"
    for refused in (
        EngineSettings(vllm=VllmSection(transfer="nccl")),
        replace(chosen, vllm=VllmSection(tensor_parallel=2, transfer="ipc")),
    ):
        with pytest.raises(ConfigError):
            transfer_of(refused)


def test_a_build_for_the_other_kind_of_device_is_refused() -> None:
    on_cpu, on_cuda = EngineSettings(), EngineSettings(device="cuda")
    check_build(on_cpu, for_cpu=True)
    check_build(on_cuda, for_cpu=False)
    with pytest.raises(ConfigError, match="this vLLM is built for CUDA"):
        check_build(on_cpu, for_cpu=False)
    with pytest.raises(ConfigError, match="this vLLM is built for CPUs"):
        check_build(on_cuda, for_cpu=True)


def test_what_vllm_would_fail_of_is_refused_by_its_key(tmp_path: Path) -> None:
    """Experts that another worker has end in a segmentation fault on a CPU, and in nothing on CUDA."""
    mixture = tiny.save_folder(tmp_path, tiny.build_model(tiny.configs()["qwen3_moe"]), None)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"routed_experts": True, "prefix_caching": False}, "routed_experts: .* prefix cache"),
        ({"routed_experts": True}, "routed_experts: .* CUDA"),
        ({"expert_parallel": True, "tensor_parallel": 2}, "expert_parallel: "),
        ({"data_parallel": 2}, "data_parallel: "),
    )
    for refused, reason in cases:
        chosen = EngineSettings(vllm=VllmSection(**refused))
        with pytest.raises(ConfigError, match=f"rollout.vllm.{reason}"):
            check_features(chosen, experts=read_folder(mixture, None).experts)
    for taken in (VllmSection(expert_parallel=True), VllmSection(tensor_parallel=2)):
        check_features(EngineSettings(vllm=taken), experts=True)
    check_features(EngineSettings(vllm=VllmSection(data_parallel=2)), experts=False)
    everything = VllmSection(data_parallel=2, tensor_parallel=2, expert_parallel=True, routed_experts=True)
    check_features(EngineSettings(device="cuda", vllm=everything), experts=True)


def test_who_belongs_to_a_generator_that_is_killed_ends() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = (
        "import threading; from rollmesh.generators.engines.vllm.plugin import _die_with; "
        f"_die_with({owner.pid}); print(flush=True); threading.Event().wait()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "."})
    assert child.stdout is not None
    child.stdout.readline()
    assert child.poll() is None
    owner.kill()
    owner.wait()
    assert child.wait(240) == -signal.SIGKILL


@pytest.mark.parametrize("killed", ["generator", "core"])
def test_a_forked_worker_ends_with_its_generator_and_with_its_core(killed: str) -> None:
    """A fork takes none of the core's threads along."""
    generator = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    code = (
        "import os, threading; from rollmesh.generators.engines.vllm.plugin import _fork_workers; "
        f"_fork_workers({generator.pid}); os.fork() or print(os.getpid(), flush=True); threading.Event().wait()"
    )
    core = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "."}, cwd=REPOSITORY
    )
    try:
        assert core.stdout is not None
        worker = int(core.stdout.readline())
        assert survivors([worker]) == {worker}
        {"generator": generator, "core": core}[killed].kill()
        assert survivors([worker], 60) == set()
    finally:
        for process in (generator, core):
            process.kill()
            process.communicate()


def test_memory_of_foreign_engines_is_not_in_segments_that_grow() -> None:
    for given, left in (
        ("expandable_segments:True", ""),
        ("max_split_size_mb:512, expandable_segments:True", "max_split_size_mb:512"),
    ):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            assert without_growing_segments({name: given}) == {name: left}
    assert without_growing_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}) == {}
