"""Pretrain a Llama, Mistral or Mixtral model on C4 or on text of your own, or go on pretraining one.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml recipes/c4.py \\
        --config recipes/configs/c4/llama3_1_8b.yaml

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml --mixed_precision no \\
        recipes/c4.py --config recipes/configs/c4/laptop.yaml

A new model is made of the fields of its config.json, which are arguments here; the presets hold those of published models.
No process ever holds it whole: it is made where it is sharded, with the same weights on any number of processes. The
text is streamed, tokenised on the way, and cut into rows without padding or truncation. Before and after training, on
a fixed number of rows of the validation split: loss, perplexity and bits per byte, beside what gzip needs.
"""

import gzip
import math
import sys
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from accelerate_recipes.adapters import add_adapters, load_settings
from accelerate_recipes.args import ConfigError, TrainArgs, arg, error_list
from accelerate_recipes.checkpoint import Checkpointer, agree_on_resume, export, find_resume
from accelerate_recipes.data import make_eval_loader
from accelerate_recipes.distributed import make_accelerator, on_first_rank, prepare
from accelerate_recipes.engine import evaluate_loss, train
from accelerate_recipes.generation import generate_texts
from accelerate_recipes.hub import Dataset
from accelerate_recipes.losses import (
    check_document_mask,
    count_next_tokens,
    next_token_loss,
    next_token_loss_without_logits,
)
from accelerate_recipes.metrics import flops_per_token, trained_share
from accelerate_recipes.models import (
    Architecture,
    load_model,
    load_tokenizer,
    max_positions,
    new_bpe_tokenizer,
    new_config,
    new_model,
    vocabulary_problems,
)
from accelerate_recipes.optim import make_scheduler
from accelerate_recipes.picture import draw_run
from accelerate_recipes.recipe import Requirements, run
from accelerate_recipes.shards import all_texts, find_shards, named_shards, needs_of_shards
from accelerate_recipes.streams import NUM_STREAMS, StreamLoader, TextShards, stream_problems, validation_rows
from accelerate_recipes.token_shards import is_pretokenized, pretokenize

# Not flash_attention_2: transformers 5.23 tells it of the documents only when a pass has one row.
ATTENTION = ["sdpa", "eager", "flex_attention"]
TOKENIZER_TEXTS = 20_000  # documents that a new tokenizer is trained on


