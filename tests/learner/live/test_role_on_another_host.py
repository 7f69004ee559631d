"""A role on a host of its own, with TLS and a grant for roles alone: its run is like any other, strangers stay out."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.netns import far_host
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.errors import UnauthenticatedError
from tests.certificates import Authority
from tests.learner.live.role_process import RoleProcess, served, write_config
from tests.learner.live.test_runs import assert_nothing_twice, ledger, records
from tests.learner.live.tiny import make_config, mesh_of, run_learner
from tests.secrets_here import TOKEN, write_secret

STEPS = 2
ANOTHER = "the token of another mesh, which is long enough"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2")
def test_a_teacher_on_another_host_serves_its_learner_and_no_stranger_joins(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    grant = write_secret(tmp_path / "grant", MeshKey(TOKEN).grant_file(Role.MODEL))
    foreign = write_secret(tmp_path / "foreign", MeshKey(ANOTHER).grant_file(Role.MODEL))
    with ExitStack() as closers:
        host = closers.enter_context(far_host(1e9))
        near, far = authority.certify("near", host.near, "127.0.0.1"), authority.certify("far", host.far)
        changes = {
            "learner.roles": {"teacher": {"at": "elsewhere"}},
            "algorithm.name": "on_policy_distillation",
            "learner.steps": STEPS,
            "data.eval": None,
            "reward": {"functions": ["none"], "in_process": True},
            "network.host": host.near,
            "security": {
                "token_file": str(write_secret(tmp_path / "token")),
                "tls_ca": str(authority.pem),
                "tls_client_ca": str(authority.pem),
                "tls_cert": str(near[0]),
                "tls_key": str(near[1]),
            },
        }
        config = make_config(tmp_path, changes)
        write_config(config, tmp_path)
        mesh = closers.enter_context(mesh_of(config))
        own = ["--host", host.far, f"--security.tls_cert={far[0]}", f"--security.tls_key={far[1]}"]

        def start(log_name: str, token_file: Path) -> RoleProcess:
            arguments = [*own, f"--security.token_file={token_file}"]
            place = {"namespace": host.namespace, "log_name": log_name}
            role = RoleProcess("teacher", mesh, tmp_path, arguments=arguments, **place)
            return closers.enter_context(served(role))

        teacher, stranger = start("teacher", grant), start("stranger", foreign)
        assert run_learner(config, mesh) == 0, teacher.log()
        assert ledger(mesh, security=config.security).recounted.trained == STEPS * 4
        assert teacher.process.wait(60) == 0, teacher.log()
        assert f"serving role teacher at {host.far}:" in teacher.log()
        assert stranger.process.wait(60) == UnauthenticatedError.exit_code, stranger.log()
        last = stranger.log().splitlines()[-1]
        assert "role-teacher" in last
        assert "the credential was granted by another mesh" in last
    steps = [record for record in records(config) if "distillation/reverse_kl" in record]
    assert len(steps) == STEPS
    assert_nothing_twice(config)
