"""``kvsim serve``: the simulated engine behind an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path

from sim.cli import console, options


def serve(
    config: Path,
    /,
    *,
    set_: options.Settings = None,
    host: str = "127.0.0.1",
    port: options.Whole = 8000,
    speed: float = 1.0,
    api_key: str | None = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
) -> int:
    """Put the simulated engine behind an OpenAI-compatible server, in real time.

    Ctrl-C ends it and writes the results of a run.

    Parameters
    ----------
    config
        YAML configuration; its workload says how long answers are that no client
        limits.
    host
        Where to listen; anything but the loopback is open to all who reach it, unless
        --api-key is given.
    port
        Where to listen; 0 for any free port.
    speed
        Simulated seconds in a real one.
    api_key
        What clients must send as a bearer token.
    out
        Folder for the results. Default: results/NAME-OF-CONFIG-served.
    """
    from sim.config.tables import load_config
    from sim.errors import ConfigError
    from sim.results.output import output_directory
    from sim.results.parquet import StepsFile
    from sim.serving.live import LiveEngine

    try:
        from sim.serving.server import Served
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kvsim serve needs {error.name}; pip install 'kvsim[serve]'"
        ) from error
    run_config = load_config(config, set_ or ())
    directory = out or Path("results") / f"{config.stem}-served"
    with output_directory(directory, overwrite=overwrite) as folder:
        engine = LiveEngine(run_config, speed=speed)
        run = engine.run
        with StepsFile(folder / "steps.parquet", run.recorder.step_kinds) as steps:
            run.recorder.sink = steps
            model = run_config.engine.model
            served = Served(engine, model, host=host, port=port, api_key=api_key)
            print(f"{served.url}\nCtrl-C ends it.", flush=True)
            if host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
                console.note(f"{host} is open to all who reach it; give --api-key")
            served.serve()
            results = engine.finish()
            results.write(folder)
    console.note(f"events came at most {engine.drift_s * 1e3:.1f} ms late")
    console.note(f"results are in '{directory}'")
    return 0
