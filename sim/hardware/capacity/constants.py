"""Every measured constant of the capacity estimate, in one table.

*Measured* means: fitted to published engine logs with a full memory breakdown, some
50 runs of vLLM 0.11 to 0.19 on H100 80 GB (logs of llm-d-planner, pull request 205, and
its memory report); each says where it rests on few of them. What is shaped by a model
is computed from its architecture in `sim.hardware.capacity.parts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FIRST_V1_MINOR = 8
"""vLLM 0.8 made the V1 engine the default."""
LAST_MEASURED_MINOR = 19
LAST_HELD_MINOR = 31
"""Held against start-up logs (``tests/truth``), not measured."""
DELTA_NET_MINORS = (20, 21, 22)
"""Three starts of gated delta nets with small batches have 1.0 to 3.8 GiB less than is
counted, 0.18 to 0.25 MB a token: as if each layer's output stayed (0.20, 0.25). No
source was found; sampling 1,024 sequences would hide it, and a 27B of a later
release has none."""
FIRST_MEASURED_MINOR = 11
FIRST_HELD_V1_MINOR = 10
"""Held against logs of A100 and L40S, not measured."""
FIRST_HYBRID_POOL_MINOR = 10
"""From here full and sliding layers share one pool (``HybridKVCacheCoordinator``)."""
FIRST_HYBRID_CHUNKS_MINOR = 14
"""From here chunked layers give up blocks by default. Source: vLLM 0.11.2 (they do not)
and a start-up log of 0.19 (they do); pull request 29627 (December 2025) turned it on,
whose release, 0.13 or 0.14, is assumed."""
FIRST_PRINTING_REQUESTS_MINOR = 21
"""From here the printed tokens of a pool are those of `max_concurrency` requests;
before, blocks of one group times their size. Source: start-up logs; those of 0.19 and
of the days before 0.20 say the one, those of 0.24 and later the other."""
FIRST_IN_FLIGHT_MINOR = 25
"""From here windows are sized for all steps in flight. Source: vLLM, pull request 47728
(July 2026)."""
FIRST_CHECKPOINT_KV_DTYPE_MINOR = 15
"""From here ``kv_cache_dtype: auto`` is what a checkpoint asks for, of ModelOpt or
compressed-tensors. Source: ``vllm/attention/layer.py`` of 0.14.1 and 0.15.1; 0.14 reads
what ModelOpt asks for already."""
LAST_WHOLE_SCALE_BLOCKS_MINOR = 24
"""Up to here a rank's part of an expert must be whole blocks of FP8 scales. Source:
vLLM, pull request 48173 shows the refusal on the main branch of 9 July 2026, after
0.24; ``fused_moe/oracle/fp8.py`` of 0.33 refines or pads the blocks. Which release was
first is not known: between the two nothing is refused."""
FIRST_PREFIX_MATCH_UNIT_MINOR = 26
"""From here ``prefix_match_unit`` exists: 0.25.1 has no such argument."""
FIRST_ASYNC_MINOR = 14
"""From here scheduling is asynchronous by default. Source: release notes of 0.14."""
FIRST_AHEAD_IN_STAGES_MINOR = 24
"""From here it is so in pipelines, too. Source: ``vllm/config/vllm.py`` of 0.24."""
FIRST_NULL_BLOCK_CHECK_MINOR = 29
"""From here the start keeps the null block apart from what a request may fill. Source:
vLLM, pull request 47272, open in August 2026 and in 0.33."""
MEASURED_FAMILY = "h100"
"""205 logs of H200 and B200 (0.11 to 0.20), of which no constant of one GPU is, are
within 1.5 % but where weights are not known."""

SORTED_COPIES = 9
"""Copies of the logits in float32 while PyTorch sorts them: themselves, the sorted
values, their indices and those they start from in 64 bits, and CUB's second buffers of
values and indices. Source: PyTorch, ``SortStable.cu`` (`segmented_sort_pairs`)."""
FULL_SORT_COPIES = 12
"""Of fewer rows, all are sorted as one (`segmented_sort_pairs_by_full_sort`)."""
LEAST_SEGMENTED_ROWS = 128
UNSORTED_COPIES = 3
"""Copies without a sort. FlashInfer: the logits, the masked ones and probabilities;
Triton: the logits, probabilities and noise. Source: ``flashinfer/sampling.py``, vLLM's
``v1/sample/ops/topk_topp_sampler.py``."""
LEAST_TRITON_ROWS = 8
TRITON_BUFFER_ROWS = 132
"""Rows of Triton's buffer, one a multiprocessor: those of an H100, within 0.03 GiB of
any other's."""
FIRST_FLASHINFER_IMAGE = (8, 0)
LAST_FLASHINFER_IMAGE = (11, 0)
"""Releases that sample by FlashInfer where it is installed, as in vLLM's own images;
from 0.11.1 on it must be asked for. Source: `TopKTopPSampler` of 0.8.5 to 0.12.0."""
FIRST_TRITON_SAMPLER_MINOR = 17
FIRST_NATIVE_WARM_UP_MINOR = 21
"""From here the first model runner's profile samples once more without FlashInfer, so
that Triton's buffer is there in any case. Source: vLLM 0.20 to 0.33,
``v1/worker/gpu_model_runner.py`` (`_dummy_sampler_run`)."""
FIRST_TRITON_OF_FEW_ROWS_MINOR = 30
"""From here Triton serves fewer than `LEAST_TRITON_ROWS`, too."""
SECOND_RUNNER_MODEL_TYPES = (
    (29, None),
    (25, frozenset({"deepseek_v2", "granitemoe", "qwen2_moe"})),
)
"""Models with experts or states that the second model runner serves, by release; None:
all. It serves all others from the earlier of the two releases on. Source: vLLM 0.22 to
0.33, ``config/vllm.py`` (`use_v2_model_runner`)."""
FIRST_SECOND_RUNNER_MINOR = 23
EARLY_SECOND_RUNNER_MODEL_TYPES = frozenset({"llama", "mistral", "qwen3"})
"""Models that it serves from the former release on, unless quantised. Source:
architectures in ``config/vllm.py`` of 0.23, and CPU logs of 0.23 (Qwen3) and 0.24
(Llama) that want it and lack Triton; one of Qwen2.5 in 0.24 has the first. That 0.22
gave Qwen3 to it was not seen."""
FIRST_SECOND_RUNNER_HEADS_MINOR = 25
FIRST_SECOND_RUNNER_DRAFTERS_MINOR = 31
FIRST_SECOND_RUNNER_NGRAMS_MINOR = 32
"""From here it takes heads on the target, drafters of their own, and n-grams."""
FIRST_BARE_SAMPLER_MINOR = 26
"""From here its profiled sampler works on the logits as they are."""
FIRST_WARM_SAMPLER_MINOR = 33
"""From here it samples by top-k and top-p, too, while it is profiled. Source: vLLM 0.25
to 0.33, ``v1/worker/gpu/model_runner.py`` (`_dummy_sampler_run`)."""
FIRST_COUNTED_STATE_MINOR = 27
"""From here a profile counts all that has left the GPU's free memory, and with it what
is made between the weights and the profiled step. Source: vLLM 0.26 and 0.27,
``utils/mem_utils.py`` (`memory_profiling`)."""
SAMPLER_STATE_IDS = 3 * 1_024 + 128 + 1_024 + 129 + 128
"""Integers of 32 bits that the second model runner's sampler keeps for a sequence:
allowed and biased tokens and their biases, stops, bad words, their ends, and tokens to
tell log probabilities of. Beside them it counts the answer's tokens over the whole
vocabulary, and has two masks of it. Source: vLLM 0.27 to 0.33,
``v1/worker/gpu/sample`` and ``v1/worker/gpu/structured_outputs.py``."""
FIRST_BENCHMARKED_KERNELS_MINOR = 19
"""From here compiling is known to show in the profile: kernels to be combined are timed
on copies of their inputs, the embedding among them. Source: ``vllm/config``
(`benchmark_combo_kernel`) of 0.20 to 0.33, and logs of 0.19 and 0.27; earlier releases
were not looked at."""
FIRST_FUSED_EMBEDDING_MINOR = 29
"""From here ranks have a kernel of their own for it. Source: vLLM 0.29 to 0.33,
``layers/vocab_parallel_embedding.py`` (`use_fused_embedding`); two ranks of 0.28 have
the copy."""
MAY_KEEP_COPIES_MINOR = 27
KEPT_COPIES_MINORS = (28, 29, 30)
"""Here what the allocator keeps of such a copy counts once more: a small tensor that
stays is cut from it. Source: vLLM, pull request of 0.31
(`_scoped_allocator_max_split`). Which starts do is the allocator's chance: seven of 13
of 0.28 to 0.30 that we have, ten of 21 of another's that had one model of both sorts,
and of five of 0.27 one."""
GEMM_WORKSPACE_BYTES = 32 << 20
EARLY_GEMM_WORKSPACE_BYTES = 8_519_680
"""cuBLAS's workspace from Hopper on, and before. Source: PyTorch,
``CUDABlas.cpp`` (`getChosenWorkspaceSize`)."""
SMALL_BUFFERS_GIB = 0.0025
"""Inputs of the profiled step: what the logs show beyond all that is counted."""
SAMPLER_HIDDEN_COPIES = 1
"""Hidden states of the batch that live while the dummy sampler runs: the output of
the forward pass, from which the logits were computed."""
SAMPLED_HIDDEN_COPIES = 2
SECOND_RUNNER_SAMPLED_HIDDEN_COPIES = 1
"""Hidden states of the sampled rows: chosen ones, and, in the first model runner,
random ones of their shape."""
FORWARD_HIDDEN_COPIES = 4
"""Hidden states that live beside an MLP's two outputs, where the forward pass, not the
sampler, is the peak: the embeddings (input of the compiled graph), the residual, the
normed input and the output. Few models show it: 4.2 was seen in CodeLlama, 4.1 in a
quantised Mistral-Small."""
SECOND_RUNNER_FORWARD_HIDDEN_COPIES = 3
"""Two logs show it: 0.26 of 32,768 tokens (1.06 GiB; four would be 1.12) and 0.27."""
EAGER_FORWARD_HIDDEN_COPIES = 3
"""V0 runs no compiled graph. Models of `REUSES_MLP_NAME` let go of gate and up before
the MLP's output is there, so that its peak is the activation, without an output."""
REUSES_MLP_NAME = frozenset({"llama", "mistral", "phi3"})
"""Values of ``model_type``. Source: vLLM 0.6.4.post1 and 0.7.3, ``models/llama.py``;
``qwen2.py`` keeps them."""
FIRST_REUSED_MLP_NAME = (6, 4)
"""From here they do. Source: vLLM, pull request 10339 (November 2024)."""
LAST_CACHEFLOW_MINOR = 1
CACHEFLOW_BATCHED_TOKENS = 2_560
"""Batch of vLLM 0.1, whatever the model (``ServerArgs``)."""
FIRST_V0_CHUNKING_MINOR = 6
V0_MAX_NUM_SEQS = 256
V0_CHUNKED_PREFILL_ABOVE_TOKENS = 32_768
"""V0 turned chunked prefill on by itself for longer models (vLLM 0.6 ``arg_utils``)."""
V0_CHUNKED_BATCHED_TOKENS = 2_048
"""Batch with chunked prefill on V0, and the least without it."""

