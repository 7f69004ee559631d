"""Facts about a chat template in words, for `rollmesh data check` and the documentation."""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.mesh.chat.facts import TemplateFacts

_ENDS = {
    "after the turn": "{}, written after it",
    "by the next message": "{}, the first token of the next message; written after the last turn too",
    "never": "none is written: the tokenizer's end token is trained after the last turn",
}
_SHOWN = 200


def describe(facts: TemplateFacts) -> Iterator[tuple[str, str]]:
    """The name of each fact, and what is found; only what differs from the plainest template, after the first four."""
    yield "contents", ", ".join(f"{role}: {' or '.join(forms)}" for role, forms in facts.contents.items())
    yield "end of a turn", _ENDS[facts.end.written].format(" or ".join(facts.end.tokens))
    yield "begin token", "written" if facts.begin else "not written"
    yield "tools", _tools(facts)
    if facts.marks:
        yield "words of the assistant", f"marked, {facts.marks}"
    if facts.opened_thoughts:
        yield "thoughts", f"opened by the prompt with {facts.opened_thoughts}: an answer is trained with its thoughts"
    if facts.drops_thoughts:
        yield "earlier thoughts", "left out once another message follows"
    if facts.rewrites:
        yield (
            "earlier turns",
            "written otherwise once another message follows: train the last one (data.train_on: last)",
        )
    if "system" not in facts.contents:
        yield "system message", "refused or lost: put its words into the user's message"
    elif "developer" not in facts.contents:
        yield "developer message", "written as a system message"
    if facts.thoughts_field:
        yield "thoughts apart from contents", f"written, from `{facts.thoughts_field}`"
    if facts.default_system:
        yield "without a system message", repr(facts.default_system[:_SHOWN])
    if facts.alternates:
        yield "order", "user and assistant in turn"
    if facts.trims:
        yield "white space around contents", "removed"


def _tools(facts: TemplateFacts) -> str:
    if not facts.tools:
        return "not shown" if not facts.arguments else f"not shown; calls with arguments as {facts.arguments}"
    if not facts.arguments:
        return "shown, and no call is written"
    ids = "; ids of calls have nine letters or digits" if facts.nine_letter_ids else ""
    return f"shown; calls with arguments as {facts.arguments}{ids}"
