"""Ways to reach Redis: URLs, passwords, TLS, the rights of an ACL user, deadlines on slow links."""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import uvloop

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.connection import RedisConnection
from rollmesh.buffer.redis_backend.embedded import find_redis_server
from rollmesh.buffer.redis_backend.scripts import commands_of, load_scripts
from rollmesh.mesh.config.redis_url import RedisOptions, parse_redis_url
from rollmesh.mesh.errors import ConfigError, StoreError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh, make_config, make_failure, refs
from tests.buffer.redis_proxy import Proxy
from tests.buffer.test_flow import balanced
from tests.repository import REPOSITORY
from tests.secrets_here import write_secret

OPERATIONS = REPOSITORY / "docs" / "operations.md"
Opener = Callable[..., RedisAccess]
# Connections that are reset, at one moment or another of their beginning.
ATTEMPTS = 300


@pytest.fixture
async def open_access() -> AsyncIterator[Opener]:
    """Makes accesses to a run, `r` as a rule, and closes them."""
    async with AsyncExitStack() as stack:

        def make(
            url: str,
            options: RedisOptions | None = None,
            timeout_s: float = TIMEOUT_S,
            *,
            run_key: str = "{rollmesh:r}",
        ) -> RedisAccess:
            access = RedisAccess(url, run_key, timeout_s=timeout_s, options=options)
            stack.push_async_callback(access.close)
            return access

        yield make


