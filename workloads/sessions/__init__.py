"""Sessions: conversations and agents, one kind a file."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from workloads.sessions.agent import Agent
from workloads.sessions.chat import Chat
from workloads.sessions.workload import SessionKind, SessionWorkload

if TYPE_CHECKING:
    from collections.abc import Mapping

SESSIONS: Mapping[str, type[SessionKind]] = MappingProxyType(
    {"agent": Agent, "chat": Chat}
)
"""Kinds of sessions by the ``kind`` of a configuration."""

__all__ = ["SESSIONS", "Agent", "Chat", "SessionKind", "SessionWorkload"]
