"""Parts 2 and 3 of `gpu.py`: the library's own training step, and what is around it."""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from gpu_cases import MODELS, ROW, TINY, TINY_DEPTH, TINY_ROW, Case, Setting
from gpu_kernels import NO_FLEX, attended_length, packed_batch
from gpu_profile import profiled
from gpu_records import Report, free_memory, in_words
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import LlamaConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_callback import PrinterCallback

from accelerate_recipes.adapters import add_adapters, load_settings
from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.attention import DOCUMENTS, use_flash_3
from accelerate_recipes.checkpoint.checkpointer import HostCopy
from accelerate_recipes.distributed import strategy_name
from accelerate_recipes.engine import Batch, Step, to_device, train_step
from accelerate_recipes.losses import (
    count_next_tokens,
    next_token_loss,
    next_token_loss_without_logits,
    unwrapped,
)
from accelerate_recipes.metrics import decoder_flops, peak_flops, trained_share
from accelerate_recipes.models import load_model, new_model
from accelerate_recipes.run import Run
from accelerate_recipes.weights import initialize

GIB = 2**30
SECONDS_TO_STOP = 15  # of its time that a case keeps while it looks for more


@dataclass
class Args(TrainArgs):
    """Arguments of a recipe with a pretrained model, for adapters."""

    model_name_or_path: str = arg("", "A folder with weights.")


class Bench:
    """What the settings of a case are measured with, in one process of a launch."""

    def __init__(self, accelerator: Accelerator, folder: Path, tiny: bool):
        self.accelerator, self.device = accelerator, accelerator.device
        self.folder, self.tiny = folder, tiny
        self.row = TINY_ROW if tiny else ROW
        self.num_steps, self.num_warmups = (2, 1) if tiny else (5, 2)

    def refuses(self, setting: Setting) -> str:
        """Say why a setting cannot be measured on this device; empty if it can."""
        if setting.attention == "flex_attention" and self.device.type == "cpu":
            return NO_FLEX
        if setting.liger and self.device.type == "cpu":
            return "Liger's kernels need a GPU"
        return ""

    def config(self, setting: Setting) -> LlamaConfig:
        if self.tiny:
            return LlamaConfig(**TINY, num_hidden_layers=TINY_DEPTH)
        return LlamaConfig(**MODELS[setting.model], num_hidden_layers=setting.layers)

    def batches(self, setting: Setting, rows: int, number: int) -> list[Batch]:
        """Make micro-batches on the device: of a setting always the same."""
        vocab_size = self.config(setting).vocab_size
        # A tiny row is shorter than most documents of C4.
        documents = "eight" if self.tiny and setting.documents == "c4" else setting.documents
        made = [packed_batch(documents, rows, self.row, vocab_size, seed) for seed in range(number)]
        return [to_device(batch, self.device) for batch in made]

    def model(self, setting: Setting, args: Args) -> PreTrainedModel:
        """A model to train: on the meta device, as `prepare` wants it; or to freeze, with weights in bf16."""
        config = self.config(setting)
        if not args.use_peft:
            model = new_model(config, setting.attention, args.param_dtype)
            if setting.liger:
                apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
            return model
        model = initialize(new_model(config, setting.attention, torch.bfloat16), args.seed, self.device)
        args.model_name_or_path = str(self.folder / "base")
        if args.load_in_4bit:
            model.save_pretrained(args.model_name_or_path)
            del model
            return load_model(args.model_name_or_path, setting.attention, **load_settings(args))
        # A checkpoint would say by a checksum of these files which model an adapter belongs to.
        Path(args.model_name_or_path).mkdir(exist_ok=True)
        save_file({"weight": torch.zeros(1)}, Path(args.model_name_or_path, "model.safetensors"))
        return model

    @contextmanager
    def run(self, setting: Setting) -> Iterator[Run]:
        """Make a run with a new model and its optimizer, as a recipe does, and let go of it."""
        args = Args(output_dir=str(self.folder), **setting.args)
        set_seed(args.seed)
        run = Run(args, self.accelerator)
        try:
            model = self.model(setting, args)
            run.adapter = add_adapters(model, args)
            share = trained_share(model)
            self.flops = partial(decoder_flops, model.config, model.num_parameters(), trained_share=share)
            run.shard(model)
            if setting.attention == DOCUMENTS:
                use_flash_3()  # as `run.prepare` does
            del model
            run.model.train()
            yield run
        finally:
            if hasattr(run, "model"):
                run.release()
            self.accelerator.free_memory()
            torch._dynamo.reset()
            free_memory()

    def step(self, run: Run, setting: Setting, batches: Sequence[Batch]) -> tuple[float, Step]:
        """Take one optimizer step; returns its seconds, to the end of all that the device has to do."""
        loss_fn = next_token_loss if setting.whole_logits else next_token_loss_without_logits
        self.wait()
        start = time.perf_counter()
        done = train_step(run, batches, loss_fn, count_next_tokens)
        self.wait()
        return time.perf_counter() - start, done

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        return {
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        }


