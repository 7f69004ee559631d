"""Sizes and numbers that the buffer allows. Messages are cut near a mebibyte; one write, or one prompt task,
may be larger (`MESSAGE_PAYLOAD_BYTES`, `MAX_TASK_BYTES`), within `network.max_message_mb`.

The limits that a user may meet are listed in docs/operations.md. Those of texts that services bound before they send
them are in `mesh.text`, those of names in `mesh.request_fields`, that of images in `mesh.trajectory.images`.
"""

from __future__ import annotations

# Bytes of a stored response token (id and log-prob), and of a payload's frame.
TOKEN_BYTES = 8
FRAME_BYTES = 512
# Payloads above this are stored in pieces of this size.
PIECE_BYTES = 512 << 10
# Larger payloads are refused unless they come in pieces; the most pieces of one.
MAX_WHOLE_BYTES = 2 * PIECE_BYTES
MAX_PIECES = 4096
# A group with more payload bytes than this is leased without payloads: they are fetched.
INLINE_BYTES = 2 << 20
# Members of one Write message, and bytes of their payloads. Checked and stored in one turn, they keep others waiting
# for a few milliseconds at most.
MESSAGE_MEMBERS = 128
MESSAGE_PAYLOAD_BYTES = 4 << 20
# A serialized MemberMeta: a leased group carries that of each member.
META_BYTES = 8 << 10
# A prompt task, serialized: grants and leased groups carry it. With the metadata of the most members it stays below the
# largest message, unless that is configured to be smaller.
MAX_TASK_BYTES = 16 << 20
# Members of a group: its script touches each of them.
MAX_MEMBERS = 4096
# Numbers of prompts and groups: scripts write them into texts, with 14 digits, and groups leap ahead of them.
MAX_ORDINAL = 10**13
# Members of a run at a time, and what the heartbeat of one may carry: an answer of List has all of it.
MAX_RUN_MEMBERS = 6144
# Places among these that generators leave to reward services and models.
RESERVED_MEMBERS = 128
MAX_GAUGES = 64
GAUGE_CHARACTERS = 64
# Different reasons of dropped groups; each is read whenever the values of a table are.
MAX_REASONS = 64


def group_bytes(members: int, max_tokens: int) -> int:
    """Payload bytes that a group may need at most."""
    return members * (FRAME_BYTES + TOKEN_BYTES * max_tokens)
