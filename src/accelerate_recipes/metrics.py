"""Reports of a run: the log line, metrics.jsonl, trackers, throughput, FLOPs and memory."""

from __future__ import annotations

import copy
import json
import math
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedConfig

from accelerate_recipes.arguments.gpus import bf16_peak
from accelerate_recipes.disk import naming, read_json_lines, write_atomically
from accelerate_recipes.models.attention import of_layers, width_of_heads
from accelerate_recipes.models.composites import sees_images, weights_by_part


class Flops(NamedTuple):
    """Training FLOPs per target token, for MFU by two conventions."""

    attended: float  # a token attends to its document
    full_rows: float | None = None  # a token attends to the whole row, as published; None if rows are not packed
    last_step: float = math.inf  # for which they hold: later rows may have another length


def flops_per_token(model: transformers.PreTrainedModel, document_length: float, row_length: int) -> Flops:
    """Count the training FLOPs per token of a decoder that is not sharded yet; see `decoder_flops`.

    `document_length` is the mean, over all tokens, of the length of a token's document.
    """
    size, share, config = model.num_parameters(), trained_share(model), model.config
    if sees_images(config):
        is_tied, config = config.tie_word_embeddings, copy.copy(config.get_text_config())
        config.tie_word_embeddings = is_tied
        size, share = size_and_share(weights_by_part(model)["language_model"])
    return Flops(*(decoder_flops(config, size, length, share) for length in (document_length, row_length)))


def size_and_share(parameters: Iterable[nn.Parameter]) -> tuple[int, float]:
    """Count the elements of parameters, each once, and return the share of them that are trained."""
    unique = {id(parameter): parameter for parameter in parameters}.values()
    size = sum(map(num_weights, unique))
    return size, sum(parameter.numel() for parameter in unique if parameter.requires_grad) / max(size, 1)


def decoder_flops(
    config: PreTrainedConfig, num_parameters: int, attended_length: float, trained_share: float = 1.0
) -> float:
    """Count the training FLOPs per token of a decoder: `6 N + 12 L H Q T`. The gradients of trained weights are 2 N of them.

    N counts the parameters that multiply activations. It leaves out the input embedding (but a tied one counts once, as
    the output layer) and the experts that a token is not sent to. There are L layers with H heads of dimension Q. T is
    `attended_length`, the number of tokens that a token is counted to attend to. Nothing is deducted for causal masking,
    and nothing added for recomputation (activation checkpointing).

    Source: PaLM (Chowdhery et al. 2022), appendix B.
    """
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    # Experts have three matrices each; a token passes through only `num_experts_per_tok` of them.
    idle = 0
    if num_experts := getattr(config, "num_local_experts", 0):
        idle = num_experts - config.num_experts_per_tok
        idle *= 3 * config.hidden_size * config.intermediate_size * config.num_hidden_layers
    width = sum(layer.num_attention_heads * width_of_heads(layer) for layer in of_layers(config))
    attention = 12 * width * attended_length
    return (4 + 2 * trained_share) * (num_parameters - embedding - idle) + attention


def trained_share(model: transformers.PreTrainedModel) -> float:
    """Return the share of the parameters that are trained: 1, unless there are adapters."""
    return model.num_parameters(only_trainable=True) / model.num_parameters()


def flops_per_target(
    model: transformers.PreTrainedModel, source_lengths: np.ndarray, target_lengths: np.ndarray
) -> Flops:
    """Count an encoder-decoder's training FLOPs per target token, over pairs of these lengths in tokens, without padding.

    As in `decoder_flops`, a parameter costs 6 FLOPs (a frozen one 4) for each token that it multiplies. Each pair of
    tokens of which one attends to the other costs 12 L H Q. The source passes through the encoder, and through the keys
    and values of the decoder's cross-attention. The target passes through the rest of the decoder and the output layer.
    """
    config = model.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "d_kv", None) or config.hidden_size // heads)
    num_layers = getattr(config, "num_decoder_layers", None) or config.decoder_layers
    embedding = model.get_input_embeddings().weight.numel()  # pyright: ignore[reportCallIssue]
    encoder, decoder = (num_multiplied(part) for part in (model.get_encoder(), model.get_decoder()))
    cross = num_layers * 2 * config.hidden_size * width
    source, target = (lengths.astype(float) for lengths in (source_lengths, target_lengths))
    # Weights of cross-attention that make keys and values multiply the source, all other weights of the decoder the target.
    # Attention: encoder tokens see the source; decoder tokens see the target, and the source.
    multiplied = (4 + 2 * trained_share(model)) * ((encoder + cross) * source + (decoder - cross + embedding) * target)
    attended = config.num_hidden_layers * source**2 + num_layers * target * (source + target)
    return Flops(float((multiplied + 12 * width * attended).sum() / target.sum()))


