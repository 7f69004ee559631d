"""The evaluator process: it takes the learner's place in a mesh, publishes a stored model, and asks it prompts.

To the buffer and to generators it is the learner of a run that has no training. So generators of every engine serve the
model exactly as in a run, and their crashes are borne as in a run. An evaluator that dies is started again and asks
only the prompts that have no responses yet.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from pathlib import Path

import torch

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.mesh_session import MeshSession
from rollmesh.learner.coordinator.prompt_sources import open_held_out
from rollmesh.learner.standalone.prompt_pass import PassRules, PromptPass
from rollmesh.learner.standalone.response_file import RESPONSES, ResponseFile
from rollmesh.learner.standalone.stored_weights import publish_stored
from rollmesh.learner.status import LearnerStatus
from rollmesh.learner.weights import PublishRules, WeightPublisher, read_model_bundle
from rollmesh.learner.weights.transports import configured_transports
from rollmesh.learner.written.ends import ends_of
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.access.secret_files import check_security
from rollmesh.mesh.config import Config
from rollmesh.mesh.runtime.log_format import LogSettings
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, keep_freed_memory
from rollmesh.mesh.runtime.service import Shutdown, run_service
from rollmesh.mesh.runtime.threads import given_threads
from rollmesh.mesh.tokenizer_files import load_tokenizer
from rollmesh.mesh.trajectory.versions import PolicyVersion

log = logging.getLogger(__name__)


def run(
    config: Config,
    mesh: str,
    *,
    weights: Path | None = None,
    with_log_probs: bool = False,
    port: int = 0,
    ready_file: Path | None = None,
) -> int:
    """Asks every prompt of `data.eval`, and writes the responses into the run folder.

    Args:
        config: of the evaluation; the model's path is a local folder.
        mesh: host:port of the buffer.
        weights: a checkpoint or an adapter's folder; None: the weights of the model's folder.
        with_log_probs: store token ids and log-probs of the responses too.
        port: to bind, from which generators fetch the weights; 0 picks a free one.
        ready_file: written when the evaluator answers.

    Returns:
        The process exit code.
    """
    keep_freed_memory(TENSOR_BYTES)
    if (threads := given_threads(os.environ)) is not None:
        torch.set_num_threads(threads)
    evaluator = _Evaluator(config, weights, with_log_probs=with_log_probs)
    serve = partial(_serve, evaluator, config, mesh, port, ready_file)
    return run_service("evaluator", serve, settings=LogSettings.of(config))


async def _serve(
    evaluator: _Evaluator, config: Config, mesh: str, port: int, ready_file: Path | None, shutdown: Shutdown
) -> int:
    check_security(config.security, Identity(Role.LEARNER), endpoint=False)
    folder = Path(config.model.path)
    publisher = WeightPublisher(
        config.run.name,
        read_model_bundle(folder, ends_of(config, folder, load_tokenizer(folder))),
        PublishRules.of(config),
        offers=configured_transports(config),
    )
    session = MeshSession(config, mesh, publisher, evaluator.status, ControlRequests(), port=port)
    finished = False
    try:
        work = evaluator.run(session, publisher, ready_file)
        finished = await shutdown.run_until_requested(work)
    finally:
        await session.close(run_finished=finished)
        publisher.close()
    return 0


class _Evaluator:
    """The work of the process, once it may join the mesh.

    Args:
        config, weights, with_log_probs: see `run`.

    Attributes:
        status: for those who ask the evaluator as they would ask a learner.
    """

    def __init__(self, config: Config, weights: Path | None, *, with_log_probs: bool) -> None:
        self._config = config
        self._weights = weights
        self._with_log_probs = with_log_probs
        self.status = LearnerStatus()

    async def run(self, session: MeshSession, publisher: WeightPublisher, ready_file: Path | None) -> None:
        """Publishes the model and makes the pass over its prompts.

        Raises:
            RollmeshError: the mesh, the model or the prompts cannot be used.
        """
        await session.open(ready_file)
        # With a folder of its own, an earlier evaluator of it is gone.
        incarnation, _ = await session.take_over(0, takeover=True, force=True)
        policy = PolicyVersion(incarnation, 0)
        self.status.phase = "publishing"
        await asyncio.to_thread(publish_stored, publisher, policy, self._config, self._weights)
        self.status.published = policy
        await session.client.set_policy_version(incarnation, policy.version)
        session.agent.set_status(serving=policy)
        self.status.phase = "evaluating"
        await self._ask(session, policy)

    async def _ask(self, session: MeshSession, policy: PolicyVersion) -> None:
        config = self._config
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(config.model.path))
        held_out = await asyncio.to_thread(open_held_out, config, tokenizer)
        path = config.run.folder / RESPONSES
        with await asyncio.to_thread(ResponseFile, path) as file:
            rows = [row for row in held_out.rows if row not in file.rows]
            log.info("%d prompts to ask, %d have their responses already", len(rows), len(file.rows))
            if not rows:
                return
            await PromptPass(
                session.client,
                held_out.source,
                rows,
                held_out.encoder,
                lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
                file,
                PassRules(policy, held_out.shape, config.buffer.stall_limit_s, self._with_log_probs),
            ).run()
