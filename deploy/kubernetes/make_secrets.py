"""Makes a mesh's Secrets: `python -m deploy.kubernetes.make_secrets FOLDER | kubectl apply -f -`.

They hold what the containers of `compose.yaml` are given: a grant for each role, keys, and the password of Redis. The
mesh's token stays in FOLDER and is in no Secret. FOLDER keeps what is in it: a second call gives the same Secrets.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import yaml

from deploy.containers.setup import make_secrets
from rollmesh.mesh.private_files import private_folder

NAMESPACE = "rollmesh"
# Secrets, and the folders that their files are made in. The last one is for Prometheus.
SECRETS = {name: name for name in ("redis", "buffer", "reward", "generator", "learner")} | {"metrics": "prometheus"}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the mesh's token and all that is made from it")
    parser.add_argument("--namespace", default=NAMESPACE)
    options = parser.parse_args()
    os.umask(0o077)
    private_folder(options.folder)
    make_secrets(options.folder)
    made = [manifest(name, options.namespace, options.folder / folder) for name, folder in SECRETS.items()]
    yaml.safe_dump_all(made, sys.stdout, sort_keys=False)


def manifest(name: str, namespace: str, folder: Path) -> dict[str, object]:
    """A Secret of the files in a folder."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "rollmesh"}},
        "type": "Opaque",
        "stringData": {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())},
    }


if __name__ == "__main__":
    main()
