"""One accelerate YAML, on a GPU cluster and on a laptop: `make_accelerator()` and `prepare()`.

`accelerate launch` writes the YAML into the environment; this module reads only the environment. On a machine with
accelerators it follows Accelerate's normal path. Without accelerators, FSDP still shards, over gloo. `upstream` corrects
errors of the libraries.
"""

import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs
from accelerate.utils import AORecipeKwargs, set_seed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper

from accelerate_recipes import ranks, upstream
from accelerate_recipes.args import DTYPES, TrainArgs
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch.checks import environment_warnings, fp8_layers, lever_warnings, num_accelerators
from accelerate_recipes.life import parent
from accelerate_recipes.models import attention, mixers, probes, rotary, shared_rows, slices, weights
from accelerate_recipes.optim import local_shard, optimizer_fn

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name


def make_accelerator(args: TrainArgs) -> Accelerator:
    """Make the Accelerator that the launcher's environment describes, and set `args.seed` on all ranks alike.

    Call `launch.checks.launch_problems` first; this function assumes that it found nothing.

    Raises:
        ConfigError: for a strategy that would run as independent copies.
    """
    num_devices, num_cores = num_accelerators(), len(os.sched_getaffinity(0))
    if ranks.is_first_of_machine():
        warnings = environment_warnings(os.environ, num_devices, num_cores)
        for warning in warnings + lever_warnings(args, os.environ, num_devices):
            print(f"warning: {warning}", file=sys.stderr, flush=True)

    if ranks.is_compiled():
        # Ranks compile the same code at the same time. Each gets a folder of its own, so that none waits for a lock.
        for name, default in (("TORCHINDUCTOR_CACHE_DIR", "torchinductor"), ("TRITON_CACHE_DIR", "triton")):
            base = Path(os.environ.get(name) or Path(tempfile.gettempdir()) / f"{default}_{os.getuid()}")
            os.environ[name] = str(base / f"rank-{ranks.rank()}")
    upstream.let_torch_choose_dynamic_shapes()
    upstream.resolve_vector_math()
    keep_memory_in_one_piece()
    attention.keep_cudnn_from_masks()
    if ranks.ranks_a_row() > 1:
        shared_rows.share_attention()
    if args.full_determinism:
        make_deterministic()
    upstream.choose_interface()
    timeout = timedelta(seconds=args.ddp_timeout)
    is_fp8 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8"
    use_fsdp = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if not num_devices:
        upstream.start_on_cpu(use_fsdp, timeout)
    if not num_devices or (use_fsdp and os.environ.get("FSDP_OFFLOAD_PARAMS") == "true"):
        use_cores(num_cores)
    accelerator = Accelerator(
        fsdp_plugin=make_fsdp_plugin(args, on_cpu=not num_devices) if use_fsdp else None,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout), *([AORecipeKwargs()] if is_fp8 else [])],
        log_with=args.trackers or None,
        project_dir=args.output_dir,
    )
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != launched or (use_fsdp and accelerator.distributed_type != DistributedType.FSDP):
        raise ConfigError(
            f"{launched} processes were launched{' with FSDP' if use_fsdp else ''}, but Accelerate reports "
            f"{accelerator.num_processes} ({accelerator.distributed_type.value}): each would train a copy of its own. "
            "Launch with `accelerate launch --config_file accelerate_configs/...`"
        )
    upstream.keep_masks(accelerator)
    set_seed(args.seed)
    return accelerator


