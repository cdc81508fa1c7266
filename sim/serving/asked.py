"""Requests of clients: bodies of completions and chats, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.serving.filler import Filler

MAX_SAMPLES: Final = 128
"""Most choices of one body: prompts times samples of each."""
_FAR: Final = 1000  # tokens after which all has been said
_UNSERVED: Final = (
    *("echo", "suffix", "use_beam_search", "prompt_logprobs", "tools", "functions"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice"),
)
_MOST_STOPS: Final = 64
_MOST_STOP_CHARACTERS: Final = 1000
_MOST: Final = 2**53
"""Largest whole number that every reader of JSON takes as it is."""


class BadRequestError(ValueError):
    """A body that cannot be served; the message is for its client."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as its client put it.

    Parameters
    ----------
    model
        Name of the model, or None.
    prompts
        Texts, or lists of token ids; of a chat, its messages with their roles.
    num_samples
        Answers to each prompt.
    num_output_tokens
        Length of an answer, if no limit is met before.
    limit
        ``max_tokens``, or None.
    most_characters
        Where a stop string begins, or None.
    ends_by_itself
        Whether the answer has an end of its own, as without ``ignore_eos``.
    num_logprobs
        Alternatives of each token that are told; None for no log-probabilities.
    priority
        Smaller is more urgent.
    is_chat, stream, include_usage, continuous_usage
        How it is sent.
    """

    model: str | None
    prompts: Sequence[str | list[int]]
    num_samples: int
    num_output_tokens: int
    limit: int | None
    most_characters: int | None
    ends_by_itself: bool
    num_logprobs: int | None
    priority: int
    is_chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool


def asked_of(
    body: bytes, usual_length: Callable[[], int], filler: Filler, *, is_chat: bool
) -> Asked:
    """Return the request of a body; an answer is of `filler`.

    Raises
    ------
    BadRequestError
        If it is not one of the API's, or asks for what is not served.
    """
    fields = fields_of(body)
    for name in _UNSERVED:
        if fields.get(name):
            raise BadRequestError(f"{name} is not served; leave it out")
    _check_format(fields)
    limit = _limit(fields)
    ignores_end = _flag(fields, "ignore_eos")
    length = usual_length()
    if ignores_end and limit is not None:
        length = limit
    least = _whole(fields, "min_tokens", 0, low=0)
    if limit is not None and least > limit:
        raise BadRequestError(
            f"min_tokens must be at most max_tokens, {limit}, got {least}"
        )
    length = max(length, least)
    stop = _stop(fields)
    most = length if limit is None else min(length, limit)
    stopped = filler.stopped_at(min(most, _FAR + _MOST_STOP_CHARACTERS), stop)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequestError("stream_options must be an object")
    prompts = [chat_text(fields)] if is_chat else _prompts(fields)
    num_samples = _whole(fields, "n", 1, low=1)
    if len(prompts) * num_samples > MAX_SAMPLES:
        raise BadRequestError(f"prompts times n must be at most {MAX_SAMPLES}")
    model = fields.get("model")
    if not (model is None or isinstance(model, str)):
        raise BadRequestError("model must be a string")
    return Asked(
        model=model,
        prompts=prompts,
        num_samples=num_samples,
        num_output_tokens=length if stopped is None else stopped[0],
        limit=limit,
        most_characters=None if stopped is None else stopped[1],
        ends_by_itself=not ignores_end or stopped is not None,
        num_logprobs=_logprobs(fields, is_chat),
        priority=_whole(fields, "priority", 0, low=-(10**9)),
        is_chat=is_chat,
        stream=_flag(fields, "stream"),
        include_usage=_flag(options, "include_usage"),
        continuous_usage=_flag(options, "continuous_usage_stats"),
    )


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON body."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequestError("the body must be a JSON object")
    return fields


def _whole(fields: dict[str, Any], name: str, default: int, *, low: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise BadRequestError(f"{name} must be at least {low}, got {value!r:.80}")
    if value > _MOST:
        raise BadRequestError(f"{name} must be at most {_MOST}")
    return value


def _stop(fields: dict[str, Any]) -> list[str]:
    stop = fields.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and all(isinstance(s, str) and s for s in stop)):
        raise BadRequestError("stop must be a string, or a list of strings")
    if len(stop) > _MOST_STOPS or any(len(s) > _MOST_STOP_CHARACTERS for s in stop):
        raise BadRequestError(
            f"stop takes at most {_MOST_STOPS} strings of {_MOST_STOP_CHARACTERS} "
            "characters"
        )
    return stop


def _check_format(fields: dict[str, Any]) -> None:
    """Refuse a format that an answer of filler does not have."""
    told = fields.get("response_format")
    kind = told.get("type") if isinstance(told, dict) else told
    if kind not in (None, "text"):
        raise BadRequestError("response_format is not served but as text; leave it out")


def _limit(fields: dict[str, Any]) -> int | None:
    name = "max_completion_tokens"
    name = "max_tokens" if fields.get(name) is None else name
    return _whole(fields, name, 0, low=1) or None


def _logprobs(fields: dict[str, Any], is_chat: bool) -> int | None:
    if not is_chat:
        value = fields.get("logprobs")
        return None if value is None else _whole(fields, "logprobs", 0, low=0)
    if not _flag(fields, "logprobs"):
        return None
    return _whole(fields, "top_logprobs", 0, low=0)


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not (value is None or isinstance(value, bool)):
        raise BadRequestError(f"{name} must be true or false, got {value!r:.80}")
    return bool(value)


def _prompts(fields: dict[str, Any]) -> Sequence[str | list[int]]:
    prompt = fields.get("prompt")
    listed = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if (
        isinstance(listed, list)
        and listed
        and all(isinstance(each, str) or _is_ids(each) for each in listed)
    ):
        return listed
    raise BadRequestError(
        "prompt must be a string, a list of token ids, or a list of either"
    )


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(each) is int and 0 <= each < 1 << 62 for each in value)
    )


def chat_text(fields: dict[str, Any]) -> str:
    """Return the text of a chat: its messages, each after its role."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message")
    return "".join(map(_message, messages)) + "<|assistant|>"


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
