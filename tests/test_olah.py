"""Tests of a download from a Hub server that others wrote: olah, from PyPI, in its own environment.

`make test-hub` installs olah and runs this; otherwise the test is skipped.
"""

import socket
import subprocess
import time
import urllib.request

import pytest
from helpers import ROOT, environment
from loopback_hub import C4, CHESS, Commands, model_files

OLAH = ROOT / ".venv/olah/bin/olah-cli"
CONFIG = """
[basic]
mirrors-path = ["{folder}/mirror"]
repos-path = "{folder}/repos"
[accessibility]
offline = true
"""

pytestmark = [
    pytest.mark.hub,
    pytest.mark.skipif(not OLAH.is_file(), reason="NOT TESTED AGAINST olah: `make test-hub` installs and uses it"),
]


@pytest.fixture
def url(tmp_path):
    """URL of a server of plain git repositories."""
    repositories = {
        "models/tiny/llama": model_files(tmp_path / "model"),
        "datasets/tiny/games": {"data/chess_game_0001.parquet": (ROOT / "data/chess/games_20k.parquet").read_bytes()},
        "datasets/allenai/c4": {f"en/{path.name}": path.read_bytes() for path in ROOT.glob("data/c4_pydoc/en/*")},
    }
    for name, files in repositories.items():
        folder = tmp_path / "mirror" / name
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
        for command in (["init", "-q", "-b", "main"], ["add", "."], [*who, "commit", "-qm", "Files"]):
            subprocess.run(["git", "-C", folder, *command], check=True, timeout=60)
    (tmp_path / "olah.toml").write_text(CONFIG.format(folder=tmp_path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [OLAH, "-c", "olah.toml", "--host", "127.0.0.1", "--port", str(port), "--log-path", "logs"],
        cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{url}/api/models/tiny/llama/revision/main", timeout=10).close()
            break
        except OSError:
            assert time.monotonic() < deadline and server.poll() is None, "olah does not start"
            time.sleep(0.2)
    yield url
    server.terminate()
    server.wait(timeout=30)


def test_download_and_verify(url, tmp_path):
    commands = Commands(url, tmp_path)
    cache = tmp_path / "hf/hub"
    output = commands.ok(cache, "download", *CHESS)
    assert "model tiny/llama at commit " in output and ": 8 files, " in output
    assert "3 files" in commands.ok(cache, "download", *C4, "--max_shards", 2)
    assert "12 files" in commands.ok(cache, "verify")
    assert commands.ok(cache, "list").count("complete") == 3
    commands.close()
