"""Tests of Kubernetes jobs: what is rendered, and what is refused. test_kubernetes_runs.py runs their commands."""

import copy
import re
import shutil
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, refused, refuses
from kubernetes_schemas import pod_specs, problems

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import gpus, shipped
from accelerate_recipes.life.status import update_status
from recipe_tools import kubernetes, preflight
from recipe_tools.kubernetes import INSTANCES, num_bytes, render_manifest

KINDS = ("pytorchjob", "trainjob")
IMAGE = "registry.example/accelerate-recipes:1.0"
JOB = ["--image", IMAGE, "--checkpoints-pvc", "fsx-claim"]
GPUS = [*JOB, "--nodes", "4", "--gpus-per-node", "8"]
CPUS = [*JOB, "--nodes", "2", "--gpus-per-node", "0", "--cpus-per-node", "2"]
FULL = "accelerate_configs/fsdp_full.yaml"
LAPTOP = ["recipes/chess.py", "--config", "recipes/configs/chess/laptop.yaml", "--per_device_train_batch_size", "4"]
C4 = ["recipes/c4.py", "--max_steps", "5"]
# Rows of these are made in outputs/, where no pod finds them.
MADE = ("sft_vlm/laptop.yaml", "distill/chess.yaml", "decide/chess.yaml", "dpo/chess.yaml", "grpo/chess.yaml")
OF_MADE_ROWS = {ROOT / "recipes/configs" / name for name in MADE}
PRESETS = sorted({*(ROOT / "recipes/configs").glob("*/*.yaml")} - OF_MADE_ROWS)
# Further arguments that a preset needs on 32 processes.
MODELS_OF_SFT = {path.stem for path in PRESETS if path.parent.name in ("sft", "sft_vlm")} - {
    "arithmetic", "arithmetic_mixture",
}  # fmt: skip  # their rows are the user's
FLAGS = {
    **{
        name: ["--dataset_name", "trl-lib/Capybara", "--per_device_train_batch_size", "2", "--total_batch_size", "64"]
        for name in MODELS_OF_SFT
    },
    **{f"deepvit_{layers}": ["--per_device_train_batch_size", "32"] for layers in (16, 24, 32)},
    "vit_large_imagenet": ["--per_device_train_batch_size", "16"],
    "arithmetic": ["--per_device_train_batch_size", "2"],
    "arithmetic_mixture": ["--per_device_train_batch_size", "2"],
    "t5": ["--per_device_train_batch_size", "4"],
    "laptop": ["--total_batch_size", "32", "--per_device_train_batch_size", "1"],
    "laptop_long": ["--total_batch_size", "32"],
    "qwen3_0_6b": ["--dataset_name", "trl-lib/Capybara", "--per_device_train_batch_size", "2"],
}


pytestmark = pytest.mark.usefixtures("at_the_root")


def rendered(kind: str, *argv: str) -> tuple[list[dict], str]:
    """Render a job, which a cluster accepts; return its documents, and what is said of it."""
    manifest, said = render_manifest(kind, argv)
    found = list(yaml.safe_load_all(manifest))
    assert problems(found) == []
    return found, said


def documents(kind: str, *argv: str) -> list[dict]:
    return rendered(kind, *argv)[0]