def speed(tokens: int, seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "step_seconds": list(seconds),
        "tokens_per_second": tokens / median(seconds),
        "tokens_per_second_range": [tokens / max(seconds), tokens / min(seconds)],
    }


def same(case: Case, bench: Bench, report: Report) -> None:
    """Two steps from the same weights on the same rows, twice: losses and gradient norms, and whether bits repeat."""
    for setting in case.settings:

        def measured(setting: Setting = setting) -> dict[str, Any]:
            rounds = []
            for _ in range(2):
                with bench.run(setting) as run:
                    done = [bench.step(run, setting, bench.batches(setting, 1, 2))[1] for _ in range(2)]
                    rounds.append([(step.loss.item(), step.grad_norm.item()) for step in done])
            losses, norms = zip(*rounds[0], strict=True)
            return {"losses": losses, "grad_norms": norms, "is_repeated": rounds[0] == rounds[1]}

        if why := bench.refuses(setting):
            report(setting=setting.name, skipped=why)
        else:
            report.attempt(setting.name, "same", measured)


def steps(case: Case, bench: Bench, report: Report) -> None:
    """Speed and memory of training steps, under each setting of a case; then a profile, and how many rows fit."""
    for number, setting in enumerate(case.settings):
        has_time = number == 0 or report.seconds_left > SECONDS_TO_STOP
        if why := bench.refuses(setting) or ("" if has_time else "did not fit the time of its case"):
            report(setting=setting.name, skipped=why)
            continue
        try:
            with bench.run(setting) as run:
                for micro_batches in setting.micro_batches:
                    report(**measure_steps(bench, run, setting, micro_batches))
                if setting.is_profiled:
                    one = bench.batches(setting, setting.rows, 1)
                    report.attempt(
                        setting.name, "profile", lambda r=run, s=setting, b=one: profile_step(bench, r, s, b)
                    )
                if setting.searches_rows:  # last: what ran out of memory is not to be used again
                    report(what="rows", setting=setting.name, **search_rows(bench, run, setting, report))
        except Exception as error:  # it is the result of this setting
            report(what="steps", setting=setting.name, error=in_words(error))
        free_memory()


def measure_steps(bench: Bench, run: Run, setting: Setting, micro_batches: int) -> dict[str, Any]:
    """Time optimizer steps behind those that warm up, of which the first compiles."""
    batches = bench.batches(setting, setting.rows, micro_batches)
    tokens = micro_batches * setting.rows * bench.row
    first, *_ = [bench.step(run, setting, batches)[0] for _ in range(bench.num_warmups)]
    bench.forget_peak()
    seconds = []
    for _ in range(bench.num_steps):
        taken, done = bench.step(run, setting, batches)
        seconds.append(taken)
    found = speed(tokens, seconds)
    config = unwrapped(run.model).config
    attended = mean(attended_length(batch["position_ids"].cpu()) for batch in batches)
    # Both conventions: T is the length of the row, as in PaLM, and that of the document that a token lies in.
    flops = {"full": bench.flops(attended_length=bench.row), "attended": bench.flops(attended_length=attended)}
    peak = peak_flops(bench.device)
    return {
        "what": "steps", "setting": setting.name, "model": "tiny" if bench.tiny else setting.model,
        "layers": config.num_hidden_layers, "strategy": strategy_name(run.accelerator),
        "precision": run.accelerator.mixed_precision, "attention": config._attn_implementation,
        "compile": os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").lower(), "documents": setting.documents,
        "optim": run.args.optim, "rows": setting.rows, "micro_batches": micro_batches, "tokens": tokens,
        "attended_length": attended, "flops_per_token": flops,
        "mfu_full": peak and flops["full"] * found["tokens_per_second"] / peak,
        "mfu_attended": peak and flops["attended"] * found["tokens_per_second"] / peak,
        "seconds_of_first_step": first, "loss": done.loss.item(), "grad_norm": done.grad_norm.item(),
        **found, **bench.memory(),
    }  # fmt: skip


def profile_step(bench: Bench, run: Run, setting: Setting, batches: Sequence[Batch]) -> dict[str, Any]:
    seconds, _ = bench.step(run, setting, batches)
    return {"seconds": seconds} | profiled(lambda: bench.step(run, setting, batches), bench.device)


