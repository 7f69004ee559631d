"""A real endpoint with a real engine, whose model says what a script says: a model of one layer that follows a table.

The chat template looks at the last message and puts the mark of a script into the prompt. After a mark several answers
are possible, each likelier than the next by far. So the model gives the first one that a grammar allows. That is text
where nothing is asked, an object where one is, and else a call of the tool that is offered.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.generators.engines.tiny import train_tokenizer
from tests.generators.openai_server.world import EOS, Serving

KEY, HALF, ANSWER = "first", "417", "923"
"""The tool `lookup` tells HALF for KEY, and ANSWER for HALF."""


def _call(name: str, arguments: str) -> str:
    # A grammar takes a token that begins and ends as a tag does for a special one.
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _code(thought: str, code: str) -> list[str]:
    return [f"{thought}\n", f"<code>\n{code}\n"]


def _fields(**fields: str) -> str:
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in {**fields, "completed": ""}.items())


def _step(tool: str, arguments: str) -> str:
    return _fields(next_thought="Look.", next_tool_name=tool, next_tool_args=arguments)


# Pieces of each answer are single tokens; after the last one the answer ends.
SCRIPTS: dict[str, list[list[str]]] = {
    "<ask-first>": [[_call("lookup", f'{{"key": "{KEY}"}}')], ["Nothing to look up."]],
    # Clients keep thoughts where they stand, or apart, or not at all.
    "<ask-second>": [
        ["<think>\nOnce more.\n</think>\n" + _call("lookup", f'{{"key": "{HALF}"}}')],
        [_call("lookup", f'{{"key": "{HALF}"}}')],
        ["Nothing more to look up."],
    ],
    "<tell>": [
        ["The number", " is", f" {ANSWER}."],
        [f'{{"number": {ANSWER}}}'],
        [_call("final_result", f'{{"number": {ANSWER}}}')],
        [_call("final_answer", f'{{"answer": "{ANSWER}"}}')],
    ],
    "<code-first>": [
        _code("Thought: I look it up.", f'half = lookup(key="{KEY}")\nprint(half)'),
        [f'{{"thought": "I look it up.", "code": "half = lookup(key=\'{KEY}\')\\nprint(half)"}}'],
    ],
    "<code-second>": [
        _code("Thought: Once more.", f'whole = lookup(key="{HALF}")\nprint(whole)'),
        [f'{{"thought": "Once more.", "code": "whole = lookup(key=\'{HALF}\')\\nprint(whole)"}}'],
    ],
    "<code-tell>": [
        _code("Thought: I know it.", f'final_answer("{ANSWER}")'),
        [f'{{"thought": "I know it.", "code": "final_answer(\'{ANSWER}\')"}}'],
    ],
    "<fields>": [["[[ ## number ## ]]\n", ANSWER, "\n\n[[ ## completed ## ]]\n"]],
    "<json>": [[f'{{"number":{ANSWER}}}']],
    "<step-first>": [[_step("lookup", f'{{"key": "{KEY}"}}')]],
    "<step-second>": [[_step("lookup", f'{{"key": "{HALF}"}}')]],
    "<step-tell>": [[_step("finish", "{}")]],
    "<reason>": [[_fields(reasoning="Looked up.", number=ANSWER)]],
}
_MARKS = ["<system>", "<user>", "<assistant>", "<tool>", *SCRIPTS]
_STATE = (
    "{% set said = messages[-1].content | string %}"
    f"{{% set known = '{ANSWER}' in said or 'at once' in said %}}"
    f"{{% set step = 'tell' if known else 'second' if '{HALF}' in said else 'first' %}}"
    "{% if 'JSON object in the following order' in said %}<json>"
    "{% elif '[[ ## next_thought ## ]]' in said %}<step-{{ step }}>"
    "{% elif '[[ ## reasoning ## ]]' in said %}<reason>"
    "{% elif '[[ ## number ## ]]' in said %}<fields>"
    "{% elif 'in code' in said or 'code snippet' in said %}<code-{{ step }}>"
    "{% elif step == 'tell' %}<tell>{% else %}<ask-{{ step }}>{% endif %}"
)
TEMPLATE = (
    "<system>{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}<eot>"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>" + _STATE + "{% endif %}"
)
# Logits between two answers after the same mark, and of the best one.
_BETTER, _BEST = 20.0, 100.0


def scripted_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a token for each mark and each piece."""
    tokenizer = train_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in _MARKS])
    pieces = [piece for answers in SCRIPTS.values() for answer in answers for piece in answer]
    assert len(set(pieces)) == len(pieces), "a piece says which one follows"
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def scripted_chances(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Log-chances [last token, next token]: of the scripts; the end after anything else."""
    size = len(tokenizer)
    logits = torch.zeros(size, size)
    logits[:, EOS] = _BETTER
    for mark, answers in SCRIPTS.items():
        for rank, answer in enumerate(answers):
            tokens = tokenizer.convert_tokens_to_ids([mark, *answer])
            for last, after in itertools.pairwise(tokens):
                logits[last, after] = _BEST - _BETTER * rank
    return logits.log_softmax(1)


def serving(folder: Path) -> Serving:
    """An endpoint whose model follows the scripts; its weights are in service."""
    tokenizer = scripted_tokenizer()
    found = Serving(
        folder,
        tokenizer,
        scripted_chances(tokenizer),
        rollout__max_prompt_tokens=24000,
        rollout__max_response_tokens=2000,
    )
    found.swap(0)
    return found
