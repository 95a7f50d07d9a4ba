"""Rendering of a run as a Kubernetes job.

    python -m accelerate_recipes k8s KIND [FLAGS] CONFIG [LAUNCH FLAGS] RECIPE [ARGS]

KIND is `pytorchjob` (Kubeflow's training operator, v1) or `trainjob` (Kubeflow Trainer 2.3). Prints YAML for
`kubectl apply -f -`: a ConfigMap with the accelerate YAML and the resolved arguments, and the job. The same input gives
the same output. A run that cannot start is not rendered.

In every pod `accelerate launch` is the first process: it gets the SIGTERM when the pod is deleted, and passes it on.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import yaml

from accelerate_recipes.args import arg, resolve
from accelerate_recipes.arguments.declaring import Range, read_yaml
from accelerate_recipes.errors import collecting_errors, raise_problems, that_apply
from recipe_tools.preflight import Launch, check

FILES = "/etc/accelerate-recipes"
TEMPLATES = yaml.safe_load((Path(__file__).parent / "jobs.yaml").read_text(encoding="utf-8"))
# Name of the container that an operator looks for; then address and port of the first node, which Kubernetes fills in.
KINDS = {
    "pytorchjob": ("pytorch", "$(MASTER_ADDR)", "$(MASTER_PORT)"),
    "trainjob": ("node", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)"),
}
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


def render_manifest(kind: str, argv: Sequence[str]) -> tuple[str, str]:
    """Return the manifest and the messages about it.

    Raises:
        ConfigError: with all problems of the job and of the run.
    """
    job, config, launch = check_job(kind, argv)
    said = [launch.said]
    if job.gpus_per_node and job.instance not in INSTANCES and "--no_plan" not in argv:
        said.append("Not checked: whether the run fits into memory; give --instance-type")
    if job.cache_pvc and launch.needs:
        needs = ", ".join(map(str, launch.needs))
        said.append(f"Not checked: whether {needs} is on the volume of {job.cache_pvc}, downloaded into {CACHE}")
    return manifest(kind, job, config.read_text(encoding="utf-8"), launch), "\n".join(said)


def check_job(kind: str, argv: Sequence[str]) -> tuple[JobArgs, Path, Launch]:
    """Check the flags of a job and the run in it; return the flags, the accelerate YAML, and the launch.

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
        size += ["--gpu", INSTANCES[job.instance]["gpu"]] if job.instance in INSTANCES else []
        # A simulation takes minutes: what is wrong already is said without it.
        size += ["--no_plan"] if problems else []
        volumes = (CHECKPOINTS, CACHE) if job.cache_pvc else (CHECKPOINTS,)
        with collecting_errors(problems):
            launch, found = check([run[0], *map(str, size), *run[1:]], volumes)
            problems += found
    if launch is not None:
        problems += pod_problems(run[0], job, launch)
        job.name = job.name or Path(launch.command[0]).stem.replace("_", "-")
    if job.name:
        # The operator appends to the name; the result must be a valid label.
        last = (job.nodes or 1) - 1
        suffix = f"-worker-{max(0, last - 1)}" if kind == "pytorchjob" else f"-node-0-{last}-abcde"
        problems += label_problems("name", job.name, LABEL, 63 - len(suffix))
    raise_problems("This job is not rendered", problems)
    assert launch is not None
    return job, Path(run[0]), launch


