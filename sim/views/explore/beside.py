"""The page beside other work: served by a thread, shown in a notebook."""

from __future__ import annotations

from html import escape
from threading import Thread
from typing import TYPE_CHECKING, Final

from sim.views.explore.base import Base
from sim.views.explore.server import Page
from sim.views.explore.traffic import bundled_traffic, traffic_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sim.config.tables import RunConfig

_NOTEBOOKS: Final = "http://127.0.0.1:* http://localhost:*"
"""Pages that may show ours in a frame: those of notebook servers on this machine."""

_PATIENCE_S: Final = 5.0


class Explored:
    """A page that is served while a notebook or script goes on.

    Parameters
    ----------
    config
        Where it begins.
    port
        Where it listens on 127.0.0.1; 0 for any free port.
    traffic
        Files whose traffic can be chosen.
    """

    def __init__(
        self, config: RunConfig, port: int = 0, traffic: Sequence[Path] = ()
    ) -> None:
        traffics = (*bundled_traffic(), *traffic_of(traffic))
        base = Base("configuration", config.to_data(), traffics=traffics)
        self._page = Page(base, port, ancestors=_NOTEBOOKS)
        self._thread = Thread(target=self._page.serve, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return self._page.url

    def stop(self) -> None:
        """End the server and its runs."""
        self._page.stop()
        self._thread.join(_PATIENCE_S)

    def __repr__(self) -> str:
        return f"<Explored: {self.url}>"

    def _repr_html_(self) -> str:
        url = escape(self.url)
        return (
            f'<p><a href="{url}" target="_blank" rel="noopener">{url}</a></p>'
            f'<iframe src="{url}" width="100%" height="900" title="kvsim explore" '
            f'style="border: 1px solid #888"></iframe>'
        )
