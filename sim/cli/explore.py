"""``kvsim explore``: a live page, where a change shows its curves at once."""

from __future__ import annotations

from pathlib import Path

from sim.cli import options


def explore(
    start: Path | None = None,
    /,
    *,
    set_: options.Settings = None,
    traffic: options.Several = None,
    port: options.Whole = 0,
    browser: bool = True,
) -> int:
    """Open a live page: move a setting, and see what the KV cache and latencies do.

    The page is served to this machine alone, until Ctrl-C.

    Parameters
    ----------
    start
        What to begin with: a configuration, the folder of a run's results, or a plan.
        Default: the demo's hour of chat traffic.
    traffic
        A trace, or a configuration for its workload, that the page can be given in
        place of its traffic; may be given several times.
    port
        Where to listen on 127.0.0.1. Default: any free port.
    browser
        Open the page in a browser.
    """
    from sim.errors import ConfigError
    from sim.views.explore.base import base_of

    base = base_of(start, set_ or (), [Path(each) for each in traffic or ()])
    try:
        from sim.views.explore.server import Page
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kvsim explore needs {error.name}; pip install 'kvsim[explore]'"
        ) from error
    page = Page(base, port)
    print(f"{page.url}\nCtrl-C ends it.", flush=True)
    if browser:
        import webbrowser

        webbrowser.open(page.url)
    page.serve()
    return 0
