"""Names of other libraries, and what they are here: for messages, and for the table of docs/names.md.

python -m accelerate_recipes.arguments.names docs/names.md    # writes the table into the page
"""

import re
import sys
from collections.abc import Collection
from pathlib import Path

# Flags that the accelerate YAML or another argument decides here. They are refused even where a class of trl declares them.
ELSEWHERE = {
    "gradient_checkpointing": "set `fsdp_activation_checkpointing: true` under `fsdp_config:` in the accelerate YAML",
    "gradient_accumulation_steps": "it follows from --total_batch_size, --per_device_train_batch_size and the processes",
    "bf16": "set `mixed_precision: bf16` in the accelerate YAML, or `accelerate launch --mixed_precision bf16`",
    "fp16": "fp16 is not supported; set `mixed_precision: bf16` in the accelerate YAML",
    "mixed_precision": "set it in the accelerate YAML, or by `accelerate launch --mixed_precision ... RECIPE`",
    "torch_compile": "set `dynamo_backend: inductor` under `dynamo_config:` in the accelerate YAML",
    "fsdp": "choose a file of accelerate_configs/",
    "fsdp_config": "choose a file of accelerate_configs/",
    "deepspeed": "this collection shards with FSDP: choose a file of accelerate_configs/",
    "use_cpu": "a machine without a GPU is recognised by itself",
}

