"""Table of the private names of pinned libraries that this project uses: when you raise a pin, begin here.

Each row has the owner, the name, the modules that use it and for what, and the parameters that it must have (`*`: others). Where
upstream's behaviour is worked around, another test tells when the workaround is no longer needed: `grep -r upstream tests`.
"""

import ast
import contextlib
import importlib
import inspect
from collections import ChainMap
from fnmatch import fnmatch

import datasets
import huggingface_hub.constants
import huggingface_hub.serialization._base
import pytest
import torch
import torch._dynamo.pgo
import torch.distributed._state_dict_utils as state_dict_utils
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as checkpoint_wrapper
import torch.distributed.checkpoint._nested_dict as nested_dict
import torch.distributed.checkpoint.metadata as metadata
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp._fully_shard._fsdp_param_group as _fsdp_param_group
import torch.distributed.fsdp._fully_shard._fully_shard as fully_shard
import transformers
import transformers.conversion_mapping as conversion_mapping
from accelerate import Accelerator
from accelerate.commands import launch
from accelerate.state import PartialState
from helpers import IMPORTS, ROOT, TRL
from huggingface_hub.utils import _telemetry
from peft.tuners.tuners_utils import BaseTunerLayer
from torch._subclasses import fake_tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import _sharding_prop
from torch.nn.attention import varlen
from torch.optim.lr_scheduler import LRScheduler
from torch.testing._internal.distributed import fake_pg
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.utils import chat_template_utils
from trl import DPOTrainer, GRPOTrainer, data_utils
from trl.kernels import chunked_divergence, chunked_logprob
from trl.trainer import base_trainer

from accelerate_recipes.conversations import answers, distillation
from accelerate_recipes.losses import TILES
from accelerate_recipes.upstream import CACHES
from recipe_tools.plan.fake_gpu import of_trl

