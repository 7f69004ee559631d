"""Makes what the services of `compose.yaml` prove themselves with: `python setup.py SECRETS --domain D`.

`SECRETS` has a folder for each service: a volume that only its container mounts. No service mounts `authority`, with
the mesh's token and the key of its certificate authority. Each start keeps the secrets that are there, and renews the
services' certificates, which a mesh with TLS uses. Files of services are open to every user of the container that
mounts them, and of no other.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rollmesh.buffer.redis_backend.acl import FRONT_COMMANDS
from rollmesh.mesh.access.certificates import CertificateAuthority
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.access.secret import new_token, parse_secret

# The services of the mesh, and the role of each.
MEMBERS = {
    "buffer": Role.BUFFER,
    "reward": Role.REWARD,
    "learner": Role.LEARNER,
    "generator": Role.GENERATOR,
    "dashboard": Role.OBSERVER,
}
# Keys and channels of all runs.
_REDIS_KEYS = "~{rollmesh:*}* ~rollmesh:* resetchannels &{rollmesh:*}:*"
# No one can log in as this user. Redis reads its append-only file in its name, and needs its rights for that.
_REDIS_DEFAULT = "user default off resetpass ~* &* +@all"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--domain", required=True, help="of the containers' network: generators are HOST.DOMAIN")
    parser.add_argument("--tls", choices=("on", "off"), default="off", help="how Prometheus asks the services")
    parser.add_argument("--prometheus", type=Path, help="its configuration, as it is without TLS")
    options = parser.parse_args()
    make_secrets(options.folder)
    make_certificates(options.folder, options.domain)
    if options.prometheus is not None:
        text = scrape_configuration(options.prometheus.read_text(encoding="utf-8"), tls=options.tls == "on")
        (options.folder / "prometheus" / "prometheus.yaml").write_text(text, encoding="utf-8")


def make_secrets(folder: Path) -> None:
    """Token, grants, keys and passwords, each where it is used; those that are there already are kept."""
    token = _kept(folder / "authority" / "mesh.token", new_token)
    mesh_key = parse_secret(token, "mesh.token").mesh_key
    assert mesh_key is not None, "the token itself"
    for service, role in MEMBERS.items():
        _kept(folder / service / "grant", partial(mesh_key.grant_file, role, "", 0.0))
    # For `rollmesh status` and `rollmesh ledger` in that container.
    _kept(folder / "buffer" / "observer.grant", partial(mesh_key.grant_file, Role.OBSERVER, "", 0.0))
    metrics = _kept(folder / "authority" / "metrics.key", new_token)
    for service in (*MEMBERS, "prometheus"):
        _write(folder / service / "metrics.key", metrics)
    _kept(folder / "generator" / "endpoint.key", new_token)
    _kept(folder / "dashboard" / "page.key", new_token)
    _kept(folder / "grafana" / "admin.password", lambda: secrets.token_urlsafe(12))
    password = _kept(folder / "buffer" / "redis.password", new_token)
    digest = hashlib.sha256(password.encode()).hexdigest()
    commands = " ".join(f"+{command}" for command in FRONT_COMMANDS)
    front = f"user rollmesh on #{digest} {_REDIS_KEYS} -@all {commands}"
    _write(folder / "redis" / "users.acl", f"{_REDIS_DEFAULT}\n{front}")


def make_certificates(folder: Path, domain: str) -> None:
    """A certificate for each service, under the mesh's own authority, which is made once."""
    key_file, ca_file = folder / "authority" / "ca.key", folder / "authority" / "ca.crt"
    if not ca_file.exists():
        made = CertificateAuthority.new("rollmesh")
        _write(key_file, made.key_pem.decode())
        _write(ca_file, made.pem.decode())
    authority = CertificateAuthority.load(ca_file, key_file)
    for service in MEMBERS:
        # Replicas share a certificate: each is reached under the name of its container.
        issued = authority.issue(service, (service, f"*.{domain}", "localhost"))
        _write(folder / service / "tls.key", issued.key_pem.decode())
        _write(folder / service / "tls.crt", issued.pem(authority.pem).decode())
    for reader in (*MEMBERS, "prometheus"):
        _write(folder / reader / "ca.crt", authority.pem.decode())


def scrape_configuration(text: str, *, tls: bool) -> str:
    """Prometheus' configuration, whose jobs are named for services, with TLS or without."""
    config: dict[str, Any] = yaml.safe_load(text)
    if tls:
        for job in config["scrape_configs"]:
            # Replicas are asked under their addresses, which no certificate has.
            job["tls_config"] = {"ca_file": "/run/secrets/ca.crt", "server_name": job["job_name"]}
            job["scheme"] = "https"
    return yaml.safe_dump(config, sort_keys=False)


def _kept(path: Path, make: Callable[[], str]) -> str:
    if not path.exists():
        _write(path, make())
    return path.read_text(encoding="utf-8").strip()


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a container may be reading what is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text(f"{text.strip()}\n", encoding="utf-8")
    # Root alone reads the authority's: as `rollmesh token grant` asks of a token.
    draft.chmod(0o600 if path.parent.name == "authority" else 0o644)
    draft.replace(path)


if __name__ == "__main__":
    main()
