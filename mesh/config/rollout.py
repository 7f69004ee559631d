"""The configuration of generation: engines, agents, endpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rollmesh.mesh.config.base import DeviceName, PositiveFloat, PositiveInt, Section, Temperature
from rollmesh.mesh.config.refused import engine_options

EngineName = Literal["hf", "vllm", "sglang"]
ParserName = Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek", "pythonic"]


class HfSection(Section):
    kv_cache_gib: PositiveFloat | None = Field(
        None,
        description="GiB that keys and values may take; the longest sequence has to fit. None: a share of the "
        "memory that a second set of weights leaves free, half on a CPU, 0.8 on a GPU. It is "
        "divided among the processes that use the device.",
    )
    routed_experts: bool = Field(
        False, description="Carry the experts to which each token was routed along with the trajectory (side data)."
    )


class VllmSection(Section):
    tensor_parallel: PositiveInt = Field(1, description="Devices over which each layer is divided (TP).")
    data_parallel: PositiveInt = Field(1, description="Copies of the model in one generator (DP).")
    expert_parallel: bool = Field(
        False, description="Divide the experts of a mixture over the devices of TP x DP (EP)."
    )
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Share of a GPU's memory that vLLM may use.")
    kv_cache_gib: PositiveFloat = Field(
        1.0, description="GiB of KV cache on a CPU; on CUDA `gpu_memory_utilization` decides."
    )
    enforce_eager: bool | None = Field(None, description="No CUDA graphs or compilation; none: only on a CPU.")
    prefix_caching: bool = Field(True, description="Share the KV cache of equal prefixes, never across versions.")
    routed_experts: bool = Field(
        False, description="Carry the experts to which each token was routed along with the trajectory (side data)."
    )
    transfer: Literal["auto", "shm", "nccl", "ipc"] = Field(
        "auto",
        description="Transport of weights from the generator's process to vLLM's workers. The value shm is "
        "Rollmesh's backend over shared memory; nccl and ipc are vLLM's own (CUDA). With auto it "
        "is ipc on CUDA with one device, else shm.",
    )
    start_timeout_s: PositiveFloat = Field(900.0, description="Seconds that vLLM gets to become ready.")
    options: Annotated[dict[str, Any], AfterValidator(partial(engine_options.checked, engine_options.VLLM))] = Field(
        default_factory=dict,
        description="Further engine arguments by vLLM's names (AsyncEngineArgs), passed as they are. Refused is what "
        "a key of the configuration sets, and what would sample from another model than the one that is trained.",
    )


class SglangSection(Section):
    python: Path | None = Field(
        None, description="Interpreter of the environment in which SGLang is installed; none: the generator's own."
    )
    address: str | None = Field(
        None, description="URL of a running server that serves this model; none: the generator starts and owns one."
    )
    key_file: Path | None = Field(
        None, description="File, on the generator's host, with the API key of the server at `address`."
    )
    tensor_parallel: PositiveInt = Field(1, description="Devices over which each layer is divided (TP).")
    data_parallel: PositiveInt = Field(1, description="Copies of the model that one server has (DP).")
    expert_parallel: PositiveInt = Field(1, description="Devices over which experts are divided (EP).")
    mem_fraction: float | None = Field(
        None, gt=0, lt=1, description="Share of the memory for weights and KV cache; none: SGLang decides (CPU: 0.5)."
    )
    kv_cache_tokens: PositiveInt | None = Field(
        None,
        description="Tokens that the KV cache holds; none: SGLang decides (CPU: at most 64 full sequences).",
    )
    transfer: Literal["auto", "tensor", "disk", "distributed"] = Field(
        "auto",
        description="Transport of weights to the server: tensor, buckets in shared memory; disk, a folder; "
        "distributed, a broadcast. With auto it is tensor for a server on this host, else disk.",
    )
    start_timeout_s: PositiveFloat = Field(300.0, description="Seconds that the server gets to become ready.")
    options: Annotated[dict[str, Any], AfterValidator(partial(engine_options.checked, engine_options.SGLANG))] = Field(
        default_factory=dict,
        description="Further server arguments by SGLang's names, passed as they are. Refused is what a key of the "
        "configuration sets, and what would sample from another model than the one that is trained.",
    )


class AgentSection(Section):
    tools: list[str] = Field(
        default_factory=list,
        description="Functions that the model may call, `module:function` / `file.py:function`, with type hints and a "
        "docstring; plain or async.",
    )
    environment: str | None = Field(
        None, description="Class with reset / step (and reward), or TRL's form: `module:Class` / `file.py:Class`."
    )
    program: str | None = Field(
        None,
        description="Agent of your own that talks to the OpenAI-compatible endpoint: `module:function` / "
        "`file.py:function`, plain or async.",
    )
    command: list[str] = Field(
        default_factory=list,
        description="Agent of your own as a command; it finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment "
        "and the task as JSON on its standard input.",
    )
    pass_env: list[str] = Field(
        default_factory=list,
        description="Variables of the generator's environment that the command gets in addition to PATH, "
        "HOME, LANG and the like; it gets no others.",
    )
    parser: ParserName = Field(
        "auto",
        description="Format of tool calls in a response: hermes, llama3_json, mistral, qwen3_coder, deepseek, "
        "pythonic; auto: from the chat template.",
    )
    max_turns: PositiveInt = Field(8, description="Turns that the model gets at most.")
    turn_tokens: PositiveInt | None = Field(
        None, description="Tokens of one turn at most; none: what is left of `max_response_tokens`."
    )
    observation_tokens: PositiveInt = Field(512, description="Tokens of one observation at most; the rest is cut off.")
    tool_timeout_s: PositiveFloat | None = Field(
        None,
        description="Seconds for one call of a tool or one step; none: 30, or `episode_timeout_s` if that is less.",
    )
    episode_timeout_s: PositiveFloat = Field(600.0, description="Seconds after which an episode is ended as it is.")
    workers: PositiveInt = Field(8, description="Threads for tools and environments that are not async.")

    @property
    def kind(self) -> Literal["none", "tools", "environment", "program"]:
        """The kind of driver of an episode."""
        if self.environment is not None:
            return "environment"
        if self.program is not None or self.command:
            return "program"
        return "tools" if self.tools else "none"

    @property
    def call_timeout_s(self) -> float:
        """Seconds for one call of a tool or one step."""
        return min(30.0, self.episode_timeout_s) if self.tool_timeout_s is None else self.tool_timeout_s

    @model_validator(mode="after")
    def _one_driver(self) -> AgentSection:
        if self.program is not None and self.command:
            raise ValueError("an agent is a program or a command, not both")
        if self.pass_env and not self.command:
            raise ValueError("pass_env is of `command`: an agent that is a function runs in the generator itself")
        if self.call_timeout_s > self.episode_timeout_s:
            raise ValueError("tool_timeout_s is over episode_timeout_s: one call may take no longer than its episode")
        if (self.program is not None or self.command) and (self.tools or self.environment is not None):
            raise ValueError("a program or command brings its own tools: remove `tools` and `environment`")
        return self


class EndpointSection(Section):
    enabled: bool = Field(False, description="Serve it also where no agent needs it.")
    port: int = Field(0, ge=0, le=65535, description="Port; 0 picks a free one (`rollmesh status` shows it).")
    max_sessions: PositiveInt = Field(256, description="Sessions that are recorded at once.")
    session_s: PositiveFloat = Field(3600.0, description="Seconds after its last call at which a session is removed.")
    session_answers: PositiveInt = Field(
        2048, description="Answers that a session records, an agent's own too; further calls are refused."
    )


def _slots(validated: dict[str, Any]) -> int:
    """Engines made for a GPU fill it with hundreds of sequences."""
    return 64 if validated.get("engine", "hf") == "hf" else 256


class RolloutSection(Section):
    engine: EngineName = Field("hf", description="Inference engine of the generators: hf, vllm or sglang.")
    python: Path | None = Field(
        None,
        description="Interpreter of the generators that `rollmesh run` starts, from an environment with "
        "rollmesh and the engine; none: the one that runs `rollmesh`.",
    )
    device: DeviceName = Field("auto", description="Device of the generators; auto: cuda where there is one.")
    replicas: int = Field(1, ge=0, description="Generators that `rollmesh run` starts here; others may join.")
    n: PositiveInt = Field(8, description="Responses per prompt (the group size).")
    temperature: Temperature = Field(1.0, description="Softmax temperature: 0 (greedy), or 0.01 and above.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass; 1 is off. Must be 1 in training for now.")
    top_k: int = Field(
        0, ge=0, description="Number of most likely tokens kept; 0 is off. Must be 0 in training for now."
    )
    stop: list[str] = Field(default_factory=list, description="Strings that end a response.")
    max_prompt_tokens: PositiveInt = Field(1024, description="Longest prompt in tokens.")
    max_response_tokens: PositiveInt = Field(1024, description="Longest response in tokens.")
    slots: PositiveInt = Field(
        default_factory=_slots,
        description="Sequences that one generator decodes together; with vllm and sglang the default is 256.",
    )
    reward_wait_s: PositiveFloat = Field(
        30.0,
        description="Seconds that a finished response waits for its reward while no service answers, or since "
        "its first failed call. While services answer, waiting for a turn is not limited.",
    )
    max_attempts: PositiveInt = Field(4, description="Times a group is granted before it ends as failed.")
    draft_every_s: PositiveFloat = Field(
        5.0,
        description="Seconds after which an unfinished response is drafted to the buffer, so that other "
        "generators can continue it.",
    )
    draft_every_tokens: PositiveInt = Field(
        256, description="New tokens after which it is drafted earlier; checked 8 times per `draft_every_s`."
    )
    load: Literal["fixed", "adaptive"] = Field(
        "adaptive",
        description="Number of sequences that a generator works on: fixed, always enough for `slots`; "
        "adaptive, fewer if the engine's metrics show an overload. These are preemptions, use of "
        "its KV cache, and waiting requests.",
    )
    hf: HfSection = Field(default_factory=lambda: HfSection(), description="Settings of engine hf.")
    vllm: VllmSection = Field(default_factory=lambda: VllmSection(), description="Settings of engine vllm.")
    sglang: SglangSection = Field(default_factory=lambda: SglangSection(), description="Settings of engine sglang.")
    agent: AgentSection = Field(
        default_factory=lambda: AgentSection(), description="Several turns: tools, an environment, or a program."
    )
    endpoint: EndpointSection = Field(
        default_factory=lambda: EndpointSection(), description="The OpenAI-compatible endpoint of each generator."
    )

    @model_validator(mode="after")
    def _as_the_engine_samples(self) -> RolloutSection:
        if self.engine == "vllm" and self.temperature > 2:
            raise ValueError(f"temperature {self.temperature:g}: vLLM samples at 2 at most")
        return self

    @property
    def records_experts(self) -> bool:
        """The engine records the experts to which it routes tokens."""
        if self.engine == "hf":
            return self.hf.routed_experts
        return self.engine == "vllm" and self.vllm.routed_experts

    @property
    def owns_processes(self) -> bool:
        """True where each generator starts processes for its engine."""
        return self.engine == "vllm" or (self.engine == "sglang" and self.sglang.address is None)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sequence: prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def longest_response(self) -> int:
        """Tokens of a member at most after its group's prompt; that of a program is the first token of its row's."""
        return self.context_tokens - 1 if self.agent.kind == "program" else self.max_response_tokens