CUDA_GRAPH_GIB = (0.25, 0.008)
"""Estimate of `MANY_GRAPHS` and more by the first model runner: what all models have,
and a layer. The interval adds the whole estimate.

Estimates that engines printed, or by which 0.20 has less than 0.19: from 0.24 GiB less
to 0.24 more than this line are Ministral (40 layers), Gemma 4, Nemotron 3 (52, 88),
Llama (80), Qwen3-VL (48, 94), Qwen2.5 (28) and Qwen3-30B (48); DeepSeek (61, of 0.20)
is 0.8 more. ``calibrate/estimators/README.md`` has all."""
MANY_GRAPHS = 86
"""Of fewer graphs it is a share: the runner captures the two largest of each kind, and
takes the rest for as large as the second. Qwen3.5-4B was seen to be given 0.64 GiB for
86 and 0.40 for 54 (0.22). Source: vLLM 0.20 to 0.28, ``v1/worker/gpu_model_runner.py``
(`profile_cudagraph_memory`)."""
PIECE_BYTES = 240_000
"""Bytes that the driver keeps for a layer of a graph in pieces: the median of 13
records of 0.29 and 0.30 on GPUs before Hopper, 0.20 to 0.245 MiB (apron's; seven models
of 26 to 64 layers, TP 1 and 2). Nothing of them is left for a constant part."""
LATENT_PIECES = 2
"""So many times as much with latent attention, which launches more: 1.8 on an A100,
2.2 beside the dense models of the same logs of 0.19, 3.6 on an H100 of 0.30."""
WHOLE_GRAPH_BYTES = 1 << 20
"""Bytes that the second model runner counts for a whole graph. It captures two, and the
second comes out negative, as the memory of its warm-up is let go of inside the measured
part: then it takes 1 MiB for each. Source: vLLM 0.29 to 0.33,
``v1/worker/gpu/cudagraph_utils.py`` (`_MIN_PER_GRAPH_BYTES`), and PyTorch,
``cuda/graphs.py``, which empties the allocator's cache where a capture begins."""
NUM_SPLITS = 32
"""Parts that FlashAttention 3 may cut the keys of a whole graph into, each of which has
an output of its own in float32. Source: vLLM 0.11 to 0.33, ``config/attention.py``
(`flash_attn_max_num_splits_for_cuda_graph`); its flash-attention,
``hopper/flash_api.cpp`` (`out_accum`)."""
FLASHINFER_WORKSPACE_BYTES = 394 << 20
"""FlashInfer's attention workspace, allocated when graphs are first captured.
Source: ``vllm/envs.py``, ``v1/attention/backends/flashinfer.py``."""
FIRST_WIDE_WORKSPACE_MINOR = 26
WIDE_WORKSPACE_ELEMENT_BYTES = 16
"""From here it is as large as prompts may ask for: so much an element of the queries of
a batch. Source: vLLM 0.24 and 0.26 (`_get_workspace_buffer`)."""

