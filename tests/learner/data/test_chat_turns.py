"""Masks of conversations: exact to the token, whatever the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rollmesh.learner.data import chat_turns
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.errors import ChatTemplateError, DataError
from tests import chat_templates as of

_PROMPT = "{% if add_generation_prompt %}[a]{% endif %}"
PLAIN = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}|{% endfor %}" + _PROMPT
LINES = PLAIN.replace("|", "|\n")
# As Qwen2.5 without instructions: turns end with another special token than texts.
ANOTHER_END = PLAIN.replace("|", "<e>\n")
MARKED = (
    "{% for m in messages %}[{{ m.role[0] }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|"
    "{% endgeneration %}{% else %}{{ m.content }}|{% endif %}{% endfor %}"
)
# As templates that leave the thoughts of earlier turns out.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role[0] }}]{% if loop.last and m.role == 'assistant' %}so: {% endif %}"
    "{{ m.content }}|{% endfor %}" + _PROMPT
)
NO_EMPTY = "{% if messages[0].role %}" + PLAIN + "{% endif %}"
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
]


def make_tokenizer(
    template: str | None = None, pieces: Sequence[str] = (), *, begins: bool = False
) -> PreTrainedTokenizerFast:
    """Tokens of single characters, but for the given pieces and the special tokens `<s>` and `<e>`.

    Args:
        template: for chats.
        pieces: longer texts with a token of their own.
        begins: texts get a begin token, `<s>`.
    """
    characters = "?|[]\n: " + "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {token: index for index, token in enumerate([*characters, *pieces, "<s>", "<e>"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    pattern = "|".join([*pieces, r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.decoder = decoders.Fuse()
    if begins:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="?",
        eos_token="|",
        bos_token="<s>" if begins else None,
        additional_special_tokens=["<e>"],
        chat_template=template,
    )


def trained_text(template: str, turns: Sequence[int], messages: Sequence[dict[str, Any]] = CHAT) -> str:
    """The trained part of a conversation."""
    tokenizer = make_tokenizer(template)
    tokens = ChatEncoder(tokenizer).encode(messages, turns)
    return "".join(tokenizer.convert_ids_to_tokens(tokens.ids[tokens.trained].tolist()))


@pytest.mark.parametrize("template", [PLAIN, LINES, MARKED])
def test_turns_are_trained_with_their_end_token_and_nothing_after_it(template: str) -> None:
    assert trained_text(template, [1, 3]) == "one|two|"
    assert trained_text(template, [3]) == "two|"


def test_a_turn_that_another_special_token_ends_is_trained_up_to_it() -> None:
    assert trained_text(ANOTHER_END, [1, 3]) == "one<e>two<e>"


def test_whole_text_is_what_the_template_writes() -> None:
    tokenizer = make_tokenizer(LINES)
    tokens = ChatEncoder(tokenizer).encode(CHAT, [3])
    assert tokens.ids.tolist() == tokenizer.apply_chat_template(CHAT, return_dict=False)


def test_a_template_that_changes_earlier_turns_trains_the_last_one_alone() -> None:
    assert trained_text(FORGETFUL, [3]) == "so: two|"
    with pytest.raises(DataError, match="message 1 otherwise") as caught:
        trained_text(FORGETFUL, [1, 3])
    assert "data.train_on: last" in caught.value.hint


@pytest.mark.parametrize("template", [PLAIN, LINES, ANOTHER_END, NO_EMPTY])
def test_a_turn_that_begins_a_conversation_is_trained_without_its_header(template: str) -> None:
    end = "<e>" if template == ANOTHER_END else "|"
    assert trained_text(template, [0, 2], CHAT[1:]) == f"one{end}two{end}"


def test_a_turn_without_text_is_trained_to_end() -> None:
    silent = [CHAT[0], {"role": "assistant", "content": ""}]
    assert trained_text(PLAIN, [1], silent) == "|"


def test_templates_are_needed_and_their_errors_are_named() -> None:
    with pytest.raises(DataError, match="no chat template"):
        ChatEncoder(make_tokenizer()).encode(CHAT, [1])
    with pytest.raises(DataError, match="refuses a conversation of user assistant: only two"):
        ChatEncoder(make_tokenizer("{{ raise_exception('only two') }}")).encode(CHAT, [1])


def test_tools_and_further_arguments_reach_the_template() -> None:
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}" + PLAIN
    tokenizer = make_tokenizer(template)
    tokens = ChatEncoder(tokenizer, {"mood": "x"}).encode(CHAT[:2], [1], [{"function": {"name": "t"}}])
    assert "".join(tokenizer.convert_ids_to_tokens(tokens.ids.tolist())) == "tx[u]hi|[a]one|"


def trained_pieces(template: str, turns: Sequence[int], messages: Sequence[dict[str, Any]] = CHAT) -> list[str]:
    """The whole text, and its trained parts."""
    tokenizer = of.tokenizer_for(template)
    tokens = ChatEncoder(tokenizer).encode(messages, turns)
    cuts = np.flatnonzero(np.diff(tokens.trained.astype(int))) + 1
    runs = zip(np.split(tokens.ids, cuts), np.split(tokens.trained, cuts), strict=True)
    return [tokenizer.decode(tokens.ids), *(tokenizer.decode(ids) for ids, trained in runs if trained[0])]


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (of.CHATML, ("<|im_end|>", "<|im_end|>")),
        (of.MARKED, ("<|im_end|>", "<|im_end|>")),
        (of.MARKED_WITHOUT_END, ("<|im_end|>", "<|im_end|>")),
        (of.PARTS, ("<|im_end|>", "<|im_end|>")),
        (of.MARKED_IN_PARTS, ("<|im_end|>", "<|im_end|>")),
        # More follows after the last turn.
        (
            of.CHATML.replace(of.ASK, of.ASK.replace("{% endif %}", "{% else %}<|end|>{% endif %}")),
            ("<|im_end|>", "<|im_end|>"),
        ),
        # The next message's token ends a turn, and one is written after the last.
        (of.NEXT_ROLE, ("<|user|>", "<|user|>")),
        # The tokenizer's end token stands for an end that is never written.
        (of.NEVER, ("\n", "\n<|im_end|>")),
    ],
)
def test_a_model_learns_to_stop_whatever_ends_a_turn(template: str, ends: tuple[str, str]) -> None:
    text, *said = trained_pieces(template, [1, 3])
    assert said == ["one" + ends[0], "two" + ends[1]]
    assert text.removesuffix("<|end|>").endswith((said[-1], said[-1] + "\n"))
    assert trained_pieces(template, [3])[1:] == [said[1]]


def test_a_call_ends_as_calls_do() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = trained_pieces(of.NEXT_ROLE, [1], [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}])[1]
    assert said == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|tool|>'


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "<think>\nhm\n</think>\n\none"},
        {"content": "hm\n</think>\n\none"},
        {"content": "one", "reasoning_content": "hm"},
    ],
)
def test_thoughts_that_the_prompt_opens_are_trained_after_it(answer: dict[str, str]) -> None:
    text, said = trained_pieces(of.OPENS_THOUGHTS, [1], [CHAT[0], {"role": "assistant", **answer}])
    assert said == "hm\n</think>\n\none<|im_end|>"
    assert text == "<|user|>hi<|im_end|><|assistant|><think>\n" + said


@pytest.mark.parametrize("answer", [{"content": "<think>hm</think>one"}, {"content": "one", "reasoning_content": "hm"}])
def test_thoughts_that_no_template_writes_are_refused(answer: dict[str, str]) -> None:
    with pytest.raises(DataError, match="message 1 has thoughts, and the chat template does not") as caught:
        trained_pieces(of.DROPS_THOUGHTS, [1], [CHAT[0], {"role": "assistant", **answer}])
    assert caught.value.hint.startswith("remove them")
    with pytest.raises(DataError, match="message 1 has thoughts") as caught:
        trained_pieces(of.MARKED_DROPS_THOUGHTS, [1, 3], [CHAT[0], {"role": "assistant", **answer}, *CHAT[2:]])
    assert "set data.train_on: last" in caught.value.hint
    last = [*CHAT[:3], {"role": "assistant", **answer}]
    assert trained_pieces(of.MARKED_DROPS_THOUGHTS, [3], last)[1] == "<think>hm</think>one<|im_end|>"
    assert trained_pieces(of.DROPS_THOUGHTS, [1], CHAT[:2])[1] == "one<|im_end|>"
    assert (
        "hm</think>one<|im_end|>"
        in trained_pieces(of.THOUGHTS_APART, [1], [CHAT[0], {"role": "assistant", **answer}])[1]
    )


def test_an_answer_without_the_thoughts_that_its_prompt_opens_is_refused() -> None:
    with pytest.raises(DataError, match="opens thoughts in the prompt of message 1") as caught:
        trained_pieces(of.OPENS_THOUGHTS, [1], CHAT[:2])
    assert "<think> ... </think>" in caught.value.hint
    with pytest.raises(DataError, match="message 1 otherwise once later"):
        trained_pieces(of.OPENS_THOUGHTS, [1, 3])
    # The remedy of the second leads to the first one's, and that one works.
    thinking = {**CHAT[3], "content": "<think>hm</think>two"}
    assert trained_pieces(of.OPENS_THOUGHTS, [3], [*CHAT[:3], thinking])[1] == "hm</think>two<|im_end|>"


def test_a_prompt_that_is_not_how_the_conversation_begins_is_refused() -> None:
    with pytest.raises(DataError, match="a prompt for message 1 that is not how the conversation begins") as caught:
        trained_pieces(of.DEFAULT_IN_PROMPTS, [1], CHAT[:2])
    assert "system message of its own" in caught.value.hint
    system = {"role": "system", "content": "Be kind."}
    assert trained_pieces(of.DEFAULT_IN_PROMPTS, [2, 4], [system, *CHAT])[1:] == ["one<|im_end|>", "two<|im_end|>"]


def test_an_end_that_changes_once_another_message_follows_is_trained_in_the_last_turn_alone() -> None:
    assert trained_pieces(of.ANOTHER_END_ONCE_FOLLOWED, [3])[1] == "two<|return|>"
    with pytest.raises(DataError, match="message 1 otherwise"):
        trained_pieces(of.ANOTHER_END_ONCE_FOLLOWED, [1, 3])


def test_tools_that_no_template_shows_are_refused() -> None:
    encoder = ChatEncoder(of.tokenizer_for(of.TRIMS))
    with pytest.raises(DataError, match="does not show them") as caught:
        encoder.encode(CHAT[:2], [1], [{"function": {"name": "t"}}])
    assert "remove the field `tools`" in caught.value.hint
    assert encoder.encode(CHAT[:2], [1]).trained.any()


def pieces_of(template: str, turns: Sequence[int]) -> list[str]:
    """The trained parts of the conversation."""
    tokenizer = make_tokenizer(template)
    tokens = ChatEncoder(tokenizer).encode(CHAT, turns)
    cuts = np.flatnonzero(np.diff(tokens.trained.astype(int))) + 1
    runs = zip(np.split(tokens.ids, cuts), np.split(tokens.trained, cuts), strict=True)
    return ["".join(tokenizer.convert_ids_to_tokens(ids.tolist())) for ids, trained in runs if trained[0]]


def marking(condition: str, words: str = "m.content") -> str:
    """A template that marks words of some messages."""
    return (
        "{% for m in messages %}[{{ m.role[0] }}]{% if " + condition + " %}{% generation %}{{ " + words + " }}"
        "{% endgeneration %}{{ m.content[("
        + words
        + ") | length:] }}{% else %}{{ m.content }}{% endif %}|{% endfor %}"
        + _PROMPT
    )


@pytest.mark.parametrize(
    "template",
    [
        marking("m.role == 'user'"),
        marking("true"),
        marking("m.role == 'assistant'", "m.content[:2]"),
        marking("m.role == 'assistant'", "''"),
        "{% generation %}" + PLAIN + "{% endgeneration %}",
    ],
    ids=["the user's", "all", "half", "none", "everything"],
)
def test_marks_of_other_words_than_the_assistants_do_not_count(template: str) -> None:
    assert pieces_of(template, [1, 3]) == ["one|", "two|"]


@pytest.mark.parametrize(("condition", "marked"), [("loop.index0 == 1", 1), ("loop.last and m.role == 'assistant'", 3)])
def test_a_turn_that_is_to_be_trained_and_has_no_mark_is_refused(condition: str, marked: int) -> None:
    template = marking(condition)
    with pytest.raises(ChatTemplateError, match=f"does not mark message {4 - marked} with") as refused:
        pieces_of(template, [1, 3])
    assert pieces_of(template, [marked]) == [f"{CHAT[marked]['content']}|"]
    # The remedy.
    assert "take the marks out" in str(refused.value)
    unmarked = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert pieces_of(unmarked, [1, 3]) == ["one|", "two|"]


def test_a_prompt_with_which_no_conversation_begins_is_said_to_be_that_in_every_turn() -> None:
    for turns in ([1, 3], [3]):
        with pytest.raises(ChatTemplateError, match="that is not how the conversation begins"):
            trained_text(PLAIN.replace("[a]", "[m]"), turns)


LONG = [dict(message) for message in CHAT * 20]
AGENT = [
    {"role": "user", "content": "add"},
    {
        "role": "assistant",
        "content": "so",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two"},
] * 10
THINKS = [{**message, "reasoning_content": "hm"} if message["role"] == "assistant" else message for message in LONG]


@pytest.mark.parametrize(
    ("template", "messages", "most"),
    [
        *((template, LONG, 6) for template in (of.CHATML, of.MARKED, of.MARKED_WITHOUT_END, of.PARTS, of.NEXT_ROLE)),
        (of.TRIMS, [{**message, "content": f" {message['content']} "} for message in LONG], 6),
        (of.CHATML, AGENT, 6),
        (of.THOUGHTS_APART, THINKS, 6),
        # No mark before the answer tells it from other text, and there is no end.
        (of.CHATML, [*LONG[:-2], {"role": "user", "content": "<|assistant|>"}, LONG[-1]], 100),
        (of.NEVER, LONG, 100),
    ],
)
def test_many_turns_are_rendered_once(
    template: str, messages: list[dict[str, Any]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    encoder = ChatEncoder(of.tokenizer_for(template))
    with monkeypatch.context() as patch:
        patch.setattr(chat_turns, "_RENDERED", 99)
        one_by_one = encoder.render(messages, turns)
    renderings, render = 0, ChatTemplate.render

    def counted(self: ChatTemplate, *given: Any, **how: Any) -> str:
        nonlocal renderings
        renderings += 1
        return render(self, *given, **how)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    assert encoder.render(messages, turns) == one_by_one
    assert renderings <= most


def test_marks_that_tell_another_end_than_renderings_are_not_believed() -> None:
    template = of.CHATML.replace("<|im_end|>\n{% endfor %}", "{{ '<|im_end|>' }}<|im_end|>\n{% endfor %}")
    said = trained_pieces(template, list(range(1, 40, 2)), LONG[:40])[1:]
    assert said == ["one<|im_end|><|im_end|>", "two<|im_end|><|im_end|>"] * 10
