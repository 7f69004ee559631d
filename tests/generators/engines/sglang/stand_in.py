"""Serves the description of an SGLang server, and no more: for tests of refusals, and of its death.

python stand_in.py ... --port PORT ...
"""

from __future__ import annotations

import sys
from typing import Any

from aiohttp import web

PATHS = (
    "/generate", "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/server_info",
    "/model_info", "/update_weights_from_tensor", "/update_weights_from_disk", "/begin_weight_update",
    "/end_weight_update",
)  # fmt: skip


class StandIn:
    """Attributes are what it says; tests change them.

    Attributes:
        paths: of its interface.
        info: answer to /server_info.
        sampled: answer to /generate.
        asked: paths that were posted to, in order.
        bodies: what was posted there.
        refused: paths that are answered with 400.
    """

    def __init__(self) -> None:
        self.paths = list(PATHS)
        self.info: dict[str, Any] = {
            "version": "9.9",
            "context_length": 264,
            "skip_tokenizer_init": True,
            "disable_overlap_schedule": True,
        }
        self.sampled: dict[str, Any] = {
            "output_ids": [5],
            "meta_info": {"output_token_logprobs": [[-1.0, 5, None]], "weight_versions": [{"version": "default"}]},
        }
        self.fields = {"extra_key": {}}
        self.is_generation = True
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.refused: set[str] = set()

    def application(self) -> web.Application:
        """To be served."""
        application = web.Application()
        application.router.add_get("/openapi.json", self._openapi)
        application.router.add_get("/server_info", self._server_info)
        application.router.add_get("/model_info", self._model_info)
        application.router.add_post("/{name}", self._post)
        return application

    async def _openapi(self, _: web.Request) -> web.Response:
        schemas = {"GenerateReqInput": {"properties": self.fields}}
        return web.json_response({"paths": {path: {} for path in self.paths}, "components": {"schemas": schemas}})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"is_generation": self.is_generation})

    async def _post(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        self.bodies.append(await request.json())
        if request.path in self.refused:
            return web.json_response({"error": "not now"}, status=400)
        return web.json_response(self.sampled if request.path == "/generate" else {"success": True})


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    web.run_app(StandIn().application(), host="127.0.0.1", port=port, print=None)