WIDE_MEMORY_GIB = 70
VERY_WIDE_MEMORY_GIB = 160
VERY_WIDE_SINCE_MINOR = 33
"""Device sizes from which the API server's defaults grow (A100 excepted). Source:
vLLM ``EngineArgs``, defaults of ``max_num_batched_tokens`` and ``max_num_seqs``."""
DEFAULT_BATCH = (2_048, 256)
WIDE_BATCH = (8_192, 1_024)
VERY_WIDE_BATCH = (16_384, 1_024)


FIRST_HIGHER_UTILIZATION_MINOR = 20
"""From here an engine takes 0.92 of a GPU by itself, and 0.9 before. Source: vLLM 0.20
to 0.33, ``config/cache.py``; a log of 0.19 says 0.9; ``engine/arg_utils.py`` of 0.7;
before 0.1 it was 0.95 (pull request 153, June 2023)."""

LAST_PATCH = 99
"""That of a release of which only 0.NN is said: its last."""
LAST_KNOWN_MINOR = VERY_WIDE_SINCE_MINOR
"""The last release whose defaults are known."""
MEASURED_BATCH = WIDE_BATCH
"""Tokens and sequences of every log of a V1 engine with a breakdown."""


@dataclass(frozen=True, slots=True)
class EngineEra:
    """Memory that a range of releases holds beside the model."""

    first: tuple[int, int]
    """The first of them, 0.NN.N."""
    non_torch_gib: Mapping[int, float]
    """Memory outside PyTorch (CUDA context, NCCL) by tensor-parallel size, on H100; to
    three digits where numbers of blocks tell it, which the logs print in two."""
    measured_sizes: frozenset[int]
    """Tensor-parallel sizes of the era's own logs."""
    source: str
    early_non_torch_gib: Mapping[int, float] | None = None
    """The same on GPUs before Hopper and, from 0.18 on, on cards without NVLink; None
    where no log tells them apart."""
    subtracts_cuda_graphs: bool = False


