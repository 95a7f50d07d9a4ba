"""Rendering of a run as a Kubernetes job.

    python -m accelerate_recipes k8s KIND [FLAGS] CONFIG [LAUNCH FLAGS] RECIPE [ARGS]

KIND is `pytorchjob` (Kubeflow's training operator, v1) or `trainjob` (Kubeflow Trainer 2.3). Prints YAML for
`kubectl apply -f -`: a ConfigMap with the accelerate YAML and the resolved arguments, and the job. The same input gives
the same output. A run that cannot start is not rendered.

In every pod `accelerate launch` is the first process: it gets the SIGTERM when the pod is deleted, and passes it on.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import yaml

from accelerate_recipes.args import Range, arg, read_yaml, resolve
from accelerate_recipes.errors import ConfigError, error_list
from accelerate_recipes.launch.preflight import Launch, check

# GPUs and EFA interfaces of an instance. The numbers of p4d and g6 are from Karpenter's page of instance types, those of p5
# from AWS's FSDP example; those of p5en, p6 and g5 were not looked up (`aws ec2 describe-instance-types` shows them). No run
# was made on any of them.
INSTANCES = {
    "p4d.24xlarge": (8, 4),
    "p5.48xlarge": (8, 32),
    "p5en.48xlarge": (8, 16),
    "p6-b200.48xlarge": (8, 8),
    "g5.8xlarge": (1, 1),
    "g5.12xlarge": (4, 1),
    "g5.16xlarge": (1, 1),
    "g5.24xlarge": (4, 1),
    "g5.48xlarge": (8, 1),
    "g6.8xlarge": (1, 1),
    "g6.12xlarge": (4, 1),
    "g6.16xlarge": (1, 1),
    "g6.24xlarge": (4, 1),
    "g6.48xlarge": (8, 1),
}
# GPUs of these instances, as `plan` names them.
GPU_OF = {
    "p4d": "a100_40", "p5": "h100", "p5en": "h200", "p6-b200": "b200", "g5": "a10g", "g6": "l4",
}  # fmt: skip
# Huge pages make the fork of data workers fail: "Cannot allocate memory".
EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}
# GPUs of a p4d use the network directly only with this variable; on later instances it is the default.
FABRIC = {"p4d.24xlarge": {"FI_EFA_USE_DEVICE_RDMA": "1"}}

CHECKPOINTS, CACHE, FILES = "/checkpoints", "/cache", "/etc/accelerate-recipes"
USER = 1000  # the image's user; any user but root would do
QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(|k|M|G|T|Ki|Mi|Gi|Ti)")
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, required for services
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123
SUBDOMAIN = re.compile(rf"{NAMESPACE.pattern}(\.{NAMESPACE.pattern})*")
KEY = re.compile(rf"({SUBDOMAIN.pattern}/)?[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?", re.ASCII)
VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
IMAGE = re.compile(
    r"[a-z0-9][\w.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*(:(?P<tag>\w[\w.-]*))?(@(?P<digest>sha256:[0-9a-f]{64}))?", re.ASCII
)
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass
class JobArgs:
    """Arguments of the job; those of the run follow them, from CONFIG on."""

    name: str = arg("", "Name of the job; default: the recipe's name.")
    namespace: str = arg("", "Namespace; default: kubectl's.")
    image: str = arg("", "Container image, with a tag other than latest, or a digest.")
    nodes: int | None = arg(None, "Number of nodes, with a pod on each.", min=1)
    gpus_per_node: int | None = arg(
        None, "GPUs of a node, with a process for each; 0: as many processes as --cpus-per-node.", min=0
    )
    cpus_per_node: int | None = arg(None, "CPUs that a pod asks for.", min=1)
    memory: str = arg("", "Memory that a pod asks for, and may use, shared memory included, such as 1000Gi.")
    shm_size: str = arg("16Gi", "Limit of /dev/shm, where NCCL and data workers exchange data.")
    instance_type: str = arg(
        "", "Type of AWS machines; selects such nodes and sets up EFA. On HyperPod it begins with `ml.`"
    )
    efa_per_node: int | None = arg(None, "EFA interfaces of each pod; default: all of --instance-type.", min=0)
    checkpoints_pvc: str = arg("", f"Claim of a volume that all pods can write to, at {CHECKPOINTS}.")
    checkpoints_size: str = arg("", "Size, such as 1200Gi, of the claim --checkpoints-pvc, which is then made too.")
    storage_class: str = arg("", "Storage class of the claim that --checkpoints-size makes.")
    cache_pvc: str = arg("", f"Claim of a volume with what was downloaded beforehand, at {CACHE}; pods ask no network.")
    token_secret: str = arg("", "Secret that holds the Hub's token, under the key `token`.")
    grace_seconds: int | None = arg(
        None,
        "Seconds from SIGTERM to SIGKILL; default: time for two saves as long as the longest so far, else 300.",
        min=30,
    )
    max_restarts: int = arg(20, "Restarts of the whole run, after which the job has failed.", min=0)
    node_selector: list[str] = field(
        default_factory=list, metadata={"help": "Labels of the nodes to run on, as KEY=VALUE."}
    )
    toleration: list[str] = field(
        default_factory=list, metadata={"help": "Taints of nodes to tolerate, as KEY[=VALUE][:EFFECT]."}
    )
    queue: str = arg("", "Name of a local queue of Kueue.")
    annotation: list[str] = field(
        default_factory=list, metadata={"help": "Annotations of the job and its pods, as KEY=VALUE."}
    )

    owned_elsewhere: ClassVar[dict[str, str]] = {}
    ranges: ClassVar[dict[str, Range]] = {}

    @property
    def instance(self) -> str:
        """Type of the machines in EC2's terms."""
        return self.instance_type.removeprefix("ml.")

    @property
    def efa(self) -> int:
        return INSTANCES.get(self.instance, (0, 0))[1] if self.efa_per_node is None else self.efa_per_node

    def problems(self, world_size: int) -> list[str]:
        """List what is wrong with these values, one sentence each."""
        found = []
        needed = {"image": "REGISTRY/NAME:TAG", "nodes": "4", "gpus_per_node": "8", "checkpoints_pvc": "CLAIM"}
        for name, example in needed.items():
            if getattr(self, name) in (None, ""):
                found.append(f"--{flag(name)} is missing; give it, such as --{flag(name)} {example}")
        if self.gpus_per_node == 0 and self.cpus_per_node is None:
            found.append("--gpus-per-node is 0, so --cpus-per-node says how many processes a pod has; give it")
        if self.gpus_per_node == 0 and (self.instance_type or self.efa_per_node):
            found.append("--instance-type and --efa-per-node are for pods with GPUs; --gpus-per-node is 0")
        found += self.tag_problems()
        # The queue becomes the value of a label.
        limits = {"namespace": (NAMESPACE, 63), "queue": (SUBDOMAIN, 63)}
        for name in ("namespace", "checkpoints_pvc", "cache_pvc", "token_secret", "storage_class", "queue"):
            pattern, limit = limits.get(name, (SUBDOMAIN, 253))
            found += label_problems(flag(name), getattr(self, name), pattern, limit) if getattr(self, name) else []
        found += self.quantity_problems()
        if self.instance and self.instance not in INSTANCES:
            found.append(
                f"--instance-type {self.instance_type} is not known; known are {', '.join(INSTANCES)}; for another, give "
                "--efa-per-node, and --node-selector node.kubernetes.io/instance-type=..."
            )
        elif self.instance:
            gpus, efa = INSTANCES[self.instance]
            if (self.gpus_per_node or 0) > gpus:
                found.append(f"--gpus-per-node is {self.gpus_per_node}, but {self.instance} has {gpus}")
            if self.efa > efa:
                found.append(f"--efa-per-node is {self.efa}, but {self.instance} has {efa} interfaces")
        if self.storage_class and not self.checkpoints_size:
            found.append("--storage-class has an effect only on a new claim; give --checkpoints-size, or remove it")
        if self.token_secret and self.cache_pvc:
            found.append("--token-secret has no effect with --cache-pvc, whose pods ask no network; remove one of them")
        for name in ("node_selector", "annotation"):
            for text in getattr(self, name):
                key, equals, value = text.partition("=")
                if not equals or not KEY.fullmatch(key) or (name == "node_selector" and not VALUE.fullmatch(value)):
                    found.append(f"--{flag(name)} {text!r}: write it as KEY=VALUE")
        for text in self.toleration:
            taint, _, effect = text.partition(":")
            key, _, value = taint.partition("=")
            if not KEY.fullmatch(key) or not VALUE.fullmatch(value) or effect not in ("", *EFFECTS):
                found.append(f"--toleration {text!r}: write it as KEY[=VALUE][:EFFECT], EFFECT {' or '.join(EFFECTS)}")
        return found

    def tag_problems(self) -> list[str]:
        parts = IMAGE.fullmatch(self.image)
        if self.image and not parts:
            return [f"--image {self.image!r} is not the name of an image"]
        if parts and not parts["digest"] and parts["tag"] in (None, "latest"):
            return [
                f"--image {self.image} has {'no tag' if parts['tag'] is None else 'the tag latest'}: pods that start later "
                "may get another one; give a version, or a digest"
            ]
        return []

    def quantity_problems(self) -> list[str]:
        found, sizes = [], {}
        for name in ("memory", "shm_size", "checkpoints_size"):
            value = getattr(self, name)
            sizes[name] = num_bytes(value) if QUANTITY.fullmatch(value) else Decimal(0)
            if (value or name == "shm_size") and sizes[name] == 0:
                found.append(f"--{flag(name)} {value!r} is not a size such as 64Gi")
        if not found and self.memory and sizes["shm_size"] >= sizes["memory"]:
            found.append(
                f"--shm-size {self.shm_size} is a part of --memory {self.memory}, and must leave room; change one of them"
            )
        return found


