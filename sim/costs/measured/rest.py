"""Parts of a measured step besides attention.

Each of these is a table of the profile where it has one, and the datasheet's else:
products, collectives and element-wise kernels by tokens, output projection and sampler
by requests, swaps, copies, and the time that launching kernels one by one takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sim.costs.experts.exchange import rank_tokens
from sim.costs.measured.reading import token_curves
from sim.costs.measured.rest_tables import (
    MeasuredTransfer,
    Part,
    read_copies,
    read_curve,
    read_experts,
    read_factor,
    read_seconds,
    read_transfer,
)
from sim.costs.parts import Memo
from sim.costs.rates.widths import ESTIMATE, HEAD, KERNELS, Widths, read_widths
from sim.costs.roofline.graphs import padded, pieces_s
from sim.costs.roofline.launches import (
    LAUNCH_S,
    launches_of_pieces,
    num_launches,
    step_launches,
)
from sim.costs.transfers import ByPageSize, Swapping
from sim.hardware.interconnects import GATHERING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.costs.experts.routed import RoutedExperts
    from sim.costs.parts import Rest
    from sim.costs.roofline import RooflineCost
    from sim.costs.transfers import Pages, Transfer
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.generation import GraphRule, KvLayout, SwapVariant


_ESTIMATES: Final = Widths(ESTIMATE, ESTIMATE)


class TokenParts(NamedTuple):
    """Seconds that so many tokens take."""

    gemm_s: float = 0.0
    allreduce_s: float = 0.0
    kernels_s: float = 0.0
    """Element-wise kernels."""
    launch_decodes_s: float = 0.0
    """To launch all kernels of a step of decodes; see `MeasuredRest.launching_s`."""
    launch_prefills_s: float = 0.0
    """The same with a prompt among them."""
    extrapolated: bool = False
    """Whether the products or the collectives were."""
    down: float = 0.0
    up: float = 0.0
    """Squares of the width of all."""


class RowParts(NamedTuple):
    """Seconds that so many requests take."""

    head_s: float
    host_s: float
    down: float
    up: float
    """Squares of the head's width."""


