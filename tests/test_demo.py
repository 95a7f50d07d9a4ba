"""What `make demo` promises, with the command that it runs."""

import re
import subprocess

import pytest
from helpers import ROOT, environment, read_metrics


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_demo_reaches_what_it_says(tmp_path):
    """Held-out legal moves from about 0 to over 60 %, moves as played over 18 % and over the baseline."""
    makefile = (ROOT / "Makefile").read_text()
    command = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    command = command.replace("$(BIN)", ".venv/bin").replace("\\\n", " ").strip()
    command += f" --output_dir {tmp_path / 'out'} --data_cache_dir {tmp_path / 'cache'}"
    done = subprocess.run(
        command.split(), cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=2900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, *_, after = (record for record in read_metrics(tmp_path / "out") if "eval_loss" in record)
    assert before["eval_legal_move_rate"] < 0.03
    assert after["eval_legal_move_rate"] > 0.60
    assert after["eval_next_move_accuracy"] > 0.18
    baseline = float(re.search(r"moves as played: .*baseline ([\d.]+)%", done.stdout)[1]) / 100
    assert after["eval_next_move_accuracy"] > baseline > 0
