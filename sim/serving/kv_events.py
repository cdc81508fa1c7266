"""Events of the KV cache over ZMQ, in the format of vLLM 0.33.

Source: vLLM 0.33.0, ``vllm/distributed/kv_events.py``: a batch is an array of its time,
its events and the data-parallel rank, an event a map with its ``type``; a message has
three parts, the topic, a sequence number of eight bytes and the batch in msgpack.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from time import time
from typing import TYPE_CHECKING, Any, Final

from cache.v1.block_pool import BlockPool
from sim.errors import ConfigError

try:
    import msgpack
    import zmq
except ModuleNotFoundError as _error:
    raise ConfigError(
        f"--kv-events-port needs {_error.name}; pip install 'kvsim[serve]'"
    ) from _error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import StepCost
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.serving.live import LiveEngine
    from sim.serving.text import Prompt

_MEDIUM: Final = "GPU"
_MOST_QUEUED: Final = 100_000
_UNSIGNED: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class _Content:
    """The content that a block key stands for."""

    parent: int | None
    token_ids: Sequence[int]


class Publisher:
    """A socket that publishes the events of one engine, through all its lives.

    Parameters
    ----------
    host, port
        Where it listens; port 0 for any that is free.

    Raises
    ------
    ConfigError
        If nothing can listen there.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(_MOST_QUEUED)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(
                f"--kv-events-port {port} of {host} cannot be used: {error}; give "
                "another"
            ) from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._numbers = count()
        self._was_watching = False

    def watch(self, live: LiveEngine) -> None:
        """Publish what the caches of an engine do from now on.

        Raises
        ------
        ConfigError
            If its scheduler keeps no blocks by their content as vLLM's V1 does.
        """
        watches = []
        for rank, engine in enumerate(live.run.engines):
            scheduler: Any = engine.scheduler
            pool = getattr(getattr(scheduler, "tables", None), "pool", None)
            if not (isinstance(pool, BlockPool) and pool.enable_caching):
                raise ConfigError(
                    "--kv-events-port needs engine.scheduler v1 and "
                    "enable_prefix_caching"
                )
            watch = Watch(self, rank, pool, live.block_size)
            engine.listeners.append(watch)
            watches.append(watch)
            if self._was_watching:  # an engine that has come back
                self.publish(rank, [{"type": "AllBlocksCleared"}])
        self._was_watching = True

        def tell(request: Request, prompt: Prompt) -> None:
            for watch in watches:
                watch.coming(request, prompt)

        live.on_request = tell

    def publish(self, rank: int, events: Sequence[dict[str, Any]]) -> None:
        """Publish a batch of events."""
        batch = msgpack.packb([time(), events, rank])
        number = next(self._numbers).to_bytes(8, "big")
        self._socket.send_multipart((b"", number, batch), flags=zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class Watch:
    """Turns what a pool does into events; a `StepListener` and a `BlockObserver`.

    It knows what keys stand for while their requests are there or their blocks cached.
    """

    def __init__(
        self, publisher: Publisher, rank: int, pool: BlockPool, block_size: int
    ) -> None:
        self._publisher = publisher
        self._rank = rank
        self._pool = pool
        self._block_size = block_size
        self._content: dict[int, _Content] = {}
        self._num_uses: dict[int, int] = {}  # of keys: requests, and cached blocks
        self.active: dict[Request, list[int]] = {}
        self._events: list[dict[str, Any]] = []
        pool.observer = self
        pool.on_cached = self._stored

    def coming(self, request: Request, prompt: Prompt) -> None:
        """Note the content of a request's blocks: its prompt, then its answer."""
        size = self._block_size
        num_tokens = min(request.oracle_num_tokens, request.max_num_tokens)
        keys: list[int] = []
        request.tokens.extend_block_hashes(keys, num_tokens // size, size)
        num_output = max(0, num_tokens - request.num_prompt_tokens)
        ids = [*prompt.ids(), *range(num_output)]
        parent: int | None = None
        for index, key in enumerate(keys):
            if self._use(key):
                own = ids[index * size : (index + 1) * size]
                self._content[key] = _Content(parent, own)
            parent = key
        self.active[request] = keys

    def _use(self, key: int) -> bool:
        """Count a use of a key; True of the first."""
        num = self._num_uses.get(key, 0)
        self._num_uses[key] = num + 1
        return num == 0

    def _leave(self, key: int) -> None:
        num = self._num_uses[key] - 1
        if num:
            self._num_uses[key] = num
        else:
            del self._num_uses[key], self._content[key]

    # -- what the pool tells --------------------------------------------------

    def _stored(self, keys: Sequence[int]) -> None:
        known = [key for key in keys if key in self._content]
        if not known:
            return  # of a further group of layers
        for key in known:
            self._num_uses[key] += 1
        contents = [self._content[key] for key in known]
        parent = contents[0].parent
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [key & _UNSIGNED for key in known],
                "parent_block_hash": None if parent is None else parent & _UNSIGNED,
                "token_ids": [i for each in contents for i in each.token_ids],
                "block_size": self._block_size,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": None,
                "group_idx": 0,
            }
        )

    def evicted(self, block_ids: Sequence[int]) -> None:
        blocks = self._pool.blocks
        keys = [blocks[block_id].block_hash for block_id in block_ids]
        known = [key for key in keys if key is not None and key in self._content]
        if known:
            hashes = [key & _UNSIGNED for key in known]
            self._events.append(
                {
                    "type": "BlockRemoved",
                    "block_hashes": hashes,
                    "medium": _MEDIUM,
                    "group_idx": 0,
                }
            )
        for key in known:
            self._leave(key)

    def taken(self, block_ids: Sequence[int]) -> None:
        """Tell nothing: what they held was evicted before."""

    def released(self, block_ids: Sequence[int]) -> None:
        """Tell nothing: they can still be found."""

    def revived(self, block_ids: Sequence[int]) -> None:
        """Tell nothing: they could be found before."""

    # -- what the engine tells ------------------------------------------------

    def scheduled(
        self,
        step: int,
        start_s: float,
        cost: StepCost,
        output: SchedulerOutput,
        scheduler: Any,
    ) -> None:
        del step, start_s, cost, output, scheduler
        self._send()

    def ended(self, end_s: float, finished: Sequence[Request], scheduler: Any) -> None:
        del end_s, scheduler
        self._send()
        for request in finished:
            self._forget(request)
        # Those whose clients have left, oldest first; a few a step are enough.
        for request in list(islice(self.active, 8)):
            if request.status.is_finished:
                self._forget(request)
            else:  # looked at again when all others were
                self.active[request] = self.active.pop(request)

    def _forget(self, request: Request) -> None:
        for key in self.active.pop(request, ()):
            self._leave(key)

    def _send(self) -> None:
        if self._events:
            self._publisher.publish(self._rank, self._events)
            self._events = []
