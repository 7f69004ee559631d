"""Episodes of several turns: tools, environments, and the loop between them and the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollmesh.generators.agents.chat_template import ChatRenderer
from rollmesh.generators.agents.drivers import Driver, ToolDriver
from rollmesh.generators.agents.environments import Environments, StepDriver, ToolEnvironmentDriver
from rollmesh.generators.agents.episode import EpisodeLimits
from rollmesh.generators.agents.runner import AgentRunner
from rollmesh.generators.agents.toolbox import Toolbox
from rollmesh.generators.agents.user_code_executor import UserCodeExecutor
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.response_source import MemberRequest
from rollmesh.generators.tokenizer import TokenizerCodec
from rollmesh.mesh.agent_tools import agent_schemas, load_environment, load_tools

if TYPE_CHECKING:
    from rollmesh.mesh.config.models import Config

log = logging.getLogger(__name__)
__all__ = ["AgentRunner", "build_runner"]


def build_runner(config: Config, engine: InferenceEngine, text: TokenizerCodec, clock: AwakeClock) -> AgentRunner:
    """The runner for a configuration whose `rollout.agent` has tools or an environment.

    Args:
        config: of the run.
        engine: samples turns.
        text: the model's tokenizer.
        clock: for the time that an episode may take.

    Raises:
        ConfigError: tools, environment, chat template or parser cannot be used.
    """
    agent = config.rollout.agent
    user_calls = UserCodeExecutor(agent.workers)
    chat = ChatRenderer(
        text.tokenizer,
        end_ids=text.end_ids,
        tools=agent_schemas(agent),
        template_kwargs=config.data.chat_template_kwargs,
        observation_tokens=agent.observation_tokens,
    )
    if not chat.shows_tools:
        log.warning(
            "the chat template shows the model no tools: unless the dataset's prompts describe them, none is called"
        )
    return AgentRunner(
        engine,
        make_driver=_driver_maker(config, chat, user_calls),
        chat=chat,
        limits=EpisodeLimits(agent.max_turns, agent.turn_tokens, agent.episode_timeout_s),
        user_calls=user_calls,
        clock=clock,
    )


def _driver_maker(
    config: Config, chat: ChatRenderer, user_calls: UserCodeExecutor
) -> Callable[[MemberRequest], Driver]:
    agent = config.rollout.agent
    tools, timeout_s = load_tools(agent.tools), agent.call_timeout_s
    if agent.environment is None:
        parser, toolbox = chat.parser(agent.parser), Toolbox(tools, user_calls, timeout_s=timeout_s)
        return lambda _request: ToolDriver(chat, parser, toolbox)
    source = load_environment(agent.environment)
    environments = Environments(source, user_calls, timeout_s=timeout_s)
    if source.form == "step":
        return lambda request: StepDriver(chat, environments, request.task)
    parser = chat.parser(agent.parser)

    def make_toolbox(environment: object) -> Toolbox:
        return Toolbox([*tools, *source.tools(environment)], user_calls, timeout_s=timeout_s)

    return lambda request: ToolEnvironmentDriver(chat, parser, environments, request.task, make_toolbox)
