"""Engines that prefill and engines that decode, and the proxy before them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from sim.errors import ConfigError
from sim.fleet.deciders import Prospect
from sim.fleet.engines import Engines
from sim.fleet.pulls import ConsumerSteps
from sim.fleet.replicas import DIED, Replicas
from sim.fleet.roster import ReplicaEvent, ReplicaState
from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    import simpy

    from sim.engine.loop import Engine
    from sim.fleet.deciders import Decider
    from sim.fleet.engines import OnEnd, Router
    from sim.fleet.pulls import PairSteps
    from sim.fleet.replicas import ChangingRouter
    from sim.fleet.roster import Toll
    from sim.scheduler.request import Request
    from sim.scheduler.v1.connectors.exchange import GroupBlockIds

_SERVED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


class KnowsPrefixes(Protocol):
    """A router that knows what it has sent where."""

    def cached_tokens(self, request: Request) -> list[int]:
        """Return by place how many leading tokens it believes to be cached."""
        ...


class KnowsLoad(Protocol):
    """A router that knows the prompts that are being computed."""

    def active_tokens(self, request: Request) -> float:
        """Return those at the engine that it would choose now."""
        ...


class PairRouter:
    """The routers of both pools, each of which numbers its own engines from 0.

    Parameters
    ----------
    prefill, decode
        Choose among prefillers, and among decoders.
    prefill_places, decode_places
        Of their engines in the fleet, in their order.
    """

    def __init__(
        self,
        prefill: Router,
        decode: Router,
        prefill_places: Sequence[int],
        decode_places: Sequence[int],
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.prefill_places = list(prefill_places)
        self.decode_places = list(decode_places)
        self._own = {
            place: (router, number)
            for router, places in (
                (prefill, self.prefill_places),
                (decode, self.decode_places),
            )
            for number, place in enumerate(places)
        }

    def choose_prefill(self, request: Request) -> int:
        """Return the place of the engine that computes a prompt."""
        return self.prefill_places[self.prefill.choose(request)]

    def choose(self, request: Request) -> int:
        """Return the place of the engine that decodes a request."""
        return self.decode_places[self.decode.choose(request)]

    def ended(self, request: Request, place: int) -> None:
        """Take note of the end of a request at an engine."""
        router, number = self._own[place]
        router.ended(request, number)

    def set_ready(self, places: Sequence[int]) -> None:
        """Choose among these places from now on."""
        for router in (self.prefill, self.decode):
            own = [
                self._own[each][1] for each in places if self._own[each][0] is router
            ]
            if own:
                cast("ChangingRouter", router).set_ready(own)

    def prospect(
        self, request: Request, cached: Sequence[int], place: int | None
    ) -> Prospect:
        """Return the facts that a decider may ask for.

        Parameters
        ----------
        request
            Of which.
        cached
            By decoder, what its router believed before it chose; empty where the
            decider does not say that it needs it.
        place
            Of the chosen decoder in the fleet; None where that is chosen later.

        Raises
        ------
        ConfigError
            When the decider asks for something that it does not say it needs.
        """
        prefill = self.prefill

        def believed() -> Sequence[int]:
            if not cached:
                raise _unsaid("needs_prefixes")
            return cached

        def at_decoder() -> int:
            if place is None:
                raise _unsaid("needs_decoder")
            return believed()[self._own[place][1]]

        def active_tokens() -> float:
            if not hasattr(prefill, "active_tokens"):
                raise _unsaid("needs_load")
            return cast("KnowsLoad", prefill).active_tokens(request)

        return Prospect(
            request.num_prompt_tokens,
            num_cached_tokens=at_decoder,
            most_cached_tokens=lambda: max(believed()),
            num_active_tokens=active_tokens,
        )


def _unsaid(need: str) -> ConfigError:
    return ConfigError(
        f"fleet.proxy.decider: it asks for what a decider is told that has {need} = "
        f"True; set it in your class"
    )


class Side(Protocol):
    """The transfers of an engine in a prefill or decode pool, beside its steps."""

    is_dead: bool
    on_free: Callable[[], object]
    """Called when it holds nothing more for another engine."""

    @property
    def holds(self) -> bool:
        """Whether it keeps blocks for another engine."""
        ...

    def quiet_until_s(self) -> float:
        """Return from when on calls may do something by themselves, in seconds."""
        ...


def side_of(engine: Engine) -> Side:
    """Return an engine's transfers from or to others, which a tier may stand beside."""
    beside: Any = engine.beside
    found: Side = getattr(beside, "side", beside)
    return found


