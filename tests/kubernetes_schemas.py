"""Checks that find, without a cluster, what a cluster would refuse in a manifest: schemas, and rules of webhooks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import kubernetes_validate

VERSION = "1.32"  # of Kubernetes
SCHEMAS = {"PyTorchJob": "pytorchjob", "TrainJob": "trainjob", "TrainingRuntime": "trainingruntime"}
API_VERSIONS = {"PyTorchJob": "kubeflow.org/v1"} | dict.fromkeys(
    ("TrainJob", "TrainingRuntime"), "trainer.kubeflow.org/v1alpha1"
)


def strict(schema):
    """Make a schema forbid unknown fields, which the API server would silently drop."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if schema.pop("x-kubernetes-int-or-string", None):
        schema = {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and "type" in schema and "additionalProperties" not in schema:
        schema["additionalProperties"] = False
    return schema


VALIDATORS = {
    kind: jsonschema.Draft202012Validator(strict(json.loads((Path(__file__).parent / f"crds/{name}.json").read_text())))
    for kind, name in SCHEMAS.items()
}


def problems(documents: list[dict]) -> list[str]:
    """List all problems of manifests, each with the path of its field."""
    found = []
    for document in documents:
        kind = document["kind"]
        if kind in VALIDATORS:
            for error in VALIDATORS[kind].iter_errors(document):
                found.append(f"{'/'.join(map(str, error.path))}: {error.message}")
            if document["apiVersion"] != API_VERSIONS[kind]:
                found.append(f"apiVersion: {document['apiVersion']}")
        else:
            found += kubernetes_problems("", document)
        for path, spec in pod_specs(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
            found += kubernetes_problems(f"{path}/", pod)
    return found or rules(documents)


def kubernetes_problems(path: str, document: dict) -> list[str]:
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{path}{'/'.join(map(str, error.path))}: {error.message}"]
    return []


def pod_specs(document, path: str = "") -> Iterator[tuple[str, dict]]:
    if isinstance(document, dict):
        if "containers" in document:
            yield path, document
        for key, value in document.items():
            yield from pod_specs(value, f"{path}/{key}")
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from pod_specs(value, f"{path}/{i}")


def rules(documents: list[dict]) -> list[str]:
    """Check what schemas do not: names, references, and the rules of the webhooks of the operators and of JobSet."""
    found = []
    by_kind = {document["kind"]: document for document in documents}
    for document in documents:
        name = document["metadata"]["name"]
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?(\.[-a-z0-9]+)*", name):
            found.append(f"metadata/name: {name!r} is not of RFC 1035")
        for path, spec in pod_specs(document):
            found += [f"{path}/{problem}" for problem in pod_problems(spec, by_kind)]
    if job := by_kind.get("PyTorchJob"):
        found += pytorch_job_problems(job)
    if job := by_kind.get("TrainJob"):
        found += train_job_problems(job, by_kind["TrainingRuntime"])
    return found


def pytorch_job_problems(job: dict) -> list[str]:
    found, spec, name = [], job["spec"], job["metadata"]["name"]
    replicas = spec["pytorchReplicaSpecs"]
    if not set(replicas) <= {"Master", "Worker"}:
        found.append(f"spec/pytorchReplicaSpecs: roles are Master and Worker, not {sorted(replicas)}")
    if replicas.get("Master", {}).get("replicas") != 1:
        found.append("spec/pytorchReplicaSpecs/Master/replicas: there must be one")
    for role, replica in replicas.items():
        path = f"spec/pytorchReplicaSpecs/{role}"
        if replica["restartPolicy"] not in ("Always", "OnFailure", "Never", "ExitCode"):
            found.append(f"{path}/restartPolicy: {replica['restartPolicy']}")
        if "pytorch" not in [container["name"] for container in replica["template"]["spec"]["containers"]]:
            found.append(f"{path}/template/spec/containers: none is named pytorch")
        if "restartPolicy" in replica["template"]["spec"]:
            found.append(f"{path}/template/spec/restartPolicy: the operator overwrites it")
        if len(f"{name}-{role.lower()}-{replica['replicas'] - 1}") > 63:
            found.append("metadata/name: too long for the names of its services")
    if "elasticPolicy" in spec and "nProcPerNode" in spec["elasticPolicy"] and "nprocPerNode" in spec:
        found.append("spec/nprocPerNode: also in elasticPolicy")
    return found


def train_job_problems(job: dict, runtime: dict) -> list[str]:
    found, name = [], job["metadata"]["name"]
    reference = job["spec"]["runtimeRef"]
    if (reference["kind"], reference["name"]) != (runtime["kind"], runtime["metadata"]["name"]):
        found.append(f"spec/runtimeRef: there is no {reference['kind']} {reference['name']}")
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    ((path, spec),) = pod_specs(runtime)
    if [one["name"] for one in replicated] != ["node"] or spec["containers"][0]["name"] != "node":
        found.append(f"{path}: Job and container must be named node")
    labels = replicated[0]["template"].get("metadata", {}).get("labels", {})
    if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") != "trainer":
        found.append("spec/template/spec/replicatedJobs/0/template/metadata/labels: none says that it is the trainer")
    if spec.get("restartPolicy") not in ("Never", "OnFailure"):
        found.append(f"{path}/restartPolicy: of a Job's pods it is Never or OnFailure")
    if len(f"{name}-node-0-{job['spec']['trainer']['numNodes'] - 1}-abcde") > 63:
        found.append("metadata/name: too long for the names of its pods")
    if reserved := [one["name"] for one in spec["containers"][0]["env"] if one["name"].startswith("PET_")]:
        found.append(f"{path}/containers/0/env: reserved: {reserved}")
    return found


def pod_problems(spec: dict, by_kind: dict[str, dict]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    shm = volumes["shm"]["emptyDir"]
    if shm.get("medium") != "Memory" or "sizeLimit" not in shm:
        yield "volumes: shared memory needs a limit"
    if volumes["files"]["configMap"]["name"] != by_kind["ConfigMap"]["metadata"]["name"]:
        yield "volumes: no such ConfigMap"
    for container in spec["containers"]:
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        if mounted != set(volumes):
            yield f"containers/volumeMounts: {sorted(mounted ^ set(volumes))} is mounted or defined only"
        names = [variable["name"] for variable in container["env"]]
        if len(names) != len(set(names)):
            yield f"containers/env: a name comes twice in {names}"
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        if not int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < spec["terminationGracePeriodSeconds"]:
            yield "terminationGracePeriodSeconds: the launcher waits longer for its processes"
        if not re.search(r":(?!latest$)[\w.-]+$|@sha256:", container["image"]):
            yield f"containers/image: {container['image']} may be another one tomorrow"
        resources = container["resources"]
        for name, limit in resources.get("limits", {}).items():
            if resources["requests"].get(name) != limit:
                yield f"containers/resources: {name} must be asked for as it is limited"
    context = spec["securityContext"]
    if not context["runAsNonRoot"] or not context["runAsUser"] or "seccompProfile" not in context:
        yield "securityContext: not confined"