@dataclass
class Args(TrainArgs, Architecture):
    output_dir: str = "outputs/c4"
    model_name_or_path: str = arg("", "Go on from this model (a name on the Hub, or a folder) instead of a new one.")
    tokenizer_name: str = arg(
        "", "Tokenizer of a new model, a name on the Hub or a folder; else a new one of --vocab_size tokens is trained."
    )
    attn_implementation: str = arg("sdpa", "Attention kernel.", choices=ATTENTION)
    whole_logits: bool = arg(False, "Compute the logits of all tokens at once: faster where the vocabulary is small.")
    dataset_name: str = arg(
        "allenai/c4", "Dataset on the Hub, or a folder with the same files, such as a mounted copy."
    )
    dataset_revision: str = arg(
        "", "Branch or commit of the dataset; default: what was downloaded, else the newest of main."
    )
    dataset_files: str = arg("en/c4-train.*.json.gz", "Pattern of the dataset's files to train on.")
    validation_dataset_files: str = arg("en/c4-validation.*.json.gz", "Pattern of the dataset's files to validate on.")
    train_files: list[str] = field(
        default_factory=list, metadata={"help": "Paths or URLs of files to train on, instead of a dataset."}
    )
    validation_files: list[str] = field(
        default_factory=list, metadata={"help": "Paths or URLs of files to validate on, instead of a dataset."}
    )
    text_column: str = arg("text", "Key or column of the text.")
    pretokenize: str = arg("", "Tokenise all training text once, into this folder, and read it from there.")
    num_streams: int = arg(
        NUM_STREAMS,
        "Number of logical streams: a multiple of each number of processes on which the run may go on.",
        min=1,
    )
    max_length: int = arg(4096, "Tokens in a row.", min=2)
    document_mask: bool = arg(True, "Keep attention inside a document; --no_document_mask lets it cross the whole row.")
    num_validation_rows: int = arg(256, "Rows of --max_length tokens to validate on.", min=1)

    fixed_on_resume = (
        TrainArgs.fixed_on_resume
        | {"model_name_or_path", "tokenizer_name", "text_column", "num_streams", "max_length", "document_mask"}
        | set(Architecture.__dataclass_fields__)
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if not self.model_name_or_path:
            found += self.architecture_problems()
            if self.max_length > self.max_position_embeddings:
                found.append(
                    f"--max_length is {self.max_length}, but the model is made for --max_position_embeddings "
                    f"{self.max_position_embeddings}"
                )
        if self.max_steps < 1:
            found.append("--max_steps is missing: how long a stream is, nobody knows")
        return found + stream_problems(self.num_streams, world_size)

    @property
    def base_model(self) -> str:
        return self.model_name_or_path


def requirements(args: Args) -> Requirements:
    def shards(files: list[str], pattern: str) -> list[Dataset]:
        if files:
            return needs_of_shards(files)
        return [Dataset(args.dataset_name, files=pattern, revision=args.dataset_revision, streamed=True)]

    datasets = shards(args.validation_files, args.validation_dataset_files)
    if not is_pretokenized(args.pretokenize):
        datasets += shards(args.train_files, args.dataset_files)
    return Requirements(
        models=[args.base_model] if args.base_model else [],
        tokenizers=[args.tokenizer_name] if args.tokenizer_name else [],
        datasets=datasets,
        new_model=None if args.model_name_or_path else lambda: make_model(args),
    )


def make_model(args: Args) -> PreTrainedModel:
    if args.model_name_or_path:
        model = load_model(args.model_name_or_path, args.attn_implementation, **load_settings(args))
        return add_adapters(model, args)
    return new_model(new_config(args), args.attn_implementation, args.param_dtype)


def with_units(loss: float, bytes_per_token: float) -> dict[str, float]:
    """The loss, in nats per token; what it means per text, whatever the tokenizer; and e to its power."""
    # A token at the start of a row or document is no target: it is taken to cost what the others do.
    bits_per_byte = loss / math.log(2) / bytes_per_token
    perplexity = math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits_per_byte}


