"""Fixtures: a server over an emulated cloud that lends."""

from collections.abc import Iterator

import pytest

from tests.lending.lending import Cloud, emulated
from tests.support.examples import sampled


@pytest.fixture(params=sampled(["gs", "s3"], every=2))
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """A server over a fresh store in a bucket of each provider."""
    with emulated(request.param) as opened:
        yield opened
