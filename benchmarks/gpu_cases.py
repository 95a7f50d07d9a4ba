"""The cases of `gpu.py`: which model, which settings, by which launch, and what each needs."""

import math
from typing import Any, NamedTuple

from accelerate_recipes.attention import FLASH_3

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 8192}
# Of the published config.json; nothing is downloaded.
MODELS = {
    "7B": LLAMA | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    "8B": LLAMA | {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
}
DEPTH = 32
ROW = 4096  # tokens
TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
TINY_DEPTH, TINY_ROW = 2, 128

LIGER = "liger_kernel"  # package
REGIONAL = "--dynamo_backend inductor --dynamo_use_regional_compilation"
BEST = "single_bf16"  # with KAHAN: pure bf16, compiled
FP8 = "single_fp8"
FP32 = "--mixed_precision no"  # of the YAML; with KAHAN the weights are bf16
KAHAN = {"optim": "adamw_bf16_kahan"}
LORA = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}


class Setting(NamedTuple):
    """One configuration of a model and its batch. Settings of a case follow each other, each with a new model."""

    name: str
    model: str = "7B"
    layers: int = DEPTH
    attention: str = "documents"
    documents: str = "one"  # one a row, eight a row, or lengths as C4's
    rows: int = 1  # a forward pass
    micro_batches: tuple[int, ...] = (1,)  # a step; measured one after the other
    whole_logits: bool = False
    liger: bool = False  # norms, RoPE and SwiGLU by Liger's kernels
    args: dict[str, Any] = {}  # noqa: RUF012  of the recipe, as TrainArgs has them
    is_profiled: bool = False
    searches_rows: bool = False  # how many fit a forward pass


class Case(NamedTuple):
    """What needs a launch of its own: an accelerate YAML with flags."""

    name: str
    part: int
    measure: str  # function of gpu_kernels or gpu_steps
    seconds: float  # that it is expected to take
    config: str = "single"
    launch: str = ""
    settings: tuple[Setting, ...] = ()
    environment: dict[str, str] = {}  # noqa: RUF012
    gib: float = 0.0  # GPU memory that it needs
    below_gib: float = math.inf  # and from which on it is left out: a larger case says more
    package: str = ""  # that must be installed

    @property
    def is_compiled(self) -> bool:
        return REGIONAL in self.launch or self.config in (BEST, FP8)

    @property
    def key(self) -> tuple:
        """Tell which cases can share a process."""
        return self.config, self.launch, tuple(self.environment.items())


def kernels() -> list[Case]:
    """Part 1: the ceilings of the device, and attention by itself."""
    return [
        Case("ceilings", 1, "ceilings", 30),
        Case("attention: documents", 1, "attention_documents", 25),
        Case("attention: FlashAttention 3", 1, "attention_flash_3", 25, package=FLASH_3),
        Case("attention: sdpa", 1, "attention_sdpa", 45),
        Case("attention: flex", 1, "attention_flex", 40),
        Case("attention: NaN", 1, "attention_nan", 10),
        Case("decode", 1, "decode", 25),
    ]


def correctness() -> list[Case]:
    """Part 2, first: one step on four layers of 7B, with the same weights, under each strategy."""

    def settings(*attentions: str, **args: Any) -> tuple[Setting, ...]:
        return tuple(Setting(name, layers=4, attention=name, documents="c4", args=args) for name in attentions)

    every = settings("sdpa", "documents", "flex_attention")
    found = [Case("same: single, fp32", 2, "same", 10, launch=FP32, settings=settings("sdpa"), gib=22)]
    for config in ("single", "fsdp_full", "fsdp_grad_op"):
        found += [
            Case(f"same: {config}", 2, "same", 12, config, settings=every, gib=30),
            Case(f"same: {config}, regional", 2, "same", 25, config, REGIONAL, every, gib=30),
        ]
    kahan = settings("sdpa", "documents", **KAHAN)
    return [*found, Case("same: single, Kahan", 2, "same", 10, launch=FP32, settings=kahan, gib=20)]


