"""Table of models, docs/models.md: what works for a tiny random model of each architecture, made from its own configuration.

    make models

runs all cells and writes the page and benchmarks/results/models.json. A cell is `works`, a refusal in words, or `not run`.
A cell that fails, or is refused unexpectedly, or no longer refused, makes the command fail, and nothing is written.
"""

import itertools
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS / "children"), str(TESTS.parent / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import toy  # noqa: E402
import transformers  # noqa: E402
from any_model import NEW_TOKENS, PROMPTS  # noqa: E402
from datasets import Dataset  # noqa: E402
from helpers import CHILDREN, IMPORTS, REPOSITORY, ForkServer, change_json, evaluations, read_metrics  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tiny import change_weights, composite_config  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402

from accelerate_recipes.arguments.adapters import ALL_LINEAR  # noqa: E402
from accelerate_recipes.errors import ConfigError  # noqa: E402
from accelerate_recipes.losses import (  # noqa: E402
    count_labels,
    count_next_tokens,
    next_token_loss,
    next_token_loss_without_logits,
    sequence_to_sequence_loss,
)
from accelerate_recipes.models.adapters import load_settings  # noqa: E402
from accelerate_recipes.models.attention import choose  # noqa: E402
from accelerate_recipes.models.loading import load_model  # noqa: E402
from accelerate_recipes.models.mixers import unpack_documents  # noqa: E402
from accelerate_recipes.models.probes import Packing, check_packing, mixers_in, packing_of  # noqa: E402
from accelerate_recipes.models.tokenizers import load_tokenizer  # noqa: E402
from accelerate_recipes.models.weights import linear_layers_and_experts  # noqa: E402
from accelerate_recipes.text.text_pairs import Pairs  # noqa: E402

PAGE = REPOSITORY / "docs/models.md"
RESULT = REPOSITORY / "benchmarks/results/models.json"
WORKS, NOT_RUN = "works", "not run"

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,
}  # fmt: skip
MIXED, LINEAR = ["sliding_attention", "full_attention"], ["linear_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2}  # they are balanced with the weight of their class
WITHOUT_MLP = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
DELTA = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": LINEAR,
}  # fmt: skip
SHARED_EXPERT = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **EXPERTS}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
MAMBA = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
# The last word of a name is the model type where it says more.
ARCHITECTURES: dict[str, transformers.PreTrainedConfig] = {
    "Llama 2": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "Llama 3": transformers.LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "Qwen2.5": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "Qwen3": transformers.Qwen3Config(head_dim=8, **SIZES),
    "Qwen3-MoE": transformers.Qwen3MoeConfig(head_dim=8, num_experts=4, moe_intermediate_size=16, **EXPERTS, **SIZES),
    "Mistral": transformers.MistralConfig(sliding_window=8, **SIZES),
    "Mixtral": transformers.MixtralConfig(num_local_experts=4, **EXPERTS, **SIZES),
    "Gemma 2": transformers.Gemma2Config(head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=MIXED, **SIZES),
    "Gemma 3": transformers.Gemma3TextConfig(head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=MIXED, **SIZES),
    "Phi-3": transformers.Phi3Config(**SIZES),
    "OLMo 2": transformers.Olmo2Config(**SIZES),
    "GPT-2": transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=100, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    ),
    "GPT-OSS": transformers.GptOssConfig(head_dim=8, num_local_experts=4, sliding_window=8, layer_types=MIXED, **EXPERTS, **SIZES),
    "DeepSeek V3": transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1, n_shared_experts=1,
    ),
    "SmolLM3": transformers.SmolLM3Config(no_rope_layer_interval=2, **SIZES),
    "Llama 4": transformers.Llama4TextConfig(
        head_dim=8, num_local_experts=4, attention_chunk_size=8, intermediate_size_mlp=48, no_rope_layers=[1, 0],
        **SIZES, **EXPERTS | {"num_experts_per_tok": 1},
    ),
    "GLM 4.5 MoE": transformers.Glm4MoeConfig(
        head_dim=8, moe_intermediate_size=16, n_routed_experts=4, n_group=2, num_experts_per_tok=2, **SIZES
    ),
    "Ministral 3": transformers.Ministral3Config(head_dim=8, **SIZES),
    "OLMo 3": transformers.Olmo3Config(sliding_window=8, layer_types=MIXED, **SIZES),
    "Phi-4": transformers.Phi3Config(**SIZES | {"num_key_value_heads": 4}, partial_rotary_factor=0.75),
    "Seed-OSS": transformers.SeedOssConfig(head_dim=8, attention_dropout=0.0, residual_dropout=0.0, **SIZES),
    "ERNIE 4.5": transformers.Ernie4_5Config(head_dim=8, **SIZES),
    "Granite": transformers.GraniteConfig(
        embedding_multiplier=2.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.3, **SIZES
    ),
    # Hybrids: attention in some layers, and in others a state.
    "Qwen3-Next": transformers.Qwen3NextConfig(**DELTA, **SHARED_EXPERT, **SIZES),
    "Qwen3.5": transformers.Qwen3_5TextConfig(**DELTA, **SIZES),
    "Qwen3.5-MoE": transformers.Qwen3_5MoeTextConfig(**DELTA, **SHARED_EXPERT, **WITHOUT_MLP),
    "Kimi-Linear": transformers.KimiLinearConfig(
        **SIZES | {"num_key_value_heads": 4}, moe_intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, linear_head_dim=8, linear_num_heads=4,
        layer_types=LINEAR,
    ),
    "LFM2": transformers.Lfm2Config(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, **SIZES),
    "LFM2-MoE": transformers.Lfm2MoeConfig(
        layer_types=["conv", "full_attention"], num_dense_layers=1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, **SIZES,
    ),
    "Granite 4": transformers.GraniteMoeHybridConfig(
        num_local_experts=4, shared_intermediate_size=16, layer_types=LINEAR, **MAMBA_2, **EXPERTS, **SIZES
    ),
    "Nemotron-H": transformers.NemotronHConfig(
        **SIZES | {"num_hidden_layers": 4}, layers_block_type=["linear_attention", "mlp", "full_attention", "moe"], head_dim=8,
        ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2, chunk_size=8, n_routed_experts=4,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, num_experts_per_tok=2,
    ),
    "Falcon-H1": transformers.FalconH1Config(mamba_d_ssm=64, lm_head_multiplier=0.5, **MAMBA_2, **SIZES),
    "Bamba": transformers.BambaConfig(attn_layer_indices=[1], **MAMBA_2, **SIZES),
    "Jamba": transformers.JambaConfig(attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_d_state=8, **EXPERTS, **SIZES),
    "Zamba2": transformers.Zamba2Config(
        layers_block_type=["linear_attention", "hybrid"], mamba_d_state=8, n_mamba_heads=8, chunk_size=8,
        **SIZES | {"num_key_value_heads": 4},
    ),
    "OLMo-Hybrid": transformers.OlmoHybridConfig(**DELTA, **SIZES),
    "MiniMax": transformers.MiniMaxConfig(head_dim=8, num_local_experts=4, block_size=4, layer_types=LINEAR, **EXPERTS, **SIZES),
    "Mamba": transformers.MambaConfig(**MAMBA),
    "Mamba 2": transformers.Mamba2Config(num_heads=8, head_dim=8, n_groups=1, chunk_size=8, **MAMBA),
    "Falcon-Mamba": transformers.FalconMambaConfig(**MAMBA),
}  # fmt: skip
T5_SIZES = {
    "vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
ENCODER_DECODERS: dict[str, transformers.PreTrainedConfig] = {
    "T5": transformers.T5Config(**T5_SIZES),
    "FLAN-T5": transformers.T5Config(**T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False),  # T5 v1.1 is the same
    "mT5": transformers.MT5Config(**T5_SIZES),
    "BART": transformers.BartConfig(
        vocab_size=100, d_model=32, max_position_embeddings=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, init_std=0.1, scale_embedding=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    ),
}  # fmt: skip
ARCHITECTURES |= ENCODER_DECODERS
# Models that also see images: their text part is trained.
COMPOSITES: dict[str, transformers.PreTrainedConfig] = {
    f"{name}, composite": composite_config(model_type, 110)
    for name, model_type in {
        "Gemma 3": "gemma3", "Gemma 4": "gemma4", "Llama 4": "llama4", "Mistral 3": "mistral3", "Qwen3-VL": "qwen3_vl",
        "Qwen3.5": "qwen3_5", "Qwen3.5-MoE": "qwen3_5_moe",
    }.items()
}  # fmt: skip
for whole in COMPOSITES.values():
    text = whole.get_text_config()
    text.pad_token_id, text.bos_token_id, text.eos_token_id = 0, 1, 2
ROWS = ARCHITECTURES | COMPOSITES
SIDES = ("source", "target")  # of a pair
# As published: an output layer beside the embedding, of which the configuration says nothing
UNTIED = ("FLAN-T5", "mT5")

# What is refused, and how the message begins; any other refusal is a fault, and so is one of these that no longer comes.
NO_POSITIONS = r"\w+ models do not see from the positions"
EXPERTS_4_BITS = r"--use_peft: \w+ keeps the experts .* --load_in_4bit"
REFUSED = {(name, "packed by trl"): NO_POSITIONS for name in ("GPT-OSS", "Granite 4")}
REFUSED |= {
    ("Gemma 2", "loss without logits"): r"without whole logits, the loss of a tiny gemma2 is ",
    ("Granite", "loss without logits"): r"without whole logits, the loss of a tiny granite is ",
    ("Falcon-H1", "loss without logits"): r"without whole logits, the loss of a tiny falcon_h1 is ",
    ("GPT-2", "LoRA"): r"--use_peft: GPT2LMHeadModel has no layers",
}
REFUSED |= {
    (name, "4 bits, on a CPU"): EXPERTS_4_BITS
    for name in (
        "Qwen3-MoE", "Mixtral", "GPT-OSS", "DeepSeek V3", "Llama 4", "GLM 4.5 MoE", "Qwen3-Next", "Qwen3.5-MoE", "Kimi-Linear",
        "LFM2-MoE", "Granite 4", "Nemotron-H", "MiniMax", "Llama 4, composite", "Qwen3.5-MoE, composite",
    )
}  # fmt: skip
DT_PROJ = r"--use_peft: \w+ computes with the weights of .*dt_proj.* itself"
REFUSED |= {(name, "4 bits, on a CPU"): DT_PROJ for name in ("Jamba", "Mamba", "Falcon-Mamba")}
REFUSED |= {(name, "packed by trl"): r"it is a \w+, which has an encoder; .*recipes/t5.py" for name in ENCODER_DECODERS}
STEPS = 4
TRAIN = (
    "--max_steps", STEPS, "--save_steps", 2, "--async_save", "false", "--logging_steps", 1, "--total_batch_size", 8,
    "--per_device_train_batch_size", 4,  # also on one rank: the loss that balances experts depends on the division
)  # fmt: skip
LORA = ("--use_peft", "--lora_r", 3, "--lora_dropout", 0, "--learning_rate", 3e-2)
SINGLE = {"config": "single", "num_processes": 1}
RECOMPUTED = {"FSDP_ACTIVATION_CHECKPOINTING": "true"}


class Refused(Exception):
    """A run or a check that ended with a message to the user."""


def first_line(error: object) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()


def beside(net: transformers.PreTrainedModel, adapter: Path, merged: bool) -> transformers.PreTrainedModel:
    """Put an adapter into a model by PEFT; with `merged`, add it to the weights."""
    from peft import PeftModel

    wrapped = PeftModel.from_pretrained(net, str(adapter))
    return wrapped.merge_and_unload() if merged else wrapped.get_base_model()


class Model:
    """Tiny model of an architecture in a folder, and the runs that its cells share; each run is made once."""

    auto_class = transformers.AutoModelForCausalLM
    script, flags, lora = CHILDREN / "any_model.py", (), LORA
    killed_at = ("any_model.loss", f"pass {STEPS}.", 1)

    def __init__(self, name: str, folder: Path, server: ForkServer | None):
        self.name, self.server = name, server
        self.folder = folder / re.sub(r"\W", "_", name)
        self.base = self.folder / "base"
        torch.manual_seed(0)
        config = ROWS[name]
        self.attention, _ = choose("auto", config.get_text_config(), torch.float32, True)
        model = self.auto_class.from_config(config, attn_implementation=self.attention)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and not buffer.any():
                buffer.uniform_(-0.1, 0.1)  # any rank would have zeros
        model.save_pretrained(self.base)
        self.tokenizer = toy.make_model(toy.Args())[1]
        self.tokenizer.save_pretrained(self.base)
        self.done: dict[str, Path] = {}

    def load(self, folder: Path | None = None, **settings: object) -> transformers.PreTrainedModel:
        model = load_model(str(folder or self.base), "auto", **settings).eval()
        unpack_documents(model, mixers_in(model))  # as a run does
        return model

    def with_adapter(self, adapter: Path, merged: bool = False, **settings: object) -> transformers.PreTrainedModel:
        """Load the base, and an exported adapter beside it by PEFT; returns what computes the logits of a text."""
        return beside(self.load(**settings), adapter, merged)

    @torch.no_grad()
    def loss_of(self, net: transformers.PreTrainedModel) -> float:
        """Compute a model's loss on the rows on which the runs evaluate."""
        batch = toy.batch_of(16)
        return (next_token_loss(net.eval(), batch) / count_next_tokens(batch)).item()

    def texts_of(self, net: transformers.PreTrainedModel) -> list[str]:
        """Generate greedily from each prompt alone; texts are decoded as a run does it, which may be by another class."""
        texts, tokenizer = [], load_tokenizer(str(self.base))
        for prompt in PROMPTS:
            ids = net.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=2)
            texts.append(tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True))
        return texts

    def texts_in(self, out: Path) -> list[str]:
        """Read what a run has generated at its end."""
        return json.loads((out / "texts.json").read_text())

    def run(self, name: str, *args: object, fault: dict | None = None, **options: object) -> Path:
        """Train in forked ranks; returns the output directory.

        Raises:
            Refused: with the message of a run that says why it cannot start.
        """
        if name in self.done:
            return self.done[name]
        out = self.folder / name
        command = ("--model_name_or_path", self.base, *TRAIN, *self.flags, *args)
        env = {"TOY_FAULT": json.dumps(fault)} if fault else {}
        code = self.server.run(out, *command, script=self.script, **options, **env)
        log = out.with_suffix(".log").read_text()
        if code == 2 and (said := re.search(r"^error: (.*)", log, re.MULTILINE)):
            raise Refused(said[1])
        assert code == (-9 if fault else 0), log[-3000:]
        if not fault:
            self.done[name] = out
        return out

    @property
    def single(self) -> Path:
        return self.run("single", **SINGLE)

    @property
    def sharded(self) -> Path:
        return self.run("fsdp2")


