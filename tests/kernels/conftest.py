from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def triton_cache(request: pytest.FixtureRequest) -> Path:
    """Where compiled kernels stay from one run to the next; ``--cache-clear`` empties it."""
    return request.config.cache.mkdir("triton")
