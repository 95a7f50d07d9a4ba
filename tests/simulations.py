"""Commands that are simulated, and the bases that they name."""

import json
from pathlib import Path

from helpers import CHILDREN, CONFIGS, ROOT, blocks, change_json
from tiny import tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import BartConfig, ConvNextConfig, PreTrainedTokenizerFast, SwinConfig

from recipe_tools.plan.simulate import Job, Outcome
from recipe_tools.request import launch_environment

# A Llama of two layers with grouped heads and sizes that do not divide.
SMALL = [
    "--config_overrides", "vocab_size=203", "hidden_size=48", "intermediate_size=100", "num_hidden_layers=2",
    "num_attention_heads=4", "num_key_value_heads=2", "max_position_embeddings=64", "--max_length", "40",
    "--max_steps", "1", "--total_batch_size", "8", "--per_device_train_batch_size", "2", "--attn_implementation", "sdpa",
]  # fmt: skip


C4 = [str(ROOT / "recipes/c4.py"), *SMALL]


FP32, BF16 = ["--mixed_precision", "no"], ["--mixed_precision", "bf16"]


RECOMPUTE = ["--fsdp_activation_checkpointing", "true"]


# Other recipes; the name of a model follows.
STEP = ["--total_batch_size", "8", "--per_device_train_batch_size", "2"]


T5 = [
    str(ROOT / "recipes/t5.py"), "--max_source_length", "24", "--max_target_length", "14", *STEP,
    "--model_name_or_path",
]  # fmt: skip


TEXTS = str(ROOT / "data/en_fr/libreoffice.jsonl")  # any file: nothing is read


SFT = [str(ROOT / "recipes/sft.py"), "--max_length", "20", "--train_files", TEXTS, *STEP, "--model_name_or_path"]


DPO = [str(ROOT / "recipes/dpo.py"), *SFT[1:]]


GRPO = [
    str(ROOT / "recipes/grpo.py"), "--max_prompt_length", "11", "--max_completion_length", "9", "--num_generations", "4",
    "--rewards", "think_format_reward", "--train_files", TEXTS, *STEP, "--model_name_or_path",
]  # fmt: skip


DISTILL = [
    str(ROOT / "recipes/distill.py"), *SFT[1:-1], "--teacher_model_name_or_path", "QWEN3", "--max_completion_length", "9",
    "--per_device_eval_batch_size", "3", "--model_name_or_path",
]  # fmt: skip


VIT = [str(ROOT / "recipes/vit.py"), "--train_files", str(ROOT / "data/fashion/train.parquet"), *STEP]


DEEPVIT = [
    *VIT, "--from_scratch", "--config_overrides", "image_size=28", "patch_size=7", "hidden_size=48", "intermediate_size=100",
    "num_hidden_layers=2", "num_attention_heads=4",
]  # fmt: skip


TEMPLATE = ["TEMPLATE.py", "--max_length", "20", "--train_files", TEXTS, *STEP, "--model_name_or_path"]


def save_bases(folder: Path) -> Path:
    """Save folders with the configuration of a pretrained model, by their names: nothing else of it is read; and a recipe."""
    odd = {"vocab_size": 203, "hidden_size": 48, "intermediate_size": 100, "max_position_embeddings": 64}
    t5 = {"vocab_size": 203, "hidden_size": 48, "d_kv": 12, "d_ff": 100}
    gated = t5 | {"feed_forward_proj": "gated-gelu"}
    sizes = {"ffn_dim": 100, "attention_heads": 4, "layers": 2}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in sizes.items()}
    swin = {"image_size": 28, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 7}
    configs = {
        "LLAMA": tiny_config(**odd),
        "WIDE": tiny_config(**odd | {"hidden_size": 64, "max_position_embeddings": 72}),
        "QWEN3": tiny_config("qwen3", **odd | {"hidden_size": 64}, head_dim=16),
        "TALL": tiny_config(**odd, num_hidden_layers=13),
        "MIXTRAL": tiny_config(
            "mixtral", **odd | {"intermediate_size": 96}
        ),  # kernels of experts take multiples of 16 bytes
        "TIED": tiny_config(**odd, tie_word_embeddings=True),
        "OPT": tiny_config("opt", **odd, ffn_dim=100, word_embed_proj_dim=48, dropout=0.0),
        "GEMMA2": tiny_config("gemma2", **odd, head_dim=12),
        "T5": tiny_config("t5", **t5),
        "FLAN": tiny_config("t5", **gated, tie_word_embeddings=False),
        "MT5": tiny_config("mt5", **gated),
        "DEEP": tiny_config("t5", **t5, num_hidden_layers=12),
        "BART": BartConfig(vocab_size=203, d_model=48, max_position_embeddings=64, **sides),
        "SWIN": SwinConfig(**swin, drop_path_rate=0.0),
        "CONVNEXT": ConvNextConfig(image_size=32, hidden_sizes=[16, 32], depths=[1, 2], num_stages=2),
        "BERT": tiny_config("bert", **odd),
    }
    for name, config in configs.items():
        config.save_pretrained(folder / name)
    characters = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "?": 2}, unk_token="?"))  # of which a move has four or five
    characters.pre_tokenizer = Split("", "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "?"}
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(folder / "WIDE")
    for name in ("FLAN", "MT5"):  # as published; transformers would write true
        change_json(folder / name / "config.json", tie_word_embeddings=False)
    # The template with the trial that its page shows.
    recipe, page = ((ROOT / name).read_text() for name in ("recipes/template.py", "docs/your-recipe.md"))
    (folder / TEMPLATE[0]).write_text(recipe.replace("def main(", f"{blocks(page)[-1]}\n\ndef main("))
    return folder


def command_of(bases: Path, variant: list[str]) -> list[str]:
    """Make a recipe's command of a variant: C4 with more arguments, or another recipe; models by their names in `bases`."""
    words = [*C4, *variant] if not variant or variant[0].startswith("--") else variant
    return [str(bases / word) if (bases / word).exists() else word for word in words]


def job(config: str, command: list[str], *flags: str, num_processes: int = 2, **changes) -> Job:
    argv = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(num_processes), *flags]
    return Job(launch_environment([*argv, "--main_process_ip", "head", *command]), command, **changes)


def real_and_simulated(
    forks, simulator, out: Path, name: str, args: list[str], *more: object, flags: list[str], micro_batches: int
) -> tuple[dict, Outcome]:
    """Run a recipe on trl under the ledger, and simulate a step of it; return both, with equal FLOPs and gradients."""
    script = CHILDREN / "ledger_of_trl.py"
    forks.succeed(out, *args, *more, "--heldout_share", 0.2, script=script, flags=flags, RECIPE=name)
    real = json.loads((out / "ledger.json").read_text())
    command = [str(ROOT / f"recipes/{name}.py"), *args]
    (simulated,) = simulator([job("fsdp_full", command, *flags, device="cpu", micro_batches=micro_batches)])
    scattered = "reduce_scatter_base 2"
    assert real["flops"] == simulated.flops
    assert real["collectives"][scattered] == simulated.collectives[scattered]
    return real, simulated
