"""Features of a server, as it reports them.

Servers differ by version and by the arguments they were started with. Nothing is derived from a version number. The
features are read from the server's description of its interface, its settings, and one token sampled for a try.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.sglang.http_client import HttpClient, RefusedError
from rollmesh.generators.engines.sglang.server_args import GRAMMARS

_NEEDED = ("/generate", "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache")
_TRANSFERS = {
    "tensor": ("/update_weights_from_tensor",),
    "disk": ("/update_weights_from_disk",),
    "distributed": ("/init_weights_update_group", "/update_weights_from_distributed"),
}
_HINT = "sglang 0.5.23 is known to do; see rollout.sglang"


@dataclass(frozen=True, slots=True)
class ServerFeatures:
    """Features of one server.

    Attributes:
        version: of SGLang, for messages.
        context: tokens that it takes and samples together.
        ranks: processes that each take weights (TP).
        incremental: an event of a stream brings its new tokens alone, not all so far.
        one_front: events bear the version in service (see `version_attribution`).
        drains: nothing is being computed while it is paused in place.
        session: weights are sent between a begin and an end.
        load: path of its load metrics; empty without any.
        mask_tokens: most tokens of a kept set that it reports; 0: it reports none.
        sleeps: it gives memory back.
        keeps_asleep: it keeps the weights on the host while they are not on the device.
        adapter_rank: largest rank of adapters that it takes; 0: it takes none.
        grammars: it follows grammars of llguidance.
    """

    version: str
    context: int
    ranks: int
    incremental: bool
    one_front: bool
    drains: bool
    session: bool
    load: str
    mask_tokens: int
    sleeps: bool
    keeps_asleep: bool
    adapter_rank: int = 0
    grammars: bool = False


async def detect_features(client: HttpClient, transfer: str) -> ServerFeatures:
    """Reads the features of a server that is ready.

    Raises:
        EngineError: it cannot do what is needed; names what is missing.
    """
    described = await client.get("/openapi.json")
    paths = described["paths"]
    info = await client.get(_one_of(paths, "/server_info", "/get_server_info"))
    version = str(info.get("version", "unknown"))
    model = await client.get(_one_of(paths, "/model_info", "/get_model_info"))
    missing = [path for path in (*_NEEDED, *_TRANSFERS[transfer]) if path not in paths]
    request = described.get("components", {}).get("schemas", {}).get("GenerateReqInput", {}).get("properties", {})
    if "extra_key" not in request and not info.get("disable_radix_cache"):
        missing.append("extra_key of /generate (or --disable-radix-cache)")
    if missing:
        raise EngineError(f"the SGLang server {version} at {client.address} lacks {', '.join(missing)}", hint=_HINT)
    if not model.get("is_generation", True):
        raise EngineError(f"the SGLang server at {client.address} serves a model that generates nothing")
    if transfer != "disk" and int(info.get("dp_size") or 1) > 1:
        raise EngineError(
            f"the SGLang server at {client.address} takes weights over {transfer} with dp_size 1 only",
            hint="rollout.sglang.transfer: disk",
        )
    if transfer == "tensor" and int(info.get("nnodes") or 1) > 1:
        raise EngineError(
            f"the SGLang server at {client.address} runs on several hosts, and transfer tensor shares memory of one",
            hint="rollout.sglang.transfer: disk",
        )
    await _end_abandoned_update(client, paths)
    await _check_one_token(client, version)
    return ServerFeatures(
        version=version,
        context=_context(info),
        ranks=int(info.get("tp_size") or 1),
        incremental=bool(info.get("incremental_streaming_output") or info.get("stream_output")),
        one_front=int(info.get("tokenizer_worker_num") or 1) == 1,
        drains=bool(info.get("disable_overlap_schedule")),
        session="/begin_weight_update" in paths,
        load=next((path for path in ("/v1/loads", "/get_load") if path in paths), ""),
        mask_tokens=int(info.get("sampling_mask_max_tokens") or 0) if "return_sampling_mask" in request else 0,
        sleeps=bool(info.get("enable_memory_saver")) and "/release_memory_occupation" in paths,
        keeps_asleep=bool(info.get("enable_weights_cpu_backup")),
        adapter_rank=int(info.get("max_lora_rank") or 0) if info.get("enable_lora") else 0,
        grammars=info.get("grammar_backend") == GRAMMARS,
    )


async def _end_abandoned_update(client: HttpClient, paths: Any) -> None:
    """Ends an update, or a pause, that a generator which died may have left."""
    if "/end_weight_update" in paths:
        with suppress(RefusedError):
            await client.post("/end_weight_update")
    await client.post("/continue_generation")


async def _check_one_token(client: HttpClient, version: str) -> None:
    """Samples one token, to check that ids and log-probs come with the version that the server itself gives them."""
    sampling = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
    try:
        answer = await client.post(
            "/generate", {"input_ids": [0], "sampling_params": sampling, "return_logprob": True}, timeout_s=120.0
        )
    except RefusedError as error:
        raise EngineError(f"the SGLang server {version} does not generate from token ids: {error}") from error
    meta = answer.get("meta_info", {})
    missing = [name for name, found in (
        ("output_ids", answer.get("output_ids")),
        ("meta_info.output_token_logprobs", meta.get("output_token_logprobs")),
        ("meta_info.weight_versions, so that tokens carry no versions", meta.get("weight_versions")),
    ) if not found]  # fmt: skip
    if missing:
        raise EngineError(
            f"the SGLang server {version} at {client.address} answers without {', '.join(missing)}", hint=_HINT
        )


def _one_of(paths: Any, *names: str) -> str:
    for name in names:
        if name in paths:
            return name
    raise EngineError(f"the SGLang server has none of {', '.join(names)}", hint=_HINT)


def _context(info: dict[str, Any]) -> int:
    """The length of sequences, which servers report in several places, by age."""
    for length in (info.get("max_req_input_len"), info.get("context_length")):
        if isinstance(length, int):
            return length
    raise EngineError("the SGLang server does not say how long its sequences may be", hint="start it --context-length")