def main(args: Args) -> None:
    find_resume(args)  # refuses, before any work, what could not be continued
    accelerator = make_accelerator(args)
    resumed_from = agree_on_resume(accelerator, args)
    rank, world_size = accelerator.process_index, accelerator.num_processes

    # Tokenizer and data
    def train_shards() -> list[str]:
        if args.train_files:
            return named_shards(args.train_files)
        return find_shards(args.dataset_name, args.dataset_files, "training", args.dataset_revision)

    def validation_shards() -> list[str]:
        if args.validation_files:
            return named_shards(args.validation_files)
        return find_shards(args.dataset_name, args.validation_dataset_files, "validation", args.dataset_revision)

    if name := args.tokenizer_name or args.model_name_or_path:
        tokenizer = load_tokenizer(name)
    elif resumed_from:
        tokenizer = load_tokenizer(str(resumed_from))
    else:

        def new_tokenizer() -> PreTrainedTokenizerFast:
            texts = all_texts(train_shards(), args.text_column)
            return new_bpe_tokenizer(islice(texts, TOKENIZER_TEXTS), args.vocab_size)

        tokenizer = on_first_rank(new_tokenizer)
    if args.pretokenize:
        settings = {"dataset": [args.dataset_name, args.dataset_files], "files": args.train_files}
        source = pretokenize(
            args.pretokenize, tokenizer, train_shards, settings,
            text_column=args.text_column, rank=rank, world_size=world_size,
        )  # fmt: skip
    else:
        source = TextShards(on_first_rank(train_shards), tokenizer, args.text_column)
    train_loader = StreamLoader(
        source, args, rank, world_size,
        max_length=args.max_length, document_mask=args.document_mask, num_streams=args.num_streams,
    )  # fmt: skip
    validation = on_first_rank(
        lambda: validation_rows(
            TextShards(validation_shards(), tokenizer, args.text_column),
            args.num_validation_rows, args.max_length, tokenizer.pad_token_id, args.document_mask,
        )
    )  # fmt: skip

    # Model and optimizer
    model = make_model(args)
    problems = vocabulary_problems(model.config, tokenizer)
    if args.max_length > (longest := max_positions(model.config)):
        problems.append(f"--max_length is {args.max_length}, the model's is {longest}")
    if problems:
        raise ConfigError(error_list("Model and data do not belong together", problems))
    artifacts = [model.config, model.generation_config, tokenizer]
    flops = flops_per_token(model.config, model.num_parameters(), validation.rows.attended_length, trained_share(model))
    model, optimizer = prepare(accelerator, model, args)
    if args.document_mask:
        check_document_mask(model, accelerator.device)
    total_steps = args.max_steps
    scheduler = make_scheduler(optimizer, args, total_steps)
    accelerator.on_main_process(print)(
        f"Data: {len(source.shards):,} shards, in rows of {args.max_length} tokens; validation on {len(validation.rows):,} "
        f"rows, {validation.bytes_per_token:.2f} bytes per token"
    )

    # Training and evaluation
    loss_fn = next_token_loss if args.whole_logits else next_token_loss_without_logits
    validation_loader = make_eval_loader(validation.rows, args, rank, world_size)

    def evaluate_fn(step: int) -> dict[str, float]:
        loss = evaluate_loss(accelerator, model, validation_loader, loss_fn, count_next_tokens)
        return with_units(loss, validation.bytes_per_token)

    checkpointer = Checkpointer(accelerator, model, optimizer, scheduler, args, artifacts, resumed_from)
    records = train(
        accelerator,
        model,
        optimizer,
        scheduler,
        train_loader,
        args,
        total_steps=total_steps,
        loss_fn=loss_fn,
        count_fn=count_next_tokens,
        evaluate_fn=evaluate_fn,
        checkpointer=checkpointer,
        flops_per_token=flops,
    )

    # Result
    tokens_of_texts = (tokenizer(text)["input_ids"] for text in validation.texts)
    starts = list(islice((tokens[:16] for tokens in tokens_of_texts if tokens), 3))  # none in an empty text
    continuations = generate_texts(accelerator, model, tokenizer, starts, 40, batch_size=1)
    if accelerator.is_main_process:
        output_dir = Path(args.output_dir)
        before, *_, after = (record["eval_bits_per_byte"] for record in records if "eval_loss" in record)
        text = "".join(validation.texts).encode()
        results = {"before": before, "gzip": 8 * len(gzip.compress(text)) / len(text), "after": after}
        bars = {name: {"validation text": value} for name, value in results.items()}
        draw_run(output_dir / "result.png", records, bars, "What a byte of text costs", "bits per byte")
        start = (
            f"{args.model_name_or_path}, pretrained further" if args.model_name_or_path else "A new model, pretrained"
        )
        files = ", ".join(args.train_files) or f"{args.dataset_name} ({args.dataset_files})"
        description = f"{start} on text from {files}."
        export(checkpointer.newest, output_dir / "export", description, merge_adapter=args.merge_adapter)
        print("\nThe model goes on where documents of the validation split begin:")
        for tokens, continuation in zip(starts, continuations, strict=True):
            beginning = tokenizer.decode(tokens, skip_special_tokens=True)
            print(f"  {beginning!r} -> {continuation!r}")
        shares = ", ".join(f"{name} {value:.3f}" for name, value in results.items())
        print(f"Bits per byte of the validation text ({len(text):,} bytes): {shares}")
        print(f"Model: {output_dir / 'export'}   picture: {output_dir / 'result.png'}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    run(main, Args, requirements)
