"""Makes the Secrets of a mesh in Kubernetes: `python deploy/kubernetes/make_secrets.py FOLDER | kubectl apply -f -`.

Each role gets a grant of its own; the mesh's token stays in FOLDER and is in no Secret. FOLDER keeps what is in it: a
second call gives the same Secrets.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from rollmesh.buffer.redis_backend.acl import FRONT_COMMANDS
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.access.secret import new_token, parse_secret
from rollmesh.mesh.private_files import private_folder

NAMESPACE = "rollmesh"
_MEMBERS = {"buffer": Role.BUFFER, "reward": Role.REWARD, "generator": Role.GENERATOR, "learner": Role.LEARNER}
# Keys and channels of all runs.
_REDIS_KEYS = "~{rollmesh:*}* ~rollmesh:* resetchannels &{rollmesh:*}:*"
# No one can log in as this user. Redis reads its append-only file in its name, and needs its rights for that.
_REDIS_DEFAULT = "user default off resetpass ~* &* +@all"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the mesh's token and all that is made from it")
    parser.add_argument("--namespace", default=NAMESPACE)
    options = parser.parse_args()
    os.umask(0o077)
    manifests = [manifest(name, options.namespace, files) for name, files in make_secrets(options.folder).items()]
    yaml.safe_dump_all(manifests, sys.stdout, sort_keys=False)


def make_secrets(folder: Path) -> dict[str, dict[str, str]]:
    """The files of each Secret, by their names.

    Args:
        folder: for the user alone; made where it is not there.
    """
    private_folder(folder)
    mesh_key = parse_secret(_kept(folder / "mesh.token", new_token), "mesh.token").mesh_key
    assert mesh_key is not None, "the token itself"

    def grant(role: Role) -> str:
        return _kept(folder / f"{role}.grant", lambda: mesh_key.grant_file(role, "", 0.0))

    metrics = {"metrics.key": _kept(folder / "metrics.key", new_token)}
    password = _kept(folder / "redis.password", new_token)
    digest = hashlib.sha256(password.encode()).hexdigest()
    commands = " ".join(f"+{command}" for command in FRONT_COMMANDS)
    made = {name: {"grant": grant(role), **metrics} for name, role in _MEMBERS.items()}
    # For `rollmesh status` and `rollmesh ledger` in a pod of the buffer.
    made["buffer"] |= {"redis.password": password, "observer.grant": grant(Role.OBSERVER)}
    made["redis"] = {"users.acl": f"{_REDIS_DEFAULT}\nuser rollmesh on #{digest} {_REDIS_KEYS} -@all {commands}\n"}
    # For Prometheus.
    made["metrics"] = metrics
    return made


def manifest(name: str, namespace: str, files: dict[str, str]) -> dict[str, object]:
    """A Secret."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "rollmesh"}},
        "type": "Opaque",
        "stringData": files,
    }


def _kept(path: Path, make: Callable[[], str]) -> str:
    """The content of a file, made where it is not there."""
    if not path.exists():
        path.write_text(make(), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


if __name__ == "__main__":
    main()
