"""`docs/mistakes.md` has what the command line answers to mistakes."""

from __future__ import annotations

from tests.mistakes import MISTAKES, PAGE, WITHOUT_EFFECT, answer, page


def test_the_page_has_the_answers_of_the_code() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text) == text


def test_mistakes_are_refused_and_odd_settings_run() -> None:
    assert len(MISTAKES) >= 20
    assert {answer(each)[0] for each in MISTAKES[:3]} == {2}
    assert {answer(each)[0] for each in WITHOUT_EFFECT} == {0}
