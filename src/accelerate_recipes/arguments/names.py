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

MODEL = "`--model_name_or_path`"
ROWS = "`--train_files` or `--dataset_name`"
HELD_OUT = "`--eval_files` or `--validation_files`"
LONGEST = "`--max_length` or `--max_source_length` and `--max_target_length`"
OF_A_PASS = "`--per_device_train_batch_size`"
ANSWERS = "`--assistant_only_loss` or `--completion_only_loss`"
TEMPLATE = "`--chat_template_path`, by default the tokenizer's own"
YAML = "a file of accelerate_configs/"
RECOMPUTED = "`fsdp_activation_checkpointing: true` in the accelerate YAML"
PRECISION = "`mixed_precision: bf16` in the accelerate YAML"
AGAIN = "the same command again, or `--resume_from_checkpoint` for another folder"
BEST = "`--metric_for_best_model`, which keeps the best checkpoint"
WANDB = "`--report_to wandb`, whose project has the recipe's name, and the run that of `--output_dir`"
NO_CODE = "not possible: code of a model's repository is not run"

# By library: its name, and what it is here, with ` or ` between what different recipes have.
LIBRARIES = {
    "Short names": {
        "lr": "`--learning_rate`",
        "wd": "`--weight_decay`",
        "warmup": "`--warmup_steps`",
        "epochs": "`--num_train_epochs`",
        "steps": "`--max_steps`",
        "train_steps": "`--max_steps`",
        "max_train_steps": "`--max_steps`",
        "num_epoch": "`--num_train_epochs`",
        "device_map": YAML,
        "batch_size": "`--total_batch_size`, over all processes",
        "global_batch_size": "`--total_batch_size`",
        "per_device_batch_size": OF_A_PASS,
        "model": MODEL,
        "model_name": MODEL,
        "model_path": MODEL,
        "tokenizer": "the model's own or `--tokenizer_name`, of a new model",
        "data": ROWS,
        "dataset": ROWS,
        "dataset_path": ROWS,
        "data_path": ROWS,
        "train_data": ROWS,
        "eval_data": HELD_OUT,
        "eval_file": HELD_OUT,
        "eval_dataset": HELD_OUT,
        "max_len": LONGEST,
        "output": "`--output_dir`",
        "save_dir": "`--output_dir`",
        "lora": "`--use_peft`",
        "use_lora": "`--use_peft`",
        "qlora": "`--use_peft` with `--load_in_4bit`",
        "grad_clip": "`--max_grad_norm`",
        "num_workers": "`--dataloader_num_workers`",
        "num_gpus": "`accelerate launch --num_processes N`",
        "resume": AGAIN,
        "wandb": "`--report_to wandb`",
        "max_new_tokens": "`--max_completion_length` or `--generation_max_length`",
    },
    "Trainer and trl": ELSEWHERE
    | {
        "max_seq_length": LONGEST,
        "block_size": LONGEST,
        "validation_file": HELD_OUT,
        "dataset_config_name": "`--dataset_config`",
        "dataset_train_split": "`--train_split`",
        "dataset_test_split": "`--eval_split` or `--heldout_share`",
        "preprocessing_num_workers": "`--dataset_num_proc`",
        "dtype": PRECISION,
        "torch_dtype": PRECISION,
        "warmup_ratio": "`--warmup_steps` below 1",
        "eval_strategy": "`--eval_steps`",
        "evaluation_strategy": "`--eval_steps`",
        "save_strategy": "`--save_steps`",
        "logging_strategy": "`--logging_steps`",
        "logging_dir": "`--output_dir`",
        "run_name": "the name of `--output_dir`",
        "project": WANDB,
        "hub_model_id": "`--push_to_hub`",
        "load_best_model_at_end": BEST,
        "overwrite_output_dir": "a new `--output_dir`: a run in an old one is continued",
        "group_by_length": "the default: micro-batches of a step have rows of similar length",
        "trust_remote_code": NO_CODE,
        "per_gpu_train_batch_size": OF_A_PASS,
        "load_in_8bit": "`--load_in_4bit`; 8 bits are not offered",
        "reward_funcs": "`--rewards`",
        "use_liger_kernel": "what the losses do by themselves: logits are computed in tiles",
    },
    "axolotl": {
        "axolotl train Y.yml": "`accelerate launch --config_file YAML RECIPE --config Y.yaml`",
        "base_model": MODEL,
        "tokenizer_config": "the model's own or `--tokenizer_name`, of a new model",
        "datasets": "`--train_files` or `--dataset_name` or `--mixture`",
        "test_datasets": HELD_OUT,
        "type: alpaca, chat_template, ...": "found by the columns, or `--columns`",
        "chat_template": TEMPLATE,
        "chat_template_jinja": "`--chat_template_path`",
        "special_tokens": "`--eos_token` or `--new_tokens`",
        "tokens": "`--new_tokens`",
        "train_on_inputs": ANSWERS,
        "roles_to_train": ANSWERS,
        "sequence_len": LONGEST,
        "sample_packing": "`--packing`",
        "eval_sample_packing": "`--eval_packing`",
        "micro_batch_size": OF_A_PASS,
        "eval_batch_size": "`--per_device_eval_batch_size`",
        "num_epochs": "`--num_train_epochs`",
        "optimizer": "`--optim`",
        "lr_scheduler": "`--lr_scheduler_type`",
        "cosine_min_lr_ratio": "`--min_lr_ratio`",
        "val_set_size": "`--heldout_share`",
        "evals_per_epoch": "`--eval_steps`",
        "saves_per_epoch": "`--save_steps`",
        "auto_resume_from_checkpoints": AGAIN,
        "adapter": "`--use_peft`, for qlora with `--load_in_4bit`",
        "lora_model_dir": f"{MODEL} of a model with which the adapter is merged",
        "lora_target_linear": "`--lora_target_modules`",
        "peft_use_dora": "`--use_dora`",
        "peft_use_rslora": "`--use_rslora`",
        "rl": "the recipe: dpo.py, kto.py, grpo.py",
        "fsdp_version": YAML,
        "bfloat16": "`--optim adamw_bf16_kahan`",
        "flash_attention": "`--attn_implementation`",
        "sdp_attention": "`--attn_implementation`",
        "dp_shard_size": YAML,
        "tensor_parallel_size": YAML,
        "context_parallel_size": YAML,
        "dataset_processes": "`--dataset_num_proc`",
        "dataset_prepared_path": "the cache of `datasets`, where `prepare` keeps rows",
        "early_stopping_patience": BEST,
        "wandb_project": WANDB,
        "wandb_name": WANDB,
        "rope_scaling": "the `config.json` of a copy of the model",
        "wandb_entity": "the variable WANDB_ENTITY",
        "use_tensorboard": "`--report_to tensorboard`",
        "processor_type": "the model's own, in `sft_vlm.py`",
    },
    "LLaMA-Factory": {
        "llamafactory-cli train Y.yaml": "`accelerate launch --config_file YAML RECIPE --config Y.yaml`",
        "llamafactory-cli export": "`python -m accelerate_recipes export CHECKPOINT FOLDER --merge_adapter`",
        "stage": "the recipe: sft.py, sft_vlm.py, dpo.py, kto.py, c4.py",
        "do_train": "not needed: a recipe trains",
        "finetuning_type": "`--use_peft` for lora",
        "template": TEMPLATE,
        "dataset_dir": "the folder in `--train_files`",
        "cutoff_len": LONGEST,
        "max_samples": "`--train_split` with a part of a dataset, such as train[:1000]",
        "val_size": "`--heldout_share`",
        "neat_packing": "`--packing`",
        "train_on_prompt": "`--assistant_only_loss false` or `--completion_only_loss false`",
        "mask_history": ANSWERS,
        "interleave_probs": "weights in the file of `--mixture`",
        "mix_strategy": "`--mixture`",
        "lora_rank": "`--lora_r`",
        "lora_target": "`--lora_target_modules`",
        "adapter_name_or_path": f"{MODEL} of a model with which the adapter is merged",
        "quantization_bit": "`--load_in_4bit`",
        "quantization_method": "`--load_in_4bit`",
        "pref_beta": "`--beta`",
        "pref_loss": "`--loss_type`",
        "kto_chosen_weight": "`--desirable_weight`",
        "kto_rejected_weight": "`--undesirable_weight`",
        "ref_model": "the model at which a run begins",
        "pure_bf16": "`--optim adamw_bf16_kahan`",
        "flash_attn": "`--attn_implementation`",
        "enable_thinking": "`--chat_template_kwargs enable_thinking=false`",
        "new_special_tokens": "`--new_tokens`",
        "resize_vocab": "`--new_tokens`",
        "disable_gradient_checkpointing": RECOMPUTED,
        "image_dir": "`--image_folder`",
        "media_dir": "`--image_folder`",
        "plot_loss": "always drawn, in report.html",
        "export_dir": "the folder `export` in `--output_dir`",
        "export_hub_model_id": "`--push_to_hub`",
    },
    "unsloth": {
        "FastLanguageModel.from_pretrained(model_name)": MODEL,
        "r": "`--lora_r`",
        "target_modules": "`--lora_target_modules`",
        "full_finetuning": "the default; `--use_peft` trains adapters",
        "use_gradient_checkpointing": RECOMPUTED,
        "random_state": "`--seed`",
        "get_chat_template": TEMPLATE,
        "train_on_responses_only": ANSWERS,
        "save_pretrained_merged": "`--merge_adapter`",
        "save_pretrained_gguf": "`convert_hf_to_gguf.py` of llama.cpp, on `export/`",
        "fast_inference": "`--use_vllm`",
    },
    "torchtune": {
        "tune run RECIPE --config Y lr=1": "`accelerate launch --config_file YAML RECIPE --config Y.yaml --learning_rate 1`",
        "checkpointer": MODEL,
        "tokenizer.max_seq_len": LONGEST,
        "dataset.packed": "`--packing`",
        "packed": "`--packing`",
        "train_on_input": ANSWERS,
        "optimizer.lr": "`--learning_rate`",
        "max_steps_per_epoch": "`--max_steps`",
        "enable_activation_checkpointing": RECOMPUTED,
        "fsdp_cpu_offload": "accelerate_configs/fsdp_offload.yaml",
        "context_parallel_dim": "accelerate_configs/fsdp_long.yaml",
        "tensor_parallel_dim": YAML,
        "clip_grad_norm": "`--max_grad_norm`",
        "lora_attn_modules": "`--lora_target_modules`",
        "metric_logger": "`--report_to`",
        "log_every_n_steps": "`--logging_steps`",
        "run_val_every_n_steps": "`--eval_steps`",
        "dataset_val": HELD_OUT,
        "save_every_n_steps": "`--save_steps`",
        "device": "a machine without a GPU is recognised by itself",
        "compile": "`dynamo_backend: inductor` in the accelerate YAML",
    },
    "AWS's sample of FSDP": {
        "torchrun in a sbatch file": "`slurm/submit.sh`",
        "hidden_width": "`--config_overrides hidden_size=N`",
        "num_layers": "`--config_overrides num_hidden_layers=N`",
        "num_heads": "`--config_overrides num_attention_heads=N`",
        "intermediate_size": "`--config_overrides intermediate_size=N`",
        "max_context_width": LONGEST,
        "train_batch_size": OF_A_PASS,
        "val_batch_size": "`--per_device_eval_batch_size`",
        "min_lr": "`--min_lr_ratio`",
        "lr_decay_style": "`--lr_scheduler_type`",
        "sharding_strategy": YAML,
        "cpu_offload": "accelerate_configs/fsdp_offload.yaml",
        "activation_checkpointing": RECOMPUTED,
        "validation_freq": "`--eval_steps`",
        "checkpoint_freq": "`--save_steps`",
        "checkpoint_dir": "`--output_dir`",
        "logging_freq": "`--logging_steps`",
        "validation_batches": "`--num_validation_rows`",
    },
    "T5 of PyTorch's blog": {
        "dataset_train": ROWS,
        "dataset_test": HELD_OUT,
        "num_workers_dataloader": "`--dataloader_num_workers`",
        "use_mixed_precision": PRECISION,
        "model_in_bf16": "`--optim adamw_bf16_kahan`",
        "run_validation": "`--eval_steps`",
        "save_model": "`--save_steps`",
        "checkpoint_max_save_count": "`--save_total_limit`",
        "anyprecision": "`--optim adamw_bf16_kahan`",
    },
}


MEANINGS = {name: meant for names in LIBRARIES.values() for name, meant in names.items()}


def meaning(name: str, known: Collection[str]) -> str:
    """Say what a name of another library is here, among the flags that are `known`; "" if nothing of it is."""
    return " or ".join(
        part for part in MEANINGS.get(name, "").split(" or ") if {*re.findall(r"`--(\w+)", part)} <= {*known}
    )


def table() -> str:
    """Write the table: for all that is called otherwise elsewhere, its name here and the others."""
    ours = dict.fromkeys(MEANINGS.values())
    rows = (f"| {it} | {', '.join(f'`{name}`' for name in MEANINGS if MEANINGS[name] == it)} |\n" for it in ours)
    return "| here | there |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, mark, trl = page.read_text("utf-8").partition("## Flags of trl\n")
    page.write_text(f"{before.partition('| here')[0]}{table()}\n{mark}{trl}", "utf-8")