def flag(name: str) -> str:
    return name.replace("_", "-")


def num_bytes(quantity: str) -> Decimal:
    number, unit = QUANTITY.fullmatch(quantity).groups()
    base = 1024 if unit.endswith("i") else 1000
    return Decimal(number) * base ** ("", "k", "m", "g", "t").index(unit.removesuffix("i").lower())


def label_problems(title: str, value: str, pattern: re.Pattern, limit: int) -> list[str]:
    found = []
    if not pattern.fullmatch(value):
        first = "a letter" if pattern is LABEL else "a letter or digit"
        dots = ", ." if pattern is SUBDOMAIN else ""
        found.append(f"--{title} {value!r}: a name has a-z, 0-9, -{dots}, begins with {first}, and ends with no -")
    if len(value) > limit:
        found.append(f"--{title} {value!r} has {len(value)} characters; there is room for {limit}")
    return found


def render_manifest(kind: str, argv: Sequence[str]) -> tuple[str, str]:
    """Return the manifest, and the messages about it.

    Raises:
        ConfigError: with all problems of the job and of the run.
    """
    job, config, launch = check_job(kind, argv)
    said = [launch.said]
    if job.cache_pvc and launch.needs:
        needs = ", ".join(map(str, launch.needs))
        said.append(f"Not checked: whether {needs} is on the volume of {job.cache_pvc}, downloaded into {CACHE}")
    return manifest(kind, job, config.read_text(encoding="utf-8"), launch), "\n".join(said)


