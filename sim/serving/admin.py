"""Faults to order, and results of what has come so far; on a port of their own."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sim.errors import OutputError
from sim.serving.replies import error_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from sim.serving.server import ServedEngine

ACTIONS = ("slow", "halt", "go_on", "die", "come_back", "results")


def admin_application(engines: Sequence[ServedEngine]) -> Starlette:
    """Return the application that orders faults of engines."""

    async def listed(_: Request) -> Response:
        return JSONResponse(
            [
                {
                    "engine": place,
                    "url": each.port.url,
                    "state": each.state,
                    "requests": len(each.engine.run.taken),
                    "drift_s": each.engine.drift_s,
                }
                for place, each in enumerate(engines)
            ]
        )

    async def act(request: Request) -> Response:
        place = request.path_params["place"]
        action = request.path_params["action"]
        if place >= len(engines) or action not in ACTIONS:
            known = f"engines 0 to {len(engines) - 1} can {', '.join(ACTIONS)}"
            return JSONResponse(error_of(known, 404), 404)
        engine = engines[place]
        if action == "slow":
            given = request.query_params.get("factor", "")
            try:
                factor = float(given)
            except ValueError:
                factor = -1.0
            if not 0 < factor < inf:
                rule = f"factor must be a number above 0, got {given!r:.80}"
                return JSONResponse(error_of(rule, 400), 400)
            engine.slow(factor)
        elif action == "results":
            try:
                folder = await engine.write_so_far()
            except OutputError as error:
                return JSONResponse(error_of(str(error), 400), 400)
            return JSONResponse({"engine": place, "results": str(folder)})
        else:
            getattr(engine, action)()
        return JSONResponse({"engine": place, "state": engine.state})

    return Starlette(
        routes=[
            Route("/engines", listed),
            Route("/engines/{place:int}/{action}", act, methods=["POST"]),
        ]
    )
