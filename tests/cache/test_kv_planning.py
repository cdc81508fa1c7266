"""From layers to groups, pages and blocks: literals of vLLM 0.33."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import CacheConfigError, KVCacheTooSmallError
from cache.v1.planning import KVCachePlan, longest_request, plan_groups, plan_kv_cache
from cache.v1.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def attention(
    kind: type[Any] = FullAttentionSpec,
    *,
    block_size: int = 16,
    num_kv_heads: int = 8,
    head_size: int = 64,
    **more: Any,
) -> Any:
    vectors = 1 if kind is MLAAttentionSpec else 2
    return kind(
        block_size=block_size,
        page_size_bytes=block_size * num_kv_heads * head_size * vectors * 2,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype="bfloat16",
        **more,
    )


def window(tokens: int, **more: Any) -> SlidingWindowSpec:
    spec: SlidingWindowSpec = attention(
        SlidingWindowSpec, sliding_window=tokens, **more
    )
    return spec


def delta_net(
    mode: MambaCacheMode = MambaCacheMode.ALIGN, *, alignment: int | None = None
) -> MambaSpec:
    return MambaSpec(
        block_size=0,
        page_size_bytes=0,
        shapes=((3, 8192), (32, 128, 128)),
        dtypes=("bfloat16", "bfloat16"),
        mamba_cache_mode=mode,
        num_checkpoint_blocks=int(alignment is not None),
        checkpoint_alignment=alignment,
    )


def layers(count: int, kind: Callable[[int], KVCacheSpec]) -> dict[str, KVCacheSpec]:
    return {f"layers.{index}": kind(index) for index in range(count)}


GPT_OSS = layers(24, lambda i: attention() if i % 2 else window(128))
GEMMA = layers(
    62,
    lambda i: (
        attention(num_kv_heads=16, head_size=128)
        if (i + 1) % 6 == 0
        else window(1024, num_kv_heads=16, head_size=128)
    ),
)
WIDE_WINDOWS = layers(
    24,
    lambda i: (
        attention(num_kv_heads=2, head_size=128)
        if (i + 1) % 4 == 0
        else window(128, head_size=128)
    ),
)
LATENT = layers(
    61,
    lambda _: attention(MLAAttentionSpec, block_size=64, num_kv_heads=1, head_size=576),
)


def qwen3_next(**more: Any) -> dict[str, KVCacheSpec]:
    full = attention(num_kv_heads=2, head_size=256)
    return layers(48, lambda i: full if (i + 1) % 4 == 0 else delta_net(**more))


def plan(of: dict[str, KVCacheSpec], **more: Any) -> KVCachePlan:
    arguments = {
        "block_size": 16,
        "available_bytes": 10**10,
        "max_model_len": 8192,
        "max_in_flight_tokens": 2048,
    }
    return plan_kv_cache(of, **{**arguments, **more})


def test_equal_buckets_are_a_group_each_and_the_window_is_first() -> None:
    planned = plan(GPT_OSS, available_bytes=2_986_072_580, max_in_flight_tokens=16_384)
    first, second = planned.layout.groups
    assert isinstance(first.spec, SlidingWindowSpec)
    assert (len(first.layer_names), len(second.layer_names)) == (12, 12)
    assert first.layer_names[:2] == ("layers.0", "layers.2")
    assert planned.layout.bytes_per_block == 393_216
    assert planned.layout.num_blocks == 7_593
    assert planned.blocks_per_request == (513, 512)
    assert planned.printed == (
        "GPU KV cache size: 60,684 tokens, Maximum concurrency for 8,192 tokens per"
        " request: 7.41x"
    )


def test_a_large_bucket_is_dealt_into_groups_of_the_small_one() -> None:
    groups = plan(GEMMA).layout.groups
    assert [len(group.layer_names) for group in groups] == [9, 9, 9, 9, 8, 8, 10]
    assert groups[0].layer_names[:2] == ("layers.0", "layers.7")
    assert isinstance(groups[-1].spec, FullAttentionSpec)
    # The widest group counts: short ones are padded.
    assert plan(GEMMA).layout.bytes_per_block == 10 * 131_072


def test_nearly_equal_buckets_are_padded_rather_than_dealt() -> None:
    def mixed(num_windows: int) -> list[int]:
        of = layers(10 + num_windows, lambda i: attention() if i < 10 else window(128))
        return [len(group.layer_names) for group in plan(of).layout.groups]

    assert mixed(14) == [10, 14]
    assert mixed(15) == [10, 8, 7]


def test_a_small_page_gets_a_larger_block() -> None:
    planned = plan(WIDE_WINDOWS, max_model_len=512, max_in_flight_tokens=256)
    layout = planned.layout
    assert [group.spec.block_size for group in layout.groups] == [16, 16, 16, 64]
    assert {group.spec.page_size_bytes for group in layout.groups} == {65_536}
    assert layout.scheduler_block_size == layout.cache_hit_alignment == 64
    assert layout.hash_block_size == planned.block_size == 16
    assert planned.blocks_per_request == (25, 25, 25, 8)
    assert planned.layers["layers.3"].block_size == 16


def test_a_page_that_does_not_divide_is_padded() -> None:
    of = layers(4, lambda i: attention(num_kv_heads=3) if i % 2 else window(128))
    groups = plan(of).layout.groups
    assert [group.spec.block_size for group in groups] == [16, 16]
    assert groups[1].spec.page_size_bytes == groups[0].spec.page_size_bytes


def test_without_the_hybrid_manager_windows_keep_their_blocks() -> None:
    planned = plan(GEMMA, disable_hybrid_kv_cache_manager=True)
    (group,) = planned.layout.groups
    assert isinstance(group.spec, FullAttentionSpec)
    assert group.spec.sliding_window == 1024
    assert planned.blocks_per_request == (512,)
    assert planned.layout.bytes_per_block == 62 * 131_072


def test_unlike_windows_need_the_hybrid_manager() -> None:
    def kind(index: int) -> KVCacheSpec:
        return attention() if index % 3 == 0 else window(64 * (index % 3))

    assert len(plan(layers(9, kind)).layout.groups) == 3
    with pytest.raises(CacheConfigError, match="must have the same window size"):
        plan(layers(9, kind), disable_hybrid_kv_cache_manager=True)
    states = qwen3_next()
    with pytest.raises(CacheConfigError, match="can be off only where all layers are"):
        plan(states, disable_hybrid_kv_cache_manager=True)


def test_pages_of_one_group_may_differ() -> None:
    with pytest.raises(KVCacheTooSmallError, match=r"13936$") as caught:
        plan(
            WIDE_WINDOWS,
            available_bytes=1_115_111_072,
            max_model_len=40_000,
            disable_hybrid_kv_cache_manager=True,
        )
    assert str(caught.value) == (
        "To serve at least one request with the model's max seq len (40000), (2.98 GiB"
        " KV cache is needed, which is larger than the available KV cache memory (1.04"
        " GiB). Based on the available memory, the estimated maximum model length is"
        " 13936"
    )


def test_attention_blocks_cover_a_state() -> None:
    planned = plan(qwen3_next(), max_model_len=32_768, num_gpu_blocks_override=500)
    assert {spec.block_size for spec in planned.layers.values()} == {544}
    assert {spec.page_size_bytes for spec in planned.layers.values()} == {1_114_112}
    assert planned.blocks_per_request == (2, 2, 2, 61)
    assert planned.kv_cache_size_tokens == 244_537


def test_states_without_caching_are_one_block_a_request() -> None:
    planned = plan(
        qwen3_next(mode=MambaCacheMode.NONE),
        max_model_len=6_144,
        enable_prefix_caching=False,
    )
    assert planned.blocks_per_request == (1, 1, 1, 12)
    assert planned.block_size == 544
    assert planned.layout.hash_block_size == 104_448


@pytest.mark.parametrize(
    ("unit", "block_size", "grid"), [(None, 576, 576), (32, 576, 64)]
)
def test_checkpoints_keep_blocks_on_their_grid(
    unit: int | None, block_size: int, grid: int
) -> None:
    planned = plan(qwen3_next(alignment=64), prefix_match_unit=unit)
    spec = planned.layout.groups[0].spec
    assert isinstance(spec, MambaSpec)
    assert (spec.block_size, spec.checkpoint_alignment) == (block_size, grid)
    assert planned.blocks_per_request[0] == 3


def test_hits_inside_a_block_need_states_and_a_finer_hash() -> None:
    layout = plan(qwen3_next(), prefix_match_unit=32).layout
    assert (layout.scheduler_block_size, layout.hash_block_size) == (544, 32)
    assert layout.cache_hit_alignment == 32
    with pytest.raises(CacheConfigError, match="prefix_match_unit must divide"):
        plan(qwen3_next(), prefix_match_unit=30)
    with pytest.raises(CacheConfigError, match="prefix_match_unit must be 64"):
        plan(LATENT, prefix_match_unit=16)


def test_latent_attention_is_one_group_and_not_divided() -> None:
    planned = plan(LATENT, block_size=64, available_bytes=20_517_667_682)
    assert planned.layout.bytes_per_block == 4_497_408
    assert planned.layout.num_blocks == 4_562


def test_latent_attention_beside_a_window_keeps_all_blocks() -> None:
    of = LATENT | {"draft": window(128, block_size=64, num_kv_heads=7)}
    (group,) = plan(of, block_size=64).layout.groups
    assert group.bytes_per_block == 61 * 73_728 + 64 * 7 * 64 * 2 * 2


def test_a_length_of_minus_one_is_fitted_beside_the_null_block() -> None:
    small = layers(32, lambda _: attention(num_kv_heads=1, head_size=128))
    planned = plan(small, num_gpu_blocks_override=500, fit_max_model_len=True)
    assert planned.max_model_len == 7_984
    assert planned.blocks_per_request == (499,)
    with pytest.raises(CacheConfigError, match="Cannot auto-fit"):
        plan(small, num_gpu_blocks_override=1, fit_max_model_len=True)
    with pytest.raises(KVCacheTooSmallError, match="No available memory"):
        plan(small, num_gpu_blocks_override=1)


def test_chunks_keep_the_chunk_and_what_is_in_flight() -> None:
    def kind(index: int) -> KVCacheSpec:
        if (index + 1) % 4 == 0:
            return attention(head_size=128)
        spec: ChunkedLocalAttentionSpec = attention(
            ChunkedLocalAttentionSpec, head_size=128, attention_chunk_size=8192
        )
        return spec

    planned = plan(
        layers(48, kind),
        available_bytes=34_842_427_990,
        max_model_len=32_768,
        max_in_flight_tokens=4_096,
    )
    assert planned.blocks_per_request == (768, 768, 768, 2_048)
    assert planned.kv_cache_size_tokens == 333_583


KINDS = st.sampled_from(
    [
        attention(),
        attention(num_kv_heads=2),
        attention(num_kv_heads=3),
        window(128),
        window(100, num_kv_heads=4),
        attention(ChunkedLocalAttentionSpec, attention_chunk_size=96),
        delta_net(),
    ]
)


@given(st.lists(KINDS, min_size=1, max_size=30), st.integers(1, 5_000))
def test_groups_share_the_pool_without_loss(
    kinds: list[KVCacheSpec], num_tokens: int
) -> None:
    of = {f"layers.{index}": kind for index, kind in enumerate([*kinds, attention()])}
    planned = plan_groups(
        of, block_size=16, max_model_len=5_000, max_in_flight_tokens=512
    )
    layout = planned.layout
    names = [name for group in layout.groups for name in group.layer_names]
    assert sorted(names) == sorted(of)
    several = len(layout.groups) > 1
    pages = {group.spec.page_size_bytes for group in layout.groups}
    assert len(pages) == 1 or not several
    assert layout.bytes_per_block == max(g.bytes_per_block for g in layout.groups)
    for group in layout.groups:
        assert layout.scheduler_block_size % group.spec.block_size == 0
        assert group.spec.block_size % layout.hash_block_size == 0
    # The longest request that so many blocks hold is the longest.
    blocks = sum(planned.blocks_for(num_tokens))
    longest = longest_request(planned, blocks)
    assert longest >= num_tokens
    assert sum(planned.blocks_for(longest)) <= blocks
    if longest < planned.max_model_len:
        assert sum(planned.blocks_for(longest + 1)) > blocks
