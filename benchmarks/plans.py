"""Figures of `plan`: what each preset needs, which models fit on which GPUs, and what the levers cost; all simulated.

    make plans

simulates each command that benchmarks/results/plans.json does not have yet, and writes that file, the memory comments of
recipes/configs, and tables of pages. `make plans ARGS=--again` simulates all of them anew: a change of `plan/`, of the
engine or of a trial asks for it. ARGS=--check does so, and compares them with what is written; ARGS=--pages simulates none.
Models of the Hub are made from sizes that are published; nothing is downloaded.
"""

import argparse
import itertools
import json
import re
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from harness import ROOT, table
from published import RUNS, published_table

from accelerate_recipes.arguments.gpus import GIB, GPUS, OUTSIDE
from accelerate_recipes.errors import ConfigError
from recipe_tools.plan.layers import predict_outcomes
from recipe_tools.plan.predict import in_gib
from recipe_tools.plan.search import prediction_of
from recipe_tools.plan.simulate import Job, Outcome, Simulator, load_trial
from recipe_tools.planning import job_of
from recipe_tools.request import read_request

RESULT = ROOT / "benchmarks/results/plans.json"
PRESETS = ROOT / "recipes/configs"
GPUS_PER_NODE = 8
ROWS = "my_rows.jsonl"  # of the reader, in first lines of presets

