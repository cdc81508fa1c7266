"""Fleets that prefill and decode apart, made from their configuration."""

from __future__ import annotations

from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from cache.v1.specs import MambaSpec, kind_in_words
from sim.config.pairs import ConnectorTable, LinksTable, ProxyTable
from sim.config.plug import build
from sim.costs.transfers import pages_by_group, pages_of
from sim.errors import ConfigError
from sim.fleet.deciders import DECIDERS, Decider
from sim.fleet.network import Network
from sim.fleet.pairs import PairRouter, Pairs, TwoPools, side_of
from sim.fleet.pulls import BlockSizes, ConsumerSteps, ProducerSteps, PullRules
from sim.fleet.room_pairs import RoomPairs
from sim.fleet.rooms import ReceiverSteps, SenderSteps
from sim.fleet.tiered import SharedPort, TieredSteps
from sim.hardware.interconnects import load_interconnect
from sim.results.fleet.pulls import PromptRecorder, PullLog, pull_numbers
from sim.results.fleet.summary import imbalance
from sim.simulation.autoscaling import (
    add_autoscalers,
    places_off,
    replicas_by_pool,
)
from sim.simulation.fleet import Fleet
from sim.simulation.speculative import drafter_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cache.v1.specs import KVCacheGroup
    from sim.config.fleet import FleetTable
    from sim.costs.base import CostModel
    from sim.engine.beside import Beside
    from sim.engine.clock import Clock
    from sim.engine.loop import Engine
    from sim.engine.offloading import OffloadedSteps
    from sim.fleet.engines import Engines, Watch
    from sim.fleet.pulls import PairSteps
    from sim.results.fleet.ranks import RankRecorders
    from sim.results.recording.recorder import Recording
    from sim.scheduler.request import Request
    from sim.simulation.pools import Pool


_DECODE_ROUTER = {"kind": "round_robin"}
_NUM_LARGE = 4096
"""Blocks of a copy whose fixed times count for little."""
_OWN_LANES = ("nvlink", "xgmi")
"""Interconnects that do not go through the port to the host, as names begin."""


