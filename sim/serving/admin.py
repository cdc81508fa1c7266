"""Faults to order, and results of what has come so far; on a port of their own."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sim.errors import ConfigError, UserError
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
        if "origin" in request.headers:  # of whatever a browser of this machine shows
            return _refused("pages of a browser order no faults; use a terminal", 403)
        place = request.path_params["place"]
        action = request.path_params["action"]
        if place >= len(engines) or action not in ACTIONS:
            known = f"engines 0 to {len(engines) - 1} can {', '.join(ACTIONS)}"
            return _refused(known, 404)
        try:
            done = await _done(engines[place], action, request)
        except UserError as error:
            return _refused(str(error), 400)
        return JSONResponse({"engine": place} | done)

    return Starlette(
        routes=[
            Route("/engines", listed),
            Route("/engines/{place:int}/{action}", act, methods=["POST"]),
        ]
    )


async def _done(engine: ServedEngine, action: str, request: Request) -> dict[str, str]:
    if action == "results":
        return {"results": str(await engine.write_so_far())}
    if action == "come_back":
        await engine.come_back()
    elif action == "slow":
        engine.slow(_factor(request.query_params.get("factor", "")))
    else:
        getattr(engine, action)()
    return {"state": engine.state}


def _factor(given: str) -> float:
    with suppress(ValueError):
        if 0 < (factor := float(given)) < inf:
            return factor
    raise ConfigError(f"factor must be a number above 0, got {given!r:.80}")


def _refused(rule: str, status: int) -> Response:
    return JSONResponse(error_of(rule, status), status)
