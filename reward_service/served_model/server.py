"""The server of vLLM or SGLang that a model's process starts: it is part of that process, and never outlives it.

Invariants: all processes of the server are in the process group that the owner kills. A guard kills that group as soon
as the model's process is gone. The key of the server is in no command line.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence as Listed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.served_model.engine import AwayError
from rollmesh.reward_service.served_model.messages import ModelOptions
from rollmesh.reward_service.served_model.remote import WITHOUT_PROXIES, RemoteModel
from rollmesh.reward_service.served_model.texts import Sequence

log = logging.getLogger(__name__)
_LOOPBACK = "127.0.0.1"
# Its input ends with the process that holds the other end. The group is that of the model's process.
_GUARD = "import os, sys; sys.stdin.read(); os.killpg(0, 9)"
_ASK_EVERY_S, _TELL_EVERY_S, _HEALTH_S = 0.25, 15.0, 10.0
_ENTRIES = {
    "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--model"],
    "sglang": ["-m", "sglang.launch_server", "--model-path"],
}


class OwnedModel(RemoteModel):
    """A model that a server of this process has. A server that does not answer ends the process, and is replaced.

    Args:
        options: of the model, without a url.

    Raises:
        RewardError: the server ends while it loads, or there is no such label.
    """

    def __init__(self, options: ModelOptions) -> None:
        # Held, for its input ends with it.
        self._guard = subprocess.Popen([sys.executable, "-S", "-E", "-c", _GUARD], stdin=subprocess.PIPE)
        super().__init__(_started(options))

    def values(self, batch: Listed[Sequence]) -> list[list[float]]:
        """See `Engine`."""
        try:
            return super().values(batch)
        except AwayError as error:
            raise RuntimeError(f"the server of the reward model is lost: {error}") from error


def command_of(options: ModelOptions, port: int, key_file: Path | None) -> list[str]:
    """The command line of a server; the configured options go before everything else.

    Args:
        options: of the model.
        port: to listen at.
        key_file: configuration of SGLang with the key; None for vLLM, which reads it from its environment.
    """
    arguments: dict[str, Any] = {"host": _LOOPBACK, "port": port, "dtype": options.dtype}
    if options.engine == "vllm":
        arguments |= {"runner": "pooling", "disable-log-stats": True}
    else:
        arguments |= {"is-embedding": True, "config": str(key_file)}
        kind, _, index = options.device.partition(":")
        arguments |= {"device": kind} if kind else {}
        arguments |= {"base-gpu-id": int(index)} if index else {}
    arguments |= {name.removeprefix("--").replace("_", "-"): value for name, value in options.server_options.items()}
    line = [options.python or sys.executable, *_ENTRIES[options.engine], options.folder]
    for name, value in arguments.items():
        if value is True:
            line.append(f"--{name}")
        elif value is not False and value is not None:
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            line.append(f"--{name}={text}")
    return line


def _environment(options: ModelOptions, key: str) -> dict[str, str]:
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.engine == "vllm":
        index = options.device.partition(":")[2]
        found |= {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        # vLLM takes the first of the devices that it sees.
        found |= {"CUDA_VISIBLE_DEVICES": _visible(index)} if index else {}
        # On a CPU it gives every engine of a host the same cores otherwise.
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # A process of another environment finds its own packages.
    found.pop("PYTHONPATH", None)
    return found


def _visible(index: str) -> str:
    """The device of this index, by the name that CUDA knows where only some are visible."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return seen[int(index)] if int(index) < len(seen) else index


def _started(options: ModelOptions) -> ModelOptions:
    """Starts a server and waits until it is healthy; returns the options with its address."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port = probe.getsockname()[1]
    key = secrets.token_hex()
    with tempfile.TemporaryDirectory(prefix="rollmesh-reward-model-") as scratch:
        key_file = None
        if options.engine == "sglang":
            key_file = Path(scratch) / "key.yaml"
            key_file.write_text(json.dumps({"api-key": key}), encoding="utf-8")
        command = command_of(options, port, key_file)
        log.info("reward model %s: starting %s", options.folder, " ".join(command))
        try:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_environment(options, key))
        except OSError as error:
            raise RewardError(
                f"the {options.engine} of reward model {options.folder} cannot be started: {error}",
                hint="`python` names the interpreter of its environment (make vllm, make sglang)",
            ) from error
        found = replace(options, url=f"http://{_LOOPBACK}:{port}", key=key)
        _wait_until_healthy(server, found)
    threading.Thread(target=_end_with, args=(server,), name="server", daemon=True).start()
    return found


def _wait_until_healthy(server: subprocess.Popen[bytes], options: ModelOptions) -> None:
    """Asks until it answers. Its owner ends this process, and so the wait, if it takes too long."""
    began = told = time.monotonic()
    while not _is_healthy(options):
        if (code := server.poll()) is not None:
            raise RewardError(
                f"the {options.engine} of reward model {options.folder} ended while it loaded, exit code {code}",
                hint="its log is above; `python` names its interpreter, `options` are arguments of its server",
            )
        if time.monotonic() - told > _TELL_EVERY_S:
            told = time.monotonic()
            log.info("reward model %s: %s loads for %.0f s", options.folder, options.engine, told - began)
        time.sleep(_ASK_EVERY_S)
    log.info("reward model %s: %s is ready after %.0f s", options.folder, options.engine, time.monotonic() - began)


def _is_healthy(options: ModelOptions) -> bool:
    try:
        with WITHOUT_PROXIES.open(f"{options.url}/health", timeout=_HEALTH_S):
            return True
    except OSError:
        return False


def _end_with(server: subprocess.Popen[bytes]) -> None:
    """The process has no use without its server; its owner starts both again."""
    log.error("the server of the reward model has ended, exit code %s", server.wait())
    os._exit(1)
