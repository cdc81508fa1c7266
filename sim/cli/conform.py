"""``kvsim conform``: our schedulers beside those of an installed vLLM or SGLang."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sim.cli import options
from sim.cli.console import print_json, progress_bar
from sim.cli.main import EXIT_DIFFERENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sim.cli.console import ShowProgress
    from sim.studies.conformance import DecisionWorkload
    from sim.studies.conformance.conform import Coverage


@options.claiming("out")
def conform(
    *workloads: Path,
    num: options.Whole = 100,
    seed: options.Whole = 0,
    groups: options.Flag = False,
    async_scheduling: options.Flag = False,
    speculative: options.Flag = False,
    offload: options.Flag = False,
    pairs: options.Flag = False,
    prefillers: options.Whole | None = None,
    decoders: options.Whole | None = None,
    engine: Literal["vllm", "sglang"] = "vllm",
    engine_version: str | None = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Compare our scheduler with the installed engine's own, decision by decision.

    Each workload goes through both, without a GPU; every field of every step must be
    equal, block ids included. Exit status 1 if one is not: the first workload that
    differs is made as small as it can be and still differ, and shown in words.

    Parameters
    ----------
    workloads
        Workload files, as of 'kvsim decisions'; their reference gives way to the
        installed release. Default: random workloads.
    num
        How many random workloads.
    seed
        Of the first random workload; the others count up.
    groups
        Draw layers that need KV caches of several kinds, in groups that share a pool;
        of SGLang layers with a window beside others, each with a pool of their own.
    async_scheduling
        Schedule each step of a random workload before the one ahead of it has ended.
    speculative
        Let each step of a random workload verify draft tokens.
    offload
        Put a CPU tier behind the pool of a random workload, with the offloading
        connector (vLLM 0.33); with --pairs behind some of the engines.
    pairs
        Draw two engines with the NIXL connector, of which one prefills and the other
        one decodes (vLLM 0.33); with --offload an engine may have a tier and the
        connector of several. Of SGLang (0.5.19 on): an engine that prefills or one that
        decodes, beside one that is played.
    prefillers, decoders
        With --pairs, so many of each behind a proxy with routers; 0 draws one to four
        for each workload. Default: a pair.
    engine
        Which installed engine: vLLM beside our v1, or SGLang beside our sglang.
    engine_version
        Release that ours follows. Default: the installed one, or the newest that we
        know if that is newer.
    out
        Where to write the smallest workload that differs.
    """
    from sim.errors import ConfigError

    _check_out(out, workloads, overwrite=overwrite)
    pools = _pools(prefillers, decoders, pairs=pairs)
    for name, least, value in (
        ("--num", 1, num),
        ("--seed", 0, seed),
        *((f"--{name}", 0, value) for name, value in pools.items()),
    ):
        if value < least:
            raise ConfigError(f"{name} takes a number of at least {least}, got {value}")
    if offload and (speculative or (groups and pairs)):
        raise ConfigError(
            "--offload draws engines without drafts, and pairs with one group of "
            "layers; give it without --speculative, and one of --groups and --pairs"
        )
    drawn = (async_scheduling, speculative, offload, pools, groups and pairs)
    if engine == "sglang" and any(drawn):
        raise ConfigError(
            "--engine sglang draws overlap scheduling by itself, has no drafts and "
            "tiers here, and with --pairs one engine without --groups; leave other "
            "options out"
        )
    installed, release = _releases(engine, engine_version)
    tried = (
        _read(workloads, engine, release)
        if workloads
        else _drawn_sglang(
            range(seed, seed + num), release, windows=groups, apart=pairs
        )
        if engine == "sglang"
        else _drawn(
            range(seed, seed + num),
            release,
            groups=groups,
            async_scheduling=async_scheduling,
            speculative=speculative,
            offload=offload,
            pairs=pairs,
            pools=pools,
        )
    )
    shown = not (quiet or json)
    total = len(workloads) or num
    with progress_bar(lambda show: show, total, "workloads", shown=shown) as show:
        found = _compare_all(tried, show, is_random=not workloads)
    result, words = _told(found, f"{_NAMES[engine]} {installed}", release, out)
    if json:
        print_json(result)
    elif not quiet:
        print(words)
    return EXIT_DIFFERENT if found.differing else 0


def _pools(
    prefillers: int | None, decoders: int | None, *, pairs: bool
) -> dict[str, int]:
    """Return how many engines prefill and decode; nothing for a pair."""
    given = {"prefillers": prefillers, "decoders": decoders}
    if set(given.values()) == {None}:
        return {}
    if not pairs:
        from sim.errors import ConfigError

        raise ConfigError(
            "--prefillers and --decoders say how many engines --pairs draws; give it, "
            "too"
        )
    return {name: 1 if value is None else value for name, value in given.items()}


_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
_OURS = {"vllm": "v1", "sglang": "sglang"}


def _releases(engine: str, engine_version: str | None) -> tuple[str, str]:
    """Return the release that is installed, and the one that ours follows."""
    if engine == "sglang":
        from sim.errors import ConfigError
        from sim.scheduler.hosted.sglang_api import installed_sglang
        from sim.scheduler.sglang import SGLANG

        installed = installed_sglang()
        release = engine_version or installed
        if not SGLANG.takes(release):
            raise ConfigError(
                f"--engine-version must be {SGLANG.versions_in_words} with --engine "
                f"sglang, got '{release[:40]}'"
            )
        return installed, release
    from sim.scheduler.hosted.api import load_api, nearest_release
    from sim.scheduler.v1.dialect import dialect_of

    installed = load_api().installed
    release = engine_version or nearest_release(installed)
    dialect_of(release)
    return installed, release


