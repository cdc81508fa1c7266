"""The recorder of engines whose requests go on to others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.results.drafts import DraftRecorder
from sim.results.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.scheduler.request import Request


class PromptRecorder(Recorder):
    """A `Recorder` of an engine whose requests go on to another one.

    Attributes
    ----------
    num_prompts, num_prompt_tokens
        That were computed for others.
    """

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.num_prompts = 0
        self.num_prompt_tokens = 0

    def finished(self, requests: Sequence[Request], num_later_steps: int = 0) -> None:
        """Take note of prompts that were computed; another engine has their rows."""
        for request in requests:
            self.moved(request)
            self.num_prompt_tokens += request.num_prompt_tokens
        self.num_prompts += len(requests)
        row = len(self.steps.ends_s) - 1 - num_later_steps
        self.steps.finished.append((row, len(requests)))


class DraftPromptRecorder(PromptRecorder, DraftRecorder):
    """A `PromptRecorder` of a fleet in which some engines verify drafts."""
