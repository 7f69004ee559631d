"""The form in which an item is sent to a server: what the server does not want is left out.

An item that is sent as it is, is not copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from rollmesh.protos import reward_pb2

# Most bytes of a token's entry in `token_ends`.
_END_BYTES = 5
# Most bytes of an image in a message besides its content.
_IMAGE_BYTES = 16


class ItemDetails(Protocol):
    """The parts of an item that are made only for a server that wants them; each is made once."""

    def messages_json(self) -> str:
        """See `ScoreItem.messages_json`."""
        ...

    def token_ends(self) -> Sequence[int]:
        """See `ScoreItem.token_ends`; may take a while."""
        ...

    def turns(self) -> Sequence[str]:
        """See `ScoreItem.turns`; may take a while."""
        ...

    def images(self) -> Sequence[bytes]:
        """The contents of `ScoreItem.images`, in their order."""
        ...

    def most_turns_bytes(self) -> int:
        """Bytes of the message that the turns do not exceed; takes no time."""
        ...


@dataclass(frozen=True, slots=True)
class Wants:
    """The parts of items that a server reads."""

    ids: bool = True
    messages: bool = False
    offsets: bool = False
    turns: bool = False
    images: bool = False

    @classmethod
    def of(cls, info: reward_pb2.InfoResponse) -> Self:
        """As a server's Info says."""
        ids = info.wants_ids if info.HasField("wants_ids") else True
        return cls(ids, info.wants_messages, info.wants_offsets, info.wants_turns, info.wants_images)

    @classmethod
    def of_functions(cls, named: Collection[str]) -> Self:
        """As reward functions name them; see `FunctionKind`."""
        return cls(*(name in named for name in ("ids", "messages", "offsets", "turns", "images")))

    @property
    def takes_a_while(self) -> bool:
        """True if tokens are decoded for an item."""
        return self.offsets or self.turns


def outgoing(item: reward_pb2.ScoreItem, details: ItemDetails | None, wants: Wants) -> reward_pb2.ScoreItem:
    """An item as a server wants it.

    Args:
        details: makes what the item lacks; None: it has what there is.
    """
    drops = [
        name
        for name, wanted in (
            ("response_ids", wants.ids),
            ("messages_json", wants.messages),
            ("token_ends", wants.offsets),
            ("turns", wants.turns),
        )
        if not wanted and getattr(item, name)
    ]
    adds_messages = wants.messages and not item.messages_json and details is not None
    adds_ends = wants.offsets and not item.token_ends and details is not None
    adds_turns = wants.turns and not item.turns and details is not None
    adds_images = wants.images and item.images and not item.images[0].content and details is not None
    if not (drops or adds_messages or adds_ends or adds_turns or adds_images):
        return item
    sent = reward_pb2.ScoreItem()
    sent.CopyFrom(item)
    for name in drops:
        sent.ClearField(name)
    if details is not None and adds_messages:
        sent.messages_json = details.messages_json()
    if details is not None and adds_ends:
        sent.token_ends.extend(details.token_ends())
    if details is not None and adds_turns:
        sent.turns.extend(details.turns())
    if details is not None and adds_images:
        for image, content in zip(sent.images, details.images(), strict=False):
            image.content = content
    return sent


def size_bound(item: reward_pb2.ScoreItem, details: ItemDetails | None, wants: Wants) -> int:
    """Bytes that the item as a server wants it does not exceed."""
    size: int = item.ByteSize()
    if details is None:
        return size
    if wants.offsets:
        size += _END_BYTES * len(item.response_ids)
    if wants.messages:
        size += len(details.messages_json().encode())
    if wants.turns:
        size += details.most_turns_bytes()
    if wants.images:
        size += sum(len(content) + _IMAGE_BYTES for content in details.images())
    return size