_EARLY_NON_TORCH_GIB = MappingProxyType({1: 0.04, 2: 0.25, 4: 0.20})
"""Since CUDA began, of V0 0.7 and 0.8 but for one: T4 0.01, A10G 0.05 twice, RTX 2060
0.04 (their mean); two RTX 4090 0.25; four RTX 2080 Ti 0.20; four L40S 0.21 (V1)."""

_CARD_NON_TORCH_GIB = MappingProxyType({1: 0.12, 2: 0.21})
"""Since 0.18: RTX 4090 0.12 (0.19, 0.27), 0.15 (0.27), A100 0.14 (0.31), a card of
16 GB 0.07 (0.26); two RTX PRO 6000 0.21 (0.27)."""

_BEFORE_GROUPS_GIB = MappingProxyType({1: 0.136, 2: 1.38, 4: 1.39, 8: 2.10})
"""Since CUDA began, processes' groups included, with NVLink."""
_CONTEXT_GIB = 0.5
"""CUDA's context: 0.45 to 0.6 GiB of what engines print as not free at their start, on
cards of 24 to 140 GiB."""


def _plus(known: Mapping[int, float], more: float) -> Mapping[int, float]:
    return MappingProxyType({ranks: gib + more for ranks, gib in known.items()})


ERAS: tuple[EngineEra, ...] = (
    EngineEra(
        (0, 0),
        MappingProxyType({1: 0.13}),
        frozenset({1}),
        source="V0: all as in 0.11, nothing fitted",
    ),
    EngineEra(
        (4, 0),
        MappingProxyType({1: 0.71}),
        frozenset({1}),
        source="V0, what the allocator keeps counts as used: 0.52 to 0.65 GiB more "
        "in three logs (0.4.1 twice, 0.5.3)",
    ),
    EngineEra(
        (6, 0),
        MappingProxyType({1: 0.73}),
        frozenset({1}),
        source="V0, CUDA's context and other processes count: 0.73 GiB on an H200, "
        "0.15, 0.43 and 0.47 on a card of 8 GB in logs of 0.6.4",
        early_non_torch_gib=MappingProxyType({1: 0.35}),
    ),
    EngineEra(
        (6, 5),
        MappingProxyType({1: 0.13}),
        frozenset({1}),
        source="V0, what came since CUDA began: logs of 0.6.6 say 0.12 and 0.16 on "
        "H100, of 0.7 and 0.8 0.01 to 0.05 on T4, A10G and RTX 2060",
        early_non_torch_gib=_EARLY_NON_TORCH_GIB,
    ),
    EngineEra(
        (8, 0),
        _plus(_BEFORE_GROUPS_GIB, _CONTEXT_GIB),
        frozenset(),
        source="as 0.10, and the CUDA context: all that is in use on a GPU counts",
        early_non_torch_gib=_plus(_EARLY_NON_TORCH_GIB, _CONTEXT_GIB),
    ),
    EngineEra(
        (9, 2),
        _BEFORE_GROUPS_GIB,
        frozenset(),
        source="0.10.2 on two H200, V0 on four A800 and eight A100 with NVLink: groups"
        " of processes are formed while memory is profiled",
        early_non_torch_gib=_EARLY_NON_TORCH_GIB,
    ),
    EngineEra(
        (11, 0),
        MappingProxyType({1: 0.136, 2: 0.55}),
        frozenset({1, 2}),
        source="measured on 0.11, 0.15 and 0.16 (six models)",
        early_non_torch_gib=_EARLY_NON_TORCH_GIB,
    ),
    EngineEra(
        (17, 0),
        MappingProxyType({1: 0.136, 2: 2.05}),
        frozenset({1, 2}),
        source="measured on 0.17 (two models)",
        early_non_torch_gib=_EARLY_NON_TORCH_GIB,
    ),
    EngineEra(
        (18, 0),
        MappingProxyType({1: 0.246, 2: 2.068, 4: 2.135}),
        frozenset({1, 2, 4}),
        source="measured on 0.18 and 0.19 (fifteen models)",
        early_non_torch_gib=_CARD_NON_TORCH_GIB,
    ),
    EngineEra(
        (20, 0),
        MappingProxyType({1: 0.25, 2: 2.07, 4: 2.16}),
        frozenset(),
        source="as 0.19; what graphs are estimated at is subtracted (``vllm/envs.py``)",
        early_non_torch_gib=_CARD_NON_TORCH_GIB,
        subtracts_cuda_graphs=True,
    ),
)
"""Eras in order of release."""

