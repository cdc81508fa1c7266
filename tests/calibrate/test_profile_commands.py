"""``kvsim profile``: statuses, what is printed, and what a mistake is told."""

import json
import subprocess
import sys

import numpy as np
import pytest

from calibrate.cli.output import diff_profiles, tell
from calibrate.writing import build_profile, op_table, write_profile
from sim.cli.main import run
from tests.calibrate.synthetic import DEVICE, decode_columns, decode_seconds, grid

PROVENANCE = {
    "date": "2026-01-01",
    "device": DEVICE.to_json(),
    "source": {"name": "synthetic"},
}


def synthetic(scale=1.0, first=1):
    table = decode_columns(*grid([64, 128, 256, 512], [first, 2048, 4096, 8192, 32768]))
    axes = {
        key: table[key] for key in ("num_heads", "num_kv_heads", "batch", "context")
    }
    constants = {"head_dim": 128, "kv_itemsize": 2, "window": 0}
    ripple = 1.0 + 0.02 * np.sin(np.arange(20.0))
    seconds = decode_seconds(table) * ripple * scale
    op = op_table("decode_attention", "bfloat16", axes, seconds, constants=constants)
    return build_profile("imported", PROVENANCE, [op])


@pytest.fixture
def file(tmp_path):
    write_profile(synthetic(), tmp_path / "p.json")
    return tmp_path / "p.json"


def test_show_tells_what_a_profile_holds(file, capsys):
    assert run(["profile", "show", str(file)]) == 0
    out = capsys.readouterr().out
    assert "decode_attention (default, bfloat16;" in out
    assert "20 points" in out
    assert run(["profile", "show", str(file), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ops"][0]["axes"]["context"] == [1, 32768]
    assert run(["profile", "show", str(file), "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == content["id"]


def test_a_launch_time_of_its_own_keeps_no_point_from_being_shared():
    def with_launch(launch_s):
        table = op_table(
            "decode_attention", "bfloat16", {"batch": [1, 2]}, [1e-5, 2e-5],
            constants={"head_dim": 128, "launch_s": launch_s},
        )  # fmt: skip
        return build_profile("imported", PROVENANCE, [table])

    (row,) = diff_profiles(with_launch(1e-5), with_launch(2e-5)).values()
    assert (row.num_shared, row.median_ratio) == (2, 1.0)


def test_validate_says_so_by_its_status(file, tmp_path, capsys):
    assert run(["profile", "validate", str(file)]) == 0
    assert "p.json is valid" in capsys.readouterr().out
    write_profile(synthetic(scale=0.5), tmp_path / "fast.json")
    assert run(["profile", "validate", str(tmp_path / "fast.json")]) == 2
    assert "faster than the device can be" in capsys.readouterr().err
    assert run(["profile", "validate", str(tmp_path / "fast.json"), "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)
    assert problem["rule"] == "floor"


def test_an_edited_file_is_refused_in_one_line(file, capsys):
    file.write_text(file.read_text().replace("32768", "32769"))
    for command in ("show", "validate", "fit"):
        assert run(["profile", command, str(file)]) == 2
        err = capsys.readouterr().err.strip()
        assert "was changed after it was written" in err
        assert "\n" not in err


def test_fit_prints_errors_in_percent(file, capsys):
    assert run(["profile", "fit", str(file), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert set(content) == {"decode_attention"}
    row = content["decode_attention"]
    wanted = {"n", "mape_inside", "p90_inside", "mape_beyond", "p90_beyond", "bias"}
    assert wanted <= set(row)
    assert row["n"] == 20
    assert 0 <= row["mape_inside"] < 10
    assert 0 < row["mape_beyond"] < 20
    assert run(["profile", "fit", str(file)]) == 0
    assert "mape_beyond" in capsys.readouterr().out
    assert run(["profile", "fit", str(file), "--seeds", "0"]) == 2
    assert "--seeds must be 1 or more" in capsys.readouterr().err


def test_diff_compares_shared_points(file, tmp_path, capsys):
    other = tmp_path / "other.json"
    write_profile(synthetic(scale=1.2, first=2), other)
    assert run(["profile", "diff", str(file), str(file)]) == 0
    assert "20 points shared of 20 and 20, right over left 1.000" in (
        capsys.readouterr().out
    )
    assert run(["profile", "diff", str(file), str(other), "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out).values()
    assert row["num_shared"] == 16
    assert row["median_ratio"] == pytest.approx(1.2)
    assert row["differs"] is True
    nothing = diff_profiles(synthetic(), build_profile("imported", PROVENANCE, []))
    assert [d.num_shared for d in nothing.values()] == [0]


def test_a_profile_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("disk full")

    path = tmp_path / "p.json"
    path.write_text("old")
    monkeypatch.setattr("pathlib.Path.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_profile(synthetic(), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_import_of_nothing_says_what_to_do(tmp_path, capsys):
    out = tmp_path / "p.json"
    arguments = ["--system", "h200_sxm", "--path", str(tmp_path), "--out", str(out)]
    assert run(["profile", "import", "aiconfigurator", *arguments]) == 2
    assert "no tables of 'h200_sxm'" in capsys.readouterr().err
    assert not out.exists()


def test_help_loads_nothing_heavy():
    code = (
        "import sys; import calibrate.cli.profile; heavy = {'numpy', 'pandas',"
        " 'scipy', 'sklearn', 'torch', 'pyarrow', 'simpy'} & set(sys.modules);"
        " sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


def test_times_are_written_to_nine_digits():
    op = op_table("gemm", "bfloat16", {"m": np.array([1])}, [1 / 3e5])
    assert op["quantiles"]["p50_s"] == [3.33333333e-06]
    assert type(op["axes"]["m"][0]) is int


def test_a_file_that_is_there_is_replaced_only_when_asked(file, tmp_path, capsys):
    out = tmp_path / "there.json"
    out.write_text("precious")
    model = ["--model", "meta-llama/Llama-3.1-8B"]
    nowhere = ["--path", str(tmp_path / "nowhere"), "--out", str(out)]
    for command in (
        ["import", "aiconfigurator", "--system", "h200_sxm", *nowhere],
        ["import", "llmservingsim", *nowhere],
        ["import", "vidur", *nowhere],
        ["fit", str(file), *model, "--out", str(out)],
    ):
        assert run(["profile", *command]) == 2
        err = capsys.readouterr().err
        assert "there.json' exists: give --overwrite" in err
        # with it the next mistake is told
        assert run(["profile", *command, "--overwrite"]) == 2
        assert "exists" not in capsys.readouterr().err
    assert out.read_text() == "precious"


def test_what_cannot_be_written_is_said_before_the_work(tmp_path, capsys):
    command = ["profile", "import", "vidur", "--path", str(tmp_path), "--out"]
    assert run([*command, str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run([*command, str(tmp_path / "file" / "p.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_an_unknown_model_is_told_before_the_tables_are_read(tmp_path, capsys):
    command = ["profile", "import", "aiconfigurator", "--system", "h200_sxm"]
    command += ["--path", str(tmp_path / "nowhere"), "--out", str(tmp_path / "p.json")]
    assert run([*command, "--model", "nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err


def test_a_terminal_is_told_what_is_being_done(monkeypatch, capsys):
    tell("fitting 7 points", quiet=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    tell("fitting 7 points", quiet=True)
    tell("fitting 9 points", quiet=False)
    assert capsys.readouterr().err == "kvsim: fitting 9 points ...\n"
