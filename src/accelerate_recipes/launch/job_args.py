"""Flags of a Kubernetes job, and what is wrong with them."""

import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

from accelerate_recipes.args import arg
from accelerate_recipes.arguments.declaring import Range, read_yaml
from accelerate_recipes.errors import that_apply

CHECKPOINTS, CACHE = "/checkpoints", "/cache"  # where pods mount the volumes
INSTANCES = read_yaml(Path(__file__).parent / "instances.yaml")

QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(|k|M|G|T|Ki|Mi|Gi|Ti)")
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035, required for services
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # RFC 1123
SUBDOMAIN = re.compile(rf"{NAMESPACE.pattern}(\.{NAMESPACE.pattern})*")
KEY = rf"({SUBDOMAIN.pattern}/)?[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?"
VALUE = r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?"
IMAGE = re.compile(
    r"[a-z0-9][\w.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*(:(?P<tag>\w[\w.-]*))?(@(?P<digest>sha256:[0-9a-f]{64}))?", re.ASCII
)
NAMES = {  # flags that hold names, with the largest allowed length; the queue becomes the value of a label
    "namespace": (NAMESPACE, 63), "checkpoints_pvc": (SUBDOMAIN, 253), "cache_pvc": (SUBDOMAIN, 253),
    "token_secret": (SUBDOMAIN, 253), "mirror_secret": (SUBDOMAIN, 253), "storage_class": (SUBDOMAIN, 253),
    "queue": (SUBDOMAIN, 63),
}  # fmt: skip
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
TAINT = re.compile(f"{KEY}(={VALUE})?(:({'|'.join(EFFECTS)}))?", re.ASCII)
FORMS = {  # of flags that hold pairs
    "node_selector": (re.compile(f"{KEY}={VALUE}", re.ASCII), "KEY=VALUE"),
    "annotation": (re.compile(f"{KEY}=.*", re.ASCII | re.DOTALL), "KEY=VALUE"),
    "toleration": (TAINT, f"KEY[=VALUE][:EFFECT], EFFECT {' or '.join(EFFECTS)}"),
}
NEEDED = {"image": "REGISTRY/NAME:TAG", "nodes": "4", "gpus_per_node": "8", "checkpoints_pvc": "CLAIM"}  # with examples


