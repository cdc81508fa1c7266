"""Which variant of which operation each backend offers, and which are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibrate.harness.device import MissingError
from calibrate.harness.grid import Choice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PREFILL = (
    ("flash_attn", "vllm"),
    ("flashinfer", "flashinfer"),
    ("mixed", "triton"),
    ("sdpa", "torch"),
)
_LAYER = (("fused", "vllm"), ("torch", "torch"))
OFFERS: dict[str, tuple[tuple[str, str], ...]] = {
    "decode_attention": (
        ("flash_attn", "vllm"),
        ("flashinfer", "flashinfer"),
        ("split_kv", "triton"),
        ("paged_v2", "cuda"),
        ("paged_v1", "cuda"),
        ("sdpa", "torch"),
    ),
    "prefill_attention": _PREFILL,
    "mixed_attention": _PREFILL,
    "swap": (
        ("loop", "vllm"),
        ("loop", "cuda"),
        ("loop", "torch"),
        ("batch", "cuda"),
        ("kernel", "triton"),
    ),
    "copy_blocks": (("launch", "cuda"), ("kernel", "triton"), ("loop", "torch")),
    **dict.fromkeys(("norm", "rope", "activation", "cache_write", "router"), _LAYER),
    "routed_experts": (
        ("fused_moe", "vllm"),
        ("matmul_ogs", "vllm"),
        ("marlin", "vllm"),
        ("torch", "torch"),
    ),
}
"""(variant, backend) of each operation, the best first; all others are torch's."""


def choices_here(
    backends: Mapping[str, str], preferred: str, operations: Sequence[str]
) -> list[Choice]:
    """Return how each operation is timed: each variant once, preferred ones first.

    torch's own way of attending and copying is left out where there is another.
    `backends` says what is missing of each, empty text for those that are here.
    """
    if preferred != "auto" and backends.get(preferred, "it is unknown"):
        raise MissingError(
            f"--backend {preferred} cannot be used here:"
            f" {backends.get(preferred, 'it is unknown')}; take --backend auto"
        )
    chosen: list[Choice] = []
    for operation in operations:
        offers = OFFERS.get(operation, (("torch", "torch"),))
        here = [offer for offer in offers if not backends[offer[1]]]
        here.sort(key=lambda offer: offer[1] != preferred)
        variants: dict[str, str] = {}
        for variant, backend in here:
            variants.setdefault(variant, backend)
        fallbacks = {"sdpa", "torch"} | ({"loop"} if operation != "swap" else set())
        found = [
            Choice(operation, variant, backend)
            for variant, backend in variants.items()
            if variant not in fallbacks or len(variants) == 1 or preferred == "torch"
        ]
        chosen += found
    return chosen
