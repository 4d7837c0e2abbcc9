"""The parts of a release and a deployment: parsed here, for no image is built and nothing
published."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_dflash.tools.inspect import launch_command
from tests.commands import ROOT
from tests.serving.metrics.test_dashboard import of_ours

DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
PROMTOOL = shutil.which("promtool")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_a_tag_publishes_a_tested_wheel_without_a_password() -> None:
    file = ROOT / ".github/workflows/release.yml"
    flow, text = read(file), file.read_text()
    # YAML reads `on` as true.
    assert flow[True]["push"] == {"tags": ["v*"]}
    jobs = flow["jobs"]
    assert (jobs["test"]["needs"], jobs["publish"]["needs"]) == ("build", "test")
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text and "password" not in text
    # The wheel is tested away from the checkout.
    uses = [step.get("uses", "") for step in jobs["test"]["steps"]]
    assert not any("checkout" in name for name in uses)
    assert any("pip install dist/*.whl" in step.get("run", "") for step in jobs["test"]["steps"])


def test_the_changelog_begins_with_this_version() -> None:
    """It spoke of breaking changes against one that was never published."""
    titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert titles[0].split()[0] == VERSION
    if len(titles) == 1:
        assert "breaking" not in (ROOT / "CHANGELOG.md").read_text()


def test_the_image_is_that_of_the_pinned_sglang() -> None:
    (pinned,) = [
        one.split("==")[1] for one in PROJECT["dependencies"] if one.startswith("sglang==")
    ]
    text = (DEPLOY / "Dockerfile").read_text()
    assert f"sglang:v{pinned}\n" in text and f"== '{pinned}'" in text
    assert "Not built here" in text and "not built" in (DEPLOY / "compose.yaml").read_text()


def test_compose_starts_what_is_here() -> None:
    compose = read(DEPLOY / "compose.yaml")
    services = compose["services"]
    assert services["sglang"]["image"] == f"sglang-dflash:{VERSION}"
    assert (
        DEPLOY / services["sglang"]["build"]["context"] / services["sglang"]["build"]["dockerfile"]
    ).is_file()
    mounts = [one for service in services.values() for one in service["volumes"]]
    for mount in mounts:
        source = mount.partition(":")[0]
        assert source in compose["volumes"] or (DEPLOY / source).is_file()
    words = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in services["sglang"]["command"]]
    launch = launch_command.read(words)
    assert len(launch.words) == 2 and launch.builtin is None and "--enable-metrics" in words
    # Inline files of Grafana.
    sources, boards = (yaml.safe_load(one["content"]) for one in compose["configs"].values())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    folder = boards["providers"][0]["options"]["path"]
    assert any(f":{folder}/" in mount for mount in services["grafana"]["volumes"])


def test_systemd_starts_a_server_that_is_accepted() -> None:
    unit = (DEPLOY / "sglang-dflash.service").read_text().replace("\\\n", "")
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    launch = launch_command.read(shlex.split(command))
    assert len(launch.words) == 2 and launch.builtin is None and "--enable-metrics" in command


def test_prometheus_scrapes_the_server_and_reads_the_rules() -> None:
    config = read(DEPLOY / "prometheus.yml")
    assert all((DEPLOY / name).is_file() for name in config["rule_files"])
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["sglang:30000"]}]
    assert f'up{{job="{job["job_name"]}"}}' in (DEPLOY / "alerts.yml").read_text()


def test_the_alerts_are_those_of_the_page_and_of_series_that_exist() -> None:
    (group,) = read(DEPLOY / "alerts.yml")["groups"]
    rules = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    page = (ROOT / "docs/metrics.md").read_text().partition("What to alert on")[2]
    assert dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, re.M)) == rules
    for expression in rules.values():
        (series,) = re.findall(r"\b(?:sglang\w+|up)\b(?!\")", expression)
        assert series in of_ours() | {"up"}
    assert all(rule["annotations"]["summary"] for rule in group["rules"])


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian's package prometheus)")
def test_the_alerts_fire_when_they_should() -> None:
    done = subprocess.run(
        [str(PROMTOOL), "test", "rules", ROOT / "tests/alerts.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checked = subprocess.run(
        [str(PROMTOOL), "check", "config", "prometheus.yml"],
        cwd=DEPLOY, capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
