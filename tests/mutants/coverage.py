"""Which modules are the core, and which tests cover them, the quickest first."""

from __future__ import annotations

from typing import Final

from tests.shared import ROOT

CORE: Final = (
    "cache/**/*.py",
    "sim/scheduler/v0/*.py",
    "sim/scheduler/v1/**/*.py",
    "sim/scheduler/groups/*.py",
    "sim/scheduler/block_space/*.py",
    "sim/scheduler/hf_fifo/*.py",
    "sim/scheduler/victims/*.py",
    "sim/scheduler/admission/*.py",
    "sim/scheduler/*.py",
    "sim/engine/**/*.py",
    "sim/costs/**/*.py",
    "sim/results/metrics.py",
    "sim/results/objectives.py",
    "sim/results/totals.py",
    "sim/results/selection.py",
    "workloads/**/*.py",
)
"""Patterns of the modules that decide, count, price and measure."""

_S = "tests/sim"
_AGREE = (f"{_S}/test_decisions_agree.py", "tests/identity/test_edges.py")

_TESTS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "cache/cacheflow": (
        ("tests/cache/test_manager_cacheflow.py",),
        ("tests/cache/test_manager_cacheflow_machine.py",),
        (f"{_S}/test_scheduler_cacheflow.py",),
    ),
    "cache/hf_fifo": (
        ("tests/cache/test_manager_hf_fifo.py",),
        ("tests/cache/test_manager_hf_fifo_machine.py",),
        (f"{_S}/test_scheduler_hf_fifo.py", "tests/conformance/test_hf_fifo.py"),
    ),
    "cache/tiers": (
        ("tests/cache/tiers",),
        (f"{_S}/test_connectors.py", f"{_S}/test_offloading_run.py"),
    ),
    "cache/v0": (
        ("tests/cache/test_allocator.py", "tests/cache/test_block_table.py"),
        ("tests/cache/test_evictor.py", "tests/cache/test_prefix_caching.py"),
        ("tests/cache/test_manager_v0.py", "tests/cache/test_tiered.py"),
        (
            "tests/cache/test_manager_v0_machine.py",
            "tests/cache/test_tiered_machine.py",
        ),
        ("tests/cache/test_allocator_machine.py",),
        (f"{_S}/test_scheduler_v0.py", f"{_S}/test_decisions_v0_rules.py"),
    ),
    "cache/v1/groups": (
        ("tests/cache/test_group_machine.py", "tests/cache/test_group_runs.py"),
        (f"{_S}/test_groups_run.py", f"{_S}/test_random_groups.py"),
    ),
    "cache/v1/runs": (
        ("tests/cache/test_run_tables.py", "tests/cache/test_run_pool.py"),
        ("tests/cache/test_run_machine.py", "tests/cache/test_run_drives.py"),
        ("tests/cache/test_group_runs.py", "tests/cache/test_block_runs.py"),
        ("tests/identity/test_edges.py",),
    ),
    "cache/v1/p": (
        ("tests/cache/test_kv_planning.py", "tests/cache/policies"),
        (f"{_S}/test_evictors.py", f"{_S}/test_layout.py"),
        ("tests/cache/test_group_machine.py",),
    ),
    "cache/v1": (
        ("tests/cache/test_block_pool.py", "tests/cache/test_free_queue.py"),
        ("tests/cache/test_manager_v1.py", "tests/cache/test_sliding_window.py"),
        ("tests/cache/test_block_pool_machine.py", "tests/cache/test_kv_planning.py"),
        ("tests/cache/test_run_tables.py", "tests/cache/test_group_machine.py"),
        (f"{_S}/test_layout.py", f"{_S}/test_groups_run.py"),
    ),
    "cache": (
        ("tests/cache/test_tokens.py", "tests/cache/test_block_runs.py"),
        ("tests/cache/test_evictor.py", "tests/cache/test_prefix_caching.py"),
        ("tests/cache/test_manager_v0.py", "tests/cache/test_run_pool.py"),
        (f"{_S}/test_scheduler_v0.py",),
    ),
    "sim/scheduler/v0": (
        (f"{_S}/test_scheduler_v0.py", f"{_S}/test_scheduler_v0_chunked.py"),
        (f"{_S}/test_budget.py", f"{_S}/test_scheduler_v0_limits.py"),
        (f"{_S}/test_decisions_v0_rules.py", f"{_S}/test_scheduler_v0_machine.py"),
        (f"{_S}/test_decisions_agree.py",),
    ),
    "sim/scheduler/v1/connectors": (
        (f"{_S}/test_connectors.py",),
        (f"{_S}/test_offloading_run.py", f"{_S}/test_tier_laws.py"),
        (f"{_S}/test_pairs.py",),
    ),
    "sim/scheduler/v1": (
        (f"{_S}/test_scheduler_v1.py", f"{_S}/test_scheduler_v1_dialects.py"),
        (f"{_S}/test_decisions_v1_rules.py", f"{_S}/test_victims.py"),
        (f"{_S}/test_speculative.py", f"{_S}/test_drafters.py"),
        (f"{_S}/test_scheduler_v1_machine.py", f"{_S}/test_batch_queue.py"),
        (f"{_S}/test_fast_engine.py", f"{_S}/test_admission_rules.py"),
        (f"{_S}/test_speculative_run.py", f"{_S}/test_async_run.py"),
        _AGREE,
    ),
    "sim/scheduler/groups": (
        (f"{_S}/test_scheduler_v0.py", f"{_S}/test_scheduler_cacheflow.py"),
        (f"{_S}/test_scheduler_v0_2.py", f"{_S}/test_stats.py"),
        (f"{_S}/test_generations_run.py", f"{_S}/test_decisions_v0_rules.py"),
        (f"{_S}/test_decisions_agree.py", f"{_S}/test_fast_engine.py"),
        ("tests/identity/test_edges.py", f"{_S}/test_victims.py"),
    ),
    "sim/scheduler/block_space": (
        (f"{_S}/test_scheduler_v0_2.py", f"{_S}/test_scheduler_cacheflow.py"),
        (f"{_S}/test_decisions_old_rules.py",),
        (f"{_S}/test_scheduler_cacheflow_machine.py", f"{_S}/test_stats.py"),
        (f"{_S}/test_decisions_agree.py", f"{_S}/test_victims.py"),
    ),
    "sim/scheduler/hf_fifo": (
        (f"{_S}/test_scheduler_hf_fifo.py", "tests/conformance/test_hf_fifo.py"),
        (f"{_S}/test_scheduler_hf_fifo_machine.py", f"{_S}/test_victims.py"),
        ("tests/conformance/hf_fifo", f"{_S}/test_decisions_agree.py"),
    ),
    "sim/scheduler/victims": ((f"{_S}/test_victims.py",),),
    "sim/scheduler/admission": ((f"{_S}/test_admission_rules.py",),),
    "sim/scheduler": (
        (f"{_S}/test_request.py", f"{_S}/test_batch.py", f"{_S}/test_generations.py"),
        (f"{_S}/test_victims.py", f"{_S}/test_admission_rules.py"),
        (f"{_S}/test_scheduler_v1.py", f"{_S}/test_scheduler_calls.py"),
        (f"{_S}/test_fast_engine.py", f"{_S}/test_config.py"),
        (f"{_S}/test_speculative.py", f"{_S}/test_decisions_agree.py"),
    ),
    "sim/engine/routers": (
        (f"{_S}/test_routers.py", "tests/routers"),
        (f"{_S}/test_fleet_run.py",),
    ),
    "sim/engine/autoscaling": (
        (f"{_S}/test_fleet_events.py", f"{_S}/test_fleet_run.py"),
    ),
    "sim/engine/group_sampling": (
        (f"{_S}/test_generations_run.py", f"{_S}/test_engine.py"),
        ("tests/identity/test_sequences.py",),
    ),
    "sim/engine/p": (
        (f"{_S}/test_pairs.py", f"{_S}/test_patience.py", f"{_S}/test_pipeline.py"),
        (f"{_S}/test_lock_step.py", f"{_S}/test_fleet_pairs.py"),
    ),
    "sim/engine/steps": (
        (f"{_S}/test_fast_loop.py", f"{_S}/test_engine.py"),
        (f"{_S}/test_async_run.py", f"{_S}/test_pipeline.py"),
        ("tests/identity/test_edges.py",),
    ),
    "sim/engine": (
        (f"{_S}/test_engine.py", f"{_S}/test_clock.py", f"{_S}/test_clients.py"),
        (f"{_S}/test_balancer.py", f"{_S}/test_lock_step.py", f"{_S}/test_patience.py"),
        (f"{_S}/test_fast_loop.py", f"{_S}/test_session_client.py"),
        (f"{_S}/test_front_end.py", f"{_S}/test_transfers.py"),
        (f"{_S}/test_fleet_run.py", f"{_S}/test_fleet_events.py"),
        (f"{_S}/test_offloading_run.py", f"{_S}/test_async_run.py"),
        (f"{_S}/test_pairs.py", f"{_S}/test_speculative_run.py"),
        ("tests/identity/test_edges.py",),
    ),
    "sim/costs/measured": (
        (f"{_S}/test_costs_measured.py", f"{_S}/test_costs_measured_rest.py"),
        (f"{_S}/test_profile.py", f"{_S}/test_costs_bounded.py"),
        ("tests/calibrate/test_calibrated_costs.py",),
    ),
    "sim/costs": (
        (f"{_S}/test_costs.py", f"{_S}/test_costs_pricer.py"),
        (f"{_S}/test_costs_chunks.py", f"{_S}/test_costs_collectives.py"),
        (f"{_S}/test_costs_experts.py", f"{_S}/test_costs_exchange.py"),
        (f"{_S}/test_costs_graphs.py", f"{_S}/test_costs_launches.py"),
        (f"{_S}/test_costs_mixture.py", f"{_S}/test_transfers.py"),
        (f"{_S}/test_crossover.py", f"{_S}/test_profile.py"),
        (f"{_S}/test_speculative.py", f"{_S}/test_lock_step.py"),
        (f"{_S}/test_pipeline.py", f"{_S}/test_async_run.py"),
        (f"{_S}/test_front_end.py", f"{_S}/test_intervals.py"),
    ),
    "sim/results": (
        (f"{_S}/test_metrics.py", f"{_S}/test_summary.py", f"{_S}/test_run_verdict.py"),
        (f"{_S}/test_recorder.py", f"{_S}/test_fast_loop.py"),
        (f"{_S}/test_ranks_run.py", f"{_S}/planning/test_trial.py"),
    ),
    "workloads/analysis": (
        ("tests/workloads/analysis",),
        (f"{_S}/test_workload_describe.py", f"{_S}/test_workload_curve.py"),
    ),
    "workloads/traces": (
        ("tests/workloads/traces",),
        ("tests/workloads/test_package.py", f"{_S}/test_workload_convert.py"),
    ),
    "workloads": (
        ("tests/workloads",),
        (f"{_S}/test_sessions_run.py", f"{_S}/test_speculative_run.py"),
    ),
}
"""Tests by the beginning of a module's path; of several, the longest counts."""


def tests_of(path: str) -> tuple[tuple[str, ...], ...]:
    """Return the tests of a module, in groups; the first that fails ends it.

    Those that are called like it come first.
    """
    stem = path.rpartition("/")[2].removesuffix(".py")
    named = sorted(
        str(each.relative_to(ROOT))
        for each in ROOT.glob(f"tests/**/test_*{stem}*.py")
        if not each.is_relative_to(ROOT / "tests/hosted")
    )
    groups = _TESTS[max((each for each in _TESTS if path.startswith(each)), key=len)]
    return ((*named,), *groups) if named else groups