def _check_out(out: Path | None, workloads: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse a file that cannot, or should not, be written; before the work."""
    from sim.errors import ConfigError

    if out is None:
        return
    if not out.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {out.parent}; make it")
    if out.exists():
        if not overwrite:
            raise ConfigError(f"{out} exists; name another --out, or give --overwrite")
        if any(path.exists() and out.samefile(path) for path in workloads):
            raise ConfigError(f"{out} is a workload itself; name another --out")


def _told(
    found: _Found, installed: str, release: str, out: Path | None
) -> tuple[dict[str, Any], str]:
    """Return the findings, as data and in words; write the smallest difference."""
    from sim.studies.conformance import write_log
    from sim.studies.conformance.conform import as_file, smallest

    name, _, version = installed.partition(" ")
    result = {"installed": version, "compared_as": release} | found.to_dict()
    ours = _OURS[name.lower()]
    words = f"{installed} hosted, beside our {ours} as {release}\n{found.in_words()}"
    if found.differing:
        small, difference = smallest(found.differing[0])
        if out is not None:
            write_log([as_file(small)], out)
        result["first_difference"] = difference.to_dict()
        result["smallest"] = as_file(small)
        kept = f"in {out}" if out is not None else "keep it with --out FILE"
        words += (
            f"\nthe first of them, made small: {len(small.requests)} requests, {kept}\n"
            + difference.in_words((installed, "kvsim"))
        )
    return result, words


@dataclass(frozen=True)
class _Found:
    """Findings of a comparison of many workloads."""

    coverage: Coverage
    differing: list[DecisionWorkload] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def in_words(self) -> str:
        lines = [self.coverage.in_words()]
        if self.refused:
            lines.append(
                f"{len(self.refused):,} more could not be set up, the first because: "
                f"{self.refused[0]}"
            )
        names = ", ".join(workload.name for workload in self.differing[:10])
        lines.append(
            f"{len(self.differing):,} of {self.coverage.num_workloads:,} differ: "
            f"{names}"
            if self.differing
            else "equal: every field of every step"
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return self.coverage.to_dict() | {
            "num_refused": len(self.refused),
            "differing": [workload.name for workload in self.differing],
        }


def _compare_all(
    workloads: Iterator[DecisionWorkload],
    show: ShowProgress | None,
    *,
    is_random: bool,
) -> _Found:
    from sim.errors import ConfigError, SchedulerError
    from sim.studies.conformance.conform import Coverage, compare

    found = _Found(Coverage())
    for num_tried, workload in enumerate(workloads, start=1):
        try:
            comparison = compare(workload)
        except SchedulerError as error:
            if not is_random:
                raise ConfigError(f"{workload.name}: {error}") from error
            found.refused.append(str(error))
        else:
            found.coverage.add(workload, comparison)
            if comparison.difference is not None:
                found.differing.append(workload)
        if show is not None:
            show(num_tried)
    if not found.coverage.num_workloads:
        raise ConfigError(
            f"none of {len(found.refused):,} random workloads could be set up: "
            f"{found.refused[0]}"
        )
    return found


def _read(
    paths: Sequence[Path], engine: str, release: str
) -> Iterator[DecisionWorkload]:
    from sim.errors import ConfigError
    from sim.studies.conformance import load_workload

    for path in paths:
        workload = load_workload(path)
        if workload.generation != _OURS[engine]:
            raise ConfigError(
                f"{path}: a hosted {_NAMES[engine]} takes workloads of "
                f"{_OURS[engine]}, and the reference {workload.reference!r} is of "
                f"{workload.generation}; leave it out"
            )
        yield workload.model_copy(
            update={"reference": f"{engine} {release}", "name": str(path)}
        )


def _drawn_sglang(
    seeds: Sequence[int], release: str, *, windows: bool, apart: bool
) -> Iterator[DecisionWorkload]:
    from sim.studies.conformance.random_sglang import random_sglang_workload

    for seed in seeds:
        yield random_sglang_workload(seed, release, windows=windows, apart=apart)


def _drawn(
    seeds: Sequence[int],
    release: str,
    *,
    groups: bool,
    offload: bool,
    pairs: bool,
    pools: dict[str, int],
    **core: bool,
) -> Iterator[DecisionWorkload]:
    from sim.studies.conformance.random_groups import random_group_workload
    from sim.studies.conformance.random_v1 import random_workload

    if offload or pairs:
        from sim.studies.conformance.random_group_pairs import (
            random_group_pools_workload,
        )
        from sim.studies.conformance.random_offload import (
            random_group_offload_workload,
            random_offload_workload,
        )
        from sim.studies.conformance.random_pairs import (
            random_pair_workload,
            random_pools_workload,
        )

        connected: Any = random_pair_workload
        if not pairs:
            connected = (
                random_group_offload_workload if groups else random_offload_workload
            )
        elif groups:
            connected = random_group_pools_workload
        elif pools:
            connected = random_pools_workload
        if pairs and not groups:
            core["offload"] = offload
        if not pairs:
            del core["speculative"]  # none is drawn
        for seed in seeds:
            yield connected(seed, release, **core, **pools)
        return
    draw = random_group_workload if groups else random_workload
    for seed in seeds:
        yield draw(seed, release, **core)
