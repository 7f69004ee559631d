"""A file that a service cannot read is named before anything else is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret_files import check_keys, check_security
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from tests.certificates import Authority
from tests.secrets_here import write_secret

ME = Identity(Role.GENERATOR)


def test_each_file_of_a_service_is_looked_at(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path, "ours").certify("service")
    file, none = write_secret(tmp_path / "secret"), tmp_path / "none"
    keys = dict.fromkeys(("token_file", "endpoint_key_file", "metrics_key_file"), file)
    given = {**keys, "tls_cert": cert, "tls_key": key, "tls_ca": cert, "tls_client_ca": cert}
    check_security(SecuritySection(**given), ME, endpoint=True)
    for name in given:
        with pytest.raises(ConfigError, match=rf"security\.{name} {none}"):
            check_security(SecuritySection(**{**given, name: none}), ME, endpoint=True)
    check_security(SecuritySection(**{**given, "endpoint_key_file": none}), ME, endpoint=False)


def configured(**sections: object) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, **sections})


def test_keys_of_other_servers_are_looked_at(tmp_path: Path) -> None:
    file, none = write_secret(tmp_path / "secret"), tmp_path / "none"
    for path, wrong in ((file, None), (none, "key_file")):
        judge = configured(reward={"endpoints": ["grpc://a:1"], "key_files": {"grpc://a:1": str(path)}})
        server = configured(rollout={"sglang": {"address": "http://a:1", "key_file": str(path)}})
        for config in (judge, server):
            if wrong is None:
                check_keys(config)
                continue
            with pytest.raises(ConfigError, match=rf"(reward\.key_files.grpc://a:1|sglang\.key_file) {none}"):
                check_keys(config)
