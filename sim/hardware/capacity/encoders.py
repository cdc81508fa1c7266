"""Memory of the largest images, which a profile keeps while the sampler works.

The profiled step encodes as many of the largest items as its budget takes, and keeps
both their pixels and what the encoder made of them. The largest item of Qwen2-VL and
Qwen2.5-VL is a video of as many frames as `max_model_len` holds, so that encoding it
may be the peak.

Source: vLLM 0.9 to 0.24, ``v1/worker/gpu_model_runner.py`` (`profile_run`) and
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
    most_in_video: int = 1
    """Images as large that a video may have, each of two frames."""
    mlp_numbers: int = 0
    """Numbers of an MLP at its encoder's peak, cut among ranks; 0: not counted."""


FIRST_VIDEO_ALONE_MINOR: Final = 10
"""From here on the longest video may fill `max_model_len`; before it left room for the
largest image. Source: `get_num_frames_with_most_features` of 0.9.2 and 0.10.2."""
_FRAMES: Final = 2
_MERGED_PATCHES: Final = 4
_QWEN2_PIXELS: Final = _MERGED_PATCHES * 3 * _FRAMES * 14**2
_QWEN2_HIDDEN: Final = 1_280
_MOST_IN_VIDEO: Final = 7
"""Of 14 frames (``models/qwen2_vl.py``)."""
_HIDDEN_COPIES: Final = 5
"""Of a patch while the last product of an encoder's MLP runs: its output and input, the
residual, attention's output and the layer's input."""


def _qwen2(mlp_numbers: int) -> _Image:
    return _Image(
        16_384,
        _QWEN2_PIXELS,
        most_in_video=_MOST_IN_VIDEO,
        mlp_numbers=_MERGED_PATCHES * mlp_numbers,
    )


_QWEN3: Final = _Image(16_384, _MERGED_PATCHES * 3 * _FRAMES * 16**2)
_QWEN3_DEEP: Final = _Image(_QWEN3.num_tokens, _QWEN3.pixel_values, 1 + NUM_DEEP_LEVELS)
_IMAGES: Final = {
    "gemma3": _Image(256, 3 * 896**2 // 256),
    "qwen2_vl": _qwen2(2 * 4 * _QWEN2_HIDDEN),
    "qwen2_5_vl": _qwen2(3 * 3_420),
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
    numbers = image.pixel_values + image.num_vectors * model.hidden_size
    return _profiled_tokens(arguments, image) * numbers * itemsize


def encoding_bytes(arguments: EngineArguments) -> int:
    """Return the bytes that a profile holds while it encodes; 0 where not counted.

    Source: vLLM 0.22, ``models/qwen2_5_vl.py`` (`Qwen2_5_VisionBlock.forward`), where
    norms are not in place.
    """
    image = _IMAGES.get(arguments.model.model_type)
    if image is None or not (arguments.model.has_encoder and image.mlp_numbers):
        return 0
    mlp = image.mlp_numbers // arguments.tensor_parallel_size
    hidden = _MERGED_PATCHES * _HIDDEN_COPIES * _QWEN2_HIDDEN
    numbers = image.pixel_values + mlp + hidden
    return _profiled_tokens(arguments, image) * numbers * arguments.itemsize_bytes


def _profiled_tokens(arguments: EngineArguments, image: _Image) -> int:
    """Return the tokens of as many of the largest items as a budget takes."""
    longest = arguments.max_model_len or arguments.model.max_position_embeddings
    if arguments.engine_minor < FIRST_VIDEO_ALONE_MINOR:
        longest -= image.num_tokens
    images = max(1, min(longest // image.num_tokens, image.most_in_video))
    item = images * image.num_tokens
    return max(1, arguments.max_num_batched_tokens // item) * item


def deep_buffer_bytes(arguments: EngineArguments) -> int:
    """Return the bytes of buffers by which an encoder feeds several layers."""
    image = _IMAGES.get(arguments.model.model_type)
    if image is None or image.num_vectors == 1:
        return 0
    batch = arguments.max_num_batched_tokens * arguments.model.hidden_size
    return NUM_DEEP_LEVELS * batch * arguments.itemsize_bytes
