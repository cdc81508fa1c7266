"""The user's parameters of the roofline: efficiencies and overheads, with sources."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from sim.costs import sources
from sim.costs.checks import (
    above_zero,
    at_least_zero,
    check_choice,
    check_factor,
    correlation,
    kv_itemsize_bytes,
    share,
)
from sim.costs.experts.exchange import Exchange, Nodes, token_bytes
from sim.costs.experts.kernels import EXPERT_KERNELS, START_INTERVAL_S, reached_by_key
from sim.costs.experts.routed import CORRELATION, CORRELATION_INTERVAL
from sim.costs.rates.collectives import reaching
from sim.costs.rates.efficiencies import (
    CHOICES,
    Choice,
    Products,
    efficiencies_of,
    efficiencies_told,
)
from sim.costs.roofline.attention_kernels import FA2_DECODE_TILE_TOKENS, packs_heads
from sim.costs.roofline.cascade_rule import CascadeRule  # noqa: TC001 - see above
from sim.costs.roofline.sampling import SamplerRule  # noqa: TC001 - see above
from sim.costs.sources import factor, parameter
from sim.costs.transfers import LAYOUTS, VARIANTS
from sim.errors import ConfigError
from sim.hardware.gpus import GpuSpec  # noqa: TC001 - `sim.config.plug` resolves the annotations
from sim.hardware.interconnects import (
    DEFAULT_NETWORK,
    GATHERING,
    All2AllBackend,
    Interconnect,
    described,
    link_of,
    load_interconnect,
)
from sim.hardware.models.architecture import ModelArchitecture  # noqa: TC001
from sim.hardware.models.weights import ExpertRanks
from sim.scheduler.generation import (
    GraphRule,
    HostRule,
    KvLayout,
    SwapRule,
    SwapVariant,
)

_AIC = "aiconfigurator tables of a100, h100 and h200"
_RTX = "LLMServingSim tables of RTX PRO 6000 under vLLM 0.19.0"
_BATCH = "vLLM pull request 38460"
_SMALL_PAGES = "vLLM pull request 42212"
_CHOICE: Final = {"unit": "choice", "source": "vLLM by generation; null: the engine's"}
Link = str | dict[str, Any]
"""Name or file of an interconnect, or its fields."""
ATTENTION_EFFICIENCY: Final = 0.6
"""Share of peak that causal attention of long chunks reaches; see below."""


@dataclass(slots=True, kw_only=True, eq=False)
class RooflineParameters:
    """Parameters of `RooflineCost`, checked.

    Parameters
    ----------
    model, gpu, tensor_parallel_size, block_size, kv_cache_dtype
        Injected from the engine's configuration. A block holds `block_size` tokens.
    copied_block_bytes
        What copying a block on the GPU reads, and writes; injected where blocks are
        those of a pool of several kinds. None: keys and values of `block_size` tokens.
    efficiencies
        Where the next five come from that are not given: of the chip's own kernel
        tables, where they were published (``chip``), or of all GPUs alike
        (``common``); `sim.costs.rates.efficiencies` has both.
    gemm_compute_efficiency, gemm_bandwidth_efficiency
        Shares of peak FLOP/s and of memory bandwidth that dense GEMMs reach.
    fp8_gemm_compute_efficiency
        Share of the FP8 peak, for checkpoints with FP8 weights and activations.
    moe_bandwidth_efficiency, moe_compute_efficiency
        Shares of bandwidth and of peak that kernels of routed experts reach.
    moe_layer_latency_s
        Seconds a layer of them takes to start and drain its kernels, beyond what
        `layer_latency_s` has of a dense MLP.
    moe_routing_correlation
        How alike tokens of different requests choose experts: 0 for a free choice; see
        `sim.costs.experts.routed.touched_alike`.
    decode_bandwidth_efficiency, fp8_decode_bandwidth_efficiency
        Shares of bandwidth at which decodes read the KV cache, in the model's
        precision and in FP8.
    decode_sequence_head_s
        Seconds a (sequence x KV head) on top of reading its bytes.
    prefill_attention_efficiency
        Share of peak that causal attention of long chunks reaches.
    prefill_tile_tokens
        Query rows that a prefill chunk wastes on tiles and unused SMs, each against
        the chunk's whole context.
    mixed_decode_tile_tokens
        Query rows spent on a decode in a batch with prefill chunks; 0 switches that
        off, None asks the GPU: 0 for Hopper and Blackwell data-centre parts, else 80.
    elementwise_bandwidth_efficiency
        Share of bandwidth of norms, rotary embedding, activation and KV write.
    sampler_bytes_per_logit
        Memory traffic of the sampler a logit.
    interconnect, network
        Links between GPUs of a node and between nodes: names, files or mappings
        (`load_interconnect`); injected, as the next three. Collectives cost what their
        size and the first say (`sim.costs.rates.collectives`); None takes the link of
        the GPU's datasheet (`link_of`). None for the second is `DEFAULT_NETWORK`.
    link_bytes_per_s
        What collectives of long messages reach over a node's link, one way; replaces
        the link's rate. Fitted by ``kvsim validate --fit links``.
    graph_sizes
        Tokens to which products, collectives and element-wise kernels of a step are
        filled up, as it runs in a CUDA graph; injected. None: they are not.
    launch_s
        Seconds of the host to launch a kernel: of all where `enforce_eager` (injected)
        has them launched one by one, else of those that `graph_rule` (injected) leaves
        to it. None for `LAUNCH_S` (`sim.costs.roofline.launches`) in the first case and
        where the release replays graphs in pieces; elsewhere nothing is launched. 0 for
        nothing.
    enable_expert_parallel
        Whether ranks divide the experts rather than each of them.
    data_parallel_size
        Ranks with an attention of their own, which divide the experts between them.
    all2all_backend
        How tokens come to the experts of other ranks; see `sim.costs.experts.exchange`.
    swap_rule
        How the engine swaps; injected. The next three override it, None leaves it.
    swap_variant, swap_layout, swap_overlap
        How blocks move, in which pieces, and whether beside the step; see
        `sim.costs.transfers`.
    swap_efficiency, swap_kernel_efficiency
        Shares of the host link that copies reach, and that the copy kernel does.
    swap_fixed_s
        Seconds to start a transfer, once a direction in a step that swaps.
    swap_call_s
        Host seconds of a copy, with `loop`.
    swap_descriptor_s, swap_dma_s
        Host seconds, and least seconds of the copy engine, a piece with `batch`.
    swap_step_factor, swap_transfer_factor
        How many times longer a step takes beside a transfer, and the reverse.
    copy_efficiency, copy_fixed_s
        Share of bandwidth of copies on the GPU, and seconds to start them.
    layer_latency_s
        Seconds a layer spends on starting and draining its kernels.
    qk_norm_latency_s
        Seconds more of a layer whose queries and keys pass a norm.
    step_overhead_s, request_overhead_s
        Host seconds a step, and a request of the batch.
    host_rule
        What the scheduler takes of the host, and whether that is hidden; injected.
    piece_latency_s
        Seconds more that the GPU spends on a layer whose graph is cut at its attention,
        in releases that cut decodes, too (`GraphRule.cuts`).
    schedule_request_s
        Seconds a request, in its place. Added to steps that do not hide it.
    cascade_rule
        When a prefix that all requests share is read once, None for never; injected.
    cascade_layer_latency_s
        Seconds more that a layer of such a step spends on starting its kernels.
    sampler_rule
        How logits are filtered as requests ask for by default; injected. None: not.
    """

    model: ModelArchitecture
    gpu: GpuSpec
    tensor_parallel_size: int = 1
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    copied_block_bytes: float | None = None
    swap_rule: SwapRule = SwapRule()  # noqa: RUF009 - frozen
    interconnect: Link | None = None
    network: Link | None = None
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    all2all_backend: All2AllBackend = GATHERING

    enforce_eager: bool = False
    graph_rule: GraphRule = GraphRule()  # noqa: RUF009 - frozen
    graph_sizes: tuple[int, ...] = ()
    host_rule: HostRule = HostRule()  # noqa: RUF009 - frozen
    cascade_rule: CascadeRule | None = None
    sampler_rule: SamplerRule | None = None

    efficiencies: Choice = field(default="chip", metadata=_CHOICE)
    link_bytes_per_s: float | None = field(default=None, metadata=_CHOICE)
    launch_s: float | None = field(default=None, metadata=_CHOICE)
    schedule_request_s: float | None = field(default=None, metadata=_CHOICE)
    cascade_layer_latency_s: float | None = field(default=None, metadata=_CHOICE)
    piece_latency_s: float | None = field(default=None, metadata=_CHOICE)
    swap_variant: SwapVariant | None = field(default=None, metadata=_CHOICE)
    swap_layout: KvLayout | None = field(default=None, metadata=_CHOICE)
    swap_overlap: bool | None = field(default=None, metadata=_CHOICE)

    gemm_compute_efficiency: float | None = parameter(
        None, "share", f"GEMMs of {_AIC} (0.83), of Vidur a100 and h100 (0.73), {_RTX}"
    )
    gemm_bandwidth_efficiency: float | None = parameter(
        None, "share", f"GEMMs with weights above 40 MB, {_AIC}"
    )
    fp8_gemm_compute_efficiency: float | None = parameter(
        None, "share", "FP8 GEMMs, aiconfigurator tables of h100 and h200"
    )
    moe_bandwidth_efficiency: float | None = parameter(None, "share", EXPERT_KERNELS)
    moe_compute_efficiency: float | None = parameter(None, "share", EXPERT_KERNELS)
    moe_layer_latency_s: float | None = parameter(
        None, "s/layer", EXPERT_KERNELS, START_INTERVAL_S
    )
    moe_routing_correlation: float = parameter(
        0.0, "correlation", CORRELATION, CORRELATION_INTERVAL
    )
    decode_bandwidth_efficiency: float | None = parameter(
        None, "share", f"decode attention beyond L2, {_AIC}; {_RTX}"
    )
    fp8_decode_bandwidth_efficiency: float | None = parameter(
        None, "share", "decode attention, fp8 KV, aiconfigurator, h100 and h200"
    )
    decode_sequence_head_s: float = parameter(
        15e-9, "s/(sequence*KV head)", f"decode attention, {_AIC}"
    )
    prefill_attention_efficiency: float = parameter(
        ATTENTION_EFFICIENCY, "share", f"prefill attention, {_AIC}; {_RTX}"
    )
    prefill_tile_tokens: float = parameter(
        270.0, "tokens/chunk", f"prefill attention, {_AIC}; {_RTX}"
    )
    mixed_decode_tile_tokens: int | None = field(
        default=None,
        metadata={"unit": "tokens/decode", "source": f"mixed batches, {_RTX}"},
    )
    elementwise_bandwidth_efficiency: float = parameter(
        0.8,
        "share",
        "between Vidur h100 (slower, not fused) and dense.csv, "
        f"{_RTX} (faster, in 128 MB of L2)",
    )
    sampler_bytes_per_logit: float = parameter(
        6.0, "bytes", f"per_sequence.csv, {_RTX}"
    )
    swap_efficiency: float = parameter(
        0.8, "share", f"51 of 64 GB/s in long batches of 64 KiB, H100, {_SMALL_PAGES}"
    )
    swap_kernel_efficiency: float = parameter(
        0.45,
        "share",
        "12.5 of 32 GB/s on A100 (vLLM pull request 11531), between 27 and 40 of 64 "
        f"on H100 ({_SMALL_PAGES})",
    )
    swap_fixed_s: float = parameter(
        20e-6, "s/transfer", "estimate: a call, an event and the first copy"
    )
    swap_call_s: float = parameter(
        4e-6, "s/copy", f"4,096 and 10,240 copies of 32 KiB one by one, H100, {_BATCH}"
    )
    swap_descriptor_s: float = parameter(
        0.5e-6, "s/piece", f"pages of 8, 28 and 32 KiB, H100, {_BATCH}; {_SMALL_PAGES}"
    )
    swap_dma_s: float = parameter(
        0.15e-6, "s/piece", "estimate: 8 KiB at 12 to 15 GB/s leave no more"
    )
    swap_step_factor: float = factor(
        1.02, "estimate: a transfer takes 1 to 2 % of the memory's bandwidth"
    )
    swap_transfer_factor: float = factor(1.0, "estimate")
    copy_efficiency: float = parameter(0.8, "share", "estimate: as element-wise")
    copy_fixed_s: float = parameter(
        10e-6, "s/step", "estimate: the pairs to the GPU and one launch"
    )
    layer_latency_s: float = parameter(
        40e-6,
        "s/layer",
        f"intercepts: 4 GEMMs of 3.5 us, attention 14 us, 5 others of 2.4 us; {_AIC}",
    )
    qk_norm_latency_s: float = parameter(
        2e-6, "s/layer", sources.QK_NORM, sources.QK_NORM_INTERVAL_S
    )
    step_overhead_s: float = parameter(
        1.5e-3,
        "s/step",
        "between what serving runs ask for: 1 ms (vLLM 0.19.0, RTX PRO 6000), 2 ms "
        "(vLLM 0.12.0, 4 x H100); at least 0.46 ms (vLLM pull request 25444, an H100)",
        (0.46e-3, 2e-3),
    )
    request_overhead_s: float = parameter(
        5e-6,
        "s/request",
        "estimate: sampling metadata and detokenising",
        (0.0, 2e-5),
    )

    def check(self) -> None:
        for one in fields(self):
            self._check_number(one.name, one.metadata.get("unit", "choice"))
        if self.efficiencies not in CHOICES:
            raise ConfigError(
                f"efficiencies must be one of {', '.join(CHOICES)}; "
                f"got {self.efficiencies!r}"
            )
        if self.step_overhead_s == 0.0:
            raise ConfigError(
                "step_overhead_s must be > 0: an empty step costs host time; "
                "got 0: give 1e-6 or more"
            )
        check_choice("swap_variant", self.swap_variant, (*VARIANTS, None))
        check_choice("swap_layout", self.swap_layout, (*LAYOUTS, None))
        tp, heads = self.tensor_parallel_size, self.model.num_attention_heads
        if tp < 1 or heads % tp:
            raise ConfigError(
                f"tensor_parallel_size must divide the {heads} attention heads of "
                f"{self.model.name}; got {tp}: use a divisor"
            )
        if self.link_bytes_per_s is not None:
            above_zero("link_bytes_per_s", self.link_bytes_per_s)
        for key in (
            "launch_s",
            "schedule_request_s",
            "cascade_layer_latency_s",
            "piece_latency_s",
        ):
            if (value := getattr(self, key)) is not None:
                at_least_zero(key, value)
        if self.interconnect is not None:
            link = load_interconnect(self.interconnect)
            if tp > link.max_gpus:
                raise ConfigError(
                    f"interconnect {link.name} connects {link.max_gpus} GPUs; got "
                    f"tensor_parallel_size {tp}: name a network such as infiniband_ndr"
                )
        if self.block_size < 1:
            raise ConfigError(f"block_size must be >= 1; got {self.block_size}")

    def _check_number(self, key: str, unit: str) -> None:
        if unit == "choice" or (value := getattr(self, key)) is None:
            return
        if unit == "share":
            setattr(self, key, share(key, value))
        elif unit == "factor":
            check_factor(key, at_least_zero(key, value))
        elif unit == "correlation":
            setattr(self, key, correlation(key, value))
        else:
            at_least_zero(key, value)

    def reached(self) -> dict[str, float]:
        """Return the shares that the GPU's kernels reach, by the key for each."""
        found = reached_by_key(self.model, self.gpu, self.efficiencies)
        given = ((key, getattr(self, key)) for key in found)
        return found | {key: value for key, value in given if value is not None}

    def products(self, *, has_fp8: bool = False) -> Products:
        """Return the shares that products of weights reach, in 16 bits or in 8."""
        of_gpu = efficiencies_of(self.gpu, self.efficiencies)
        own = of_gpu.fp8_products if has_fp8 else of_gpu.products
        key = "fp8_gemm_compute_efficiency" if has_fp8 else "gemm_compute_efficiency"
        given = self.gemm_bandwidth_efficiency
        bandwidth = own.bandwidth if given is None else given
        return Products(bandwidth, self.reached()[key], own.sharpness)

    @property
    def is_launched_by_default(self) -> bool:
        """Whether launches count though nothing is said of them.

        Not of several data-parallel ranks, whose experts are no part of one's step.
        """
        return bool(self.graph_rule.piece_launches) and self.data_parallel_size == 1

    def scheduling(self) -> dict[str, Any]:
        """Return the scheduler's time for a request, and its source."""
        return sources.scheduling_told(self.schedule_request_s, self.host_rule)

    def added_request_s(self) -> float:
        """Return the seconds that each request adds to the host's part of a step."""
        schedule_s = 0.0 if self.host_rule.is_hidden else self.scheduling()["value"]
        return self.request_overhead_s + float(schedule_s)

    def filter_s(self, num_rows: int) -> float:
        """Return what filtering the logits of so many requests takes."""
        if self.sampler_rule is None:
            return 0.0
        return self.sampler_rule.seconds(num_rows, self.model.vocab_size, self.gpu)

    def expert_ranks(self) -> ExpertRanks:
        return ExpertRanks(self.data_parallel_size, self.enable_expert_parallel)

    def link(self) -> Interconnect:
        """Return the link of a node: as given, or of the GPU's datasheet."""
        link = (
            self._own_link()
            if self.interconnect is None
            else load_interconnect(self.interconnect)
        )
        rate = self.link_bytes_per_s
        return link if rate is None else reaching(link, rate)

    @property
    def has_own_link(self) -> bool:
        """Whether GPUs are joined as is assumed of their datasheet, or as it says."""
        own = self._own_link().bytes_per_s, self.gpu.interconnect_bytes_per_s
        return self.link().bytes_per_s in own

    def _own_link(self) -> Interconnect:
        num_gpus = self.tensor_parallel_size * self.data_parallel_size
        return link_of(self.gpu, num_gpus)

    def exchange(self) -> Exchange:
        """Return how tokens come to the experts of all ranks."""
        num_gpus = self.tensor_parallel_size * self.data_parallel_size
        network = load_interconnect(self.network or DEFAULT_NETWORK)
        return Exchange(
            Nodes(num_gpus, self.link(), network),
            self.tensor_parallel_size,
            self.model.num_experts_per_tok,
            *token_bytes(self.model),
            self.all2all_backend,
            self.enable_expert_parallel,
        )

    def swapping_rule(self) -> SwapRule:
        """Return `swap_rule` with what overrides it."""
        rule = self.swap_rule
        return SwapRule(
            self.swap_variant or rule.variant,
            self.swap_layout or rule.layout,
            rule.overlap if self.swap_overlap is None else self.swap_overlap,
        )

    def kv_itemsize_bytes(self) -> int:
        return kv_itemsize_bytes(self.model, self.kv_cache_dtype)

    def mixed_tile_tokens(self) -> int:
        """Return `mixed_decode_tile_tokens`, or what None means on this GPU."""
        if self.mixed_decode_tile_tokens is not None:
            return self.mixed_decode_tile_tokens
        return (
            0
            if packs_heads(self.gpu) or self.model.kv_lora_rank
            else FA2_DECODE_TILE_TOKENS
        )

    def _link_told(self) -> dict[str, Any] | None:
        """Return the link of collectives; None where there are none."""
        if self.tensor_parallel_size == 1:
            return None
        if self.link_bytes_per_s is None:
            return described(self.link()) | sources.COLLECTIVES
        rate = {"value": self.link_bytes_per_s, "unit": "B/s", "source": "given"}
        return rate | sources.COLLECTIVES

    def describe(self) -> dict[str, Any]:
        parameters = {
            one.name: {"value": getattr(self, one.name)} | dict(one.metadata)
            for one in fields(self)
            if one.metadata.get("unit", "choice") != "choice"
        }
        parameters["mixed_decode_tile_tokens"]["value"] = self.mixed_tile_tokens()
        if not self.host_rule.is_hidden:
            parameters["schedule_request_s"] = self.scheduling()
        if not self.graph_rule.has_whole_decodes:
            parameters["piece_latency_s"] = sources.pieces_told(self.piece_latency_s)
        if self.cascade_rule is not None:
            more = sources.cascade_told(self.cascade_layer_latency_s)
            parameters["cascade_layer_latency_s"] = more
        for key, value in self.reached().items():
            parameters[key]["value"] = value
        is_divided = self.data_parallel_size > 1
        chosen = {
            "efficiencies": efficiencies_told(self.gpu, self.efficiencies),
            "interconnect": self.interconnect,
            "network": self.network,
            "enable_expert_parallel": self.enable_expert_parallel,
            "data_parallel_size": is_divided and self.data_parallel_size,
            "all2all_backend": is_divided and self.all2all_backend,
            "link_bytes_per_s": self.link_bytes_per_s,
            "graph_sizes": list(self.graph_sizes),
            "graphs": self.graph_sizes and sources.GRAPHS,
            "link": self._link_told(),
            "experts": bool(self.model.num_experts) and sources.EXPERTS,
            "cascade": self.cascade_rule and self.cascade_rule.described(),
            "sampler": self.sampler_rule and self.sampler_rule.described(),
            "gpu_not_judged": not self.gpu.is_judged and sources.NOT_JUDGED,
        }
        return {
            "kind": "roofline",
            "bounds": False,
            "model": self.model.name,
            "gpu": self.gpu.name,
            "tensor_parallel_size": self.tensor_parallel_size,
            "block_size": self.block_size,
            "kv_cache_dtype": self.kv_cache_dtype,
            "swap": asdict(self.swapping_rule()),
            "parameters": parameters,
        } | {key: value for key, value in chosen.items() if value}
