"""The start of a server: interpreter, arguments, environment, and the model folder that it gets to see."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rollmesh.generators.engines.allocator import without_growing_segments
from rollmesh.generators.engines.sglang import cpu
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.runtime.ranks import on_loopback

# In a server's folder: arguments that are secret.
KEY_FILE = "key.yaml"
# SGLang keeps the last places of its context for itself; probes are as long as ours.
SPARE_CONTEXT = 8
# SGLang's name for grammars of llguidance.
GRAMMARS = "llguidance"
# Tokens of one event. Fewer make more work for the server's front and for us (with 1, a quarter of the processor time
# of a small model). More make drafts and streams lag.
STREAM_INTERVAL = 8
# Its argument parser, its checks of arguments in a traceback, and how these end it.
_USAGE = re.compile(r"^sglang serve: error: ", re.MULTILINE)
_CHECKED = re.compile(r'File ".*/sglang/srt/(?:server_args\.py|arg_groups/[^"]*)", line')
_RAISED = re.compile(r"^(?:AssertionError|NotImplementedError|TypeError|ValueError)\b", re.MULTILINE)


def command(
    model: Path,
    settings: EngineSettings,
    section: SglangSection,
    *,
    port: int,
    context: int,
    vocabulary: int,
    seed: int = 0,
    adapters: Mapping[str, Any] | None = None,
) -> list[str]:
    """The server's command line.

    Args:
        model: folder that it loads; it needs no weights.
        settings, section: what was configured; `section.options` go before everything else.
        port: to listen at, on the loopback interface.
        context: tokens of the longest sequence.
        vocabulary: of the model.
        seed: of all draws, below 2**31.
        adapters: arguments for adapters; None: the server gets whole weights.
    """
    arguments: dict[str, Any] = {}
    entry = ["-m", "sglang.launch_server"]
    if torch.device(settings.device).type == "cpu":
        # Copies are started by a process with threads.
        entry = [str(cpu.FORKING_SERVER)] if section.data_parallel == 1 else entry
        arguments |= cpu.arguments(settings.slots, context + SPARE_CONTEXT)
    else:
        arguments |= {"base-gpu-id": torch.device(settings.device).index or 0, "enable-memory-saver": True}
        arguments["enable-weights-cpu-backup"] = True
        # Else a pause in place leaves a step under way, in the weights that are then replaced.
        arguments["disable-overlap-schedule"] = settings.kv == "keep" and adapters is None
    arguments |= {**(adapters or {})} | {
        "model-path": str(model),
        "load-format": "dummy",
        "dtype": settings.dtype,
        "host": "127.0.0.1",
        "port": port,
        "context-length": context + SPARE_CONTEXT,
        "max-running-requests": settings.slots,
        "random-seed": seed,
        "skip-tokenizer-init": True,
        # Ours take the place of its own, see `grammar_plugin`; it says so when it is asked.
        "grammar-backend": GRAMMARS,
        "incremental-streaming-output": True,
        "stream-interval": STREAM_INTERVAL,
        # Behaviour log-probs of filtered draws are had with the kept set alone, which may be the whole vocabulary.
        "sampling-mask-max-tokens": vocabulary,
        # It takes a long pause for a hang, and ends itself; whether it lives is watched from here.
        "watchdog-timeout": 10**7,
        "log-level": "warning",
        "log-level-http": "warning",
    }
    sizes = {"tp-size": section.tensor_parallel, "dp-size": section.data_parallel, "ep-size": section.expert_parallel}
    arguments |= {name: size for name, size in sizes.items() if size > 1}
    if section.mem_fraction is not None:
        arguments["mem-fraction-static"] = section.mem_fraction
    if section.kv_cache_tokens is not None:
        arguments["max-total-tokens"] = section.kv_cache_tokens
    arguments |= {name.removeprefix("--").replace("_", "-"): value for name, value in section.options.items()}
    line = [str(section.python or sys.executable), *entry]
    for name, value in arguments.items():
        line += _argument(name, value)
    return line


def with_key(key: str, scratch: Path) -> list[str]:
    """Arguments by which a server asks for a key; it stands in a file, for command lines are shown to all users.

    Args:
        key: hexadecimal digits.
        scratch: folder that others cannot read.
    """
    path = scratch / KEY_FILE
    path.write_text(json.dumps({"api-key": key}), encoding="utf-8")
    return ["--config", str(path)]


def environment(settings: EngineSettings) -> dict[str, str]:
    """Variables of the server's processes, in addition to those of this one."""
    threads = str(max(1, settings.threads))
    variables = {
        "HF_HUB_OFFLINE": "1",
        # Our context is never longer than the model's; only the spare places are.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONPATH": "",
        "PYTHONUNBUFFERED": "1",
        # The end of the log is for what matters.
        "PYTHONWARNINGS": "ignore",
        # Else the graphs stay on the device while it sleeps.
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
    }
    variables |= without_growing_segments(os.environ) | on_loopback()
    if torch.device(settings.device).type == "cpu":
        variables |= cpu.environment()
    return variables


