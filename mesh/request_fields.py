"""Checks of names and other short texts in requests.

Names become parts of keys, so that no name leads to what belongs to another one. They and all other texts of members
are short, since services keep those of all members, and fronts and tools read them.
"""

from __future__ import annotations

from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.errors import PayloadError

# Names, addresses and the like.
ID_CHARACTERS = 256
# Characters that a name may not contain: they separate, in keys and in lists.
_SEPARATORS = frozenset("|:,{} \t\r\n\x00")


def check_id(field: str, value: str) -> None:
    """Refuses a member's name that cannot be part of a key, or that names another member.

    Raises:
        PayloadError: empty, too long, with characters that separate, or the learner's.
    """
    if not 0 < len(value) <= ID_CHARACTERS or not _SEPARATORS.isdisjoint(value) or value == Role.LEARNER:
        raise PayloadError(
            field,
            f"not a name: {value[:40]!r}",
            hint=f"1 to {ID_CHARACTERS} characters without blanks and any of | : , {{ }}; `{Role.LEARNER}` is taken",
        )


def check_text(field: str, value: str, limit: int = ID_CHARACTERS) -> None:
    """Refuses a text that is too long.

    Raises:
        PayloadError: it has more than `limit` characters.
    """
    if len(value) > limit:
        raise PayloadError(field, f"{len(value)} characters, it may have {limit}")
