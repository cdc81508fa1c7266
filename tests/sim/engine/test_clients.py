"""How a workload's requests become the engine's: groups, samples, beams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.tokens import RunTokens, SegmentTokens, TokenRuns
from sim.engine.requests import RequestFactory
from tests.sim.build import Run, spec

if TYPE_CHECKING:
    from typing import Any


def test_v1_serves_every_sample_as_a_request_of_its_own() -> None:
    run = Run([spec(0, 0.0, 40, 5, best_of=3), spec(1, 1.0, 30, 4)])
    requests = run.go().requests
    assert requests["request_id"].tolist() == [0, 1, 2, 3]
    assert requests["parent_id"].tolist() == [0, 0, 0, 1]
    assert requests["num_output_tokens"].tolist() == [5, 5, 5, 4]


def test_samples_share_their_prompt_and_nothing_behind_it() -> None:
    changes: dict[str, Any] = {"block_size": 4, "max_model_len": 512}
    run = Run([spec(0, 0.0, 40, 30, best_of=2)], enable_prefix_caching=True, **changes)
    run.go()
    # Both answers are cached, behind one prompt: (40 + 2 x 29) // 4 blocks.
    assert run.scheduler.tables.num_contents == 10 + 2 * 7


def test_v1_asks_for_beams_token_by_token() -> None:
    run = Run(
        [spec(0, 0.0, 20, 6, beam_width=3, beam_switch_share=0.5)],
        enable_prefix_caching=True,
        block_size=4,
    )
    requests = run.go().requests
    # One request for the first token, three for each of the five others.
    assert len(requests) == 1 + 3 * 5
    assert set(requests["parent_id"]) == {0}
    assert set(requests["num_output_tokens"]) == {1}
    lengths = sorted(set(requests["num_prompt_tokens"]))
    assert lengths == [20, 21, 22, 23, 24, 25]
    # Every request but the first finds its prompt's full blocks.
    assert set(requests["num_cached_tokens"][1:]) == {20, 24}


def test_beams_end_where_the_model_does() -> None:
    run = Run([spec(0, 0.0, 20, 50, beam_width=2)], max_model_len=24)
    requests = run.go().requests
    assert requests["num_prompt_tokens"].max() == 23
    assert len(requests) == 1 + 2 * 3


def test_a_beam_that_can_never_be_served_is_rejected_once() -> None:
    run = Run([spec(0, 0.0, 30, 5, beam_width=2)], max_model_len=24)
    assert run.go().requests["status"].tolist() == ["finished_rejected"]


def test_beams_and_other_requests_end_together() -> None:
    specs = [spec(0, 0.0, 20, 9, beam_width=2), spec(1, 0.5, 20, 40)]
    requests = Run(specs).go().requests
    assert set(requests["status"]) == {"finished_stopped"}
    assert set(requests["parent_id"]) == {0, 1}


def test_keys_of_runs_equal_those_of_segments() -> None:
    prompt = ((7, 10), (8, 3), (9, 50))
    segments, runs = (
        SegmentTokens(prompt, 4),
        RunTokens(TokenRuns.from_segments(prompt)),
    )
    expected: list[int] = []
    found: list[int] = []
    segments.extend_block_hashes(expected, 15, 4)
    for num_blocks in (3, 9, 15):
        runs.extend_block_hashes(found, num_blocks, 4)
    assert found == expected


def test_beams_switch_as_often_as_their_share_says() -> None:
    beams = spec(0, 0.0, 4, 3, beam_width=2, beam_switch_share=0.75)
    factory = RequestFactory(64)
    assert factory.group(beams).beam_percent == 75
    runs = TokenRuns.from_segments(beams.prompt)
    assert factory.beam_step(beams, runs, 0.0).beam_percent == 75
