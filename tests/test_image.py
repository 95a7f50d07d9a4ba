"""Tests of the container image: requirements.lock agrees with requirements.txt, and the built image works."""

import json
import os
import re
import shutil
import ssl
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from helpers import REPOSITORY as ROOT  # git and buildah follow no links
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = (ROOT / "requirements.lock").read_text()
COPIED = ("LICENSE", "README.md", "pyproject.toml", "requirements.lock", "requirements.txt")
COPIED += ("accelerate_configs", "data", "recipes", "src")
IN_IMAGE = "/opt/accelerate-recipes"
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
SECRET = "hf_not_a_token_but_looks_like_one"


def locked(lock: str = LOCK) -> dict[str, str]:
    """Return the locked versions by package name."""
    return dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)==(\S+)", lock, re.MULTILINE))


def pinned() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]


def wanted_by(name: str, extras: frozenset[str]) -> list[Requirement]:
    """Return what an installed package requires on Linux; nothing if its version is not the locked one."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return []
    if distribution.version.split("+")[0] != locked()[name]:
        return []
    requirements = map(Requirement, distribution.requires or [])
    environments = [{**LINUX, "extra": extra} for extra in ("", *extras)]
    return [r for r in requirements if not r.marker or any(map(r.marker.evaluate, environments))]


def test_lock_holds_what_is_pinned():
    for requirement in pinned():
        version = locked().get(canonicalize_name(requirement.name))
        said = f"{requirement}, locked is {version}; run: make lock"
        assert version and requirement.specifier.contains(version), said
    # Each package has at least one hash, and no index is named.
    entries = re.split(r"^(?=[a-z0-9])", LOCK, flags=re.MULTILINE)[1:]
    form = re.compile(r"[a-z0-9.-]+==\S+( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
    assert len(entries) == len(locked()) and not [entry for entry in entries if not form.fullmatch(entry)]


def test_lock_is_closed():
    """Everything that a locked package requires is locked in a version that it accepts, so `--no-deps` lacks nothing."""
    todo = [(canonicalize_name(r.name), frozenset(r.extras)) for r in pinned()]
    done = set()
    while todo:
        node = todo.pop()
        if node in done:
            continue
        done.add(node)
        for requirement in wanted_by(*node):
            name = canonicalize_name(requirement.name)
            assert name in locked(), f"{node[0]} requires {requirement}, which is not locked; run: make lock"
            assert requirement.specifier.contains(locked()[name]), f"{node[0]} requires {requirement}; run: make lock"
            todo.append((name, frozenset(requirement.extras)))
    assert len({name for name, _ in done}) > 2 * len(pinned())


def test_lock_for_a_base_with_its_own_torch(tmp_path):
    """The command of docs/image.md takes out PyTorch and CUDA, and nothing else."""
    (command,) = re.findall(r"^sed .*$", (ROOT / "docs/image.md").read_text(), re.MULTILINE)
    (tmp_path / "requirements.lock").write_text(LOCK)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=60)
    left = (tmp_path / "requirements.lock").read_text()
    names = set(locked(left))
    assert {name.split("-")[0] for name in locked().keys() - names} == {"cuda", "nvidia", "torch", "triton"}
    assert {canonicalize_name(r.name) for r in pinned()} - names == {"torch"}
    assert left.splitlines()[-1] == LOCK.splitlines()[-1] and not re.search(r"\\\n(?! )", left)


class Buildah:
    """Buildah with its own store of images and layers, which stays: what does not change is built once."""

    store = ROOT / ".cache/image"

    def __init__(self, runroot: Path):
        self.options = ["--root", str(self.store), "--runroot", str(runroot)]

    def run(self, *args: object, timeout: int = 120, **env: str) -> subprocess.CompletedProcess:
        """Run buildah with chroot isolation: a build inside a container may not do more."""
        return subprocess.run(
            ["buildah", *self.options, *map(str, args)],
            env={**os.environ, "BUILDAH_ISOLATION": "chroot"} | env,
            capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def ok(self, *args: object, **options) -> str:
        done = self.run(*args, **options)
        assert done.returncode == 0, f"{args}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def base(self, tmp_path: Path) -> str:
        """Base image: Debian with its Python, made from its packages, with the certificates that this machine trusts."""
        if self.run("inspect", "localhost/base").returncode:
            root = tmp_path / "debian"
            packages = "--include=python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates"
            command = ["debootstrap", "--variant=minbase", packages, "bookworm", root]
            subprocess.run(command, check=True, capture_output=True, timeout=900)
            shutil.copy(ssl.get_default_verify_paths().cafile, root / "etc/ssl/certs/ca-certificates.crt")
            container = self.ok("from", "scratch")
            self.ok("copy", container, root, "/")
            self.ok("commit", "--rm", container, "localhost/base")
            shutil.rmtree(root)
        return self.ok("images", "--format", "{{.Digest}}", "localhost/base")


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Checkout with the files that git tracks, readable only by the owner, and files that must not get into an image."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    intruders = (".env", "token", ".git/config", "outputs/demo/export/model.safetensors", "recipes/.env")
    intruders += ("src/accelerate_recipes/__pycache__/engine.pyc", "src/old.egg-info/PKG-INFO")
    for name in (*tracked, *intruders):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        if name in intruders:
            (tmp_path / "checkout" / name).write_text(SECRET)
        else:
            shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    subprocess.run(["chmod", "-R", "go-rwx", tmp_path / "checkout"], check=True)
    return tmp_path / "checkout"


@pytest.mark.image
@pytest.mark.timeout(3000)
def test_build_and_run(tmp_path, checkout):
    """Build the Dockerfile unchanged on a base made here; in it, as its user, run preflight and three training steps."""
    buildah = Buildah(tmp_path / "run")
    digest = buildah.base(tmp_path)
    build = ("build", "--layers", "--build-arg", "BASE=localhost/base", "--tag", "localhost/accelerate-recipes")
    refused = buildah.run(*build, checkout)
    assert refused.returncode and "invalid reference format" in refused.stderr, refused.stderr
    buildah.ok(*build, "--build-arg", f"BASE_DIGEST={digest}", checkout, timeout=2400, HF_TOKEN=SECRET)

    image = json.loads(buildah.ok("inspect", "--type", "image", "localhost/accelerate-recipes"))
    assert SECRET not in json.dumps(image)
    config = image["OCIv1"]["config"]
    assert config["User"] == "1000" and not config.get("Entrypoint") and config["WorkingDir"] == IN_IMAGE
    assert config["Labels"]["org.opencontainers.image.base.digest"] == digest

    container = buildah.ok("from", "localhost/accelerate-recipes")
    try:

        def bash(command: str, timeout: int = 120) -> str:
            return buildah.ok("run", container, "--", "bash", "-c", command, timeout=timeout)

        tracked = subprocess.run(["git", "ls-files", *COPIED], cwd=ROOT, capture_output=True, text=True).stdout.split()
        files = bash(
            "find . ! -path './.venv/*' ! -path './src/accelerate_recipes.egg-info/*' -type f -readable -printf '%P\\n'"
        ).split()
        assert sorted(files) == sorted(tracked)
        assert bash("id -u; test -w . || test -w src || echo closed").split() == ["1000", "closed"]
        # Everything is installed without conflicts, also locked packages that are not installed on a machine without a GPU.
        assert bash("pip check") == "No broken requirements found."
        torch = bash("python -c 'import torch; print(torch.__version__)' && command -v gcc").splitlines()
        assert torch[0].startswith(f"{locked()['torch']}+cu") and torch[1:] == ["/usr/bin/gcc"]
        recipe = "recipes/chess.py --config recipes/configs/chess/laptop.yaml --output_dir /tmp/out --max_steps 3"
        strategy = "accelerate_configs/fsdp_full.yaml"
        bash(f"HF_HUB_OFFLINE=1 python -m accelerate_recipes preflight {strategy} --nodes 1 --gpus-per-node 2 {recipe}")
        bash(
            f"HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 accelerate launch --config_file {strategy} --mixed_precision no {recipe} "
            "--logging_steps 1 --num_positions 30 --heldout_share 0.002 --hidden_size 32 --num_attention_heads 2",
            timeout=400,
        )
        lines = [json.loads(line) for line in bash("cat /tmp/out/metrics.jsonl").splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    finally:
        buildah.run("rm", container)
