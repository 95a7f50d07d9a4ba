"""Strategy of a launch: its name, and checks of the launch and of the arguments with it, before anything starts.

All checks read the environment that `accelerate launch` makes from a YAML. Preflight makes the same environment on a
login node.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch
import transformers

from accelerate_recipes.args import DTYPES, TrainArgs
from accelerate_recipes.errors import ConfigError, suggestion, that_apply
from accelerate_recipes.models.weights import linear_layers_and_experts
from accelerate_recipes.ranks import PARALLEL_SIZES, is_compiled, is_on, is_one_of, ranks_a_row
from accelerate_recipes.upstream import leave_out_other_layers


def num_accelerators() -> int:
    """Count the accelerators of this machine. Apple's MPS has no collectives, so it counts as a CPU."""
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type == "mps":
        return 0
    return torch.accelerator.device_count()


def is_version(env: Mapping[str, str], version: int) -> bool:
    """Tell whether a launch uses this version of FSDP."""
    return is_on(env, "ACCELERATE_USE_FSDP") and int(env.get("FSDP_VERSION", 1)) == version


def environment_problems(env: Mapping[str, str], num_devices: int) -> list[str]:
    """List the problems of the strategy that `accelerate launch` describes in `env`, one sentence each.

    `num_devices` is the number of accelerators of this machine, 0 on a CPU. Preflight also calls this, before
    anything is launched.
    """
    precision, local_world = env.get("ACCELERATE_MIXED_PRECISION"), int(env.get("LOCAL_WORLD_SIZE", 1))
    accumulation = env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    is_foreign = is_on(env, "ACCELERATE_USE_DEEPSPEED") or is_on(env, "ACCELERATE_USE_MEGATRON_LM")
    problems = {
        "mixed_precision: fp16 is not supported: models trained in bf16, T5 above all, overflow in it, and it needs a "
        "gradient scaler whose overflow check all ranks share; set `mixed_precision: bf16`, or "
        "`no`": precision == "fp16",
        "gradient_accumulation_steps in the accelerate YAML and --total_batch_size both decide the "
        "accumulation; remove the YAML's": accumulation != "1",
        "the accelerate YAML asks for DeepSpeed or Megatron-LM; choose a file of accelerate_configs/": is_foreign,
        f"{local_world} processes on this machine, which has {num_devices} GPUs; "
        f"launch with --num_processes {num_devices} per machine at most": 0 < num_devices < local_world,
    }
    messages = that_apply(problems) + (fp8_problems(env) if precision == "fp8" else [])
    messages += parallelism_problems(env) if is_on(env, "ACCELERATE_USE_PARALLELISM_CONFIG") else []
    return messages + (fsdp_problems(env, num_devices) if is_on(env, "ACCELERATE_USE_FSDP") else [])


def fp8_problems(env: Mapping[str, str]) -> list[str]:
    """List the problems of `mixed_precision: fp8`."""
    has_torchao = find_spec("torchao") is not None
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 9)
    gathers_fp8 = env.get("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", "true").lower() not in ("false", "0")
    problems = {
        "needs torchao; pip install torchao==0.18.0, or set `mixed_precision: bf16`": not has_torchao,
        "is computed by torchao here; write `backend: AO` under fp8_config: in the accelerate YAML, or take "
        "accelerate_configs/fsdp_fp8.yaml": not is_one_of(env, "ACCELERATE_FP8_BACKEND", "AO"),
        "needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell), this one has "
        f"{capability[0]}.{capability[1]}; set `mixed_precision: bf16`": capability < (8, 9),
        "with fsdp_version: 1 is not supported; take accelerate_configs/fsdp_fp8.yaml": is_version(env, 1),
        "with fsdp_cpu_ram_efficient_loading: true is refused by Accelerate; set it to false": is_version(env, 2)
        and is_on(env, "FSDP_CPU_RAM_EFFICIENT_LOADING"),
        "with enable_fsdp_float8_all_gather under fp8_config: would write weights into checkpoints as a class of torchao; "
        "set it to false": is_version(env, 2) and gathers_fp8,
    }
    return [f"mixed_precision: fp8 {problem}" for problem in that_apply(problems)]


def fp8_layers(model: transformers.PreTrainedModel) -> set[str]:
    """Name the layers that compute in fp8: linear layers except the output layer, adapters and layers of unsuitable sizes.

    A GPU multiplies in fp8 only sizes that are multiples of 16.

    Raises:
        ConfigError: for a mixture of experts.
    """
    layers, experts = linear_layers_and_experts(model)
    if experts:
        problem = f"{type(model).__name__} keeps the experts of a layer in one weight ({experts[0]}, ...)"
        raise ConfigError(f"mixed_precision: fp8 is for linear layers, but {problem}; set `mixed_precision: bf16`")
    fitting = [name for name, layer in layers.items() if layer.in_features % 16 == layer.out_features % 16 == 0]
    return {name for name in fitting if ".lora_" not in name}


