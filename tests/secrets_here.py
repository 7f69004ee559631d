"""Secrets of the tests' meshes, in files as a user keeps them; and where they were told to others."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

TOKEN = "a token of the tests: no one else has it"
# Settings that name a file with a secret; but for Redis' password, which an embedded Redis tells no one.
_FILES = {
    "token": "--security.token_file={}",
    "endpoint": "--security.endpoint_key_file={}",
    "metrics": "--security.metrics_key_file={}",
    "telemetry": "--security.telemetry_key_file={}",
    # Keys of servers that no client asks.
    "reward": "--reward.key_files={{'grpc://127.0.0.1:9': {}}}",
    "judge": "--reward.judge={{base_url: 'https://127.0.0.1:9/v1', model: m, api_key_file: {}}}",
    "server": "--rollout.sglang={{address: 'http://127.0.0.1:9', key_file: {}}}",
}
_VARIABLES = ("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")


@dataclass(frozen=True)
class Planted:
    """A secret in every place of a run that takes one, and all trackers on.

    Attributes:
        texts: the secrets, by place.
        arguments: of `rollmesh run`.
        environment: of it, too.
        token_file: of the mesh.
    """

    texts: dict[str, str]
    arguments: list[str]
    environment: dict[str, str]
    token_file: Path


def plant(folder: Path) -> Planted:
    """Plants them.

    Args:
        folder: for the files, outside of the run's.
    """
    texts = {place: f"planted-{place}-{secrets.token_hex(16)}" for place in (*_FILES, *_VARIABLES)}
    # A key of the form that W&B wants.
    texts["WANDB_API_KEY"] = secrets.token_hex(20)
    files = {place: write_secret(folder / f"{place}.secret", texts[place]) for place in _FILES}
    arguments = [form.format(files[place]) for place, form in _FILES.items()]
    arguments += ["--logging.wandb=true", "--logging.tensorboard=true"]
    variables = {name: texts[name] for name in (*_VARIABLES, "WANDB_API_KEY")}
    return Planted(texts, arguments, {**variables, "WANDB_MODE": "offline"}, files["token"])


def told(texts: Collection[str], folder: Path, started: Iterable[int] = (), shown: Iterable[str] = ()) -> list[str]:
    """Where one of the secrets stands.

    Args:
        texts: the secrets.
        folder: whose files are searched.
        started: process ids whose command lines are searched, with those of their children.
        shown: what was written or answered.
    """
    seen = [text[:500] for text in shown if any(secret in text for secret in texts)]
    lines = [" ".join(line) for line in processes_with(texts, *started)]
    return [*files_with(texts, folder), *lines, *seen]


def write_secret(path: Path, text: str = TOKEN) -> Path:
    """A file for its owner alone."""
    path.touch(0o600)
    path.write_text(f"{text}\n")
    return path


def files_with(secrets: Collection[str], folder: Path) -> list[str]:
    """The files of a folder in which one of the secrets stands."""
    wanted = [secret.encode() for secret in secrets]
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [str(path.relative_to(folder)) for path, text in contents.items() if any(one in text for one in wanted)]


def processes_with(secrets: Collection[str], *started: int) -> list[list[str]]:
    """The command lines, of processes that a test has started and of their children, in which a secret stands."""
    parents = [psutil.Process(pid) for pid in started]
    family = [*parents, *(child for parent in parents for child in parent.children(recursive=True))]
    lines = [process.cmdline() for process in family]
    assert all(lines), "each was alive"
    return [line for line in lines if any(secret in argument for argument in line for secret in secrets)]
