"""A real engine with a model whose next token depends on the last one alone, behind a real endpoint.

A row of chances follows each token: texts are as random, and calls of tools as certain, as a test needs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollmesh.generators.engine_events import EngineEventBridge
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.generators.openai_server.endpoint import Endpoint
from rollmesh.generators.openai_server.http_server import EndpointServer
from rollmesh.generators.openai_server.metrics import EndpointMetrics
from rollmesh.generators.tokenizer import TokenizerCodec
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines.tiny import save_folder, train_tokenizer

T = TypeVar("T")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
# After a prompt with tools the model calls one; else it says anything.
TEMPLATE = (
    "{% if tools %}<system>{{ tools | tojson }} <tool_call><eot>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if tools and messages[-1].role != 'tool' %}<act>{% endif %}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
_ROLES = ["<system>", "<user>", "<assistant>", "<tool>", "<act>"]
EOS, EOT = 1, 2


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with tokens for roles, and one for a whole call of a tool."""
    tokenizer = train_tokenizer()
    tokenizer.add_tokens([AddedToken(name, special=True) for name in _ROLES])
    tokenizer.add_tokens([AddedToken(CALL, special=False), AddedToken("STOP here", special=False)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def chances(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> torch.Tensor:
    """Log-chances [last token, next token]: anything but special tokens, and the end now and then."""
    size = len(tokenizer)
    logits = 2 * torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    specials = [0, EOT, *tokenizer.convert_tokens_to_ids([*_ROLES, CALL, "STOP here"])]
    logits[:, specials] = -30.0
    logits[:, EOS] = logits.logsumexp(1) - 4.0
    call, act = tokenizer.convert_tokens_to_ids([CALL, "<act>"])
    logits[act, call] = 30.0
    logits[call, EOS] = 30.0
    return logits.log_softmax(1)


def markov_model(log_chances: torch.Tensor, context: int = 512) -> Qwen3ForCausalLM:
    """Its blocks add nothing to the embedding, which names the last token; the head holds the chances."""
    size = len(log_chances)
    config = Qwen3Config(
        vocab_size=size, hidden_size=size, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=context, tie_word_embeddings=False,
        eos_token_id=[EOS, EOT], pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(size))
    model.lm_head.weight.copy_(log_chances.T / size**0.5)
    return model


def settings(**overrides: Any) -> Config:
    values = {
        "run": {"name": "tiny"},
        "model": {"path": "unused"},
        "data": {"train": "unused"},
        "rollout": {"max_prompt_tokens": 300, "max_response_tokens": 100, "slots": 16},
    }
    return load_config(values, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in overrides.items()])


class Serving:
    """An endpoint at work, in an event loop of its own.

    Args:
        folder: for the files of the model.
        tokenizer: of the model; None: `chat_tokenizer`.
        log_chances: of the model [last token, next token]; None: `chances`.
        overrides: of the configuration.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: PreTrainedTokenizerFast | None = None,
        log_chances: torch.Tensor | None = None,
        **overrides: Any,
    ) -> None:
        self.tokenizer = chat_tokenizer() if tokenizer is None else tokenizer
        self.log_chances = chances(self.tokenizer) if log_chances is None else log_chances
        self.config = settings(**overrides)
        self.model = markov_model(self.log_chances, max(512, self.config.rollout.context_tokens))
        self.folder = save_folder(folder, self.model, self.tokenizer)
        self.bridge = AsyncBridge("endpoint")
        self.registry = CollectorRegistry()
        self.others: list[Any] = []
        self.engine: InferenceEngine
        self.endpoint: Endpoint
        self.run(self._start)

    async def _start(self) -> None:
        feed = EngineEventBridge(lambda error: None)
        self.engine = create_engine("hf", self.folder, EngineSettings(slots=16), feed)
        self.engine.start()
        text = TokenizerCodec(self.folder)
        self.endpoint = Endpoint(self.config, self.engine, text, security=SecuritySection(), registry=self.registry)
        feed.connect(lambda batch: self.others.extend(self.endpoint.accept_results(batch)), self.endpoint.accept_tokens)
        await self.endpoint.start("127.0.0.1", None)

    def swap(self, version: int = 0, model: Qwen3ForCausalLM | None = None) -> None:
        """Puts weights in service."""
        tensors = (model or self.model).named_parameters()
        self.engine.update_weights(PolicyVersion(1, version), tensors, f"digest-{version}").result(180)

    def run(self, what: Callable[[], Awaitable[T]]) -> T:
        """In the endpoint's event loop."""

        async def call() -> T:
            return await what()

        return self.bridge.call(call(), 60)

    @property
    def url(self) -> str:
        return self.endpoint.server.url

    def figure(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"rollmesh_generator_endpoint_{name}", labels) or 0.0

    def close(self) -> None:
        self.run(self.endpoint.close)
        self.engine.stop()
        self.bridge.close()


@contextmanager
def another_server(
    serving: Serving, security: SecuritySection, host: str = "127.0.0.1", port: int = 0
) -> Iterator[EndpointServer]:
    """For the same answers."""
    endpoint = serving.endpoint
    server = EndpointServer(
        endpoint.completions,
        endpoint.sessions,
        EndpointMetrics(CollectorRegistry()),
        model="tiny",
        security=security,
        created=1,
    )
    try:
        serving.run(lambda: server.start(host=host, port=port, advertise=None, public=True))
        yield server
    finally:
        serving.run(server.close)


async def soon(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0.01)
