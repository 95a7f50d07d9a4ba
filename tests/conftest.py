import os

import pytest

# Tests touch no network, and libraries cache nothing outside the test's own folders.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def forks(request, tmp_path_factory):
    """Runs the module's SCRIPT in forked ranks."""
    from helpers import Forks  # what it imports reads the variable above

    server = Forks(request.module.SCRIPT, tmp_path_factory.mktemp("forks"))
    yield server
    server.close()
