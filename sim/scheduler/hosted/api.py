"""The names of an installed vLLM that hosting its scheduler needs, found at run time.

vLLM is imported when it is asked for and not before. What a release has moved or
renamed is said by name, with the release; what it has added is left at its default.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import traceback
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sim.errors import SchedulerError
from sim.scheduler.v1.dialect import LAST_MINOR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

FIRST_MINOR = 11
"""Oldest release that is hosted: 0.11."""

_RELEASE = re.compile(r"0\.(\d{1,3})(?:\.\d{1,3})?")

_NAMES = {
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "VllmConfig": "vllm.config",
    "SchedulerConfig": "vllm.config",
    "CacheConfig": "vllm.config",
    "DeviceConfig": "vllm.config",
    "KVCacheConfig": "vllm.v1.kv_cache_interface",
    "KVCacheGroupSpec": "vllm.v1.kv_cache_interface",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
    "SlidingWindowSpec": "vllm.v1.kv_cache_interface",
    "Request": "vllm.v1.request",
    "RequestStatus": "vllm.v1.request",
    "ModelRunnerOutput": "vllm.v1.outputs",
    "SamplingParams": "vllm.sampling_params",
    "get_request_block_hasher": "vllm.v1.core.kv_cache_utils",
    "init_none_hash": "vllm.v1.core.kv_cache_utils",
}
"""Where 0.11 to 0.33 keep what is used of them."""

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"

_LATER_NAMES = {
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler",
    "ChunkedLocalAttentionSpec": "vllm.v1.kv_cache_interface",
    "MLAAttentionSpec": "vllm.v1.kv_cache_interface",
    "MambaSpec": "vllm.v1.kv_cache_interface",
    "SpeculativeConfig": "vllm.config",
    "DraftTokenIds": "vllm.v1.outputs",
    "KVTransferConfig": "vllm.config",
    "KVConnectorOutput": "vllm.v1.outputs",
    "OffloadingWorkerMetadata": f"{_CONNECTORS}.offloading.common",
    "MultiKVConnectorWorkerMetadata": f"{_CONNECTORS}.multi_connector",
    "NixlBaseConnectorScheduler": f"{_CONNECTORS}.nixl.base_scheduler",
    "NixlPullConnectorScheduler": f"{_CONNECTORS}.nixl.pull_scheduler",
}
"""Names that other layers and engine cores need; looked for when they are met."""


def installed_version() -> str:
    """Return the version of the installed vLLM, without importing it."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        raise SchedulerError(
            "the scheduler 'vllm' is the one of an installed vLLM, and there is none "
            "here; install it (docs/hosting.md, no GPU needed), or take 'v1'"
        ) from None
    matched = _RELEASE.match(found)
    if matched is None or int(matched[1]) < FIRST_MINOR:
        raise SchedulerError(
            f"the scheduler 'vllm' hosts releases from 0.{FIRST_MINOR} on, vLLM "
            f"{found} is installed; install a later one, or take 'v1'"
        )
    return found


def nearest_release(installed: str) -> str:
    """Return the newest release that we know which is no newer than `installed`.

    Its rules, defaults and capacity stand for those of a later one; ``"0.33"`` for
    ``"0.34.1"``, and ``"0.11.2"`` for ``"0.11.2+cu129"``.
    """
    matched = _RELEASE.match(installed)
    if matched is None:
        raise SchedulerError(
            f"a vLLM release such as 0.33.0 is wanted, got {installed[:40]!r}"
        )
    return f"0.{LAST_MINOR}" if int(matched[1]) > LAST_MINOR else matched[0]