class MeasuredRest:
    """The rest of a step, from a profile's fit and a roofline."""

    def __init__(
        self,
        fit: Mapping[str, Any],
        entry: Mapping[str, Any],
        rest: RooflineCost,
        graphs: GraphRule,
        correction: float = 1.0,
    ) -> None:
        self.tokens: Memo[TokenParts] = Memo()
        self.rows: Memo[RowParts] = Memo()
        self._rest = rest
        self._correction = correction
        self._graphs = graphs
        gemm, allreduce = token_curves(entry["tokens"], rest)
        self._allreduce = allreduce if rest.has_own_link else None
        self._experts = read_experts(entry, rest)
        self._of_one_rank = self._experts_of_one_rank()
        # without a table of its experts a model's products are the datasheet's
        whole = self._experts is not None or not rest.model.num_experts
        self._gemm = gemm if whole else None
        self._gemm_widths = (
            _ESTIMATES if self._gemm is None else read_widths(fit, "gemm")
        )
        self._allreduce_widths = (
            _ESTIMATES if self._allreduce is None else read_widths(fit, "allreduce")
        )
        self._transfers: Mapping[str, Any] = fit.get("transfers") or {}
        self._kernels = read_curve(entry, "elementwise", "tokens")
        self._head = read_curve(entry, "head", "rows")
        self._sampler = read_curve(entry, "sampler", "rows")
        self._copy = read_copies(fit.get("copy"), rest.copied_bytes)
        self._copies: Memo[Part] = Memo()
        self.swaps = self._swapping(fit.get("interference") or {})
        launch_s = read_seconds(fit.get("launch") or {}, "eager_s", "launch")
        if rest.launch_s is not None:
            launch_s = rest.launch_s
        elif rest.enforce_eager or rest.is_launched_by_default:
            launch_s = max(launch_s, LAUNCH_S)  # a bare launch is timed
        self._launch_s = launch_s
        launches = num_launches(rest.model, rest.tensor_parallel_size)
        self.launches_s = launch_s * launches

    def _experts_of_one_rank(self) -> RoutedExperts | None:
        """Return the datasheet's experts as tables have them; None for one rank."""
        if self._rest.data_parallel_size == 1:
            return None
        alone: dict[str, Any] = {"data_parallel_size": 1, "network": None}
        alone |= {"enable_expert_parallel": False, "all2all_backend": GATHERING}
        return replace(self._rest, **alone).experts

    # -- counts, each priced once -------------------------------------------------

    def price_tokens(self, num_tokens: int) -> TokenParts:
        """Return the parts that depend on the number of tokens; nothing for none."""
        if not num_tokens:
            return self.tokens.keep(0, TokenParts())
        gemm_s, allreduce_s, _ = (
            self._correction * part for part in self._rest.token_parts(num_tokens)
        )
        kernels_s, _, kernels_width = self.kernels(num_tokens)
        outside, apart = True, False
        computed = padded(self._rest.graph_sizes, num_tokens)
        if self._gemm is not None:
            gemm_s, outside = self._gemm.at(computed)
        if self._allreduce is not None:
            allreduce_s, apart = self._allreduce.at(computed)
        experts_s, few, down, up = self.experts(num_tokens)
        for width, seconds in (
            (self._gemm_widths[outside], gemm_s),
            (self._allreduce_widths[apart], allreduce_s),
            (kernels_width, kernels_s),
        ):
            more_down, more_up = width.squares(seconds)
            down += more_down
            up += more_up
        parts = TokenParts(
            gemm_s + experts_s,
            allreduce_s,
            kernels_s,
            self.launching_s(num_tokens, 0),
            self.launching_s(num_tokens, 1),
            outside or few or apart or self._rest.data_parallel_size > 1,
            down,
            up,
        )
        return self.tokens.keep(num_tokens, parts)

    def price_rows(self, num_rows: int) -> RowParts:
        _, host_s = self._rest.row_parts(num_rows)
        head_s = down = up = 0.0
        for seconds, _, width in self.head(num_rows):
            more_down, more_up = width.squares(seconds)
            head_s += seconds
            down += more_down
            up += more_up
        return self.rows.keep(num_rows, RowParts(head_s, host_s, down, up))

    # -- kernels ----------------------------------------------------------------

    def experts(self, num_tokens: int) -> tuple[float, bool, float, float]:
        """Return seconds of measured experts, their flag and squares of their width.

        That of the table, and what the tokens' choice of experts adds.
        """
        if self._experts is None or self._rest.data_parallel_size > 1:
            return 0.0, False, 0.0, 0.0
        experts_s, beyond, width = self._experts.at(num_tokens)
        down, up = width.squares(experts_s)
        spread_s = self._rest.expert_spread_s(num_tokens)
        square = spread_s * spread_s
        return experts_s, beyond, down + square, up + square

    def together(self, shapes: Sequence[BatchShape]) -> tuple[float, float]:
        """Return seconds of experts and of exchanges for the batches of all ranks."""
        experts_s, exchange_s = self._rest.together(shapes)
        num_tokens, _ = rank_tokens(shapes)
        experts_s *= self._correction
        if self._experts is not None and self._of_one_rank is not None:
            own_s = self._correction * self._of_one_rank.seconds(num_tokens)
            experts_s *= self._experts.at(num_tokens)[0] / own_s
        return experts_s, exchange_s * self._correction

    def kernels(self, num_tokens: int) -> Part:
        """Return seconds of element-wise kernels, their starts included."""
        if self._kernels is not None:
            part = self._kernels.at(padded(self._rest.graph_sizes, num_tokens))
            cut_s = self._correction * pieces_s(self._rest, num_tokens)
            return part._replace(seconds=part.seconds + cut_s)
        kernels_s = self._correction * self._rest.token_parts(num_tokens)[2]
        return Part(kernels_s, False, KERNELS)

    def head(self, num_rows: int) -> tuple[Part, ...]:
        """Return seconds of the output projection and of the sampler.

        Of the datasheet both are one part: they were judged together.
        """
        projection_s, sampler_s = (
            self._correction * part for part in self._rest.head_parts(num_rows)
        )
        if self._head is None and self._sampler is None:
            return (Part(projection_s + sampler_s, False, HEAD),)
        projection = Part(projection_s, False, HEAD)
        sampler = Part(sampler_s, False, HEAD)
        if self._head is not None and num_rows:
            projection = self._head.at(num_rows)
        if self._sampler is not None and num_rows:
            sampler = self._sampler.at(num_rows)  # greedy
            filter_s = self._correction * self._rest.filter_s(num_rows)
            sampler = sampler._replace(seconds=sampler.seconds + filter_s)
        return projection, sampler

    def launching_s(self, num_tokens: int, num_prefills: int) -> float:
        """Return seconds that the host launches the kernels of a step, if it does.

        Zero where the profile did not time launches, and where a step is one graph. A
        step never takes less: the GPU cannot run what was not launched.
        """
        rest = self._rest
        return self._launch_s * step_launches(
            rest.model,
            rest.tensor_parallel_size,
            self._graphs,
            num_tokens,
            num_prefills,
        )

    # -- blocks -----------------------------------------------------------------

    def copies(self, num_blocks: int) -> Part:
        """Return seconds of copies on the GPU, for at least one block."""
        return self._copies.get(num_blocks) or self._copies.keep(
            num_blocks, self._price_copies(num_blocks)
        )

    def _price_copies(self, num_blocks: int) -> Part:
        if self._copy is None:
            return Part(self._rest.copy_part_s(num_blocks), True, ESTIMATE)
        return self._copy.at(num_blocks)

    def transfer(
        self, variant: SwapVariant, *, load: bool, layout: KvLayout | None = None
    ) -> Transfer:
        pages = self._rest.block_pages(layout)
        own = self._timed(variant, pages, load=load)
        if own is None:
            return self._rest.transfer(variant, load=load, layout=layout)
        small = self._timed("kernel", pages, load=load)
        if variant != "batch" or not load or small is None:
            return own
        return ByPageSize(pages, small, own)

    def _timed(
        self, variant: SwapVariant, pages: Pages, *, load: bool
    ) -> MeasuredTransfer | None:
        direction = "h2d" if load else "d2h"
        table = (self._transfers.get(variant) or {}).get(direction)
        if table is None:
            return None
        name = f"transfers.{variant}.{direction}"
        return read_transfer(table, pages, name, is_loop=variant == "loop")

    def _swapping(self, interference: Mapping[str, Any]) -> Swapping:
        plain = self._rest.swapping()
        variant = self._rest.swapping_rule().variant
        factors = {
            key: read_factor(interference, key, getattr(plain, key))
            for key in ("step_factor", "transfer_factor")
        }
        return Swapping(
            self.transfer(variant, load=True),
            self.transfer(variant, load=False),
            plain.overlap,
            **factors,
        )

    def moves(self, num_blocks: Sequence[int], gpu_s: float) -> Rest:
        """Return the seconds that moving blocks adds to a step."""
        num_loaded, num_stored, num_copied = num_blocks
        swap_s = copy_s = down = up = 0.0
        outside = False
        if num_loaded or num_stored:
            moved = self.swaps.moved(num_loaded, num_stored)
            swap_s = self.swaps.shown_s(moved, gpu_s)
            outside = moved.extrapolated
            down, up = moved.width.squares(swap_s)
        if num_copied:
            copy_s, beyond, width = self.copies(num_copied)
            outside = outside or beyond
            copy_down, copy_up = width.squares(copy_s)
            down += copy_down
            up += copy_up
        return swap_s, copy_s, outside, down, up

    def describe(self) -> dict[str, Any]:
        found = {
            "elementwise": self._kernels,
            "experts": self._experts,
            "head": self._head,
            "sampler": self._sampler,
            "copy": self._copy,
            "launches": self.launches_s or None,
        }
        return {
            "measured": sorted(key for key, part in found.items() if part is not None),
            "swaps_measured": sorted(
                f"{variant}.{direction}"
                for variant, ways in self._transfers.items()
                for direction in ways or ()
            ),
            "launches_s": self.launches_s or None,
            "piece_launches_s": self._launch_s
            * launches_of_pieces(self._rest.model, self._graphs)
            or None,
            "graphs_up_to_tokens": self._graphs.max_tokens,
            "swap_step_factor": self.swaps.step_factor,
            "swap_transfer_factor": self.swaps.transfer_factor,
        }
