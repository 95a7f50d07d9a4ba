"""Tests of the simulation: it equals real runs by the same ledger, to the byte, and its pretence of GPUs holds."""

import json
from dataclasses import asdict

import pytest
from helpers import CHILDREN, CONFIGS, ROOT, blocks, launch_ok
from tiny import tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import BartConfig, ConvNextConfig, PreTrainedTokenizerFast, SwinConfig

from accelerate_recipes.launch.settings import launch_environment
from accelerate_recipes.plan.simulate import Job, Simulator

SCRIPT = CHILDREN / "ledger_of_run.py"
# A Llama of two layers with grouped heads and sizes that do not divide.
SMALL = [
    "--config_overrides", "vocab_size=203", "hidden_size=48", "intermediate_size=100", "num_hidden_layers=2",
    "num_attention_heads=4", "num_key_value_heads=2", "max_position_embeddings=64", "--max_length", "40",
    "--max_steps", "1", "--total_batch_size", "8", "--per_device_train_batch_size", "2", "--attn_implementation", "sdpa",
]  # fmt: skip
C4 = [str(ROOT / "recipes/c4.py"), *SMALL]
EQUAL = ("peak", "at_peak", "flops", "recomputed", "collectives", "shapes")
# Operators that a real run calls otherwise: it reads all flags of a step at once, takes norms by one kernel for all gradients
# where they are plain tensors, and waits for the sum of the norm.
OTHERWISE = {
    "unbind", "wait_tensor", "_wrap_tensor_autograd", "mul_", "linalg_vector_norm", "_foreach_norm", "_foreach_mul_",
}  # fmt: skip
FP32, BF16 = ["--mixed_precision", "no"], ["--mixed_precision", "bf16"]
RECOMPUTE = ["--fsdp_activation_checkpointing", "true"]
HYBRID = ["--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2"]
MIXTRAL = ["--model_type", "mixtral", "--config_overrides", "intermediate_size=96"]
ADAFACTOR = ["--optim", "adafactor"]
KAHAN = ["--optim", "adamw_bf16_kahan"]
LORA = ["--model_name_or_path", "LLAMA", "--use_peft", "--lora_r", "4"]
# Other recipes; the name of a model follows.
STEP = ["--total_batch_size", "8", "--per_device_train_batch_size", "2"]
T5 = [
    str(ROOT / "recipes/t5.py"), "--max_source_length", "24", "--max_target_length", "14", *STEP,
    "--model_name_or_path",
]  # fmt: skip
TEXTS = str(ROOT / "data/en_fr/libreoffice.jsonl")  # any file: nothing is read
SFT = [str(ROOT / "recipes/sft.py"), "--max_length", "20", "--train_files", TEXTS, *STEP, "--model_name_or_path"]
DPO = [str(ROOT / "recipes/dpo.py"), *SFT[1:]]
CHESS_DPO = [str(ROOT / "recipes/chess_dpo.py"), "--max_length", "20", *STEP, "--model_name_or_path"]
GRPO = [
    str(ROOT / "recipes/grpo.py"), "--max_prompt_length", "11", "--max_completion_length", "9", "--num_generations", "4",
    "--rewards", "think_format_reward", "--train_files", TEXTS, *STEP, "--model_name_or_path",
]  # fmt: skip
CHESS_GRPO = [
    str(ROOT / "recipes/chess_grpo.py"), "--max_prompt_length", "11", "--num_generations", "4", *STEP, "--model_name_or_path",
]  # fmt: skip
VIT = [str(ROOT / "recipes/vit.py"), "--train_files", str(ROOT / "data/fashion/train.parquet"), *STEP]
DEEPVIT = [
    *VIT, "--from_scratch", "--config_overrides", "image_size=28", "patch_size=7", "hidden_size=48", "intermediate_size=100",
    "num_hidden_layers=2", "num_attention_heads=4",
]  # fmt: skip
TEMPLATE = ["TEMPLATE.py", "--max_length", "20", "--train_files", TEXTS, *STEP, "--model_name_or_path"]
LOOKUPS = 16  # bytes that a real mesh of two dimensions holds to find a rank's place in it