class TwoPools(Replicas):
    """Prefillers and decoders, each of which a router chooses among.

    Parameters
    ----------
    env, engines, router, events, renew, slow, off, replicas
        See `Replicas`; each engine has a `Side` beside, or what has one as its `side`.

    Attributes
    ----------
    num_local
        Requests whose prompts decoders compute themselves.
    """

    router: PairRouter

    def __init__(  # noqa: PLR0917 - the parts of a fleet
        self,
        env: simpy.Environment,
        engines: list[Engine],
        router: PairRouter,
        events: Sequence[ReplicaEvent],
        renew: Callable[[int, Engine], Engine],
        slow: Callable[[int, Engine, float], None],
        off: Collection[int] = (),
        replicas: Iterable[Sequence[int]] = (),
    ) -> None:
        super().__init__(
            *(env, engines, router, events, partial(self._renewed, renew)),
            *(slow, off, replicas),
        )
        self.num_local = 0
        for place in range(len(engines)):
            self._heed(place, engines[place])

    def _renewed(
        self, renew: Callable[[int, Engine], Engine], place: int, engine: Engine
    ) -> Engine:
        new = renew(place, engine)
        self._heed(place, new)
        return new

    def _heed(self, place: int, engine: Engine) -> None:
        """Let a prefiller that drains end when all its blocks have been read."""
        side_of(engine).on_free = partial(self._freed, place)

    def _freed(self, place: int) -> None:
        if self.roster.states[place] is ReplicaState.DRAINING:
            self._end_drained(place)

    def _is_needed(self, engine: Engine) -> bool:
        return super()._is_needed(engine) or side_of(engine).holds

    def _serves(self) -> bool:
        return self._has_ready(self.router.prefill_places) and self._has_ready(
            self.router.decode_places
        )

    def _has_ready(self, places: Sequence[int]) -> bool:
        return any(self.roster.states[place] is ReplicaState.READY for place in places)

    def _hand_over(self, request: Request) -> None:
        for scrapes in self.scrapes:
            scrapes.wake()

    def _give_back(self, request: Request, prompt: Request) -> None:
        """Let the client see that its request ended at the prefiller."""
        request.status, request.reason = prompt.status, prompt.reason
        on_end, request.on_end = request.on_end, None
        if on_end is not None:
            on_end(request)
        self._look_for_end()