def keep_memory_in_one_piece() -> None:
    """Let memory segments of a GPU grow, unless the user has configured the allocator; call it before the GPU is used.

    Segments of fixed size would waste ever more memory when batches have many lengths, and layers are gathered and
    freed.
    """
    is_chosen = any(name in os.environ for name in ALLOCATOR_SETTINGS)
    if torch.cuda.is_available() and not torch.version.hip and not is_chosen:
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def make_deterministic() -> None:
    """Choose algorithms that add in a fixed order. Call it before anything is on a GPU.

    A function without such an algorithm fails when it is called. This is transformers' enable_full_determinism without
    CUDA_LAUNCH_BLOCKING: a single stream already orders its kernels. Source: "Reproducibility" in the notes of the
    PyTorch documentation.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers reads it, for the flash-attn package
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def use_cores(num_cores: int) -> None:
    """Divide the cores among the processes of this machine, for computation on a CPU or for the optimizer of CPU offload.

    Launchers set OMP_NUM_THREADS=1, even for one process. A number that the user has set stays.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1" and not parent.threads_are_chosen():
        torch.set_num_threads(max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def make_fsdp_plugin(args: TrainArgs, on_cpu: bool) -> FullyShardedDataParallelPlugin:
    """Make the plugin of the YAML's FSDP settings, without those that a CPU lacks. `args` choose the dtype of reductions."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

    version = int(os.environ.get("FSDP_VERSION", 1))
    # Accelerate's default under bf16 also reduces gradients in bf16: a sum over all ranks with 8 bits of precision.
    # A policy without `param_dtype` keeps the dtype of the parameters: fp32, or bf16 with --optim adamw_bf16_kahan.
    compute_dtype = torch.bfloat16 if ranks.computes_in_bf16() and args.param_dtype == torch.float32 else None
    policy = {"param_dtype": compute_dtype, "reduce_dtype": DTYPES[args.reduce_dtype]}
    if version == 2:
        settings = {"mixed_precision_policy": MixedPrecisionPolicy(**policy)}
    else:
        # Buffers keep their precision, as under all other strategies. In bf16 the frequencies of a rotary embedding would
        # be up to 0.4 % off: in heads of 128 dimensions, 5 rad at position 4096.
        settings = {"mixed_precision_policy": MixedPrecision(**policy, buffer_dtype=None)}
    if on_cpu and version == 1:
        # FSDP1 can broadcast the first weights only between GPUs. On a CPU, each rank makes the same weights instead.
        settings |= {"sync_module_states": False, "cpu_ram_efficient_loading": False}
    if on_cpu and version == 2 and os.environ.get("FSDP_OFFLOAD_PARAMS") == "true":
        settings["cpu_offload"] = CPUOffloadPolicy(pin_memory=False)  # pinning needs an accelerator
    return FullyShardedDataParallelPlugin(**settings)


def prepare(
    accelerator: Accelerator, model: nn.Module, args: TrainArgs
) -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Module]]:
    """Shard the model as the strategy says, then build the optimizer of `args` on the parameters that this rank holds.

    Returns:
        Model, optimizer, and the modules whose parameters a forward pass gathers before it computes anything (see
        `accumulate`): embedding and first layer.

    A new model (`loading.new_model`) gets its first weights here, from the seed that `make_accelerator` set. Under FSDP2
    this happens after sharding, so no rank ever holds the whole model. Under other strategies each rank holds it for a
    while: DDP must, and FSDP1 takes it from the CPU. The YAML's fsdp_cpu_ram_efficient_loading is for weights from
    files that are no safetensors; for a new model it is switched off, as for one whose slices each rank reads (`slices`).

    Accelerate 1.15 needs an FSDP2 model and its optimizer prepared together. It finds the optimizer's parameters by
    `data_ptr`, which is 0 for all on the meta device, so that all entries silently become one tensor. Therefore
    Accelerate gets a placeholder, and the real optimizer is built on the sharded parameters. FSDP1 with
    `use_orig_params` needs this order too. The optimizer needs no wrapper, because there is no gradient scaler.
    """
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # A reference or a teacher is not trained: the optimizer that Accelerate wants is never used.
    make_optimizer = optimizer_fn(model, args) if trained else lambda held: torch.optim.SGD(held.parameters())
    unpacked = mixers.unpack_documents(model, probes.mixers_in(model))
    rotary.embed_by_length(model)
    functorch_config.activation_memory_budget = args.activation_memory_budget
    if accelerator.mixed_precision == "fp8":
        layers = fp8_layers(model)
        accelerator.ao_recipe_handler.module_filter_func = lambda module, name: name in layers
    # Ask the first rank. On ranks that did not read the files of a pretrained model, it has meta parameters too.
    source = slices.source_of(model)
    is_new = not source and ranks.on_first_rank(lambda: all(parameter.is_meta for parameter in model.parameters()))
    if is_new and not accelerator.is_fsdp2:
        weights.initialize(model, torch.initial_seed(), accelerator.device, parameter_device(accelerator))
    upstream.leave_out_other_layers(model)
    upstream.count_cached_tokens(model)
    if accelerator.distributed_type == DistributedType.FSDP:
        upstream.forget_layers_of_other_models(accelerator.state.fsdp_plugin, model)
    if accelerator.is_fsdp2:
        if is_new or source:
            accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        upstream.leave_embedding_to_accelerate(model)
        placeholder = torch.optim.SGD(model.parameters(), lr=0.0)
        with upstream.hidden_buffers(accelerator, model), upstream.hidden_head(model):
            model, _ = accelerator.prepare(model, placeholder)
        accelerator._optimizers.clear()
        if is_new:
            weights.initialize(model, torch.initial_seed(), accelerator.device, parameter_device(accelerator))
        elif source:
            slices.read_slices(model, source, accelerator.device, parameter_device(accelerator))
        upstream.restore_rng_in_recompute(model)
        upstream.compile_inside_recompute(model, accelerator.state.dynamo_plugin)
        # `generate` may call the encoder alone. Then too, FSDP must gather the root's parameters: embedding and last norms.
        inner = accelerator.unwrap_model(model, keep_torch_compile=False)
        if hasattr(inner, "generate"):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(inner, "generate")
            if parameter_device(accelerator) != accelerator.device:
                upstream.computes_on(inner, accelerator.device)
    elif trained or accelerator.distributed_type == DistributedType.FSDP:
        model = accelerator.prepare(model)
    else:  # DDP would refuse a model that is not trained
        model = accelerator.prepare_model(model, evaluation_mode=True)
    mixers.recompute_documents(model)
    recompute_every(model, args.checkpoint_every_n_layers)
    local = sum(local_shard(p).numel() for p in model.parameters())
    units = fsdp_units(model)
    report_strategy(accelerator, model, total, trained, local, units)
    # Check that FSDP has really sharded. With wrong settings of wrapping a run would work, but need more memory.
    if accelerator.distributed_type == DistributedType.FSDP:
        shards = shard_world_size(accelerator)
        if not units:
            raise ConfigError(
                "FSDP is on, but no module was wrapped; check fsdp_auto_wrap_policy in the accelerate YAML"
            )
        mixers.check_units(unpacked, units)
        strategy = getattr(accelerator.state.fsdp_plugin.sharding_strategy, "name", "")  # of FSDP1
        if shards > 1 and local >= total and strategy != "NO_SHARD":
            raise ConfigError(f"this rank holds all {total:,} parameters although {shards} ranks should share them")
    if args.prefetch_layers:
        layer_names = accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
        layers = [unit for unit in units if type(unit).__name__.removeprefix("FSDP") in layer_names]
        prefetch_layers(layers, args.prefetch_layers)
    return model, make_optimizer(model), units[:2]


def parameter_device(accelerator: Accelerator) -> torch.device:
    """Return the device on which new parameters are made: FSDP1 and CPU offload take them from the CPU."""
    on_cpu = accelerator.distributed_type == DistributedType.FSDP and (
        not accelerator.is_fsdp2 or offloads(accelerator.state.fsdp_plugin)
    )
    return torch.device("cpu") if on_cpu else accelerator.device


def offloads(plugin: FullyShardedDataParallelPlugin) -> bool:
    """Tell whether FSDP2 keeps the parameters of this rank on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def recompute_every(model: nn.Module, n: int) -> None:
    """Recompute the activations of only the first and every n-th layer after it, of those that Accelerate wrapped for this.

    The other layers keep their activations. Their wrapper stays, because it is part of parameter names, but it only
    calls the layer.
    """
    modules = list(model.modules())
    for i, wrapper in enumerate(module for module in modules if isinstance(module, CheckpointWrapper)):
        if i % n:
            wrapper.forward = wrapper._checkpoint_wrapped_module.__call__
    for wrapper in modules:
        # An OffloadWrapper moves saved tensors to the CPU. Around a layer that is not recomputed, these would be all its
        # activations, so this wrapper is switched off too.
        if isinstance(wrapper, OffloadWrapper) and not recomputes(wrapper._checkpoint_wrapped_module):
            wrapper.forward = wrapper._checkpoint_wrapped_module.__call__


def recomputes(wrapper: CheckpointWrapper) -> bool:
    return "forward" not in vars(wrapper)


def fsdp_units(model: nn.Module) -> list[nn.Module]:
    """List the FSDP units: one module for each group of parameters that FSDP gathers together."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    units: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, FSDP1):
            units[id(module)] = module
        elif isinstance(module, FSDPModule):
            # Modules that are gathered together share one state. A module without parameters of its own has no group.
            state = module._get_fsdp_state()
            if state._fsdp_param_group is not None:
                units.setdefault(id(state), module)
    return list(units.values())


def prefetch_layers(layers: Sequence[Any], depth: int) -> None:
    """Gather the next `depth` layers while one layer computes, in forward and backward passes. FSDP2's default is one.

    More layers hide a slow network behind computation, but need memory for as many whole layers. The accelerate YAML has
    no key for this.
    """
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + depth])
        layer.set_modules_to_backward_prefetch(layers[max(0, i - depth) : i][::-1])


def report_strategy(
    accelerator: Accelerator, model: nn.Module, total: int, trained: int, local: int, units: list[nn.Module]
) -> None:
    """Print one line that describes the strategy of this run."""
    parts = [
        strategy_name(accelerator),
        f"{accelerator.num_processes} x {accelerator.device.type}",
        f"backend {accelerator.state.backend or 'none'}",
        f"precision {accelerator.mixed_precision}",
    ]
    if accelerator.mixed_precision == "fp8":
        parts[-1] += f" in {sum(type(m).__name__ == 'Float8Linear' for m in model.modules())} linear layers"
    if (dtype := next(model.parameters()).dtype) != torch.float32:
        parts[-1] += f", weights {str(dtype).removeprefix('torch.')}"
    if accelerator.distributed_type == DistributedType.FSDP:
        classes = sorted({type(getattr(unit, "_fsdp_wrapped_module", unit)).__name__ for unit in units})
        parts.append(f"{len(units)} FSDP units ({', '.join(c.removeprefix('FSDP') for c in classes)})")
    layers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    if layers:
        where = " from inputs kept on the CPU" if any(isinstance(m, OffloadWrapper) for m in model.modules()) else ""
        parts.append(f"activations of {sum(map(recomputes, layers))} of {len(layers)} layers recomputed{where}")
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic algorithms")
    parts += [f"allocator {os.environ[name]}" for name in ALLOCATOR_SETTINGS if name in os.environ]
    if accelerator.device.type == "cpu":
        parts.append(f"{torch.get_num_threads()} threads a process")
    if 0 < trained < total:
        has_adapters = any(".lora_" in name for name, _ in model.named_parameters())
        parts.append(f"{'adapters: ' if has_adapters else ''}{trained:,} parameters are trained, {trained / total:.2%}")
    parts.append(f"{local:,} of {total:,} parameters on rank {accelerator.process_index}")
    whose = "" if trained else " of the model that is not trained"
    accelerator.on_main_process(print)(f"Strategy{whose}: {' | '.join(parts)}", flush=True)


def clip_gradients(accelerator: Accelerator, model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale gradients down to a norm of `max_norm` (0: never). Return the norm before that, a scalar on the device."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if max_norm or (plugin and plugin.fsdp_version == 1):  # only FSDP1's own clipping knows the norm of flat shards
        norm = accelerator.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
    else:  # clipping to infinity would multiply each gradient by 1
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert norm is not None  # only under DeepSpeed it is None
    return norm.full_tensor() if ranks.is_sharded(norm) else norm


@contextlib.contextmanager
def accumulate(
    accelerator: Accelerator, model: nn.Module, first_units: Sequence[nn.Module], is_last: bool
) -> Iterator[None]:
    """Run the forward and backward pass of one micro-batch in this context, with no more communication than necessary.

    DDP reduces gradients only with the last micro-batch. FSDP reduce-scatters with each one: keeping whole gradients
    until the last would cost every rank the memory of all of them. Hybrid sharding reduce-scatters inside a replica, and
    all-reduces between replicas (the slow network) only with the last micro-batch.

    The backward pass gathers `first_units` last, and the next forward pass needs them first. So under FSDP2 they stay
    gathered from one micro-batch to the next, while no activations exist. With reshard_after_forward: false, all
    parameters stay gathered from forward to backward pass; then all stay gathered between micro-batches too. Neither
    raises the peak of memory.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            yield
        return
    if accelerator.is_fsdp2:
        if num_replicas(accelerator) > 1:
            model.set_requires_all_reduce(is_last)  # pyright: ignore[reportCallIssue]
        if accelerator.state.fsdp_plugin.reshard_after_forward:
            for unit in first_units:
                unit.set_reshard_after_backward(is_last, recurse=False)  # pyright: ignore[reportCallIssue]
        else:
            model.set_reshard_after_backward(is_last)  # pyright: ignore[reportCallIssue]
    yield


def shard_world_size(accelerator: Accelerator) -> int:
    """Count the ranks among which one copy of the parameters is divided."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return 1
    mesh = accelerator.torch_device_mesh
    if mesh is None:
        return accelerator.num_processes
    return math.prod(mesh[name].size() for name in ("dp_shard", "cp") if name in mesh.mesh_dim_names)


def num_replicas(accelerator: Accelerator) -> int:
    """Count the whole copies of the parameters over all ranks."""
    return accelerator.num_processes // shard_world_size(accelerator)


def strategy_name(accelerator: Accelerator) -> str:
    """Name the strategy in words, for the first log line, the checkpoint and the model card."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return "DDP" if accelerator.num_processes > 1 else "single process"
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version == 1:
        name = f"FSDP1 {plugin.sharding_strategy.name}"
    else:
        name = f"FSDP2 {'full shard' if plugin.reshard_after_forward else 'gradients and optimizer sharded'}"
    if num_replicas(accelerator) > 1:
        name += f" in {num_replicas(accelerator)} replicas"
    if ranks.ranks_a_row() > 1:
        name += f", rows shared by {ranks.ranks_a_row()}"
    if plugin.activation_checkpointing:
        name += ", activation checkpointing"
    if getattr(plugin.cpu_offload, "offload_params", offloads(plugin)):
        name += ", CPU offload"
    return name
