"""Makes the golden profile: ``python -m tests.sim.costs.golden.make_profile``.

Times are made up, of a formula. The file stays as it is when the format moves on: a
new major version adds a migration and a file of its own.
"""

from pathlib import Path

from sim.costs.measured.profile import canonical_json, profile_id

FILE = Path(__file__).parent / "kvprofile_1.json"


def golden() -> dict[str, object]:
    """Return the profile as plain data."""
    contexts = [1024, 2048, 4096, 8192]
    times = [1e-5 + 64 * context * 4096 / 4e12 for context in contexts]
    body = {
        "format": "kvprofile/1",
        "kind": "imported",
        "units": {"size": "byte", "time": "s"},
        "provenance": {
            "date": "2026-11-21",
            "tool": "kvsim 0.1.0",
            "source": {"name": "made up, for a test"},
            "device": {
                "name": "h200_sxm",
                "bandwidth_bytes_per_s": 4.8e12,
                "flops_per_s": 9.89e14,
                "flops_8bit_per_s": 1.979e15,
                "host_bytes_per_s": 6.4e10,
                "link_bytes_per_s": 4.5e11,
                "num_sms": 132,
                "l2_bytes": 52428800,
            },
        },
        "ops": [
            {
                "operation": "decode_attention",
                "variant": "split_kv",
                "dtype": "bfloat16",
                "constants": {
                    "num_heads": 32,
                    "num_kv_heads": 8,
                    "head_dim": 128,
                    "kv_itemsize": 2,
                    "window": 0,
                },
                "axes": {"batch": [64] * 4, "context": contexts},
                "quantiles": {"p50_s": [float(f"{time:.9g}") for time in times]},
                "n": [20] * 4,
            }
        ],
        "interference": {"points": []},
        "steps": [{"shape": {"num_decodes": 64}, "p50_s": 0.009}],
        "fit": {"host": {"step_overhead_s": 0.001, "request_overhead_s": 5e-6}},
        "of a later minor version": {"kept": True},
    }
    return body | {"id": profile_id(body)}


if __name__ == "__main__":
    FILE.write_text(canonical_json(golden()))