def manifest(kind: str, job: JobArgs, config: str, launch: Launch) -> str:
    """Render a checked job; `config` is the content of the accelerate YAML."""
    recipe = yaml.safe_dump(launch.args.values(), sort_keys=False)
    digest = hashlib.sha256(f"accelerate.yaml\0{config}\0recipe.yaml\0{recipe}".encode()).hexdigest()
    grace = launch.signal_seconds if job.grace_seconds is None else job.grace_seconds
    nodes, processes = job.nodes or 1, job.gpus_per_node or job.cpus_per_node
    container, address, port = KINDS[kind]
    # No shell: it would have to pass on signals, and needs quoting. The recipe has the same path in the image as here.
    command = ["accelerate", "launch", "--config_file", f"{FILES}/accelerate.yaml", *launch.launch[2:]]
    command += ["--machine_rank", "$(PET_NODE_RANK)", "--main_process_ip", address, "--main_process_port", port]
    command += [launch.command[0], "--config", f"{FILES}/recipe.yaml"]
    by_type = {"node.kubernetes.io/instance-type": job.instance_type} if job.instance_type else {}
    holes = vars(job) | {
        "annotations": pairs(job.annotation),
        "cache_path": CACHE,
        "checkpoints_path": CHECKPOINTS,
        "command": command,
        "config": config,
        "container": container,
        "cpus": str(job.cpus_per_node or ""),
        "efa": str(job.efa or ""),
        "env_from": [{"secretRef": {"name": job.mirror_secret}}] if job.mirror_secret else [],
        "files": f"{job.name}-{digest[:10]}",
        "files_path": FILES,
        "gpus": str(job.gpus_per_node or ""),
        "grace": grace,
        "hf_home": CACHE if job.cache_pvc else f"{CHECKPOINTS}/.cache/huggingface",
        "node_labels": by_type | pairs(job.node_selector),
        "processes": processes,
        "processes_in_words": str(processes),
        "rdma": job.efa and job.instance == "p4d.24xlarge",
        "recipe": recipe,
        "restart_policy": "Never" if kind == "trainjob" else "",  # a PyTorchJob has this field beside its pods
        # The operator sums the restarts of all running pods, and fails the job when the sum reaches the limit.
        "restarts_of_pods": job.max_restarts * nodes + 1,
        "shutdown_timeout": str(grace - 15),
        "tolerations": list(map(as_toleration, job.toleration)),
        "workers": nodes - 1,
    }
    documents = fill_holes(TEMPLATES["shared"] + TEMPLATES[kind], holes)
    header = "# Rendered by `python -m accelerate_recipes k8s`; to change it, render again.\n"
    # Write each list and text in full: PyYAML's defaults would use anchors and folded lines.
    return header + yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=10_000)


def fill_holes(part: Any, holes: Mapping[str, Any]) -> Any:
    """Fill the holes of a template, as `jobs.yaml` describes them; None and an empty text, list or section are left out."""
    if isinstance(part, str) and part.startswith("$"):
        return None if (value := holes[part[1:]]) in ("", [], {}) else value
    if isinstance(part, list):
        return [value for item in part if (value := fill_holes(item, holes)) is not None]
    if not isinstance(part, dict) or not part:
        return part
    if "when" in part and not fill_holes(part["when"], holes):
        return None
    filled = {key: fill_holes(value, holes) for key, value in part.items() if key != "when"}
    return {key: value for key, value in filled.items() if value is not None} or None


def pod_problems(config: str, job: JobArgs, launch: Launch) -> list[str]:
    """List reasons why a run that starts here would not start in a pod, or could not write from there what it should."""
    script, push, mirror = Path(launch.command[0]), launch.args.push_to_hub, launch.args.mirror
    is_outside, kind = script.is_absolute() or ".." in script.parts, read_yaml(Path(config)).get("distributed_type")
    problems = {
        f"{script}: the image holds this repository; give the recipe's path in it, such as recipes/chess.py": is_outside,
        f"{config}: with `distributed_type: NO` the launcher does not pass on the signal that deletes a pod, and nothing is "
        "saved; take accelerate_configs/ddp.yaml, which does the same on one process": kind == "NO",
        f"--push_to_hub {push}: pods with --cache-pvc use no network; remove one of the two": push and job.cache_pvc,
        f"--push_to_hub {push} needs a token that may write; give --token-secret": push
        and not (job.cache_pvc or job.token_secret),
        f"--mirror {mirror}: the pods have no such folder; give a URL": mirror and "://" not in mirror,
        "--mirror-secret has no effect without --mirror; add that to the run, or remove it": job.mirror_secret
        and not mirror,
    }
    return that_apply(problems)


class Plain(yaml.SafeDumper):
    """YAML dumper that writes no aliases and keeps texts of several lines readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


Plain.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def pairs(texts: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


def as_toleration(text: str) -> dict[str, str]:
    """Read KEY[=VALUE][:EFFECT]."""
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return found | ({"effect": effect} if effect else {})