def num_multiplied(part: nn.Module) -> int:
    """Count the weights of an encoder or decoder that multiply activations: all but embeddings of tokens and positions."""
    looked_up = [weight for m in part.modules() if isinstance(m, nn.Embedding) for weight in m.parameters()]
    return sum(map(num_weights, part.parameters())) - sum(map(num_weights, looked_up))


def num_weights(parameter: nn.Parameter) -> int:
    """Count the weights that a parameter holds, even if they are packed in 4 bits."""
    return math.prod(parameter.quant_state.shape) if hasattr(parameter, "quant_state") else parameter.numel()


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far, in GiB: tensors on a GPU, or the resident set on a CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    return torch.accelerator.max_memory_allocated(device) / 2**30


class Window:
    """Sums over the steps since the last log line. They stay on the device, so adding to them does not wait for it."""

    def __init__(self):
        self.loss_sums = torch.zeros((), dtype=torch.float64)  # (K,), one for each part of the loss
        self.counts = torch.zeros((), dtype=torch.int64)  # (K,), the targets of each part
        self.samples = 0
        self.seconds = 0.0
        self.data_seconds = 0.0

    def add(
        self, loss_sums: torch.Tensor, counts: torch.Tensor, samples: int, seconds: float, data_seconds: float
    ) -> None:
        """Add a step: the sum of each part of the loss, and the number of targets that divides it, (K,) both.

        `seconds` is the duration of the step; for `data_seconds` of them it waited for data.
        """
        self.loss_sums = self.loss_sums + loss_sums
        self.counts = self.counts + counts
        self.samples += samples
        self.seconds += seconds
        self.data_seconds += data_seconds

    @property
    def num_targets(self) -> int:
        """Number of tokens that were targets of the loss."""
        return int(self.counts[-1].item())

    @property
    def mean_loss(self) -> float:
        """Mean loss of the window in nats per token. All tokens count alike; the means of several parts are added."""
        return (self.loss_sums / self.counts.clamp(min=1)).sum().item()


