"""The cases of `gpu.py`: which model, which rows, by which launch; what was predicted, and what others publish.

Models are Llamas of published shapes; those of Qwen's stand for Qwen's. Predictions were made by arithmetic before any run
on a GPU (650 TFLOP/s of matmul, 480 to 620 in small models; 3.0 TB/s), and are not changed afterwards.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from accelerate_recipes.metrics import decoder_flops
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.documents import boundaries
from accelerate_recipes.models.loading import new_model

# Layers, width, inner width, heads, heads of keys, words, whether the output layer is the embedding.
SHAPES = {
    "0.5B": (24, 896, 4864, 14, 2, 151936, True),  # Qwen2.5
    "0.6B": (28, 1024, 3072, 16, 8, 151936, True),  # Qwen3; heads are of 128 there too
    "1.5B": (28, 1536, 8960, 12, 2, 151936, True),  # Qwen2.5
    "3B": (36, 2048, 11008, 16, 2, 151936, True),  # Qwen2.5
    "7B": (32, 4096, 11008, 32, 32, 32000, False),  # Llama 2
    "8B": (32, 4096, 14336, 32, 8, 128256, False),  # Llama 3
    "tiny": (2, 64, 96, 4, 2, 128, False),
}
# Tokens of C4's documents: a log-normal law of this median, and of the mean 427, which is 156 billion tokens of 365 million
# documents (Dodge et al. 2021, "Documenting Large Webtext Corpora", table 1).
MEDIAN_TOKENS, SIGMA = 259.0, 1.0

KAHAN = {"optim": "adamw_bf16_kahan"}
LORA = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}


class Anchor(NamedTuple):
    """A published speed of one GPU."""

    source: str
    speed: float  # tokens/s
    differs: str
    gpu: str = "H100"  # as in the device's name


class Batch(NamedTuple):
    """The rows of an optimizer step."""

    rows: int  # a forward pass
    length: int  # tokens of a row
    micro_batches: int = 1
    documents: str = "one"  # a row, or of lengths as C4's
    predicted: float = 0.0  # tokens/s, on an H100 or on the only GPU that holds the case
    anchors: tuple[Anchor, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.length} x {self.micro_batches}{', packed documents' * (self.documents != 'one')}"


class Case(NamedTuple):
    """A launch of its own: one model, and one batch after the other."""

    name: str
    seconds: float  # that it is expected to take
    measure: str = "steps"  # function of gpu_measure
    model: str = ""
    batches: tuple[Batch, ...] = ()
    config: str = ""  # YAML of accelerate_configs/; without one it is a plain process
    launch: str = ""  # flags of `accelerate launch`
    args: dict[str, Any] = {}  # noqa: RUF012  of the recipe, as TrainArgs has them
    gib: float = 0.0  # GPU memory that it needs
    package: str = ""  # that must be installed
    is_second: bool = False  # of the second list


LLM_Q, IN_CUDA = "llm.q, benchmarks/H100x1.md of December 2025", "C++ and CUDA"
OF_QWEN = f"{IN_CUDA}; Qwen2.5-7B, of 7.6 billion parameters"
BUDGET = KAHAN | {"activation_memory_budget": 0.8}
CASES = {case.name: case for case in [
    Case("attention", 20, "attention"),
    Case(
        "0.6B", 45, model="0.6B", config="single_bf16", args=KAHAN, gib=30,
        batches=(
            Batch(1, 8192, 2, predicted=60_000, anchors=(
                Anchor("prime-rl, benchmarks/baselines", 26_005, "FlashAttention 3; all layers computed twice"),
            )),
            Batch(1, 8192, 2, "c4"),
        ),
    ),
    Case(
        "8B: LoRA", 50, model="8B", config="single", args=LORA, gib=50,
        launch="--dynamo_backend inductor --dynamo_use_regional_compilation",
        batches=(Batch(2, 4096, 4, predicted=14_800, anchors=(
            Anchor("NeMo AutoModel, performance summary", 12_473, "16 micro-batches"),
            Anchor("the same: Qwen2.5-7B, LoRA", 14_110, "another model"),
        )),),
    ),
    Case(
        "1.5B", 45, model="1.5B", config="single_bf16", args=KAHAN, gib=60,
        batches=(Batch(16, 1024, 4, predicted=50_000, anchors=(Anchor(LLM_Q, 58_900, f"{IN_CUDA}; 32 rows a pass"),)),),
    ),
    Case(
        "0.5B", 30, model="0.5B", config="single_bf16", args=KAHAN, gib=60,
        batches=(Batch(32, 1024, 2, anchors=(Anchor(LLM_Q, 150_000, IN_CUDA),)),),
    ),
    Case(
        "7B: budget 0.8", 90, model="7B", config="single_bf16", args=BUDGET, gib=78,
        batches=(
            Batch(4, 1024, 8, predicted=13_500, anchors=(Anchor(LLM_Q, 13_900, OF_QWEN),)),
            Batch(1, 4096, 8, predicted=12_660),  # MFU 59 %
        ),
    ),
    Case(
        "3B", 50, model="3B", config="single_bf16", args=KAHAN, gib=60,
        batches=(Batch(8, 1024, 4, predicted=27_000, anchors=(Anchor(LLM_Q, 30_900, f"{IN_CUDA}; 16 rows a pass"),)),),
    ),
    Case(
        "8B: all of it", 90, model="8B", config="single_bf16", args=KAHAN, gib=130,
        batches=(Batch(4, 4096, 1, predicted=11_150, anchors=(  # MFU 58 %
            Anchor("KempnerForge, mfu_scaling.md", 10_471, "all layers computed twice", "H200"),
        )),),
    ),
    Case(
        "3B: fp8", 45, model="3B", config="single_fp8", args=KAHAN, gib=60, package="torchao", is_second=True,
        batches=(Batch(8, 1024, 4, anchors=(Anchor(LLM_Q, 40_400, f"{IN_CUDA}; 16 rows a pass; 1.31 of its bf16"),)),),
    ),
    Case(
        "7B: fp8", 55, model="7B", config="single_fp8", args=BUDGET, gib=78, package="torchao", is_second=True,
        batches=(Batch(4, 1024, 8, anchors=(
            Anchor(LLM_Q, 19_200, f"{OF_QWEN}; FFN and norms computed twice; 1.385 of its bf16"),
            Anchor("Megatron-Bridge, performance summary", 14_451, "8B; a GPU of eight"),
        )),),
    ),
    Case("tests", 55, "tests", package="datasets", is_second=True),
]}  # fmt: skip


def config_of(case: Case) -> LlamaConfig:
    layers, width, inner, heads, narrow, words, is_tied = SHAPES[case.model]
    return LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=narrow, head_dim=max(width // heads, 128 if width >= 1024 else 0), vocab_size=words,
        tie_word_embeddings=is_tied, max_position_embeddings=8192,
    )  # fmt: skip


def flops_of(case: Case, batch: Batch) -> float:
    """Count the training FLOPs of a token, with T the length of the row, as in what others publish."""
    config = config_of(case)
    parameters = new_model(config, "sdpa", torch.bfloat16).num_parameters()
    return decoder_flops(config, parameters, batch.length)


def packed_batch(batch: Batch, vocab_size: int, seed: int) -> dict[str, Any]:
    """Make a micro-batch of random tokens, with the keys of `data.packing.collate`, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch.rows, batch.length)
    drawn = torch.empty(shape).log_normal_(math.log(MEDIAN_TOKENS), SIGMA, generator=generator).round().clamp(min=1)
    ends = drawn.long().cumsum(1) if batch.documents == "c4" else torch.full(shape, batch.length)
    tokens = torch.arange(batch.length).expand(shape).contiguous()
    # A token's document begins where the last one before it ended; the last document of a row is cut.
    number = torch.searchsorted(ends, tokens, right=True)
    positions = tokens - F.pad(ends, (1, 0)).gather(1, number)
    ids = torch.randint(vocab_size, shape, generator=generator)
    labels = ids.masked_fill(positions == 0, IGNORE_INDEX)  # the first token of a document is no target
    found = {"input_ids": ids, "position_ids": positions, "labels": labels, "row": torch.arange(batch.rows)}
    return found | boundaries(positions)
