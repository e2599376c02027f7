"""Reads the metrics of a server process, as Prometheus does."""

import re
import urllib.request
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server_process import ServerProcess

SERVED: Final = ("--metrics-port", "0")
"""Arguments of a server with metrics."""


class Samples:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        """Parses a scrape."""
        self.values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """Returns the value of a sample; 0 if there is none."""
        return self.values.get((name, frozenset(labels.items())), 0.0)

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples of a name that have these labels."""
        wanted = labels.items()
        return sum(
            value
            for (found, those), value in self.values.items()
            if found == name and wanted <= dict(those).items()
        )


def url_of(server: ServerProcess) -> str:
    """Returns the URL of the metrics of a server."""
    found = re.findall(r"metrics at (http://[\w.:]+)", server.log)
    return f"{found[-1]}/metrics"


def scrape(server: ServerProcess) -> Samples:
    """Returns the metrics of a server."""
    return scraped(url_of(server))


def scraped(url: str) -> Samples:
    """Returns the metrics at a URL."""
    with urllib.request.urlopen(url, timeout=20) as response:
        return Samples(response.read().decode())
