"""Public traces by name: their addresses and checksums, and fetching them."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_AZURE = (
    "https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
    "b469a113cedca53ddc3bdea71a143dc4b7d8700c/data/"
)
_MOONCAKE = (
    "https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
    "3b5a594133958449a1feaf1c9e0fc1b553e34a28/FAST25-release/traces/"
)
_SPLITWISE = "Patel et al., Splitwise, ISCA 2024"


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """A published trace file, pinned to a commit and a checksum.

    Parameters
    ----------
    file_name
        Name that it gets here; the examples' configurations use it.
    url
        Where one version of it lies for good.
    sha256
        Checksum of its bytes, 64 hexadecimal digits.
    kind
        Reader for it, a key of `workloads.traces.TRACE_READERS`.
    licence
        SPDX identifier of its licence.
    citation
        The publication that its authors ask to be cited.
    """

    file_name: str
    url: str
    sha256: str
    kind: str
    licence: str
    citation: str


PUBLIC_TRACES: Mapping[str, PublicTrace] = MappingProxyType(
    {
        "azure_llm_2023_code": PublicTrace(
            file_name="azure_llm_2023_code.csv",
            url=_AZURE + "AzureLLMInferenceTrace_code.csv",
            sha256="54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
            kind="azure",
            licence="CC-BY-4.0",
            citation=_SPLITWISE,
        ),
        "azure_llm_2023_conv": PublicTrace(
            file_name="azure_llm_2023_conv.csv",
            url=_AZURE + "AzureLLMInferenceTrace_conv.csv",
            sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            kind="azure",
            licence="CC-BY-4.0",
            citation=_SPLITWISE,
        ),
        "mooncake_conversation": PublicTrace(
            file_name="mooncake_conversation.jsonl",
            url=_MOONCAKE + "conversation_trace.jsonl",
            sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            kind="mooncake",
            licence="Apache-2.0",
            citation="Qin et al., Mooncake, FAST 2025",
        ),
    }
)
"""Traces that `fetch` knows."""


def fetch(name: str, directory: str | Path | None = None) -> Path:
    """Bring a public trace to this machine, once, and return where it lies.

    Nothing is printed.

    Parameters
    ----------
    name
        A key of `PUBLIC_TRACES`.
    directory
        Where to keep it; None for the user's cache directory of ``kvsim``.

    Returns
    -------
    pathlib.Path
        A file whose checksum was verified, also if it was there before.

    Raises
    ------
    WorkloadError
        If the name is unknown, the extra ``traces`` is not installed, the network
        or the disk fails, or the content has another checksum. Nothing is left
        half-written then.
    """
    if name not in PUBLIC_TRACES:
        known = ", ".join(PUBLIC_TRACES)
        raise WorkloadError(f"a public trace must be known; got {name!r}; try {known}")
    return fetch_trace(PUBLIC_TRACES[name], directory)


def fetch_trace(trace: PublicTrace, directory: str | Path | None = None) -> Path:
    """Bring a trace that is described by URL and checksum; see `fetch`."""
    try:
        import pooch  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        raise WorkloadError(
            "fetching needs pooch, which is not installed; "
            "run: pip install 'kvsim[traces]'"
        ) from None
    folder = pooch.os_cache("kvsim") if directory is None else Path(directory)
    try:
        with _silent(pooch.get_logger()):
            # It downloads beside the target and moves once the hash is right.
            path = pooch.retrieve(
                url=trace.url,
                known_hash=f"sha256:{trace.sha256}",
                fname=trace.file_name,
                path=folder.expanduser(),
            )
    except (OSError, ValueError) as error:  # every error of requests is an OSError
        reason = _reason(error)
        # pooch leaves the connection of a refused request open.
        response = getattr(error, "response", None)
        if response is not None:
            response.close()
        raise WorkloadError(
            f"{trace.url} must be fetched with its checksum; it failed ({reason}); "
            "download it by hand and give its path"
        ) from None
    return Path(path)


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error))
    return f"{type(error).__name__}: {text[:160]}"
