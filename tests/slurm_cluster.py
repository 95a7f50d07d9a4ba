"""A real Slurm on this machine: two nodes, each with two GPUs that do not exist. Needs root, but no systemd."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import psutil

NODES = ("node0", "node1")
# Each process of pytest-xdist has a cluster. A job's number decides its port.
NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
GPUS = 2
CORES = 8  # of a node; the machine may have fewer

CONF = """\
ClusterName=test
FirstJobId={first_job}
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
# A requeued job is eligible again when its credential has expired: by default after two minutes.
AuthInfo=socket={dir}/munge/socket,cred_expire=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
SchedulerParameters=bf_interval=1,sched_interval=5,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
JobRequeue=1
KillWait=10
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
{nodes}
PartitionName=gpu Nodes=ALL Default=YES DefaultTime=10 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL DefaultTime=10 PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cores} Sockets=1 "
    "CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN"
)


class Cluster:
    """Cluster that `with` starts; Slurm's commands need its `environment`. Stops what it started, by process id.

    Each node sees a disk of its own at `local`, if this machine lets root mount (`has_disks`).
    """

    def __init__(self, folder: Path):
        self.folder, self.local = folder, folder / "local"
        self.has_disks = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Cluster":
        for name in ("munge", "state", "local", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        port = free_ports(1 + len(NODES))
        nodes = [NODE.format(name=n, port=port + 1 + i, cores=CORES, gpus=GPUS) for i, n in enumerate(NODES)]
        (self.folder / "slurm.conf").write_text(
            CONF.format(dir=self.folder, port=port, nodes="\n".join(nodes), first_job=1 + 100 * NUMBER)
        )
        for i in range(GPUS):
            (self.folder / f"gpu{i}").touch()  # any file can stand for a device
        gres = [f"NodeName={node} Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n" for node in NODES]
        (self.folder / "gres.conf").write_text("".join(gres))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        munge = self.folder / "munge"
        self.start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={self.folder}/munged.log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        wait_until((munge / "socket").exists, 10, "munged")
        self.start("slurmctld", "-D", "-c", "-f", self.folder / "slurm.conf")
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self.run("sinfo", "-hN", "-p", "gpu", "-o", "%T").split() == ["idle"] * 2, 30, "idle nodes")
        return self

    def start(self, program: str, *args: object, name: str = "", prefix: list[object] | None = None) -> None:
        path = shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
        log = (self.folder / f"{name or program}.out").open("a")
        self.daemons[name or program] = subprocess.Popen(
            list(map(str, [*(prefix or []), path, *args])),
            env=os.environ | self.environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def start_node(self, node: str) -> None:
        mount = 'mount --bind "$0" "$1" && shift && exec "$@"'
        prefix = ["unshare", "--mount", "sh", "-c", mount, self.disk_of(node), self.local] if self.has_disks else []
        self.start("slurmd", "-D", "-N", node, "-f", self.folder / "slurm.conf", name=node, prefix=prefix)

    def disk_of(self, node: str) -> Path:
        """Return the disk that a node has at `local`, as the tests see it."""
        (disk := self.folder / "disks" / node).mkdir(parents=True, exist_ok=True)
        return disk

    def replace_node(self, node: str) -> None:
        """Kill all processes of a node, and start it again with an empty disk."""
        mounts = os.readlink(f"/proc/{self.daemons[node].pid}/ns/mnt")
        self.kill_node(node)
        killed = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.readlink(f"/proc/{process.pid}/ns/mnt") == mounts:
                    process.kill()
                    killed.append(process)
        psutil.wait_procs(killed, timeout=10)
        shutil.rmtree(self.disk_of(node))
        self.start_node(node)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon: Slurm thinks the node is lost, but its processes live on, which is worse."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def run(self, *command: object) -> str:
        """Return the output of a Slurm command, whether or not it succeeds."""
        done = subprocess.run(
            list(map(str, command)), env=os.environ | self.environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout

    def __exit__(self, *error: object) -> None:
        self.run("scancel", "--quiet", "--user=root")
        deadline = time.monotonic() + 30
        while self.run("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.5)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def free_ports(count: int) -> int:
    """Return the first of `count` free ports in a row."""
    for first in range(21000 + 1000 * NUMBER, 29000, 10):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for opened in sockets:
                opened.close()
    raise RuntimeError("no free ports")


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not after {seconds} s")
        time.sleep(0.2)
