"""`HostedPlans` of an engine that only prefills, or only decodes.

Its queues, loops and buffers are the release's own. Played is the other engine: when
it is met, and how long the pages of a prompt take to come.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from sim.scheduler.hosted.sglang import _nothing
from sim.scheduler.hosted.sglang_api import installed_sglang
from sim.scheduler.hosted.sglang_plans import HostedPlans, PlansApi

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MODULES: Final = {
    "prefill": "sglang.srt.disaggregation.prefill",
    "decode": "sglang.srt.disaggregation.decode",
    "scheduler": "sglang.srt.managers.scheduler",
    "base": "sglang.srt.disaggregation.base",
}
_HOST: Final = "other"


@cache
def load_apart() -> ApartApi:
    """Import what is needed of an installed SGLang whose engines are apart.

    Raises
    ------
    SchedulerError
        If there is none, or one whose rules are not known here.
    """
    installed_sglang()
    return ApartApi()


class ApartApi(PlansApi):
    """The names of an SGLang that only prefills, or only decodes."""

    def __init__(self) -> None:
        super().__init__()
        modules: dict[str, Any] = {
            key: importlib.import_module(at) for key, at in _MODULES.items()
        }
        self._decode = modules["decode"]
        self.KVPoll = modules["base"].KVPoll
        queues = (
            ("prefill", "PrefillBootstrapQueue"),
            ("decode", "DecodePreallocQueue"),
        )
        for key, name in queues:
            module = modules[key]
            module.logger.setLevel(100)
            module.get_kv_class = lambda _, kind: _KINDS[kind.name]
            made = type(name, (_WithManager, getattr(module, name)), {})
            setattr(modules["scheduler"], name, made)
        modules["prefill"].poll_and_all_reduce_attn_cp_tp_group = _polled
        modules["decode"].poll_and_all_reduce = _polled
        modules["decode"].all_reduce_flags = lambda flags, *_, **__: flags
        modules["scheduler"].get_dsa_seed_metadata_dim = lambda _: 0
        modules["scheduler"].is_minimax_sparse = lambda _: False
        self.torch.cuda.Event = lambda: SimpleNamespace(record=_nothing)
        group = SimpleNamespace(cpu_group=None)
        self._context.get_context().parallel._overrides.update(attn_tp_group=group)

    def pools(self, settings: Mapping[str, Any]) -> tuple[Any, Any]:
        slots, allocator = super().pools(settings)
        cache_ = allocator.get_kvcache()
        cache_.maybe_get_custom_mem_pool = _nothing
        cache_.get_cpu_copy = cache_.load_cpu_copy = _nothing
        cache_.page_size, cache_.cpu_copy_carries_mamba = settings["page_size"], True
        if settings["disaggregation_mode"] == "decode":
            slots = self._decode.DecodeReqToTokenPool(
                size=settings["max_running_requests"],
                max_context_len=settings["context_len"] + 4,
                device="cpu",
                enable_memory_saver=False,
                pre_alloc_size=settings["disaggregation_decode_extra_slots"],
            )
        return slots, allocator


class HostedApart(HostedPlans):
    """`HostedPlans` of an engine that only prefills, or only decodes.

    Parameters
    ----------
    settings
        Keys of a decision workload, `disaggregation_mode` among them.
    requests
        As of `HostedSglang`, with ``route_delay`` and ``transfer_delay``.
    output
        Token `index` of the output of the request `id`.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        requests: Sequence[Mapping[str, Any]],
        output: Callable[[str, int], int],
    ) -> None:
        most = settings["max_running_requests"]
        self._mode = settings["disaggregation_mode"]
        self.rooms = {at: _Room(self, each) for at, each in enumerate(requests, 1)}
        self._places = {each["id"]: at for at, each in enumerate(requests, 1)}
        self._most_idle = max(
            (3 + each["route_delay"] + each["transfer_delay"] for each in requests),
            default=3,
        )
        super().__init__(
            {
                **settings,
                "need_sort": True,
                "max_queued_requests": None,
                "disable_radix_cache": self._mode == "decode"
                or settings["disable_radix_cache"],
                "disaggregation_decode_retraction_backup": "cpu_tensor",
                "disaggregation_decode_extra_slots": 2 * most if most <= 32 else 0,
            },
            requests,
            output,
        )

    @staticmethod
    def _load() -> Any:
        return load_apart()

    @property
    def step(self) -> int:
        """Of the loop."""
        return self._step

    # Methods that the event loop calls instead of its own.

    def _requested(self, told: Mapping[str, Any]) -> Any:
        return self._api.request(
            told,
            bootstrap_host=_HOST,
            bootstrap_port=1,
            bootstrap_room=self._places[told["id"]],
        )

    def _send(self, message: Any, request: Any = None) -> None:
        """Note who is turned away; the queues tell who has left them."""
        super()._send(message, request)
        self._line.pop("dropped", None)

    def _side_plan(self, **of: Any) -> Any:
        name = f"get_next_disagg_{self._mode}_batch_to_run"
        plan = getattr(self._api.Scheduler, name)(self._scheduler, **of)
        self._scheduler.running_batch = plan.running_batch
        self._note_batch(plan.batch_to_run)
        return plan

    def _join(self, running_batch: Any) -> Any:
        """Note those that join with their first token, and those that end with it."""
        batch = self._api.Scheduler.get_new_prebuilt_batch(
            self._scheduler, running_batch
        )
        if batch is not None:
            self._line["joined"] = [[r.rid, self._row_of(r)] for r in batch.reqs]
        return batch

    def note_sent(self, name: str, num_pages: int, *, is_last: bool) -> None:
        """Note pages that are on their way from now on."""
        sends = self._line.setdefault("send", {})
        before = sends.get(name, [0, False])[0]
        sends[name] = [before + num_pages, is_last]

    def note_first_token(self, index: int, name: str, room: int) -> None:
        """Let the first token of a prompt come, whenever its pages will."""
        buffers = self._scheduler.disagg_metadata_buffers
        buffers.output_ids[index, 0] = self._output(name, 0)
        buffers.bootstrap_room[index, 0] = room

    def is_at_rest(self) -> bool:
        return not any(self._beside().values())

    # Fields of a line.

    def _beside(self) -> dict[str, list[str]]:
        """Return who stands in the queues beside `waiting`."""
        scheduler = self._scheduler
        if self._mode == "prefill":
            waiting = scheduler.disagg_prefill_bootstrap_queue.queue
            return {
                "bootstrapping": [each.rid for each in waiting],
                "in_flight": [r.rid for r in scheduler.disagg_prefill_inflight_queue],
            }
        queue = scheduler.disagg_decode_prealloc_queue
        loading = scheduler.disagg_decode_transfer_queue.queue
        return {
            "preallocating": [each.req.rid for each in queue.queue],
            "transferring": [each.req.rid for each in loading],
            "retracted": [each.rid for each in queue.retracted_queue],
        }

    def _end_line(self) -> None:
        self._line.update(self._beside())
        super()._end_line()

    def _told(self, args: Any, worker: Any) -> dict[str, Any]:
        worker.model_runner.effective_max_total_num_tokens = (
            worker.model_runner.effective_logical_max_total_num_tokens
        ) = self._settings["max_total_num_tokens"]
        worker.is_hybrid_swa = False
        return {
            **super()._told(args, worker),
            **_OFF,
            "disaggregation_mode": self._api.DisaggregationMode(self._mode),
            "tp_worker": worker,
        }

    def _made(self) -> Any:
        scheduler = super()._made()
        scheduler.model_config.hf_config = None
        scheduler.model_config.num_key_value_heads = 1
        scheduler.init_disaggregation()
        for queue in (
            scheduler.disagg_prefill_bootstrap_queue,
            scheduler.disagg_decode_prealloc_queue,
        ):
            if queue is not None:
                queue.kv_manager.rooms = self.rooms
        scheduler.__dict__[f"get_next_disagg_{self._mode}_batch_to_run"] = (
            self._side_plan
        )
        if self._mode == "decode":
            scheduler.get_new_prebuilt_batch = self._join
        return scheduler

    def _loop(self) -> Any:
        way = "overlap" if self._settings["overlap"] else "normal"
        return getattr(self._scheduler, f"event_loop_{way}_disagg_{self._mode}")