def check_job(kind: str, argv: Sequence[str]) -> tuple[JobArgs, Path, Launch]:
    """Check the flags of a job, and the run in it; returns the flags, the accelerate YAML, and what will run.

    Raises:
        ConfigError: with all problems.
    """
    # The job's flags end at the accelerate YAML; the flag --config names another YAML.
    is_file = [word.endswith((".yaml", ".yml")) and not word.startswith("--") for word in argv]
    end = next((i for i, word in enumerate(argv) if is_file[i] and argv[i - 1] != "--config"), len(argv))
    job, problems = resolve(JobArgs, argv[:end], world_size=1)
    run, launch = list(argv[end:]), None
    if len(run) < 2:
        problems.append(f"what is to run is missing; usage: k8s {kind} [FLAGS] CONFIG [LAUNCH FLAGS] RECIPE [ARGS]")
    else:
        size = ["--nodes", job.nodes or 1, "--gpus-per-node", job.gpus_per_node or 0]
        size += [] if job.gpus_per_node else ["--cpus-per-node", job.cpus_per_node or 1]
        size += ["--gpu", GPU_OF[job.instance.partition(".")[0]]] if job.instance in INSTANCES else []
        try:
            volumes = (CHECKPOINTS, CACHE) if job.cache_pvc else (CHECKPOINTS,)
            launch, found = check([run[0], *map(str, size), *run[1:]], volumes)
        except ConfigError as error:
            problems.append(str(error))
        else:
            problems += found
    if launch is not None:
        problems += image_problems(run[0], launch)
        job.name = job.name or Path(launch.command[0]).stem.replace("_", "-")
        if launch.args.push_to_hub and job.cache_pvc:
            problems.append(
                f"--push_to_hub {launch.args.push_to_hub}: pods with --cache-pvc ask no network; remove one of the two"
            )
        elif launch.args.push_to_hub and not job.token_secret:
            problems.append(
                f"--push_to_hub {launch.args.push_to_hub} needs a token that may write; give --token-secret"
            )
    if job.name:
        # The name must still be a label when the operator appends to it.
        last = (job.nodes or 1) - 1
        suffix = f"-worker-{max(0, last - 1)}" if kind == "pytorchjob" else f"-node-0-{last}-abcde"
        problems += label_problems("name", job.name, LABEL, 63 - len(suffix))
    if problems or launch is None:
        raise ConfigError(error_list("This job is not rendered", problems))
    return job, Path(run[0]), launch


