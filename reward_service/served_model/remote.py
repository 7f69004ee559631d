"""The engines `vllm` and `sglang`: servers with a pooling model, asked over HTTP with token ids.

Both can apply an activation of their own, which for one label of SGLang's `/v1/classify` is 1 for every text. So logits
are asked for: `use_activation: false` of vLLM, and the embedding of SGLang's own `/classify`.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence as Listed
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import RewardError
from rollmesh.mesh.text import bounded
from rollmesh.reward_service.served_model.engine import AwayError, RefusedError, activated, label_index
from rollmesh.reward_service.served_model.messages import ModelOptions
from rollmesh.reward_service.served_model.texts import Sequence

# The engine batches too, so several are on their way.
_LANES = 4
_MOST_BYTES = 256 << 20
WITHOUT_PROXIES = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RemoteModel:
    """A model that a server of vLLM or SGLang has.

    Args:
        options: of the model.

    Raises:
        RewardError: the engine has no values of steps, or there is no such label.
    """

    lanes = _LANES

    def __init__(self, options: ModelOptions) -> None:
        if options.engine == "sglang" and options.kind == "steps":
            raise RewardError("SGLang has no values of single tokens", hint="use engine vllm or transformers")
        self._options = options
        self._label = label_index(options, _labels(options))
        self._authorization = {"Authorization": f"Bearer {options.key}"} if options.key else {}
        self.longest = self._declared_length()

    def values(self, batch: Listed[Sequence]) -> list[list[float]]:
        """See `Engine`."""
        ids = [sequence.ids for sequence in batch]
        if self._options.engine == "sglang":
            found = self._ask("/classify", {"input_ids": ids})
            logits = [[row["embedding"]] for row in found]
        elif self._options.kind == "response":
            found = self._ask("/classify", {"input": ids, "use_activation": False})
            logits = [[row["probs"]] for row in sorted(found["data"], key=lambda row: row["index"])]
        else:
            body = {"input": ids, "task": "token_classify", "use_activation": False}
            found = sorted(self._ask("/pooling", body)["data"], key=lambda row: row["index"])
            logits = [
                [row["data"][place] for place in sequence.places] for row, sequence in zip(found, batch, strict=True)
            ]
        if len(logits) != len(batch):
            raise RefusedError(f"the engine answered {len(logits)} of {len(batch)} sequences")
        return [[activated(each, self._label, self._options.activation) for each in rows] for rows in logits]

    def _declared_length(self) -> int | None:
        """Most tokens of a sequence; None where the server does not say, or is away."""
        try:
            longest = self._ask("/v1/models")["data"][0].get("max_model_len")
        except (AwayError, RefusedError, LookupError, TypeError, AttributeError):
            return None
        return longest if isinstance(longest, int) else None

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310  # http or https, by the configuration
            self._options.url + path, content, {"Content-Type": "application/json", **self._authorization}
        )
        try:
            with WITHOUT_PROXIES.open(request, timeout=self._options.timeout_s) as response:
                return json.loads(response.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            text = bounded(error.read(2000).decode("utf-8", "replace"), 500)
            message = f"{self._options.url}{path} answers {error.code}: {text}"
            # A request that is wrong stays so; all else may pass.
            if error.code in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, 422):
                raise RefusedError(message) from error
            raise AwayError(message) from error
        except (OSError, ValueError) as error:
            raise AwayError(f"{self._options.url}{path}: {error}") from error


def _labels(options: ModelOptions) -> dict[int, str]:
    """Names of labels, as the folder's configuration has them."""
    try:
        config = json.loads((Path(options.folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RewardError(f"reward model {options.folder} cannot be read: {error}") from error
    names = {int(index): str(name) for index, name in (config.get("id2label") or {}).items()}
    return names or {index: f"LABEL_{index}" for index in range(int(config.get("num_labels", 2)))}