@dataclass
class JobArgs:
    """Arguments of the job; the arguments of the run follow, from CONFIG on."""

    name: str = arg("", "Name of the job; default: the recipe's name.")
    namespace: str = arg("", "Namespace; default: kubectl's.")
    image: str = arg("", "Container image, with a tag other than latest, or a digest.")
    nodes: int | None = arg(None, "Number of nodes, with a pod on each.", min=1)
    gpus_per_node: int | None = arg(
        None, "GPUs of a node, one process for each; 0: as many processes as --cpus-per-node.", min=0
    )
    cpus_per_node: int | None = arg(None, "CPUs that a pod asks for.", min=1)
    memory: str = arg("", "Memory, such as 1000Gi, that a pod asks for and may use; it includes shared memory.")
    shm_size: str = arg("16Gi", "Limit of /dev/shm, where NCCL and data workers exchange data.")
    instance_type: str = arg(
        "", "Type of AWS machines; selects nodes of this type and sets up EFA. On HyperPod it begins with `ml.`"
    )
    efa_per_node: int | None = arg(None, "EFA interfaces of each pod; default: all of --instance-type.", min=0)
    checkpoints_pvc: str = arg("", f"Claim of a volume that all pods can write to, at {CHECKPOINTS}.")
    checkpoints_size: str = arg("", "Size, such as 1200Gi, of the claim --checkpoints-pvc; the claim is then made too.")
    storage_class: str = arg("", "Storage class of the claim that --checkpoints-size makes.")
    cache_pvc: str = arg("", f"Claim of a volume with downloaded models and data, at {CACHE}; pods use no network.")
    token_secret: str = arg("", "Secret that holds the Hub's token, under the key `token`.")
    mirror_secret: str = arg("", "Secret whose keys become variables of the environment: credentials of --mirror.")
    grace_seconds: int | None = arg(
        None, "Seconds from SIGTERM to SIGKILL; default: time for two saves like the longest so far, else 300.", min=30
    )
    max_restarts: int = arg(20, "Number of restarts of the whole run after which the job fails.", min=0)
    node_selector: list[str] = arg([], "Labels of the nodes to run on, as KEY=VALUE.")
    toleration: list[str] = arg([], "Taints of nodes to tolerate, as KEY[=VALUE][:EFFECT].")
    queue: str = arg("", "Name of a local queue of Kueue.")
    annotation: list[str] = arg([], "Annotations of the job and its pods, as KEY=VALUE.")

    usage: ClassVar[str] = "python -m accelerate_recipes k8s KIND [FLAGS] CONFIG [LAUNCH FLAGS] RECIPE [ARGS]"
    group = "job"
    groups: ClassVar[dict[str, str]] = {}
    owned_elsewhere: ClassVar[dict[str, str]] = {}
    ranges: ClassVar[dict[str, Range]] = {}

    @property
    def instance(self) -> str:
        """Type of the machines, as EC2 names it."""
        return self.instance_type.removeprefix("ml.")

    @property
    def efa(self) -> int:
        return INSTANCES.get(self.instance, {"efa": 0})["efa"] if self.efa_per_node is None else self.efa_per_node

    def problems(self, world_size: int) -> list[str]:
        """List what is wrong with these values, one sentence each."""
        found = [
            f"--{flag(name)} is missing; give it, such as --{flag(name)} {example}"
            for name, example in NEEDED.items()
            if getattr(self, name) in (None, "")
        ]
        for name, (pattern, limit) in NAMES.items():
            found += label_problems(flag(name), getattr(self, name), pattern, limit) if getattr(self, name) else []
        for name, (pattern, form) in FORMS.items():
            wrong = [text for text in getattr(self, name) if not pattern.fullmatch(text)]
            found += [f"--{flag(name)} {text!r}: write it as {form}" for text in wrong]
        for name in ("memory", "shm_size", "checkpoints_size"):
            size = getattr(self, name)
            if (size or name == "shm_size") and not num_bytes(size):
                found.append(f"--{flag(name)} {size!r} is not a size such as 64Gi")
        on_cpus, image, has = self.gpus_per_node == 0, IMAGE.fullmatch(self.image), INSTANCES.get(self.instance)
        is_floating = image and not image["digest"] and image["tag"] in (None, "latest")
        problems = {
            "--gpus-per-node is 0, so --cpus-per-node says how many processes a pod has; give it": on_cpus
            and self.cpus_per_node is None,
            "--instance-type and --efa-per-node are for pods with GPUs; --gpus-per-node is 0": on_cpus
            and (self.instance_type or self.efa_per_node),
            f"--image {self.image!r} is not the name of an image": self.image and not image,
            f"--image {self.image} has {'the tag latest' if image and image['tag'] else 'no tag'}: pods that start "
            "later may get another one; give a version, or a digest": is_floating,
            f"--shm-size {self.shm_size} is a part of --memory {self.memory}, and must leave room; change one of "
            "them": 0 < num_bytes(self.memory) <= num_bytes(self.shm_size),
            f"--instance-type {self.instance_type} is not known; known are {', '.join(INSTANCES)}; for another, give "
            "--efa-per-node, and --node-selector node.kubernetes.io/instance-type=...": self.instance and not has,
            "--storage-class has an effect only on a new claim; give --checkpoints-size, or remove "
            "it": self.storage_class and not self.checkpoints_size,
            "--token-secret has no effect with --cache-pvc, whose pods use no network; remove one of "
            "them": self.token_secret and self.cache_pvc,
        }
        if has:
            gpus, efa = self.gpus_per_node or 0, self.efa
            problems[f"--gpus-per-node is {gpus}, but {self.instance} has {has['gpus']}"] = gpus > has["gpus"]
            problems[f"--efa-per-node is {efa}, but {self.instance} has {has['efa']} interfaces"] = efa > has["efa"]
        return found + that_apply(problems)


def flag(name: str) -> str:
    return name.replace("_", "-")


def num_bytes(quantity: str) -> Decimal:
    """Return the bytes of a quantity; 0 if it is none."""
    parts = QUANTITY.fullmatch(quantity)
    number, unit = parts.groups() if parts else ("0", "")
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
