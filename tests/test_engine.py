"""The step's arithmetic against transformers.Trainer, and what happens when it is not finite."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.data import PackedRows, StepOrder, make_train_loader
from accelerate_recipes.distributed import prepare
from accelerate_recipes.engine import NonFiniteError, evaluate_loss, train_step
from accelerate_recipes.init import initialize
from accelerate_recipes.losses import count_next_tokens, next_token_loss
from accelerate_recipes.models import new_llama
from accelerate_recipes.optim import make_scheduler

ARGS = TrainArgs(
    total_batch_size=8,
    per_device_train_batch_size=4,
    max_steps=5,
    learning_rate=1e-2,
    warmup_steps=2,
    weight_decay=0.1,
)


def make_model():
    model = new_llama(
        "sdpa", vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    return initialize(model, 0, "cpu")


def make_rows() -> PackedRows:
    generator = np.random.default_rng(0)
    lengths = [generator.integers(2, 9, size=generator.integers(1, 5)).tolist() for _ in range(50)]
    rows = {
        "input_ids": [generator.integers(4, 100, size=sum(n)).tolist() for n in lengths],
        "lengths": lengths,
    }
    return PackedRows(Dataset.from_dict(rows), 32, 0, document_mask=True)


def our_losses() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = prepare(accelerator, model, ARGS)
    scheduler = make_scheduler(optimizer, ARGS, ARGS.max_steps)
    batches = iter(make_train_loader(make_rows(), ARGS, 0, 1))
    found = []
    for _ in range(ARGS.max_steps):
        micro = [next(batches), next(batches)]
        done = train_step(accelerator, model, optimizer, micro, next_token_loss, count_next_tokens, ARGS.max_grad_norm)
        scheduler.step()
        found.append(done.loss.item())
    return found


def trainer_losses(tmp_path) -> list[float]:
    """The same rows in the same order, two micro-batches a step."""
    rows = make_rows()
    order = [row for micro, _ in zip(StepOrder(len(rows), ARGS, 0, 1), range(10), strict=False) for row in micro]
    found = []

    class Recorder(Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            found.append(loss.item())  # of a micro-batch; they add up to the step's
            return loss

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=5,
        learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, lr_scheduler_type="cosine", adam_beta2=0.95,
        max_grad_norm=1.0, optim="adamw_torch_fused", use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Recorder(make_model(), arguments, train_dataset=torch.utils.data.Subset(rows, order)).train()
    return [a + b for a, b in zip(found[::2], found[1::2], strict=True)]


def test_five_losses_are_those_of_trainer(tmp_path):
    assert our_losses() == pytest.approx(trainer_losses(tmp_path), rel=1e-5)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_the_weights(poison):
    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer = prepare(accelerator, model, ARGS)
    before = [p.detach().clone() for p in model.parameters()]
    batch = torch.utils.data.default_collate([make_rows()[i] for i in range(4)])

    def loss_fn(model, batch):
        loss = next_token_loss(model, batch)
        if poison == "loss":
            return loss * float("inf")
        loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    with pytest.raises(NonFiniteError, match=r"inf|nan"):
        train_step(accelerator, model, optimizer, [batch], loss_fn, count_next_tokens, 1.0)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_evaluation_weights_tokens_and_skips_empty_rows():
    accelerator = Accelerator(cpu=True)
    model = make_model()
    rows = make_rows()
    one_by_one = [torch.utils.data.default_collate([rows[i]]) for i in range(20)]
    together = torch.utils.data.default_collate([rows[i] for i in [*range(20), -1, -1]])
    together, apart = (
        evaluate_loss(accelerator, model, batches, next_token_loss, count_next_tokens)
        for batches in ([together], one_by_one)
    )
    assert together == pytest.approx(apart, rel=1e-6)
    assert model.training