class Composite(Model):
    """Tiny model that also sees images, of which the text part is trained. An adapter of it is one of the whole."""

    auto_class = transformers.AutoModelForImageTextToText
    # With larger steps, the last bits in which two strategies differ soon reach the fifth digit.
    lora = (*LORA, "--learning_rate", 1e-2)

    def with_adapter(self, adapter: Path, merged: bool = False, **settings: object) -> transformers.PreTrainedModel:
        whole = self.auto_class.from_pretrained(self.base, attn_implementation=self.attention, **settings)
        whole, net = beside(whole, adapter, merged), self.load()
        whole_texts = [module for module in whole.modules() if type(module) is type(net)]
        if whole_texts:
            (net,) = whole_texts
        else:
            setattr(net, net.base_model_prefix, whole.get_decoder())
            net.set_output_embeddings(whole.get_output_embeddings())
        unpack_documents(net, mixers_in(net))
        return net.eval()


class EncoderDecoder(Model):
    """Tiny encoder-decoder, trained by recipes/t5.py on pairs of its own, of ragged lengths."""

    auto_class = transformers.AutoModelForSeq2SeqLM
    script = REPOSITORY / "recipes/t5.py"
    killed_at = ("open", "/killed/metrics.jsonl", 7)

    def __init__(self, name: str, folder: Path, server: ForkServer | None):
        super().__init__(name, folder, server)
        around = "<s> $A </s>" if name == "BART" else "$A </s>"
        marks = TemplateProcessing(single=around, special_tokens=[("<s>", 1), ("</s>", 2)])
        self.tokenizer._tokenizer.post_processor = marks
        self.tokenizer.save_pretrained(self.base)
        if name == "T5":  # its texts begin with the padding, which a tied output layer would repeat
            change_weights(
                self.base, lambda w: w | {"shared.weight": w["shared.weight"].index_fill(0, torch.tensor([0]), 0)}
            )
        if name in UNTIED:
            change_weights(self.base, lambda w: w | {"lm_head.weight": w["shared.weight"].flip(0)})
            change_json(self.base / "config.json", tie_word_embeddings=False)
        generator, self.pairs = np.random.default_rng(0), {}
        for part, num_pairs in {"train": 24, "eval": 5}.items():
            lengths = generator.integers((1, 4), 9, size=(num_pairs, 2)).tolist()
            # There are two words to write, and an end is rare, so that a model soon writes some before it ends.
            words = [(generator.integers(0, 96, size=n), generator.integers(0, 2, size=m)) for n, m in lengths]
            texts = [
                {side: " ".join(f"w{i}" for i in some) for side, some in zip(SIDES, pair, strict=True)}
                for pair in words
            ]
            (self.folder / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in texts))
            ids = {side: [self.tokenizer(pair[side])["input_ids"] for pair in texts] for side in SIDES}
            self.pairs[part] = Pairs(Dataset.from_dict({f"{side}_ids": rows for side, rows in ids.items()}), 0)
        self.flags = (
            "--train_files", self.folder / "train.jsonl", "--eval_files", self.folder / "eval.jsonl", "--source_column",
            "source", "--target_column", "target", "--task_prefix", "", "--data_cache_dir", self.folder / "cache",
            "--max_source_length", 16, "--max_target_length", 16, "--dropout_rate", 0, "--per_device_eval_batch_size", 2,
            "--learning_rate", 1e-2, "--warmup_steps", 2,
        )  # fmt: skip

    def load(self, folder: Path | None = None, **settings: object) -> transformers.PreTrainedModel:
        return transformers.AutoModelForSeq2SeqLM.from_pretrained(folder or self.base, **settings).eval()

    def alone(self, part: str) -> list[dict[str, torch.Tensor]]:
        """Return each pair of a part as a batch of its own, without padding."""
        batches = [self.pairs[part].collate([pair]) for pair in self.pairs[part]]
        for batch in batches:
            source, target = batch["attention_mask"].sum(), count_labels(batch)
            batch |= {name: batch[name][:, :source] for name in ("input_ids", "attention_mask")}
            batch["labels"] = batch["labels"][:, :target]
        return batches

    @torch.no_grad()
    def loss_of(self, net: transformers.PreTrainedModel) -> float:
        batches = self.alone("eval")
        total = sum(sequence_to_sequence_loss(net.eval(), batch) for batch in batches)
        return (total / sum(map(count_labels, batches))).item()

    def texts_of(self, net: transformers.PreTrainedModel) -> list[str]:
        tokens = [net.generate(input_ids=batch["input_ids"], max_new_tokens=16) for batch in self.alone("eval")]
        return [self.tokenizer.decode(ids[0], skip_special_tokens=True) for ids in tokens]

    def texts_in(self, out: Path) -> list[str]:
        lines = (out / f"predictions/step-{STEPS}.jsonl").read_text().splitlines()
        return [json.loads(line)["prediction"] for line in lines]


