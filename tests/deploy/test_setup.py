"""`setup` of the containers makes secrets, certificates, rights in Redis and Prometheus' configuration."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as RedisConnectionError

from deploy.containers import setup
from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.embedded import find_redis_server
from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.access.secret import parse_secret
from rollmesh.mesh.config.redis_url import RedisOptions
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from tests.deploy.containers import DEPLOY, MEMBERS, composed

SERVICES = composed()["services"]
PROMETHEUS = DEPLOY / "observability" / "prometheus.yaml"
DOMAIN = "demo.mesh"


def run(folder: Path, tls: str = "off") -> None:
    for name in composed()["volumes"]:
        (folder / name.removesuffix("-secrets")).mkdir(parents=True, exist_ok=True)
    arguments = ["setup.py", str(folder), "--domain", DOMAIN, "--tls", tls, "--prometheus", str(PROMETHEUS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        setup.main()


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text().strip() for path in folder.rglob("*") if path.is_file()}


def test_each_service_gets_a_grant_of_its_role_and_a_second_start_keeps_all(tmp_path: Path) -> None:
    run(tmp_path)
    made = contents(tmp_path)
    token = parse_secret(made["authority/mesh.token"], "token")
    for name in (*MEMBERS, "dashboard"):
        grant = parse_secret(made[f"{name}/grant"], name)
        assert grant.granted is not None
        assert grant.granted[0].role == ("observer" if name == "dashboard" else name)
        assert grant.mesh == token.mesh
        assert made[f"{name}/metrics.key"] == made["prometheus/metrics.key"]
    run(tmp_path)
    again = contents(tmp_path)
    assert {name for name in made if again[name] != made[name]} == {
        f"{name}/tls.{kind}" for name in (*MEMBERS, "dashboard") for kind in ("crt", "key")
    }
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert {path for path, mode in modes.items() if mode != 0o644} == set((tmp_path / "authority").iterdir())
    assert read_secret(tmp_path / "authority" / "mesh.token", "--token-file") == made["authority/mesh.token"]


def test_certificates_hold_for_the_names_of_services_and_their_replicas(tmp_path: Path) -> None:
    run(tmp_path)
    authority = (tmp_path / "authority" / "ca.crt").read_text()
    for host in ("generator", f"0ffde52763c0.{DOMAIN}", "localhost"):
        assert handshake(tmp_path / "generator", host)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'buffer'"):
        handshake(tmp_path / "generator", "buffer")
    run(tmp_path)
    assert (tmp_path / "authority" / "ca.crt").read_text() == authority, "services that run trust it"
    assert not (tmp_path / "learner" / "ca.key").exists()


def handshake(secrets: Path, host: str) -> str | None:
    """Between a server with a certificate and a client that trusts its authority; returns the protocol."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(secrets / "tls.crt", secrets / "tls.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        ssl.create_default_context(cafile=str(secrets / "ca.crt")).wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for end in (*ends, *ends):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[0].version()


