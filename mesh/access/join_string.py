"""Join strings: all that a node needs to enter a mesh, as one text.

`rmj1.CHECKSUM.BODY`: the body is msgpack in URL-safe base64. It has the mesh's addresses and a grant with its key. For
a mesh with TLS it has the SHA-256 fingerprint of its certificate authority. Where it says at which host others reach
the node, it may also have the node's certificate and key.

Invariants: the string is a secret, like the grant in it. A string that is cut short, or changed in one place, is
refused as such before anything of it is used.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import msgpack

from rollmesh.mesh.access.issued_certificate import IssuedCertificate
from rollmesh.mesh.access.role_grants import decode_base64, encode_base64
from rollmesh.mesh.errors import ConfigError, UnauthenticatedError

_VERSION = "rmj1"
# A token has no dot, so none is taken for one.
_STARTS = re.compile(r"rmj[0-9]+\.")
_CHECKSUM_CHARACTERS = 8
_HINT = "rollmesh token join makes one; copy the whole line"
_MOST_CHARACTERS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class JoinString:
    """The contents of one.

    Attributes:
        mesh: `host:port` of one front or more, with commas between them.
        grant: as a token file holds it.
        authority: SHA-256 of the DER form of the authority's certificate; empty: a mesh without TLS.
        host: under which others reach the node, maybe with a port; empty: others do not call it.
        certificate: of the node, with its key; None: it serves without TLS.
    """

    mesh: str
    grant: str = field(repr=False)
    authority: bytes = b""
    host: str = ""
    certificate: IssuedCertificate | None = None

    def pack(self) -> str:
        """The string."""
        kind, *parts = self.grant.split(".")
        fields = {
            "mesh": self.mesh,
            "grant": [kind, *map(decode_base64, parts)],
            "authority": self.authority,
            "host": self.host,
            "certificate": [self.certificate.certificate, self.certificate.key] if self.certificate else None,
        }
        body = encode_base64(msgpack.packb({name: value for name, value in fields.items() if value}))
        return f"{_VERSION}.{_checksum(body)}.{body}"


def is_join_string(text: str) -> bool:
    """True if a text is meant to be one."""
    return _STARTS.match(text.lstrip()) is not None


def parse_join_string(text: str, source: str) -> JoinString:
    """Parses one; line breaks and spaces that pasting has put into it do not matter.

    Args:
        source: names the option or file in errors.

    Raises:
        ConfigError: no join string, one of another release, or one that is cut short or changed.
    """
    text = "".join(text.split())
    version, _, rest = text.partition(".")
    checksum, _, body = rest.partition(".")
    if not is_join_string(text) or not rest:
        raise ConfigError(f"{source} holds no join string", hint=_HINT)
    if version != _VERSION:
        raise ConfigError(f"{source}: a join string of another release ({version})", hint="use the same release")
    if len(checksum) != _CHECKSUM_CHARACTERS or checksum != _checksum(body) or len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"{source}: the join string is cut short or changed ({len(text)} characters)", hint=_HINT)
    try:
        return _from_fields(msgpack.unpackb(decode_base64(body)))
    except (ValueError, TypeError, UnauthenticatedError) as error:
        raise ConfigError(f"{source}: the join string is damaged: {error}", hint=_HINT) from error


def _from_fields(fields: Any) -> JoinString:
    match fields:
        case {"mesh": str(), "grant": [str(kind), *parts]} if all(isinstance(part, bytes) for part in parts):
            fields["grant"] = ".".join((kind, *map(encode_base64, parts)))
        case _:
            raise ValueError("a field is missing")
    if "certificate" in fields:
        fields["certificate"] = IssuedCertificate(*fields["certificate"])
    return JoinString(**fields)


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:_CHECKSUM_CHARACTERS]