class VllmApi:
    """The names of one vLLM that are used, and calls that say which have moved."""

    def __init__(
        self,
        installed: str,
        load: Callable[[str], ModuleType] = importlib.import_module,
    ) -> None:
        self.installed = installed
        self._found: dict[str, Any] = {}
        self._signatures: dict[str, Mapping[str, inspect.Parameter]] = {}
        self._import = load
        self._torch = self._load("torch")
        for name in _NAMES:
            self._find(name)

    def __getattr__(self, name: str) -> Any:
        """Return one of vLLM's own names."""
        if name in vars(self)["_found"] or name in _LATER_NAMES:
            return self._find(name)
        raise AttributeError(name)

    def _find(self, name: str) -> Any:
        if name not in self._found:
            module = _NAMES.get(name) or _LATER_NAMES[name]
            self._found[name] = self._attribute(self._load(module), name, module)
        return self._found[name]

    def dtype(self, name: str) -> Any:
        """Return the type of elements of a name, such as ``"bfloat16"``."""
        return getattr(self._torch, name, None)

    def _load(self, module: str) -> ModuleType:
        try:
            return self._import(module)
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("vllm."):
                raise self.moved(f"there is no module {error.name}") from error
            raise SchedulerError(
                f"vLLM {self.installed} cannot be imported: it needs {error.name}; "
                f"pip install {error.name} (docs/hosting.md has what it needs)"
            ) from error
        except Exception as error:
            raise SchedulerError(
                f"vLLM {self.installed} cannot be imported: {module}: "
                f"{type(error).__name__}: {_first_line(error)}; see docs/hosting.md"
            ) from error

    def _attribute(self, owner: Any, name: str, where: str) -> Any:
        found = getattr(owner, name, None)
        if found is None:
            raise self.moved(f"{where} has no {name}")
        return found

    def attribute(self, owner: Any, path: str) -> Any:
        """Return the attribute at a dotted `path` from an object of theirs."""
        for name in path.split("."):
            owner = self._attribute(owner, name, type(owner).__name__)
        return owner

    def moved(self, what: str) -> SchedulerError:
        """Return the error where the API is another than the known one."""
        return SchedulerError(
            f"the API of vLLM {self.installed} is not the one of 0.{FIRST_MINOR} to "
            f"0.{LAST_MINOR}: {what}; host another release, or take scheduler v1"
        )

    def call(
        self,
        name: str,
        needed: Mapping[str, Any],
        also: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call one of their names with the arguments that it takes."""
        function = getattr(self, name)
        parameters = self._parameters(name)
        for argument in needed:
            if argument not in parameters:
                raise self.moved(f"{name} takes no {argument}")
        given = dict(needed)
        given |= {k: v for k, v in (also or {}).items() if k in parameters}
        for argument, parameter in parameters.items():
            is_needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_KEYWORD,
                parameter.VAR_POSITIONAL,
            )
            if is_needed and argument not in given:
                raise self.moved(f"{name} wants {argument}, which is not known")
        with self.speaking(name):
            return function(**given)

    def takes(self, name: str, argument: str) -> bool:
        """Whether one of their names has an argument."""
        return argument in self._parameters(name)

    def _parameters(self, name: str) -> Mapping[str, inspect.Parameter]:
        if name not in self._signatures:
            self._signatures[name] = _named_parameters(getattr(self, name))
        return self._signatures[name]

    @contextmanager
    def speaking(self, what: str) -> Iterator[None]:
        """Turn what vLLM raises into a line that names its version and the place."""
        try:
            yield
        except SchedulerError:
            raise
        except Exception as error:
            raise SchedulerError(
                f"vLLM {self.installed} refuses or fails in {what}{_place(error)}: "
                f"{type(error).__name__}: {_first_line(error)}; mend what it names, or "
                f"take scheduler v1"
            ) from error


def _named_parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return its parameters; of a class that hands all on, those of its base."""
    found: Mapping[str, inspect.Parameter] = {}
    for each in (function, *getattr(function, "__mro__", ())):
        found = inspect.signature(each).parameters
        passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if any(parameter.kind not in passed_on for parameter in found.values()):
            break
    return found


def _place(error: Exception) -> str:
    """Return the innermost line of vLLM's own that `error` came from."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        _, found, inside = frame.filename.replace(os.sep, "/").rpartition("/vllm/")
        if found:
            return f" (vllm/{inside}:{frame.lineno})"
    return ""


def _first_line(error: Exception) -> str:
    """Return the text of an error in a line; pydantic's without its web address."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if "https://" not in line)[:300]


@cache
def load_api() -> VllmApi:
    """Import the installed vLLM and find what is used of it, once."""
    installed = installed_version()
    # Its lines about missing GPUs are no news in a simulation of one.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    logger = logging.getLogger("vllm")
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.ERROR)
    return VllmApi(installed)