def of_kind(documents: list[dict], kind: str) -> dict:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def the_pod(documents: list[dict]) -> dict:
    return next(spec for document in documents for _, spec in pod_specs(document))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_preset(preset):
    """A cluster accepts both kinds of job, and the pods get the arguments of the command line."""
    script = f"recipes/{preset.parent.name}.py"
    run = ["--config", str(preset.relative_to(ROOT)), *FLAGS.get(preset.parent.name, []), *FLAGS.get(preset.stem, [])]
    gpus, strategy, flags = GPUS, FULL, []
    if preset.stem.endswith("_one_gpu"):  # in pure bf16; without DDP a pod would hear of no signal
        gpus = [*JOB, "--nodes", "1", "--gpus-per-node", "1"]
        strategy = "accelerate_configs/ddp.yaml"
        flags = ["--mixed_precision", "no", "--dynamo_backend", "inductor", "--dynamo_use_regional_compilation"]
    if preset.stem.endswith("_128k"):
        strategy, flags = "accelerate_configs/fsdp_long.yaml", ["--parallelism_config_cp_size", "8"]
    for kind in KINDS:
        found = documents(kind, *gpus, "--instance-type", "p5.48xlarge", strategy, "--no_plan", *flags, script, *run)
    data = of_kind(found, "ConfigMap")["data"]
    assert data["accelerate.yaml"] == Path(strategy).read_text()
    assert the_pod(found)["containers"][0]["command"][-3] == script


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_rows(kind):
    """They are those of a node, and the nodes hold shards; rows that lie on two nodes are warned of."""
    job, flag = [*JOB, "--nodes", "4", "--gpus-per-node", "2"], "--parallelism_config_cp_size"
    long = [*job, "accelerate_configs/fsdp_long.yaml"]
    sizes = {"num_processes": "8", "parallelism_config_dp_shard_size": "4"}
    for given, wanted in (([flag, "2"], sizes | {flag[2:]: "2"}), ([], sizes)):  # 2 is also the size in the YAML
        found, said = rendered(kind, *long, *given, *LAPTOP)
        command = the_pod(found)["containers"][0]["command"]
        assert {name: command[command.index(f"--{name}") + 1] for name in wanted} == wanted
        assert "4 groups of 2 processes that share rows" in said and "share a row, but" not in said
    assert "4 ranks share a row, but a machine has 2 processes" in rendered(kind, *long, flag, "4", *LAPTOP)[1]
    said = r"--parallelism_config_cp_size: .*fsdp_full.yaml has no parallelism_config"
    refuses(said, render_manifest, kind, [*job, FULL, flag, "2", *LAPTOP])


def test_pods_get_the_resolved_arguments(tmp_path):
    """The file in the ConfigMap agrees with preset and flags; runs write to the volume."""
    run = [*LAPTOP, "--learning_rate", "1e-4", "--no_document_mask"]
    data = of_kind(documents("trainjob", *CPUS, FULL, *run), "ConfigMap")["data"]
    args_class = shipped.load(run[0]).Args
    expected = parse(args_class, run[1:], world_size=4).values()
    for name in ("output_dir", "data_cache_dir"):
        expected[name] = f"/checkpoints/{expected[name]}"
    assert yaml.safe_load(data["recipe.yaml"]) == expected
    (tmp_path / "recipe.yaml").write_text(data["recipe.yaml"])
    assert parse(args_class, ["--config", str(tmp_path / "recipe.yaml")], world_size=4).values() == expected


def test_files_of_another_content_have_another_name():
    """Restarted pods keep their files, because files with other content have another name."""
    one, same, other = (
        of_kind(documents("pytorchjob", *CPUS, FULL, *LAPTOP, "--seed", seed), "ConfigMap") for seed in ("1", "1", "2")
    )
    assert one == same and one["immutable"]
    assert one["metadata"]["name"] != other["metadata"]["name"]


