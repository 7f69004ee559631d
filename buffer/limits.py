"""Sizes that both ends of the wire agree on. Messages are cut near a mebibyte; one write, or one prompt task,
may be larger (`MESSAGE_PAYLOAD_BYTES`, `buffer.bounds.MAX_TASK_BYTES`), within `network.max_message_mb`.

The limits that a user may meet are listed in docs/operations.md.
"""

from __future__ import annotations

# Of a stored response token (id and log-prob), and of a payload's frame.
TOKEN_BYTES = 8
FRAME_BYTES = 512
# Payloads above this are stored in pieces of this size.
PIECE_BYTES = 512 << 10
# Larger payloads are refused unless they come in pieces, and in at most so many.
MAX_WHOLE_BYTES = 2 * PIECE_BYTES
MAX_PIECES = 4096
# A group with more payload bytes than this is leased without payloads: they are fetched.
INLINE_BYTES = 2 << 20
# Members of one Write message, and bytes of their payloads: checked and stored in one turn, they keep others waiting
# for a few milliseconds at most.
MESSAGE_MEMBERS = 128
MESSAGE_PAYLOAD_BYTES = 4 << 20
# A serialized MemberMeta: a leased group carries that of each member.
META_BYTES = 8 << 10


def group_bytes(members: int, max_tokens: int) -> int:
    """Payload bytes that a group may need at most."""
    return members * (FRAME_BYTES + TOKEN_BYTES * max_tokens)