class _Room:
    """Where the played engine meets the hosted one for one request."""

    def __init__(self, side: HostedApart, told: Mapping[str, Any]) -> None:
        self.side = side
        self.name = told["id"]
        self.met_step: int = told["arrival_step"] + told["route_delay"]
        self.transfer_delay: int = told["transfer_delay"]
        self.begin_step = -1  # when all of its pages are on their way

    @property
    def is_met(self) -> bool:
        """Whether the other engine is there."""
        return self.side.step >= self.met_step

    @property
    def has_come(self) -> bool:
        """Whether all of the prompt is where it goes."""
        return 0 <= self.begin_step <= self.side.step - self.transfer_delay


class _Connection:
    """What both ends have in common."""

    kv_mgr = SimpleNamespace(
        is_dummy_cp_rank=True,
        enable_all_cp_ranks_for_transfer=False,
        enable_deferred_decode_kv_release=False,
    )
    require_staging = False
    abort_notified = False
    supports_host_destination = False

    def __init__(self, mgr: Any, bootstrap_room: int, **_: Any) -> None:
        self._number, self._room = bootstrap_room, mgr.rooms[bootstrap_room]
        self._kinds = load_apart().KVPoll
        self.conclude_state: Any = None

    def poll(self) -> Any:
        room, kinds = self._room, self._kinds
        if self.conclude_state is not None:
            return self.conclude_state
        if room.begin_step < 0:
            return kinds.WaitingForInput if room.is_met else kinds.Bootstrapping
        return kinds.Success if room.has_come else kinds.Transferring

    def abort(self) -> None:
        self.conclude_state = self._kinds.Failed

    def clear(self) -> None:
        """Let go of nothing."""

    def failure_exception(self) -> None:
        raise RuntimeError("withdrawn")