FIRST_SECOND_RUNNER_GRAPHS_MINOR = 29
"""From here the second model runner keeps memory for graphs, too, beforehand."""

NON_TORCH_PER_DOUBLING_GIB = 0.09
"""Growth from one tensor-parallel size to its double beyond those measured."""


@dataclass(frozen=True, slots=True)
class Margins:
    """Half-widths of the interval in GiB, added up where several apply."""

    measured: float = 0.12
    """Inside the data: the largest residual of a text model."""
    multimodal: float = 0.20
    uncounted_encoder: float = 1.00
    """Encoders of the bundled models hold 0.8 to 1.6 GiB."""
    other_gpu: float = 0.35
    consumer_gpu: float = 0.30
    other_batch: float = 0.80
    """A Qwen3-32B on H100 (128 sequences, 0.15; no breakdown) held 0.76 GiB more than
    the rules say; ten others are within 0.5."""
    other_version: float = 0.30
    amd: float = 4.00
    """MI300X, 39 logs of 0.11 to 0.18: what loading leaves to the allocator counts, of
    which 0.8 to 4.6 GiB were seen, and 3.3 less in one build."""
    old_v1: float = 4.00
    """One log each of 0.8 and 0.9 leaves 4 and 1 GiB open: their arguments are not all
    known. Seven of 0.10 lie within 0.13 GiB."""
    other_tensor_parallel_size: float = 0.50
    enforce_eager: float = 0.30
    v0: float = 1.00
    other_architecture: float = 0.30


