"""Refuses secrets in a configuration, which may only name files and environment variables that hold them.

A configuration is copied to where others read it: the run folder, each member of the mesh, trackers, reports. Its
overrides and engine options stand in the list of processes. So what looks like a secret is refused, whatever asks for
it, and nothing has to be hidden later. Redis' URLs have rules of their own (`BufferSection`, `CacheSection`), since
they may name a user.

Invariant: a message names the key, and repeats nothing of its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

_WHY = "a configuration is copied to the run folder, to members and to trackers"
_SECRET = re.compile(
    r"(?:^|_)(?:password|passwd|passphrase|pwd|secrets?|credentials?|authorization|bearer|api_?keys?)(?:_|$)"
    r"|(?:^|_)(?:access|account|admin|auth|client|encryption|private|secret|service|signing)_?key$"
    r"|(?:^|(?<!per)(?<!by)_)token$"
)
# A key that names the place of a secret holds none.
_PLACE = re.compile(r"_?(?:file|path|dir|env|name)s?$")
_SETS = re.compile(r"([A-Za-z_][\w.-]*)=[^\s&]")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S+")
_ARGUMENTS = "rollout.agent.command"
_REDIS = ("buffer.redis", "reward.cache.redis")


def is_secret(name: str) -> bool:
    """True if a setting or variable of this name holds a secret: `hf_token`, `--api-key`, `dbPassword`."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")).lower().replace("-", "_").replace(".", "_")
    return _SECRET.search(plain) is not None and _PLACE.search(plain) is None


# A plan checks many configurations, which have most keys in common.
_is_secret_key = lru_cache(maxsize=4096)(is_secret)


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Refuses a whole configuration that holds a secret.

    Raises:
        ValueError: names each key, and says where the secret belongs.
    """
    if wrong := list(dict.fromkeys(_found(values, ""))):
        raise ValueError(f"{'; '.join(wrong)}: {_WHY}")


def _found(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if _with_login(str(name)):
                yield f"{key} names a URL with a login"
                continue
            inner_key = f"{key}.{name}" if key else str(name)
            if _is_secret_key(str(name)) and _can_be_secret(str(name), inner):
                yield f"{inner_key} looks like a secret; give it by the service's environment, or by a file"
            else:
                yield from _found(inner, inner_key)
    elif isinstance(value, str):
        if key not in _REDIS and _with_login(value):
            yield f"{key} holds a URL with a login; give that by the service's environment, or by a file"
    elif isinstance(value, Sequence):
        if key == _ARGUMENTS and _in_arguments([str(item) for item in value]):
            yield f"{key} holds a secret; name a variable of the environment that does in rollout.agent.pass_env"
        for item in value:
            yield from _found(item, key)


def _can_be_secret(name: str, value: Any) -> bool:
    """True unless the value is a switch, or a tokenizer's token (`pad_token: <pad>`, `pad_token: 0`)."""
    if isinstance(value, bool) or not value:
        return False
    return not name.lower().endswith("token") or (isinstance(value, str) and not value.startswith(("<", "[")))


def _with_login(text: str) -> bool:
    """True if a URL in a text holds a user, a password or a key."""
    if "://" not in text:
        return False
    for found in _URL.finditer(text):
        try:
            parts = urlsplit(found[0])
        except ValueError:
            continue  # no URL that anything could use
        if "@" in parts.netloc or any(is_secret(name) for name in _SETS.findall(parts.query)):
            return True
    return False


def _in_arguments(arguments: Sequence[str]) -> bool:
    """True for `--api-key=X`, `--api-key X`, or `API_KEY=X` for a shell."""
    if any(is_secret(name) for argument in arguments for name in _SETS.findall(argument)):
        return True
    return any(
        option.startswith("-") and is_secret(option) and not value.startswith("-")
        for option, value in pairwise(arguments)
    )