def meeting(section: SglangSection, scratch: Path, port: int) -> dict[str, str]:
    """Variables by which the server's processes meet in a file; else in a store that listens on all addresses.

    Args:
        section: as in `command`.
        scratch: folder that others cannot read.
        port: no other server of this machine has it.
    """
    if section.data_parallel > 1:
        # Every copy has a group of its own, and the variable is one for all.
        return {}
    # On some CPUs memory that is shared is named by the last two.
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/meeting",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def model_folder(folder: Path, scratch: Path) -> Path:
    """The folder as SGLang can read it: its configuration has to name the model's class.

    Args:
        folder: of the model; stays as it is.
        scratch: where a completed copy of its configuration may be written.

    Raises:
        DataError: the configuration does not say what kind of model it is.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("architectures"):
        return folder
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    if not isinstance(architecture, str):
        raise DataError(f"{folder}/config.json names no architectures", hint="SGLang chooses its model class by them")
    copy = scratch / "model"
    copy.mkdir()
    for source in folder.iterdir():
        (copy / source.name).symlink_to(source.resolve())
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}), encoding="utf-8")
    return copy


def check(section: SglangSection, *, allow_insecure: bool, adapters: bool = False) -> None:
    """Refuses settings that contradict each other, and ports that others could reach unless that was allowed.

    Args:
        section: of the configuration.
        allow_insecure: such ports are allowed.
        adapters: the server is to compute with adapters.

    Raises:
        ConfigError: names them.
    """
    if section.data_parallel > 1 and section.transfer in ("tensor", "distributed"):
        raise ConfigError(
            f"rollout.sglang.transfer {section.transfer}: SGLang takes it with data_parallel 1 only",
            hint="use disk, or more generators instead of data_parallel",
        )
    if section.data_parallel > 1 and section.address is None and not allow_insecure:
        # See `meeting`.
        raise ConfigError(
            f"refusing rollout.sglang.data_parallel {section.data_parallel}: the processes of a copy meet in a store "
            "that listens on all addresses, and knows neither token nor TLS",
            hint="use more generators instead (rollout.replicas), or set security.allow_insecure: true where the "
            "machine's ports are closed to others",
        )
    host = urlsplit(section.address or "").hostname
    if adapters and section.data_parallel > 1:
        raise ConfigError(
            "learner.lora.push: served: SGLang takes new adapters with rollout.sglang.data_parallel 1 only",
            hint="use more generators instead of data_parallel, or learner.lora.push: merged",
        )
    if adapters and host and not is_loopback(host):
        raise ConfigError(
            f"learner.lora.push: served: an adapter is shared memory of this host, and the SGLang server is at {host}",
            hint="set learner.lora.push: merged, or leave rollout.sglang.address out",
        )
    if section.transfer == "distributed" and host and not is_loopback(host) and not allow_insecure:
        raise ConfigError(
            f"refusing to broadcast weights to {host}: a broadcast knows neither token nor TLS",
            hint="set rollout.sglang.transfer: disk, or security.allow_insecure: true on a private network",
        )
    if section.key_file is not None and section.address is None:
        raise ConfigError(
            "rollout.sglang.key_file is for a running server, and none is named",
            hint="set rollout.sglang.address; a server that is started here gets a key of its own",
        )
    if section.address is not None and section.options:
        raise ConfigError(
            "rollout.sglang.options are arguments of a server that is started here, and address names a running one",
            hint="give them to that server",
        )


def sending_device(settings: EngineSettings, section: SglangSection) -> torch.device:
    """The device that sends a broadcast of weights: a device that no server started here uses.

    Raises:
        ConfigError: no such device is left.
    """
    first = torch.device(settings.device)
    if first.type == "cpu" or section.address is not None:
        return first
    here = (first.index or 0) + section.tensor_parallel
    if here >= torch.cuda.device_count():
        raise ConfigError(
            "rollout.sglang.transfer: distributed needs a device for the generator in addition to the "
            f"{section.tensor_parallel} of SGLang",
            hint="use tensor or disk",
        )
    return torch.device("cuda", here)


def refuses_arguments(death: str) -> bool:
    """True where a server has ended because of its arguments, so that the next one would too.

    Args:
        death: how it has died, with the end of its log.
    """
    if _USAGE.search(death):
        return True
    checked = _CHECKED.search(death)
    return checked is not None and _RAISED.search(death, checked.end()) is not None


def _argument(name: str, value: Any) -> list[str]:
    flag = f"--{name}"
    if value is True:
        return [flag]
    # The name alone, without a value, would be a switch that is on.
    if value is None or value is False or value in ([], ()):
        return []
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, str(value)]
