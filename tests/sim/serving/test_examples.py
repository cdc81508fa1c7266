"""The files of `examples/serving` fit each other, and what a server tells."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import yaml

from sim.cli.main import build_app
from tests.shared import ROOT
from tests.sim.serving.test_metrics import RELEASE_033, listed

FOLDER = ROOT / "examples/serving"


def loaded(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def test_the_compose_file_starts_what_prometheus_scrapes_and_grafana_shows() -> None:
    compose = loaded("compose.yaml")
    services = compose["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (FOLDER / source).exists(), volume
    command = shlex.split(services["kvsim"]["command"])[-1].split("exec ")[1]
    _, bound, _ = build_app().parse_args(shlex.split(command)[1:])
    told = bound.arguments
    (scraped,) = loaded("prometheus.yml")["scrape_configs"]
    (static,) = scraped["static_configs"]
    ports = range(told["port"], told["port"] + told["replicas"])
    assert static["targets"] == [f"kvsim:{port}" for port in ports]
    for config in services["grafana"]["configs"]:
        assert yaml.safe_load(compose["configs"][config["source"]]["content"])
    (source,) = yaml.safe_load(compose["configs"]["source"]["content"])["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert json.loads((FOLDER / "grafana.json").read_text())["panels"]


def test_the_autoscaler_reads_a_metric_that_is_served() -> None:
    text = (FOLDER / "hpa.yaml").read_text()
    (query,) = re.findall(r"seriesQuery: '(vllm:\w+)", text)
    assert listed(RELEASE_033, "vllm")[query] == "gauge"
    (metric,) = loaded("hpa.yaml")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == query.replace(":", "_")
