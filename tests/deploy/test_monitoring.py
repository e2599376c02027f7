"""Alerts and dashboards, evaluated by a real Prometheus that scrapes real servers."""

import json
import re
import runpy
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
import yaml

import storesvc_client as store
from storesvc_proto.v1 import upload_service_pb2 as upload_api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.deploy.manifests import DEPLOY
from tests.repo.test_deploy_guide import step_with
from tests.support.certificates import Authority
from tests.support.scraped import SERVED, url_of
from tests.support.server_process import ServerProcess
from tests.support.sockets import free_port

RULES: Final = DEPLOY / "prometheus" / "rules.yaml"
DASHBOARD: Final = DEPLOY / "grafana" / "storesvc.json"
ALERTS: Final = DEPLOY.parent / "docs" / "alerts.md"

_CONFIG: Final = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: storesvc
    static_configs: [{{targets: [{targets}]}}]
"""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """Returns the expressions of the dashboard, as Grafana sends them."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        target["expr"]
        .replace("$job", ".*")
        .replace("$instance", ".*")
        .replace("$__rate_interval", "1m")
        for panel in panels
        for target in panel.get("targets", ())
    ]


class Prometheus:
    """A Prometheus that scrapes servers."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **arguments: str) -> Any:
        """Returns the data of a response of the API."""
        url = f"http://{self._address}/api/v1/{path}"
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{url}?{query}", timeout=20) as response:
            return json.load(response)["data"]

    def series(self, expression: str) -> list[Any]:
        """Returns the series of an expression."""
        found: list[Any] = self.get("query", query=expression)["result"]
        return found


def use(address: str, ca: Path) -> None:
    """Saves, restores, verifies, and fails, so that each metric has a value."""
    with store.connect(address, ca=ca) as client:
        run = client.run("prod/llama")
        for step in range(3):
            run.save(step, {"x": np.full(1 << 18, step, np.float32)}).result()
        run.restore(0)
        with pytest.raises(store.AlreadyExistsError):
            run.save(0, {"y": np.zeros(2)}).result()
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda _: run.verify(0), range(12)))


def fail(address: str, ca: Path) -> None:
    """Fails a commit."""
    name = f"namespaces/prod/runs/llama/uploads/{'0' * 32}"
    credentials = grpc.ssl_channel_credentials(ca.read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        stub = UploadServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.CommitUpload(upload_api.CommitUploadRequest(name=name), timeout=20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with all that has metrics."""
    folder = tmp_path_factory.mktemp("server")
    authority = Authority(folder)
    pair = authority.issue("server", "localhost", "127.0.0.1")
    process = ServerProcess(
        folder / "store",
        folder,
        *("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)),
        *("--audit-log", str(folder / "audit"), "--gc-interval", "1s"),
        *(*SERVED, "--metrics-run", "prod/llama"),
    )
    process.start()
    use(process.address, authority.certificate)
    fail(process.address, authority.certificate)
    yield process
    process.stop()


@pytest.fixture(scope="module")
def prometheus(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus, after some scrapes of a server that was used."""
    folder = tmp_path_factory.mktemp("prometheus")
    target = urllib.parse.urlsplit(url_of(server)).netloc
    config = folder / "prometheus.yaml"
    config.write_text(_CONFIG.format(rules=RULES, targets=f'"{target}"'))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={config}"),
                *(f"--storage.tsdb.path={folder}/data", "--log.level=warn"),
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    found = Prometheus(address)
    try:
        deadline = time.monotonic() + 60
        while not _has_scraped(found):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield found
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _has_scraped(prometheus: Prometheus) -> bool:
    with suppress(OSError):
        count = prometheus.series('count_over_time(up{job="storesvc"}[5m])')
        return bool(count) and float(count[0]["value"][1]) >= 4
    return False


def test_the_rules_pass_their_tests_as_the_guide_shows() -> None:
    step = step_with("promtool")
    done = subprocess.run(
        ["sh", "-euc", "\n".join(step.lines)],
        cwd=DEPLOY.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (0, step.output.strip()) == (done.returncode, done.stdout.strip())


def test_each_alert_has_a_test_and_a_runbook() -> None:
    tested = set(
        re.findall(r"alertname: (\w+)", (RULES.parent / "rules-test.yaml").read_text())
    )
    headings = re.findall(r"^## (\w+)$", ALERTS.read_text(), re.MULTILINE)
    names = [rule["alert"] for rule in rules()]

    assert sorted(tested) == sorted(names)
    assert headings == names
    for rule in rules():
        place = f"docs/alerts.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == place


def test_the_dashboard_is_the_output_of_its_script() -> None:
    script = runpy.run_path(str(DASHBOARD.with_name("dashboard.py")))

    assert script["text"]() == DASHBOARD.read_text()


def test_panels_have_a_title_a_text_and_a_place_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"].endswith(".")
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("expression", expressions())
def test_each_expression_of_the_dashboard_has_series(
    prometheus: Prometheus, expression: str
) -> None:
    assert prometheus.series(expression), expression


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_each_side_of_an_alert_has_series(
    prometheus: Prometheus, rule: dict[str, Any]
) -> None:
    # without the comparisons that make it an alert
    value = re.split(r"\s(?:>|<|==)\s", rule["expr"])[0]
    assert value != rule["expr"]
    # Series of failures that this server does not have.
    value = value.replace('"INTERNAL"', '"OK"').replace('"error"', '"ok"')
    assert prometheus.series(value), value


def test_no_alert_fires_for_a_healthy_server(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    states = {
        rule["name"]: (rule["state"], rule["health"])
        for group in groups
        for rule in group["rules"]
    }
    # Expected: the certificate of the tests expires tomorrow, and one commit of three
    # has failed.
    assert {name for name, (state, _) in states.items() if state == "firing"} <= {
        "StoresvcCertificateExpires"
    }
    assert {health for _, health in states.values()} == {"ok"}