# The fields of published config.json files that decide sizes. The others are in the presets of c4.py.
T5 = {"model_type": "t5", "vocab_size": 32128, "decoder_start_token_id": 0}
FLAN = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CODE_LLAMA = {"model_type": "llama", "max_position_embeddings": 16384, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
VIT = {"model_type": "vit", "image_size": 224, "patch_size": 16}
SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
QWEN2 = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6}
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6,
}  # fmt: skip
PUBLISHED = {
    "codellama/CodeLlama-7b-hf": CODE_LLAMA | {
        "vocab_size": 32016, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32,
    },
    "codellama/CodeLlama-13b-hf": CODE_LLAMA | {
        "vocab_size": 32016, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 40,
    },
    "codellama/CodeLlama-34b-hf": CODE_LLAMA | {
        "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2 | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "rope_theta": 1e5,
    },
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": SMOLLM2 | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 32, "rope_theta": 1.3e5,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2 | {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-1.5B": QWEN2 | {
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-3B": QWEN2 | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": QWEN2 | {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
    },
    # Of two that others trained on rows of a million tokens, positions are stretched.
    "Qwen/Qwen3-0.6B": QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True, "max_position_embeddings": 2**20,
    },
    "Qwen3-8B-at-1M": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 2**20},
    "KempnerForge-13B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 5120, "intermediate_size": 17920,
        "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8,
    },
    "Qwen/Qwen3-4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "Qwen/Qwen3-8B": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288},
    "google/gemma-3-4b-it": {
        "model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"}, "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
    "google-t5/t5-base": T5 | {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "google/flan-t5-base": FLAN | {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
    "google/flan-t5-xl": FLAN | {"d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32},
    "google/flan-t5-xxl": FLAN | {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
    "google/vit-large-patch16-224-in21k": VIT | {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    },
}  # fmt: skip

# Of a preset with compiled layers, which are not simulated: a flag of the launcher and an argument with which it is.
NEAREST = {
    "c4/llama2_7b_one_gpu.yaml": ("--dynamo_backend no", ""),
    "c4/llama2_7b_h100_one_gpu.yaml": ("--dynamo_backend no", " --activation_memory_budget 1"),
}

# Models of the page, by preset; of CodeLlama with another model.
MODELS = {
    "Llama 3.2 1B": "c4/llama3_2_1b.yaml",
    "Llama 3.2 3B": "c4/llama3_2_3b.yaml",
    "Llama 2 7B": "c4/llama2_7b.yaml",
    "Mistral 7B": "c4/mistral_7b.yaml",
    "Llama 3.1 8B": "c4/llama3_1_8b.yaml",
    "Llama 2 13B": "c4/llama2_13b.yaml",
    "Mixtral 8x7B": "c4/mixtral_8x7b.yaml",
    "Llama 2 70B": "c4/llama2_70b.yaml",
    "Llama 3.1 70B": "c4/llama3_1_70b.yaml",
    "CodeLlama 7B": "chess/codellama_7b.yaml",
    "CodeLlama 13B": "chess/codellama_7b.yaml --model_name_or_path codellama/CodeLlama-13b-hf",
    "CodeLlama 34B": "chess/codellama_7b.yaml --model_name_or_path codellama/CodeLlama-34b-hf",
    "FLAN-T5 3B": "t5/grammar_3b.yaml",
    "FLAN-T5 11B": "t5/grammar_11b.yaml",
}
NUMBERS = (1, 8, 64)
SIMULATED = 8  # what others need follows; see `need_of`
# FSDP2 divides a weight by its first dimension. That of a layer's experts is their number, 8: the 9th GPU gets nothing.
MOST = {"Mixtral 8x7B": 8}
SHARDED = ("parameters", "gradients", "optimizer")  # kinds of memory that grow less with more GPUs
# A GPU for each size in GB, that with the least memory.
SIZES = {24: GPUS["l4"], 48: GPUS["l40s"], 80: GPUS["h100"], 141: GPUS["h200"]}
RECOMPUTE = "--fsdp_activation_checkpointing true"
LADDER = {"as it is": "", "recomputed": RECOMPUTE, "offloaded": f"{RECOMPUTE} --fsdp_offload_params true"}
# Rank 64, which all numbers divide.
ADAPTERS = "--use_peft true --lora_r 64 --lora_dropout 0 --merge_adapter true"
SETTINGS = LADDER | {"adapters": RECOMPUTE}

# Levers of the page: config, flags of the launcher, arguments.
LEVERS = {
    "none: full shard, bf16": ("fsdp_full", "", ""),
    "sharded gradients and optimizer": ("fsdp_grad_op", "", ""),
    "hybrid, 2 replicas of 4 shards": (
        "fsdp_hybrid", "--parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 4", ""),
    "no wrapping": ("fsdp_no_wrap", "", ""),
    "DDP": ("ddp", "", ""),
    "rows shared by 2": (
        "fsdp_long", "--parallelism_config_dp_shard_size 4 --fsdp_activation_checkpointing false", ""),
    "fp32": ("fsdp_full", "--mixed_precision no", ""),
    "pure bf16, `adamw_bf16_kahan`": ("fsdp_full", "--mixed_precision no", "--optim adamw_bf16_kahan"),
    "`adafactor`": ("fsdp_full", "", "--optim adafactor"),
    "gradients summed in bf16": ("fsdp_full", "", "--reduce_dtype bf16"),
    "recomputation": ("fsdp_full", RECOMPUTE, ""),
    "... of every 2nd layer": ("fsdp_full", RECOMPUTE, "--checkpoint_every_n_layers 2"),
    "... with inputs on the CPU": ("fsdp_full", f"{RECOMPUTE} --fsdp_activation_checkpointing_offload true", ""),
    "parameters on the CPU": ("fsdp_offload", "", ""),
    "prefetching 2 layers": ("fsdp_full", "", "--prefetch_layers 2"),
    "attention by `sdpa`, with a mask": ("fsdp_full", "", "--attn_implementation sdpa"),
    "whole logits": ("fsdp_full", "", "--whole_logits true"),
}  # fmt: skip


# Models of the page on long rows.
LONG = {"8B on 8 GPUs": ("llama3_1_8b", 1), "70B on 32 GPUs": ("llama3_1_70b", 4)}  # with its number of nodes
LENGTHS = {"32k tokens": 2**15, "64k": 2**16, "128k": 2**17}
SHARE = "recomputation, 8 GPUs share a row"
WAYS = {
    "all kept": "",
    "recomputation": RECOMPUTE,
    "... and inputs on the CPU": f"{RECOMPUTE} --fsdp_activation_checkpointing_offload true",
    SHARE: "--parallelism_config_cp_size 8",  # fsdp_long.yaml recomputes
}


def presets() -> dict[str, str]:
    """Map each preset for GPUs of a recipe that `plan` simulates to its GPU, which its line on hardware has in brackets.

    Raises:
        ValueError: if such a line names none.
    """
    found = {}
    for path in sorted(PRESETS.glob("*/*.yaml")):
        hardware = re.search(r"^# Hardware: .*\bGPUs?\b.*", path.read_text(encoding="utf-8"), re.M)
        recipe = PRESETS.parent / f"{path.parent.name}.py"
        if hardware and re.search(r"\ndef trial\(.*\n    (?!raise)", recipe.read_text(encoding="utf-8")):
            gpu = re.search(r"\((\w+)\)", hardware[0])
            if not gpu or gpu[1] not in GPUS:
                raise ValueError(f"{path}: say for which GPU, one of {', '.join(GPUS)}, as in `8 GPUs of 80 GB (h100)`")
            found[str(path.relative_to(PRESETS))] = gpu[1]
    return found


def of_preset(name: str) -> str:
    """Return the command of `plan` for a preset's first line."""
    launch = (
        (PRESETS / name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# accelerate launch --config_file ")
    )
    number = re.search(r"--num_processes (\d+)", launch)
    flags = [f"--gpu {presets()[name]}"]
    if number and int(number[1]) > GPUS_PER_NODE:
        launch = launch.replace(f" {number[0]}", "")
        flags.append(f"--nodes {int(number[1]) // GPUS_PER_NODE} --gpus-per-node {GPUS_PER_NODE}")
    if name in NEAREST:
        flags.append(NEAREST[name][0])
        launch += NEAREST[name][1]
    config, _, rest = launch.partition(" ")
    return " ".join([config, *flags, rest])


def of_model(model: str, setting: str, number: int = SIMULATED) -> str:
    """Return the command of `plan` for a model in a setting of the page on fits, in a step of two rows."""
    preset, _, more = MODELS[model].partition(" ")
    task = preset.partition("/")[0]
    if setting == "adapters":
        more += f" {ADAPTERS}"
        if task == "c4":  # its presets train from scratch
            chosen = yaml.safe_load((PRESETS / preset).read_text(encoding="utf-8"))
            more += f" --model_name_or_path {chosen['tokenizer_name']}"
    words = [
        f"accelerate_configs/fsdp_full.yaml --gpu h200 --nodes 1 --gpus-per-node {number}", SETTINGS[setting],
        f"recipes/{task}.py --config recipes/configs/{preset} --per_device_train_batch_size 1",
        f"--total_batch_size {2 * number}", more.strip(),
    ]  # fmt: skip
    return " ".join(filter(None, words))


def of_lever(lever: str) -> str:
    """Return the command of `plan` for a lever, with Llama 3.1 8B on 8 H100."""
    config, flags, arguments = LEVERS[lever]
    words = [
        f"accelerate_configs/{config}.yaml --gpu h100 --num_processes 8", flags,
        "recipes/c4.py --config recipes/configs/c4/llama3_1_8b.yaml", arguments,
    ]  # fmt: skip
    return " ".join(filter(None, words))


def of_long_rows(model: str, length: str, way: str) -> str:
    """Return the command of `plan` for a row of so many tokens on each GPU, or on each 8."""
    preset, nodes = LONG[model]
    rows, config, flags = nodes * GPUS_PER_NODE, "fsdp_full", WAYS[way]  # of a forward pass
    if way == SHARE:
        rows, config, flags = nodes, "fsdp_long", f"{flags} --parallelism_config_dp_shard_size {nodes}"
    words = [
        f"accelerate_configs/{config}.yaml --gpu h100 --nodes {nodes} --gpus-per-node {GPUS_PER_NODE}", flags,
        f"recipes/c4.py --config recipes/configs/c4/{preset}.yaml --max_length {LENGTHS[length]}",
        f"--per_device_train_batch_size 1 --total_batch_size {2 * rows}",
    ]  # fmt: skip
    return " ".join(filter(None, words))


def words_of(command: str, folder: Path) -> list[str]:
    """Split a command; a model of the Hub becomes a folder with its config.json, the reader's rows an empty file."""
    argv = shlex.split(command)
    if ROWS in argv:
        (folder / ROWS).touch()
        argv[argv.index(ROWS)] = str(folder / ROWS)
    preset = ROOT / argv[argv.index("--config") + 1] if "--config" in argv else None
    chosen = yaml.safe_load(preset.read_text(encoding="utf-8")) if preset else {}
    for flag in ("--model_name_or_path", "--teacher_model_name_or_path"):
        named = argv[argv.index(flag) + 1] if flag in argv else chosen.get(flag.removeprefix("--"))
        argv += [flag, str(published(named, folder))] if named else []
    return argv


def job_for(command: str, folder: Path) -> Job:
    """Make the simulation of a command."""
    request = read_request(words_of(command, folder))
    return job_of(request, request.gpu)


def published(name: str, folder: Path) -> Path:
    """Write the config.json of a published model: one of ours, or of the preset of c4.py that has its base's tokenizer."""
    path = folder / name
    if not path.exists():
        path.mkdir(parents=True)
        if name in PUBLISHED:
            (path / "config.json").write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
        else:
            line = f"\ntokenizer_name: {name.replace('-Instruct', '')}\n"
            alike = (p for p in sorted(PRESETS.glob("c4/*.yaml")) if line in p.read_text(encoding="utf-8"))
            command = ["recipes/c4.py", "--config", str(next(alike).relative_to(ROOT))]
            load_trial(Job({"WORLD_SIZE": "1"}, command))[1].config.save_pretrained(path)
    return path


def facts_of(job: Job, outcome: Outcome) -> dict[str, Any]:
    """Keep of a prediction what pages show; sizes in bytes, times in seconds."""
    found = prediction_of(job, outcome, GPUS[job.gpu])
    return {
        "parameters": outcome.parameters,
        "in_use": outcome.peak,
        "by_kind": dict(sorted(outcome.at_peak.items(), key=lambda item: -item[1])),
        "allocator": found.allocator,
        "needed": found.needed,
        "offloaded": outcome.host_peak,
        "seconds": round(outcome.seconds, 3),
        "communication": round(outcome.communication, 3),
        "targets_per_second": round(found.targets_per_second),
        "mfu": round(found.mfu, 4),
    }


def simulate(commands: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plan commands, eight at a time; yields each with its facts, or with what is not simulated of it."""
    with tempfile.TemporaryDirectory(prefix="plans-") as folder:
        for at in range(0, len(commands), 8):
            few = commands[at : at + 8]
            jobs = [job_for(command, Path(folder)) for command in few]
            with Simulator() as simulator:
                for command, job, outcome in zip(few, jobs, predict_outcomes(simulator, jobs), strict=True):
                    if not isinstance(outcome, Outcome):
                        raise ConfigError(f"plan {command}: {outcome}")
                    yield command, facts_of(job, outcome)


def wanted(plans: dict[str, Any]) -> list[str]:
    """List the commands that the pages need; of the page on fits, those that follow from what is known so far."""
    found = [of_preset(name) for name in presets()]
    found.append(of_model("Llama 3.2 1B", "as it is", 1))  # to compare with what follows from 8
    for model in MODELS:
        found.append(of_model(model, "adapters"))
        for setting in LADDER:
            found.append(of_model(model, setting))
            if found[-1] not in plans or need_of(plans, model, 1, setting) <= SIZES[24].memory:
                break
    found += [of_long_rows(*cell) for cell in itertools.product(LONG, LENGTHS, WAYS)]
    return list(dict.fromkeys([*found, *map(of_lever, LEVERS), *(run.command for run in RUNS)]))


def need_of(plans: dict[str, Any], model: str, number: int, setting: str) -> float:
    """Return the bytes that a GPU needs, from a simulation on 8 GPUs.

    Where FSDP divides all weights evenly, parameters, gradients and optimizer of a GPU are in inverse proportion to their
    number, at every place of a step alike, and nothing else depends on it. (A single GPU gathers nothing, and needs a little
    less.)
    """
    facts = plans[of_model(model, setting)]
    sharded = sum(facts["by_kind"].get(kind, 0) for kind in SHARDED)
    return facts["needed"] + sharded * (SIMULATED / number - 1)


def memory_comment(facts: dict[str, Any], gpu: str, preset: str) -> str:
    """Write the lines of a preset on memory."""
    nearest = f", with {''.join(NEAREST[preset])}," if preset in NEAREST else ""
    verdict = "fits" if facts["needed"] <= GPUS[gpu].memory else "does not fit"
    kinds = [f"{size / GIB:.1f} {kind}" for kind, size in facts["by_kind"].items() if size >= GIB / 20]
    lines = [
        f"Memory per GPU, simulated by `make plans`{nearest} and not measured: {facts['needed'] / GIB:.1f} of "
        f"{GPUS[gpu].memory / GIB:.1f} GiB on {gpu}: {verdict}",
        f"  {facts['in_use'] / GIB:.1f}  in use at the peak: {', '.join(kinds)}",
        f"  {facts['allocator'] / GIB:.1f}  by the allocator's rounding",
        f"  {OUTSIDE / GIB:.1f}  outside of it: CUDA, NCCL, cuBLAS; assumed",
    ]
    if facts["offloaded"] > GIB / 20:
        lines.append(f"  {facts['offloaded'] / GIB:.1f}  on the host")
    wrapped = [textwrap.wrap(f"# {line}", 125, subsequent_indent="#     ") for line in lines]
    return "\n".join(line for part in wrapped for line in part) + "\n"


MEMORY = re.compile(r"^# Memory per GPU.*\n(?:#  +.*\n)*", re.M)


def with_memory(text: str, comment: str) -> str:
    """Put a comment on memory into a preset, in place of the one that is there, or after the line on hardware."""
    if MEMORY.search(text):
        return MEMORY.sub(lambda _: comment, text, count=1)
    return re.sub(r"^# Hardware: .*\n", lambda match: match[0] + comment, text, count=1, flags=re.M)


def fit_table(plans: dict[str, Any]) -> list[str]:
    """Write the table of docs/plan.md: what each model needs in each setting, and with which it fits."""
    rows = []
    for model in MODELS:
        for number in (n for n in NUMBERS if n <= MOST.get(model, n)):
            needs = {}
            for setting in LADDER:
                needs[setting] = need_of(plans, model, number, setting)
                if needs[setting] <= SIZES[24].memory:
                    break
            needs["adapters"] = need_of(plans, model, number, "adapters")
            cells = [f"{needs[setting] / GIB:,.1f}" if setting in needs else "" for setting in SETTINGS]
            fits = [next((s for s in needs if needs[s] <= gpu.memory), "no") for gpu in SIZES.values()]
            rows.append([model if number == NUMBERS[0] else "", str(number), *cells, *fits])
    settings = (f"{setting}, GiB" for setting in SETTINGS)
    return table(["", "GPUs", *settings, *(f"{size} GB" for size in SIZES)], rows)


def lever_table(plans: dict[str, Any]) -> list[str]:
    """Write the table of docs/levers.md: what a GPU needs and a step takes with each lever."""
    rows = []
    for lever in LEVERS:
        facts = plans[of_lever(lever)]
        over = "" if facts["needed"] <= GPUS["h100"].memory else ", does not fit"
        sizes = [f"{facts['needed'] / GIB:.1f}{over}", f"{facts['in_use'] / GIB:.1f}"]
        rows.append([lever, *sizes, f"{facts['seconds']:.1f}", f"{facts['communication']:.1f}", f"{facts['mfu']:.1%}"])
    return table(["", "needs, GiB", "in use", "a step, s", "on links, s", "MFU at most"], rows)


def long_table(plans: dict[str, Any]) -> list[str]:
    """Write the table of docs/long-context.md: what a GPU needs for a row of each length."""
    rows = []
    for model, length in itertools.product(LONG, LENGTHS):
        facts = [plans[of_long_rows(model, length, way)] for way in WAYS]
        over = ["" if one["needed"] <= GPUS["h100"].memory else ", does not fit" for one in facts]
        cells = [f"{one['needed'] / GIB:,.0f}{text}" for one, text in zip(facts, over, strict=True)]
        rows.append([model if length == next(iter(LENGTHS)) else "", length, *cells])
    return table(["", "", *WAYS], rows)


def preset_table(plans: dict[str, Any]) -> list[str]:
    """Write the table of docs/sft.md: for each model, by its size, the presets that train all of it, and adapters."""
    rows: dict[str, dict[bool, list[str]]] = {}
    for name in sorted(presets(), key=lambda name: plans[of_preset(name)]["parameters"]):
        text = (PRESETS / name).read_text(encoding="utf-8")
        chosen, machine = yaml.safe_load(text), re.search(r"# Hardware: (\d+) GPUs? of (\d+) GB", text)
        if name.startswith("sft/") and machine:
            needs = f"{machine[1]} of {machine[2]} GB: {plans[of_preset(name)]['needed'] / GIB:.1f} GiB"
            kinds = rows.setdefault(chosen["model_name_or_path"], {})
            kinds[chosen.get("use_peft", False)] = [f"`{Path(name).stem}`", needs]
    heads = ["model", "all weights", "GPUs, and what each needs", "adapters", "GPUs, and what each needs"]
    cells = [[model, *kinds[False], *kinds.get(True, ["", ""])] for model, kinds in rows.items()]
    return table(heads, cells)


TABLES = {
    "presets": ("docs/sft.md", preset_table),
    "fits": ("docs/plan.md", fit_table),
    "published": ("docs/development/published.md", published_table),
    "levers": ("docs/levers.md", lever_table),
    "long rows": ("docs/long-context.md", long_table),
}


def with_table(text: str, name: str, lines: Sequence[str]) -> str:
    """Put a table into a page, between the comments that name it."""
    begin, end = f"<!-- {name}: written by make plans -->\n", f"<!-- end of {name} -->\n"
    before, rest = text.split(begin)
    return before + begin + "\n".join(lines) + "\n" + end + rest.split(end)[1]


def pages(plans: dict[str, Any]) -> dict[Path, str]:
    """Write everything that shows figures: presets and pages by their paths."""
    found = {}
    for name, gpu in presets().items():
        text = (PRESETS / name).read_text(encoding="utf-8")
        found[PRESETS / name] = with_memory(text, memory_comment(plans[of_preset(name)], gpu, name))
    for name, (page, rows_of) in TABLES.items():
        path = ROOT / page
        found[path] = with_table(found.get(path) or path.read_text(encoding="utf-8"), name, rows_of(plans))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="simulate also what was simulated before")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a simulation has changed")
    parser.add_argument("--pages", action="store_true", help="simulate nothing")
    asked = parser.parse_args()
    before = json.loads(RESULT.read_text(encoding="utf-8"))["plans"] if RESULT.exists() else {}
    known = {} if asked.again or asked.check else dict(before)
    while not asked.pages and (new := [command for command in wanted(known) if command not in known]):
        for command, facts in simulate(new):
            known[command] = facts
            print(f"{time.strftime('%X')} {in_gib(facts['needed'])} GiB: {command}", flush=True)
            if not asked.check:
                write(known)
    if asked.check:
        changed = [command for command, facts in known.items() if differs(facts, before.get(command))]
        sys.exit("\n".join(["These have changed; run `make plans ARGS=--again`:", *changed]) if changed else 0)
    if not asked.pages:
        write({command: known[command] for command in wanted(known)})
    for path, text in pages(known).items():
        path.write_text(text, encoding="utf-8")


ROUNDED = {"seconds", "communication", "targets_per_second", "mfu"}


def differs(facts: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Tell whether a prediction has changed: bytes at all, times by more than a hundredth."""
    if before is None or facts.keys() != before.keys():
        return True
    return any(
        abs(value - before[name]) > 0.01 * abs(before[name]) if name in ROUNDED else value != before[name]
        for name, value in facts.items()
    )


def write(plans: dict[str, Any]) -> None:
    """Write the results, a line for each plan."""
    lines = [f"  {json.dumps(command)}: {json.dumps(facts)}" for command, facts in plans.items()]
    RESULT.write_text('{"command": "make plans", "plans": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
