"""Parameters of vision towers and projectors, from a ``config.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sim.hardware.models.facts import Facts

_CHANNELS = 3
_DEEP_TOWERS = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""Families whose towers feed several layers of the model, three by default."""
_QWEN_TOWERS = _DEEP_TOWERS | {"qwen2_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"}


class _Tower(NamedTuple):
    """Sizes of a vision transformer, and how its layers are made."""

    width: int
    inner: int
    layers: int
    patch: int
    """Pixels of a patch, over all frames that it takes."""
    has_gate: bool = False
    has_bias: bool = True
    norm_parts: int = 2
    """Vectors of a norm: a scale, and a shift or none."""

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        width, inner = self.width, self.inner
        biases = (4 * width + (1 + self.has_gate) * inner + width) * self.has_bias
        products = 4 * width * width + (2 + self.has_gate) * width * inner
        return products + biases + 2 * self.norm_parts * width

    @property
    def blocks(self) -> int:
        return self.layers * self.block + self.patch * self.width


def encoder_parameters(whole: Facts, text: Facts, kind: str) -> int:
    """Return the parameters of a vision tower and its projector; 0 if not known.

    The families that are counted equal published totals; see
    tests/sim/hardware/test_model.py.
    Sound and towers of other families are 0, and the estimate says so.
    """
    vision = whole.mapping("vision_config")
    if not vision.values:
        return 0
    family = whole.text("model_type")
    out = text.count("hidden_size")
    if family in _QWEN_TOWERS:
        return _qwen_vl(vision, family, out)
    if kind == "gemma3":
        return _siglip(vision, out)
    if family == "mistral3":
        return _pixtral(vision, out, whole.natural("spatial_merge_size") or 2)
    if family == "llava":
        return _clip(vision, out)
    return 0


def _qwen_vl(vision: Facts, family: str, out: int) -> int:
    merged = (vision.natural("spatial_merge_size") or 2) ** 2
    side = vision.natural("patch_size") or (14 if family.startswith("qwen2") else 16)
    frames = vision.natural("temporal_patch_size") or 2
    patch = _CHANNELS * frames * side * side
    layers = vision.count("depth", 27 if family.startswith("qwen3") else 32)
    if family == "qwen2_vl":
        width = vision.count("embed_dim", 1280)
        inner = int(vision.factor("mlp_ratio")) * width
        tower = _Tower(width, inner, layers, patch)
    elif family == "qwen2_5_vl":
        width, inner = (
            vision.count("hidden_size", 1280),
            vision.count("intermediate_size", 3420),
        )
        tower = _Tower(width, inner, layers, patch, has_gate=True, norm_parts=1)
    else:
        width = vision.count("hidden_size", 1152)
        inner = vision.count("intermediate_size", 4304)
        tower = _Tower(width, inner, layers, patch)
    joined = merged * tower.width
    products = joined * joined + joined + joined * out + out
    total = tower.blocks + products + tower.norm_parts * tower.width
    if not family.startswith("qwen3"):
        return total
    positions = vision.count("num_position_embeddings", 2304)
    deep = len(vision.items("deepstack_visual_indexes"))
    deep = deep or 3 * (family in _DEEP_TOWERS)
    total += width + positions * width  # the patches have a bias here
    return total + deep * (products + 2 * joined)


def _siglip(vision: Facts, out: int) -> int:
    tower, patches = _on_images(vision)
    width = tower.width
    embedded = tower.blocks + width + patches * width
    return embedded + 2 * width + width * out + width


def _clip(vision: Facts, out: int) -> int:
    tower, patches = _on_images(vision)
    width = tower.width
    embedded = tower.blocks + width + (patches + 1) * width + 4 * width
    return embedded + width * out + out + out * out + out


def _pixtral(vision: Facts, out: int, merge: int) -> int:
    tower, _ = _on_images(vision, gated=True)
    width = tower.width
    projector = width + merge * merge * width * width + width * out + out * out
    return tower.blocks + width + projector


def _on_images(vision: Facts, *, gated: bool = False) -> tuple[_Tower, int]:
    """Return a tower that takes single images, and their patches."""
    side = vision.count("patch_size", 14)
    tower = _Tower(
        vision.count("hidden_size"),
        vision.count("intermediate_size"),
        vision.count("num_hidden_layers"),
        _CHANNELS * side * side,
        has_gate=gated,
        has_bias=not gated,
        norm_parts=1 if gated else 2,
    )
    return tower, (vision.count("image_size", 336) // side) ** 2
