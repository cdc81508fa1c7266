"""Costs of a step by its tokens and its requests: products, collectives, the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from calibrate.estimators import Layer
from calibrate.precisions import dtypes_of
from calibrate.tables.experts import expert_table
from calibrate.tables.fits import TOKENS, nodes, rounded
from sim.costs.measured.geometry import weight_bits_of
from sim.errors import UserError
from sim.hardware.models.weights import TensorRole, weight_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from calibrate.points import Points
    from calibrate.tables.attention import AttentionTables
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.hardware.models.weights import WeightTensor

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

Table = dict[str, Any]

ROWS: Final = 2 ** np.arange(13)


class Layers(NamedTuple):
    """Names that a source gives the layers of a model, with how often each runs."""

    products: tuple[str, ...]
    """Once a layer."""
    mlp: frozenset[str]
    """Those among all of them that belong to dense MLPs."""
    elementwise: Mapping[str, int]
    """Times a layer."""
    once: Mapping[str, int]
    """Times a step."""
    head: str = ""
    sampler: str = ""
    routed: frozenset[str] = frozenset()
    """Those that only layers of routed experts have."""


SOURCES: Final[Mapping[str, Layers]] = {
    "llmservingsim": Layers(
        products=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        mlp=frozenset({"gate_up_proj", "act_fn", "down_proj"}),
        elementwise={"layernorm": 2, "rotary_emb": 1, "act_fn": 1, "qk_norm": 1},
        once={"embedding": 1, "final_layernorm": 1},
        head="lm_head",
        sampler="sampler",
    ),
    "vidur": Layers(
        products=("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"),
        mlp=frozenset({"mlp_up_proj", "mlp_act", "mlp_down_proj"}),
        elementwise={
            "input_layernorm": 1,
            "post_attention_layernorm": 1,
            "attn_rope": 1,
            "mlp_act": 1,
            "add": 2,
        },
        once={"emb": 1},
    ),
    "calibrate": Layers(
        products=(),
        mlp=frozenset({"activation"}),
        elementwise={
            "norm": 2,
            "rope": 1,
            "activation": 1,
            "cache_write": 1,
            "router": 1,
        },
        once={"norm": 1},
        sampler="sampler",
        routed=frozenset({"router"}),
    ),
}
"""By where a profile comes from; ``calibrate`` times products by their shape."""
_OPTIONAL: Final = frozenset({"qk_norm", "add", "router"})
"""Layers that not every model, or not every profile, has."""


class TokenTables:
    """Tables of the model and the ranks that `attention` is of.

    `source` is a key of `SOURCES`; `is_own` says whether the layer tables, which hold
    no shapes, are this model's.
    """

    def __init__(
        self, attention: AttentionTables, source: str, *, is_own: bool = True
    ) -> None:
        self.attention = attention
        self.fits, self.model = attention.fits, attention.model
        self.ranks, self.latent = attention.ranks, attention.latent
        self.is_own = is_own
        self.layers = SOURCES.get(source, SOURCES["calibrate"])

    def tables(self) -> Table:
        """Return the tables by tokens and requests of an entry of a profile's `fit`."""
        found: Table = {"tokens": self._tokens()}
        for key, table in (
            ("experts", self._experts()),
            ("elementwise", self._elementwise()),
            ("head", self._head()),
            ("sampler", self._rows(self.layers.sampler)),
        ):
            if table is not None:
                found[key] = table
        return found

    def _experts(self) -> Table | None:
        return expert_table(self.fits, self.model, self.ranks, is_own=self.is_own)

    # -- products and collectives -------------------------------------------------

    def _tokens(self) -> Table:
        if "gemm" in self.fits.estimators:
            tokens = np.array(nodes(self._gemm.columns["m"], TOKENS))
            seconds, beyond = self._by_shape(tokens)
        elif curve := self._curve(each := self._in_layer(self.layers.products)):
            tokens = np.array(nodes(curve.tokens, TOKENS))
            layer_s = curve.sums(tokens, each)
            seconds = self.model.num_hidden_layers * layer_s
            beyond = curve.beyond(tokens)
        elif self.model.num_experts:
            # the cost model takes products of such models from the datasheet, too
            tokens = TOKENS
            rest = self.attention.rest()
            parts = [rest.token_parts(count) for count in tokens.tolist()]
            seconds = np.array([part[0] for part in parts])
            beyond = np.ones(len(tokens), dtype=np.bool_)
        else:
            raise UserError(
                f"the profile has no products of {self.model.name} on {self.ranks} "
                "ranks: import or measure one that has gemm or layer tables of them"
            )
        found: Table = {
            "tokens": tokens.tolist(),
            "gemm_s": rounded(seconds),
            "beyond": beyond.astype(int).tolist(),
        }
        reduce_s = self._allreduce(tokens)
        if reduce_s is not None:
            found["allreduce_s"] = rounded(reduce_s)
        return found

    @property
    def _gemm(self) -> Points:
        return self.fits.points["gemm"]

    def _by_shape(self, tokens: Integers) -> tuple[Floats, NDArray[np.bool_]]:
        """Return seconds of the linear layers from products of any shape."""
        total, beyond = np.zeros(len(tokens)), np.zeros(len(tokens), dtype=np.bool_)
        for tensor in self._linear():
            seconds, outside = self._product(tokens, tensor.rows, tensor.columns)
            total += tensor.count * tensor.num_groups * seconds
            beyond |= outside
        if self.latent is not None:
            seconds, outside = self.latent.projections_s(tokens)
            total += self.model.num_hidden_layers * seconds
            beyond |= outside
        return total, beyond

    def _linear(self) -> list[WeightTensor]:
        """Return linear layers but for those timed with latent attention."""
        found = [
            tensor
            for tensor in weight_tensors(self.model, self.ranks)
            if tensor.role is TensorRole.LINEAR and tensor.columns > 1
        ]
        if self.latent is not None:
            bare = replace(self.model, intermediate_size=0, num_experts=0)
            for tensor in weight_tensors(bare, self.ranks):
                if tensor in found:
                    found.remove(tensor)
        return found

    def _product(
        self, m: Integers, n: int, k: int, bits: int | None = None
    ) -> tuple[Floats, NDArray[np.bool_]]:
        estimator = self.fits.estimators["gemm"]
        dtypes = self._gemm.codes.get("dtype", ("",))
        bits = weight_bits_of(self.model) if bits is None else bits
        columns = {
            "m": m,
            "n": np.full(len(m), n),
            "k": np.full(len(m), k),
            "weight_bits": np.full(len(m), bits),
            "dtype": np.full(len(m), weight_code(dtypes, self.model, bits)),
        }
        return estimator.predict(columns), estimator.extrapolated(columns)

    def _allreduce(self, tokens: Integers) -> Floats | None:
        if self.ranks == 1 or "allreduce" not in self.fits.estimators:
            return None
        variants = self.fits.points["allreduce"].codes.get("variant", ("",))
        graph = next((i for i, name in enumerate(variants) if "graph" in name), 0)
        columns = {
            "variant": np.full(len(tokens), graph),
            "num_gpus": np.full(len(tokens), self.ranks),
            "bytes": tokens * self.model.hidden_size * 2,
        }
        seconds = self.fits.estimators["allreduce"].predict(columns)
        return 2 * self.model.num_hidden_layers * seconds

    # -- layers ---------------------------------------------------------------------

    def _in_layer(self, names: Iterable[str]) -> dict[str, float]:
        """Return how often each runs in a layer.

        Dense MLPs are in some layers only, routers in the others. A norm of queries and
        keys that was not timed counts as another norm.
        """
        model, counts = self.model, dict[str, float](self.layers.elementwise)
        dense = 1.0 - model.num_moe_layers / model.num_hidden_layers
        if "qk_norm" not in counts and "norm" in counts:
            counts["norm"] += model.num_qk_norms / model.num_hidden_layers
        shares = dict.fromkeys(self.layers.mlp, dense)
        shares |= dict.fromkeys(self.layers.routed, 1.0 - dense)
        each = {name: counts.get(name, 1) * shares.get(name, 1.0) for name in names}
        return {name: count for name, count in each.items() if count}

    def _elementwise(self) -> Table | None:
        """Return seconds of norms, rotary embedding, activation and the like."""
        each, once = self._in_layer(self.layers.elementwise), self.layers.once
        needed = [name for name in (*each, *once) if name not in _OPTIONAL]
        curve = self._curve(needed)
        if curve is None:
            return None
        tokens = np.array(nodes(curve.tokens, TOKENS))
        layers = self.model.num_hidden_layers * curve.sums(tokens, each)
        seconds = layers + curve.sums(tokens, once)
        return self._table("layer", "tokens", tokens, seconds, curve.beyond(tokens))

    def _head(self) -> Table | None:
        """Return seconds of the product that makes logits of so many sequences."""
        if "gemm" not in self.fits.estimators:
            return self._rows(self.layers.head)
        head = next(
            tensor
            for tensor in weight_tensors(self.model, self.ranks)
            if tensor.role is TensorRole.EMBEDDING
        )
        if 16 not in self._gemm.columns["weight_bits"]:
            return None
        # vLLM keeps the head in the model's precision
        seconds, beyond = self._product(ROWS, head.rows, head.columns, bits=16)
        if beyond.all():  # wider than any product that was measured
            return None
        return self._table("gemm", "rows", ROWS, seconds, beyond)

    def _rows(self, name: str) -> Table | None:
        curve = self._curve([name]) if name else None
        if curve is None:
            return None
        rows = np.array(nodes(curve.tokens, ROWS))
        seconds = curve.sums(rows, {name: 1})
        return self._table("layer", "rows", rows, seconds, curve.beyond(rows))

    def _table(
        self,
        operation: str,
        axis: str,
        at: Integers,
        seconds: Floats,
        beyond: NDArray[np.bool_],
    ) -> Table:
        return {
            axis: at.tolist(),
            "time_s": rounded(seconds),
            "beyond": beyond.astype(int).tolist(),
            "interval": list(self.fits.intervals[operation]),
        }

    def _curve(self, names: Iterable[str]) -> _LayerCurves | None:
        """Return the curves of these layers on so many ranks; None without all."""
        estimator = self.fits.estimators.get("layer")
        if not (self.is_own and isinstance(estimator, Layer)):
            return None
        points = self.fits.points["layer"]
        found = _LayerCurves(estimator, points, self.ranks, list(names))
        return found if found.places and not found.missing else None