class Pairs(TwoPools):
    """Prefillers and decoders behind a proxy that takes every request to both.

    ::

        client --> proxy --> prefiller: the prompt and one token, thrown away;
                      |          its blocks are held
                      +----> decoder: waits with blocks of its own, reads, decodes

    The proxy waits for the prefiller before it calls the decoder. It chooses the
    decoder then, or first of all.

    Parameters
    ----------
    parts
        See `TwoPools`, in its order; each engine has `PairSteps` beside.
    decider
        Says which prompts a decoder computes itself.
    chooses_decoder_first
        Whether a request's decoder is known before its prefiller.
    """

    def __init__(
        self, *parts: Any, decider: Decider, chooses_decoder_first: bool
    ) -> None:
        super().__init__(*parts)
        self._decider = decider
        self._chooses_decoder_first = chooses_decoder_first
        self._prompts: dict[int, Request] = {}
        self._decoders: dict[int, int] = {}  # of requests that are not there yet
        self._tolls_of: dict[PairSteps, Toll] = {}

    def _side(self, place: int) -> PairSteps:
        return cast("PairSteps", side_of(self.engines[place]))

    # -- requests -------------------------------------------------------------

    def _hand_over(self, request: Request) -> None:
        """Send the prompt of a request to a prefiller, or all of it to a decoder."""
        super()._hand_over(request)
        request.kv_transfer_params = None
        router, decider, number = self.router, self._decider, request.request_id
        cached: list[int] = []
        if decider.needs_prefixes:  # as they are before it chooses
            cached = cast("KnowsPrefixes", router.decode).cached_tokens(request)
        place: int | None = None
        if self._chooses_decoder_first:
            place = self._decoders[number] = router.choose(request)
        is_remote = decider.is_remote(router.prospect(request, cached, place))
        if is_remote not in (True, False):
            raise ConfigError(
                f"fleet.proxy.decider: is_remote must return True or False, got "
                f"{is_remote!r}; mend your class"
            )
        if not is_remote:
            self.num_local += 1
            self._decode(request)
            return
        prompt = self._prompts[number] = prompt_of(request)
        place = self._places[number] = router.choose_prefill(prompt)
        prompt.on_end = partial(self._prefilled, request, place)
        self.engines[place].submit(prompt)

    def _prefilled(self, request: Request, place: int, prompt: Request) -> None:
        """Take a request on from its prefiller: its prompt has left that."""
        del self._prompts[request.request_id], self._places[request.request_id]
        self.router.ended(prompt, place)
        is_dying = self.roster.states[place] is ReplicaState.DYING
        if prompt.status in _SERVED and not is_dying:
            request.kv_transfer_params = {
                "do_remote_prefill": True,
                "remote_block_ids": self._blocks_of(place, prompt),
                "remote_engine": self._side(place),
                "remote_request": prompt,
            }
            if self._has_ready(self.router.decode_places):
                self._decode(request)
            else:
                self.submit(request)
        elif is_dying and prompt.status is not RequestStatus.FINISHED_REJECTED:
            self._outlive(request, place, prompt)
        else:
            self._forget_decoder(request)
            self._give_back(request, prompt)
        if self.roster.states[place] is ReplicaState.DRAINING:
            self._end_drained(place)

    def _blocks_of(self, place: int, prompt: Request) -> GroupBlockIds:
        scheduler: Any = self.engines[place].scheduler
        found: GroupBlockIds = scheduler.offered(prompt)
        return found

    def _outlive(self, request: Request, place: int, prompt: Request) -> None:
        """Let a request begin again if its prefiller dies, or let it go."""
        self._forget_decoder(request)
        if self._retries(place):
            self.submit(request)
        elif prompt.status in _SERVED:  # no engine has a row of it
            self._leave(request, RequestStatus.FINISHED_ABORTED, DIED)
        else:
            self._give_back(request, prompt)

    def _decode(self, request: Request) -> None:
        """Send a request to its decoder."""
        place = self._decoders.pop(request.request_id, None)
        if place is not None and self.roster.states[place] is not ReplicaState.READY:
            self.router.ended(request, place)
            place = None
        if place is None:
            place = self.router.choose(request)
        self._places[request.request_id] = place
        request.on_end = partial(self._ended, place, request.on_end)
        self.engines[place].submit(request)

    def _forget_decoder(self, request: Request) -> None:
        place = self._decoders.pop(request.request_id, None)
        if place is not None:
            self.router.ended(request, place)

    def _ended(self, place: int, then: OnEnd | None, request: Request) -> None:
        if request.status is RequestStatus.FINISHED_ERROR:
            self._count_error(request)
        elif request.status is RequestStatus.FINISHED_REJECTED:
            cast("ConsumerSteps", self._side(place)).refuse(request)
        super()._ended(place, then, request)

    def _count_error(self, request: Request) -> None:
        """Count a request that was lost as its prompt could not be read."""
        source = (request.kv_transfer_params or {}).get("remote_engine")
        if source in self._tolls_of:
            self._tolls_of[source].num_lost += 1

    def abort(self, request: Request, reason: str) -> None:
        again = self._again.get(request.request_id, request)
        prompt = self._prompts.get(again.request_id)
        if prompt is None:
            super().abort(request, reason)
        else:
            Engines.abort(self, prompt, reason)

    # -- replicas -------------------------------------------------------------

    def _die(self, event: ReplicaEvent) -> None:
        num_tolls = len(self._tolls)
        sides = [self._side(place) for place in self.ranks_of(event.place)]
        super()._die(event)
        if len(self._tolls) == num_tolls:
            return  # it was off
        for side in sides:
            self._tolls_of[side] = self._tolls[-1]
            self._die_beside(side)

    def _die_beside(self, side: PairSteps) -> None:
        if isinstance(side, ConsumerSteps):
            side.die()
            return
        side.is_dead = True
        for place in self.router.decode_places:
            decoder = self._side(place)
            if isinstance(decoder, ConsumerSteps) and not decoder.is_dead:
                decoder.fail_from(side)


def prompt_of(request: Request) -> Request:
    """Return the request to a prefiller: the prompt, and one token."""
    prompt = request.again()
    prompt.max_num_tokens = min(prompt.num_prompt_tokens + 1, request.max_num_tokens)
    prompt.oracle_num_tokens = prompt.num_prompt_tokens + 1
    prompt.max_output_tokens = 1
    prompt.kv_transfer_params = {"do_remote_decode": True}
    return prompt
