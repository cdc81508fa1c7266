"""The names of an installed SGLang that hosting its scheduler needs.

SGLang is imported when it is asked for and not before.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import os
import re
import sys
import time
import warnings
from array import array
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import MagicMock

from sim.errors import SchedulerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_RELEASES: Final = (*(f"0.5.{n}" for n in (9, 10, 11, 12, 19, 20, 21, 22, 23)),)
_RELEASE = re.compile(r"(\d+\.\d+\.\d+)")
_ABSENT: Final = ("torchvision", "compressed_tensors", "sgl_kernel")
"""Packages of kernels and images that are imported and never called."""
_MODULES: Final = {
    "scheduler": "sglang.srt.managers.scheduler",
    "batch": "sglang.srt.managers.schedule_batch",
    "policy": "sglang.srt.managers.schedule_policy",
    "messages": "sglang.srt.managers.io_struct",
    "radix": "sglang.srt.mem_cache.radix_cache",
    "allocator": "sglang.srt.mem_cache.allocator",
    "memory": "sglang.srt.mem_cache.memory_pool",
    "args": "sglang.srt.server_args",
    "sampling": "sglang.srt.sampling.sampling_params",
    "utils": "sglang.srt.managers.utils",
    "overlap": "sglang.srt.managers.overlap_utils",
    "spec": "sglang.srt.speculative.spec_info",
    "apart": "sglang.srt.disaggregation.utils",
}


def installed_sglang() -> str:
    """Return the version of the installed SGLang, without importing it.

    Raises
    ------
    SchedulerError
        If there is none, or one whose rules are not known here.
    """
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise SchedulerError(
            "the comparison is with an installed SGLang, and there is none here: "
            "'make hosted SGLANG=0.5.9' installs its wheel beside ours, no GPU needed"
        ) from None
    matched = _RELEASE.match(found)
    if matched is None or matched[1] not in _RELEASES:
        raise SchedulerError(
            f"SGLang {', '.join(_RELEASES)} can be hosted, {found} is installed; "
            "install one of these"
        )
    return matched[1]


@cache
def load_sglang() -> SglangApi:
    """Import what is needed of the installed SGLang; takes a quarter of a minute.

    Raises
    ------
    SchedulerError
        If there is none, or one whose rules are not known here.
    """
    installed_sglang()
    return SglangApi()


class SglangApi:
    """The names of an installed SGLang that hosting its scheduler needs."""

    def __init__(self) -> None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        sys.meta_path.append(_Stubs())
        self.torch = importlib.import_module("torch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # kernels that a CPU does not have
            modules: dict[str, Any] = {
                key: importlib.import_module(at) for key, at in _MODULES.items()
            }
        logging.getLogger("sglang").setLevel(logging.CRITICAL)
        modules["batch"].get_tensor_model_parallel_rank = lambda: 0
        for name in ("scheduler", "batch", "policy"):
            modules[name].logger.setLevel(logging.CRITICAL)
        self._policy, self._radix = modules["policy"], modules["radix"]
        self._sampling, self._messages = modules["sampling"], modules["messages"]
        self._args, self._memory = modules["args"], modules["memory"]
        self._allocator = modules["allocator"]
        self.Scheduler = modules["scheduler"].Scheduler
        self.AbortReq = self._messages.AbortReq
        self.RadixCache = self._radix.RadixCache
        self.GenerationBatchResult = modules["utils"].GenerationBatchResult
        self.FutureMap = modules["overlap"].FutureMap
        self.SpeculativeAlgorithm = modules["spec"].SpeculativeAlgorithm
        self.DisaggregationMode = modules["apart"].DisaggregationMode

    @contextmanager
    def pinned(self, note_preempted: Callable[[list[Any]], None]) -> Iterator[None]:
        """Count the readings of the tree's clock, and keep sets in order."""
        adder = self._policy.PrefillAdder
        preempt = adder.preempt_to_schedule

        def noted(self: Any, *arguments: Any) -> bool:
            batch, before = list(self.running_batch.reqs), len(self.preempt_list)
            found = bool(preempt(self, *arguments))
            if found:  # they are released in the order of the batch
                note_preempted(sorted(self.preempt_list[before:], key=batch.index))
            return found

        was = self._radix.time
        self._radix.time = _Counting()
        self._policy.set = _InOrder
        adder.preempt_to_schedule = noted
        try:
            yield
        finally:
            self._radix.time = was
            del self._policy.set
            adder.preempt_to_schedule = preempt

    def server_args(self, settings: Mapping[str, Any]) -> Any:
        """Return the release's arguments, and make them those of its process."""
        given = object.__new__(self._args.ServerArgs)
        for each in fields(self._args.ServerArgs):
            default = each.default
            if default is MISSING:
                factory = each.default_factory
                default = None if factory is MISSING else factory()
            setattr(given, each.name, default)
        names = {each.name for each in fields(self._args.ServerArgs)}
        for name, value in settings.items():
            if name in names:
                setattr(given, name, value)
        given.disable_overlap_schedule = not settings["overlap"]
        given.attention_backend = "torch_native"
        given.pp_max_micro_batch_size = settings["max_running_requests"]
        given.device = "cpu"
        self._args.set_global_server_args_for_scheduler(given)
        return given

    def pools(self, settings: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the pools of request slots and of tokens."""
        slots = self._memory.ReqToTokenPool(
            size=settings["max_running_requests"],
            max_context_len=settings["context_len"] + 4,
            device="cpu",
            enable_memory_saver=False,
        )
        common = {
            "dtype": self.torch.bfloat16,
            "device": "cpu",
            "kvcache": SimpleNamespace(store_dtype=self.torch.bfloat16),
            "need_sort": settings["need_sort"],
        }
        size, page_size = settings["max_total_num_tokens"], settings["page_size"]
        if page_size == 1:
            return slots, self._allocator.TokenToKVPoolAllocator(size, **common)
        return slots, self._paged()(size, page_size, **common)

    @cache  # noqa: B019  # one of a process
    def _paged(self) -> Any:
        paged: Any = self._allocator.PagedTokenToKVPoolAllocator
        count_new: Callable[..., int] = sys.modules[paged.__module__].get_num_new_pages

        class Paged(paged):  # type: ignore[misc]
            """The release's; it does not look for pages that are not there."""

            def alloc_extend(self, *arguments: Any) -> Any:
                prefixes, lengths = arguments[1], arguments[3]
                needed = count_new(
                    seq_lens=lengths, page_size=self.page_size, prefix_lens=prefixes
                )
                if needed > len(self.free_pages) + len(self.release_pages):
                    return None
                return super().alloc_extend(*arguments)

        return Paged

    def request(self, told: Mapping[str, Any], **more: Any) -> Any:
        """Return the message of a request; `more` are fields of later releases."""
        sampling = self._sampling.SamplingParams(
            max_new_tokens=told["output_len"],
            temperature=0.0,
            ignore_eos=told["ignore_eos"],
        )
        sampling.normalize(None)
        return self._messages.TokenizedGenerateReqInput(
            rid=told["id"],
            input_text="",
            input_ids=array("q", told["prompt"]) if more else list(told["prompt"]),
            mm_inputs=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            priority=told["priority"],
            **more,
        )


class _Stubs:
    """Finds the packages that are imported and never called, if they are not there."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


class _Stub(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _InOrder(dict[Any, None]):
    """A set that keeps the order of insertion."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        self[item] = None


class _Counting:
    """A module `time` whose clock counts its readings."""

    def __init__(self) -> None:
        self._readings = count(1)

    def monotonic(self) -> int:
        return next(self._readings)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
