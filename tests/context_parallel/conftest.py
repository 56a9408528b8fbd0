import pytest

from tests.context_parallel.pool import Pool


@pytest.fixture(scope="session")
def pool():
    processes = Pool()
    yield processes
    processes.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of the folder share one pool."""
    for item in items:
        if "context_parallel" in item.nodeid:
            item.add_marker(pytest.mark.xdist_group("context_parallel"))
