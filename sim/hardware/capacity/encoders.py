"""Memory of the largest images, which a profile keeps while the sampler works.

The profiled step encodes as many of the largest images as its budget takes, and keeps
both their pixels and what the encoder made of them.

Source: vLLM 0.11 to 0.24, ``v1/worker/gpu_model_runner.py`` (`profile_run`) and
``model_executor/models/qwen3_vl.py``; sizes of the largest images of the families'
processors, and start-up logs ("budget of 16384 tokens, and profiled with 1 image").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sim.hardware.capacity.arguments import EngineArguments

NUM_DEEP_LEVELS: Final = 3
"""Layers of the encoder that Qwen3-VL feeds to layers of the model beside its output,
each by a buffer of the batch."""


@dataclass(frozen=True, slots=True)
class _Image:
    """The largest image of a family: its tokens, pixels a token, vectors a token."""

    num_tokens: int
    pixel_values: int
    """Numbers of the processor's input, three a pixel and frame."""
    num_vectors: int = 1


_FRAMES: Final = 2
_MERGED_PATCHES: Final = 4
_QWEN2: Final = _Image(16_384, _MERGED_PATCHES * 3 * _FRAMES * 14**2)
_QWEN3: Final = _Image(16_384, _MERGED_PATCHES * 3 * _FRAMES * 16**2)
_QWEN3_DEEP: Final = _Image(_QWEN3.num_tokens, _QWEN3.pixel_values, 1 + NUM_DEEP_LEVELS)
_IMAGES: Final = {
    "gemma3": _Image(256, 3 * 896**2 // 256),
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _QWEN3_DEEP,
    "qwen3_vl_moe": _QWEN3_DEEP,
}
"""By ``model_type``; of others the batch's embeddings alone are counted."""


def dummy_image_bytes(arguments: EngineArguments) -> int:
    """Return the bytes of images that a profile keeps; 0 without an encoder."""
    model, itemsize = arguments.model, arguments.itemsize_bytes
    batch = arguments.max_num_batched_tokens
    if not model.has_encoder:
        return 0
    image = _IMAGES.get(model.model_type)
    if image is None:
        return batch * model.hidden_size * itemsize
    tokens = max(1, batch // image.num_tokens) * image.num_tokens
    numbers = image.pixel_values + image.num_vectors * model.hidden_size
    return tokens * numbers * itemsize


def deep_buffer_bytes(arguments: EngineArguments) -> int:
    """Return the bytes of buffers by which an encoder feeds several layers."""
    image = _IMAGES.get(arguments.model.model_type)
    if image is None or image.num_vectors == 1:
        return 0
    batch = arguments.max_num_batched_tokens * arguments.model.hidden_size
    return NUM_DEEP_LEVELS * batch * arguments.itemsize_bytes