class _Sender(_Connection):
    """The end of a prefiller."""

    _num_left = 0

    def init(self, num_pages: int, index: int) -> None:
        del index
        self._num_left = num_pages

    def pop_decode_prefix_len(self) -> int:
        return 0

    def get_max_transfer_tokens(self) -> None:
        return None

    def should_send_kv_chunk(self, num_pages: int, is_last: bool) -> bool:
        return num_pages > 0 or is_last

    def send(self, pages: Any, *_: Any, **__: Any) -> None:
        self._num_left -= len(pages)
        is_last = not self._num_left
        self._room.side.note_sent(self._room.name, len(pages), is_last=is_last)
        if is_last:
            self._room.begin_step = self._room.side.step


class _Receiver(_Connection):
    """The end of a decoder."""

    def init(self, rank: int) -> None:
        """Reach the prefiller, which takes its time."""

    def send_metadata(self, pages: Any, index: int, *_: Any, **__: Any) -> None:
        del pages
        self._room.begin_step = self._room.side.step
        self._room.side.note_first_token(index, self._room.name, self._number)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Tell nobody."""


_KINDS: Final = {"SENDER": _Sender, "RECEIVER": _Receiver}


class _WithManager:
    """A queue whose manager of transfers knows one prefiller."""

    def _init_kv_manager(self) -> Any:
        return SimpleNamespace(
            kv_args=SimpleNamespace(state_types=[]),
            prefill_info_table=SimpleNamespace(
                get=lambda _: SimpleNamespace(dp_size=1)
            ),
        )


def _polled(pollers: Any, *_: Any, **__: Any) -> list[Any]:
    return [each.poll() for each in pollers]


_OFF: Final[dict[str, Any]] = {
    **dict.fromkeys(
        (
            "gracefully_exit",
            "_engine_paused",
            "enable_decode_hicache",
            "enable_staging",
        ),
        False,
    ),
    **dict.fromkeys(
        ("kv_checksum_computer", "attn_tp_cpu_group", "attn_cp_cpu_group"),
    ),
    "kv_shard_widening": 1,
    "random_seed": 0,
    "_hosts_rust_server": lambda: False,
    "_deferred_input_requests": (),
}
"""Attributes of an engine without the options of such engines."""
