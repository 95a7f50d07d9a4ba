"""Pretrain a Llama, Mistral or Mixtral model, or go on pretraining one.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml recipes/c4.py \\
        --config recipes/configs/c4/llama3_1_8b.yaml

A new model is made of the fields of its config.json, which are arguments here; the presets hold those of published models.
No process ever holds it whole: it is made where it is sharded, with the same weights on any number of processes.
"""

from dataclasses import dataclass

from accelerate_recipes.args import ConfigError, TrainArgs, arg, error_list
from accelerate_recipes.distributed import make_accelerator, prefetch_layers, prepare
from accelerate_recipes.losses import next_token_loss, next_token_loss_without_logits
from accelerate_recipes.models import (
    Architecture,
    load_model,
    load_tokenizer,
    new_config,
    new_model,
    vocabulary_problems,
)
from accelerate_recipes.optim import adamw, make_scheduler
from accelerate_recipes.recipe import Requirements, run

# Not flash_attention_2: transformers 5.23 tells it of the documents only when a pass has one row.
ATTENTION = ["sdpa", "eager", "flex_attention"]


@dataclass
class Args(TrainArgs, Architecture):
    output_dir: str = "outputs/c4"
    model_name_or_path: str = arg("", "Go on from this model (a name on the Hub, or a folder) instead of a new one.")
    tokenizer_name: str = arg("", "Tokenizer of a new model: a name on the Hub, or a folder.")
    attn_implementation: str = arg("sdpa", "Kernel of the attention.", choices=ATTENTION)
    whole_logits: bool = arg(False, "Compute the logits of all tokens at once: faster where the vocabulary is small.")
    prefetch_layers: int = arg(0, "FSDP2: layers gathered ahead of the one that computes; 0: as torch does, one.")
    max_length: int = arg(4096, "Tokens in a row.")

    fixed_on_resume = (
        TrainArgs.fixed_on_resume
        | {"model_name_or_path", "tokenizer_name", "max_length"}
        | set(Architecture.__dataclass_fields__)
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if not self.model_name_or_path:
            found += self.architecture_problems()
            if not self.tokenizer_name:
                found.append("--tokenizer_name is missing; a new model needs one, or give --model_name_or_path")
            if self.max_length > self.max_position_embeddings:
                found.append(
                    f"--max_length is {self.max_length}, but the model is made for --max_position_embeddings "
                    f"{self.max_position_embeddings}"
                )
        if self.prefetch_layers < 0:
            found.append(f"--prefetch_layers is {self.prefetch_layers}; it must not be negative")
        return found


def requirements(args: Args) -> Requirements:
    return Requirements(models=[args.model_name_or_path or args.tokenizer_name])


def main(args: Args) -> None:
    tokenizer = load_tokenizer(args.tokenizer_name or args.model_name_or_path)

    # Model and optimizer
    accelerator = make_accelerator(args)
    if args.model_name_or_path:
        model = load_model(args.model_name_or_path, args.attn_implementation)
    else:
        model = new_model(new_config(args), args.attn_implementation)
    if problems := vocabulary_problems(model.config, tokenizer):
        raise ConfigError(error_list("Model and tokenizer do not belong together", problems))
    loss_fn = next_token_loss if args.whole_logits else next_token_loss_without_logits
    model, optimizer = prepare(accelerator, model, adamw(model, args))
    if args.prefetch_layers:
        prefetch_layers(accelerator, model, args.prefetch_layers)
    scheduler = make_scheduler(optimizer, args, args.max_steps)
    raise NotImplementedError(f"data and training, of {scheduler} with {loss_fn}")


if __name__ == "__main__":
    run(main, Args, requirements)