@pytest.mark.parametrize("tls", ["off", "on"])
def test_prometheus_asks_every_service_as_it_serves(tmp_path: Path, tls: str) -> None:
    run(tmp_path, tls)
    path = tmp_path / "prometheus" / "prometheus.yaml"
    jobs = yaml.safe_load(path.read_text())["scrape_configs"]
    assert {job["job_name"] for job in jobs} == set(MEMBERS)
    for job in jobs:
        assert job["dns_sd_configs"][0]["names"] == [job["job_name"]]
        assert job["scheme"] == ("https" if tls == "on" else "http")
        assert job["authorization"] == {"credentials_file": "/run/secrets/metrics.key"}
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here (make system-packages)")
    # It reads the files that the configuration names.
    (tmp_path / "alerts.yaml").write_text("groups: []\n")
    text = path.read_text().replace("/run/secrets", str(tmp_path / "prometheus"))
    path.write_text(text.replace("/etc/observability", str(tmp_path)))
    checked = subprocess.run([promtool, "check", "config", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_grafana_is_given_what_is_there() -> None:
    provisioning = DEPLOY / "observability" / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioning / "datasources" / "rollmesh.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "rollmesh.yaml").read_text())["providers"]
    mounted = SERVICES["grafana"]["volumes"]
    assert "./observability:/etc/observability:ro" in mounted
    assert "./observability/grafana/provisioning:/etc/grafana/provisioning:ro" in mounted
    assert provider["options"]["path"].startswith("/etc/observability/grafana/")


async def test_redis_knows_the_buffer_alone_and_lets_it_do_no_more_than_it_needs(tmp_path: Path) -> None:
    """The command of its container, without a container."""
    run(tmp_path)
    password_file = private(tmp_path / "buffer" / "redis.password")
    with serving_redis(tmp_path) as (server, port):
        access = RedisAccess(
            f"redis://rollmesh@127.0.0.1:{port}/0",
            "{rollmesh:demo}",
            options=RedisOptions(password_file=password_file),
        )
        stranger = RedisAccess(f"redis://127.0.0.1:{port}/0", "{rollmesh:demo}")
        try:
            await loaded(access)
            await access.check_acl(Keys("demo").payload("train", "none", 0, 0))
            with pytest.raises(StoreError, match="refuses this user: NOAUTH"):
                await stranger.wait_until_loaded(1)
            for harmful in ("CONFIG", "GET", "*"), ("MODULE", "LIST"), ("FLUSHALL",), ("KEYS", "*"):
                with pytest.raises(StoreError, match="does not let this user"):
                    await access.batch([harmful])
            password = password_file.read_text().strip()
            assert password not in " ".join(psutil.Process(server.pid).cmdline())
            assert password not in (tmp_path / "redis" / "users.acl").read_text()
        finally:
            await access.close()
            await stranger.close()


async def test_redis_that_was_killed_has_what_scripts_wrote(tmp_path: Path) -> None:
    """Redis 7 reads its file in the name of its default user, which drops what this user may not do."""
    run(tmp_path)
    assert "user default off resetpass ~* &* +@all\n" in (tmp_path / "redis" / "users.acl").read_text()
    password = (tmp_path / "buffer" / "redis.password").read_text().strip()
    script = "redis.call('SET', KEYS[1], 'a') return redis.call('HSET', KEYS[2], 'field', 'b')"
    keys = ["{rollmesh:demo}:one", "{rollmesh:demo}:two"]
    for found in (False, True):
        with serving_redis(tmp_path) as (server, port):
            async with Redis(port=port, username="rollmesh", password=password) as client:
                await answering(client)
                if not found:
                    await client.evalsha(await client.script_load(script), 2, *keys)
                assert await client.get(keys[0]) == b"a"
                assert await client.hget(keys[1], "field") == b"b"
            server.kill()


async def loaded(access: RedisAccess) -> None:
    async with asyncio.timeout(180):
        while True:
            with suppress(StoreError):
                return await access.wait_until_loaded(30)
            await asyncio.sleep(0.02)


async def answering(client: Redis) -> None:
    async with asyncio.timeout(180):
        while True:
            with suppress(RedisConnectionError, BusyLoadingError):
                await client.info()
                return
            await asyncio.sleep(0.02)


@contextmanager
def serving_redis(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = SERVICES["redis"]["command"].replace("/run/secrets", str(folder / "redis"))
    command = command.replace("--dir /data", f"--dir {folder} --bind 127.0.0.1 --port {port}")
    binaries = str(Path(find_redis_server()).parent)
    environment = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"}
    server = subprocess.Popen(die_with_parent(command.split()), env=environment, stdout=subprocess.DEVNULL)
    try:
        yield server, port
    finally:
        server.terminate()
        server.wait()


def private(path: Path) -> Path:
    """Outside of /run/secrets others must not be able to read it."""
    path.chmod(0o600)
    return path
