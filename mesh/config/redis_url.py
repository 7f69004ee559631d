"""The address, login and TLS of Redis, as `buffer.redis` and related settings give them.

Forms: `redis://[user[:password]@]host[:port][/db]`, `rediss://` (the same with TLS), `unix://[user[:password]@]/path`,
and `redis-cluster://` or `rediss-cluster://` with one or several `host[:port]`, separated by commas. Options after the
`?`: `db`, `client_name`, `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_check_hostname`.

Invariants: reading a URL touches no file and no network, so that it can be checked when the configuration is read. No
message of an error repeats the URL, which may hold a password. Nothing in a URL is ignored silently. A configuration
may hold no password in it: that is for the owner of an embedded server alone.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import read_secret

_BUFFER = "buffer.redis"
_PORT = 6379
_SCHEMES = ("redis", "rediss", "unix", "redis-cluster", "rediss-cluster")
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")
_OPTIONS = ("db", "client_name", *_TLS_OPTIONS)
_FORMS = "redis://host:6379/0, rediss://host:6379/0, unix:///path/to/socket, redis-cluster://host1:6379,host2:6379"


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Settings in addition to the URL.

    Attributes:
        tls_ca: PEM authorities that may have signed the server's certificate; none: the system's.
        tls_cert, tls_key: our certificate and its key, for servers that ask for one.
        check_hostname: whether the server's certificate must name the host that the URL names.
        password_file: holds the password (its first line).
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    check_hostname: bool = True
    password_file: Path | None = None


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A URL, read.

    Attributes:
        hosts: (host, port) of the server, or of the cluster's nodes to ask first; empty where `path` is.
        path: Unix socket.
        cluster: whether keys are spread over the nodes of a Redis Cluster.
        tls: whether connections are encrypted, as `options` say.
        key: the setting that names it.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    cluster: bool = False
    tls: bool = False
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    client_name: str | None = None
    options: RedisOptions = RedisOptions()
    key: str = _BUFFER

    def at(self, host: str, port: int) -> RedisAddress:
        """The address of a node of the cluster, with the same login and TLS."""
        return replace(self, hosts=((host, port),), cluster=False)

    def login(self) -> tuple[str, ...] | None:
        """Arguments of AUTH; reads the password file. None: no login.

        Raises:
            ConfigError: see `read_secret`.
        """
        password = self.password
        if (path := self.options.password_file) is not None:
            password = read_secret(path, f"{self.key}_password_file").partition("\n")[0].strip()
        if self.username is not None:
            return (self.username, password or "")
        return None if password is None else (password,)

    def client_options(self) -> dict[str, Any]:
        """The same in the words of redis-py's clients of one server."""
        words: dict[str, Any] = {"db": self.db, "client_name": self.client_name}
        if (login := self.login()) is not None:
            words["username"], words["password"] = self.username, login[-1]
        if self.path:
            return {**words, "unix_socket_path": self.path}
        words["host"], words["port"] = self.hosts[0]
        if self.tls:
            files = {
                "ssl_ca_certs": self.options.tls_ca,
                "ssl_certfile": self.options.tls_cert,
                "ssl_keyfile": self.options.tls_key,
            }
            words |= {name: str(path) for name, path in files.items() if path is not None}
            words |= {"ssl": True, "ssl_check_hostname": self.options.check_hostname}
        return words

    def __str__(self) -> str:
        """The address for messages, without user and password."""
        scheme = ("rediss" if self.tls else "redis") + ("-cluster" if self.cluster else "")
        where = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"unix://{self.path}" if self.path else f"{scheme}://{where}"


def parse_redis_url(url: str, options: RedisOptions | None = None, *, key: str = _BUFFER) -> RedisAddress:
    """Reads the setting `buffer.redis`, or another of its kind, together with those next to it.

    Args:
        url: one of the forms above.
        options: of the settings next to it, whose names begin with `key`.
        key: the setting's own name, for messages.

    Raises:
        ConfigError: it names no Redis that could be reached, or contradicts itself.
    """
    try:
        return replace(_parsed(url, options or RedisOptions()), key=key)
    except ConfigError as error:
        raise ConfigError(error.message.replace(_BUFFER, key), hint=error.hint.replace(_BUFFER, key)) from error