def manifest(kind: str, job: JobArgs, config: str, launch: Launch) -> str:
    """Render a checked job; `config` is the content of the accelerate YAML."""
    files = {
        "accelerate.yaml": config,
        "recipe.yaml": yaml.safe_dump(launch.args.values(), sort_keys=False),
    }
    documents = [*claim(job), config_map(job, files)]
    files_name = documents[-1]["metadata"]["name"]
    documents += {"pytorchjob": pytorch_job, "trainjob": train_job}[kind](job, launch, files_name)
    header = "# Rendered by `python -m accelerate_recipes k8s`; to change it, render again.\n"
    # Write each list and text in full: PyYAML's defaults would use anchors and folded lines.
    return header + yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=10_000)


def image_problems(config: str, launch: Launch) -> list[str]:
    """List why a run that starts here would not start in a pod."""
    found, script = [], Path(launch.command[0])
    if script.is_absolute() or ".." in script.parts:
        found.append(
            f"{script}: the image holds this repository; give the recipe's path in it, such as recipes/chess.py"
        )
    if read_yaml(Path(config)).get("distributed_type") == "NO":
        found.append(
            f"{config}: with `distributed_type: NO` the launcher does not pass on the signal that a pod is deleted "
            "with, and nothing is saved; take accelerate_configs/ddp.yaml, on one process the same"
        )
    return found


class Plain(yaml.SafeDumper):
    """YAML dumper that writes no aliases, and keeps texts of several lines readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


Plain.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def metadata(job: JobArgs, name: str, **more: Any) -> dict:
    # One label for everything that belongs to the job: the ConfigMap stays when the job is deleted.
    labels = {"app.kubernetes.io/name": "accelerate-recipes", "app.kubernetes.io/instance": job.name}
    return {"name": name, **({"namespace": job.namespace} if job.namespace else {}), "labels": labels | more}


def job_metadata(job: JobArgs) -> dict:
    queue = {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}
    return metadata(job, job.name, **queue) | annotations(job)


def annotations(job: JobArgs) -> dict:
    return {"annotations": pairs(job.annotation)} if job.annotation else {}


def claim(job: JobArgs) -> list[dict]:
    """Claim a new volume for checkpoints, if requested. It does not get the job's label, because it must outlive the job."""
    if not job.checkpoints_size:
        return []
    name = {key: value for key, value in metadata(job, job.checkpoints_pvc).items() if key != "labels"}
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": job.checkpoints_size}}}
    spec |= {"storageClassName": job.storage_class} if job.storage_class else {}
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": name, "spec": spec}]


def config_map(job: JobArgs, files: dict[str, str]) -> dict:
    """Make the ConfigMap, named by its content, so that pods of an earlier version keep theirs.

    A generator of kustomize is not needed; kustomize would not write its new name into a PyTorchJob.
    """
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in files.items()).encode()).hexdigest()
    named = metadata(job, f"{job.name}-{digest[:10]}")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "immutable": True, "data": files}


def pytorch_job(job: JobArgs, launch: Launch, files_name: str) -> list[dict]:
    """Make a PyTorchJob for Kubeflow's training operator 1.9, which sets PET_NODE_RANK, MASTER_ADDR and MASTER_PORT.

    It also sets RANK and WORLD_SIZE to numbers of nodes; the launcher replaces them for its processes.

    With OnFailure the kubelet restarts a failed container in its pod, and the operator replaces a pod that is gone.
    ExitCode would take exit codes 1 to 127 for final, and the launcher ends with 1 whatever its processes ended with.
    """
    template = {"metadata": annotations(job)} if job.annotation else {}
    template |= {"spec": pod(job, launch, files_name, "pytorch", "$(MASTER_ADDR)", "$(MASTER_PORT)")}
    nodes = job.nodes or 1
    # The operator sums the restarts of all running pods, and fails the job when the sum reaches the limit.
    run_policy = {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts * nodes + 1}
    roles = {"Master": 1, "Worker": nodes - 1}
    replicas = {
        role: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
        for role, count in roles.items()
        if count
    }
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": job_metadata(job),
            "spec": {
                "nprocPerNode": str(job.gpus_per_node or job.cpus_per_node),
                "runPolicy": run_policy,
                "pytorchReplicaSpecs": replicas,
            },
        }
    ]