def levers() -> list[Case]:
    """Part 2, then: eight layers of 7B, one thing changed at a time, with one and four micro-batches a step."""

    def setting(name: str, **changes: Any) -> Setting:
        kahan = {"args": KAHAN | changes.pop("args", {})}
        return Setting(name, layers=8, micro_batches=(1, 4), **{"documents": "c4"} | kahan | changes)

    def master(name: str, **changes: Any) -> Setting:
        """Weights in fp32, AdamW."""
        return setting(name, **changes)._replace(args=changes.get("args", {}))

    attention = (
        setting("documents"),
        setting("sdpa, mask", attention="sdpa"),
        setting("flex", attention="flex_attention"),
        setting("documents, one a row", documents="one"),
        setting("sdpa, one a row: no mask", attention="sdpa", documents="one"),
    )
    rest = (
        setting("base"),
        setting("whole logits", whole_logits=True),
        setting("no clipping", args={"max_grad_norm": 0.0}),
        setting("2 rows a pass", rows=2),
        setting("4 rows a pass", rows=4),
    )
    prefetch = (master("fsdp_full"), master("prefetch 2", args={"prefetch_layers": 2}))
    checkpointing = f"{REGIONAL} --fsdp_activation_checkpointing true"
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    return [
        Case("lever: attention", 2, "steps", 60, BEST, settings=attention, gib=40),
        Case("lever: loss, clipping, rows", 2, "steps", 50, BEST, settings=rest, gib=50),
        Case("lever: not compiled", 2, "steps", 15, launch=FP32, settings=(setting("not compiled"),), gib=40),
        Case("lever: Liger", 2, "steps", 15, launch=FP32, settings=(setting("Liger", liger=True),), gib=40, package=LIGER),
        Case("lever: fp32 masters", 2, "steps", 20, launch=REGIONAL, settings=(master("fp32 masters"),), gib=50),
        Case("lever: fsdp_full", 2, "steps", 30, "fsdp_full", REGIONAL, prefetch, gib=50),
        Case("lever: fsdp_grad_op", 2, "steps", 20, "fsdp_grad_op", REGIONAL, (master("fsdp_grad_op"),), gib=50),
        Case("lever: fsdp_full, Kahan", 2, "steps", 20, "fsdp_full", f"{FP32} {REGIONAL}", (setting("fsdp_full"),), gib=40),
        Case("lever: recomputation", 2, "steps", 25, "fsdp_full", checkpointing, (master("all layers"),), gib=50),
        Case(
            "lever: as before", 2, "steps", 15, "fsdp_full", "",
            (master("sdpa, mask", attention="sdpa"), master("documents")), gib=50,
        ),
        Case(
            "lever: segments that cannot grow", 2, "steps", 20, BEST, settings=(setting("fixed segments"),),
            environment=segments, gib=40,
        ),
    ]  # fmt: skip


