"""Faults of a machine and of a configuration, planted for real before a run."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from rollmesh.buffer.redis_backend.embedded import find_redis_server
from rollmesh.launcher.placement.visible import has_driver
from rollmesh.mesh.config import Config, load_config
from tests.certificates import Authority
from tests.secrets_here import write_secret
from tests.tiny_folder import write_tiny_folder

_ROW = {"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}
_REWARDS = """
import time

def raises(data_source, solution_str, ground_truth, extra_info=None):
    raise RuntimeError("no judge today")

def hangs(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(600)

def constant(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""


@dataclass
class Ground:
    """A machine with a valid configuration, to plant faults in.

    Attributes:
        folder: for all files.
        monkeypatch: for variables of the environment.
        redis: socket of a Redis with wrong settings.
        overrides: of the configuration.
        open: what stays open to the end of the test.
    """

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    redis: Path
    overrides: list[str] = field(default_factory=list)
    open: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        write_tiny_folder(self.model, architectures=["LlamaForCausalLM"])
        self.rows.write_text(json.dumps(_ROW) + "\n")
        (self.folder / "rewards.py").write_text(_REWARDS)
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy", "HF_HUB_OFFLINE"):
            self.monkeypatch.delenv(name, raising=False)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> Path:
        return self.folder / "train.jsonl"

    def set(self, **values: object) -> None:
        """Sets keys, with two underscores for each dot."""
        self.overrides += [f"--{key.replace('__', '.')}={value}" for key, value in values.items()]

    def config(self) -> Config:
        path = self.folder / "cfg.yaml"
        values = {
            "run": {"dir": str(self.folder / "runs")},
            "model": {"path": str(self.model)},
            "data": {"train": str(self.rows)},
            "algorithm": "grpo",
            "reward": {"functions": ["arithmetic"]},
            "learner": {"device": "cpu"},
            "rollout": {"device": "cpu"},
        }
        path.write_text(yaml.safe_dump(values))
        return load_config(path, self.overrides)

    def closed_port(self) -> int:
        """A port at which no one listens: it is bound, and kept."""
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        self.open.append(bound)
        return int(bound.getsockname()[1])

    def reward(self, name: str) -> None:
        self.set(reward__functions=f"[{self.folder / 'rewards.py'}:{name}]")

    def tls(self, cert: Path, key: Path, authority: Path) -> None:
        self.set(security__tls_cert=cert, security__tls_key=key, security__tls_ca=authority)


Plant = Callable[[Ground], None]


def _port_taken(ground: Ground) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ground.open.append(listener)
    ground.set(network__port=listener.getsockname()[1])


def _one_port_twice(ground: Ground) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ground.set(network__port=port, network__metrics_port=port)


def _redis_with_wrong_settings(ground: Ground) -> None:
    ground.set(buffer__redis=f"unix://{ground.redis}")


def _redis_away(ground: Ground) -> None:
    ground.set(buffer__redis=f"redis://127.0.0.1:{ground.closed_port()}/0")


def _certificate(*, days: tuple[float, float] = (-1.0, 90.0), host: str = "127.0.0.1", signed: bool = True) -> Plant:
    def plant(ground: Ground) -> None:
        authority, other = Authority(ground.folder), Authority(ground.folder, "another")
        ground.tls(*authority.certify("service", host, days=days), (authority if signed else other).pem)

    return plant


def _key_of_another(ground: Ground) -> None:
    authority = Authority(ground.folder)
    cert, _ = authority.certify("service", days=(-1.0, 90.0))
    ground.tls(cert, authority.certify("other")[1], authority.pem)


def _token_open_to_others(ground: Ground) -> None:
    token = write_secret(ground.folder / "token")
    token.chmod(0o644)
    ground.set(security__token_file=token)


def _model_cut_off(ground: Ground) -> None:
    weights = ground.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-16])


def _no_tokenizer(ground: Ground) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (ground.model / name).unlink()


