"""Weights of 4 or 8 bits that a kernel unpacks into 16 to multiply by them."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.quantization import QuantizationScheme

SM_BYTES_PER_S: Final[dict[float, float]] = {4: 11e9, 8: 16e9}
"""Bytes a second of packed weights that a multiprocessor unpacks, by bits a weight: a
memory that is quicker than all of them waits.

Source: Marlin's kernel for one token. 4 bits: 10.7 on an A100 (1,160 GB/s, the products
of a 13B; vLLM 2497, whose GPU is told by its rates alone), 11.0 on an H100 and 13.7 on
what must be an H20 (8,192 squared; vLLM 34556). 8 bits: 16.2 on the H100."""


def unpacks(scheme: QuantizationScheme, gpu: GpuSpec) -> bool:
    """Whether the GPU has no units that multiply by such weights as they are."""
    if scheme.multiplies_fp4 and gpu.fp4_flops_per_s is not None:
        return False
    return not scheme.quantizes_activation(gpu.fp8_flops_per_s is not None)


def unpacked_bytes_per_s(scheme: QuantizationScheme | None, gpu: GpuSpec) -> float:
    """Return how quickly such weights are read at most; infinity if nothing says it."""
    if scheme is None or gpu.num_sms is None or not unpacks(scheme, gpu):
        return inf
    return gpu.num_sms * SM_BYTES_PER_S.get(scheme.weight_bits, inf)
