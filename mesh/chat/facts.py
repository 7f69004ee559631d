"""Facts about a chat template that decide how conversations are written for it, and which of their tokens train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ContentForm = Literal["text", "parts"]


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of an assistant's turn.

    Attributes:
        tokens: special tokens that end turns, as text, each once: first that of an answer, then that of a call.
        written: "after the turn"; "by the next message": they are the next message's first token; "never".
    """

    tokens: tuple[str, ...]
    written: Literal["after the turn", "by the next message", "never"]


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Findings about one template, each from renderings of small conversations.

    Attributes:
        contents: forms in which each role's content reaches the text, the simpler one first; a role that is refused
            or lost is missing. So is `developer` if it is written as a user's, an assistant's or a tool's.
        end: see there.
        begin: whether conversations begin with the begin token.
        marks: the assistant's words are marked with `{% generation %}`: with their end, without it, or not at all.
        prompt_is_prefix: whether a conversation begins with the prompt of its last turn, generation prompt included.
        generation_prompt: the text that is added to a conversation for the next turn.
        opened_thoughts: the mark with which the generation prompt opens thoughts; empty: it opens none.
        thoughts_field: the field of a message whose thoughts reach the text of the last turn; empty: none does.
        drops_thoughts: whether the thoughts of a turn vanish once another message follows.
        rewrites: whether a turn is written otherwise once another message follows, its thoughts apart.
        trims: whether white space around contents vanishes.
        default_system: the system prompt of conversations that bring none.
        alternates: whether two messages of the user in a row are refused.
        tools: whether schemas of tools are shown.
        arguments: the form in which a call's arguments reach the text once; empty: no call does.
        nine_letter_ids: whether ids of calls must be nine letters or digits.
        call: a turn that makes `probing.PROBED_CALL`, as the template writes it, without its end; empty: none is.
    """

    contents: Mapping[str, tuple[ContentForm, ...]]
    end: TurnEnd
    begin: bool = False
    marks: Literal["with the end", "without the end", ""] = ""
    prompt_is_prefix: bool = True
    generation_prompt: str = ""
    opened_thoughts: str = ""
    thoughts_field: str = ""
    drops_thoughts: bool = False
    rewrites: bool = False
    trims: bool = False
    default_system: str = ""
    alternates: bool = False
    tools: bool = False
    arguments: Literal["object", "text", ""] = ""
    nine_letter_ids: bool = False
    call: str = ""