# ---------------------------------------------------------------------------------------------------------- URLs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://a", {"hosts": (("a", 6379),), "cluster": False, "tls": False}),
        ("redis://u:p%40%2F@a:1/2?client_name=me", {"db": 2, "login": ("u", "p@/"), "client_name": "me"}),
        ("redis://:p@[::1]:5?db=3", {"hosts": (("::1", 5),), "db": 3, "login": ("p",)}),
        ("redis://u@a", {"login": ("u", "")}),
        ("rediss://a", {"tls": True, "login": None}),
        ("unix://u:p@/run/redis.sock?db=1", {"path": "/run/redis.sock", "hosts": (), "db": 1, "login": ("u", "p")}),
        ("redis-cluster://u:p@a:1,b,[::2]:3", {"hosts": (("a", 1), ("b", 6379), ("::2", 3)), "cluster": True}),
        ("rediss-cluster://a:1,b:2/0", {"cluster": True, "tls": True, "db": 0}),
    ],
)
def test_urls_mean_what_they_say(url: str, expected: dict[str, Any]) -> None:
    address = parse_redis_url(url)
    found = {name: address.login() if name == "login" else getattr(address, name) for name in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://a", "unknown scheme"),
        ("rediss-clusters://a", "did you mean rediss-cluster://"),
        ("a:6379", "unknown scheme"),
        ("redis://", "host is missing"),
        ("redis://hunter2@a:0", "port from 1 to 65535"),
        ("redis://a:99999", "port from 1 to 65535"),
        ("redis://u:hunter2/x@a", "port from 1 to 65535"),
        ("redis://a,b", "several hosts"),
        ("redis-cluster://a:1,", "host is missing"),
        ("redis-cluster://a/1", "only database 0"),
        ("redis-cluster://u:hunter2@a,u:hunter2@b", "more than one '@'"),
        ("redis://a/x", "database is no number"),
        ("redis://a/1?db=1", "database is given twice"),
        ("redis://a?dbs=1", "did you mean db"),
        ("redis://a?socket_timeout=1", "network.rpc_timeout_s"),
        ("redis://a?password=hunter2", "buffer.redis_password_file"),
        ("redis://u:hunter2@a", "it holds a password"),
        ("unix://:hunter2@/run/redis.sock", "it holds a password"),
        ("rediss-cluster://:hunter2@a,b", "it holds a password"),
        ("redis://u:hunter#2@a", "%23"),
        ("redis://[::1", "no URL"),
        ("unix://host/path", "path alone"),
        ("redis://a?ssl_ca_certs=/x", "use rediss://"),
        ("rediss://a?ssl_certfile=/x", "give both"),
        ("rediss://a?ssl_check_hostname=maybe", "neither true nor false"),
    ],
)
def test_urls_that_cannot_be_are_refused_with_the_configuration(tmp_path: Path, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        make_config(tmp_path, url)
    assert "hunter" not in str(caught.value), "a message shows no password"


@pytest.mark.parametrize(
    ("url", "settings", "words"),
    [
        (None, {"redis_tls_ca": "/x"}, "without buffer.redis"),
        ("redis://a", {"redis_tls_ca": "/x"}, "use rediss://"),
        ("rediss://a?ssl_ca_certs=/x", {"redis_tls_ca": "/x"}, "twice"),
        ("rediss://a", {"redis_tls_key": "/x"}, "give both"),
    ],
)
def test_settings_beside_the_url_must_agree_with_it(
    tmp_path: Path, url: str | None, settings: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_config(tmp_path, buffer={"redis": url, **settings})


def test_files_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    write_secret(tmp_path / "empty", "")
    for name in ("missing", "empty"):
        options = RedisOptions(password_file=tmp_path / name)
        with pytest.raises(ConfigError, match="redis_password_file"):
            parse_redis_url("redis://a", options).login()


# ---------------------------------------------------------------------------------------------------------- rights


def documented(run_name: str, password: str) -> list[str]:
    """The command of the manual, for a run."""
    found = re.search(r"^ACL SETUSER rollmesh .*?(?=^```)", OPERATIONS.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return (
        found[0]
        .replace("RUN", run_name)
        .replace("PASSWORD", password)
        .replace("SETUSER rollmesh", "SETUSER u-" + run_name)
        .split()
    )


def as_user(url: str, login: str) -> str:
    """The URL with another login."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{login}@{rest.rpartition('@')[2]}"


@asynccontextmanager
async def user(redis_url: str, run_name: str, password: str) -> AsyncIterator[Callable[..., Any]]:
    """The user of the manual; yields a call that changes its rights."""
    admin = redis.asyncio.Redis.from_url(redis_url)
    name = f"u-{run_name}"
    try:
        await admin.execute_command(*documented(run_name, password))
        yield lambda *words: admin.execute_command("ACL", "SETUSER", name, *words)
    finally:
        await admin.execute_command("ACL", "DELUSER", name)
        await admin.aclose()


async def test_the_documented_rights_are_enough_for_a_run(
    mesh: Mesh, redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password = secrets.token_hex(8)
    secret = write_secret(tmp_path / "secret", password)
    config = make_config(tmp_path)
    name = config.run.name
    url = as_user(redis_url, f"u-{name}")
    config = make_config(tmp_path, url, run={"name": name}, buffer={"redis": url, "redis_password_file": str(secret)})
    async with user(redis_url, name, password):
        left, right = await mesh.front(config), await mesh.front(config)
        learner, generator = await mesh.learner(left), await mesh.generator(right)
        admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
        admission.update(4, PolicyVersion(1, 0))
        await learner.seed(1, 8)
        grants = await generator.grants(admission, 4)
        await writer.write([make_failure(grants[0], m) for m in range(2)])
        await generator.client.release(
            "train", generator.agent.member_id, generator.agent.generation, refs(grants[1:2])
        )
        await generator.finish(writer, grants[2:], PolicyVersion(1, 0))
        groups = await learner.batch(sampler, 2, 0)
        members = [pb.MemberRef(group_id=g.group_id, member=0) for g in groups]
        assert len([payload async for payload in learner.client.fetch("train", members)]) == 2
        assert (await learner.train(groups[:1], 0)).claimed
        await learner.client.nack("train", 1, refs(groups[1:]), pb.NACK_DISPOSITION_FILTER, "test")
        await learner.client.commit("train", 1, 1)
        await learner.agent.leave()
        again = await mesh.learner(right, 1)
        counts = await balanced(again)
        assert (counts.trained, counts.filtered, counts.failed) == (1, 1, 1)
        trash = f"{{rollmesh:{name}}}:train:trash"
        async with asyncio.timeout(TIMEOUT_S):
            while (await left.access.batch([("SRANDMEMBER", trash, 1)]))[0]:
                await asyncio.sleep(0.02)
        for front in list(mesh._services):
            await mesh.stop_front(front)
    assert "does not let this user" not in caplog.text


async def test_each_missing_right_is_named_before_anything_is_done(redis_url: str, open_access: Opener) -> None:
    url = as_user(redis_url, "u-r:secret")
    scripts = commands_of(load_scripts())
    assert {"HSET", "ZADD", "PUBLISH", "TIME", "INFO"} <= set(scripts)
    async with user(redis_url, "r", "secret") as change:
        access = open_access(url)
        await access.check_acl("rollmesh:r:x")
        for command in (*scripts, "SET", "MGET", "UNLINK", "EVALSHA"):
            await change(f"-{command.lower()}")
            with pytest.raises(StoreError, match=rf"let this user run {command}\b") as caught:
                await access.check_acl("rollmesh:r:x")
            assert "operations.md" in caught.value.hint
            await change(f"+{command.lower()}")
        await change("-zadd")
        with pytest.raises(StoreError, match="run ZADD in join"):
            await access.run_script("join", "", "member", 1, "description", 0, 1)
        await change("+zadd", "resetchannels")
        with pytest.raises(StoreError, match="run PUBLISH"):
            await access.check_acl("rollmesh:r:x")
        with pytest.raises(StoreError, match="run SET"):
            await access.batch([("SET", "rollmesh:other:x", "1")])
        with pytest.raises(StoreError, match="run EVALSHA"):
            await open_access(url, run_key="{rollmesh:other}").run_script("read_table", "train")


async def test_a_wrong_password_is_named(redis_url: str, open_access: Opener) -> None:
    async with user(redis_url, "w", "right"):
        with pytest.raises(StoreError, match="refuses this user"):
            await open_access(as_user(redis_url, "u-w:wrong")).load()


async def test_who_gives_up_during_the_greeting_leaves_no_connection() -> None:
    greeted, closed = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            greeted.set()
        closed.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        wire = RedisConnection(parse_redis_url(f"redis://:password@127.0.0.1:{port}/0"), TIMEOUT_S)
        sending = asyncio.create_task(wire.send([("PING",)]))
        async with asyncio.timeout(TIMEOUT_S):
            await greeted.wait()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await closed.wait()


def test_a_subscription_that_is_reset_while_it_begins_is_a_typed_error() -> None:
    """On the loop of the services, whose transports fail in words of their own once they are closed."""

    async def attempts(port: int) -> None:
        access = RedisAccess(f"redis://127.0.0.1:{port}/0", "run", timeout_s=TIMEOUT_S)
        for _ in range(ATTEMPTS):
            with pytest.raises(StoreError, match="unreachable"):
                async with access.subscribed("channel"):
                    pass
        await access.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_reset_all, args=(server,), daemon=True).start()
        uvloop.run(attempts(server.getsockname()[1]))


def _reset_all(server: socket.socket) -> None:
    for number in range(ATTEMPTS):
        connection, _ = server.accept()
        # Between the moment in which a client is connected and that in which it begins to speak.
        time.sleep(number % 10 * 5e-6)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


# ------------------------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, `ca` and `foreign`; `server` (for 127.0.0.1) and `client`, signed by the first."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs the openssl command to make certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def make(name: str, *options: str) -> None:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
        command = [
            openssl,
            "req",
            "-x509",
            *key,
            "-subj",
            f"/CN={name}",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
        ]
        subprocess.run([*command, *options], check=True, capture_output=True, cwd=folder)

    for name in ("ca", "foreign"):
        make(name)
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    make("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1")
    make("client", *signed)
    return folder


@pytest.fixture
async def encrypted(redis_url: str, certificates: Path) -> AsyncIterator[str]:
    """URL of a Redis that asks for certificates."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    async with Proxy(redis_url, context) as proxy:
        yield proxy.url("rediss")


@pytest.fixture
async def plain(redis_url: str) -> AsyncIterator[str]:
    """URL of a Redis that is said to speak TLS, and does not."""
    async with Proxy(redis_url) as proxy:
        yield proxy.url("rediss")


def tls(folder: Path, ca: str = "ca", client: str | None = "client", **more: Any) -> RedisOptions:
    cert, key = (folder / f"{client}.pem", folder / f"{client}.key") if client else (None, None)
    return RedisOptions(tls_ca=folder / f"{ca}.pem", tls_cert=cert, tls_key=key, **more)


async def test_a_mesh_over_tls_with_certificates_on_both_sides(mesh: Mesh, encrypted: str, certificates: Path) -> None:
    files = {
        "redis_tls_ca": str(certificates / "ca.pem"),
        "redis_tls_cert": str(certificates / "client.pem"),
        "redis_tls_key": str(certificates / "client.key"),
    }
    config = make_config(mesh.folder, buffer={"redis": encrypted, **files})
    front = await mesh.front(config)
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    admission = generator.admission()
    admission.update(2, PolicyVersion(1, 0))
    await learner.seed(1, 2)
    await generator.finish(generator.writer(), await generator.grants(admission, 2), PolicyVersion(1, 0))
    assert (await learner.train(await learner.batch(learner.sampler(), 2, 0), 0)).claimed
    await balanced(learner)
    await mesh.stop_front(front)


async def test_certificates_that_do_not_fit_are_typed_errors(
    encrypted: str, plain: str, certificates: Path, open_access: Opener
) -> None:
    by_name = encrypted.replace("127.0.0.1", "localhost")
    refused = {
        "wrong authority": (encrypted, tls(certificates, ca="foreign")),
        "no certificate of ours": (encrypted, tls(certificates, client=None)),
        "certificate for another name": (by_name, tls(certificates)),
        "no TLS there": (plain, tls(certificates)),
    }
    for why, (url, options) in refused.items():
        # A client without TLS says nothing at all.
        timeout_s = 0.2 if why == "no TLS there" else TIMEOUT_S
        with pytest.raises(StoreError, match="TLS with Redis fails") as caught:
            await open_access(url, options, timeout_s).load()
        assert "redis_tls_ca" in caught.value.hint, why
        with pytest.raises(StoreError):
            async with open_access(url, options, timeout_s).subscribed("channel"):
                pytest.fail(f"the other client does not care: {why}")
    indifferent = open_access(by_name, tls(certificates, check_hostname=False))
    await indifferent.load()
    async with indifferent.subscribed("channel"):
        pass
    with pytest.raises(ConfigError, match="redis_tls"):
        await open_access(encrypted, tls(certificates / "nowhere")).load()


# ------------------------------------------------------------------------------------------------------- deadlines


async def test_a_silent_redis_is_a_typed_error_that_counts_the_bytes(redis_url: str, open_access: Opener) -> None:
    async with Proxy(redis_url) as proxy:
        access = open_access(proxy.url(), timeout_s=1.0)
        await access.load()
        proxy.free.clear()
        with pytest.raises(
            StoreError, match=r"too slow: no answer for \d\.\d s \(0 of 14 bytes still to be sent"
        ) as caught:
            await access.batch([("PING",)])
        assert "rpc_timeout_s" in caught.value.hint
        proxy.free.set()
        assert await access.batch([("PING",)]) == [b"PONG"]


async def test_what_answers_in_redis_place_is_a_typed_error(open_access: Opener) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        access = open_access(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(StoreError, match=r"is no Redis: it sent b'HTTP/1\.1 400"):
            await access.batch([("PING",)])


async def test_many_bytes_have_more_time_and_so_has_what_waits_behind_them(
    redis_url: str, open_access: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.buffer.redis_backend.connection.SLOWEST_BYTES_PER_S", 1 << 20)
    async with Proxy(redis_url) as proxy:
        access = open_access(proxy.url(), timeout_s=1.0)
        await access.load()
        proxy.free.clear()
        large = asyncio.create_task(access.batch([("SET", "rollmesh:slow:x", b"x" * (16 << 20), "EX", 30)]))
        await asyncio.sleep(0)
        small = asyncio.create_task(access.batch([("EXISTS", "rollmesh:slow:x")]))
        assert not (await asyncio.wait({large, small}, timeout=2.5))[0], "more than twice the deadline of a small batch"
        proxy.free.set()
        async with asyncio.timeout(TIMEOUT_S):
            await large
            assert await small == [1]
        await access.batch([("UNLINK", "rollmesh:slow:x")])


async def test_a_front_waits_at_its_start_while_redis_loads_its_data(tmp_path: Path, open_access: Opener) -> None:
    """A real server that takes four seconds to load eight values, and answers after each."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    command = [find_redis_server(), "--port", str(port), "--dir", str(tmp_path), "--save", "", "--rdbcompression", "no"]
    slow = ["--key-load-delay", "500000"]
    url = f"redis://127.0.0.1:{port}"

    async def reached(client: Any) -> None:
        while True:
            try:
                await client.ping()
            except redis.exceptions.BusyLoadingError:
                return
            except redis.exceptions.ConnectionError:
                await asyncio.sleep(0.01)
            else:
                return

    async with asyncio.timeout(TIMEOUT_S), AsyncExitStack() as stack:
        client = redis.asyncio.Redis(port=port, retry=None)
        stack.push_async_callback(client.aclose)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            await reached(client)
            await client.mset({f"key-{i}": bytes(3 << 20) for i in range(8)})
            await client.save()
            server.kill()
        with subprocess.Popen([*command, *slow], stdout=subprocess.DEVNULL) as server, ExitStack() as first:
            # Before the wait for its end.
            first.callback(server.kill)
            await reached(client)
            with pytest.raises(StoreError, match="is loading its data"):
                await open_access(url).wait_until_loaded(0.1)
            mesh = Mesh(url, tmp_path / "mesh")
            stack.push_async_callback(mesh.close)
            await mesh.front()
            assert await client.exists("key-7")
            await mesh.close()