@pytest.fixture(scope="module")
def simulator():
    with Simulator() as simulator:
        yield simulator


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders with the configuration of a pretrained model, by their names: nothing else of it is read; and a recipe."""
    odd = {"vocab_size": 203, "hidden_size": 48, "intermediate_size": 100, "max_position_embeddings": 64}
    t5 = {"vocab_size": 203, "hidden_size": 48, "d_kv": 12, "d_ff": 100}
    gated = t5 | {"feed_forward_proj": "gated-gelu"}
    sides = {
        f"{side}_{name}": n
        for side in ("encoder", "decoder")
        for name, n in (("ffn_dim", 100), ("attention_heads", 4), ("layers", 2))
    }
    swin = {"image_size": 28, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 7}
    configs = {
        "LLAMA": tiny_config(**odd),
        "WIDE": tiny_config(**odd | {"hidden_size": 64, "max_position_embeddings": 72}),
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
    folder = tmp_path_factory.mktemp("bases")
    for name, config in configs.items():
        config.save_pretrained(folder / name)
    characters = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "?": 2}, unk_token="?"))  # of which a move has four or five
    characters.pre_tokenizer = Split("", "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "?"}
    PreTrainedTokenizerFast(tokenizer_object=characters, **special).save_pretrained(folder / "WIDE")
    for name in ("FLAN", "MT5"):  # as published; transformers would write true
        file = folder / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    # The template with the trial that its page shows.
    recipe, page = ((ROOT / name).read_text() for name in ("recipes/template.py", "docs/your-recipe.md"))
    (folder / TEMPLATE[0]).write_text(recipe.replace("def main(", f"{blocks(page)[-1]}\n\ndef main("))
    return folder


@pytest.mark.slow
def test_an_output_layer_of_its_own(simulator, bases):
    """An mT5 and a FLAN-T5 have an output layer beside the embedding, though transformers ties that of every T5."""
    names = ("T5", "FLAN", "MT5")
    found = simulator([job("single", command_of(bases, [*T5, name]), *FP32, num_processes=1) for name in names])
    tied, *others = (outcome.parameters for outcome in found)
    # Of a gated MLP there is one matrix more in each of the four layers.
    assert others == [tied + 203 * 48 + 4 * 48 * 100] * 2


def command_of(bases, variant: list[str]) -> list[str]:
    """Make a recipe's command of a variant: C4 with more arguments, or another recipe; models by their names in `bases`."""
    words = [*C4, *variant] if not variant or variant[0].startswith("--") else variant
    return [str(bases / word) if (bases / word).exists() else word for word in words]


def job(config: str, command: list[str], *flags: str, num_processes: int = 2, **changes) -> Job:
    argv = ["--config_file", str(CONFIGS / f"{config}.yaml"), "--num_processes", str(num_processes), *flags]
    return Job(launch_environment([*argv, "--main_process_ip", "head", *command]), command, **changes)


PACKED = ["--attn_implementation", "auto", "--whole_logits", "true", "--model_name_or_path"]
NEW_T5 = [
    *T5[:-1], "--train_files", TEXTS, "--from_scratch", "--config_overrides", "vocab_size=203", "d_model=48",
    "d_kv=48", "d_ff=100", "num_layers=2", "num_heads=4", "feed_forward_proj=gated-gelu",
]  # fmt: skip
CASES = [
    ("fsdp_full", FP32, 2, [[]]),
    pytest.param("fsdp_full", FP32, 2, [LORA, [*PACKED, "OPT"]], marks=pytest.mark.slow),
    pytest.param("fsdp_full", BF16, 2, [[*PACKED, "OPT"], [*PACKED, "GEMMA2"], NEW_T5], marks=pytest.mark.slow),
    pytest.param("fsdp_full", [*FP32, *RECOMPUTE], 2, [[*PACKED, "OPT"], [*PACKED, "GEMMA2"]], marks=pytest.mark.slow),
    pytest.param(
        "fsdp_full",
        FP32,
        2,
        [[*T5, "FLAN"], [*TEMPLATE, "BERT"], [*SFT, "LLAMA"], [*SFT, "TIED", "--packing"]],
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "fsdp_full",
        FP32,
        2,
        [
            DEEPVIT,
            [*DEEPVIT, "--model_type", "vit", "--mixup_alpha", "0.2", "--label_smoothing", "0.1"],
            [*VIT, "--model_name_or_path", "SWIN"],
            [*VIT, "--model_name_or_path", "CONVNEXT"],
        ],
        marks=pytest.mark.slow,
    ),
    pytest.param("fsdp_full", FP32, 2, [[*DPO, "LLAMA"], [*DPO[:-1], *LORA]], marks=pytest.mark.slow),
    pytest.param(
        "fsdp_full",
        BF16,
        2,
        [[*DPO, "TIED"], [*DPO[:-1], *LORA, "--lora_dropout", "0.1"], [*CHESS_DPO, "LLAMA"]],
        marks=pytest.mark.long,
    ),
    pytest.param(
        "fsdp_full",
        FP32,
        2,
        [[*GRPO, "LLAMA"], [*GRPO[:-1], *LORA, "--beta", "0.1", "--num_iterations", "2", "--loss_type", "grpo"]],
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "fsdp_grad_op",
        [*BF16, *RECOMPUTE],
        2,
        [[*GRPO, "TIED", "--top_p", "0.9"], [*GRPO, "LLAMA", "--max_completion_length", "1", "--entropy_coef", "0.1"]],
        marks=pytest.mark.long,
    ),
    pytest.param("fsdp_full", [*BF16, *RECOMPUTE], 2, [DEEPVIT], marks=pytest.mark.slow),
    pytest.param("fsdp_long", FP32, 2, [[], ["--attn_implementation", "auto"]], marks=pytest.mark.slow),
    pytest.param("fsdp_long", [*FP32, "--parallelism_config_dp_shard_size", "2"], 4, [[]], marks=pytest.mark.long),
    pytest.param("fsdp_full", FP32, 2, [KAHAN], marks=pytest.mark.slow),
    pytest.param("fsdp_grad_op", [*BF16, *RECOMPUTE], 2, [[]], marks=pytest.mark.long),
    pytest.param("fsdp_full", BF16, 2, [[], ["--whole_logits", "true"]], marks=pytest.mark.slow),
    pytest.param("fsdp_full", BF16, 2, [MIXTRAL, [*SFT, "MIXTRAL"], [*DPO, "MIXTRAL"]], marks=pytest.mark.slow),
    pytest.param("fsdp_full", [*BF16, *RECOMPUTE], 2, [[*T5, "T5"]], marks=pytest.mark.long),
    pytest.param("fsdp_full", [*FP32, *RECOMPUTE], 2, [ADAFACTOR, ["--no_document_mask"]], marks=pytest.mark.long),
    pytest.param("fsdp_hybrid", [*FP32, *HYBRID], 4, [[]], marks=pytest.mark.slow),
    pytest.param("single", FP32, 1, [[], KAHAN, LORA], marks=pytest.mark.slow),
    pytest.param("single", BF16, 1, [[], LORA], marks=pytest.mark.long),
]


