"""What a client asks for: bodies of completions and chats, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.serving.text import stopped_at

if TYPE_CHECKING:
    from collections.abc import Callable


class BadRequestError(ValueError):
    """A body that cannot be served; the message is for its client."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its client put it.

    Parameters
    ----------
    model
        Name of the model, or None.
    text
        The prompt; of a chat, its messages with their roles.
    num_output_tokens
        Length of the answer, if no limit is met before.
    limit
        ``max_tokens``, or None.
    most_characters
        Where a stop string begins, or None.
    ends_by_itself
        Whether the answer has an end of its own, as without ``ignore_eos``.
    stream, include_usage
        How it is sent.
    """

    model: str | None
    text: str
    num_output_tokens: int
    limit: int | None
    most_characters: int | None
    ends_by_itself: bool
    stream: bool
    include_usage: bool


def asked_of(body: bytes, usual_length: Callable[[], int], is_chat: bool) -> Asked:
    """Return what a body asks for.

    Raises
    ------
    BadRequestError
        If it is not one of the API's, or asks for what is not served.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequestError("the body must be a JSON object")
    if fields.get("n") not in (None, 1):
        raise BadRequestError("n must be 1; send several requests")
    limit = _limit(fields)
    ignores_end = _flag(fields, "ignore_eos")
    length = usual_length()
    if ignores_end and limit is not None:
        length = limit
    stop = fields.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and all(isinstance(s, str) and s for s in stop)):
        raise BadRequestError("stop must be a string, or a list of strings")
    most = length if limit is None else min(length, limit)
    stopped = stopped_at(most, stop)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object")
    return Asked(
        model=fields.get("model"),
        text=_chat(fields) if is_chat else _prompt(fields),
        num_output_tokens=length if stopped is None else stopped[0],
        limit=limit,
        most_characters=None if stopped is None else stopped[1],
        ends_by_itself=not ignores_end or stopped is not None,
        stream=_flag(fields, "stream"),
        include_usage=_flag(options, "include_usage"),
    )


def _limit(fields: dict[str, Any]) -> int | None:
    limit = fields.get("max_completion_tokens")
    limit = fields.get("max_tokens") if limit is None else limit
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {limit!r}")
    return limit


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not (value is None or isinstance(value, bool)):
        raise BadRequestError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def _prompt(fields: dict[str, Any]) -> str:
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequestError("prompt must be a string; lists are not served")
    return prompt


def _chat(fields: dict[str, Any]) -> str:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message")
    return "".join(_message(each) for each in messages)


def _message(message: object) -> str:
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        raise BadRequestError("a message must have a role and a content")
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(
            str(part.get("text", "")) for part in content if isinstance(part, dict)
        )
    if not isinstance(content, str):
        raise BadRequestError("the content of a message must be text")
    return f"<|{message['role']}|>{content}"
