"""Chat templates, each with one habit of a well-known family, and a tokenizer for any of them."""

from __future__ import annotations

import re
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_MARK = re.compile(r"<\|[a-z_]+\|>|</?s>")

_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|im_end|>\n{% endif %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_EACH = "{% for m in messages %}<|{{ m.role }}|>"
CHATML = _TOOLS + _EACH + "{{ m.content or '' }}" + _CALLS + "<|im_end|>\n{% endfor %}" + ASK
# No turn has an end of its own: the next role's token comes.
NEXT_ROLE = _TOOLS + _EACH + "{{ m.content or '' }}" + _CALLS + "{% endfor %}" + ASK
NEVER = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = (
    _EACH + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + ASK
)
MARKED_IN_PARTS = MARKED.replace(
    "<|im_end|>{% endgeneration %}", "{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}"
)
MARKED_WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
MARKED_DROPS_THOUGHTS = MARKED.replace(
    "{% generation %}{{ m.content }}",
    "{% generation %}{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}",
)
PARTS = (
    _EACH + "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<image>{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}" + ASK
)
TRIMS = "<s>" + _EACH + "{{ m.content | trim }}<|im_end|>\n{% endfor %}" + ASK
# The generation prompt opens thoughts, and history has none.
OPENS_THOUGHTS = (
    _EACH + "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
ANOTHER_END_ONCE_FOLLOWED = (
    _EACH
    + "{{ m.content }}{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    + ASK
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    + ASK
)
NINE_LETTERS = CHATML.replace(
    "{% for c in m.tool_calls or [] %}",
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}",
)
ARGUMENTS_AS_TEXT = CHATML.replace("{{ c.function.arguments | tojson }}", "{{ '' ~ c.function.arguments }}")
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|system|>Be kind.<|im_end|>\n{% endif %}" + CHATML
# Prompts have a system message that conversations lack.
DEFAULT_IN_PROMPTS = (
    "{% if add_generation_prompt and messages[0].role != 'system' %}<|system|>Be kind.<|im_end|>\n{% endif %}" + CHATML
)
LOSES_SYSTEM = (
    _EACH.replace("<|", "{% if m.role != 'system' %}<|", 1) + "{{ m.content }}<|im_end|>{% endif %}{% endfor %}" + ASK
)
ROLES = ("user", "assistant", "system", "developer", "tool")
# As Qwen's: other roles than these are written nowhere, and a late system message is none of them.
KNOWN_ROLES = (
    "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}<|im_end|>\n{% endif %}"
    + CHATML.replace(
        _EACH, "{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') %}<|{{ m.role }}|>", 1
    ).replace("\n{% endfor %}" + ASK, "\n{% endif %}{% endfor %}" + ASK)
)
TWO_ROLES = LOSES_SYSTEM.replace("m.role != 'system'", "m.role in ('user', 'assistant')")
# All that is not the user's is the assistant's.
TWO_SPEAKERS = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'assistant' }}|>{{ m.content }}<|im_end|>{% endfor %}"
    + ASK
)
CALLS_ALONE = CHATML.replace("{{ m.content or '' }}", "{{ '' if m.tool_calls else m.content }}")
ONE_CALL = CHATML.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
THOUGHTS_APART = CHATML.replace(
    "{{ m.content or '' }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}",
)
DROPS_THOUGHTS = CHATML.replace("{{ m.content or '' }}", "{{ (m.content or '').split('</think>')[-1] }}")
# `shout` and documents are arguments of the template; `think: false` closes the thoughts that a prompt opens.
ARGUMENTS = (
    "{% for d in documents or [] %}<|system|>{{ d.text }}<|im_end|>{% endfor %}{{ 'LOUD ' if shout }}"
    + OPENS_THOUGHTS.replace("<think>\n{% endif %}", "{% if enable_thinking != false %}<think>\n{% endif %}{% endif %}")
)


@lru_cache
def tokenizer_for(template: str, *, end: str = "<|im_end|>", begins: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, in which all marks of a template are special tokens.

    Args:
        template: of the tokenizer.
        end: its end token.
        begins: it puts a begin token before texts.
    """
    roles = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
    marks = dict.fromkeys((*_MARK.findall(template), *roles, end, "<s>"))
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(marks))
    if begins:
        core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, bos_token="<s>")
    made.chat_template = template
    return made
