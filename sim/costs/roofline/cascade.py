"""Cascade attention: a prefix that all requests of a step share is read once."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final

from sim.costs.parts import Count, Line, Seconds, larger, where
from sim.costs.roofline.attention_kernels import is_hopper
from sim.costs.roofline.cascade_rule import CascadeRule
from sim.costs.roofline.launches import LAUNCH_S, LaunchedRooflineCost, step_launches
from sim.costs.sources import cascade_told
from sim.hardware.models.architecture import dtype_bytes

if TYPE_CHECKING:
    from sim.costs.roofline.model import RooflineCost
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture

_MORE_LAUNCHES: Final = 2
"""Kernels of a layer beyond those of a step that reads each prefix by itself."""
_MERGED: Final = 3
"""Outputs that merging reads and writes."""


class CascadeCost(LaunchedRooflineCost):
    """`RooflineCost` of steps that read a prefix of so many tokens once for all.

    ::

        prefix   all queries of the step are one chunk over it
        suffix   as without, of a context that is shorter by the prefix
        merge    both outputs are read, and one is written

    Kernels of attention stand between graphs in pieces, never in one of a whole step,
    and the host launches two more a layer.

    Attributes
    ----------
    num_once
        Tokens of the prefix.
    """

    __slots__ = ("_fixed_s", "_merged_token_s", "num_once")
    num_once: int
    _fixed_s: float
    _merged_token_s: float

    @classmethod
    def reading(cls, cost: RooflineCost, num_tokens: int) -> CascadeCost:
        """Return the price of steps that read so many tokens once."""
        made = cls(**{f.name: getattr(cost, f.name) for f in fields(cost) if f.init})
        model, tp = made.model, made.tensor_parallel_size
        latency = cascade_told(made.cascade_layer_latency_s)
        made.num_once = num_tokens
        made._fixed_s = model.num_attention_layers * float(latency["value"])
        elements = model.num_attention_heads // tp * model.head_dim * _MERGED
        traffic = model.num_attention_layers * elements * dtype_bytes(model.dtype)
        made._merged_token_s = traffic / made._bandwidth(
            made.elementwise_bandwidth_efficiency
        )
        return made

    def _own_s(self, num_decodes: Count, num_prefills: Count) -> Seconds:
        """Return seconds of decodes beside their own keys: prefix, merge, sequences.

        Beside chunks the prefix is theirs, and decodes only multiply it.
        """
        num_pairs = num_decodes * self.num_once
        tile_pairs = self.prefill_tile_tokens * self.num_once
        read_s = self._kv_token_s * self.num_once
        alone_s = larger(self._pair_s * (num_pairs + tile_pairs), read_s)
        prefix_s = where(
            num_prefills, self._pair_s * num_pairs, alone_s + self._fixed_s
        )
        return prefix_s + self._merged_token_s * num_decodes

    def decode_attention_s(
        self, num_decodes: Count, num_context_tokens: Count, num_prefills: Count
    ) -> Seconds:
        tokens = num_context_tokens - num_decodes * self.num_once
        own_s = self._own_s(num_decodes, num_prefills)
        read_s = self._kv_token_s * tokens + (
            self._decode_sequence_s * num_decodes + own_s
        )
        if self._mixed_decode_key_s <= self._kv_token_s:
            return read_s
        mixed_s, alone_s = self._mixed_decode_key_s, self._decode_key_compute_s
        key_s = where(num_prefills, mixed_s, alone_s)
        return larger(read_s, key_s * tokens + own_s)

    def decode_line(self, num_decodes: int) -> Line:
        own_s = self._own_s(num_decodes, 0)
        value_s = self._decode_sequence_s * num_decodes + own_s
        return Line(0, value_s, self._kv_token_s, num_decodes * self.num_once)

    def prefill_attention_s(
        self,
        num_prefills: Count,
        num_tokens: Count,
        num_context_tokens: Count,
        num_pairs: Count,
    ) -> Seconds:
        again = larger(num_prefills - 1, 0) * self.num_once
        attention_s = LaunchedRooflineCost.prefill_attention_s(
            self, num_prefills, num_tokens, num_context_tokens - again, num_pairs
        )
        return attention_s + (self._fixed_s + self._merged_token_s * num_tokens)

    def launching_s(self, num_tokens: int, num_prefills: int) -> float:
        if not num_tokens:
            return 0.0
        one_s = LAUNCH_S if self.launch_s is None else self.launch_s
        model = self.model
        # a chunk has the same pieces, and no whole graph
        num = step_launches(
            model,
            self.tensor_parallel_size,
            self.graph_rule,
            num_tokens,
            max(num_prefills, 1),
        )
        return one_s * (num + _MORE_LAUNCHES * model.num_attention_layers)


def rule_of(
    model: ModelArchitecture,
    gpu: GpuSpec,
    tensor_parallel_size: int,
    kv_cache_dtype: str,
    *,
    replays_decodes: bool = False,
) -> CascadeRule | None:
    """Return the rule of a model on a GPU, None where attention never does so.

    FlashAttention does, on GPUs whose `num_sms` is told, and in 8 bits on Hopper
    alone. Windows, chunks, states and latents (MLA) are read request by request; of
    models with several kinds of layers, those of full attention were not (from 0.14
    on beside states, too), which is left out here.

    Source: vLLM 0.17.1, ``platforms/cuda.py`` (`_get_backend_priorities`),
    ``v1/attention/backends/flashinfer.py`` (`use_cascade_attention` is False, from
    0.11.0 on), ``v1/core/single_type_kv_cache_manager.py``.
    """
    plain = model.num_attention_layers - model.num_sliding_layers
    if (
        gpu.num_sms is None
        or plain != model.num_attention_layers
        or model.num_state_layers
        or model.kv_lora_rank
        or (kv_cache_dtype.startswith("fp8") and not is_hopper(gpu))
    ):
        return None
    tp = tensor_parallel_size
    heads = model.num_attention_heads // tp, model.kv_heads_per_rank(tp)
    return CascadeRule(*heads, gpu.num_sms, CascadeCost.reading, replays_decodes)
