"""The endpoint of one generator, put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from generators.agents.program import ProgramRunner, program_of
from generators.endpoint.completions import Completions
from generators.endpoint.engine_calls import EngineCalls
from generators.endpoint.figures import EndpointFigures
from generators.endpoint.server import EndpointServer
from generators.endpoint.sessions import Sessions
from generators.endpoint.template import TokenizerLanguage
from generators.engines.base import GenerationResult, InferenceEngine, TokenEvent
from generators.text import TextCodec
from mesh.config.models import Config, SecuritySection
from mesh.config.rollout import AgentSection

# In slots of the engine: answers that are sampled at once for clients outside of training, and agents that run at once.
_AHEAD = 4


class Endpoint:
    """See the package.

    Args:
        config: of the run.
        engine: samples.
        text: the model's tokenizer.
        security: of the mesh.
        registry: for its figures.

    Attributes:
        model: name under which the model is served: the run's.
        completions, sessions: for agents.
        server: over HTTP.
    """

    def __init__(
        self,
        config: Config,
        engine: InferenceEngine,
        text: TextCodec,
        *,
        security: SecuritySection,
        registry: CollectorRegistry,
    ) -> None:
        rollout = config.rollout
        self._section = rollout.endpoint
        self._engine = engine
        self._slots = rollout.slots
        self._calls = EngineCalls(engine)
        self.model = config.run.name
        self.sessions = Sessions(rollout.endpoint, time.monotonic)
        language = TokenizerLanguage(
            text.tokenizer,
            end_ids=text.end_ids,
            parser=rollout.agent.parser,
            template_kwargs=config.data.chat_template_kwargs,
        )
        self.completions = Completions(
            engine, self._calls, language, context=rollout.context_tokens, most=_AHEAD * rollout.slots
        )
        self.server = EndpointServer(
            self.completions,
            self.sessions,
            EndpointFigures(registry),
            model=self.model,
            security=security,
            created=int(time.time()),
        )

    def agents(
        self,
        section: AgentSection,
        *,
        on_results: Callable[[list[GenerationResult]], None],
        hold_swap: Callable[[], None],
    ) -> ProgramRunner:
        """The runner of agents that find the model here.

        Args:
            section: of kind `program`.
            on_results, hold_swap: see `ProgramRunner`.

        Raises:
            ConfigError: there is no such function.
        """
        return ProgramRunner(
            self._engine,
            self.completions,
            self.sessions,
            program_of(section, _AHEAD * self._slots),
            base_url=lambda: self.server.agents_url,
            model=self.model,
            timeout_s=section.episode_timeout_s,
            on_results=on_results,
            hold_swap=hold_swap,
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

    def take(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Takes its results, and returns those of others."""
        return self._calls.take(results)

    def take_tokens(self, events: Sequence[TokenEvent]) -> None:
        """Takes its events; nobody else streams."""
        self._calls.take_tokens(events)