class PairFleet(Fleet):
    """A fleet of prefillers and decoders, made for one run.

    Parameters
    ----------
    env, pools, recorders, table, run
        See `Fleet`.

    Raises
    ------
    ConfigError
        If a router or the decider cannot be made, or pools keep blocks that the others
        cannot read.
    """

    def __init__(
        self,
        env: Clock,
        pools: Sequence[Pool],
        recorders: RankRecorders,
        table: FleetTable,
        **run: Any,
    ) -> None:
        assert table.links is not None
        self._connector = table.connector or ConnectorTable()
        self._proxy = table.proxy or ProxyTable()
        super().__init__(env, pools, recorders, table, **run)
        self._links = table.links
        self._decider: Decider = self._make_decider()
        _check_blocks(pools)
        rate = _bytes_per_s(table.links)
        self._network = Network(
            env, [rate * pool.engine.tensor_parallel_size for pool in self._owners]
        )
        self._log = PullLog()
        self._pairs: TwoPools | None = None

    def _make_router(self, table: FleetTable, seed: int) -> PairRouter:
        places: dict[str, list[int]] = {"prefill": [], "decode": []}
        for place, pool in enumerate(self._owners):
            places[pool.role].append(place)
        behind = table.decode_router or _DECODE_ROUTER
        prefill = self._router(table.router, "router", places["prefill"], seed)
        decode = self._router(behind, "decode_router", places["decode"], seed)
        return PairRouter(prefill, decode, places["prefill"], places["decode"])

    def _make_decider(self) -> Decider:
        table, router = self._proxy.decider, self.router
        decider = build(DECIDERS, table, "fleet.proxy.decider")
        if not isinstance(decider, Decider):
            raise ConfigError(
                f"fleet.proxy.decider: '{table['kind']}' needs a method is_remote"
                f"(prospect), and needs_prefixes, needs_decoder and needs_load, each "
                f"True or False; mend your class"
            )
        for needs, asked, key, method in (
            (decider.needs_prefixes, router.decode, "decode_router", "cached_tokens"),
            (decider.needs_load, router.prefill, "router", "active_tokens"),
        ):
            if needs and not hasattr(asked, method):
                raise ConfigError(
                    f"fleet.proxy.decider: {table['kind']} asks fleet.{key} for "
                    f"{method}(request), which that has not; set fleet.{key}.kind to "
                    f"{'llm_d or dynamo_kv' if key == 'decode_router' else 'dynamo_kv'}"
                )
        if decider.needs_decoder and self._proxy.order != "decode_first":
            raise ConfigError(
                f"fleet.proxy.decider: {table['kind']} looks at the decoder that was "
                f"chosen, got order {self._proxy.order}; set fleet.proxy.order to "
                f"decode_first"
            )
        return decider

    def routed(self, *, is_announced: bool) -> Engines:
        del is_announced
        engines = [
            self._engine(place, None, None) for place in range(len(self.schedulers))
        ]
        pairs = self._pairs = self._make_pairs(engines)
        add_autoscalers(pairs, self._table, self.pools)
        router = self.router
        for each, places in (
            (router.prefill, router.prefill_places),
            (router.decode, router.decode_places),
        ):
            self._run_ahead(pairs, each, places, looks_ahead=False)
        return pairs

    def _make_pairs(self, engines: list[Engine]) -> TwoPools:
        return Pairs(
            *(self.env, engines, self.router, self.events),
            *(self._renewed, self._slow, places_off(self._table, self.pools)),
            chain(*replicas_by_pool(self.pools)),
            decider=self._decider,
            chooses_decoder_first=self._proxy.order == "decode_first",
        )

    def _heeded(
        self,
        engines: Engines,
        watches: Sequence[Watch],
        engine: Engine,
        *,
        looks_ahead: bool,
    ) -> None:
        engine.horizon = None
        super()._heeded(engines, watches, engine, looks_ahead=looks_ahead)
        _look_after(engine, engine.horizon)

    def _engine(
        self,
        place: int,
        share: Iterable[Request] | None,
        horizon: Callable[[], float] | None,
        env: Clock | None = None,
    ) -> Engine:
        engine = super()._engine(place, share, horizon, env)
        _look_after(engine, self.env.next_turn_s)  # until it is told to run on
        return engine

    def _beside(self, place: int, scheduler: Any, cost_model: CostModel) -> Beside:
        side = self._side(place, scheduler, cost_model)
        tier: Any = super()._beside(place, scheduler, cost_model)
        if tier is None:
            return side
        port = None
        if _shares_gpu_port(self._links):
            rates = self._copied_bytes_per_s(place, tier)
            port = SharedPort(self._network, place, rates)
        return TieredSteps(side, tier, port)

    def _side(self, place: int, scheduler: Any, cost_model: CostModel) -> PairSteps:
        pool, log = self._owners[place], self._log
        if pool.role == "prefill":
            lease_s = float(self._connector.settings("nixl")["kv_lease_duration"])
            return ProducerSteps(scheduler, cost_model, place, lease_s, log)
        rules = _rules(pool, self._links)
        return ConsumerSteps(scheduler, cost_model, place, self._network, rules, log)

    def _copied_bytes_per_s(self, place: int, tier: OffloadedSteps) -> dict[str, float]:
        """Return what large copies to the host reach, and from it, of all GPUs.

        Copies that take no time leave the port to others.
        """
        pool, worker = self._owners[place], tier.worker
        block_bytes = pool.capacity.block_bytes * pool.engine.tensor_parallel_size
        found = {}
        for way, transfer in (("out", worker.store), ("in", worker.load)):
            copy_s = transfer.at([_NUM_LARGE])[0].copy_s
            found[way] = _NUM_LARGE * block_bytes / copy_s if copy_s else 0.0
        return found

    def joined(self, recording: Recording, engines: Engines) -> Recording:
        return super().joined(self._log.joined(recording), engines)

    def numbers(
        self, recording: Recording, engines: Engines, duration_s: float
    ) -> dict[str, Any]:
        assert self._pairs is not None
        found = super().numbers(recording, engines, duration_s)
        found |= pull_numbers(recording, duration_s)
        self._tell_prompts(found)
        found["transfers"]["num_expired"] = self._log.num_expired
        behind = self._table.decode_router or _DECODE_ROUTER
        found["decode_router"] = str(behind["kind"])
        found["num_local_prompts"] = self._pairs.num_local
        return found

    def _tell_prompts(self, told: dict[str, Any]) -> None:
        """Tell the tokens that prefillers computed, and each pool's imbalance."""
        pools = {pool["pool"]: pool for pool in told["pools"]}
        ratios: list[dict[str, float | None]] = []
        for pool in pools.values():
            engines = [each for each in told["engines"] if each["pool"] == pool["pool"]]
            for each in engines:
                recorder = self._recorders.of_rank[each["engine"]]
                if isinstance(recorder, PromptRecorder):
                    each["num_prompts"] = recorder.num_prompts
                    each["num_computed_prompt_tokens"] = recorder.num_computed_tokens
            if pool["role"] == "prefill":
                for key in ("num_prompts", "num_computed_prompt_tokens"):
                    pool[key] = sum(each[key] for each in engines)
                engines = [
                    each | {"num_requests": each["num_prompts"]} for each in engines
                ]
            up_s = [told["up_s"][each["engine"]] for each in engines]
            ratios.append(imbalance(engines, up_s))
        told["imbalance"] = {
            key: max((each[key] or 0.0 for each in ratios), default=0.0) or None
            for key in told["imbalance"]
        }


class RoomFleet(PairFleet):
    """A `PairFleet` of SGLang's engines, which are called both at once."""

    def _make_pairs(self, engines: list[Engine]) -> TwoPools:
        return RoomPairs(
            *(self.env, engines, self.router, self.events),
            *(self._renewed, self._slow, places_off(self._table, self.pools)),
            chain(*replicas_by_pool(self.pools)),
        )

    def _beside(self, place: int, scheduler: Any, cost_model: CostModel) -> Beside:
        pool, links = self._owners[place], self._links
        if pool.role == "prefill":
            rules = _rules(pool, links)
            return SenderSteps(scheduler, cost_model, place, self._network, rules)
        rules = _rules(pool, links)
        return ReceiverSteps(scheduler, cost_model, place, rules, self._log)

    def numbers(
        self, recording: Recording, engines: Engines, duration_s: float
    ) -> dict[str, Any]:
        found = super().numbers(recording, engines, duration_s)
        del found["transfers"]["num_expired"]  # slots are held until they are sent
        return found