def _rows_without_truth(ground: Ground) -> None:
    ground.rows.write_text(json.dumps({"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {}}) + "\n")


def _reward_hangs(ground: Ground) -> None:
    ground.reward("hangs")
    ground.set(reward__scorer_timeout_s=0.5, reward__timeout_s=1)


def _no_reward_server(ground: Ground) -> None:
    ground.monkeypatch.setattr("rollmesh.doctor.before.rewards._CONNECT_S", 1.0)
    ground.set(reward__endpoints=f"[http://127.0.0.1:{ground.closed_port()}/base]")


def _hub_offline(ground: Ground) -> None:
    ground.monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ground.set(model__path="no-one/not-in-the-cache")


def _proxy(ground: Ground) -> None:
    ground.monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    ground.set(network__advertise="10.1.2.3")


def _advertised_loopback(ground: Ground) -> None:
    ground.set(network__host="0.0.0.0", network__advertise="localhost", security__allow_insecure="true")


def _unknown_name(ground: Ground) -> None:
    ground.set(network__advertise="nowhere.invalid")


def _open_without_token(ground: Ground) -> None:
    ground.set(network__host="0.0.0.0", network__advertise="10.1.2.3")


def _old_torch(ground: Ground) -> None:
    python = ground.folder / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(['3.11.9', {'torch': '1.13.1', 'rollmesh': '0.1.0'}])}'\n")
    python.chmod(0o755)
    ground.set(rollout__python=python)


def _no_interpreter(ground: Ground) -> None:
    ground.set(rollout__python=ground.folder / "nowhere" / "python")


def _no_device(ground: Ground) -> None:
    if has_driver():
        pytest.skip("there is a CUDA driver")
    ground.set(learner__device="cuda")


def _set(**values: object) -> Plant:
    return lambda ground: ground.set(**values)


FAULTS: dict[str, Plant] = {
    "port-taken": _port_taken,
    "one-port-twice": _one_port_twice,
    "redis-evicts": _redis_with_wrong_settings,
    "redis-too-small": _redis_with_wrong_settings,
    "redis-not-durable": _redis_with_wrong_settings,
    "redis-away": _redis_away,
    "certificate-expired": _certificate(days=(-9.0, -1.0)),
    "certificate-ends-soon": _certificate(days=(-1.0, 3.0)),
    "certificate-not-yet-valid": _certificate(days=(1.0, 90.0)),
    "certificate-of-another-host": _certificate(host="elsewhere.example"),
    "certificate-of-another-authority": _certificate(signed=False),
    "key-of-another-certificate": _key_of_another,
    "token-open-to-others": _token_open_to_others,
    "model-cut-off": _model_cut_off,
    "model-without-tokenizer": _no_tokenizer,
    "rows-without-ground-truth": _rows_without_truth,
    "reward-raises": lambda ground: ground.reward("raises"),
    "reward-hangs": _reward_hangs,
    "reward-missing": lambda ground: ground.reward("absent"),
    "reward-constant": lambda ground: ground.reward("constant"),
    "reward-server-away": _no_reward_server,
    "hub-offline": _hub_offline,
    "proxy-in-the-way": _proxy,
    "advertised-loopback": _advertised_loopback,
    "advertised-unknown-name": _unknown_name,
    "open-without-token": _open_without_token,
    "package-too-old": _old_torch,
    "interpreter-missing": _no_interpreter,
    "cuda-without-driver": _no_device,
    "too-many-threads": _set(resources__generator_threads=512),
    "too-few-fronts": _set(rollout__replicas=100_000),
    "disk-too-small": _set(logging__record="true", logging__record_max_bytes=1 << 60),
    "shm-too-small": _set(weights__transport="shm", weights__keep_versions=10**9),
    "memory-too-small": _set(rollout__replicas=2000),
    "algorithm-refused": _set(algorithm__correction="{mode: none}"),
}
"""By the id that the documentation's table gives each."""


@contextmanager
def wrong_redis(folder: Path) -> Iterator[Path]:
    """The socket of a Redis that evicts keys, is small, and writes nothing."""
    path = folder / "redis.sock"
    settings = {"--maxmemory-policy": "allkeys-lru", "--maxmemory": "64mb", "--appendonly": "no", "--save": ""}
    arguments = [part for pair in settings.items() for part in pair]
    command = [find_redis_server(), "--port", "0", "--unixsocket", str(path), "--dir", str(folder), *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        # The test's own time-out bounds the wait.
        assert any("eady to accept connections" in line for line in server.stdout)
        yield path
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()
        with suppress(FileNotFoundError):
            shutil.rmtree(folder / "appendonlydir")
