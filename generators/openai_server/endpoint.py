"""The endpoint of one generator, put together."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import GenerationResult, TokenEvent
from rollmesh.generators.openai_server.completions import Completions
from rollmesh.generators.openai_server.conversations.sessions import Sessions
from rollmesh.generators.openai_server.engine_client import EngineClient
from rollmesh.generators.openai_server.http_server import EndpointServer
from rollmesh.generators.openai_server.metrics import EndpointMetrics
from rollmesh.generators.openai_server.template_codec import TemplateChatCodec
from rollmesh.generators.tokenizer import TokenizerCodec
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection

# In slots of the engine: answers that are sampled at once for clients outside of training, and agents that run at once.
_AHEAD = 4


class Endpoint:
    """The OpenAI-compatible endpoint: engine client, sessions, completions and HTTP server.

    Args:
        config: of the run.
        engine: samples.
        text: the model's tokenizer.
        security: of the mesh.
        registry: for its metrics.

    Attributes:
        model: name under which the model is served: the run's.
        engine: samples.
        max_running: answers that are sampled at once for clients outside of training, and agents that run at once.
        completions, sessions: for agents.
        server: over HTTP.
    """

    def __init__(
        self,
        config: Config,
        engine: InferenceEngine,
        text: TokenizerCodec,
        *,
        security: SecuritySection,
        registry: CollectorRegistry,
    ) -> None:
        rollout = config.rollout
        self._section = rollout.endpoint
        self.engine = engine
        self.max_running = _AHEAD * rollout.slots
        self._calls = EngineClient(engine)
        self.model = config.run.name
        self.sessions = Sessions(rollout.endpoint, time.monotonic)
        codec = TemplateChatCodec(
            text.tokenizer,
            end_ids=text.end_ids,
            parser=rollout.agent.parser,
            template_kwargs=config.data.chat_template_kwargs,
        )
        self.completions = Completions(
            engine, self._calls, codec, context=rollout.context_tokens, max_running=self.max_running
        )
        self.server = EndpointServer(
            self.completions,
            self.sessions,
            EndpointMetrics(registry),
            model=self.model,
            security=security,
            created=int(time.time()),
        )

    async def start(self, host: str, advertise: str | None) -> None:
        """Listens.

        Raises:
            ConfigError, PortInUseError: see `EndpointServer.start`.
        """
        section = self._section
        await self.server.start(host=host, port=section.port, advertise=advertise, public=section.enabled)

    async def close(self) -> None:
        """Stops listening."""
        await self.server.close()

    def accept_results(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Accepts its results, and returns those of others."""
        return self._calls.accept_results(results)

    def accept_tokens(self, events: Sequence[TokenEvent]) -> None:
        """Passes on events of streamed requests, which are all its own."""
        self._calls.accept_tokens(events)
