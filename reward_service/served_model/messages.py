"""Messages between a model's process and its owner: msgpack over a socket pair. Nothing is ever unpickled.

To the process: first its options (`ModelOptions` as a dict) and log settings, then
`[ASK, [[job, text, alone], ...]]` and `[DROP, [job, ...]]`. A text is what the model's reader takes, see `texts`.

`[HEARD, job]` says which text is read just now, 0 that all are read that have come.

From the process: `[READY]` or `[REFUSED, message, hint]`. Later `[BEGUN, [job, ...]]` before each pass,
`[DONE, [[job, values], ...]]` and `[FAILED, [[job, code, message], ...]]`, and `[AWAY, reason, [job, ...]]` where the
engine is not there: these jobs are not begun any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

READY, REFUSED, ASK, DROP, HEARD, BEGUN, DONE, FAILED, AWAY = (
    "ready", "refused", "ask", "drop", "heard", "begun", "done", "failed", "away",
)  # fmt: skip
MESSAGE_BYTES = 64 << 20
Kind = Literal["response", "steps"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model, and the way to ask it.

    Attributes:
        kind: `response`: one value of all; `steps`: one after each step.
        folder: of the model and its tokenizer.
        engine: transformers, vllm or sglang; the latter two are servers.
        url: http://HOST:PORT of a server elsewhere; empty: one is started where the engine needs it.
        key: of the server; empty: none.
        python: interpreter of a server that is started; empty: that of the process.
        server_options: further arguments of such a server, by their names.
        timeout_s: of one request to it.
        device: of torch; empty: CUDA if there is one.
        dtype: of the weights; `auto`: as they are stored.
        max_tokens: of one pass, padding included.
        max_wait_s: seconds for which a batch is waited for.
        template: `chat`, `text`, or empty: `chat` where the tokenizer has a chat template.
        label: index or name of the label that is the reward; empty: the only one, or that of good steps.
        activation: none, sigmoid or softmax.
        separator: text after each step.
        good, bad: texts of the tokens that a causal model writes there; else empty.
        system: first message of the chat template; else empty.
    """

    kind: Kind
    folder: str
    engine: str = "transformers"
    url: str = ""
    key: str = field(default="", repr=False)
    python: str = ""
    server_options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 30.0
    device: str = ""
    dtype: str = "auto"
    max_tokens: int = 16384
    max_wait_s: float = 0.005
    template: str = ""
    label: str = ""
    activation: str = "none"
    separator: str = ""
    good: str = ""
    bad: str = ""
    system: str = ""


Text = tuple[str, str | list[str], list[dict[str, Any]]]
"""A prompt, a response or its steps, and the prompt's messages (empty: there are none)."""