def wrap_problems(model: transformers.PreTrainedModel, env: Mapping[str, str]) -> list[str]:
    """List the problems if the model does not contain the classes that FSDP should wrap."""
    if env.get("ACCELERATE_USE_FSDP") != "true" or env.get("FSDP_AUTO_WRAP_POLICY") != "TRANSFORMER_BASED_WRAP":
        return []
    names = env.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
    present = {type(module).__name__ for module in model.modules()}
    leave_out_other_layers(model)
    wanted = names.split(",") if names else list(model._no_split_modules or [])
    title = type(model).__name__
    if not wanted:
        return [f"{title} names no layer class to wrap; set fsdp_transformer_layer_cls_to_wrap in the YAML"]
    lacking = [name for name in wanted if name not in present]
    return [f"fsdp_transformer_layer_cls_to_wrap: {n} is not in {title}{suggestion(n, present)}" for n in lacking]


def parallelism_problems(env: Mapping[str, str]) -> list[str]:
    """List the problems of the YAML's parallelism_config."""
    sizes = [int(env.get(f"PARALLELISM_CONFIG_{name}", 1)) for name in PARALLEL_SIZES]
    world = int(env.get("WORLD_SIZE", 1))
    replicate, shard, tensor, row, sequence = sizes
    by_row = f" x {row} ranks that share a row" if row > 1 else ""
    flag, factor = (" --parallelism_config_cp_size C", " x C") if row > 1 else ("", "")
    problems = {
        f"parallelism_config has the sizes {', '.join(map(str, sizes))}; each must be at least 1": min(sizes) < 1,
        "parallelism_config is in use but all its sizes are 1; Accelerate ignores keys without the "
        "prefix: write parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size. If all sizes should be 1, "
        "take accelerate_configs/fsdp_full.yaml": max(sizes) == 1,
        f"parallelism_config_tp_size is {tensor}: Accelerate 1.15's tensor parallelism needs a name that transformers 5.23 "
        "lacks; set it to 1: FSDP divides the weights, and parallelism_config_cp_size the activations": tensor > 1,
        f"parallelism_config_sp_size is {sequence}: Accelerate 1.15 passes it to DeepSpeed, and ignores it with FSDP2; "
        f"set it to 1, and parallelism_config_cp_size to {sequence}": sequence > 1,
        f"parallelism_config asks for {replicate} replicas x {shard} shards{by_row} = {replicate * shard * row} "
        f"processes, but {world} were launched; launch with --parallelism_config_dp_replicate_size R "
        f"--parallelism_config_dp_shard_size S{flag} so that R x S{factor} = {world}": replicate * shard * row != world,
        f"parallelism_config asks for {replicate} replicas of weights, each sharded only over the ranks of a row; "
        "Accelerate 1.15 refuses this; set parallelism_config_dp_replicate_size to 1 and "
        f"parallelism_config_dp_shard_size to {replicate}": row > 1 and replicate > 1 and shard == 1,
        f"parallelism_config_dp_shard_size is 1, so each of {replicate} processes would hold the whole model; make it at "
        "least 2, or take accelerate_configs/ddp.yaml": row == 1 and replicate > 1 and shard == 1,
    }
    only = "only under FSDP2 can ranks share rows; take accelerate_configs/fsdp_long.yaml"
    not_here = [f"parallelism_config_cp_size is {row}: {only}"] if row > 1 and not is_version(env, 2) else []
    return that_apply(problems)[:1] + not_here  # further ones may follow from the first


