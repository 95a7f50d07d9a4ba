"""Pods of a rendered job as processes on this machine, which do what the operators and the kubelet would do, and no more.

The command and the environment are the manifest's. Three things of a pod are replaced: volumes are folders here, the address
of the first pod is the loopback's, and its port is a free one, since all pods share one network.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml
from helpers import CHILDREN, ROOT, environment
from kubernetes_schemas import pod_specs

from recipe_tools.kubernetes import CACHE, CHECKPOINTS, FILES, render_manifest


class Pods:
    """Pods of a job: `with Pods(...) as pods:` starts them; `finish` acts as the operator until the job succeeds."""

    def __init__(self, kind: str, tmp_path: Path, *argv: str, **env: str):
        documents = list(yaml.safe_load_all(render_manifest(kind, argv)[0]))
        self.kind = kind
        self.job = documents[-1]["spec"]
        self.spec = next(spec for document in documents for _, spec in pod_specs(document))
        self.container = self.spec["containers"][0]
        self.grace = self.spec["terminationGracePeriodSeconds"]
        self.volumes = {path: str(tmp_path / path.strip("/").replace("/", "-")) for path in (CHECKPOINTS, CACHE, FILES)}
        for folder in self.volumes.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
        (data,) = [document["data"] for document in documents if document["kind"] == "ConfigMap"]
        for name, text in data.items():
            (Path(self.volumes[FILES]) / name).write_text(self.here(text))
        self.out = Path(self.volumes[CHECKPOINTS]) / "out"
        self.image = environment(tmp_path) | env
        self.image |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.image |= {"PYTHONPATH": f"{ROOT / 'src'}:{CHILDREN}"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        if kind == "pytorchjob":
            self.nodes = sum(replica["replicas"] for replica in self.job["pytorchReplicaSpecs"].values())
        else:
            self.nodes = self.job["trainer"]["numNodes"]
        self.processes: list[subprocess.Popen] = []
        self.restarts = 0
        self.log = tmp_path / "pods.log"

    def here(self, text: str) -> str:
        for path, folder in self.volumes.items():
            text = re.sub(rf"(?<![\w/]){path}(?=/|$)", folder, text, flags=re.MULTILINE)
        return text

    def set_by_operator(self, node: int) -> dict[str, str]:
        """Return the variables that an operator sets.

        Source: training-operator 1.9.1, pkg/controller.v1/pytorch/envvar.go; trainer 2.3, plugins/torch/torch.go.
        """
        if self.kind == "pytorchjob":
            return {
                "PYTHONUNBUFFERED": "0", "PET_NNODES": str(self.nodes), "PET_NPROC_PER_NODE": self.job["nprocPerNode"],
                "PET_NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port,
                "RANK": str(node), "WORLD_SIZE": str(self.nodes),
            }  # fmt: skip
        processes = self.job["trainer"]["numProcPerNode"]
        return {
            "PET_NNODES": str(self.nodes), "PET_NPROC_PER_NODE": str(processes), "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": self.port,
        }  # fmt: skip

    def start(self, node: int) -> subprocess.Popen:
        env = {variable["name"]: self.here(variable["value"]) for variable in self.container["env"]}
        env |= self.set_by_operator(node)
        # The kubelet replaces $(NAME).
        command = [re.sub(r"\$\((\w+)\)", lambda name: env[name[1]], word) for word in self.container["command"]]
        log = self.log.open("a")
        return subprocess.Popen(
            [self.here(word) for word in command],
            cwd=ROOT, env=self.image | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> "Pods":
        self.processes = [self.start(node) for node in range(self.nodes)]
        return self

    def __exit__(self, *_) -> None:
        for node in range(self.nodes):
            self.kill(node)

    def kill(self, node: int) -> None:
        """Kill a pod, as the kernel ends all processes of a container whose first process is gone."""
        first = self.processes[node]
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        first.wait(timeout=30)

    def delete(self, node: int) -> float:
        """Delete a pod like `kubectl delete pod`; returns how many seconds it took."""
        start = time.monotonic()
        self.processes[node].send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[node].wait(timeout=self.grace)
        self.kill(node)
        return time.monotonic() - start

    def finish(self, deleted: int | None = None, seconds: float = 200) -> None:
        """Restart failed and deleted pods until all pods have succeeded."""
        if deleted is not None:
            self.restart(deleted)
        deadline = time.monotonic() + seconds
        while True:
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return
            for node, code in enumerate(codes):
                # The operator treats the first pod's success as the job's.
                assert not (node == 0 and code == 0 and None not in codes), self.tail()
                if code not in (None, 0):
                    self.restart(node)
            assert time.monotonic() < deadline and self.restarts < 8, self.tail()
            time.sleep(0.2)

    def restart(self, node: int) -> None:
        """Restart only the container or pod of a PyTorchJob; for a TrainJob, JobSet replaces all pods."""
        self.restarts += 1
        if self.kind == "pytorchjob":
            self.processes[node] = self.start(node)
            return
        for other in range(self.nodes):
            self.delete(other)
        self.processes = [self.start(node) for node in range(self.nodes)]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [process.poll() for process in self.processes]
            assert time.monotonic() < deadline and ended == [None] * self.nodes, f"{ended}\n{self.tail()}"
            time.sleep(0.1)

    def tail(self) -> str:
        return self.log.read_text()[-6000:]
