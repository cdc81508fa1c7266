"""Bodies of an answer, in whole or in parts."""

from __future__ import annotations

import json
from time import time
from typing import TYPE_CHECKING, Any

from sim.scheduler.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.serving.answer import Answer
    from sim.serving.asked import Asked
    from sim.serving.filler import Filler


class Reply:
    """The bodies of one answer.

    Parameters
    ----------
    asked, answer
        What was asked for, and what comes.
    model
        Name of the model.
    filler
        What answers are made of.
    """

    def __init__(
        self, asked: Asked, answer: Answer, model: str, filler: Filler
    ) -> None:
        self.asked = asked
        self._filler = filler
        self.answer = answer
        self._is_chat = asked.is_chat
        kind = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {
            "id": f"{kind}-{answer.requests[0].request_id}",
            "created": int(time()),
            "model": model,
        }
        # Each chunk begins with it: a chunk is a token, and there are thousands.
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = self._head | {"object": kind, "choices": []}
        self._opening = event(chunk).removesuffix("]}\n\n")

    def whole(self) -> dict[str, Any]:
        """Return all of it."""
        choices = []
        for index, request in enumerate(self.answer.requests):
            end = request.num_output_tokens
            text = self._text(0, end)
            choice: dict[str, Any] = {"index": index}
            choice |= {"logprobs": self._logprobs(0, end)}
            choice |= {"finish_reason": self._reason(index), "stop_reason": None}
            if self._is_chat:
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice["text"] = text
            choices.append(choice)
        kind = "chat.completion" if self._is_chat else "text_completion"
        told = {"object": kind, "choices": choices, "usage": self._usage()}
        return self._head | told

    def beginning(self) -> Iterator[str]:
        """Yield the first events of a stream."""
        if self._is_chat:
            for index in range(len(self.answer.requests)):
                delta = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": delta, "finish_reason": None}
                yield self._chunk(json.dumps(choice))

    def part(self, index: int, first: int, end: int) -> str:
        """Return the tokens of a choice from `first` on, before `end`."""
        text = json.dumps(self._text(first, end))
        logprobs = reason = "null"
        if self.asked.num_logprobs is not None:
            logprobs = json.dumps(self._logprobs(first, end))
        if end == self.answer.requests[index].num_output_tokens:
            reason = json.dumps(self._reason(index))
        told = f'"delta": {{"content": {text}}}' if self._is_chat else f'"text": {text}'
        return self._chunk(
            f'{{"index": {index}, {told}, "logprobs": {logprobs}, '
            f'"finish_reason": {reason}}}'
        )

    def usage(self) -> str:
        """Return the event with nothing but the usage."""
        return f'{self._opening}], "usage": {json.dumps(self._usage())}}}\n\n'

    def _chunk(self, choice: str) -> str:
        if not self.asked.continuous_usage:
            return f"{self._opening}{choice}]}}\n\n"
        usage = json.dumps(self._usage())
        return f'{self._opening}{choice}], "usage": {usage}}}\n\n'

    def _text(self, first: int, end: int) -> str:
        text = self._filler.text(first, end)
        most = self.asked.most_characters
        if most is None:
            return text
        return text[: max(0, most - self._filler.num_characters(first))]

    def _logprobs(self, first: int, end: int) -> dict[str, Any] | None:
        num = self.asked.num_logprobs
        if num is None:
            return None
        filler = self._filler
        texts = [filler.text(index, index + 1) for index in range(first, end)]
        if self._is_chat:
            tokens = [_sure(text) for text in texts]
            more = [{"top_logprobs": [one] if num else []} for one in tokens]
            pairs = zip(tokens, more, strict=True)
            return {"content": [one | top for one, top in pairs], "refusal": None}
        return {
            "tokens": texts,
            "token_logprobs": [0.0] * len(texts),
            "top_logprobs": [{text: 0.0} for text in texts] if num else None,
            "text_offset": [*map(filler.num_characters, range(first, end))],
        }

    def _reason(self, index: int) -> str | None:
        """Return why a choice has ended, if the client knows all of it."""
        request = self.answer.requests[index]
        if not request.status.is_finished:
            return None
        if request.status is RequestStatus.FINISHED_ABORTED:
            return "abort"
        asked = self.asked
        is_whole = request.num_output_tokens == asked.num_output_tokens
        return "stop" if asked.ends_by_itself and is_whole else "length"

    def _usage(self) -> dict[str, Any]:
        requests = self.answer.requests
        per_prompt = len(requests) // self.answer.num_prompts
        num_prompt = sum(r.num_prompt_tokens for r in requests[::per_prompt])
        num_output = sum(r.num_output_tokens for r in requests)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }


def _sure(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": 0.0, "bytes": list(text.encode())}


def event(value: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def error_of(message: str, status: int) -> dict[str, Any]:
    """Return the body of an error."""
    kind = _KINDS.get(status, "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


_KINDS = {
    401: "Unauthorized",
    404: "NotFoundError",
    413: "BadRequestError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
