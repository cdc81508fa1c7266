"""Requirements for the imports of an engine's scheduler alone.

``python tests/hosted/requirements.py SITE_PACKAGES`` prints them, with the versions
that the release asks for. vLLM or SGLang comes as its wheel alone, and CPU torch, not
its own.
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

SGLANG = frozenset(
    {
        "aiohttp",
        "apache-tvm-ffi",
        "dill",
        "einops",
        "fastapi",
        "gguf",
        "interegular",
        "ipython",
        "msgspec",
        "numpy",
        "openai",
        "orjson",
        "partial-json-parser",
        "pillow",
        "prometheus-client",
        "psutil",
        "pybase64",
        "pydantic",
        "pyzmq",
        "requests",
        "sentencepiece",
        "setproctitle",
        "tqdm",
        "transformers",
        "triton",
        "uvicorn",
        "uvloop",
        "xgrammar",
    }
)
"""Everything that SGLang 0.5.9 to 0.5.23 import on the way to its scheduler, but torch.

Its paged allocator is a Triton kernel, which Triton's interpreter runs on a CPU.
"""

BOUNDS = {"numpy": "<2.3", "transformers": "<5"}
"""Tighter than what releases before 0.20 ask for; later packages came after them."""


def requirements(
    asked: list[str], minor: int, light: frozenset[str] = LIGHT
) -> list[str]:
    """Return the packages to install beside the wheel of a release.

    Parameters
    ----------
    asked
        Requirements of the wheel.
    minor
        Of the release of vLLM: 33 for 0.33.
    light
        Names of those that are wanted.
    """
    versions = dict.fromkeys(light, "")
    for line in asked:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        here = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if name in light and here:
            versions[name] = str(wanted.specifier)
    if light is LIGHT and minor < 20:
        for name, bound in BOUNDS.items():
            versions[name] = ",".join(filter(None, (versions[name], bound)))
    return [*sorted(f"{name}{bounds}" for name, bounds in versions.items()), TORCH]


def main(site_packages: str) -> None:
    """Print the requirements of the vLLM or the SGLang that is installed there."""
    for name, light in (("vllm", LIGHT), ("sglang", SGLANG)):
        for wheel in distributions(name=name, path=[site_packages]):
            minor = int(wheel.version.split(".")[1])
            print("\n".join(requirements(wheel.requires or [], minor, light)))


if __name__ == "__main__":
    main(sys.argv[1])
