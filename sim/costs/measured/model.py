"""Seconds of a step from tables of measured kernels: a profile, fitted for a model."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sim.costs.measured.profile import read_profile
from sim.costs.measured.reading import (
    beside_factor,
    corrected,
    decode_surface,
    entry_of,
    kv_key_s,
    past_factor,
    prefill_surface,
    read_correction,
    read_states,
    unlike_layers,
    whole_tables,
)
from sim.costs.measured.rest import MeasuredRest
from sim.costs.measured.tables import mean_chunk
from sim.costs.parts import Line, Memo, PartsCost, SteadyDecodes, launched
from sim.costs.pricing import LineTable, lines_and_steps
from sim.costs.rates.widths import ESTIMATE, read_widths, wider
from sim.costs.roofline import RooflineCost
from sim.costs.roofline.sampling import SamplerRule  # noqa: TC001 - see below
from sim.hardware.gpus import GpuSpec  # noqa: TC001 - `sim.config.plug` resolves them
from sim.hardware.interconnects import GATHERING, All2AllBackend
from sim.hardware.models.architecture import ModelArchitecture  # noqa: TC001
from sim.scheduler.batch import EMPTY_SHAPE
from sim.scheduler.generation import (
    GraphRule,
    HostRule,
    KvLayout,
    SwapRule,
    SwapVariant,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from sim.costs.parts import Parts, Rest
    from sim.costs.rates.widths import Width, Widths
    from sim.costs.transfers import Swapping, Transfer
    from sim.scheduler.batch import BatchShape

_OTHER_KERNELS_S: Final = 12e-6
"""Seconds that a layer's norms, rotary embedding, activation and cache write spend on
starting: five of 2.4 us. Those of products and attention are in their measurements."""
_HOST_KEYS: Final = ("step_overhead_s", "request_overhead_s")


GUESSED: Final = 2
"""Region of chunks with a past where no such chunk was measured; 0 is inside what was
measured and 1 beyond."""


class MeasuredCost(PartsCost):
    """Seconds of a step from measured kernels.

    ::

        gemm_s               table over tokens: the products of all layers
        decode_attention_s   table over (decodes, mean context), all layers
        prefill_attention_s  table over (chunks, mean query-key pairs), all layers,
                             at least KV bytes / bandwidth
        allreduce_s          table over tokens, all layers
        head_s               tables over requests: output projection, sampler
        swap_s, copy_s       tables over pieces and blocks; see `sim.costs.transfers`
        host_s               host a step and a request, and a table over tokens of the
                             kernels between; where kernels are launched one by one
                             and that takes longer than running them, what it is longer

    A table that the profile lacks is the datasheet's, as `RooflineCost` has it.

    Bounds: the errors of an operation are the same in every layer, those of different
    operations independent, so that half-widths add as squares. Each operation has the
    width of its own region, inside or beyond what was measured; host time has none, and
    a step that waits for its launches gets no shorter. See `sim.costs.rates.widths`.

    The sum of contexts decides what decodes cost, never the longest one. A chunk with
    a past costs what a fresh one with as many query-key pairs costs, times a factor
    where the profile has such chunks; where it has none it says `extrapolated`, as do
    swaps and copies without a table and attention and products outside the measured
    shapes (head and element-wise kernels only widen the bounds). Where attention of
    mixed batches was measured, a factor says what chunks and decodes do to each other;
    elsewhere their times add up. Times below the physical floor are raised to it when
    the tables are read. Where whole steps were measured, the profile's
    ``step_correction`` multiplies all operations of the GPU; `describe` tells it.

    Parameters
    ----------
    profile
        Path of a kvprofile/1 file that was fitted for this model.
    model, gpu, tensor_parallel_size, block_size, kv_cache_dtype, swap_rule, graph_rule
        Injected from the engine's configuration.
    copied_block_bytes, interconnect
        As `RooflineCost` has them; injected. A table of all-reduces gives way to an
        interconnect of another rate than the GPU's own.
    link_bytes_per_s
        As `RooflineCost` has it; a table of all-reduces gives way to it, too.
    launch_s, enforce_eager, graph_sizes
        As `RooflineCost` has them. Null is the profile's, for all that is no graph, or
        what the datasheet's clock takes, if that is more.
    data_parallel_size, enable_expert_parallel, all2all_backend, network
        As `RooflineCost` has them; heeded of several ranks, see `together`.
    swap_variant, swap_layout, swap_overlap
        As `RooflineCost` has them; null for what the engine does.
    step_overhead_s, request_overhead_s
        Host seconds a step, and a request of the batch; null for what the profile
        says, or else for the roofline's.
    host_rule, schedule_request_s, piece_latency_s, sampler_rule
        As `RooflineCost` has them. A profile's sampler does not filter.

    Raises
    ------
    ConfigError
        If the profile cannot be trusted, is of another GPU, or has no tables of this
        model on so many ranks in this precision.
    """

    has_bounds = True

    def __init__(
        self,
        profile: str,
        *,
        model: ModelArchitecture,
        gpu: GpuSpec,
        tensor_parallel_size: int = 1,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        copied_block_bytes: float | None = None,
        interconnect: str | dict[str, Any] | None = None,
        link_bytes_per_s: float | None = None,
        launch_s: float | None = None,
        enforce_eager: bool = False,
        enable_expert_parallel: bool = False,
        data_parallel_size: int = 1,
        all2all_backend: All2AllBackend = GATHERING,
        network: str | dict[str, Any] | None = None,
        graph_sizes: tuple[int, ...] = (),
        swap_rule: SwapRule = SwapRule(),  # noqa: B008 - frozen
        graph_rule: GraphRule = GraphRule(),  # noqa: B008 - frozen
        swap_variant: SwapVariant | None = None,
        swap_layout: KvLayout | None = None,
        swap_overlap: bool | None = None,
        step_overhead_s: float | None = None,
        request_overhead_s: float | None = None,
        host_rule: HostRule = HostRule(),  # noqa: B008 - frozen
        schedule_request_s: float | None = None,
        piece_latency_s: float | None = None,
        sampler_rule: SamplerRule | None = None,
    ) -> None:
        self.profile = read_profile(Path(profile))
        host = self.profile.fit.get("host") or {}
        overheads: dict[str, Any] = {
            key: value
            for key, given in zip(
                _HOST_KEYS, (step_overhead_s, request_overhead_s), strict=True
            )
            if (value := host.get(key) if given is None else given) is not None
        }
        ranks: dict[str, Any] = {}
        if data_parallel_size > 1:
            ranks = {
                "enable_expert_parallel": enable_expert_parallel,
                "data_parallel_size": data_parallel_size,
                "all2all_backend": all2all_backend,
                "network": network,
            }
        self._rest = RooflineCost(
            model=model,
            gpu=gpu,
            tensor_parallel_size=tensor_parallel_size,
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            copied_block_bytes=copied_block_bytes,
            interconnect=interconnect,
            link_bytes_per_s=link_bytes_per_s,
            launch_s=launch_s,
            enforce_eager=enforce_eager,
            **ranks,
            graph_rule=graph_rule,
            graph_sizes=graph_sizes,
            layer_latency_s=_OTHER_KERNELS_S,
            swap_rule=swap_rule,
            swap_variant=swap_variant,
            swap_layout=swap_layout,
            swap_overlap=swap_overlap,
            host_rule=host_rule,
            schedule_request_s=schedule_request_s,
            piece_latency_s=piece_latency_s,
            sampler_rule=sampler_rule,
            **overheads,
        )
        with whole_tables(model):
            correction = read_correction(self.profile.fit)
            entry = corrected(entry_of(self.profile, self._rest), correction)
            self._read_attention(entry)
            self._other = MeasuredRest(
                self.profile.fit, entry, self._rest, graph_rule, correction
            )
        self._token_parts, self._row_parts = self._other.tokens, self._other.rows
        self._line_tables: Memo[LineTable | None] = Memo()

    def _read_attention(self, entry: Mapping[str, Any]) -> None:
        fit, rest = self.profile.fit, self._rest
        of_decodes, of_chunks = read_states(entry, rest) or (None, None)
        decode = decode_surface(entry["decode"], rest, of_decodes)
        self.decode_table = decode
        prefill = self._prefill = prefill_surface(entry["prefill"], rest)
        self._unlike = unlike_layers(entry["prefill"], rest, of_chunks)
        self._key_s = kv_key_s(rest)
        self._past = past_factor(entry, rest, prefill)
        self._beside = beside_factor(entry, rest, self._past, prefill, decode)
        self._decode_rows, self._contexts = decode.rows, decode.amounts
        self._prefill_rows, self._pairs = prefill.rows, prefill.amounts
        # by region, in the order of their numbers
        self._decode_widths: tuple[Width, ...] = read_widths(fit, "decode_attention")
        fresh: Widths = read_widths(fit, "prefill_attention")
        self._prefill_widths: tuple[Width, ...] = (
            *fresh,
            wider(fresh.beyond, ESTIMATE),
        )

    def together(self, shapes: Sequence[BatchShape]) -> tuple[float, float]:
        """Return seconds of experts and of exchanges for the batches of all ranks.

        Tables are of experts that the GPUs of one rank divide. More GPUs take the share
        of it that they take of the datasheet's; exchanges are the datasheet's.
        """
        return self._other.together(shapes)

    def scheduling(self) -> dict[str, Any]:
        """Return the scheduler's time for a request, and its source."""
        return self._rest.scheduling()

    def host_part_s(self, num_rows: int) -> float:
        """Return how long the host works on a batch of so many requests."""
        rows = self._row_parts.get(num_rows) or self._other.price_rows(num_rows)
        return rows.host_s

    def parts(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_tokens: int,
        prefill_context: int,
        num_pairs: int,
    ) -> Parts:
        all_tokens = num_decodes + num_tokens
        num_rows = num_decodes + num_prefills
        tokens = self._token_parts.get(all_tokens) or self._other.price_tokens(
            all_tokens
        )
        rows = self._row_parts.get(num_rows) or self._other.price_rows(num_rows)
        gemm_s, allreduce_s, kernels_s, alone_s, launching_s, _, _, _ = tokens
        head_s, host_s, _, _ = rows
        if not all_tokens:
            head_s = 0.0
        prefill_s = decode_s = 0.0
        chunks = decodes = 0  # regions
        if num_decodes:
            row = self._decode_rows.get(num_decodes) or self.decode_table.row(
                num_decodes
            )
            value, slope, start, beyond = row[
                bisect_right(self._contexts, decode_context // num_decodes)
            ]
            decode_s = value + slope * (decode_context - start)
            decodes = 1 if beyond else 0
        if num_prefills and all_tokens:
            prefill_s, factor, chunks, is_beyond = self._chunks(
                num_decodes,
                decode_context,
                num_prefills,
                num_tokens,
                prefill_context,
                num_pairs,
            )
            decode_s *= factor
            decodes = decodes or is_beyond
        host_s += kernels_s
        if not num_prefills:
            launching_s = alone_s
        if launching_s:
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            if launching_s > gpu_s:
                host_s += launching_s - gpu_s
        told = tokens, rows, chunks, decodes, launching_s
        return gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s, told

    def _chunks(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_chunks: int,
        num_tokens: int,
        context: int,
        pairs: int,
    ) -> tuple[float, float, int, int]:
        """Return seconds of chunks, the factor on decodes beside, and their regions."""
        row = self._prefill_rows.get(num_chunks) or self._prefill.row(num_chunks)
        value, slope, start, beyond = row[
            bisect_right(self._pairs, pairs // num_chunks)
        ]
        prefill_s = value + slope * (pairs - start)
        region = 1 if beyond else 0
        query = None
        if context != num_tokens:
            region = GUESSED
            if self._past is not None:
                query, past = mean_chunk(num_chunks, context, pairs, num_chunks)
                factor, beyond = self._past.at(query, past)
                prefill_s *= factor
                region = 1 if beyond else 0
        if self._unlike is not None:
            more_s, beyond = self._unlike.at(num_chunks, num_tokens, context, pairs)
            prefill_s += more_s
            region = region or (1 if beyond else 0)
        read_s = self._key_s * context
        if read_s > prefill_s:  # noqa: PLR1730 - a call of `max` takes longer
            prefill_s = read_s
        if not num_decodes or self._beside is None:
            return prefill_s, 1.0, region, 0
        if query is None or num_chunks != 1:
            query, past = mean_chunk(num_chunks, context, pairs, 1)
        factor, beyond = self._beside.at(query, past, num_decodes, decode_context)
        if beyond:
            return prefill_s * factor, factor, region or 1, 1
        return prefill_s * factor, factor, region, 0

    def rest(self, shape: BatchShape, parts: Parts) -> Rest:
        gemm_s, prefill_s, decode_s, head_s, allreduce_s, _, told = parts
        tokens, rows, chunks, decodes, launching_s = told
        _, _, kernels_s, _, _, outside, down, up = tokens
        if head_s:
            down += rows.down
            up += rows.up
        more_down = more_up = 0.0
        if prefill_s:
            share_down, share_up = self._prefill_widths[chunks]
            more_down = (prefill_s * share_down) * (prefill_s * share_down)
            more_up = (prefill_s * share_up) * (prefill_s * share_up)
        if decode_s:
            share_down, share_up = self._decode_widths[decodes]
            more_down += (decode_s * share_down) * (decode_s * share_down)
            more_up += (decode_s * share_up) * (decode_s * share_up)
        down += more_down
        up += more_up
        swap_s = copy_s = 0.0
        flag = bool(outside or chunks or decodes)
        num_loaded, num_stored, num_copied = blocks = shape[6:]
        gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
        if launching_s:
            down, up = launched(down, up, gpu_s - launching_s)
        if num_loaded or num_stored or num_copied:
            swap_s, copy_s, beyond, more_down, more_up = self._other.moves(
                blocks, gpu_s
            )
            down += more_down
            up += more_up
            flag = flag or beyond
        return swap_s, copy_s, flag, down, up

    def steady_decodes(self, num_decodes: int) -> SteadyDecodes:
        tokens = self._other.price_tokens(num_decodes)
        rows = self._other.price_rows(num_decodes)
        segments = self.decode_table.row(num_decodes)
        firsts = 0, *(start for _, _, start, _ in segments[1:])
        lines = [
            Line(first, value_s, slope_s, start, beyond, *self._decode_widths[beyond])
            for first, (value_s, slope_s, start, beyond) in zip(
                firsts, segments, strict=True
            )
        ]
        return SteadyDecodes(
            tokens.gemm_s,
            rows.head_s,
            tokens.allreduce_s,
            rows.host_s + tokens.kernels_s,
            lines,
            tokens.extrapolated,
            tokens.down + rows.down,
            tokens.up + rows.up,
            tokens.kernels_s,
            tokens.launch_decodes_s,
        )

    def columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        return lines_and_steps(self, shapes, self._line_tables)

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer:
        return self._other.transfer(variant, load=load, layout=layout)

    def swapping(self) -> Swapping:
        """Return the times of moving blocks, as measured where they were."""
        return self._other.swaps

    def describe(self) -> dict[str, Any]:
        rest = self._rest.describe()
        empty = self._rest.step(EMPTY_SHAPE)
        kept = {"schedule_request_s", "piece_latency_s", "swap_efficiency"}
        kept |= {*_HOST_KEYS}
        told = {k: each for k, each in rest["parameters"].items() if k in kept}
        return rest | {
            "kind": "measured",
            "profile": self.profile.id,
            "source": self.profile.provenance.get("source"),
            "bounds": True,
            "intervals_percent": self.profile.fit.get("intervals") or {},
            "empty_step_s": empty.total_s,
            "parameters": told,
            "step_correction": self.profile.fit.get("step_correction"),
            "rest": self._other.describe(),
        }