@pytest.mark.parametrize(
    "config, more",
    [
        ("fsdp_full", LORA),
        *(pytest.param(name, [], marks=pytest.mark.slow) for name in ("fsdp_grad_op", "fsdp_offload")),
    ],
)
def test_micro_batches_follow_from_two(simulator, bases, config, more):
    """What a step of five micro-batches computes and sends follows from two."""
    command = [*command_of(bases, more), "--total_batch_size", "20", "--per_device_train_batch_size", "2"]
    jobs = [job(config, command, *BF16, micro_batches=number) for number in (2, 5)]
    found, whole = simulator(jobs)
    assert found.micro_batches == whole.micro_batches == 5
    for name in ("flops", "recomputed", "collectives"):
        assert getattr(found, name) == getattr(whole, name), name
    for name in ("compute", "memory", "communication"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-3), name
    # What hides the gathers of the second micro-batch is not yet quite what hides those of later ones.
    assert found.seconds == pytest.approx(whole.seconds, rel=2e-3)


@pytest.mark.parametrize("config, flags, num_processes, variants", CASES)
def test_simulated_equals_real(forks, simulator, bases, tmp_path, config, flags, num_processes, variants):
    """Peak with its kinds, FLOPs, collectives, shapes and calls are those that the same ledger sees in a real run."""
    out, commands = tmp_path / "out", [command_of(bases, variant) for variant in variants]
    argv = ("--trials", json.dumps(commands))
    if num_processes == 1:  # forks are always ranks
        launch_ok(tmp_path, config, SCRIPT, "--output_dir", out, *argv, flags=flags)
    else:
        forks.succeed(out, *argv, config=config, flags=flags, num_processes=num_processes)
    jobs = [
        job(config, command, *flags, num_processes=num_processes, device="cpu", micro_batches=8) for command in commands
    ]
    reals = json.loads((out / "ledger.json").read_text())
    for command, simulated, real in zip(commands, simulator(jobs), reals, strict=True):
        simulated = json.loads(json.dumps(asdict(simulated)))
        if num_processes == 4:  # the mesh has two dimensions, and a rank looks for its place in it
            real["peak"] -= LOOKUPS
            real["at_peak"]["activations"] -= LOOKUPS
            real["shapes"] = [shape for shape in real["shapes"] if shape not in ([1, 2], [2, 2])]
        elif command[0] == C4[0]:  # others have padding, and a real run asks whether there is any
            calls = [{k: n for k, n in of["calls"].items() if k not in OTHERWISE} for of in (simulated, real)]
            assert calls[0] == calls[1]
            # Flags of a real step are copied once; fakes are read one by one.
            assert simulated["value_reads"] - real["value_reads"] in (4, 6)
        if command[-1].endswith("SWIN"):  # fakes copy at some places what a real run views
            allowed = 0.01 * real["peak"]
            assert real["peak"] <= simulated["peak"] < real["peak"] + allowed
            assert simulated["at_peak"] == pytest.approx(real["at_peak"], rel=0, abs=allowed)
            real |= {name: simulated[name] for name in ("peak", "at_peak")}
        if (
            command[0] == GRPO[0]
        ):  # of a pass for one token, a fake has other strides, and is multiplied by another operator
            simulated["shapes"] = [shape for shape in simulated["shapes"] if shape != [4, 48, 48]]
        for name in EQUAL:
            assert simulated[name] == real[name], name