def search_rows(bench: Bench, run: Run, setting: Setting, report: Report) -> dict[str, Any]:
    """Take steps of more and more rows a pass, each compiled anew, until the memory or the time is at its end."""
    fitting: list[dict[str, Any]] = []
    for rows in (2,) if bench.tiny else (2, 3, 4, 6, 8, 12, 16):
        if report.seconds_left < SECONDS_TO_STOP:
            return {"fitting": fitting, "then": f"{rows} not tried: no time"}
        torch._dynamo.reset()  # else shapes are taken to vary, and kernels are made for any
        try:
            batches = bench.batches(setting, rows, 1)
            bench.forget_peak()
            seconds = [bench.step(run, setting, batches)[0] for _ in range(4)]
        except Exception as error:  # of a compiler too: it is what this many rows come to
            return {"fitting": fitting, "then": f"{rows}: {in_words(error)}"}
        fitting.append({"rows": rows} | speed(rows * bench.row, seconds[2:]) | bench.memory())
    return {"fitting": fitting, "then": "no more were tried"}


def trainer_turns(case: Case, bench: Bench, report: Report) -> None:
    """Our step and transformers.Trainer's, in turns, each time with a new model of the same weights."""
    for setting in case.settings:
        for number in range(1 if bench.tiny else 2):
            for name, measure in (("ours", our_turn), ("Trainer", trainer_turn)):
                report.attempt(
                    f"{name}, turn {number + 1}: {setting.name}", "steps", lambda m=measure, s=setting: m(bench, s)
                )


def our_turn(bench: Bench, setting: Setting) -> dict[str, Any]:
    with bench.run(setting) as run:
        return measure_steps(bench, run, setting, setting.micro_batches[0])


class Clock(TrainerCallback):
    """Notes when each step of a Trainer is over."""

    def __init__(self, wait: Callable[[], None]):
        self.wait, self.times = wait, []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.wait()
        self.times.append(time.perf_counter())


def trainer_turn(bench: Bench, setting: Setting) -> dict[str, Any]:
    """Train by transformers.Trainer under the launch of this process."""
    number, (micro_batches,) = bench.num_warmups + bench.num_steps, setting.micro_batches
    batches = bench.batches(setting, setting.rows, micro_batches)
    names = ("input_ids", "position_ids", "labels")
    rows = [{name: batch[name][i].cpu() for name in names} for batch in batches for i in range(setting.rows)]
    ours = TrainArgs(**setting.args)
    same_names = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed")
    args = TrainingArguments(
        output_dir=str(bench.folder), max_steps=number, per_device_train_batch_size=setting.rows,
        gradient_accumulation_steps=micro_batches, lr_scheduler_type="constant", optim="adamw_torch_fused",
        remove_unused_columns=False, dataloader_pin_memory=bench.device.type == "cuda", logging_strategy="no",
        save_strategy="no", report_to="none", disable_tqdm=True,
        # Its own would reset Accelerate's state, which this process shares with our steps.
        accelerator_config={"use_configured_state": True},
        **{name: getattr(ours, name) for name in same_names},
    )  # fmt: skip
    model = initialize(new_model(bench.config(setting), setting.attention), ours.seed, bench.device)
    clock = Clock(bench.wait)
    bench.forget_peak()
    trainer = Trainer(model, args, train_dataset=rows * number, callbacks=[clock])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    times = clock.times[bench.num_warmups - 1 :]
    seconds = [end - begin for begin, end in itertools.pairwise(times)]
    found = speed(micro_batches * setting.rows * bench.row, seconds) | bench.memory()
    trainer.accelerator.free_memory()
    return {"rows": setting.rows, "micro_batches": micro_batches} | found


def staging(case: Case, bench: Bench, report: Report) -> None:
    """The copy of weights and optimizer into host memory that begins a checkpoint, twice. Nothing is written."""
    for setting in case.settings:
        report.attempt(setting.name, "staging", lambda s=setting: staged(bench, s))


def staged(bench: Bench, setting: Setting) -> dict[str, Any]:
    with bench.run(setting) as run:
        bench.step(run, setting, bench.batches(setting, 1, 1))
        weights, optimizer = get_state_dict(run.model, run.optimizer)
        before = psutil.Process().memory_info().rss
        stager, seconds = HostCopy(), []
        for _ in range(2):
            bench.wait()
            start = time.perf_counter()
            copy = stager.stage({"model": weights, "optimizer": optimizer})
            bench.wait()
            seconds.append(time.perf_counter() - start)
        tensors = [*weights.values(), *(t for state in optimizer["state"].values() for t in state.values())]
        size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
        grown = psutil.Process().memory_info().rss - before
        assert copy.keys() == {"model", "optimizer"}
        return {"gib": size / GIB, "seconds": seconds, "host_gib": grown / GIB}


def measure(case: Case, accelerator: Accelerator, tiny: bool, report: Report) -> None:
    """Measure a case of parts 2 and 3 in this process."""
    measures = {"same": same, "steps": steps, "trainer_turns": trainer_turns, "staging": staging}
    with tempfile.TemporaryDirectory() as folder:
        measures[case.measure](case, Bench(accelerator, Path(folder), tiny), report)
