"""Where a prefiller and a decoder meet for one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sim.scheduler.request import Request


@dataclass(slots=True, eq=False)
class Room:
    """The state of a request that both engines share: SGLang's bootstrap room.

    Parameters
    ----------
    met_s
        When the decoder has reached its prefiller, in seconds.

    Attributes
    ----------
    is_allocated
        Whether the decoder has slots for the prompt.
    has_arrived
        Whether all of the prompt is there, and the first token.
    num_cached_tokens
        Of the prompt, as the prefiller found it.
    """

    met_s: float
    is_allocated: bool = False
    has_arrived: bool = False
    num_cached_tokens: int = 0


class Send(NamedTuple):
    """Pages of a prompt that a prefiller sends."""

    request: Request
    num_pages: int
    is_last: bool


def room_of(request: Request) -> Room:
    """Return the room that a request was given."""
    parameters: Any = request.kv_transfer_params
    room: Room = parameters["bootstrap_room"]
    return room