def train_job(job: JobArgs, launch: Launch, files_name: str) -> list[dict]:
    """Make a TrainJob for Kubeflow Trainer 2.3, with a runtime of its own.

    Kubeflow sets PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT.
    A pod that fails or is gone fails the Job (backoffLimit 0), and JobSet replaces all pods (maxRestarts).
    """
    spec = pod(job, launch, files_name, "node", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)")
    template = {"metadata": annotations(job)} if job.annotation else {}
    template |= {"spec": {"restartPolicy": "Never", **spec}}
    trainer_label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job_template = {"metadata": {"labels": trainer_label}, "spec": {"backoffLimit": 0, "template": template}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(job, job.name, **{"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.max_restarts},
                    "replicatedJobs": [{"name": "node", "template": job_template}],
                }
            },
        },
    }
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": job_metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "numNodes": job.nodes,
                "numProcPerNode": job.gpus_per_node or job.cpus_per_node,
                # Trainer counts processes by these resources.
                "resourcesPerNode": resources(job),
            },
        },
    }
    return [runtime, train]


def pod(job: JobArgs, launch: Launch, files_name: str, container: str, address: str, port: str) -> dict:
    """Describe a node's pod. `address` and `port` of the first node are variables that Kubernetes fills in."""
    grace = launch.signal_seconds if job.grace_seconds is None else job.grace_seconds
    env = {
        "HOME": "/tmp",  # the image's user may have no home
        "HF_HOME": CACHE if job.cache_pvc else f"{CHECKPOINTS}/.cache/huggingface",
        # A run that was told to stop is not finished: with exit code 0 its pods would count as finished.
        "STOPPED_EXIT_CODE": "75",
        # The launcher kills processes that are still saving after 30 s, whatever the pod's grace period is.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace - 15),
    }
    env |= {"HF_HUB_OFFLINE": "1"} if job.cache_pvc else {}
    env |= (EFA | FABRIC.get(job.instance, {})) if job.efa else {}
    variables = [{"name": name, "value": value} for name, value in env.items()]
    if job.token_secret:
        reference = {"secretKeyRef": {"name": job.token_secret, "key": "token"}}
        variables.append({"name": "HF_TOKEN", "valueFrom": reference})
    volumes = {
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": job.shm_size}}),
        "checkpoints": (CHECKPOINTS, {"persistentVolumeClaim": {"claimName": job.checkpoints_pvc}}),
        "files": (FILES, {"configMap": {"name": files_name}}),
    }
    if job.cache_pvc:
        volumes["cache"] = (CACHE, {"persistentVolumeClaim": {"claimName": job.cache_pvc}})
    selector = {"node.kubernetes.io/instance-type": job.instance_type} if job.instance_type else {}
    selector |= pairs(job.node_selector)
    spec = {
        # The pod gets neither the token of a service account nor variables of every service in the namespace.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # else each start visits all files of the volumes
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": command(launch, address, port),
                "env": variables,
                "resources": resources(job),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
            }
        ],
    }
    spec |= {"nodeSelector": selector} if selector else {}
    spec |= {"tolerations": list(map(toleration, job.toleration))} if job.toleration else {}
    return spec


def command(launch: Launch, address: str, port: str) -> list[str]:
    """Build the pod's command, without a shell, which would have to pass on signals and to quote.

    The recipe has the same path in the image as here.
    """
    words = ["accelerate", "launch", "--config_file", f"{FILES}/accelerate.yaml", *launch.launch[2:]]
    words += ["--machine_rank", "$(PET_NODE_RANK)", "--main_process_ip", address, "--main_process_port", port]
    return [*words, launch.command[0], "--config", f"{FILES}/recipe.yaml"]


def resources(job: JobArgs) -> dict:
    """List a pod's resources. CPUs are requested, not limited: a limit would throttle the processes' short bursts."""
    limits = {"nvidia.com/gpu": str(job.gpus_per_node)} if job.gpus_per_node else {}
    limits |= {"vpc.amazonaws.com/efa": str(job.efa)} if job.efa else {}
    limits |= {"memory": job.memory} if job.memory else {}
    cpu = {"cpu": str(job.cpus_per_node)} if job.cpus_per_node else {}
    return {"requests": cpu | limits, **({"limits": limits} if limits else {})}


def pairs(texts: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


def toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return found | ({"effect": effect} if effect else {})
