"""Recipe that the proofs launch: a small Llama on rows that follow from their numbers, so that nothing is read."""

import copy
import os
import signal
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedModel

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.checkpoint.files import complete_checkpoints
from accelerate_recipes.data.packing import collate, pack_row
from accelerate_recipes.data.rows import Rows, make_eval_loader, make_train_loader, num_steps
from accelerate_recipes.disk import write_atomically
from accelerate_recipes.engine import Batch, evaluate_loss, train
from accelerate_recipes.losses import count_next_tokens, next_token_loss_fn
from accelerate_recipes.metrics import flops_per_token
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.tokenizers import new_word_tokenizer
from accelerate_recipes.recipe import Requirements, run_recipe
from accelerate_recipes.run import Run, finish, start
from accelerate_recipes.trial import Trial, packed_trial

# Words, width, inner width, layers, heads.
MODELS = {
    "tiny": (100, 32, 64, 3, 4),
    "cpu": (2000, 192, 512, 4, 6),  # steps of a second or less on two cores
    "gpu": (32000, 768, 2048, 12, 12),  # 127 million parameters, for the speed of a GPU
}
NUM_ROWS = 61  # no multiple of the batch, so that an epoch ends inside a batch
HELD_OUT = range(NUM_ROWS, NUM_ROWS + 10)


@dataclass
class Args(TrainArgs):
    shares_rows = True

    model: str = arg("tiny", "Size of the model.", choices=list(MODELS))
    max_length: int = arg(32, "Tokens of a row.", min=8)
    dropout: float = arg(0.0, "Dropout in the attention.", min=0, below=1)
    attn_implementation: str = arg("auto", "Attention kernel.", fixed=False)
    whole_logits: bool = arg(True, "Compute all logits at once.", fixed=False)
    document_mask: bool = arg(True, "Attention stays inside documents.")
    kill_at_step: int = arg(0, "Kill all processes in this step, when a checkpoint is complete.", fixed=False, min=0)
    counts_memory: bool = arg(False, "Count the memory of a step, operator by operator, in place of training.")


def requirements(args: Args) -> Requirements:
    return Requirements()


def row_of(args: Args, item: int) -> tuple[np.ndarray, list[int]]:
    """Return tokens and lengths of documents of row `item`: one to four documents, some nearly empty.

    With these lengths a mean of means is not the mean. For a measurement of speed, one more document fills the row.
    """
    generator = np.random.default_rng([7, item])
    lengths = generator.integers(2, args.max_length // 4 + 1, size=generator.integers(1, 5)).tolist()
    if args.model != "tiny" and (rest := args.max_length - sum(lengths)):
        lengths.append(rest)
    return generator.integers(4, MODELS[args.model][0], size=sum(lengths)), lengths


def make_row(args: Args, item: int, number: int) -> Batch:
    tokens, lengths = row_of(args, item) if number >= 0 else (np.array([], dtype=np.int64), [])
    row = pack_row(tokens, lengths, args.max_length, 0, args.document_mask)
    return row | {"row": torch.tensor(number)}


def make_config(args: Args) -> LlamaConfig:
    words, width, inner, layers, heads = MODELS[args.model]
    return LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, max_position_embeddings=args.max_length, attention_dropout=args.dropout,
        pad_token_id=0, initializer_range=width**-0.5,  # of a size at which a rounded weight shows in the loss
    )  # fmt: skip


def make_model(args: Args) -> PreTrainedModel:
    return new_model(make_config(args), args.attn_implementation, args.param_dtype)


def trial(args: Args) -> Trial:
    return packed_trial(args, make_config(args), next_token_loss_fn(args.whole_logits))


def count_memory(run: Run[Args]) -> None:
    """Take steps of real tensors under the ledger of `plan`; rank 0 writes the peak. A CPU's allocator counts nothing."""
    from recipe_tools.plan.ledger import Ledger
    from recipe_tools.plan.simulate import num_logits, take_steps

    work = trial(run.args)
    run.shard(work.make_model(work.config))
    peaks = []
    for _ in range(4):  # threads of gloo sometimes let go late of what was exchanged
        with Ledger("cpu", num_logits(work.config)) as ledger:
            number = run.args.accumulation_steps(run.data_world_size)
            copies = [copy.deepcopy(work.batch) for _ in range(number)]
            take_steps(ledger, run, work, copies)
        peaks.append(ledger.peak)
    if run.is_first:
        write_atomically(run.output_dir / "peak", str(min(peaks)))


def kill_at(run: Run[Args]) -> None:
    """Kill this process as nothing can prevent, when a checkpoint that was written beside the training is complete."""
    while not complete_checkpoints(run.output_dir):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def main(args: Args) -> None:
    run = start(args)
    if args.counts_memory:
        count_memory(run)
        return
    place = (args, run.data_rank, run.data_world_size)
    make = partial(make_row, args)
    loader = make_train_loader(Rows(range(NUM_ROWS), make), *place, collate_fn=collate)
    heldout = make_eval_loader(Rows(HELD_OUT, make), *place, collate_fn=collate)
    tokenizer = new_word_tokenizer([f"w{i}" for i in range(MODELS[args.model][0] - 4)])
    lengths = np.array([length for item in range(NUM_ROWS) for length in row_of(args, item)[1]])
    attended = (lengths**2).sum() / lengths.sum()  # of a token, on average
    flops = partial(flops_per_token, document_length=attended, row_length=args.max_length)
    run.prepare(make_model(args), tokenizer, num_steps(args, NUM_ROWS), flops)
    loss_fn, passes = next_token_loss_fn(args.whole_logits), 0

    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal passes
        passes += model.training
        if args.kill_at_step and passes > (args.kill_at_step - 1) * args.accumulation_steps(run.data_world_size):
            kill_at(run)
        return loss_fn(model, batch)

    def evaluate(step: int) -> dict[str, float]:
        return {"loss": evaluate_loss(run.accelerator, run.model, heldout, loss, count_next_tokens)}

    records = train(run, loader, loss_fn=loss, count_fn=count_next_tokens, evaluate_fn=evaluate)
    finish(run, records, "A run that proves what a machine does.")


if __name__ == "__main__":
    run_recipe(main, Args, requirements)
