"""Fine-tune a T5 on pairs of texts: translation, summaries, corrections. It writes what it generates as it learns.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --num_processes 8 \\
        recipes/t5.py --config recipes/configs/t5/grammar_3b.yaml

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/t5.py --config recipes/configs/t5/laptop.yaml

Batches hold pairs of similar length, padded to a multiple of 8; no padding is trained on. Before and after training
and every --eval_steps, on the same held-out pairs: the loss, and metrics of the texts that all ranks generate, each for
its share of the sources, from weights that stay sharded; the texts go to predictions/step-<n>.jsonl.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from datasets import load_from_disk
from transformers import PreTrainedModel

from accelerate_recipes.adapters import load_settings
from accelerate_recipes.args import ConfigError, TrainArgs, arg
from accelerate_recipes.data import make_eval_loader, make_train_loader, num_steps, permutation
from accelerate_recipes.distributed import on_first_rank
from accelerate_recipes.engine import evaluate_loss, train
from accelerate_recipes.generation import generate_texts
from accelerate_recipes.hub import BUILDERS
from accelerate_recipes.losses import count_labels, sequence_to_sequence_loss
from accelerate_recipes.metrics import flops_per_target
from accelerate_recipes.models import load_t5, load_tokenizer, new_bpe_tokenizer, new_t5
from accelerate_recipes.pairs import Pairs, PairSource, prepare_pairs, source_texts
from accelerate_recipes.picture import Bars
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Result, finish, start
from accelerate_recipes.text_metrics import TextMetrics

ATTENTION = ["sdpa", "eager"]
METRICS = Path(__file__).parent / "metrics"
# Each with the values that it gives; the first is the one that examples are chosen by.
METRIC_VALUES = {
    "exact_match": ["exact_match"],
    "rouge": ["rougeL", "rouge1", "rouge2", "rougeLsum"],
    "bleu": ["bleu"],
    "chrf": ["chrf"],
    "gleu": ["gleu"],
}
NUM_EXAMPLES = 6  # of predictions, printed at the end


@dataclass
class Args(TrainArgs):
    output_dir: str = "outputs/t5"
    model_name_or_path: str = arg("google/flan-t5-base", "A T5, T5 v1.1 or FLAN-T5: a name on the Hub, or a folder.")
    from_scratch: bool = arg(
        False, "Train a new T5 of the sizes below, with a tokenizer trained on the pairs, instead of a pretrained one."
    )
    vocab_size: int = arg(4096, "Size of the vocabulary (with --from_scratch).", min=1, max=2**24)
    d_model: int = arg(192, "Width of the residual stream (with --from_scratch).", min=1, max=2**20)
    d_kv: int = arg(48, "Width of an attention head (with --from_scratch).", min=1, max=2**20)
    d_ff: int = arg(512, "Width inside the MLP (with --from_scratch).", min=1, max=2**20)
    num_layers: int = arg(
        4, "Layers of the encoder, and as many of the decoder (with --from_scratch).", min=1, max=10_000
    )
    num_heads: int = arg(4, "Number of attention heads (with --from_scratch).", min=1, max=2**20)
    dropout_rate: float = arg(
        0.1,
        "Dropout, also of a pretrained model: v1.1 was pretrained without, and needs it now.",
        fixed=False,
        min=0,
        below=1,
    )
    attn_implementation: str = arg("sdpa", "Attention kernel.", choices=ATTENTION, fixed=False)
    dataset_name: str = arg("Helsinki-NLP/opus_books", "Dataset to train on: a name on the Hub, or a folder.")
    dataset_config: str = arg("en-fr", "Configuration of the dataset, where it has several.")
    dataset_revision: str = arg("", "Branch or commit of the dataset; default: main.")
    dataset_files: str = arg("", "Pattern of the dataset's files to read; default: all.")
    train_split: str = arg("train", "Split to train on.")
    eval_split: str = arg("", "Split to evaluate on; default: a share of the training pairs.")
    eval_dataset_name: str = arg("", "Dataset to evaluate on; default: --dataset_name.")
    train_files: list[str] = arg([], "Local .csv, .jsonl or .parquet files, instead of a dataset.")
    eval_files: list[str] = arg([], "Local files to evaluate on.")
    source_column: str = arg("translation.en", "Column of the texts to read; inside another: `translation.en`.")
    target_column: str = arg("translation.fr", "Column of the texts to write, or of lists of texts that are all right.")
    eval_source_column: str = arg(
        "", "Column of the texts to read in evaluation; default: --source_column.", fixed=False
    )
    eval_target_column: str = arg(
        "", "Column of the texts to write in evaluation; default: --target_column.", fixed=False
    )
    task_prefix: str = arg("translate English to French: ", "Text to put before every source.")
    heldout_share: float = arg(
        0.02, "Share of the training pairs to evaluate on, chosen by a hash of the source.", above=0, below=1
    )
    num_eval_pairs: int = arg(500, "Pairs to evaluate on, drawn with the seed.", fixed=False, min=1)
    skip_bad_pairs: bool = arg(False, "Leave out pairs with an empty text, and count them, instead of stopping.")
    max_source_length: int = arg(512, "Tokens of a source; what is longer is cut off, and counted.", min=2)
    max_target_length: int = arg(128, "Tokens of a target; what is longer is cut off, and counted.", min=2)
    metrics: list[str] = arg(
        ["chrf", "bleu"], f"Metrics of the generated texts: {', '.join(METRIC_VALUES)}.", fixed=False
    )
    generation_max_length: int = arg(0, "Tokens of a generated text; 0: --max_target_length.", fixed=False, min=0)
    generation_num_beams: int = arg(1, "Beams of the search in generation; 1: greedy.", fixed=False, min=1)
    generation_length_penalty: float = arg(
        1.0,
        "Length penalty of beam search: above 0 favours long texts, below 0 short ones.",
        fixed=False,
        min=-10,
        max=10,
    )
    data_cache_dir: str = arg(".cache/data", "Folder in which tokenised pairs are kept.", fixed=False)

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        found += self.file_problems("train_files", BUILDERS)
        found += self.file_problems("eval_files", BUILDERS)
        if self.train_files and self.eval_split and not self.eval_dataset_name:
            found.append(
                f"--eval_split {self.eval_split} is of no dataset, since there are --train_files; give --eval_dataset_name, "
                "or --eval_files instead"
            )
        if self.eval_dataset_name and not self.eval_split:
            found.append(f"--eval_dataset_name {self.eval_dataset_name} needs --eval_split, such as test")
        if self.eval_files and self.eval_split:
            found.append(f"--eval_files and --eval_split {self.eval_split} both say what to evaluate on; remove one")
        if self.generation_num_beams == 1 and self.generation_length_penalty != 1:
            found.append(
                f"--generation_length_penalty {self.generation_length_penalty} has no effect with "
                "--generation_num_beams 1; set it to 1, or search with more beams"
            )
        for name in self.metrics:
            if name not in METRIC_VALUES:
                found.append(f"--metrics {name}: there is no such metric; known are {', '.join(METRIC_VALUES)}")
        if not self.metrics:
            found.append(f"--metrics names none; known are {', '.join(METRIC_VALUES)}")
        measured = ["loss", *(value for name in self.metrics for value in METRIC_VALUES.get(name, []))]
        if self.metric_for_best_model and self.metric_for_best_model not in measured:
            found.append(
                f"--metric_for_best_model {self.metric_for_best_model}: the evaluation gives {', '.join(measured)}; "
                "choose one of them, or add to --metrics"
            )
        return found

    @property
    def base_model(self) -> str:
        return "" if self.from_scratch else self.model_name_or_path

    @property
    def train_sources(self) -> list[PairSource]:
        columns = (self.source_column, self.target_column)
        if self.train_files:
            return [PairSource(file, *columns) for file in self.train_files]
        dataset = (self.train_split, self.dataset_config, self.dataset_revision, self.dataset_files)
        return [PairSource(self.dataset_name, *columns, *dataset)]

    @property
    def eval_sources(self) -> list[PairSource]:
        columns = (self.eval_source_column or self.source_column, self.eval_target_column or self.target_column)
        if self.eval_files or not self.eval_split:
            return [PairSource(file, *columns) for file in self.eval_files]
        if self.eval_dataset_name:
            return [PairSource(self.eval_dataset_name, *columns, self.eval_split)]
        return [PairSource(self.dataset_name, *columns, self.eval_split, self.dataset_config, self.dataset_revision)]


def requirements(args: Args) -> Requirements:
    return Requirements(
        models=[args.base_model] if args.base_model else [],
        datasets=[source.dataset for source in (*args.train_sources, *args.eval_sources) if source.split],
        new_model=(lambda: make_model(args, vocab_size=args.vocab_size)) if args.from_scratch else None,
    )


def make_model(args: Args, **vocabulary: int) -> PreTrainedModel:
    """`vocabulary`: of a new model, what its configuration says of its tokenizer."""
    if not args.from_scratch:
        return load_t5(args.model_name_or_path, args.attn_implementation, args.dropout_rate, **load_settings(args))
    return new_t5(
        args.attn_implementation,
        args.param_dtype,
        d_model=args.d_model,
        d_kv=args.d_kv,
        d_ff=args.d_ff,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        dropout_rate=args.dropout_rate,
        feed_forward_proj="gated-gelu",
        **vocabulary,
    )


def main(args: Args) -> None:
    run = start(args)

    # Tokenizer and data
    if not args.from_scratch:
        tokenizer = load_tokenizer(args.model_name_or_path)
    elif run.resumed_from:
        tokenizer = load_tokenizer(str(run.resumed_from))
    else:
        tokenizer = on_first_rank(
            lambda: new_bpe_tokenizer(source_texts(args.train_sources), args.vocab_size, "$A </s>")
        )
    longest = tokenizer.model_max_length
    if args.max_target_length > longest:
        raise ConfigError(
            f"--max_target_length is {args.max_target_length}, but the model is made for {longest} tokens; "
            f"set it to {longest} or less"
        )
    folder = prepare_pairs(
        tokenizer,
        train_sources=args.train_sources,
        eval_sources=args.eval_sources,
        task_prefix=args.task_prefix,
        max_source_length=args.max_source_length,
        max_target_length=args.max_target_length,
        heldout_share=args.heldout_share,
        skip_bad_pairs=args.skip_bad_pairs,
        cache_dir=args.data_cache_dir,
    )
    facts = json.loads((folder / "facts.json").read_text())
    heldout = load_from_disk(folder / "heldout")
    chosen = sorted(permutation(len(heldout), args.seed, 0)[: args.num_eval_pairs])
    heldout = heldout.select(chosen).flatten_indices()
    train_pairs, heldout_pairs = (
        Pairs(rows, tokenizer.pad_token_id) for rows in (load_from_disk(folder / "train"), heldout)
    )

    # Model
    model = make_model(
        args,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    generation = {
        "max_new_tokens": args.generation_max_length or args.max_target_length,
        "num_beams": args.generation_num_beams,
        "length_penalty": args.generation_length_penalty,
    }
    # early_stopping is of beams: left over from the model, it would contradict a greedy search.
    model.generation_config.update(**generation, early_stopping=False)
    lengths = train_pairs.num_tokens("source"), train_pairs.num_tokens("target")
    run.prepare(
        model,
        tokenizer,
        total_steps=num_steps(args, len(train_pairs)),
        flops_fn=lambda model: flops_per_target(model, *lengths),
    )
    run.print(
        f"Data: {facts['train']['pairs']:,} pairs to train on, of which {facts['train']['truncated_sources']:,} sources are "
        f"cut at {args.max_source_length} tokens and {facts['train']['truncated_targets']:,} targets at "
        f"{args.max_target_length}; {facts['skipped']:,} skipped; evaluated on {len(heldout):,} of "
        f"{facts['heldout']['pairs']:,} pairs held out"
    )

    # Training and evaluation
    heldout_loader = make_eval_loader(
        heldout_pairs, args, run.rank, run.world_size, lengths=heldout_pairs.lengths, collate_fn=heldout_pairs.collate
    )
    metrics = TextMetrics(METRICS, args.metrics)
    sources, references = heldout["source"][:], heldout["references"][:]
    prompts = heldout["source_ids"][:]
    predictions_dir = run.output_dir / "predictions"

    def evaluate_fn(step: int) -> dict[str, float]:
        loss = evaluate_loss(run.accelerator, run.model, heldout_loader, sequence_to_sequence_loss, count_labels)
        texts = generate_texts(
            run.accelerator, run.model, tokenizer, prompts, batch_size=args.per_device_eval_batch_size, **generation
        )
        if run.is_first:
            predictions_dir.mkdir(exist_ok=True)
            with (predictions_dir / f"step-{step}.jsonl").open("w") as file:
                for source, right, text in zip(sources, references, texts, strict=True):
                    line = {"source": source, "target": right if len(right) > 1 else right[0], "prediction": text}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return {"loss": loss} | on_first_rank(lambda: metrics.compute(texts, references, sources))

    records = train(
        run,
        make_train_loader(
            train_pairs,
            args,
            run.rank,
            run.world_size,
            lengths=train_pairs.lengths,
            collate_fn=train_pairs.collate,
            content=facts["content"],
        ),
        loss_fn=sequence_to_sequence_loss,
        count_fn=count_labels,
        evaluate_fn=evaluate_fn,
    )

    # Result
    last_predictions = predictions_dir / f"step-{run.total_steps}.jsonl"
    if not on_first_rank(last_predictions.exists):  # the last evaluation was of a run with another --output_dir
        evaluate_fn(run.total_steps)

    def result(before: dict, after: dict) -> Result:
        copied = {f"eval_{name}": value for name, value in metrics.compute(sources, references, sources).items()}
        results = {"before": before, "source copied": copied, "after": after}
        names = [name for metric in args.metrics for name in METRIC_VALUES[metric]]
        texts = [json.loads(line)["prediction"] for line in last_predictions.read_text().splitlines()]
        lines = [
            "",
            *examples(sources, texts, references, names[0], metrics),
            "",
        ]
        for name in names:
            values = ", ".join(f"{key} {values[f'eval_{name}']:.1f}" for key, values in results.items())
            lines.append(f"Held-out pairs ({len(sources):,}), {name}: {values}")
        bars = {key: {name: values[f"eval_{name}"] for name in names} for key, values in results.items()}
        return Result("\n".join(lines), Bars(bars, "Generated texts against the held-out targets", "of 100"))

    begin = "A new T5, trained" if args.from_scratch else f"{args.model_name_or_path}, fine-tuned"
    origin = ", ".join(map(str, args.train_sources))
    finish(run, records, f"{begin} on {facts['train']['pairs']:,} pairs of texts from {origin}.", result)


def examples(
    sources: list[str], texts: list[str], references: list[list[str]], name: str, metrics: TextMetrics
) -> list[str]:
    """Lines with a few of the generated texts, from the best by the metric `name` to the worst."""
    rows = zip(texts, references, sources, strict=True)
    score = [metrics.compute(*([value] for value in row))[name] for row in rows]
    ranked = sorted(range(len(texts)), key=lambda i: score[i])
    places = [round(n * (len(ranked) - 1) / (NUM_EXAMPLES - 1)) for n in reversed(range(NUM_EXAMPLES))]
    lines = [f"Held-out pairs, from the best {name} to the worst:"]
    for i in dict.fromkeys(ranked[place] for place in places):
        lines.append(f"  {score[i]:5.1f}  {sources[i]!r}\n      ->  {texts[i]!r}\n  target  {references[i][0]!r}")
    return lines


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
