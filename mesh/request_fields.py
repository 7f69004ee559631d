"""Checks of names and other short texts in requests.

Names become parts of keys, so that no name leads to what belongs to another one. They and all other texts of members
are short, since services keep those of all members, and fronts and tools read them. Tools show them in terminals, so
none has characters that a terminal obeys.
"""

from __future__ import annotations

from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.text import is_showable

# Names, addresses and the like.
ID_CHARACTERS = 256
# Characters that a name may not contain: they separate, in keys and in lists.
_SEPARATORS = frozenset("|:,{} ")


def check_id(field: str, value: str) -> None:
    """Refuses a member's name that cannot be part of a key, or that names another member.

    Raises:
        PayloadError: empty, too long, with characters that separate or cannot be printed, or the learner's.
    """
    if not (
        0 < len(value) <= ID_CHARACTERS
        and value.isprintable()
        and _SEPARATORS.isdisjoint(value)
        and value != Role.LEARNER
    ):
        raise PayloadError(
            field,
            f"not a name: {value[:40]!r}",
            hint=f"1 to {ID_CHARACTERS} printable characters without blanks and | : , {{ }}; `{Role.LEARNER}` is taken",
        )


def check_text(field: str, value: str, limit: int = ID_CHARACTERS) -> None:
    """Refuses a text that is too long, or that a terminal would obey.

    Raises:
        PayloadError: it has more than `limit` characters, or one for the control of terminals.
    """
    if len(value) > limit:
        raise PayloadError(field, f"{len(value)} characters, it may have {limit}")
    if not is_showable(value):
        raise PayloadError(field, f"has control characters: {value[:40]!r}", hint="replace them (mesh.text.bounded)")
