"""Folders in vLLM, with its defaults: log-probs of a conversation, and whether an answer stops at the trained end.

It runs in the environment of vLLM, started by `written.py`, and needs nothing of this project.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
_END = "<|eot|>"


def main() -> None:
    """Prints the findings, one line of JSON for each folder that loads."""
    for folder in sys.argv[1:]:
        try:
            found = _ask(folder)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises, the other folders are asked
            print(f"{folder}: {error}", file=sys.stderr, flush=True)
            continue
        print(json.dumps({"folder": folder} | found), flush=True)


def _ask(folder: str) -> dict[str, object]:
    from vllm import LLM

    model = LLM(folder, enforce_eager=True, max_model_len=128, dtype="float32")
    tokenizer = model.get_tokenizer()
    asked = [{"role": "user", "content": "two and 345?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    sampling = model.get_default_sampling_params()
    sampling.max_tokens, sampling.prompt_logprobs = 4, 1
    sampling.allowed_token_ids = [tokenizer.convert_tokens_to_ids(_END)]
    (answer,) = model.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    said = [place[token].logprob for token, place in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]
    stops = answer.outputs[0].finish_reason == "stop" and len(answer.outputs[0].token_ids) == 1
    return {"ids": ids, "log_probs": said, "stops": stops}


if __name__ == "__main__":
    main()