def fsdp_problems(env: Mapping[str, str], num_devices: int) -> list[str]:
    """List the problems of the YAML's fsdp_config on a machine with `num_devices` GPUs."""
    is_fsdp1, policy = is_version(env, 1), env.get("FSDP_AUTO_WRAP_POLICY", "").upper()
    recomputes, on_cpu = is_on(env, "FSDP_ACTIVATION_CHECKPOINTING"), is_fsdp1 and not num_devices
    by_layer = is_on(env, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")
    is_hybrid = is_one_of(env, "FSDP_SHARDING_STRATEGY", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5")
    is_full = is_one_of(env, "FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    problems = {
        "fsdp_auto_wrap_policy: SIZE_BASED_WRAP with fsdp_version: 2 picks module lists, which fully_shard rejects; "
        "use TRANSFORMER_BASED_WRAP, "
        "or accelerate_configs/fsdp1_size_wrap.yaml": not is_fsdp1 and policy == "SIZE_BASED_WRAP",
        "fsdp_activation_checkpointing: true recomputes layer by layer, but fsdp_auto_wrap_policy: NO_WRAP names "
        "no layers; use TRANSFORMER_BASED_WRAP": recomputes and policy == "NO_WRAP",
        "dynamo_use_regional_compilation: true with fsdp_version: 1 does not work: Accelerate 1.15 copies modules, "
        "and FSDP1's modules cannot be copied; set it to false, or choose a config with "
        "fsdp_version: 2": is_fsdp1 and is_compiled(env) and by_layer,
        "dynamo_backend with fsdp_activation_checkpointing: true would compile no layer (Accelerate 1.15); "
        "set dynamo_use_regional_compilation: true "
        "under dynamo_config:": not is_fsdp1 and is_compiled(env) and not by_layer and recomputes,
        "fsdp_use_orig_params: false joins norms and biases with the weights to one flat parameter, so they would get "
        "weight decay too; set it to true": is_fsdp1 and not is_on(env, "FSDP_USE_ORIG_PARAMS"),
        "FSDP1 hybrid sharding on a CPU leaves every rank the whole model and does not reduce the replicas' gradients "
        "(torch 2.13); use accelerate_configs/fsdp_hybrid.yaml": on_cpu and is_hybrid,
        "FSDP1 with FULL_STATE_DICT crashes the interpreter on a CPU (torch 2.13); use SHARDED_STATE_DICT, or "
        "accelerate_configs/fsdp_full_state_dict.yaml": on_cpu and is_full,
        "fsdp_offload_params with FSDP1 asks for a GPU even on a CPU (torch 2.13); use "
        "accelerate_configs/fsdp_offload.yaml": on_cpu and is_on(env, "FSDP_OFFLOAD_PARAMS"),
    }
    return that_apply(problems)


def lever_problems(args: TrainArgs, env: Mapping[str, str], num_devices: int) -> list[str]:
    """List the arguments that do not work under the strategy in `env`, one sentence each.

    `env` and `num_devices` are as in `environment_problems`.
    """
    use_fsdp, is_fsdp2 = is_on(env, "ACCELERATE_USE_FSDP"), is_version(env, 2)
    is_fsdp1, recomputes = is_version(env, 1), use_fsdp and is_on(env, "FSDP_ACTIVATION_CHECKPOINTING")
    wraps_layers = is_one_of(env, "FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    by_inductor = is_one_of(env, "ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    precision = env.get("ACCELERATE_MIXED_PRECISION")
    n, share = args.checkpoint_every_n_layers, args.activation_memory_budget
    budget = f"--activation_memory_budget {share} says how much compiled layers"
    grad_dtype = next(name for name, dtype in DTYPES.items() if dtype == args.param_dtype)
    is_ddp = not use_fsdp and int(env.get("WORLD_SIZE", 1)) > 1
    uses_mesh, replicas = is_on(env, "ACCELERATE_USE_PARALLELISM_CONFIG"), "PARALLELISM_CONFIG_DP_REPLICATE_SIZE"
    is_hybrid = uses_mesh and int(env.get(replicas, 1)) > 1
    size, length = ranks_a_row(env), args.max_length or 0
    near = " or ".join(str(n) for n in (length // size * size, (length // size + 1) * size) if n)
    problems = {
        f"parallelism_config_cp_size is {size}, but in this recipe a row is whole on each process; set it to 1. If "
        "activations do not fit, set fsdp_activation_checkpointing to true, then fsdp_activation_checkpointing_offload too. "
        "recipes/chess.py and recipes/c4.py share rows, and recipes/sft.py with --packing, or "
        "with --padding_free and --max_length none": size > 1 and not args.shares_rows,
        f"--max_length {length} is not a multiple of parallelism_config_cp_size {size}, the ranks that share a row; lengths "
        f"that work: {near}": args.shares_rows and length % size and not args.pads_rows,
        "--load_in_4bit needs a GPU, and there is none: a CPU would unpack each weight in each pass; leave it out, "
        "which trains adapters beside the model in bf16": args.load_in_4bit and not num_devices,
        f"--prefetch_layers {args.prefetch_layers} needs fsdp_version: 2 with fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP "
        "in the accelerate YAML; set it to 0": args.prefetch_layers > 0 and not (is_fsdp2 and wraps_layers),
        f"--checkpoint_every_n_layers {n} says which layers are recomputed, but the accelerate YAML asks for none; set "
        "fsdp_activation_checkpointing: true under fsdp_config:, or --checkpoint_every_n_layers 1": n > 1
        and not recomputes,
        f"{budget} keep, but the accelerate YAML does not compile by inductor; set dynamo_backend: inductor and "
        "dynamo_use_regional_compilation: true under dynamo_config:, or --activation_memory_budget "
        "1": share < 1 and not by_inductor,
        f"{budget} keep, but with fsdp_activation_checkpointing: true they keep nothing; set that to false, or "
        "--activation_memory_budget 1": share < 1 and by_inductor and recomputes,
        f"--reduce_dtype {args.reduce_dtype}: DDP sums gradients over the ranks in the precision of the weights, here "
        f"{grad_dtype}; set it to {grad_dtype}, or choose an FSDP config": is_ddp and args.reduce_dtype != grad_dtype,
        "--use_peft: FSDP1 joins frozen weights and adapters to one flat parameter, which has one precision, and gradients "
        "of all its parts; choose a config with fsdp_version: 2": is_fsdp1 and args.use_peft,
        f"--optim {args.optim} works on rows and columns, but FSDP1 leaves each rank flat pieces of parameters; choose a "
        "config with fsdp_version: 2": is_fsdp1 and args.optim in ("adafactor", "muon"),
        "--optim muon would make matrices orthogonal on the CPU, where fsdp_offload_params: true keeps them; set that to "
        "false, or choose another --optim": args.optim == "muon" and env.get("FSDP_OFFLOAD_PARAMS") == "true",
        "--optim adamw_8bit: bitsandbytes does not take FSDP's sharded parameters; choose single.yaml or ddp.yaml, or "
        "--optim adafactor or adamw_bf16_kahan": use_fsdp and args.optim == "adamw_8bit",
        f"--verify_replicas {args.verify_replicas} compares replicas of the weights, and this launch has one alone; set it "
        "to 0, or take several processes and accelerate_configs/ddp.yaml or "
        "fsdp_hybrid.yaml": args.verify_replicas > 0 and not (is_ddp or is_hybrid),
        "--load_in_4bit keeps linear layers in 4 bits, mixed_precision: fp8 computes them in fp8; leave one of them "
        "out": precision == "fp8" and args.load_in_4bit,
        "--optim adamw_bf16_kahan keeps the weights in bf16, mixed_precision: bf16 in the accelerate YAML keeps them in "
        "fp32; set `mixed_precision: no`, or choose another "
        "--optim": precision == "bf16" and args.optim == "adamw_bf16_kahan",
    }
    return that_apply(problems)


def environment_warnings(env: Mapping[str, str], num_devices: int, num_cores: int) -> list[str]:
    """List settings that work but are probably not intended."""
    local_world = int(env.get("LOCAL_WORLD_SIZE", 1))
    warnings = {
        f"{num_devices - local_world} of {num_devices} GPUs stay idle (numbers {local_world} to {num_devices - 1}); "
        f"launch with --num_processes {num_devices} to use them all": local_world < num_devices,
        f"{local_world} processes share {num_cores} cores; launch with --num_processes {num_cores} at "
        "most": not num_devices and local_world > num_cores,
    }
    return that_apply(warnings)


def lever_warnings(args: TrainArgs, env: Mapping[str, str], num_devices: int) -> list[str]:
    """List arguments that work under the strategy in `env`, but slowly, which is probably not intended."""
    size, local_world = ranks_a_row(env), int(env.get("LOCAL_WORLD_SIZE", 1))
    asked = env.get("ACCELERATE_MIXED_PRECISION", "no")
    precision = asked if num_devices else ""
    rate = type(args).__dataclass_fields__["learning_rate"].default
    warnings = {
        "no GPU is found, and mixed_precision is bf16, in which most CPUs are slower than in fp32, and less exact; give "
        "--mixed_precision no before the recipe": asked == "bf16" and not num_devices,
        f"--use_peft with the default --learning_rate {rate:g}, which is meant for all weights: adapters learn little; "
        f"give about ten times as much, --learning_rate {10 * rate:g}": args.use_peft and args.learning_rate == rate,
        f"{size} ranks share a row, but a machine has {local_world} processes: some rows lie on two machines, and each "
        "layer sends their activations over the network, 60 KB a token of an 8B model; choose a parallelism_config_cp_size "
        "that divides the processes of a machine": local_world % size,
        f"mixed_precision: no with --optim {args.optim} computes in fp32; set `mixed_precision: bf16`, or --optim "
        "adamw_bf16_kahan, for bf16": precision == "no" and args.param_dtype == torch.float32,
        "--optim muon: a model that AdamW has trained often gets worse by Muon (arXiv 2605.10468); compare it with "
        "--optim adamw_torch_fused": args.optim == "muon" and bool(args.base_model) and not args.use_peft,
        "mixed_precision: fp8 without dynamo_backend casts in separate kernels, which take as much time as fp8 saves; take "
        "dynamo_config from accelerate_configs/fsdp_fp8.yaml": precision == "fp8" and not is_compiled(env),
    }
    return that_apply(warnings)


def launch_problems(args: TrainArgs, env: Mapping[str, str], num_devices: int) -> list[str]:
    """List the problems of a launch with these arguments; `env` and `num_devices` are as in `environment_problems`."""
    return environment_problems(env, num_devices) + lever_problems(args, env, num_devices)