class _LayerCurves:
    """Layers of one model on so many ranks, by tokens."""

    def __init__(
        self, estimator: Layer, points: Points, ranks: int, names: list[str]
    ) -> None:
        self.estimator = estimator
        variants, layers = points.codes["variant"], points.codes["layer"]
        own = np.stack([points.columns[key] for key in estimator.curve], axis=1)
        self.places: dict[str, tuple[int, int]] = {}
        for variant, layer in np.unique(own, axis=0).tolist():
            # a calibration names the way a layer was done, and times one rank's
            if variants[variant] == f"tp{ranks}" or not _is_ranks(variants[variant]):
                self.places.setdefault(layers[layer], (variant, layer))
        self.missing = [name for name in names if name not in self.places]
        wanted = [self.places[name] for name in names if name in self.places]
        rows = (own[:, None, :] == np.array(wanted).reshape(1, -1, 2)).all(axis=2)
        self.tokens = points.columns["tokens"][rows.any(axis=1)]

    def sums(self, tokens: Integers, counts: Mapping[str, float]) -> Floats:
        """Return seconds of so many of each layer that is there."""
        total = np.zeros(len(tokens))
        for name, count in counts.items():
            if name in self.places:
                total += count * self.estimator.predict(self._columns(name, tokens))
        return total

    def beyond(self, tokens: Integers) -> NDArray[np.bool_]:
        """Return which amounts lie outside the measured ones."""
        low, high = int(self.tokens.min()), int(self.tokens.max())
        return np.asarray((tokens > high) | (tokens < low))

    def _columns(self, name: str, tokens: Integers) -> dict[str, Integers]:
        variant, layer = self.places[name]
        return {
            "variant": np.full(len(tokens), variant),
            "layer": np.full(len(tokens), layer),
            "tokens": tokens,
        }


def _is_ranks(variant: str) -> bool:
    return variant.startswith("tp") and variant[2:].isdigit()


def weight_code(dtypes: Sequence[str], model: ModelArchitecture, bits: int) -> int:
    """Return the code of the precision that weights of so many bits are read in."""
    for name in dtypes_of(model, bits):
        if name in dtypes:
            return dtypes.index(name)
    raise UserError(
        f"the profile has no products of {bits}-bit weights; it has "
        f"{', '.join(dtypes)}: use cost: {{kind: roofline}}"
    )