def _parsed(url: str, options: RedisOptions) -> RedisAddress:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        near = difflib.get_close_matches(scheme, _SCHEMES, n=1)
        raise _wrong("unknown scheme" + (f", did you mean {near[0]}://?" if near else ""), hint=f"forms: {_FORMS}")
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise _wrong("it is no URL", hint=f"forms: {_FORMS}") from error
    if parts.fragment or "#" in url:
        raise _wrong("it holds a '#'", hint="write # in a password as %23")
    words = _words(query)
    username, password, where = _login(parts.netloc)
    cluster, tls = scheme.endswith("-cluster"), scheme.startswith("rediss")
    options = _merged(options, words, tls=tls)
    name = words.get("client_name")
    if scheme == "unix":
        if where or not parts.path.strip("/"):
            raise _wrong("a Unix socket needs a path alone", hint="as in unix:///run/redis/redis.sock")
        return RedisAddress((), unquote(parts.path), cluster, tls, _db("", words), username, password, name, options)
    hosts, db = _hosts(where, cluster=cluster), _db(parts.path, words)
    if cluster and db:
        raise _wrong(f"a cluster has only database 0, got {db}", hint="drop the number; runs differ by run.name")
    return RedisAddress(hosts, "", cluster, tls, db, username, password, name, options)


def without_login(url: str) -> str:
    """The URL without user and password, whatever else it holds."""
    scheme, separator, rest = url.partition("://")
    netloc = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return f"{scheme}{separator}{netloc.rpartition('@')[2]}{rest[len(netloc) :]}"


def _wrong(why: str, *, hint: str) -> ConfigError:
    return ConfigError(f"buffer.redis: {why}", hint=hint)


def _words(query: list[tuple[str, str]]) -> dict[str, str]:
    words: dict[str, str] = {}
    for name, value in query:
        if name in ("username", "password"):
            raise _wrong(
                f"{name} stands after the '?'",
                hint="the user goes before the host, the password into buffer.redis_password_file",
            )
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.4)
            raise _wrong(
                f"unknown option {name!r}" + (f", did you mean {near[0]}?" if near else ""),
                hint=f"options are {', '.join(_OPTIONS)}; deadlines come from network.rpc_timeout_s",
            )
        if name in words or not value:
            raise _wrong(f"option {name!r} is " + ("given twice" if value else "empty"), hint="give it one value")
        words[name] = value
    return words


def _login(netloc: str) -> tuple[str | None, str | None, str]:
    """(user, password, hosts) of `user:password@hosts`."""
    login, separator, where = netloc.rpartition("@")
    if not separator:
        return None, None, where
    if "@" in login:
        raise _wrong("more than one '@'", hint="give user and password once, first; write @ in a password as %40")
    user, colon, password = login.partition(":")
    return unquote(user) or None, unquote(password) if colon else None, where


def _hosts(where: str, *, cluster: bool) -> tuple[tuple[str, int], ...]:
    entries = where.split(",")
    if len(entries) > 1 and not cluster:
        raise _wrong("several hosts", hint="only redis-cluster:// and rediss-cluster:// take more than one")
    return tuple(_host(entry) for entry in entries)


def _host(entry: str) -> tuple[str, int]:
    if entry.startswith("["):
        host, bracket, rest = entry[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _wrong("a host in brackets is not closed", hint="as in redis://[::1]:6379")
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = entry.partition(":")
    if not host:
        raise _wrong("a host is missing", hint=f"forms: {_FORMS}")
    if not colon:
        return host, _PORT
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(f"{host} has no port from 1 to 65535", hint="in a password, write : / @ as %3A %2F %40")
    return host, int(port)


def _db(path: str, words: Mapping[str, str]) -> int:
    text = path.strip("/")
    if text and "db" in words:
        raise _wrong("the database is given twice", hint="as a path or as ?db=, not both")
    text = text or words.get("db", "0")
    if not (text.isascii() and text.isdigit()):
        raise _wrong("the database is no number", hint="as in redis://host:6379/0; in a password, write / as %2F")
    return int(text)


def _merged(options: RedisOptions, words: Mapping[str, str], *, tls: bool) -> RedisOptions:
    """TLS by settings or by the URL's options, each once; no such option without TLS."""
    given = [name for name in _TLS_OPTIONS if name in words]
    settings = RedisOptions(password_file=options.password_file)
    if not tls and (given or options != settings):
        raise _wrong("TLS is configured for a URL without it", hint="use rediss:// or rediss-cluster://")
    if given and options != settings:
        raise _wrong(f"TLS is configured twice, by {given[0]} and by buffer.redis_tls_*", hint="use one of the ways")
    if given:
        check = words.get("ssl_check_hostname", "true").lower()
        if check not in ("true", "false"):
            raise _wrong("ssl_check_hostname is neither true nor false", hint="leave it out: true")
        options = replace(
            options,
            tls_ca=_path(words, "ssl_ca_certs"),
            tls_cert=_path(words, "ssl_certfile"),
            tls_key=_path(words, "ssl_keyfile"),
            check_hostname=check == "true",
        )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise _wrong("a client certificate without its key, or a key alone", hint="give both")
    return options


def _path(words: Mapping[str, str], name: str) -> Path | None:
    return Path(words[name]) if name in words else None
