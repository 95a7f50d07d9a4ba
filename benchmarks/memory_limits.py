"""Run small models under a limit of memory: those that `plan` refuses die, and with the change that it proposes they train.

    python benchmarks/memory_limits.py --out benchmarks/results/memory_limits.json

For each case the search gets a GPU with a share of the memory that the run needs by its simulation; its first proposal is
taken. The run as it was and the one proposed then take two real optimizer steps on two ranks over gloo (or on as many as are
proposed). Each rank may have as many bytes of data as that GPU, and a stated allowance, beyond what its process had before
the model was made (RLIMIT_DATA). Cases that are in the file already are not run again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import MIB, ROOT, machine, make_parser, write_json
from real_steps import ALLOWANCE, limited, on_cpu, on_ranks, request_of, words_of
from transformers import T5Config

from accelerate_recipes.arguments.gpus import GPUS, OUTSIDE
from recipe_tools.plan.search import Search, in_words, prediction_of
from recipe_tools.plan.simulate import Job, Outcome, Simulator
from recipe_tools.request import Request


def sizes(**values: int) -> list[str]:
    return ["--config_overrides", *(f"{name}={value}" for name, value in values.items())]


FP32 = ["--mixed_precision", "no"]
RECOMPUTE = ["--fsdp_activation_checkpointing", "true"]
C4 = [
    str(ROOT / "recipes/c4.py"), "--max_steps", "1", "--attn_implementation", "sdpa",
    *sizes(num_attention_heads=4),
]  # fmt: skip
# Activations, of rows that are long for the model; weights, gradients and optimizer, of a model that is large for its rows.
LONG = [
    *C4, *sizes(vocab_size=1024, hidden_size=512, intermediate_size=1408), *words_of(max_length=640),
]  # fmt: skip
LARGE = [
    *C4, *sizes(vocab_size=1024, hidden_size=1024, intermediate_size=5632), *words_of(max_length=16),
]  # fmt: skip
LAYERS_3, LAYERS_4 = sizes(num_hidden_layers=3), sizes(num_hidden_layers=4)
ROWS_2, ROWS_8 = (words_of(per_device_train_batch_size=n, total_batch_size=4 * n) for n in (2, 8))
ONE_ROW = words_of(per_device_train_batch_size=1, total_batch_size=2)  # a step that no more GPUs could share
VIT = [
    str(ROOT / "recipes/vit.py"), "--from_scratch", "--train_files", str(ROOT / "data/fashion/train.parquet"),
    *sizes(image_size=96, patch_size=6, hidden_size=192, intermediate_size=384, num_attention_heads=6),
]  # fmt: skip
T5 = [
    str(ROOT / "recipes/t5.py"),
    *words_of(max_source_length=384, max_target_length=384),
    "--model_name_or_path",
    "T5",
]
T5_CONFIG = T5Config(
    vocab_size=8192, d_model=384, d_kv=64, d_ff=1536, num_layers=3, num_heads=6,
    decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]: a field of the parent
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run that does not fit on a GPU with `share` of the memory that it needs."""

    name: str
    config: str
    words: Sequence[str]
    share: float = 0.7


CASES = [
    Case("activations", "fsdp_full", [*FP32, *LONG, *LAYERS_3, *ROWS_2]),
    Case("activations, most of them", "fsdp_full", [*FP32, *LONG, *LAYERS_3, *ROWS_2], 0.4),
    Case("many rows, recomputed", "fsdp_full", [*FP32, *RECOMPUTE, *LONG, *LAYERS_3, *ROWS_8]),
    Case(
        "every 4th layer recomputed", "fsdp_full",
        [*FP32, *RECOMPUTE, *LONG, *LAYERS_4, *words_of(checkpoint_every_n_layers=4), *ONE_ROW]),
    Case("whole logits", "fsdp_full", [*FP32, *LONG, *LAYERS_3, *sizes(vocab_size=48000), "--whole_logits", *ONE_ROW]),
    Case("the whole model on each GPU", "fsdp_grad_op", [*FP32, *LARGE, *LAYERS_3, *ONE_ROW], 0.8),
    Case("states", "fsdp_full", [*FP32, *LARGE, *LAYERS_3, *ONE_ROW]),
    Case("states, of more GPUs", "fsdp_full", [*FP32, *LARGE, *LAYERS_3, *ROWS_2]),
    Case("an encoder and a decoder", "fsdp_full", [*FP32, *T5, *ROWS_2]),
    Case("images", "fsdp_full", [*FP32, *VIT, *LAYERS_4, *ROWS_8]),
]  # fmt: skip


def run_case(simulator: Simulator, case: Case, folder: Path) -> dict[str, Any]:
    """Search for what makes a case fit, and take its steps with and without that; sizes are in bytes."""
    words = [str(folder) if word == "T5" else word for word in case.words]
    request = request_of(case.config, words)
    job = on_cpu(request)
    (outcome,) = simulator([job])
    if not isinstance(outcome, Outcome):
        raise outcome
    memory = int(case.share * outcome.peak)
    search = search_in(simulator, request, job, outcome, memory)
    fitting = search.fitting()
    found = {"case": case.name, "memory": memory, "peak": outcome.peak, "proposals": len(fitting)}
    found["could not be tried"] = search.failed
    found["refused"] = on_ranks(job, partial(limited, limit=memory))
    if fitting:
        best = fitting[0]
        found |= {"proposed": in_words(best.changes), "peak with it": best.prediction.outcome.peak}
        found |= {"keeps trajectory": best.keeps_trajectory}
        found["with it"] = on_ranks(on_cpu(request, best.changes), partial(limited, limit=memory))
    return found


def search_in(simulator: Simulator, request: Request, job: Job, outcome: Outcome, memory: int) -> Search:
    """Make the search for a GPU of so much memory."""
    gpu = replace(GPUS[job.gpu], memory=memory + OUTSIDE)  # nothing lies outside here
    return Search(simulator, prediction_of(job, outcome, gpu), job, partial(on_cpu, request))


def holds(found: dict[str, Any]) -> bool:
    """Tell whether the run that was refused died for want of memory, and the one that was proposed trained."""
    died = [rank["died"] for rank in found["refused"] if "died" in rank]
    is_memory = any("allocate memory" in why or why.startswith(("MemoryError", "SIG")) for why in died)
    return is_memory and all(rank.get("trained") for rank in found.get("with it", [{}]))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    args = parser.parse_args()
    is_known = args.out and args.out.exists()
    found = json.loads(args.out.read_text(encoding="utf-8"))["cases"] if is_known else []
    done = {row["case"] for row in found}
    with TemporaryDirectory() as folder, Simulator() as simulator:
        T5_CONFIG.save_pretrained(folder)
        for case in CASES:
            if case.name in args.cases and case.name not in done:
                row = run_case(simulator, case, Path(folder))
                found.append(row)
                print(
                    f"{case.name}: {row['peak'] / MIB:.0f} MiB, of {row['memory'] / MIB:.0f}; proposed: "
                    f"{row.get('proposed')}, {row.get('peak with it', 0) / MIB:.0f} MiB; as planned: {holds(row)}; "
                    f"{row['refused']} {row.get('with it')}",
                    flush=True,
                )
                write_json(args.out, machine() | {"allowance": ALLOWANCE, "cases": found})


if __name__ == "__main__":
    main()
