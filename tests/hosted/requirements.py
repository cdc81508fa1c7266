"""What an installed vLLM imports when only its scheduler is wanted, as requirements.

``python tests/hosted/requirements.py SITE_PACKAGES`` prints them, with the versions
that the release asks for. vLLM comes as its wheel alone, and CPU torch, not its own.
"""

from __future__ import annotations

import sys
from importlib.metadata import distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TORCH = "torch==2.13.0"
"""Carries the Python part of all releases, whichever they ask for."""

LIGHT = frozenset(
    {
        "aiohttp",
        "blake3",
        "cachetools",
        "cbor2",
        "cloudpickle",
        "diskcache",
        "einops",
        "fastapi",
        "gguf",
        "ijson",
        "llguidance",
        "mistral-common",
        "msgspec",
        "numpy",
        "openai",
        "openai-harmony",
        "partial-json-parser",
        "pillow",
        "prometheus-client",
        "protobuf",
        "psutil",
        "py-cpuinfo",
        "pybase64",
        "pydantic",
        "python-json-logger",
        "pyyaml",
        "pyzmq",
        "regex",
        "requests",
        "scipy",
        "sentencepiece",
        "setproctitle",
        "tiktoken",
        "tqdm",
        "transformers",
        "uvicorn",
        "uvloop",
        "xgrammar",
    }
)
"""Everything that 0.11 to 0.33 import on the way to their scheduler, but torch."""

BOUNDS = {"numpy": "<2.3", "transformers": "<5"}
"""Tighter than what releases before 0.20 ask for; later packages came after them."""


def requirements(asked: list[str], minor: int) -> list[str]:
    """Return what to install beside the wheel of a release.

    Parameters
    ----------
    asked
        Requirements of the wheel.
    minor
        Of the release: 33 for 0.33.
    """
    versions = dict.fromkeys(LIGHT, "")
    for line in asked:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        here = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if name in LIGHT and here:
            versions[name] = str(wanted.specifier)
    if minor < 20:
        for name, bound in BOUNDS.items():
            versions[name] = ",".join(filter(None, (versions[name], bound)))
    return [*sorted(f"{name}{bounds}" for name, bounds in versions.items()), TORCH]


def main(site_packages: str) -> None:
    """Print the requirements of the vLLM that is installed there."""
    (vllm,) = distributions(name="vllm", path=[site_packages])
    minor = int(vllm.version.split(".")[1])
    print("\n".join(requirements(vllm.requires or [], minor)))


if __name__ == "__main__":
    main(sys.argv[1])