def depth() -> list[Case]:
    """Part 3: whole models. In front what the goals ask for; what a smaller device holds in their place is named."""

    def today(layers: int, **args: Any) -> tuple[Setting, ...]:
        masked = Setting("packed", layers=layers, attention="sdpa", documents="c4", micro_batches=(1, 8), args=args)
        return masked._replace(is_profiled=True), masked._replace(name="one document a row", documents="one")

    def ours(model: str, layers: int) -> tuple[Setting, ...]:
        one = Setting("one document a row", model, layers, micro_batches=(1, 8), args=KAHAN)
        return one._replace(name="packed", documents="c4", is_profiled=True), one._replace(searches_rows=True)

    def adapters(name: str, **args: Any) -> tuple[Setting, ...]:
        return (Setting(name, "8B", rows=2, micro_batches=(4,), args=LORA | args),)

    def fp8(model: str, layers: int) -> tuple[Setting, ...]:
        return (Setting("one document a row", model, layers, micro_batches=(1, 8), args=KAHAN),)

    torchao = {"config": FP8, "package": "torchao"}
    staging = Setting("8 layers", layers=8, args=KAHAN)
    turns = Setting("8 layers, whole logits", layers=8, attention="sdpa", micro_batches=(4,), whole_logits=True)
    return [
        Case("staging", 3, "staging", 20, launch=FP32, settings=(staging,), gib=25),
        Case("7B: best", 3, "steps", 110, config=BEST, settings=ours("7B", 32), gib=84),
        Case("7B, 24 of 32 layers: best", 3, "steps", 90, config=BEST, settings=ours("7B", 24), gib=60, below_gib=100),
        Case("8B: best", 3, "steps", 110, config=BEST, settings=ours("8B", 32), gib=95),
        Case("8B, 24 of 32 layers: best", 3, "steps", 90, config=BEST, settings=ours("8B", 24), gib=72, below_gib=100),
        Case("8B: LoRA", 3, "steps", 50, launch=REGIONAL, settings=adapters("LoRA, r 16"), gib=50),
        Case("7B: as before", 3, "steps", 45, "fsdp_full", settings=today(32), gib=130),
        Case("7B, 16 of 32 layers: as before", 3, "steps", 40, "fsdp_full", settings=today(16), gib=70, below_gib=130),
        Case(
            "7B, 24 of 32 layers: as before, Kahan", 3, "steps", 40, "fsdp_full", FP32, today(24, **KAHAN), gib=74,
            below_gib=130,
        ),
        Case("Trainer", 3, "trainer_turns", 40, settings=(turns,), gib=50),
        Case("8B: fp8", 3, "steps", 60, settings=fp8("8B", 32), gib=95, **torchao),
        Case("7B: fp8", 3, "steps", 60, settings=fp8("7B", 32), gib=84, **torchao),
        Case("8B, 24 of 32 layers: fp8", 3, "steps", 60, settings=fp8("8B", 24), gib=72, below_gib=100, **torchao),
        Case("7B, 24 of 32 layers: fp8", 3, "steps", 60, settings=fp8("7B", 24), gib=60, below_gib=100, **torchao),
        Case("8B: DoRA", 3, "steps", 45, launch=REGIONAL, settings=adapters("DoRA, r 16", use_dora=True), gib=60),
        Case(
            "8B: QLoRA", 3, "steps", 90, settings=adapters("QLoRA, r 16", load_in_4bit=True), gib=50,
            package="bitsandbytes",
        ),
    ]  # fmt: skip


def memory() -> list[Case]:
    """Part 4: peaks of four layers of 7B that `gpu_predicted.py` predicts; nothing is compiled, which it cannot simulate."""

    def setting(name: str, **changes: Any) -> Setting:
        return Setting(name, layers=4, **changes)

    fsdp = (
        setting("one document a row"),
        setting("packed, with a mask", attention="sdpa", documents="c4"),
        setting("4 rows a pass", rows=4, documents="c4"),
        setting("whole logits", whole_logits=True),
    )
    recomputed, passes = "--fsdp_activation_checkpointing true", setting("4 passes", micro_batches=(4,))
    return [
        Case("memory: single", 4, "steps", 15, settings=(setting("autocast"),), gib=30),
        Case("memory: fsdp_full", 4, "steps", 40, "fsdp_full", settings=fsdp, gib=50),
        Case("memory: recomputation", 4, "steps", 15, "fsdp_full", recomputed, (setting("4 rows a pass", rows=4),), gib=40),
        Case("memory: fsdp_full, Kahan", 4, "steps", 15, "fsdp_full", FP32, (setting("Kahan", args=KAHAN),), gib=30),
        Case("memory: fsdp_grad_op", 4, "steps", 15, "fsdp_grad_op", settings=(passes,), gib=40),
        Case("memory: fsdp_offload", 4, "steps", 25, "fsdp_offload", settings=(setting("offloaded"),), gib=20),
    ]  # fmt: skip


CASES = {case.name: case for case in [*kernels(), *correctness(), *levers(), *depth(), *memory()]}