TOUCHED = [
    # torch
    (state_dict_utils, "_copy_state_dict", "checkpointer", "copies a state in the background of a step", "state_dict copy_state_dict non_blocking type_check"),
    (state_dict_utils, "_create_cpu_state_dict", "checkpointer", "pinned memory for that copy", "state_dict pin_memory share_memory"),
    (torch._C, "_accelerator_getAllocatorSettings", "checkpointer", "the pinned allocator's threshold", None),
    (torch._C, "_accelerator_setAllocatorSettings", "checkpointer", "the same, set", None),
    (nested_dict, "set_element", "state_reader", "flat keys back into a nested state", "root_dict path value"),
    (FileSystemReader, "_get_metadata_path", "state_reader", ".metadata is read before it is unpickled", "self rank"),
    (torch.optim.AdamW, "_init_group", "optim", "a group's moments, for the Kahan sum", "self group params_with_grad grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps"),
    (metadata, "_MEM_FORMAT_ENCODING", "state_reader", "its members are allowed in .metadata", None),
    (torch.serialization, "_get_layout", "state_reader", "allowed in .metadata", "name"),
    (checkpoint_wrapper, "CheckpointWrapper", "distributed upstream", "recompute each n-th layer; layers that are recomputed", "mod checkpoint_impl checkpoint_fn checkpoint_fn_kwargs"),
    (checkpoint_wrapper, "OffloadWrapper", "distributed upstream", "activations on the CPU", "mod"),
    (checkpoint_wrapper.ActivationWrapper, "_checkpoint_wrapped_module", "distributed upstream", "the layer inside; the layer that is compiled", None),
    (torch.nn.Module, "_compiled_call_impl", "upstream", "recomputed layers, compiled", None),
    (FSDPModule, "_get_fsdp_state", "distributed", "prefetching", "self"),
    (FSDPState, "_fsdp_param_group", "distributed", "whether a unit has parameters", None),
    (FullyShardedDataParallel, "_fsdp_wrapped_module", "distributed", "class names of FSDP1's units", None),
    (varlen, "_varlen_attn", "document_attention", "a kernel for CPUs", "query key value cu_seq_q cu_seq_k max_q max_k is_causal scale window_size enable_gqa seqused_k block_table num_splits*"),
    (varlen, "_varlen_attn_backward", "document_attention", "the same, backward", "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size*"),
    (transformers.PreTrainedModel, "_supports_attention_backend", "attention", "whether a model calls a registered attention", None),
    (transformers.PreTrainedModel, "_supports_sdpa", "attention", "which attention a class supports", None),
    (transformers.PreTrainedModel, "_supports_flex_attn", "attention", "the same", None),
    (transformers.PreTrainedModel, "_supports_flash_attn", "attention", "the same", None),
    (transformers.PreTrainedConfig, "_attn_implementation", "attention documents images preferences supervised_images losses probes settings run requirements", "which attention a model has, and whether it is told where documents begin", None),
    (torch.nn.Module, "_buffers", "upstream weights fake_gpu", "buffers of the first rank; first values of buffers; buffers on the GPU, of parameters on the CPU", None),
    (torch.nn.Module, "_non_persistent_buffers_set", "upstream bad_steps", "buffers that Accelerate must not see; buffers that a forward pass does not change for good", None),
    (torch.nn.Module, "_parameters", "weights adapters slices", "first values of sharded parameters; a weight with trained rows in it; an embedding with more rows", None),
    (LRScheduler, "_step_count", "checkpointer", "the schedule at a step", None),
    (c10d, "_get_default_store", "watch", "ranks tell each other what they are doing", ""),
    (_sharding_prop, "ShardingPropagator", "ledger", "shapes that DTensor asks for", None),
    (_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_non_cached", "ledger", "the same", "self op_schema"),
    (torch.UntypedStorage, "_cdata", "ledger", "which storage a tensor has", None),
    (torch._C, "_current_graph_task_id", "ledger fake_gpu", "whether a backward pass is running", None),
    (torch._ops.OpOverload, "_schema", "ledger", "names of operators", None),
    (torch._ops.OpOverload, "_overloadpacket", "ledger", "their FLOPs", None),
    (torch.optim.Optimizer, "_optimizer_step_pre_hooks", "ledger", "whether the hooks are there", None),
    (torch.ops.aten, "_local_scalar_dense", "ledger fake_gpu", "values that are read; fakes have no values", None),
    (torch.ops.torch_attn, "_varlen_attn", "ledger", "its FLOPs", None),
    (torch.ops.torch_attn, "_varlen_attn_backward", "ledger", "its FLOPs", None),
    (torch.ops.aten, "_scaled_dot_product_efficient_attention", "fake_gpu", "what a GPU would take with a mask", None),
    (torch.ops.aten, "_scaled_dot_product_attention_math", "fake_gpu", "the same in fp32, with fewer keys than queries", None),
    (torch.ops.aten, "_scaled_dot_product_flash_attention", "fake_gpu", "and without", None),
    (c10d, "_resolve_process_group", "ledger", "ranks of a collective", None),
    (torch._guards, "active_fake_mode", "ledger", "whether tensors are fakes", ""),
    (torch.utils._pytree, "tree_leaves", "ledger probes fake_gpu", "what an operator returned; what a module takes and returns", "tree is_leaf"),
    (torch.utils._pytree, "tree_map", "mixers", "documents of whatever a mixer takes", None),
    (checkpoint_wrapper, "CheckpointWrapper", "mixers", "layers that compute their documents again", None),
    (torch.utils._python_dispatch, "TorchDispatchMode", "ledger fake_gpu", "sees each operator; answers for fakes", "_dispatch_key"),
    (fake_tensor, "FakeTensorMode", "fake_gpu", "tensors without values", None),
    (fake_tensor, "FakeTensor", "rotary", "no lengths of documents in a simulation", None),
    (_fsdp_param_group, "FSDPParamGroup", "fake_gpu", "gathers of fakes", None),
    (fake_pg, "FakeStore", "fake_gpu", "ranks that do not exist", None),
    (fully_shard, "_init_default_mesh", "fake_gpu", "a mesh that no value is asked for", None),
    (torch._C, "_get_accelerator", "fake_gpu", "the device of that mesh", None),
    (chunked_divergence, "TOKEN_CHUNK_SIZE", "distillation", "smaller tiles", None),
    (chunked_logprob, "TOKEN_CHUNK_SIZE", "settings fake_gpu", "smaller tiles on a CPU; tiles of a GPU", None),
    (chunked_logprob, "_TRITON_AVAILABLE", "fake_gpu", "trl's loss takes its path of GPUs", None),
    # accelerate
    (PartialState, "_shared_state", "fake_gpu upstream", "the device; DDP on a CPU in one process", None),
    (Accelerator, "_optimizers", "distributed", "the optimizer is made on the sharded model", None),
    (Accelerator, "_prepare_cp", "upstream", "rows that ranks share keep their masks", "self args"),
    (Accelerator, "ao_recipe_handler", "distributed", "which layers compute in fp8", None),
    (launch, "_validate_launch_command", "request", "what the launcher would start", "args"),
    # transformers
    (transformers.AutoModelForCausalLM, "_model_mapping", "configurations classifiers", "which architectures there are of a kind of models; what the class of a labeller reads", None),
    (conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", "adapters", "types of which PEFT takes layers for experts", None),
    (transformers.PreTrainedModel, "_init_weights", "weights deepvit", "the model's own rule for first values; first values of linear layers and norms", "self module"),
    (transformers.PreTrainedModel, "_no_split_modules", "images checks upstream classifiers", "the layers of text part and tower are units of FSDP; what FSDP wraps by default; without what holds the embedding; layers, not whole stages", None),
    (transformers.ProcessorMixin, "_merge_kwargs", "pictures", "settings of images, as in the processor's own call", "self ModelProcessorKwargs tokenizer_init_kwargs kwargs"),
    (transformers.ProcessorMixin, "_process_images", "pictures", "values of images, and the text that stands for each, without a text", "self images kwargs"),
    (chat_template_utils, "_compile_jinja_template", "rendering", "what a template knows, in a dict", "chat_template"),
    (transformers, "_class_to_module", "processors", "the module of a class, which asks for torchvision", None),
    (transformers.PreTrainedModel, "_keys_to_ignore_on_load_unexpected", "base", "heads that the export takes from its base", None),
    (transformers.PreTrainedModel, "_keep_in_fp32_modules", "base", "weights that an export must not round", None),
    (transformers.PreTrainedModel, "_keep_in_fp32_modules_strict", "base", "the same", None),
    (transformers.PreTrainedModel, "_input_embed_layer", "deepvit", "the embedding, which FSDP gathers alone", None),
    (torch.nn.Module, "_apply", "slices", "memory for sharded parameters, and only for those without", "self fn recurse"),
    (BaseTunerLayer, "_disable_adapters", "adapters", "the base alone computes, and the same weights are trained", None),
    (transformers.PreTrainedModel, "_hf_peft_config_loaded", "adapters", "Trainer takes a 4-bit model with adapters", None),
    (transformers.Trainer, "create_accelerator_and_postprocess", "answers", "our Accelerator", "self"),
    # trl, datasets
    (DPOTrainer, "_metrics", "objective preferences", "a loss, without a trainer, logs there", None),
    (GRPOTrainer, "_metrics", "answers", "minima and maxima of micro-batches", None),
    (DPOTrainer, "_total_train_tokens", "objective", "the same", None),
    (DPOTrainer, "_tp_size", "objective", "the same", None),
    (transformers.GenerationMixin, "_get_logits_processor", "drawing_trial generation", "what drawing does to scores; draws by our own numbers, after all that changes the chances", None),
    (GRPOTrainer, "_generate_and_score_completions", "answers", "draws and scores the answers of a step", "self inputs"),
    (GRPOTrainer, "_generate", "answers", "answers are drawn without dropout", "self prompts"),
    (GRPOTrainer, "_calculate_rewards", "answers", "rewards in float64", "self inputs prompts completions completion_ids_list"),
    (transformers.GenerationConfig, "_get_default_generation_params", "generation", "settings that a base has changed", ""),
    (GRPOTrainer, "_entropy_bonus_enabled", "answers", "the entropy is a part of its own", None),
    (GRPOTrainer, "_logs", "answers", "answers of a step", None),
    (torch.cuda.memory, "_record_memory_history", "report", "a GPU's memory over some steps", "enabled context stacks max_entries *"),
    (torch.cuda.memory, "_dump_snapshot", "report", "the same, as a file", "filename augment_with_fx_traces"),
    (datasets.Dataset, "_indices", "prepared trained_pairs", "rows that only point to a table; rows that were left out", None),
    (datasets.Dataset, "_fingerprint", "passes", "rows that are made are found again by those that they are made of", None),
    (torch._dynamo, "pgo", "upstream", "forgets the sizes that an evaluation had", None),
    (huggingface_hub.serialization._base, "parse_size_to_int", "export", "reads --max_shard_size", "size_as_str"),
    (data_utils, "_pack_bfd", "packed", "packs documents; of tables alone is there a public one", "examples seq_length on_seq_length_overflow"),
]  # fmt: skip
SOURCES = [*(ROOT / "src").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
# Names of the standard library, or names that are public in spite of the underscore.
NOT_UPSTREAM = {
    "_C", "_SubParsersAction", "_actions", "_asdict", "_check_value", "_current_frames", "_exit", "_field_defaults", "_replace", "_batch",
    "_fields", "_get_value", "_option_string_actions",
}  # fmt: skip


@pytest.mark.parametrize("owner, name, users, why, parameters", TOUCHED, ids=[f"{row[2]}-{row[1]}" for row in TOUCHED])
def test_it_is_still_there(owner, name, users, why, parameters):
    for user in users.split():
        assert any(name in path.read_text() for path in SOURCES if path.stem == user), f"{user} may go"
    found = getattr(owner, name, None)
    if found is None:  # set on each object when it is made
        assert name in inspect.getsource(owner), f"{users}: {why}"
    if parameters is not None:
        function = getattr(found, "_init_fn", found)  # for an operator
        assert fnmatch(" ".join(inspect.signature(function).parameters), parameters), f"{users}: {why}"


@pytest.mark.parametrize("module", [*IMPORTS, *TRL])
def test_a_module_that_runs_wait_for(module):
    """The server of forks imports it for all runs, and goes on without one that upstream has renamed."""
    importlib.import_module(module)


def test_the_names_of_caches_are_known():
    """All but those of models that cannot be packed. Those that transformers no longer has may go from CACHES."""
    assert {*ALL_CACHE_NAMES} - {"mems", "past_buckets_states"} <= CACHES


def test_plan_computes_logits_in_the_tiles_of_a_gpu():
    """A run on a CPU makes them smaller, also in the process that simulates one on GPUs."""
    assert f"\nTOKEN_CHUNK_SIZE = {TILES[chunked_logprob.__name__]}\n" in inspect.getsource(chunked_logprob)
    kernels = (chunked_logprob, distillation.chunked_divergence)
    with contextlib.ExitStack() as patches:
        for patch in of_trl():
            patches.enter_context(patch)
        assert [kernel.TOKEN_CHUNK_SIZE for kernel in kernels] == [*TILES.values()]
    if not torch.cuda.is_available():
        assert [kernel.TOKEN_CHUNK_SIZE for kernel in kernels] == [128, 128]


def test_jinja_still_copies_names_slowly():
    """For this `renderer` replaces the ChainMap of a template."""
    assert isinstance(chat_template_utils._compile_jinja_template("{{ jinja_3_1 }}").globals, ChainMap)


def test_a_run_tells_nobody_of_itself(monkeypatch):
    """trl's trainers would, where the network is not switched off as in tests."""
    assert answers.AnswerTrainer
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_telemetry, "_start_telemetry_thread", lambda: pytest.fail("it would be sent"))
    base_trainer.send_telemetry("trl/DPOTrainer", library_name="trl")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NOT_UPSTREAM


def test_the_table_is_complete():
    """Each private name that a module uses from another owner, and each from a private module, is in the table."""
    used = set()
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)]
        of_self = [node for node in attributes if ast.unparse(node.value) == "self"]
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        own |= {node.attr for node in of_self if isinstance(node.ctx, ast.Store)}
        used |= {(path.stem, node.attr) for node in attributes if node not in of_self or node.attr not in own}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("accelerate_recipes"):
                of_private = any(map(is_private, (node.module or "").split(".")))
                used |= {(path.stem, alias.name) for alias in node.names if of_private or is_private(alias.name)}
    assert used <= {(user, name) for _, name, users, _, _ in TOUCHED for user in users.split()}
