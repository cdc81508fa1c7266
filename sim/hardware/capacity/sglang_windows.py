"""SGLang's two pools of a model with windows, and models that have one.

::

    tokens         = memory / (bytes of full layers + ratio * bytes of the others)
    window tokens  = ratio * tokens

Without a radix cache and with a given `max_running_requests` the second pool is instead
what so many requests hold at most, and the first one takes the rest.

Source: SGLang 0.5.23, ``model_executor/pool_configurator.py``
(`HybridSWAPoolConfigurator`, `SWARequestCapPoolConfigurator`),
``configs/model_config.py`` (`is_hybrid_swa_model`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sim.errors import CapacityError
from sim.hardware.capacity.groups import page_in_words
from sim.hardware.capacity.pool import groups_of
from sim.hardware.models.layers import LayerKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.hardware.capacity.arguments import EngineArguments
    from sim.hardware.models.architecture import ModelArchitecture

FIRST_WITH_WINDOWS: Final = 23
SWA_FULL_TOKENS_RATIO: Final = 0.8
EVICTION_INTERVAL: Final = 128
"""``SGLANG_SWA_EVICTION_INTERVAL``, at its default."""
_TWO_POOLS: Final = frozenset({"gpt_oss"})
_ONE_POOL: Final = frozenset({"gemma2", "gemma3"})
"""Families with windows that have two pools, and one for all layers."""


@dataclass(frozen=True, slots=True)
class WindowPools:
    """Two pools of an engine.

    Attributes
    ----------
    sliding_window_size
        Tokens that a windowed layer attends to before one, as SGLang counts them.
    page_size
        Tokens of a page of both.
    num_full_layers, num_window_layers
        Layers that share each.
    full_page_bytes, window_page_bytes
        A page of all layers of each.
    ratio
        Window tokens for each token of the first pool.
    num_window_tokens
        Of a pool sized by requests; None for one by the ratio.
    words
        What a page of one layer consists of.
    """

    sliding_window_size: int
    page_size: int
    num_full_layers: int
    num_window_layers: int
    full_page_bytes: int
    window_page_bytes: int
    ratio: float
    num_window_tokens: int | None
    words: str

    @property
    def bytes_per_page(self) -> float:
        """Bytes of a page of full layers and what stands beside it by the ratio."""
        if self.num_window_tokens is not None:
            return self.full_page_bytes
        return self.full_page_bytes + self.ratio * self.window_page_bytes

    def num_pages_in(self, available_bytes: int) -> int:
        """Return the pages of full layers that fit so much memory."""
        if self.num_window_tokens is not None:
            num_pages = self.num_window_tokens // self.page_size
            available_bytes -= num_pages * self.window_page_bytes
        num_tokens = int(available_bytes // (self.bytes_per_page / self.page_size))
        return max(0, num_tokens // self.page_size)

    def window_tokens_beside(self, num_pages: int) -> int:
        """Return the tokens of the second pool beside so many pages of the first.

        Raises
        ------
        CapacityError
            Where no request would ever be let in.
        """
        size, num_tokens = self.page_size, self.num_window_tokens
        if num_tokens is None:
            num_tokens = int(num_pages * size * self.ratio) // size * size
        least = self.sliding_window_size + size
        if num_tokens <= least:
            raise CapacityError(
                f"the pool of layers with a window must hold more than a window and a "
                f"page ({least} tokens), got {num_tokens:,}; give it more memory, or a "
                f"larger swa_full_tokens_ratio than {self.ratio:g}"
            )
        return num_tokens

    def bytes_of(self, num_pages: int, num_window_tokens: int) -> int:
        """Return the bytes of both pools."""
        num_window_pages = num_window_tokens // self.page_size
        return (
            num_pages * self.full_page_bytes + num_window_pages * self.window_page_bytes
        )

    def shares(
        self, num_pages: int, num_window_tokens: int, max_model_len: int
    ) -> tuple[Mapping[str, Any], ...]:
        """Return both pools as `sim.hardware.capacity.groups.shares_of` does groups.

        Each has `num_blocks`, too: what its own pool holds.
        """
        size, window = self.page_size, self.sliding_window_size
        longest = -(-max_model_len // size)
        kept = -(-(window + EVICTION_INTERVAL) // size) + 1
        return tuple(
            {
                "kind": kind,
                "num_groups": 1,
                "num_layers": num_layers,
                "block_size": size,
                "blocks_per_request": most,
                "pages": ((num_layers, page_bytes // num_layers, self.words),),
                "num_blocks": num_blocks,
            }
            for kind, num_layers, most, page_bytes, num_blocks in (
                (
                    "full attention",
                    self.num_full_layers,
                    longest,
                    self.full_page_bytes,
                    num_pages,
                ),
                (
                    f"sliding window of {window + 1:,}",
                    self.num_window_layers,
                    min(longest, kept),
                    self.window_page_bytes,
                    num_window_tokens // size,
                ),
            )
        )


def window_pools(
    arguments: EngineArguments, patch: int
) -> tuple[EngineArguments, WindowPools | None]:
    """Return arguments whose model is as the first pool holds it, and both pools.

    None where there is one pool: the model has no windows, or its layers with one keep
    all tokens.

    Raises
    ------
    CapacityError
        For layers with windows or states whose pools are not known here.
    """
    model, ratio = arguments.model, arguments.swa_full_tokens_ratio
    if ratio is not None and not 0 < ratio <= 1:
        raise CapacityError(
            f"swa_full_tokens_ratio must be above 0 and at most 1, got {ratio:g}"
        )
    has_two = model.model_type in _TWO_POOLS and model.num_sliding_layers > 0
    if model.num_sliding_layers or model.num_state_layers:
        is_known = has_two or model.model_type in _ONE_POOL
        if patch < FIRST_WITH_WINDOWS or not is_known:
            raise CapacityError(_unknown(model, patch))
        kinds = (LayerKind.FULL_ATTENTION,) * model.num_hidden_layers
        held = replace(arguments, model=replace(model, mixed_layer_kinds=kinds))
    else:
        held = arguments
    if not has_two or arguments.disable_hybrid_kv_cache_manager:
        if ratio is not None:
            raise CapacityError(
                f"swa_full_tokens_ratio divides two pools, and {model.name} has one; "
                f"leave it out, got {ratio:g}"
            )
        return held, None
    layers = [*groups_of(held).layers.values()]
    num_windows = model.num_sliding_layers
    num_full = len(layers) - num_windows
    page_bytes = layers[0].page_size_bytes  # of all: heads are alike
    assert model.sliding_window is not None
    pools = WindowPools(
        sliding_window_size=model.sliding_window - 1,  # without the token itself
        page_size=arguments.block_size,
        num_full_layers=num_full,
        num_window_layers=num_windows,
        full_page_bytes=num_full * page_bytes,
        window_page_bytes=num_windows * page_bytes,
        ratio=SWA_FULL_TOKENS_RATIO if ratio is None else ratio,
        num_window_tokens=None,
        words=page_in_words(layers[0]),
    )
    return held, replace(pools, num_window_tokens=_by_requests(arguments, pools))


def _by_requests(arguments: EngineArguments, pools: WindowPools) -> int | None:
    """Return what all requests hold of the second pool at most, where that sizes it."""
    num_requests = arguments.max_num_seqs
    if arguments.enable_prefix_caching or not (num_requests and arguments.has_chunks):
        return None
    size = pools.page_size
    each = pools.sliding_window_size + EVICTION_INTERVAL + 2 * size
    num_chunks = 2 if arguments.async_scheduling else 1
    chunks = num_chunks * arguments.max_num_batched_tokens
    return -(-(each * num_requests + chunks + size) // size) * size


def _unknown(model: ModelArchitecture, patch: int) -> str:
    """Return why a model is refused, in a line."""
    unlike = model.num_sliding_layers + model.num_state_layers
    known = ", ".join(sorted(_TWO_POOLS | _ONE_POOL))
    takes = f"0.5.{FIRST_WITH_WINDOWS} of {known}"
    if patch < FIRST_WITH_WINDOWS and model.model_type in _TWO_POOLS | _ONE_POOL:
        takes += f", not 0.5.{patch}"
    return (
        f"model must have full attention in all layers for SGLang, {model.name} has "
        f"{unlike} with a window or a state, whose pools are built for {takes}; use "
        f"another model or release, or a vLLM release"
    )
