"""Train or fine-tune a T5 or a BART on pairs of texts: translation, summaries, corrections.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 \\
        recipes/t5.py --config recipes/configs/t5/grammar_3b.yaml

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/t5.py --config recipes/configs/t5/laptop.yaml

Micro-batches hold pairs of similar length, padded to a multiple of 8; padding has no loss. Before and after training and
every --eval_steps, the recipe measures the loss, and metrics of generated texts, on the same held-out pairs. Each rank
generates texts for its share of the sources, while the weights stay sharded. The texts are written to
predictions/step-<n>.jsonl.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.data import PAD_MULTIPLE
from accelerate_recipes.data.prepared import prepared_rows
from accelerate_recipes.data.rows import make_eval_loader, make_train_loader, num_steps, permutation
from accelerate_recipes.disk import read_json_lines
from accelerate_recipes.engine import evaluate_loss, train
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.life.picture import Bars
from accelerate_recipes.losses import count_labels, sequence_to_sequence_loss
from accelerate_recipes.metrics import flops_per_target
from accelerate_recipes.models.adapters import load_settings
from accelerate_recipes.models.configurations import Architecture, new_config
from accelerate_recipes.models.encoder_decoders import (
    ENCODER_DECODER,
    dropouts,
    load_encoder_decoder,
    new_encoder_decoder,
)
from accelerate_recipes.models.generation import generate_texts, settings_alone, tell_left_out
from accelerate_recipes.models.loading import ENCODER_DECODERS
from accelerate_recipes.models.pretrained import check_length
from accelerate_recipes.models.tokenizers import load_tokenizer, make_or_resume, new_bpe_tokenizer
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, finish, start
from accelerate_recipes.text.text_metrics import GenerationArgs, TextMetrics
from accelerate_recipes.text.text_pairs import PairArgs, Pairs, pairs_trial, prepare_pairs, source_texts
from accelerate_recipes.trial import Trial

ATTENTION = ["sdpa", "eager"]
METRICS = Path(__file__).parent / "metrics/texts.py"


@dataclass
class Args(PairArgs, GenerationArgs, TrainArgs, Architecture):
    kind = ENCODER_DECODER

    output_dir: str = "outputs/t5"
    model_name_or_path: str = arg(
        "google/flan-t5-base", "T5, T5 v1.1, FLAN-T5, mT5 or BART: a name on the Hub, or a folder."
    )
    from_scratch: bool = arg(
        False, "Train a new model of --model_type, with a tokenizer trained on the pairs, instead of a pretrained one."
    )
    model_type: str = arg("t5", "Architecture of a new model.", choices=ENCODER_DECODERS)
    dropout_rate: float = arg(
        0.1,
        "Dropout, also of a pretrained model: T5 v1.1 was pretrained without dropout, but needs it in fine-tuning.",
        fixed=False,
        min=0,
        below=1,
    )
    attn_implementation: str = arg("sdpa", "Attention kernel.", choices=ATTENTION, fixed=False)

    def problems(self, world_size: int) -> list[str]:
        return super().problems(world_size) + self.architecture_problems(None, decoder_start_token_id=0)


def requirements(args: Args) -> Requirements:
    return Requirements(
        models=[args.base_model],
        kind=ENCODER_DECODER,
        datasets=args.row_datasets,
        new_model=(lambda: make_model(args)) if args.from_scratch else None,
    )


def make_config(args: Args, tokenizer: PreTrainedTokenizerBase | None = None) -> PreTrainedConfig:
    """Make the configuration of a new model. If there is a `tokenizer` already, it decides the size of the vocabulary."""
    padding = tokenizer.pad_token_id if tokenizer else 0
    longest = max(args.max_source_length, args.max_target_length)
    config = new_config(args, tokenizer, longest, pad_token_id=padding, decoder_start_token_id=padding)
    vars(config).update(dropouts(config, args.dropout_rate))
    if tokenizer:
        config.vocab_size = len(tokenizer)
    return config


def make_model(args: Args, tokenizer: PreTrainedTokenizerBase | None = None) -> transformers.PreTrainedModel:
    if args.from_scratch:
        return new_encoder_decoder(make_config(args, tokenizer), args.attn_implementation, args.param_dtype)
    settings = load_settings(args)
    return load_encoder_decoder(args.model_name_or_path, args.attn_implementation, args.dropout_rate, **settings)


def trial(args: Args) -> Trial:
    return pairs_trial(args, make_config(args) if args.from_scratch else None)


def load_pairs(args: Args, tokenizer: PreTrainedTokenizerBase) -> tuple[dict, Pairs, Any]:
    """Return facts about the pairs, the training pairs, and the evaluation pairs with their texts."""
    longest = tokenizer.model_max_length
    if args.max_target_length > longest:
        raise ConfigError(
            f"--max_target_length is {args.max_target_length}, but the model is made for {longest} tokens; "
            f"set it to {longest} or less"
        )
    for side in ("source", "target") if args.base_model else ():
        check_length(args.base_model, getattr(args, f"max_{side}_length"), f"max_{side}_length", PAD_MULTIPLE)
    folder = prepare_pairs(tokenizer, args)
    heldout = prepared_rows(folder / "heldout")
    chosen = sorted(permutation(len(heldout), args.seed, 0)[: args.num_eval_pairs])
    train_pairs = Pairs(prepared_rows(folder / "train"), tokenizer.pad_token_id)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return facts, train_pairs, heldout.select(chosen).flatten_indices()


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    if args.base_model:
        tokenizer = load_tokenizer(args.base_model)
    else:
        vocab_size = make_config(args).vocab_size
        tokenizer = make_or_resume(
            lambda: new_bpe_tokenizer(source_texts(args), vocab_size, "$A </s>"), run.resumed_from
        )
    facts, train_pairs, heldout = load_pairs(args, tokenizer)
    heldout_pairs = Pairs(heldout, tokenizer.pad_token_id)
    place = (args, run.rank, run.world_size)
    train_loader = make_train_loader(
        train_pairs, *place, lengths=train_pairs.lengths, collate_fn=train_pairs.collate, content=facts["content"]
    )
    heldout_loader = make_eval_loader(
        heldout_pairs, *place, lengths=heldout_pairs.lengths, collate_fn=heldout_pairs.collate
    )
    cut = {f"cut {side}": facts["train"][f"truncated_{side}"] for side in ("sources", "targets")}
    loaders = {"Training": train_loader, "Evaluation": heldout_loader}
    run.show_rows(tokenizer, loaders, train_pairs.num_tokens("target"), cut)

    # Model
    model = make_model(args, tokenizer)
    generation = args.generation(args.max_target_length)
    tell_left_out(run.print, model, "the export has those of the evaluation")
    model.generation_config = settings_alone(model.generation_config)
    model.generation_config.update(**generation)
    lengths = train_pairs.num_tokens("source"), train_pairs.num_tokens("target")
    total_steps = num_steps(args, len(train_pairs))
    run.prepare(model, tokenizer, total_steps=total_steps, flops_fn=lambda model: flops_per_target(model, *lengths))
    run.print(
        f"Data: {facts['train']['pairs']:,} pairs to train on; {facts['skipped']:,} skipped; evaluated on "
        f"{len(heldout):,} of {facts['heldout']['pairs']:,} pairs held out"
    )

    # Training and evaluation
    metrics = TextMetrics(METRICS, args.metrics)
    sources, references = heldout["source"][:], heldout["references"][:]
    prompts = heldout["source_ids"][:]
    predictions_dir = run.output_dir / "predictions"

    def evaluate_fn(step: int) -> dict[str, float]:
        loss = evaluate_loss(run.accelerator, run.model, heldout_loader, sequence_to_sequence_loss, count_labels)
        texts = generate_texts(
            run.accelerator, run.model, tokenizer, prompts, batch_size=args.per_device_eval_batch_size, **generation
        ).texts
        if run.is_first:
            write_predictions(predictions_dir / f"step-{step}.jsonl", sources, references, texts)
        return {"loss": loss} | on_first_rank(lambda: metrics.compute(texts, references, sources))

    records = train(
        run, train_loader, loss_fn=sequence_to_sequence_loss, count_fn=count_labels, evaluate_fn=evaluate_fn
    )

    # Result
    last_predictions = predictions_dir / f"step-{run.total_steps}.jsonl"
    if not on_first_rank(last_predictions.exists):  # the last evaluation was made in another --output_dir
        evaluate_fn(run.total_steps)

    def result(before: dict, after: dict) -> Result:
        copied = {f"eval_{name}": value for name, value in metrics.compute(sources, references, sources).items()}
        results = {"before": before, "source copied": copied, "after": after}
        names = args.measured
        texts = [line["prediction"] for line in read_json_lines(last_predictions)]
        lines = ["", *metrics.examples(names[0], texts, references, sources), ""]
        for name in names:
            scores = ", ".join(f"{key} {values[f'eval_{name}']:.1f}" for key, values in results.items())
            lines.append(f"Held-out pairs ({len(sources):,}), {name}: {scores}")
        bars = {key: {name: values[f"eval_{name}"] for name in names} for key, values in results.items()}
        return Result("\n".join(lines), Bars(bars, "Generated texts against the held-out targets", "of 100"))

    begin = f"A new {args.model_type}, trained" if args.from_scratch else f"{args.model_name_or_path}, fine-tuned"
    finish(run, records, f"{begin} on {facts['train']['pairs']:,} pairs of texts from {args.source}.", result)


def write_predictions(file: Path, sources: list[str], references: list[list[str]], texts: list[str]) -> None:
    """Write the prediction for each source, and its references: one text, or a list of several."""
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for source, right, text in zip(sources, references, texts, strict=True):
            line = {"source": source, "target": right if len(right) > 1 else right[0], "prediction": text}
            lines.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
