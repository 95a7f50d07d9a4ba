"""Pretrain a model of any architecture on C4 or on your own text, from scratch or from a pretrained model.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml recipes/c4.py \\
        --config recipes/configs/c4/llama3_1_8b.yaml

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/c4.py --config recipes/configs/c4/laptop.yaml

--config_overrides sets the fields of config.json for a new model; the presets hold those of published models. The model is
created in shards, so no process ever holds it whole, and its weights are the same on any number of processes. The text is
streamed, tokenised during training, and cut into rows without padding or truncation. Before and after training, the recipe
measures loss, perplexity and bits per byte on a fixed number of rows, and compares them with gzip. The rows come from the
validation split, or from a held-out share of --train_files.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from itertools import islice

import transformers
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.data.packing import collate
from accelerate_recipes.data.rows import make_eval_loader
from accelerate_recipes.data.shown import titled
from accelerate_recipes.engine import evaluate_loss, train
from accelerate_recipes.life.picture import Bars
from accelerate_recipes.losses import LossOfSources, check_document_mask, count_next_tokens, next_token_loss_fn
from accelerate_recipes.metrics import Flops, flops_per_token
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.attention import KERNELS
from accelerate_recipes.models.configurations import Architecture, check_belong_together, new_config
from accelerate_recipes.models.generation import KEPT, generate_texts, tell_left_out
from accelerate_recipes.models.loading import load_model, new_model
from accelerate_recipes.models.pretrained import check_length
from accelerate_recipes.models.tokenizers import load_tokenizer, make_or_resume, new_bpe_tokenizer
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, finish, start
from accelerate_recipes.text.pretraining import MixedTextArgs, join_sources, measured, read_validation
from accelerate_recipes.text.token_shards import is_pretokenized, make_text_loader
from accelerate_recipes.trial import Trial, packed_trial

TOKENIZER_TEXTS = 20_000  # number of documents that train a new tokenizer


@dataclass
class Args(MixedTextArgs, TrainArgs, Architecture):
    output_dir: str = "outputs/c4"
    model_name_or_path: str = arg("", "Model to continue with: a name on the Hub, or a folder; empty: make a new one.")
    tokenizer_name: str = arg(
        "", "Tokenizer of a new model: a name on the Hub, or a folder; empty: train a new one with vocab_size tokens."
    )
    attn_implementation: str = arg("auto", "Attention kernel, see docs/levers.md.", choices=KERNELS, fixed=False)
    whole_logits: bool = arg(
        False, "Compute the logits of all tokens at once: faster for a small vocabulary.", fixed=False, group="memory"
    )
    max_length: int = arg(4096, "Tokens in a row.", min=2)
    document_mask: bool = arg(True, "Keep attention inside a document; --no_document_mask lets it cross the whole row.")
    num_validation_rows: int = arg(256, "Number of rows of --max_length tokens to validate on.", fixed=False, min=1)

    def __post_init__(self):
        self.from_scratch |= not self.model_name_or_path

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if self.from_scratch and self.model_name_or_path:
            found.append("--from_scratch makes a new model; remove it, or --model_name_or_path")
        return found + self.architecture_problems(self.longest_row)


def requirements(args: Args) -> Requirements:
    return Requirements(
        models=[args.base_model],
        tokenizers=[args.tokenizer_name],
        datasets=[
            need for one in args.sources for need in one.text_datasets(training=not is_pretokenized(one.pretokenize))
        ],
        new_model=(lambda: make_model(args)) if args.from_scratch else None,
    )


def make_model(args: Args, tokenizer: PreTrainedTokenizerBase | None = None) -> transformers.PreTrainedModel:
    if args.base_model:
        return load_model(args.model_name_or_path, args.attn_implementation, **load_settings(args))
    return new_model(new_config(args, tokenizer, args.longest_row), args.attn_implementation, args.param_dtype)


def trial(args: Args) -> Trial:
    config = new_config(args, max_length=args.longest_row) if args.from_scratch else None
    return packed_trial(args, config, next_token_loss_fn(args.whole_logits))


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    if name := args.tokenizer_name or args.model_name_or_path:
        tokenizer = load_tokenizer(name)
    else:
        vocab_size = new_config(args, max_length=args.longest_row).vocab_size
        tokenizer = make_or_resume(
            lambda: new_bpe_tokenizer(islice(args.texts_in_turns(), TOKENIZER_TEXTS), vocab_size), run.resumed_from
        )
    if args.base_model:
        check_length(args.base_model, args.longest_row)
    train_loader = make_text_loader(args, tokenizer, run.rank, run.world_size, run.data_rank, run.data_world_size)
    parts = on_first_rank(lambda: read_validation(args, tokenizer))  # by source
    validation = join_sources(parts)
    validation_loaders = {
        name: make_eval_loader(part.rows, args, run.data_rank, run.data_world_size, collate_fn=collate)
        for name, part in parts.items()
    }
    evaluated = {titled("Evaluation", name): some for name, some in validation_loaders.items()}
    run.show_rows(tokenizer, train_loader.first | evaluated)

    # Model
    model = make_model(args, tokenizer)
    tell_left_out(run.print, model, KEPT)
    check_belong_together(model.config, tokenizer)

    def flops_fn(model: transformers.PreTrainedModel) -> Flops:
        flops = flops_per_token(model, validation.rows.attended_length, args.max_length)
        return flops._replace(last_step=args.steps_alike)

    run.prepare(model, tokenizer, total_steps=train_loader.num_steps(), flops_fn=flops_fn)
    if args.document_mask:
        check_document_mask(run.model, run.accelerator.device)
    run.print(
        f"Data: {len(train_loader.shards):,} shards, in rows of {args.max_length} tokens; validation on "
        f"{len(validation.rows):,} rows, {validation.bytes_per_token:.2f} bytes per token"
        f"{validation.note_of_controls(tokenizer)}"
        f"{args.sources[0].text_note(train_loader.shards)}{train_loader.workers_note}"
    )
    for line in train_loader.described(run.total_steps):
        run.print(line)

    # Training and evaluation
    loss_fn, loss = next_token_loss_fn(args.whole_logits), LossOfSources(args.whole_logits, args.mix.names)

    def evaluate_fn(step: int) -> dict[str, float]:
        losses = {
            name: evaluate_loss(run.accelerator, run.model, loader, loss_fn, count_next_tokens)
            for name, loader in validation_loaders.items()
        }
        return measured(parts, losses)

    def values_fn(step: int) -> dict[str, float]:
        return loss.values(step) | train_loader.seen(step)

    given = {"values_fn": values_fn, "mark_fn": loss.gathered.mark}
    records = train(run, train_loader, loss_fn=loss, count_fn=count_next_tokens, evaluate_fn=evaluate_fn, **given)

    # Result
    tokens_of_texts = (tokenizer(text)["input_ids"] for text in validation.texts)
    starts = list(islice((tokens[:16] for tokens in tokens_of_texts if tokens), 3))  # an empty text has no tokens
    continuations = generate_texts(run.accelerator, run.model, tokenizer, starts, 40, batch_size=1).texts

    def result(before: dict, after: dict) -> Result:
        text = "".join(validation.texts).encode()
        gzipped = 8 * len(gzip.compress(text)) / len(text)
        results = {"before": before["eval_bits_per_byte"], "gzip": gzipped, "after": after["eval_bits_per_byte"]}
        lines = ["", "The model goes on where documents of the validation split begin:"]
        for tokens, continuation in zip(starts, continuations, strict=True):
            lines.append(f"  {tokenizer.decode(tokens, skip_special_tokens=True)!r} -> {continuation!r}")
        shares = ", ".join(f"{name} {value:.3f}" for name, value in results.items())
        lines.append(f"Bits per byte of the validation text ({len(text):,} bytes): {shares}")
        bars = {name: {"validation text": value} for name, value in results.items()}
        return Result("\n".join(lines), Bars(bars, "What a byte of text costs", "bits per byte"))

    begin = f"{args.model_name_or_path}, pretrained further" if args.model_name_or_path else "A new model, pretrained"
    finish(run, records, f"{begin} on text from {args.text_sources}.", result)


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
