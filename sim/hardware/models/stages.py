"""Stages of a pipeline: which layers of a model stand on which of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.errors import CapacityError

if TYPE_CHECKING:
    from sim.hardware.models.architecture import ModelArchitecture


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has.

    What does not divide goes to the stages before the last, one layer each: to those in
    the middle first, since the others hold the embeddings.

    Source: vLLM 0.33, ``vllm/distributed/utils.py`` (`get_pp_indices`).
    """
    least, num_over = divmod(num_layers, num_stages)
    first = num_stages - 1 - num_over
    return tuple(
        least + (first <= stage < num_stages - 1) for stage in range(num_stages)
    )


def span_of_stage(num_layers: int, num_stages: int, stage: int) -> tuple[int, int]:
    """Return the first layer of a stage, and the one behind its last."""
    layers = layers_of_stages(num_layers, num_stages)
    first = sum(layers[:stage])
    return first, first + layers[stage]


def model_of_stage(
    model: ModelArchitecture, num_stages: int, stage: int
) -> ModelArchitecture:
    """Return a model of the layers of one stage, with embeddings and head as before.

    Dense layers of a mixture of experts come first, unless they are as many as half of
    all: then they are spread evenly.

    Raises
    ------
    CapacityError
        If layers share an indexer, and the stage has none.
    """
    num_layers, num_dense = model.num_hidden_layers, model.num_dense_layers
    first, stop = span_of_stage(num_layers, num_stages, stage)
    if 2 * num_dense < num_layers:
        dense = max(min(num_dense, stop) - first, 0)
    else:
        dense = num_dense * stop // num_layers - num_dense * first // num_layers
    indexers = tuple(at - first for at in model.index_layers if first <= at < stop)
    if model.index_layers and not indexers:
        raise CapacityError(
            f"every stage of {model.name} must have a layer with an indexer; with"
            f" pipeline_parallel_size {num_stages} layers {first} to {stop - 1} have"
            " none; lower it"
        )
    return replace(
        model,
        num_hidden_layers=stop - first,
        mixed_layer_kinds=model.mixed_layer_kinds[first:stop],
        num_dense_layers=dense,
        index_layers=indexers,
    )
