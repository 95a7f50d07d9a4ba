"""Rendering of a run as a Kubernetes job.

    python -m accelerate_recipes k8s KIND [FLAGS] CONFIG [LAUNCH FLAGS] RECIPE [ARGS]

KIND is `pytorchjob` (Kubeflow's training operator, v1) or `trainjob` (Kubeflow Trainer 2.3). Prints YAML for
`kubectl apply -f -`: a ConfigMap with the accelerate YAML and the resolved arguments, and the job. The same input gives
the same output. A run that cannot start is not rendered.

In every pod `accelerate launch` is the first process: it gets the SIGTERM when the pod is deleted, and passes it on.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from accelerate_recipes.args import resolve
from accelerate_recipes.arguments.declaring import read_yaml
from accelerate_recipes.errors import noting, raise_problems, that_apply
from accelerate_recipes.launch.job_args import CACHE, CHECKPOINTS, INSTANCES, LABEL, JobArgs, label_problems
from accelerate_recipes.launch.preflight import Launch, check

FILES = "/etc/accelerate-recipes"
TEMPLATES = yaml.safe_load((Path(__file__).parent / "jobs.yaml").read_text(encoding="utf-8"))
# Name of the container that an operator looks for; then address and port of the first node, which Kubernetes fills in.
KINDS = {
    "pytorchjob": ("pytorch", "$(MASTER_ADDR)", "$(MASTER_PORT)"),
    "trainjob": ("node", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)"),
}


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
        with noting(problems):
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
