"""Swap or recompute, asked of a model on a GPU: by a profile, or by a datasheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.costs.crossover import Crossover, crossover
from sim.costs.measured import MeasuredCost
from sim.costs.profile import DRY_RUN, read_profile
from sim.costs.roofline import RooflineCost
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model, resolved_model

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

_MOST = {"block_size": 2**16, "max_num_batched_tokens": 2**24}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be compared.

    Parameters
    ----------
    model
        Bundled name, or path to a config.json.
    file
        A profile with tables of the model; None for the datasheet of `gpu`.
    gpu
        GPU name, or the path of a datasheet; None for the one that the profile names.
    tensor_parallel_size, block_size, max_num_batched_tokens, kv_cache_dtype
        As of the engine.
    """

    model: str
    file: Path | None = None
    gpu: str | None = None
    tensor_parallel_size: int = 1
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    kv_cache_dtype: str = "auto"

    def answer(self) -> CrossoverReport:
        """Compare.

        Raises
        ------
        UserError
            When something needed is missing or wrong.
        """
        self._check()
        cost = self._cost_model()
        found = crossover(
            cost,
            block_size=self.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        return CrossoverReport(self._title(cost), found)

    def _check(self) -> None:
        if self.file is None and self.gpu is None:
            raise UserError(
                "swapping is priced by a profile or by a GPU's datasheet; give one of "
                "them"
            )
        for key, most in _MOST.items():
            value = getattr(self, key)
            if not 1 <= value <= most:
                raise UserError(f"{key} must be 1 to {most:,}; got {value:,}")

    def _cost_model(self) -> MeasuredCost | RooflineCost:
        engine: dict[str, Any] = {
            "model": resolved_model(load_model(self.model)),
            "tensor_parallel_size": self.tensor_parallel_size,
            "block_size": self.block_size,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        if self.file is None:
            return RooflineCost(gpu=load_gpu(str(self.gpu)), **engine)
        profile = read_profile(self.file)
        if profile.kind == DRY_RUN:
            raise UserError(
                f"'{self.file}' is of a dry run, whose times are made up; measure a "
                "GPU, or ask the datasheet of one instead of the profile"
            )
        device = profile.fit.get("gpu") or profile.device.get("name")
        gpu = load_gpu(self.gpu or str(device))
        return MeasuredCost(str(self.file), gpu=gpu, **engine)

    def _title(self, cost: MeasuredCost | RooflineCost) -> str:
        told = cost.describe()
        source = "datasheet" if self.file is None else f"profile {self.file.name}"
        return (
            f"{told['model']} on {told['gpu']} ({source}), TP "
            f"{self.tensor_parallel_size}, blocks of {self.block_size}, prompts in "
            f"chunks of {self.max_num_batched_tokens:,}"
        )


@dataclass(frozen=True, slots=True)
class CrossoverReport:
    """The answer, and what was asked, in a line.

    Parameters
    ----------
    title
        Model, GPU, source of the prices, sizes.
    found
        The comparison.
    """

    title: str
    found: Crossover

    @property
    def sentences(self) -> dict[str, str]:
        """For each way to swap, where it is cheaper."""
        return self.found.sentences()

    @property
    def table(self) -> pd.DataFrame:
        """Milliseconds for every length: computed again, and swapped each way."""
        import pandas as pd  # noqa: PLC0415 - slow to import

        columns = {"recompute": self.found.recompute}
        columns |= {f"swap_{name}": s.band for name, s in self.found.swaps.items()}
        return pd.DataFrame(
            {f"{name}_ms": 1e3 * band.seconds for name, band in columns.items()},
            index=pd.Index(self.found.num_tokens, name="num_tokens"),
        )
