"""``kvsim serve``: simulated engines behind OpenAI-compatible servers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sim.cli import console, options

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.serving.server import ServedEngine as Engine


def serve(
    config: Path,
    /,
    *,
    set_: options.Settings = None,
    host: str = "127.0.0.1",
    port: options.Whole = 8000,
    replicas: options.Whole = 1,
    speed: float = 1.0,
    tokenizer: Path | None = None,
    api_key: str | None = None,
    kv_events_port: options.Whole | None = None,
    admin_port: options.Whole | None = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
) -> int:
    """Put simulated engines behind OpenAI-compatible servers, in real time.

    Ctrl-C ends them and writes the results of a run, an engine a folder.

    Parameters
    ----------
    config
        YAML configuration; its workload says how long answers are that no client
        limits. Each engine of a fleet has a port; the router is yours.
    host
        Where to listen; anything but the loopback is open to all who reach it, unless
        --api-key is given.
    port
        Where the first engine listens, the others behind it; 0 for any free ports.
    replicas
        Engines, each on a port.
    speed
        Simulated seconds in a real one.
    tokenizer
        A tokenizer.json, or its folder. Without it four characters are a token.
    api_key
        What clients must send as a bearer token.
    kv_events_port
        Where the first engine of v1 publishes what its KV cache stores and removes,
        over ZMQ as vLLM does, the others behind it; by default nowhere.
    admin_port
        Where faults are ordered, on the loopback; by default nowhere.
    out
        Folder for the results. Default: results/NAME-OF-CONFIG-served.
    """
    from sim.config.tables import load_config
    from sim.errors import ConfigError

    try:
        from sim.serving.joined import join
        from sim.serving.served import Served
        from sim.serving.server import Port, ServedEngine, engines_of
        from sim.serving.text import CharacterTokens, FileTokens
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kvsim serve needs {error.name}; pip install 'kvsim[serve]'"
        ) from error
    run_config = load_config(config, set_ or ())
    configs = engines_of(run_config, replicas)
    directory = out or Path("results") / f"{config.stem}-served"
    tokens = CharacterTokens() if tokenizer is None else FileTokens(tokenizer)
    _allow_connections()
    with ExitStack() as stack:
        engines: list[Engine] = []
        endpoints: list[str] = []
        for place, each in enumerate(configs):
            events = None
            if kv_events_port is not None:
                from sim.serving.kv_events import Publisher

                events = Publisher(host, kv_events_port and kv_events_port + place)
                stack.callback(events.close)
                endpoints.append(events.endpoint)
            engine = ServedEngine(
                each,
                kv_events=events,
                host=host,
                port=port + place if port else 0,
                tokens=tokens,
                speed=speed,
                api_key=api_key,
                directory=_directory(directory, place, len(configs)),
                overwrite=overwrite,
            )
            stack.callback(engine.close)
            engines.append(engine)
            engine.on_late = _late(engine)
        admin = None if admin_port is None else Port("127.0.0.1", admin_port)
        served = Served(engines, admin)
        print(*(each.port.url for each in engines), sep="\n")
        if endpoints:
            print("KV events:", *endpoints)
        if admin is not None:
            print(f"faults are ordered at {admin.url}/engines")
        print("Ctrl-C ends it.", flush=True)
        if host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
            console.note(f"{host} is open to all who reach it; give --api-key")
        if run_config.fleet is not None:
            console.note("the fleet's router and events are left out: clients choose")
        served.serve()
    if run_config.fleet is not None:
        folders = [folder for each in engines for folder in each.folders]
        join(run_config, directory, folders)
    drift_s = max(each.engine.drift_s for each in engines)
    console.note(f"events came at most {drift_s * 1e3:.1f} ms late")
    console.note(f"results are in '{directory}'")
    return 0


def _directory(directory: Path, place: int, num_engines: int) -> Path:
    return directory if num_engines == 1 else directory / f"engine-{place}"


def _late(engine: Engine) -> Callable[[float], None]:
    def say(late_s: float) -> None:
        console.note(
            f"{engine.port.url} cannot keep up: events come up to {late_s:.2f} s late; "
            "send less, or take a smaller --speed"
        )

    return say


def _allow_connections() -> None:
    """Let the process have as many open connections as the system allows."""
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