class MetricsLog:
    """Writes each record to stdout, metrics.jsonl and the trackers. Only rank 0 writes, but call it on all ranks.

    `records` equals the content of metrics.jsonl: one dict per logging step (`loss`, ...) or evaluation (`eval_loss`,
    ...), each with its `step`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: Path,
        total_steps: int,
        flops: Flops | None,
        begun_at: int = 0,
        targets: str = "tokens",
    ):
        self.accelerator = accelerator
        self.path = output_dir / "metrics.jsonl"
        self.total_steps = total_steps
        self.flops = flops
        self.targets = targets  # what the targets of the loss are, for the line of a step
        device = device_name(accelerator.device)
        self.peak_flops = None if flops is None else bf16_peak(device)
        if flops is not None and self.peak_flops is None:
            accelerator.on_main_process(print)(f"MFU is left out: the bf16 peak of {device} is not known")
        self.records: list[dict] = []
        self.first: tuple[int, float] | None = None  # first step that this process completed, and when
        is_off = not (accelerator.is_main_process and sys.stderr.isatty())
        self.progress = tqdm(total=total_steps, initial=begun_at, unit="step", disable=is_off, dynamic_ncols=True)

    def restore(self, checkpoint: Path | None) -> None:
        """Continue after the records of a checkpoint, or start anew. Later records of a killed run are dropped."""
        if checkpoint is not None:
            self.records = read_json_lines(checkpoint / self.path.name)
        if self.accelerator.is_main_process:
            write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in self.records))

    def completed(self, step: int) -> None:
        """Count a step in the progress bar and for the time to the end."""
        self.progress.update()
        self.first = self.first or (step, time.perf_counter())

    def outlook(self, step: int) -> str:
        """Write the share of the steps that is done and, after two steps, the time to the end.

        The time is that of the steps so far, with evaluations and saves. The first step is left out: it may compile.
        """
        progress = f"done: {step / self.total_steps:.1%}"
        if self.first is None or step == self.first[0]:
            return progress
        seconds = (time.perf_counter() - self.first[1]) / (step - self.first[0]) * (self.total_steps - step)
        return f"{progress}, left: {tqdm.format_interval(seconds)}"

    def log_step(
        self, step: int, window: Window, grad_norm: float, lr: float, gib: float, counts: dict[str, float]
    ) -> None:
        """Log the steps of the window in one line: mean loss, throughput of all ranks, peak memory, time waited for data.

        `counts` are additional values, such as what all ranks have read so far, or a reward. Without a target there is
        no `loss`.
        """
        record = {"step": step} | ({"loss": window.mean_loss} if window.num_targets else {})
        record |= {
            "samples_per_second": window.samples / window.seconds,
            "tokens_per_second": window.num_targets / window.seconds,
            "learning_rate": lr,
            "grad_norm": grad_norm,
        }
        loss = f"{record['loss']:.5f}" if "loss" in record else "none, since there was no target"
        line = (
            f"Step {step}/{self.total_steps} Loss: {loss}, "
            f"Speed: {record['samples_per_second']:.2f} samples/sec, {record['tokens_per_second']:.0f} {self.targets}/sec, "
            f"lr: {lr:#.3g}, grad norm: {grad_norm:.2f}"
        )
        if self.peak_flops is not None and step <= self.flops.last_step:
            tokens_per_peak = record["tokens_per_second"] / self.accelerator.num_processes / self.peak_flops
            record["mfu"] = self.flops.attended * tokens_per_peak
            line += f", MFU: {record['mfu']:.3f}"
            if self.flops.full_rows is not None:
                record["mfu_full_rows"] = self.flops.full_rows * tokens_per_peak
                line += f" (counting full rows: {record['mfu_full_rows']:.3f})"
        record["peak_memory_gib"] = gib
        record["data_wait"] = window.data_seconds / window.seconds  # of rank 0; ranks wait for each other anyway
        record |= counts
        line += f", peak memory: {gib:.1f} GiB, data wait: {record['data_wait']:.1%}"
        line += f", retries: {record['retries']}" if record.get("retries") else ""
        line += f", reward: {record['reward']:.3f}" if "reward" in record else ""
        losses = {name: record.get(f"{name}_loss") for name in sources_in([record])}
        line += "".join(f", {name}_loss: {loss:.3f}" for name, loss in losses.items() if loss is not None)
        self._write(record, line)

    def log_evaluation(self, step: int, values: dict[str, float]) -> None:
        record = {"step": step} | {f"eval_{name}": value for name, value in values.items()}
        line = ", ".join(f"{name}: {value:.5g}" for name, value in values.items())
        self._write(record, f"Step {step}/{self.total_steps} Evaluation {line}")

    def has_evaluation(self, step: int) -> bool:
        return any(record["step"] == step and is_evaluation(record) for record in self.records)

    def _write(self, record: dict, line: str) -> None:
        record["time"] = time.time()
        self.records.append(record)
        if self.accelerator.is_main_process:
            with self.progress.external_write_mode(file=sys.stdout):
                print(f"{line}, {self.outlook(record['step'])}", flush=True)
            with naming(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        values = {name: value for name, value in record.items() if name not in ("step", "time")}
        self.accelerator.log(values, step=record["step"])


def sources_in(records: Iterable[dict]) -> list[str]:
    """List the names of the sources in the records of a mixture, of which each has several values."""
    names = dict.fromkeys(name for record in records for name in record if name.endswith("_asked"))
    return [name.removesuffix("_asked") for name in names]


def is_evaluation(record: dict) -> bool:
    return any(name.startswith("eval_") for name in record)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type.upper()}"
