import os

import pytest

# Tests touch no network, and libraries cache nothing outside the test's own folders.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def forks(request, tmp_path_factory):
    """Runs the module's SCRIPT in forked ranks, which have imported the module's IMPORTS."""
    from helpers import Forks  # what it imports reads the variable above

    imports = getattr(request.module, "IMPORTS", ())
    server = Forks(request.module.SCRIPT, tmp_path_factory.mktemp("forks"), imports)
    yield server
    server.close()