def make(name: str, folder: Path, server: ForkServer | None) -> Model:
    """Make the tiny model of an architecture."""
    kind = EncoderDecoder if name in ENCODER_DECODERS else Composite if name in COMPOSITES else Model
    return kind(name, folder, server)


def trajectory(out: Path) -> list[tuple[float, float]]:
    found = [(record["loss"], record["grad_norm"]) for record in read_metrics(out) if "loss" in record]
    assert len(found) == STEPS and found[-1][0] < found[0][0] - 0.05, f"the model does not learn: {found}"
    return found


def agree(found: object, wanted: object, tolerance: float, what: str = "values") -> None:
    """Compare numbers, or tensors by their largest difference, relative to the largest value."""
    found, wanted = (torch.as_tensor(values, dtype=torch.float64) for values in (found, wanted))
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    difference = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)
    assert difference <= tolerance, f"{what} differ by {difference:.2e}, which is more than {tolerance}"


Gradients = tuple[float, dict[str, torch.Tensor]]


def gradients(model: transformers.PreTrainedModel, losses: Sequence[torch.Tensor]) -> Gradients:
    model.zero_grad()
    loss = torch.stack(list(losses)).sum()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare_gradients(found: Gradients, wanted: Gradients, tolerance: float = 1e-5) -> None:
    """Compare losses, and gradients by name, relative to the largest gradient."""
    agree(found[0], wanted[0], tolerance, "losses")
    assert found[1].keys() == wanted[1].keys() and wanted[1]
    largest = max(gradient.abs().max() for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        difference = (found[1][name] - gradient).abs().max() / largest
        assert difference <= tolerance, f"the gradient of {name} differs by {difference:.2e} of the largest"


def documents_alone(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return each document of packed rows as a batch of its own."""
    documents = []
    for row, places in enumerate(batch["position_ids"]):
        starts = [*(places == 0).nonzero().flatten().tolist(), len(places)]
        for start, end in itertools.pairwise(starts):
            names = ("input_ids", "position_ids", "labels")
            documents.append({name: batch[name][row : row + 1, start:end] for name in names})
    return documents


def packed_as_unpacked(model: Model) -> str | None:
    """Loss and gradients of packed rows are those of each document alone, to 1e-5."""
    if isinstance(model, EncoderDecoder):
        return padded_as_alone(model)
    net, batch = model.load(), toy.batch_of(3)
    check_packing(net.config)
    packed = gradients(net, [next_token_loss(net, batch)])
    documents = documents_alone(batch)
    assert len(documents) > 2 * len(batch["input_ids"])
    alone = []
    for document in documents:
        labels = document.pop("labels")
        logits = net(**document, use_cache=False).logits.float()
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        alone.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))
    unpacked = gradients(net, alone)
    compare_gradients(packed, unpacked)


def padded_as_alone(model: EncoderDecoder) -> str:
    """Compare loss and gradients of a padded batch with those of its pairs alone; returns what holds instead of packing."""
    net, pairs = model.load(), model.pairs["train"]
    batch = pairs.collate([*pairs, pairs[-1]])
    assert len(set(batch["attention_mask"].sum(1).tolist())) > 3
    padded = gradients(net, [sequence_to_sequence_loss(net, batch)])
    alone = gradients(net, [sequence_to_sequence_loss(net, one) for one in model.alone("train")])
    compare_gradients(padded, alone)
    return "not packed: recipes/t5.py pads pairs of similar length, with the loss and the gradients of each pair alone, to 1e-5"


def loss_without_logits(model: Model) -> str | None:
    """Loss and gradients are those of whole logits, to 1e-5."""
    if isinstance(model, EncoderDecoder):
        return "not offered: recipes/t5.py computes whole logits"
    net, batch = model.load(), toy.batch_of(3)
    found = gradients(net, [next_token_loss_without_logits(net, batch)])
    wanted = gradients(net, [next_token_loss(net, batch)])
    compare_gradients(found, wanted)


def packing_by_trl(model: Model) -> None:
    """Logits of rows that trl packs are those of each document alone, to 1e-5."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from accelerate_recipes.conversations.settings import check_trl_packing

    net = Model.load(model)
    check_trl_packing(SimpleNamespace(has_boundaries=True, router_aux_loss_coef=None), net)
    documents = [list(range(5, 12)), list(range(20, 23)), list(range(40, 51))]
    row = {"input_ids": list(itertools.chain(*documents)), "seq_lengths": [len(document) for document in documents]}
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([row])
    assert batch["position_ids"].shape == (1, 21) and "attention_mask" not in batch
    batch.pop("labels")
    with torch.no_grad():
        found = net(**batch, use_cache=False).logits[0]
        alone = [net(input_ids=torch.tensor([document]), use_cache=False).logits[0] for document in documents]
    agree(found, torch.cat(alone), 1e-5, "logits")


def one_trajectory(model: Model) -> None:
    """Losses and gradient norms of two ranks under FSDP2 are those of one process, to 1e-5."""
    agree(trajectory(model.sharded), trajectory(model.single), 1e-5)


def recomputation(model: Model) -> None:
    """So they are where activations are recomputed; and each layer is recomputed."""
    out = model.run("recomputed", **RECOMPUTED)
    net = model.load()
    layers = sum(type(module).__name__ in net._no_split_modules for module in net.modules())
    assert f"activations of {layers} of {layers} layers recomputed" in out.with_suffix(".log").read_text()
    agree(trajectory(out), trajectory(model.single), 1e-5)


def killed_and_resumed(model: Model) -> None:
    """A run killed in step 4 goes on from step 2, bit for bit."""
    fault = dict(zip(("event", "path", "count"), model.killed_at, strict=True))
    model.run("killed", fault=fault | {"rank": 0, "everyone": True})
    out = model.run("killed")
    assert "(step 2, saved by 2 x" in out.with_suffix(".log").read_text()
    assert trajectory(out) == trajectory(model.sharded)
    tensors = load_file(out / "export/model.safetensors")
    for name, tensor in load_file(model.sharded / "export/model.safetensors").items():
        assert torch.equal(tensor, tensors[name]), name


def exported(model: Model) -> None:
    """transformers alone loads the export, with the loss of the last evaluation, to 1e-5."""
    before, after = evaluations(model.sharded)
    agree(model.loss_of(model.load()), before, 1e-5, "losses before training")
    agree(model.loss_of(model.load(model.sharded / "export")), after, 1e-5, "losses after training")


def generation(model: Model) -> None:
    """Two ranks generate, in padded batches, what the exported model generates greedily from each prompt alone."""
    texts, found = model.texts_of(model.load(model.sharded / "export")), model.texts_in(model.sharded)
    assert found == texts and any(texts), f"{found} instead of {texts}"


def lora(model: Model) -> None:
    """Adapters have one trajectory; each linear layer and each expert changes, and nothing else; exports agree to 1e-5.

    The merged export is PEFT's merge of the base and the exported adapter, and has the loss of the last evaluation.
    """
    plain = model.load()
    layers, experts = linear_layers_and_experts(plain)
    flags = (*model.lora, "--merge_adapter", "--lora_target_modules", ALL_LINEAR)
    out = model.run("lora", *flags)
    agree(trajectory(out), trajectory(model.run("lora_single", *flags, **SINGLE)), 1e-5)
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    after = dict(model.load(out / "export").named_parameters())
    adapter = out / "export/adapter"
    agree(model.loss_of(model.with_adapter(adapter)), evaluations(out)[-1], 1e-5, "losses with PEFT")
    by_peft = dict(model.with_adapter(adapter, merged=True).named_parameters())
    adapted = {f"{name}.weight" for name in layers} | set(experts)
    assert adapted
    for name, weight in before.items():
        agree(after[name].detach(), by_peft[name].detach(), 1e-5, name)
        changes = [not torch.equal(*pair) for pair in zip(after[name], weight, strict=True)] if name in experts else []
        changes = changes or [not torch.equal(after[name], weight)]
        assert all(changes) if name in adapted else not any(changes), f"{name}: changed {changes}"
    agree(model.loss_of(model.load(out / "export")), evaluations(out)[-1], 1e-5, "losses merged")


def four_bits(model: Model) -> None:
    """Adapters beside weights in 4 bits learn, on two ranks; PEFT loads them beside the model in 4 bits, with the same loss.

    A recipe refuses this on a CPU, where it is slow; the test allows it.
    """
    from transformers import BitsAndBytesConfig

    out = model.run("4bits", *model.lora, "--load_in_4bit", FOUR_BITS_ON_CPU="1")
    trajectory(out)
    before, after = evaluations(out)
    assert after < before - 0.05
    settings = load_settings(toy.Args(use_peft=True, load_in_4bit=True))
    assert isinstance(settings["quantization_config"], BitsAndBytesConfig)
    with mock.patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: False):  # its packed weights are wider than these
        agree(model.loss_of(model.load(**settings)), before, 1e-5, "losses before training")
        agree(model.loss_of(model.with_adapter(out / "export", **settings)), after, 1e-5, "losses with PEFT")


CELLS: dict[str, Callable[[Model], str | None]] = {
    "packed = unpacked": packed_as_unpacked,
    "packed by trl": packing_by_trl,
    "loss without logits": loss_without_logits,
    "FSDP2 x 2": one_trajectory,
    "recomputation": recomputation,
    "kill, resume": killed_and_resumed,
    "export": exported,
    "generation": generation,
    "LoRA": lora,
    "4 bits, on a CPU": four_bits,
}
IN_PROCESS = ("packed = unpacked", "packed by trl", "loss without logits")  # the others start runs


def cell(model: Model, name: str) -> str:
    """Run a cell; returns `works`, the refusal, or `not ...: ` and why there is no such thing.

    Raises:
        AssertionError: for a cell that is red.
    """
    wanted = REFUSED.get((model.name, name))
    try:
        instead = CELLS[name](model)
    except (Refused, ConfigError) as error:
        said = first_line(error).replace(str(model.base), "it")
        assert wanted and re.match(wanted, said), f"refused: {said}"
        return said
    assert wanted is None, "works now, though the table says that it is refused"
    return instead or WORKS


def measure(names: Sequence[str], found: dict[str, dict[str, str]]) -> list[str]:
    """Run all cells of these architectures, and put into `found` what each is; returns what is red."""
    red = []
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        server = ForkServer(Path(folder), (*IMPORTS, *modules_of_models()))
        for name in names:
            start, model = time.perf_counter(), make(name, Path(folder), server)
            found[name] = {"attention": attention_of(model)}
            for title in CELLS:
                try:
                    found[name][title] = cell(model, title)
                except Exception as error:
                    red.append(f"{name}, {title}: {type(error).__name__}: {error}")
            shutil.rmtree(model.folder)
            print(f"{name}: {time.perf_counter() - start:.0f} s, {len(red)} cells are red", flush=True)
        server.close()
    return red


def modules_of_models() -> list[str]:
    """List the modules of all architectures, for a server that imports them once."""
    types = {config.model_type.removesuffix("_text") for config in ROWS.values()}
    return [f"transformers.models.{name}.modeling_{name}" for name in sorted(types)]


def attention_of(model: Model) -> str:
    """Say which attention `auto` takes on a CPU, and what keeps documents apart in it."""
    if isinstance(model, EncoderDecoder):
        return f"{model.attention}, padded"
    how = {Packing.POSITIONS: "positions", Packing.MASK: "our mask"}
    net = model.load()
    unpacked = ", unpacked" if mixers_in(net) else ""
    return f"{model.attention}, {how[packing_of(net.config)]}{unpacked}"


ATTENTION = """The attention that `auto` takes on a CPU, and what keeps the documents of a packed row apart in it:
transformers sees from the positions where they begin, or the model gets a mask of ours; where layers have a state, rows are
unpacked for them ([how](levers.md#layers-with-a-state)); pairs are padded."""
ON_GPU = """This was not run on a GPU, except that what is refused is refused there too."""
HEAD = """\
# Models

What works for which architecture, and what may not be combined (`make models` runs the cells and writes this page). The models
are tiny and random, in fp32 on a CPU: a cell says that loss, sharding, adapters and files are right, not that a published model
fits on your GPUs, or learns. Measured with transformers {transformers}, torch {torch}, accelerate {accelerate}, peft {peft}, trl
{trl} and bitsandbytes {bitsandbytes}, on {cores} cores.
"""
NOTES = """\
Of hybrids, the layers with a state were computed by transformers' kernels in torch: the fast packages run on GPUs only.
RecurrentGemma, RWKV and xLSTM are refused: they do not see the padding of prompts. Phi-4 is a Phi-3, T5 v1.1 is what FLAN-T5 is.
Of a composite, a model that also sees images, the text part is trained, and the export is the whole; `recipes/sft_vlm.py` trains
it with images: [which types](vlm.md).
"""


def page(result: dict) -> str:
    """Write docs/models.md from the result of `make models`, and from the checks that refuse combinations."""
    import combinations

    notes, rows = combinations.Notes(), {}
    for name, cells in result["cells"].items():
        rows[name] = [cells["attention"]]
        for title in CELLS:
            said = in_general(cells.get(title, NOT_RUN))
            short = WORKS if said.startswith(WORKS) else said.split(":")[0] if said.startswith("not ") else "refused"
            rows[name].append(said if said in (WORKS, NOT_RUN) else f"{short} ({notes.of([said])})")
        rows[name].append(NOT_RUN if rows[name][-1] == WORKS else rows[name][-1])
    titles = ["attention", *CELLS, "4 bits, on a GPU"]
    meanings = [ATTENTION, *(check.__doc__ or "" for check in CELLS.values()), ON_GPU]
    lines = [HEAD.format(**result["machine"]), *combinations.table("", titles, rows), ""]
    for title, meaning in zip(titles, meanings, strict=True):
        text = f"- **{title}**: {' '.join(meaning.split())}"
        lines += textwrap.wrap(text, 125, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    lines += ["", NOTES, "The numbers in brackets:", "", *notes.lines, "", combinations.chapter()]
    return "\n".join(lines)


def in_general(said: str) -> str:
    """Leave out of a refusal what differs from class to class, so that those of one reason are one note."""
    said = re.sub(r"\w+ (keeps the .*?) \(.*?\)(.*; change that).*", r"the class \1\2, or name other layers", said)
    said = re.sub(r"\w+ (computes with the weights) of .* itself", r"the class \1 of some layers itself", said)
    return re.sub(r"it is a \w+, which has", "it has", said)


def main() -> None:
    """Run all cells, or those of the architectures that are named; with --page only write the page anew."""
    from importlib import metadata

    asked = sys.argv[1:]
    if unknown := set(asked) - {"--page", *ROWS}:
        sys.exit(f"{', '.join(unknown)}: there is no such architecture; there are {', '.join(ROWS)}")
    result = json.loads(RESULT.read_text()) if asked else {"cells": {}, "cpu_minutes": 0.0}
    cells = dict(result["cells"])
    if asked != ["--page"]:
        if red := measure(asked or list(ROWS), cells):
            print(*red, f"{len(red)} cells are red; nothing was written", sep="\n", file=sys.stderr)
            sys.exit(1)
        packages = ("transformers", "torch", "accelerate", "peft", "trl", "bitsandbytes")
        machine = {name: metadata.version(name) for name in packages} | {"cores": os.cpu_count()}
        minutes = result["cpu_minutes"] if asked else round(cpu_seconds() / 60, 1)
        cells = {name: cells[name] for name in ROWS if name in cells}
        result = {"command": "make models", "machine": machine, "cpu_minutes": minutes, "cells": cells}
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    PAGE.write_text(page(result))


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    main()
