"""Makes what the services of `compose.yaml` prove themselves with: `python setup.py SECRETS --domain D [--tls on]`.

`SECRETS` has a folder for each service: a volume that only its container mounts. No service mounts `authority`, with
the mesh's token and the key of its certificate authority. Each start keeps the secrets that are there, and renews the
services' certificates. Files of services are open to every user of the container that mounts them, and of no other.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from rollmesh.buffer.redis_backend.acl import FRONT_COMMANDS
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
_CA_DAYS, _CERTIFICATE_DAYS = 3650, 365
# Keys and channels of all runs.
_REDIS_KEYS = "~{rollmesh:*}* ~rollmesh:* resetchannels &{rollmesh:*}:*"
# No one can log in as this user. Redis reads its append-only file in its name, and needs its rights for that.
_REDIS_DEFAULT = "user default off resetpass ~* &* +@all"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--domain", required=True, help="of the containers' network: generators are HOST.DOMAIN")
    parser.add_argument("--tls", choices=("on", "off"), default="off")
    parser.add_argument("--prometheus", type=Path, help="its configuration, as it is without TLS")
    options = parser.parse_args()
    make_secrets(options.folder)
    if options.tls == "on":
        make_certificates(options.folder, options.domain)
    else:
        remove_certificates(options.folder)
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
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("rollmesh")
        ca = x509.BasicConstraints(ca=True, path_length=0)
        _write(key_file, _key_pem(key))
        _write(ca_file, _signed(name, key, name, key, _CA_DAYS, ca))
    key = _private(load_pem_private_key(key_file.read_bytes(), password=None))
    ca_pem = ca_file.read_text(encoding="utf-8")
    issuer = x509.load_pem_x509_certificate(ca_pem.encode()).subject
    for service in MEMBERS:
        own = ec.generate_private_key(ec.SECP256R1())
        # Replicas share a certificate: each is reached under the name of its container.
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in (service, f"*.{domain}", "localhost")])
        _write(folder / service / "tls.key", _key_pem(own))
        _write(folder / service / "tls.crt", _signed(_name(service), own, issuer, key, _CERTIFICATE_DAYS, names))
    for reader in (*MEMBERS, "prometheus"):
        _write(folder / reader / "ca.crt", ca_pem)


def remove_certificates(folder: Path) -> None:
    """Leaves no service with a certificate: each speaks TLS if it has one."""
    for service in (*MEMBERS, "prometheus"):
        for name in ("tls.key", "tls.crt", "ca.crt"):
            (folder / service / name).unlink(missing_ok=True)


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


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _private(key: object) -> ec.EllipticCurvePrivateKey:
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _signed(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: int,
    extension: x509.BasicConstraints | x509.SubjectAlternativeName,
) -> str:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    # Clocks of hosts differ.
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    critical = isinstance(extension, x509.BasicConstraints)
    signed = builder.add_extension(extension, critical).sign(issuer_key, hashes.SHA256())
    return signed.public_bytes(Encoding.PEM).decode()


if __name__ == "__main__":
    main()
