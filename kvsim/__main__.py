"""``python -m kvsim`` is the command ``kvsim``."""

from __future__ import annotations

from sim.cli.main import main

if __name__ == "__main__":
    main()
