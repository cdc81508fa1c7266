"""How the requests of a run come to its engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.engine.clients import FanOutClient, GroupClient, hand_over, open_loop
from sim.engine.requests import requests_of
from sim.engine.sessions import SessionClient
from sim.errors import ConfigError
from sim.scheduler.base import schedules_groups
from workloads.requests.columns import largest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    import simpy

    from sim.config.tables import RunConfig
    from sim.engine.clients import Client, Server
    from sim.engine.requests import RequestFactory
    from sim.fleet.engines import Engines
    from sim.scheduler.base import Scheduler
    from sim.scheduler.request import Request
    from workloads.spec import RequestSpec


def client_of(
    schedulers: Sequence[Scheduler],
    specs: Sequence[RequestSpec],
    factory: RequestFactory,
) -> FanOutClient | GroupClient:
    """Return the client that hands samples of a prompt over as the engines serve them.

    Raises
    ------
    ConfigError
        If some serve them as one request and others apart, and there are some.
    """
    kinds = set(map(schedules_groups, schedulers))
    if len(kinds) > 1:
        for name in ("best_of", "beam_width"):
            if (most := largest(specs, name)) > 1:
                raise ConfigError(
                    f"workload: some pools serve the samples of a prompt as one "
                    f"request and others apart, so that a router could not send it "
                    f"to any, got {name} {most}; ask for one sample, or let all pools "
                    f"have one generation"
                )
    return GroupClient(factory) if True in kinds else FanOutClient(factory)


class Arrivals:
    """Requests of a workload on their way to one engine or several.

    Parameters
    ----------
    env
        The clock.
    config, specs
        The run, and its requests by arrival.
    client
        Turns them into the engine's, and hears of their ends.
    is_open_loop
        Whether all times of arrival are known before the run.
    is_plain
        Whether a request is all that an engine is handed, without a client that waits
        for its answer.

    Attributes
    ----------
    are_known
        Whether an engine can take the requests in itself, or be told of them before.
    """

    def __init__(
        self,
        env: simpy.Environment,
        config: RunConfig,
        specs: Sequence[RequestSpec],
        client: Client,
        *,
        is_open_loop: bool,
        is_plain: bool,
    ) -> None:
        self._env = env
        self._config = config
        self._specs = specs
        self._client = client
        self._is_open_loop = is_open_loop
        self.are_known = is_open_loop and is_plain and largest(specs, "beam_width") == 1

    def requests(self) -> Iterable[Request]:
        """Return the engine's requests, if they `are_known`, for it to take in."""
        return requests_of(self._client.factory, self._specs)

    def begin(self, engine: Server) -> None:
        """Hand requests to an engine that does not take them in itself."""
        self._env.process(self._handing(engine))

    def _handing(self, engine: Server) -> Generator[Any, Any, None]:
        env, specs, client = self._env, self._specs, self._client
        if self._is_open_loop:
            return open_loop(env, engine, specs, client)
        config = self._config
        users = config.workload.max_concurrent_users
        front_end_s = None if config.front_end is None else config.front_end_s
        return SessionClient(
            *(env, engine, specs, client, users), front_end_s=front_end_s
        ).run()

    def begin_routed(self, engines: Engines) -> None:
        """Hand requests to several engines, announced before if they `are_known`."""
        env, fleet = self._env, self._config.fleet
        if not self.are_known:
            self.begin(engines)
        elif fleet is not None and fleet.has_roles:
            specs = engines.announced(self._specs)
            env.process(open_loop(env, engines, specs, self._client))
        else:
            requests = engines.announced(self.requests())
            env.process(hand_over(env, engines, requests))