WRONG = {
    "nothing given": ([], "--image is missing", "--nodes is missing", "--gpus-per-node is missing", "--checkpoints-pvc is missing"),
    "an empty value": (["--image", "", "--memory", ""], "--image is missing"),
    "no value": (["--nodes", "--image", IMAGE], "--nodes: expected one argument"),
    "misspelt": (["--node", "2"], "unknown argument 'node'", "did you mean 'nodes'?"),
    "negative": (["--nodes", "-1", "--cpus-per-node", "0"], "--nodes is -1; it must be at least 1", "--cpus-per-node is 0"),
    "no number": (["--nodes", "four"], "--nodes: invalid int value: 'four'"),
    "no tag": (["--image", "registry.example:5000/name"], "has no tag: pods that start later may get another one"),
    "latest": (["--image", "name:latest"], "has the tag latest"),
    "no image": (["--image", "Name With Spaces:1"], "is not the name of an image"),
    "a name of no service": (["--name", "8b"], "--name '8b': a name has a-z, 0-9, -, begins with a letter"),
    "a long name": (["--name", "x" * 56], "has 56 characters; there is room for 5"),
    "a claim": (["--checkpoints-pvc", "FSX_claim"], "--checkpoints-pvc 'FSX_claim': a name has a-z, 0-9, -, ."),
    "no size": (["--memory", "64GB", "--shm-size", "0Gi"], "--memory '64GB' is not a size", "--shm-size '0Gi' is not a size"),
    "sizes": (["--memory", "8Gi", "--shm-size", "16Gi"], "--shm-size 16Gi is a part of --memory 8Gi"),
    "CPUs": (["--gpus-per-node", "0"], "--cpus-per-node says how many processes a pod has; give it"),
    "GPUs": (["--gpus-per-node", "16", "--instance-type", "p5.48xlarge"], "is 16, but p5.48xlarge has 8"),
    "EFA": (["--efa-per-node", "32", "--instance-type", "p4d.24xlarge"], "is 32, but p4d.24xlarge has 4 interfaces"),
    "instance": (["--instance-type", "p9.huge"], "--instance-type p9.huge is not known; known are p4d.24xlarge"),
    "class": (["--storage-class", "fsx"], "give --checkpoints-size"),
    "token": (["--token-secret", "hf", "--cache-pvc", "hub"], "--token-secret has no effect with --cache-pvc"),
    "pairs": (["--node-selector", "pool", "--annotation", "=x"], "--node-selector 'pool': write it", "--annotation '=x': write it"),
    "taint": (["--toleration", "gpu:Never"], "--toleration 'gpu:Never': write it as KEY[=VALUE][:EFFECT]"),
    "grace": (["--grace-seconds", "5"], "--grace-seconds is 5; it must be at least 30"),
    "an argument of the run": ([*GPUS, FULL, *LAPTOP, "--lerning_rate", "1"], "unknown argument 'lerning_rate'"),
    "idle GPUs": ([*JOB, "--nodes", "2", "--gpus-per-node", "2", FULL, "--num_processes", "2", *LAPTOP], "--num_processes 2 contradicts --nodes 2"),
    "the run's batch": ([*GPUS, FULL, *LAPTOP], "--total_batch_size 16 is not a multiple of"),
    "where it is written": ([*CPUS, FULL, *LAPTOP, "--output_dir", "/tmp/out"], "/tmp/out is lost with the pod; give one below /checkpoints"),
    "back out of it": ([*CPUS, FULL, *LAPTOP, "--output_dir", "../../tmp/lost"], "--output_dir /tmp/lost is lost with the pod"),
    "tokens": ([*CPUS, FULL, *C4, "--pretokenize", "/tmp/tok"], "--pretokenize /tmp/tok is lost with the pod"),
    "a cache": ([*CPUS, FULL, *LAPTOP, "--data_cache_dir", "/cache/data"], "--data_cache_dir /cache/data is lost with the pod"),
    "files beside it": ([*CPUS, FULL, *LAPTOP, "--train_files", "/checkpoints/../no.pgn"], "/checkpoints/../no.pgn: no such file"),
    "not ASCII": (["--image", "registry.example/bücher:1.0", "--memory", "\uff11\uff16Gi", "--node-selector", "größe=groß", "--toleration", "größe"],
        "'registry.example/bücher:1.0' is not the name", "--memory '\uff11\uff16Gi' is not a size", "--node-selector 'größe=groß': write", "--toleration 'größe': write"),
    "capitals": (["--image", "registry.example/Name:1.0"], "is not the name of an image"),
    "dots": (["--namespace", "a.b", "--queue", "q" * 64, "--annotation", "a../b=c"], "--namespace 'a.b': a name", "there is room for 63", "--annotation 'a../b=c'"),
    "a push without a token": ([*CPUS, FULL, *LAPTOP, "--push_to_hub", "me/tiny"], "--push_to_hub me/tiny needs a token"),
    "a push without network": ([*CPUS, "--cache-pvc", "hub", FULL, *LAPTOP, "--push_to_hub", "me/tiny"], "--push_to_hub me/tiny: pods with --cache-pvc"),
    "a push to nowhere": ([*CPUS, FULL, *LAPTOP, "--push_to_hub", "tiny"], "--push_to_hub: 'tiny' is no repository"),
    "the recipe": ([*CPUS, FULL, str(ROOT / "recipes/chess.py"), *LAPTOP[1:]], "give the recipe's path in it"),
    "the launcher": ([*JOB, "--nodes", "1", "--gpus-per-node", "1", "accelerate_configs/single.yaml", *LAPTOP], "take accelerate_configs/ddp.yaml"),
    "no run": (CPUS, "what is to run is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    argv, *expected = WRONG[case]
    with refused(*expected):
        render_manifest("pytorchjob", argv)


@pytest.mark.parametrize("kind, room", [("pytorchjob", 54), ("trainjob", 48)])
def test_longest_names(kind, room):
    """Names leave room for `-worker-0` or `-node-0-1-abcde`, which a job on two nodes appends."""
    found = documents(kind, *CPUS, "--name", "x" * room, FULL, *LAPTOP)
    said = f"has {room + 1} characters; there is room for {room}"
    refuses(said, documents, kind, *CPUS, "--name", "x" * (room + 1), FULL, *LAPTOP)
    for document in found:
        if document["kind"] in ("PyTorchJob", "TrainJob"):
            document["metadata"]["name"] += "x"
    assert any("metadata/name: too long" in problem for problem in problems(found))


def change(document: dict, path: str, value: object) -> None:
    """Set the value at a path of keys and indices, or call a function with its container; None removes the value."""
    *keys, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in keys:
        document = document[key]
    if value is None:
        del document[last]
    else:
        document[last] = value(document) if callable(value) else value


MASTER = "spec/pytorchReplicaSpecs/Master"
POD = f"{MASTER}/template/spec"
NODE = "spec/template/spec/replicatedJobs/0/template"
BROKEN = {
    "PyTorchJob": {
        f"{POD}/terminationGracePeriodSec": (600, "terminationGracePeriodSec"),
        f"{POD}/containers/0/name": ("node", "none is named pytorch"),
        f"{POD}/containers/0/image": ("name:latest", "containers/image: name:latest"),
        f"{POD}/containers/0/volumeMounts/0/name": ("shmm", "'shmm'] is mounted or defined only"),
        f"{POD}/volumes/0/emptyDir": ({}, "volumes: shared memory needs a limit"),
        f"{POD}/volumes/2/configMap/name": ("other", "volumes: no such ConfigMap"),
        f"{POD}/restartPolicy": ("Never", f"{POD}/restartPolicy"),
        f"{MASTER}/restartPolicy": ("Sometimes", f"{MASTER}/restartPolicy: Sometimes"),
        "spec/pytorchReplicaSpecs/Chief": (lambda replicas: replicas["Master"], "roles are Master and Worker"),
        "apiVersion": ("kubeflow.org/v2", "apiVersion: kubeflow.org/v2"),
        "metadata/name": ("8b", "metadata/name: '8b'"),
    },
    "TrainJob": {
        "spec/trainer/nodes": (4, "spec/trainer: "),
        "spec/runtimeRef/name": ("other", "spec/runtimeRef: there is no TrainingRuntime other"),
        "spec/runtimeRef": (None, "'runtimeRef' is a required property"),
    },
    "TrainingRuntime": {
        "spec/mlPolicy/torch": ({"numProcPerNode": 8}, "spec/mlPolicy/torch: "),
        "spec/template/spec/replicatedJobs/0/name": ("worker", "must be named node"),
        f"{NODE}/metadata": (None, "none says that it is the trainer"),
        f"{NODE}/spec/template/spec/restartPolicy": ("Always", "restartPolicy: of a Job's pods"),
        f"{NODE}/spec/template/spec/containers/0/env/0/name": ("PET_NNODES", "reserved: ['PET_NNODES']"),
        f"{NODE}/spec/template/spec/securityContext/runAsNonRoot": (False, "securityContext: not confined"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def whole_jobs() -> dict[str, list[dict]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {kind: documents(kind, *GPUS, FULL, *LAPTOP, *FLAGS["laptop"]) for kind in KINDS}


@pytest.mark.parametrize("kind, path", [(kind, path) for kind, paths in BROKEN.items() for path in paths])
def test_broken_manifests_are_found(whole_jobs, kind, path):
    """The checks that rendered jobs pass find each of these faults, and name the field."""
    value, expected = BROKEN[kind][path]
    manifest = copy.deepcopy(whole_jobs["pytorchjob" if kind == "PyTorchJob" else "trainjob"])
    change(of_kind(manifest, kind), path, value)
    assert any(expected in problem for problem in problems(manifest)), problems(manifest)


def test_the_instance_names_the_gpu(monkeypatch):
    """A run is checked for the GPU of its instance, and not rendered if it does not fit; not without one, or with --no_plan."""
    asked = []

    def memory_problems(request, env, *, is_here):
        asked.append((request.gpu, is_here))
        return "", ["it does not fit"] * (request.gpu == "l4"), []

    monkeypatch.setattr(preflight, "memory_problems", memory_problems)
    run, large = [FULL, *LAPTOP, *FLAGS["laptop"]], ("pytorchjob", *GPUS, "--instance-type", "p5.48xlarge")
    for instance in ("p4d.24xlarge", "ml.p5.48xlarge"):
        documents("pytorchjob", *GPUS, "--instance-type", instance, *run)
    assert "\nNot checked: whether the run fits" in rendered("pytorchjob", *GPUS, *run)[1]
    without = rendered(*large, FULL, "--no_plan", *run[1:])[1]
    assert "fits into memory" not in without + rendered("pytorchjob", *CPUS, FULL, *LAPTOP)[1]
    # A mistake in the job's own flags is told before the minutes of a simulation.
    refuses("has the tag latest", documents, *large, "--image", "name:latest", *run)
    refuses("it does not fit", documents, "pytorchjob", *GPUS, "--instance-type", "g6.48xlarge", *run)
    assert asked == [("a100_40", False), ("h100", False), ("l4", False)]
    assert all(instance["gpu"] in gpus.GPUS for instance in INSTANCES.values())


@pytest.mark.parametrize("instance", INSTANCES)
def test_instance_types(instance):
    gpus, efa = INSTANCES[instance]["gpus"], INSTANCES[instance]["efa"]
    job = [*JOB, "--nodes", "2", "--gpus-per-node", str(gpus), "--instance-type", instance]
    run = [FULL, "--no_plan", *LAPTOP, "--total_batch_size", "64"]
    spec = the_pod(documents("pytorchjob", *job, *run))
    container = spec["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa)}
    assert spec["nodeSelector"] == {"node.kubernetes.io/instance-type": instance}
    names = {variable["name"] for variable in container["env"] if variable["name"].startswith("FI_")}
    direct = {"FI_EFA_USE_DEVICE_RDMA"} if instance == "p4d.24xlarge" else set()
    assert names == {"FI_PROVIDER", "FI_EFA_USE_HUGE_PAGE"} | direct
    on_hyperpod = the_pod(documents("pytorchjob", *job, "--instance-type", f"ml.{instance}", *run))
    assert on_hyperpod["nodeSelector"] == {"node.kubernetes.io/instance-type": f"ml.{instance}"}
    assert on_hyperpod["containers"] == spec["containers"]
    spec = the_pod(documents("pytorchjob", *job, "--efa-per-node", "0", *run))
    assert "/efa" not in str(spec) and "FI_" not in str(spec)


def test_all_flags():
    job = [
        *GPUS, "--name", "run", "--namespace", "team", "--cpus-per-node", "90", "--memory", "1000Gi", "--shm-size", "64Gi",
        "--checkpoints-size", "1200Gi", "--storage-class", "fsx", "--cache-pvc", "hub", "--grace-seconds", "600",
        "--max-restarts", "3", "--node-selector", "pool=gpu", "example.com/zone=a", "--toleration", "nvidia.com/gpu:NoSchedule",
        "team=x", "--queue", "gpus", "--annotation", "karpenter.sh/do-not-disrupt=true",
    ]  # fmt: skip
    for kind in KINDS:
        found, said = rendered(kind, *job, FULL, "recipes/t5.py", "--dataset_name", "a/b", "--total_batch_size", "32")
        assert {document["metadata"]["namespace"] for document in found} == {"team"}
        claim, spec = of_kind(found, "PersistentVolumeClaim"), the_pod(found)
        assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == ("fsx-claim", "fsx")
        assert claim["spec"]["resources"]["requests"]["storage"] == "1200Gi"
        env = {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]}
        assert env["HF_HUB_OFFLINE"] == "1" and env["HF_HOME"] == "/cache"
        assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "585" and spec["terminationGracePeriodSeconds"] == 600
        requests = spec["containers"][0]["resources"]["requests"]
        assert (requests["cpu"], requests["memory"]) == ("90", "1000Gi")
        assert spec["nodeSelector"] == {"pool": "gpu", "example.com/zone": "a"}
        assert spec["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "team", "operator": "Equal", "value": "x"},
        ]
        assert found[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        assert str(found).count("'karpenter.sh/do-not-disrupt': 'true'") == (3 if kind == "pytorchjob" else 2)
        assert "Not checked: whether model 'google/flan-t5-base', dataset 'a/b' (en-fr) is on" in said
    assert of_kind(found, "TrainingRuntime")["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 3
    # A restart of the run restarts each of the 4 pods; the operator sums these restarts.
    job = of_kind(documents("pytorchjob", *job, FULL, *LAPTOP, *FLAGS["laptop"]), "PyTorchJob")
    assert job["spec"]["runPolicy"]["backoffLimit"] == 13


def test_flags_in_a_file(tmp_path):
    """A site can keep its flags in a file; a flag on the command line overrides it."""
    file = tmp_path / "site.yaml"
    file.write_text(f"image: {IMAGE}\ncheckpoints_pvc: fsx-claim\nnodes: 4\ngpus_per_node: 8\ntoleration: [a, b=c]\n")
    run = [FULL, *LAPTOP, *FLAGS["laptop"]]
    expected = render_manifest("trainjob", [*GPUS, "--toleration", "a", "b=c", "--queue", "q", *run])
    assert render_manifest("trainjob", ["--config", str(file), "--queue", "q", *run]) == expected
    assert render_manifest("trainjob", [f"--config={file}", "--queue", "q", *run]) == expected
    file.write_text("nodes: 4\nmemry: 1Gi\n")
    said = r"unknown argument 'memry' in .*site\.yaml; did you mean 'memory'\?"
    refuses(said, documents, "trainjob", "--config", str(file), *GPUS, *run)


def test_grace_period(monkeypatch, tmp_path):
    """If the volume is visible, the grace period is twice the longest save plus two minutes."""
    monkeypatch.setattr(kubernetes, "CHECKPOINTS", str(tmp_path))

    def grace() -> tuple[int, str]:
        spec = the_pod(documents("pytorchjob", *CPUS, FULL, *LAPTOP, "--output_dir", "out"))
        env = {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]}
        return spec["terminationGracePeriodSeconds"], env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]

    assert grace() == (300, "285")
    (tmp_path / "out").mkdir()
    update_status(tmp_path / "out", longest_save_seconds=99.5)
    assert grace() == (320, "305")


def test_what_only_the_cluster_knows_is_left_to_the_run():
    """The checkpoint to resume, models of the Hub and files on volumes are not checked; a file of the image must be here."""
    run = ["recipes/chess.py", "--total_batch_size", "32", "--resume_from_checkpoint", "/checkpoints/old/checkpoint-7"]
    files = ["--model_name_or_path", "/cache/model", "--train_files", "/checkpoints/games.pgn"]
    job = ("pytorchjob", *GPUS, FULL, *run)
    documents(*job, *files)
    said = r"nowhere\.pgn: no such file\n(.|\n)*games\.txt: its name must end"
    refuses(said, documents, *job, "--train_files", "nowhere.pgn", "/checkpoints/games.txt")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Repository, as the working directory, and beside it what only this machine has."""
    repository, mine = tmp_path / "repository", tmp_path / "mine"
    shutil.copytree(ROOT, repository, symlinks=True)
    for folder in (mine, repository / "outputs/run/export", repository / "outputs/run/checkpoint-7"):
        folder.mkdir(parents=True)
    for file in (mine / "rows.jsonl", repository / "rows.jsonl"):
        file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    (mine / "rewards.py").write_text("def score(completions, **columns):\n    return [0.0]\n")
    (mine / "template.jinja").write_text("{{ messages }}")
    (mine / "model").mkdir()
    monkeypatch.chdir(repository)
    return mine


def test_what_only_this_machine_has_is_refused(elsewhere):
    """Models, data, rewards, templates and checkpoints of this machine, with absolute and relative paths, all at once."""
    read = ["--model_name_or_path", "outputs/run/export", "--resume_from_checkpoint", "outputs/run/checkpoint-7"]
    read += [
        "--chat_template_path", f"{elsewhere}/template.jinja", "--train_files", "rows.jsonl",
        f"{elsewhere}/rows.jsonl",
    ]  # fmt: skip
    lie_here = [f" {text} lies on this machine, where no pod finds it" for text in read if not text.startswith("--")]
    with refused(*lie_here) as caught:
        render_manifest("pytorchjob", [*CPUS, FULL, "recipes/sft.py", *read])
    assert str(caught.value).count("where no pod finds it") == 5
    said = r"/mine/model lies on(.|\n)*--rewards .*/mine/rewards.py:score lies on"
    read = ["--rewards", f"{elsewhere}/rewards.py:score", "--model_name_or_path", f"{elsewhere}/model"]
    refuses(said, documents, "pytorchjob", *CPUS, FULL, "recipes/grpo.py", *read)


def test_what_pods_have_is_rendered(elsewhere):
    """Files of the image, of volumes, and of the Hub, and words that are also names of folders here; a link leads out."""
    Path("cosine").mkdir()  # --lr_scheduler_type
    run = [*LAPTOP, "--model_name_or_path", "/opt/model", "--resume_from_checkpoint", "/checkpoints/old/checkpoint-7"]
    job = ("pytorchjob", *CPUS, FULL, *run)
    assert "warning: --model_name_or_path /opt/model " in rendered(*job, "--from_scratch", "false")[1]
    data = Path("data")
    data.unlink()
    shutil.copytree(ROOT / "data/chess", data / "chess")
    games = data / "chess/games_20k.parquet"
    documents(*job, "--train_files", str(games))
    games.rename(elsewhere / "games.parquet")
    games.symlink_to(elsewhere / "games.parquet")
    refuses(f"--train_files {games} lies on this machine", documents, *job, "--train_files", str(games))


def test_no_token_in_the_output(monkeypatch, command):
    """The command prints only the manifest on stdout and messages on stderr; the token is in neither."""
    token = "hf_" + "secret" * 5
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, token)
    job = [*GPUS, "--token-secret", "hf-token", FULL, *LAPTOP, *FLAGS["laptop"]]
    done = command("k8s", "trainjob", *job)
    found = list(yaml.safe_load_all(done.stdout))
    assert problems(found) == []
    assert "Ready: fsdp_full.yaml with 32 processes" in done.stderr
    assert token not in done.stdout + done.stderr
    (variable,) = [one for one in the_pod(found)["containers"][0]["env"] if one["name"] == "HF_TOKEN"]
    assert variable == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}}


def test_credentials_of_a_mirror():
    """They come from a Secret; a folder of this machine is no place for pods."""
    job = ["trainjob", *GPUS, "--mirror-secret", "s3-keys", FULL, *LAPTOP, *FLAGS["laptop"]]
    found = documents(*job, "--mirror", "file:///elsewhere/run")
    assert the_pod(found)["containers"][0]["envFrom"] == [{"secretRef": {"name": "s3-keys"}}]
    for words, said in (([], "secret has no effect"), (["--mirror", "/mnt/other"], "pods have no such folder")):
        refuses(said, documents, *job, *words)


@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind):
    """The jobs equal the texts in tests/golden/, so that a change shows in full. Resolved arguments are tested above."""
    job = [*GPUS, "--instance-type", "p4d.24xlarge", "--token-secret", "hf-token", "--queue", "gpus"]
    words = [*job, "accelerate_configs/fsdp_hybrid.yaml", "--no_plan", *LAPTOP, *FLAGS["laptop"]]
    manifest, _ = render_manifest(kind, words)
    text = re.sub(r"chess-[0-9a-f]{10}", "chess-0123456789", manifest.partition("---\n")[2])
    file = ROOT / f"tests/golden/{kind}.yaml"
    assert text == file.read_text(), f"if that is meant, write this to {file}:\n{text}"


def test_sizes():
    assert [num_bytes(text) for text in ("1.5Gi", "2G", "7", "1k")] == [1.5 * 2**30, 2e9, 7, 1000]