# What it is here, with ` or ` between what different recipes have, and its other names: short ones, and those of Trainer and
# trl, axolotl, LLaMA-Factory, unsloth, torchtune, AWS's sample of FSDP, and PyTorch's blog on T5.
OTHER_NAMES = {
    "`--learning_rate`": ["lr", "optimizer.lr"],
    "`--weight_decay`": ["wd"],
    "`--warmup_steps`": ["warmup"],
    "`--num_train_epochs`": ["epochs", "num_epoch", "num_epochs"],
    "`--max_steps`": ["steps", "train_steps", "max_train_steps", "max_steps_per_epoch"],
    "a file of accelerate_configs/": [
        "device_map", "fsdp_version", "dp_shard_size", "tensor_parallel_size", "context_parallel_size",
        "tensor_parallel_dim", "sharding_strategy",
    ],
    "`--total_batch_size`, over all processes": ["batch_size"],
    "`--total_batch_size`": ["global_batch_size"],
    "`--per_device_train_batch_size`": [
        "per_device_batch_size", "per_gpu_train_batch_size", "micro_batch_size", "train_batch_size",
    ],
    "`--model_name_or_path`": [
        "model", "model_name", "model_path", "base_model", "FastLanguageModel.from_pretrained(model_name)",
        "checkpointer",
    ],
    "the model's own or `--tokenizer_name`, of a new model": ["tokenizer", "tokenizer_config"],
    "`--train_files` or `--dataset_name`": [
        "data", "dataset", "dataset_path", "data_path", "train_data", "dataset_train",
    ],
    "`--eval_files` or `--validation_files`": [
        "eval_data", "eval_file", "eval_dataset", "validation_file", "test_datasets", "dataset_val", "dataset_test",
    ],
    "`--max_length` or `--max_source_length` and `--max_target_length`": [
        "max_len", "max_seq_length", "block_size", "sequence_len", "cutoff_len", "tokenizer.max_seq_len",
        "max_context_width",
    ],
    "`--output_dir`": ["output", "save_dir", "logging_dir", "checkpoint_dir"],
    "`--use_peft`": ["lora", "use_lora"],
    "`--use_peft` with `--load_in_4bit`": ["qlora"],
    "`--max_grad_norm`": ["grad_clip", "clip_grad_norm"],
    "`--dataloader_num_workers`": ["num_workers", "num_workers_dataloader"],
    "`accelerate launch --num_processes N`": ["num_gpus"],
    "the same command again, or `--resume_from_checkpoint` for another folder": [
        "resume", "auto_resume_from_checkpoints",
    ],
    "`--report_to wandb`": ["wandb"],
    "`--max_completion_length` or `--generation_max_length`": ["max_new_tokens"],
    "`--dataset_config`": ["dataset_config_name"],
    "`--train_split`": ["dataset_train_split"],
    "`--eval_split` or `--heldout_share`": ["dataset_test_split"],
    "`--dataset_num_proc`": ["preprocessing_num_workers", "dataset_processes"],
    "`mixed_precision: bf16` in the accelerate YAML": ["dtype", "torch_dtype", "use_mixed_precision"],
    "`--warmup_steps` below 1": ["warmup_ratio"],
    "`--eval_steps`": [
        "eval_strategy", "evaluation_strategy", "evals_per_epoch", "run_val_every_n_steps", "validation_freq",
        "run_validation",
    ],
    "`--save_steps`": ["save_strategy", "saves_per_epoch", "save_every_n_steps", "checkpoint_freq", "save_model"],
    "`--logging_steps`": ["logging_strategy", "log_every_n_steps", "logging_freq"],
    "the name of `--output_dir`": ["run_name"],
    "`--report_to wandb`, whose project has the recipe's name, and the run that of `--output_dir`": [
        "project", "wandb_project", "wandb_name",
    ],
    "`--push_to_hub`": ["hub_model_id", "export_hub_model_id"],
    "`--metric_for_best_model`, which keeps the best checkpoint": ["load_best_model_at_end", "early_stopping_patience"],
    "a new `--output_dir`: a run in an old one is continued": ["overwrite_output_dir"],
    "the default: micro-batches of a step have rows of similar length": ["group_by_length"],
    "not possible: code of a model's repository is not run": ["trust_remote_code"],
    "`--load_in_4bit`; 8 bits are not offered": ["load_in_8bit"],
    "`--rewards`": ["reward_funcs"],
    "what the losses do by themselves: logits are computed in tiles": ["use_liger_kernel"],
    "`accelerate launch --config_file YAML RECIPE --config Y.yaml`": [
        "axolotl train Y.yml", "llamafactory-cli train Y.yaml",
    ],
    "`--train_files` or `--dataset_name` or `--mixture`": ["datasets"],
    "found by the columns, or `--columns`": ["type: alpaca, chat_template, ..."],
    "`--chat_template_path`, by default the tokenizer's own": ["chat_template", "template", "get_chat_template"],
    "`--chat_template_path`": ["chat_template_jinja"],
    "`--eos_token` or `--new_tokens`": ["special_tokens"],
    "`--new_tokens`": ["tokens", "new_special_tokens", "resize_vocab"],
    "`--assistant_only_loss` or `--completion_only_loss`": [
        "train_on_inputs", "roles_to_train", "mask_history", "train_on_responses_only", "train_on_input",
    ],
    "`--packing`": ["sample_packing", "neat_packing", "dataset.packed", "packed"],
    "`--eval_packing`": ["eval_sample_packing"],
    "`--per_device_eval_batch_size`": ["eval_batch_size", "val_batch_size"],
    "`--optim`": ["optimizer"],
    "`--lr_scheduler_type`": ["lr_scheduler", "lr_decay_style"],
    "`--min_lr_ratio`": ["cosine_min_lr_ratio", "min_lr"],
    "`--heldout_share`": ["val_set_size", "val_size"],
    "`--use_peft`, for qlora with `--load_in_4bit`": ["adapter"],
    "`--model_name_or_path` of a model with which the adapter is merged": ["lora_model_dir", "adapter_name_or_path"],
    "`--lora_target_modules`": ["lora_target_linear", "lora_target", "target_modules", "lora_attn_modules"],
    "`--use_dora`": ["peft_use_dora"],
    "`--use_rslora`": ["peft_use_rslora"],
    "the recipe: dpo.py, kto.py, grpo.py": ["rl"],
    "`--optim adamw_bf16_kahan`": ["bfloat16", "pure_bf16", "model_in_bf16", "anyprecision"],
    "`--attn_implementation`": ["flash_attention", "sdp_attention", "flash_attn"],
    "the cache of `datasets`, where `prepare` keeps rows": ["dataset_prepared_path"],
    "the `config.json` of a copy of the model": ["rope_scaling"],
    "the variable WANDB_ENTITY": ["wandb_entity"],
    "`--report_to tensorboard`": ["use_tensorboard"],
    "the model's own, in `sft_vlm.py`": ["processor_type"],
    "`python -m accelerate_recipes export CHECKPOINT FOLDER --merge_adapter`": ["llamafactory-cli export"],
    "the recipe: sft.py, sft_vlm.py, dpo.py, kto.py, c4.py": ["stage"],
    "not needed: a recipe trains": ["do_train"],
    "`--use_peft` for lora": ["finetuning_type"],
    "the folder in `--train_files`": ["dataset_dir"],
    "`--train_split` with a part of a dataset, such as train[:1000]": ["max_samples"],
    "`--assistant_only_loss false` or `--completion_only_loss false`": ["train_on_prompt"],
    "weights in the file of `--mixture`": ["interleave_probs"],
    "`--mixture`": ["mix_strategy"],
    "`--lora_r`": ["lora_rank", "r"],
    "`--load_in_4bit`": ["quantization_bit", "quantization_method"],
    "`--beta`": ["pref_beta"],
    "`--loss_type`": ["pref_loss"],
    "`--desirable_weight`": ["kto_chosen_weight"],
    "`--undesirable_weight`": ["kto_rejected_weight"],
    "the model at which a run begins": ["ref_model"],
    "`--chat_template_kwargs enable_thinking=false`": ["enable_thinking"],
    "`fsdp_activation_checkpointing: true` in the accelerate YAML": [
        "disable_gradient_checkpointing", "use_gradient_checkpointing", "enable_activation_checkpointing",
        "activation_checkpointing",
    ],
    "`--image_folder`": ["image_dir", "media_dir"],
    "always drawn, in report.html": ["plot_loss"],
    "the folder `export` in `--output_dir`": ["export_dir"],
    "the default; `--use_peft` trains adapters": ["full_finetuning"],
    "`--seed`": ["random_state"],
    "`--merge_adapter`": ["save_pretrained_merged"],
    "`convert_hf_to_gguf.py` of llama.cpp, on `export/`": ["save_pretrained_gguf"],
    "`--use_vllm`": ["fast_inference"],
    "`accelerate launch --config_file YAML RECIPE --config Y.yaml --learning_rate 1`": [
        "tune run RECIPE --config Y lr=1",
    ],
    "accelerate_configs/fsdp_offload.yaml": ["fsdp_cpu_offload", "cpu_offload"],
    "accelerate_configs/fsdp_long.yaml": ["context_parallel_dim"],
    "`--report_to`": ["metric_logger"],
    "a machine without a GPU is recognised by itself": ["device"],
    "`dynamo_backend: inductor` in the accelerate YAML": ["compile"],
    "`slurm/submit.sh`": ["torchrun in a sbatch file"],
    "`--config_overrides hidden_size=N`": ["hidden_width"],
    "`--config_overrides num_hidden_layers=N`": ["num_layers"],
    "`--config_overrides num_attention_heads=N`": ["num_heads"],
    "`--config_overrides intermediate_size=N`": ["intermediate_size"],
    "`--num_validation_rows`": ["validation_batches"],
    "`--save_total_limit`": ["checkpoint_max_save_count"],
}  # fmt: skip
MEANINGS = {name: here for here, names in OTHER_NAMES.items() for name in names} | ELSEWHERE


def meaning(name: str, known: Collection[str]) -> str:
    """Say what a name of another library is here, among the flags that are `known`; "" if nothing of it is."""
    return " or ".join(
        part for part in MEANINGS.get(name, "").split(" or ") if {*re.findall(r"`--(\w+)", part)} <= {*known}
    )


def table() -> str:
    """Write the table: for all that is called otherwise elsewhere, its name here and the others."""
    ours = dict.fromkeys(MEANINGS.values())
    rows = (f"| {here} | {', '.join(f'`{name}`' for name in MEANINGS if MEANINGS[name] == here)} |\n" for here in ours)
    return "| here | there |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(re.sub(r"\| here .*\n(\|.*\n)*", table(), page.read_text("utf-8")), "utf-8")
