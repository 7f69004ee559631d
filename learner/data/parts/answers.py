"""Prompts and their responses, divided so that every message of the row stands once.

Rows may give a prompt, as a text or as messages, or none. Their responses are the answers alone, or whole
conversations, which hold the prompt again. A prompt that is not how such a conversation begins is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rollmesh.learner.data.chat_turns import Messages
from rollmesh.learner.data.parts.messages import same_message, text_of
from rollmesh.mesh.errors import DataError

Text = str | Messages
AS_CHAT = "set data.as_chat: true"
"""The remedy for a prompt and responses that are texts, where a chat template is meant."""
ANSWERS = ("assistant", "tool")
_SYSTEM = ("system", "developer")
# Shorter prompts stand at the beginning of answers by chance. Not all languages write spaces between words.
_WORDS = 3
_BYTES = 15


def divide(prompt: Text, responses: Mapping[str, Text], key: str) -> tuple[Text, Sequence[Text]]:
    """A prompt, and what each response says beyond it.

    Args:
        prompt: of the row.
        responses: by their fields.
        key: field of the prompt, for errors.

    Returns:
        The prompt: as messages where a response is a whole conversation; and the responses, in their order.

    Raises:
        DataError: a conversation begins otherwise than the prompt, or the conversations otherwise than each other.
    """
    texts = [response for response in responses.values() if isinstance(response, str)]
    if isinstance(prompt, str) and len(texts) == len(responses):
        return _divide_texts(prompt, texts)
    divided = [_divide(prompt, response, key, name) for name, response in responses.items()]
    chats = [begun for begun, _ in divided if not isinstance(begun, str)]
    for begun in chats[1:]:
        if not _same(begun, chats[0]):
            names = " and ".join(f"`{name}`" for name in responses)
            raise DataError(f"fields {names} begin with other messages", hint="give both the same beginning")
    rests = [rest for _, rest in divided]
    if isinstance(prompt, str) and len(chats) == 2:
        # Published pairs name the first message, and may have more in common.
        return _divide_further(chats[0], *(as_messages(rest, "assistant") for rest in rests))
    return chats[0] if chats else prompt, rests


def messages_of(
    prompt: Text, responses: Mapping[str, Text], key: str, *, whole: bool = False
) -> tuple[Messages, list[Messages]]:
    """A prompt and its responses as messages: a text is the user's or the assistant's, as `data.as_chat` asks.

    Args:
        prompt, responses, key: see `divide`.
        whole: responses that are texts may hold the prompt again; otherwise they stand as they are.

    Raises:
        DataError: as `divide`; whole texts have more around the prompt than white space.
    """
    rests: Sequence[Text] = list(responses.values())
    texts = isinstance(prompt, str) and all(isinstance(rest, str) for rest in rests)
    if whole or not texts:
        begun, rests = divide(prompt, responses, key)
        if texts and str(begun).rstrip() != str(prompt).rstrip():
            raise no_chat(key)
        if texts and rests != list(responses.values()):
            rests = [str(rest).lstrip() for rest in rests]
        prompt = begun
    return as_messages(prompt, "user"), [as_messages(rest, "assistant") for rest in rests]


def no_chat(key: str) -> DataError:
    """The error of whole texts that cannot be told apart into messages; `key` is the field of a prompt."""
    return DataError(
        "its answers are whole texts, and data.as_chat makes messages of a prompt and of answers alone",
        hint=f"give the prompt as `{key}` and the answers without it, or leave data.as_chat out",
    )


def split_prompt(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """The common beginning of two texts or conversations, and what follows in each.

    Texts are divided before a space, where tokenizers begin words.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        pairs = enumerate(zip(chosen, rejected, strict=False))
        common = next((place for place, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
        space = chosen.rfind(" ", 0, common + 1)
        cut = common if common in (len(chosen), len(rejected)) else max(space, 0)
        return chosen[:cut], chosen[cut:], rejected[cut:]
    first, second = as_messages(chosen, "assistant"), as_messages(rejected, "assistant")
    begun, (first, second) = _divide_further([], first, second)
    return begun, first, second


def split_last_answer(completion: Text, field: str) -> tuple[Messages, Messages]:
    """A whole conversation as its prompt and the answer to it.

    Raises:
        DataError: it is none, or the assistant answers several times, so that it does not say where its prompt ends.
    """
    if isinstance(completion, str) or completion[0]["role"] in ANSWERS:
        raise DataError(f"no field has the prompt of `{field}`", hint="data.prompt_key names the field with the prompt")
    first = next((place for place, message in enumerate(completion) if message["role"] == "assistant"), 0)
    if any(message["role"] not in ANSWERS for message in completion[first:]):
        raise DataError(
            f"field `{field}` has several answers of the assistant, and no prompt tells which one is meant",
            hint="give the messages before the answer as `prompt`",
        )
    return completion[:first], completion[first:]


def as_messages(value: Text, role: str) -> Messages:
    """Messages; a text becomes one of the role."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _divide_further(begun: Messages, first: Messages, second: Messages) -> tuple[Messages, list[Messages]]:
    """A beginning with all that two conversations have in common; each keeps a message of its own."""
    most = max(0, min(len(first), len(second)) - 1)
    same = sum(1 for _ in takewhile(lambda pair: same_message(*pair), zip(first[:most], second[:most], strict=True)))
    return [*begun, *first[:same]], [first[same:], second[same:]]


def _divide_texts(prompt: str, texts: list[str]) -> tuple[Text, list[Text]]:
    begun = prompt.rstrip()
    if len(begun.split()) >= _WORDS or len(begun.encode()) >= _BYTES:
        if all(text.startswith(begun) for text in texts):
            return begun, [text[len(begun) :] for text in texts]
        if len(texts) == 2:
            # As `Human: ... Assistant:`, where the prompt has its words alone.
            common, *rests = split_prompt(*texts)
            if prompt.strip() in common:
                return common, rests
    return prompt, list(texts)


def _divide(prompt: Text, response: Text, key: str, name: str) -> tuple[Text, Text]:
    if isinstance(response, str):
        return prompt, response
    end = _end_of_prompt(prompt, response)
    if end is not None:
        return response[:end], response[end:]
    if response[0]["role"] in ANSWERS:
        return prompt, response
    begun = None if isinstance(prompt, str) else _joined(prompt, response)
    if begun is None:
        raise DataError(
            f"field `{key}` is not how the conversation of `{name}` begins",
            hint=f"leave `{key}` out where `{name}` is a whole conversation, or begin it with the assistant's answer",
        )
    return begun


def _end_of_prompt(prompt: Text, response: Messages) -> int | None:
    """The place after the prompt in a conversation that holds all of it; None if it does not."""
    if not isinstance(prompt, str):
        return len(prompt) if prompt and _same(prompt, response[: len(prompt)]) else None
    for place, message in enumerate(response):
        if message["role"] == "user" and text_of(message) == prompt.strip():
            return place + 1
    return None


def _joined(prompt: Messages, response: Messages) -> tuple[Messages, Messages] | None:
    """The prompt and what follows it in a conversation that repeats some of it; None if they do not fit."""
    if response[0]["role"] in _SYSTEM:
        system = [] if prompt and prompt[0]["role"] in _SYSTEM else response[:1]
        begun = [*system, *prompt]
        return (begun, response[len(begun) :]) if _same(begun, response[: len(begun)]) else None
    if all(message["role"] in _SYSTEM for message in prompt):
        return prompt, response
    for repeated in range(min(len(prompt), len(response)), 0, -1):
        if _same(prompt[-repeated:], response[:repeated]):
            return prompt, response[repeated:]
    return None


def _same(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> bool:
    return len(first) == len(second) and all(map(same_message, first, second))
