"""Users and rights in the embedded Redis.

Invariants: a program that reaches the socket may do what a front does and no more. It can do nothing that changes the
server, writes files elsewhere, loads code or ends it. All else needs a password that its owner alone has, and that
stands in no file, no environment and no process list.
"""

from __future__ import annotations

import hashlib
import os

ADMIN = "admin"
# Every command of a front, in its scripts or outside of them; docs/operations.md has the same.
FRONT_COMMANDS = (
    "evalsha", "script|load", "subscribe", "scan", "info", "time", "publish",
    "set", "mset", "get", "getdel", "mget", "getrange", "strlen", "exists", "del", "unlink", "expire", "pttl",
    "hset", "hget", "hmget", "hgetall", "hdel", "hexists", "hlen", "hincrby",
    "sadd", "srem", "smembers", "scard", "srandmember", "lpush", "rpop", "lrange", "llen",
    "zadd", "zrem", "zrange", "zrangebyscore", "zscore", "zmscore", "zcard", "zcount",
)  # fmt: skip


def users(password: str) -> str:
    """Configuration of the server's users: fronts, which need no password, and its owner.

    Args:
        password: of the owner.
    """
    # Redis logs a line that it does not understand: better a digest than the password.
    digest = hashlib.sha256(password.encode()).hexdigest()
    # All keys: there is nothing but a run's, and a pattern would be matched with each key of each command.
    front = " ".join(f"+{command}" for command in FRONT_COMMANDS)
    return (
        # For all users that log in, these are not there. `enable-module-command` and the like are of Redis 7.
        'rename-command MODULE ""\nrename-command DEBUG ""\n'
        f"user default on nopass ~* &* -@all {front}\nuser {ADMIN} on #{digest} ~* &* +@all\n"
    )


def readable(text: str) -> int:
    """A file descriptor from which a child reads a short text: it stands on no disk. The caller closes it."""
    reader, writer = os.pipe()
    try:
        os.write(writer, text.encode())
    finally:
        os.close(writer)
    return reader