PAIR_FLEETS: Final[Mapping[str, type[PairFleet]]] = MappingProxyType(
    {"nixl": PairFleet, "sglang": RoomFleet}
)
"""Fleets that prefill and decode apart, by how their engines hand prompts on."""


def _bytes_per_s(links: LinksTable) -> float:
    if links.bytes_per_s is not None:
        return links.bytes_per_s
    assert links.interconnect is not None
    return load_interconnect(links.interconnect).bytes_per_s


def _shares_gpu_port(links: LinksTable) -> bool:
    """Whether what is read goes through the port of copies to the host."""
    if links.shares_gpu_port is not None:
        return links.shares_gpu_port
    if links.interconnect is None:
        return True
    return not load_interconnect(links.interconnect).name.startswith(_OWN_LANES)


def _look_after(engine: Engine, looks_s: Callable[[], float] | None) -> None:
    """Let stretches of an engine end where calls do something by themselves, too."""
    own_s = side_of(engine).quiet_until_s
    engine.horizon = own_s if looks_s is None else lambda: min(looks_s(), own_s())


def _rules(pool: Pool, links: LinksTable) -> PullRules:
    """Return the costs of a decoder's pull besides its share of the links."""
    return PullRules(
        sizes=_block_sizes(pool),
        latency_s=links.latency_s,
        descriptor_s=links.descriptor_s,
        handshake_s=links.handshake_s,
    )


def _block_sizes(pool: Pool) -> tuple[BlockSizes, ...]:
    """Return the sizes of a block of each group, over all GPUs of an engine."""
    capacity, num_gpus = pool.capacity, pool.engine.tensor_parallel_size
    layout = None if capacity.plan is None else capacity.plan.layout
    if layout is None or len(layout.groups) == 1:
        pages = pages_of(pool.model, "joined", capacity.block_bytes)
        num_bytes = float(capacity.block_bytes * num_gpus)
        drafter = drafter_model(pool.engine, pool.model)  # its layers are in a block
        num_more = 0 if drafter is None else drafter.num_hidden_layers
        num_pages = pages.per_block + num_more
        return (BlockSizes(capacity.block_size, num_bytes, num_pages),)
    return tuple(
        BlockSizes(
            0 if isinstance(group.spec, MambaSpec) else group.spec.block_size,
            pages.block_bytes * num_gpus,
            pages.per_block,
        )
        for group, pages in zip(layout.groups, pages_by_group(layout), strict=True)
    )


def _check_blocks(pools: Sequence[Pool]) -> None:
    """Refuse pools whose blocks are not alike."""
    for key in ("block_size", "kv_cache_dtype"):
        _check_alike(key, {getattr(pool.engine, key): pool.name for pool in pools})
    _check_alike(
        "KV cache groups of", {_groups_in_words(pool): pool.name for pool in pools}
    )
    for key, in_words in (
        ("a state of", _state_in_words),
        ("blocks of", _sizes_in_words),
    ):
        _check_alike(
            *(key, {in_words(pool): pool.name for pool in pools}),
            remedy="give all the same tensor_parallel_size and precisions of states",
        )


def _check_alike(
    key: str, found: dict[Any, str], *, remedy: str = "give all the same"
) -> None:
    if len(found) > 1:
        told = ", ".join(f"{value} in {name}" for value, name in found.items())
        raise ConfigError(
            f"fleet.pools: prefillers and decoders need blocks that are alike, got "
            f"{key} {told}; {remedy}"
        )


def _groups_of(pool: Pool) -> tuple[KVCacheGroup, ...]:
    plan = pool.capacity.plan
    return () if plan is None else plan.layout.groups


def _groups_in_words(pool: Pool) -> str:
    """Return the kinds of layers whose blocks an engine holds, by group.

    Whether states are kept for hits is each engine's own matter.
    """
    return " and ".join(
        "a state" if isinstance(group.spec, MambaSpec) else kind_in_words(group.spec)
        for group in _groups_of(pool)
    )


def _sizes_in_words(pool: Pool) -> str:
    """Return the tokens of an engine's blocks; states have none.

    They follow from the bytes of a state on a rank where there are some.
    """
    sizes = {
        group.spec.block_size: None
        for group in _groups_of(pool)
        if not isinstance(group.spec, MambaSpec)
    }
    return f"{' and '.join(map(str, sizes))} tokens"


def _state_in_words(pool: Pool) -> str:
    num_bytes = {
        group.spec.state_bytes * pool.engine.tensor_parallel_size: None
        for group in _groups_of(pool)
        if isinstance(group.spec, MambaSpec)
    }
    return f"{' and '.join(map(str, num_bytes))} bytes"
