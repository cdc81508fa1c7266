"""vLLM's flash attention as a stand-in: what the engine's own takes, in plain torch."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from calibrate.kernels import torch_ops
from calibrate.kernels.paged import paged_batch

if TYPE_CHECKING:
    import pytest

HELPER = "vllm.v1.attention.backends.fa_utils"


@dataclass
class StandIn:
    """Records calls; attends as the third version does."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)

    def get_scheduler_metadata(self, **arguments: Any) -> torch.Tensor:
        """Note a plan, and return its number as the metadata."""
        self.plans.append(arguments)
        return torch.tensor([len(self.plans)])

    def flash_attn_varlen_func(
        self,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        num_splits: int = 0,
        scheduler_metadata: torch.Tensor | None = None,
        fa_version: int = 2,
        **arguments: Any,
    ) -> None:
        """Attend by what lies in device memory alone, as a graph does.

        Where calls are recorded this is one of them.
        """
        given = {"q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": cu_seqlens_q}
        given |= {"seqused_k": seqused_k, "block_table": block_table}
        if has_torch_function((q,)):
            this, more = self.flash_attn_varlen_func, {"num_splits": num_splits}
            handle_torch_function(this, (q,), **given, **more, **arguments)
            return
        self.calls.append(
            {
                "fa_version": fa_version,
                "num_splits": num_splits,
                "scheduler_metadata": scheduler_metadata,
                "seqused_k": seqused_k,
                **arguments,
            }
        )
        query_lens = cu_seqlens_q.diff().tolist()
        batch = paged_batch(q, (k, v), block_table, query_lens, seqused_k.tolist())
        torch_ops.attention(out, batch)


def stand_in(
    monkeypatch: pytest.MonkeyPatch, helper: str = HELPER, version: int = 3
) -> StandIn:
    """Install one as the package `vllm`, whose `helper` chooses the version."""
    made = StandIn()
    kernels: Any = types.ModuleType("vllm.vllm_flash_attn")
    kernels.flash_attn_varlen_func = made.flash_attn_varlen_func
    kernels.get_scheduler_metadata = made.get_scheduler_metadata
    chooser: Any = types.ModuleType(helper)
    chooser.get_flash_attn_version = lambda: version
    names = helper.split(".")
    packages = [".".join(names[:count]) for count in range(1, len(names))]
    for name in packages:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", kernels)
    monkeypatch.setitem(sys.modules, helper, chooser)
    return made