MARGINS = Margins()

UNCERTAIN_WEIGHTS_SHARE = 0.01
"""Packed 4-bit layouts differ by kernel: 0.6 % (GPTQ) and 0.5 % (MXFP4) were seen."""
PARTLY_QUANTISED_SHARE = 0.02
"""FP8 models with states: checkpoints differ in the layers that keep their precision;
five are within 0.7 % of what their recipes tell."""
AMD_EXPERTS_SHARE = 0.40
"""Unquantised experts on MI300X, which are padded and laid out anew while loading: 0.36
and 0.39 of them more were counted."""
UNKNOWN_WEIGHTS_SHARE = 0.25
"""A model that is counted as a Llama may have an MLP without a gate: a third fewer
elements in two thirds of the weights."""
OTHER_BATCH_SHARE = 0.20
"""Of the activation peak, for batches beyond the 8,192 tokens of the data."""


_PADDING_LIMITS = ((0, 1.0), (12, 1.25), (18, 1.5))
"""Ratio of unlike buckets of layers below which each is one group, by release. Source:
vLLM, pull requests 29303 (November 2025) and 36684 (March 2026)."""


def padding_limit_of(minor: int) -> float:
    """Return the ratio below which release 0.`minor` pads rather than deals layers."""
    return next(limit for first, limit in reversed(_PADDING_LIMITS) if minor >= first)


def era_of(minor: int, patch: int = LAST_PATCH) -> EngineEra:
    """Return the era that release 0.`minor`.`patch` belongs to."""
    return next(era for era in reversed(ERAS) if (minor, patch) >= era.first)


def default_utilization(minor: int) -> float:
    """Return the share of a GPU that release 0.`minor` takes by itself.

    The stand-in for transformers 5.17 takes as much, of what the model leaves free.
    Source: transformers, ``continuous_batching/initialization.py``, where no logits are
    processed.
    """
    return 0.92 if minor >= FIRST_HIGHER_UTILIZATION_MINOR else 0.9
