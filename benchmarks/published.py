"""Runs of others, for the table of docs/development/published.md: what they measured, and the command of `plan`.

`make plans` simulates the commands. No constant of `plan` is fitted to these runs. What their code does otherwise was read
in the version that they ran; where the bytes of a difference follow from sizes, they are here.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from harness import GIB, table

from accelerate_recipes.arguments.gpus import EFFICIENCY, GPUS

RECOMPUTE = "--fsdp_activation_checkpointing true"
KAHAN, WHOLE = "--optim adamw_bf16_kahan", "--whole_logits true"


def command(config: str, flags: str, model: str, rows: tuple[int, int, int], more: str = "") -> str:
    """Return the command of `plan`: `rows` are the tokens of a row, the rows of a micro-batch and those of a step."""
    length, at_once, total = rows
    words = (
        f"accelerate_configs/{config}.yaml {flags} recipes/c4.py --model_name_or_path {model} --max_steps 100",
        f"--max_length {length} --per_device_train_batch_size {at_once} --total_batch_size {total} {more}",
    )
    return " ".join(" ".join(words).split())


def on(gpu: str, number: int = 1, nodes: int = 1) -> str:
    return f"--gpu {gpu} --nodes {nodes} --gpus-per-node {number}"


class Run(NamedTuple):
    """A published run. `memory` is in GiB, `seconds` are those of a step; 0 where they were not published.

    The page has a link for each source. The memory of a run that died for want of it is infinite. `otherwise` and `slower`
    map notes of the page to the GiB and the seconds that their code takes besides; these are 0 where they do not follow
    from sizes.
    """

    source: str
    what: str
    command: str
    seconds: float
    memory: float = 0
    is_reserved: bool = False  # memory that the allocator held, not only that in use
    otherwise: Mapping[str, float] = {}
    slower: Mapping[str, float] = {}


VOCABULARY, LLAMA = 151936, 128256  # words


def logits(tokens: int, vocabulary: int, copies: float) -> float:
    """Return the GiB of so many copies of logits in fp32."""
    return 4 * tokens * vocabulary * copies / GIB


def flash_2(gpu: str, layers: int, width: int, length: int, rows: int) -> float:
    """Return by how many seconds a step with recomputation is longer where attention is FlashAttention 2.

    It reaches 35 % of an H100's peak (arXiv 2407.08608). The same speed is taken for later GPUs, whose instructions it does
    not use either.
    """
    flops = layers * rows * 2 * length**2 * width * (1 + 1 + 2.5)  # of the pairs below the diagonal
    return flops / (0.35 * GPUS["h100"].bf16) - flops / (EFFICIENCY * GPUS[gpu].bf16)


def prime(size: str, gpu: str, number: int, length: int, seconds: float, memory: float, **slower: float) -> Run:
    if size == "4B":
        slower["i"] = flash_2(gpu, 36, 32 * 128, length, 2)
    model = f"Qwen/Qwen3-{size}"
    asked = command("fsdp_full", f"{on(gpu, number)} {RECOMPUTE}", model, (length, 1, 2 * number), WHOLE)
    what = f"Qwen3-{size}, recomputed; {number} {gpu.upper()}, 1 x {length:,}"
    otherwise = {"a": logits(length, VOCABULARY, 1)} | ({"f": 0} if length == 65536 else {})
    return Run("prime-rl", what, asked, seconds, memory, True, otherwise, slower)


def kempner(
    model: str, parameters: float, nodes: int, number: int, rows: tuple[int, int, int], seconds: float, memory: float
) -> Run:
    flags = f"{on('h200', number, nodes)} --mixed_precision no {RECOMPUTE}"
    asked = command("fsdp_full", flags, model, rows, f"{KAHAN} {WHOLE}")
    shard = 2 * parameters / (nodes * number) / GIB  # of weights, or their gradients, in bf16
    otherwise = {"b": -shard, "c": 4 * parameters / GIB - shard, "d": logits(rows[0] * rows[1], LLAMA, -1)}
    what = f"{parameters / 1e9:.1f}B, bf16, recomputed; {nodes} x {number} H200, {rows[1]} x {rows[0]:,}"
    if nodes * number == 1:
        return Run("KempnerForge", what, asked, seconds, memory, False, otherwise | {"m": 0}, {"l": 0})
    return Run("KempnerForge", what, asked, seconds, memory, False, otherwise, {"k": 0} if nodes > 1 else {})


LONG_ROW = "fsdp_long", f"{on('h100', 8)} --parallelism_config_cp_size 8"
OFFLOAD = f"{LONG_ROW[1]} --fsdp_activation_checkpointing_offload true"
GATHERED = {"e": 2 * 2 * 8 * 128 * 2**20 / GIB}  # keys and values of the whole row, in bf16
EXPANDED = 28 * 2 * 2 * 8192 * (24 - 8) * 128 / GIB  # keys and values of 16 more heads, in 28 layers
LORA = "--use_peft true --lora_r 16 --lora_dropout 0 --merge_adapter true"
ONE_BF16 = "single", "--gpu h100 --mixed_precision no"


def llm_q(size: str, rows: int, seconds: float) -> Run:
    name = f"Qwen/Qwen2.5-{size}" + ("-Instruct" if size in ("0.5B", "7B") else "")  # a preset's, of the same sizes
    asked = command(*ONE_BF16, name, (1024, rows, 512), KAHAN)
    return Run("llm.q", f"Qwen2.5-{size}, bf16; 1 H100, {rows} x 1,024", asked, seconds, slower={"l": 0})


def automodel(name: str, model: str, seconds: float) -> Run:
    asked = command("fsdp_full", on("h100"), model, (4096, 2, 32), f"{LORA} {WHOLE}")
    return Run("AutoModel", f"{name}, adapters of rank 16; 1 H100, 2 x 4,096", asked, seconds, slower={"l": 0})


RUNS = [
    prime("0.6B", "h100", 1, 8192, 0.6225, 31.742, h=0),
    prime("0.6B", "h100", 1, 16384, 1.2819, 52.840, h=0),
    prime("0.6B", "h100", 1, 65536, 0, math.inf),
    prime("0.6B", "a6000", 1, 8192, 2.4582, 31.215),
    prime("4B", "h100", 8, 16384, 5.0146, 54.633),
    prime("4B", "h200", 8, 16384, 4.7068, 54.633),
    prime("4B", "b200", 8, 16384, 3.7431, 54.594),
    prime("4B", "b200", 8, 65536, 39.6129, 171.530),
    kempner("meta-llama/Llama-3.1-8B", 8.030e9, 1, 1, (4096, 2, 8), 3.13, 80.7),
    kempner("meta-llama/Llama-3.1-8B", 8.030e9, 1, 2, (4096, 2, 16), 3.50, 62.4),
    kempner("meta-llama/Llama-3.1-8B", 8.030e9, 1, 4, (4096, 4, 32), 3.36, 61.1),
    kempner("KempnerForge-13B", 14.838e9, 2, 4, (4096, 4, 128), 14.81, 88.5),
    Run("trl", "Qwen3-8B, recomputed, inputs of layers on the CPU; 8 H100 share 1 x 1,048,576",
        command("fsdp_long", OFFLOAD, "Qwen3-8B-at-1M", (2**20, 1, 1)), 380, 56.2e9 / GIB, slower={"j": 0}),
    Run("accelerate", "Qwen3-0.6B, recomputed; 8 H100 share 1 x 1,048,576",
        command(*LONG_ROW, "Qwen/Qwen3-0.6B", (2**20, 1, 1)), 137, 27.9e9 / GIB, otherwise=GATHERED, slower={"j": 0}),
    Run("accelerate", "Qwen3-0.6B, inputs of layers on the CPU",
        command("fsdp_long", OFFLOAD, "Qwen/Qwen3-0.6B", (2**20, 1, 1)), 0, 20.8e9 / GIB, otherwise=GATHERED),
    Run("torchtune", "Llama 3.2 3B, bf16; 1 A100, 2 x 4,096",
        command("single", "--gpu a100 --mixed_precision no", "meta-llama/Llama-3.2-3B", (4096, 2, 2), f"{KAHAN} {WHOLE}"),
        8192 / 7075, 60.0, otherwise={"b": -2 * 3.213e9 / GIB, "g": EXPANDED}, slower={"m": 0}),
    automodel("Llama 3.1 8B", "meta-llama/Llama-3.1-8B", 10.51),
    automodel("Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", 9.29),
    llm_q("0.5B", 32, 3.508),
    llm_q("1.5B", 32, 8.914),
    llm_q("3B", 16, 16.959),
    llm_q("7B", 4, 37.854),
]  # fmt: skip


def published_table(plans: Mapping[str, Any]) -> list[str]:
    """Write the table of docs/development/published.md: what a run measured beside what `plan` says."""
    rows = []
    for run in RUNS:
        facts = plans[run.command]
        rows.append([f"{run.source}: {run.what}", *of_memory(run, facts), *of_time(run, facts)])
    differs = "with what differs", "ratio"
    heads = ("run", "GiB", "`plan`", "ratio", *differs, "a step, s", "least", "ratio", *differs)
    return table(heads, rows)


def of_memory(run: Run, facts: Mapping[str, Any]) -> list[str]:
    if math.isinf(run.memory):
        return ["died for want of it", f"{facts['needed'] / GIB:.1f}, does not fit", "", "", ""]
    found = (facts["in_use"] + run.is_reserved * facts["allocator"]) / GIB
    return cells(found, run.memory, " held" if run.is_reserved else " in use", run.otherwise)


def of_time(run: Run, facts: Mapping[str, Any]) -> list[str]:
    return cells(facts["seconds"], run.seconds, "", run.slower)


def cells(found: float, measured: float, unit: str, more: Mapping[str, float]) -> list[str]:
    """Return what was measured, what `plan` says, their ratio, and the last two again with what their code does."""
    if not measured:
        return [""] * 5
    theirs, notes = found + sum(more.values()), " ".join(more)
    first = [f"{digits(measured)}{unit}", digits(found), f"{found / measured:.2f}"]
    return [
        *first,
        *([f"{digits(theirs)} ({notes})", f"{theirs / measured:.2f}"] if any(more.values()) else [notes, ""]),
    ]


def digits(number: float) -> str:
    return f"{number:#.3g}".rstrip(".")
