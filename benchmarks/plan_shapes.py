"""Compare the simulated peak of models of random shapes with that of real steps, by the same ledger and as resident memory.

    python benchmarks/plan_shapes.py --out benchmarks/results/plan_shapes.json

Each shape is simulated, and takes two real steps on two ranks over gloo, in fp32 under fsdp_full.yaml. First the copies are
measured that gloo makes of what it exchanges: the ledger counts them.
"""

import random
from typing import Any

import torch
import torch.distributed as dist
from harness import MIB, ROOT, machine, make_parser, peak_begins, status, write_json
from real_steps import counted, on_cpu, on_ranks, request_of, resident, words_of

from recipe_tools.plan.simulate import Job, Outcome, Simulator


def shapes(number: int, seed: int) -> list[dict[str, Any]]:
    """Draw sizes of Llamas and of their rows, and whether layers are recomputed."""
    draw = random.Random(seed)
    found = []
    for _ in range(number):
        heads = draw.choice([4, 6, 8])
        found.append(
            {
                "recomputes": draw.random() < 0.5,
                "vocab_size": draw.randrange(4_000, 16_000),
                "hidden_size": heads * draw.choice([32, 48, 64]),
                "intermediate_size": draw.randrange(512, 2_000),
                "num_hidden_layers": draw.randrange(2, 6),
                "num_attention_heads": heads,
                "num_key_value_heads": heads // draw.choice([1, 2]),
                "max_length": draw.randrange(128, 512),
                "per_device_train_batch_size": draw.randrange(1, 5),
            }
        )
    return found


def copied_by_gloo(job: Job) -> dict[str, Any]:
    """Measure the memory that gloo takes for a collective beside its tensors, as a share of the whole one."""
    dist.init_process_group("gloo")
    whole, part, found = torch.ones(2**26), torch.ones(2**25), {}
    for name, exchange in {
        "allgather_base": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter_base": lambda: dist.reduce_scatter_tensor(part, whole),
        "allreduce": lambda: dist.all_reduce(whole),
    }.items():
        exchange()
        before = peak_begins()
        exchange()
        found[name] = round((status("VmHWM") - before) / whole.nbytes, 3)
    return found


def compare(simulator: Simulator, shape: dict[str, Any]) -> dict[str, Any]:
    """Simulate a shape, and take its steps; sizes are in bytes."""
    own = ("max_length", "per_device_train_batch_size")
    rows = 2 * 2 * shape["per_device_train_batch_size"]  # two micro-batches on each rank
    words = words_of(**{name: shape[name] for name in own}, total_batch_size=rows, max_steps=1)
    sizes = [f"{name}={value}" for name, value in shape.items() if name not in ("recomputes", *own)]
    words += ["--attn_implementation", "sdpa", "--config_overrides", *sizes]
    flags = ["--mixed_precision", "no", "--fsdp_activation_checkpointing", str(shape["recomputes"]).lower()]
    job = on_cpu(request_of("fsdp_full", [*flags, str(ROOT / "recipes/c4.py"), *words]))
    (outcome,) = simulator([job])
    if not isinstance(outcome, Outcome):
        raise outcome
    found = {"simulated": outcome.peak, "real": on_ranks(job, counted)[0]["peak"]}
    return shape | found | {"resident": on_ranks(job, resident)[0]["resident"]}


def main() -> None:
    args = make_parser(__doc__, number=(12, "Shapes."), seed=(20, "Seed of the shapes.")).parse_args()
    found = []
    job = on_cpu(request_of("fsdp_full", [str(ROOT / "recipes/c4.py")]))
    copies = on_ranks(job, copied_by_gloo)[0]
    print(f"Copies by gloo, as shares of the whole tensor: {copies}", flush=True)
    with Simulator() as simulator:
        for shape in shapes(args.number, args.seed):
            row = compare(simulator, shape)
            found.append(row)
            real, held = (row["simulated"] / row[name] - 1 for name in ("real", "resident"))
            print(
                f"{row['simulated'] / MIB:8.1f} MiB simulated; {real:+.4%} of the real peak, {held:+.2%} of the resident "
                f"one: {shape}",
                flush=True,
            )
    write_json(args.out, machine() | {"copied_by_gloo": copies, "shapes": found})


if __name__ == "__main__":
    main()
