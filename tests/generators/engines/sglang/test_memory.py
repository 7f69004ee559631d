"""A server that gives its memory back: what it is started with, and what is asked of it, in which order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from aiohttp.test_utils import TestServer
from pydantic import ValidationError

from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.sglang import cpu, server_args
from rollmesh.generators.engines.types import EngineSettings, SleepLevel
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.errors import ConfigError
from tests.generators.engines.collector import DEADLINE_S, Collector
from tests.generators.engines.harness import V1, V2
from tests.generators.engines.sglang.stand_in import StandIn
from tests.generators.engines.tiny import CONTEXT, ContractModel

_CACHE = ["kv_cache", "cuda_graph"]


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
def test_weights_that_come_while_asleep_have_their_memory_first(keeps: bool, contract_model: ContractModel) -> None:
    """Without it they would be written where nothing is; and what is back must not be asked for again."""
    server = StandIn()
    server.info |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "context_length": CONTEXT}
    server.info["internal_states"] = [{"memory_usage": {"kvcache": 1.0, "weight": 2.0, "graph": 0.5}}]
    server.paths += ["/release_memory_occupation", "/resume_memory_occupation"]

    def drive(address: str) -> None:
        section = SglangSection(address=address, transfer="disk")
        engine = create_engine("sglang", contract_model.folder, EngineSettings(sglang=section), Collector())
        engine.start()
        try:
            weights = contract_model.constant_weights(10).items()
            engine.update_weights(V1, weights, "").result(DEADLINE_S)
            # It answers without log-probs, which is the failure of the request.
            with pytest.raises(EngineError, match="does not say how"):
                engine.probe([3, 4]).result(DEADLINE_S)
            # It is not known whether a server of another owner gives its graphs back.
            assert (
                engine.sleep(SleepLevel.WITHOUT_KV_CACHE if keeps else SleepLevel.WITHOUT_WEIGHTS)
                .result(DEADLINE_S)
                .freed_bytes
                == 3 * 2**30
            )
            engine.update_weights(V2, weights, "").result(DEADLINE_S)
            assert engine.status().state == "asleep"
            assert engine.sleep(SleepLevel.WITHOUT_WEIGHTS).result(DEADLINE_S).freed_bytes == 2 * 2**30
            engine.wake().result(DEADLINE_S)
        finally:
            engine.stop()

    async def run() -> None:
        async with TestServer(server.application()) as address:
            await asyncio.to_thread(drive, str(address.make_url("/")))

    asyncio.run(run())
    update = ("/update_weights_from_disk", None)
    asked = [(path, body.get("tags")) for path, body in zip(server.asked, server.bodies, strict=True)]
    assert [item for item in asked if item[1] or item == update] == [
        update,
        ("/release_memory_occupation", [*_CACHE, "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        update,
        ("/release_memory_occupation", ["weights"]),
        ("/resume_memory_occupation", [*_CACHE, "weights"]),
    ], "deeper it takes nothing meanwhile"


def test_a_server_can_give_all_of_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs too, which it says by a variable; and segments that grow could not be."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,roundup_power2_divisions:[256:1,512:2]")
    variables = server_args.environment(EngineSettings(device="cuda"))
    assert variables["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "roundup_power2_divisions:[256:1,512:2]"
    assert "PYTORCH_ALLOC_CONF" not in variables


def test_a_broadcast_to_another_machine_has_to_be_allowed() -> None:
    section = SglangSection(address="http://node:30000", transfer="distributed")
    with pytest.raises(ConfigError, match=r"broadcast weights to node: .*neither token nor TLS.*allow_insecure"):
        server_args.check(section, allow_insecure=False)
    server_args.check(section, allow_insecure=True)
    server_args.check(SglangSection(transfer="distributed"), allow_insecure=False)


def test_a_key_is_for_a_server_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key_file.*address"):
        server_args.check(SglangSection(key_file=tmp_path), allow_insecure=False)
    server_args.check(SglangSection(key_file=tmp_path, address="http://there:30000"), allow_insecure=False)


def test_copies_that_meet_on_all_addresses_have_to_be_allowed() -> None:
    section = SglangSection(data_parallel=2)
    with pytest.raises(ConfigError, match=r"data_parallel 2: .*all addresses.*neither token nor TLS.*allow_insecure"):
        server_args.check(section, allow_insecure=False)
    server_args.check(section, allow_insecure=True)
    server_args.check(SglangSection(data_parallel=2, address="http://there:30000"), allow_insecure=False)


@pytest.mark.parametrize("copies", [1, 2])
def test_the_processes_of_a_server_meet_in_a_file(copies: int, tmp_path: Path) -> None:
    """But for several copies of the model, for which SGLang has one variable."""
    meeting = server_args.meeting(SglangSection(data_parallel=copies), tmp_path, 21_000)
    assert any(str(tmp_path) in value for value in meeting.values()) == (copies == 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_option_contradicts_what_a_server_is_started_with(device: str, tmp_path: Path) -> None:
    section = SglangSection(tensor_parallel=2, data_parallel=2, expert_parallel=2, mem_fraction=0.5, kv_cache_tokens=9)
    line = server_args.command(tmp_path, EngineSettings(device=device), section, port=1, context=8, vocabulary=9)
    set_here = {part.removeprefix("--") for part in line if part.startswith("--")}
    # The server's own description is requested, whatever it was started with.
    free = set(cpu.arguments(1, 1)) - {"device", "max-total-tokens", "mem-fraction-static", "disable-overlap-schedule"}
    free |= {"enable-memory-saver", "enable-weights-cpu-backup", "incremental-streaming-output", "stream-interval"}
    free |= {"sampling-mask-max-tokens", "watchdog-timeout", "log-level", "log-level-http"}
    for name in set_here - free:
        for written in (name, f"--{name}", name.replace("-", "_")):
            with pytest.raises(ValidationError, match=f"{name.replace('-', '.')}: "):
                SglangSection(options={written: 1})
    for name, why in (
        ("tensor_parallel_size", "rollout.sglang.tensor_parallel"),
        ("nnodes", "one host"),
        ("json-model-override-args", "another than the one that is trained"),
        ("quantization", "another than the one that is trained"),
        ("quantiz", "another than the one that is trained"),
        ("preferred_sampling_params", "another distribution"),
        ("config", "give its arguments here"),
        ("enable-return-routed-experts", "rollout.vllm.routed_experts"),
        ("max-lora-rank", r"learner\.lora sets it"),
    ):
        with pytest.raises(ValidationError, match=f"{name}: .*{why}"):
            SglangSection(options={name: 2})
    assert set_here & free
    SglangSection(options=dict.fromkeys(free, 1))


@pytest.mark.parametrize(("device", "copies", "forks"), [("cpu", 1, True), ("cpu", 2, False), ("cuda", 1, False)])
def test_processes_are_forked_where_there_is_neither_a_device_nor_a_thread(
    device: str, copies: int, forks: bool, tmp_path: Path
) -> None:
    """A server with copies starts them from threads."""
    section = SglangSection(data_parallel=copies)
    line = server_args.command(tmp_path, EngineSettings(device=device), section, port=1, context=8, vocabulary=9)
    assert (line[1] == str(cpu.FORKING_SERVER)) is forks
    assert (line[1:3] == ["-m", "sglang.launch_server"]) is not forks


def test_a_broadcast_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    settings = EngineSettings(device="cuda")
    for parallel, device in ((1, 1), (2, 2)):
        assert server_args.sending_device(settings, SglangSection(tensor_parallel=parallel)) == torch.device(
            "cuda", device
        )
    with pytest.raises(ConfigError, match="in addition to the 3 of SGLang"):
        server_args.sending_device(settings, SglangSection(tensor_parallel=3))
    # Where another owner's server runs is not known here.
    assert server_args.sending_device(settings, SglangSection(address="http://there:1")) == torch.device("cuda")
    assert server_args.sending_device(EngineSettings(), SglangSection()) == torch.device("cpu")


_TRACEBACK = """the SGLang server has died (exit code 1); the end of its log:
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/sglang/srt/{file}", line 244, in {function}
    assert cfg.chunked_prefill_size % cfg.page_size == 0, (
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
{error}: chunked_prefill_size must be divisible by page_size
"""


def test_a_server_that_refuses_its_arguments_is_told_from_one_that_breaks() -> None:
    """A restart would end the same way."""
    usage = "usage: sglang serve [-h]\nsglang serve: error: argument --kv-cache-dtype: invalid choice: 'foo'"
    assert server_args.refuses_arguments(f"the SGLang server has died (exit code 2); the end of its log:\n{usage}")

    def refused(file: str, function: str, error: str) -> bool:
        return server_args.refuses_arguments(_TRACEBACK.format(file=file, function=function, error=error))

    assert refused("arg_groups/validation_hook.py", "check_server_args", "AssertionError")
    assert refused("server_args.py", "__post_init__", "ValueError")
    # The machine, not the arguments.
    assert not refused("server_args.py", "__post_init__", "OSError")
    assert not refused("managers/scheduler.py", "__init__", "ValueError")
    assert not server_args.refuses_arguments("the SGLang server has died (killed by SIGKILL)")
