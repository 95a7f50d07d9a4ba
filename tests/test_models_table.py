"""Tests of docs/models.md: cells that start no runs for each architecture, all cells for two, and the refusals on the page."""

import copy
import inspect
import itertools
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import models_table
import pytest
import torch
import toy
import transformers
from combinations import LEVERS, MACHINES, RECIPES, STRATEGIES, arguments, generic, strategy_problems
from helpers import ROOT, by_time, refuses
from models_table import CELLS, ENCODER_DECODERS, IN_PROCESS, REFUSED, ROWS, SIZES, WORKS, Model, cell, page
from tiny import tiny_config
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes import losses
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.answers import add_positions
from accelerate_recipes.conversations.heads import add_head, say_once
from accelerate_recipes.conversations.supervised_loss import SupervisedLoss
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.attention import choose
from accelerate_recipes.models.composites import text_part
from accelerate_recipes.models.encoder_decoders import load_encoder_decoder
from accelerate_recipes.models.head_probe import raise_logits, tiny_and_tokens
from accelerate_recipes.models.loading import made
from accelerate_recipes.models.pretrained import check_length
from accelerate_recipes.models.probes import router_of
from recipe_tools.preflight import check

RESULT = json.loads(models_table.RESULT.read_text())


@pytest.fixture(scope="module")
def models(fork_server, tmp_path_factory):
    """Tiny models by the name of their architecture."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def model(name: str) -> Model:
        if name not in made:
            made[name] = models_table.make(name, folder, fork_server)
        return made[name]

    return model


# Others are tried by the slow tests: those that compute as Llama 3 does, newer ones, and further hybrids.
SAMPLE = [
    "Llama 3", "Qwen3-MoE", "Mixtral", "Gemma 2", "Gemma 3", "GPT-2", "GPT-OSS", "DeepSeek V3", *ENCODER_DECODERS, "Llama 4",
    "Qwen3-Next", "Qwen3.5", "LFM2", "Granite 4", "Falcon-H1", "Mamba",
]  # fmt: skip


@pytest.mark.parametrize("name", by_time(ROWS, SAMPLE, models_table.ARCHITECTURES))
def test_packing_and_losses(models, name):
    """Packing is proved for each class, by us and by trl, and the loss without logits; or the refusal is the page's."""
    for title in IN_PROCESS:
        assert cell(models(name), title) == RESULT["cells"][name][title]


DECODERS = [name for name in ROWS if name not in ENCODER_DECODERS]
# What the tables switch off. Of dropout, each strategy draws its own; the others follow from a size.
SWITCHED_OFF = {
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "residual_dropout", "dropout_rate",
    "block_auto_adjust_ff_dim", "full_attn_idxs", "per_layer_config", "scale_decoder_outputs",
}  # fmt: skip


def test_the_tables_switch_off_dropout_alone():
    """Else a fault of what a class does by default would hide."""
    for name, config in ROWS.items():
        text = config if name in ENCODER_DECODERS else config.get_text_config()
        ours, defaults = text.to_dict(), type(text)().to_dict()
        off = {key for key, value in ours.items() if not value and defaults.get(key) and not key.endswith("token_id")}
        assert off <= SWITCHED_OFF, f"{name}: {off - SWITCHED_OFF}"


def with_defaults(name: str):
    """Return the configuration of a decoder in the table with the dropout and the balance of its class."""
    text = copy.deepcopy(text_part((ROWS | FURTHER)[name]))
    for field in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "residual_dropout"):
        if hasattr(text, field):
            setattr(text, field, getattr(type(text)(), field))
    return text


# Learned positions; mixtures of other names; dense models of a class for mixtures.
FURTHER = {
    "GPT-Neo": tiny_config("gpt_neo", attention_types=[[["global", "local"], 1]]),
    "GPT-BigCode": tiny_config("gpt_bigcode", bos_token_id=0, eos_token_id=0),
    "OPT": tiny_config("opt"),
    "PhiMoE": tiny_config("phimoe", num_local_experts=4),
    "OLMoE": tiny_config("olmoe", num_experts=4, num_experts_per_tok=2),
    "Granite 4, dense": transformers.GraniteMoeHybridConfig(
        **SIZES | {"layer_types": ["full_attention"] * 2},
        **models_table.MAMBA_2,
        num_local_experts=0,
        shared_intermediate_size=16,
    ),
    "Jamba, dense": transformers.JambaConfig(
        **SIZES, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, num_experts=1
    ),
}
NOT_BALANCED = {"Llama 4", "Llama 4, composite", "Granite 4, dense", "Jamba, dense"}
TRIED = {
    "sft": {"max_length": 9},
    "dpo": {"max_length": 9},
    "grpo": {"max_prompt_length": 5, "max_completion_length": 4, "num_generations": 2},
}


@pytest.mark.parametrize("kind", TRIED)
@pytest.mark.parametrize("name", by_time([*FURTHER, *DECODERS], [*FURTHER, *SAMPLE]))
def test_a_class_is_trained_by_trl_with_its_own_defaults(tmp_path, name, kind):
    """The loss has a gradient, and experts are balanced by the loss of their class, with its weight."""
    config = with_defaults(name)
    config.save_pretrained(tmp_path)
    module = shipped.load(ROOT / f"recipes/{kind}.py")
    size = {"model_name_or_path": str(tmp_path), "per_device_train_batch_size": 2, "total_batch_size": 2}
    trial = module.trial(module.Args(**size, **TRIED[kind]))
    torch.manual_seed(0)
    attention, _ = choose("auto", trial.config, torch.float32, False)
    model = made(transformers.AutoModelForCausalLM, trial.config, attn_implementation=attention)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    batch = {k: torch.randint(5, 90, v.shape) if k.endswith("_ids") else v for k, v in trial.batch.items()}
    torch.manual_seed(1)
    parts, counts = trial.loss_fn(model, batch.copy()), trial.count_fn(batch)
    (parts / counts.clamp(min=1)).sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), key
    weight = getattr(type(config)(), "router_aux_loss_coef", 0.0)
    is_balanced = weight > 0 and name not in NOT_BALANCED
    place = {"sft": 0, "dpo": 2, "grpo": 1}[kind]
    assert len(parts) == len(counts) == {"sft": 1, "dpo": 3, "grpo": 2}[kind] + is_balanced
    if is_balanced:
        if kind == "grpo":
            sides = {end: [batch[f"{side}_{end}"] for side in ("prompt", "completion")] for end in ("ids", "mask")}
            batch = {"input_ids": torch.cat(sides["ids"], 1), "attention_mask": torch.cat(sides["mask"], 1)}
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        torch.manual_seed(1)
        own = model(**inputs, output_router_logits=True, use_cache=False).aux_loss
        assert parts[place].item() == pytest.approx(weight * own.item(), rel=1e-5) and counts[place] == 1


@pytest.mark.parametrize("name", by_time([*FURTHER, *DECODERS], [*FURTHER, *SAMPLE]))
def test_answers_to_padded_prompts_are_as_probable_as_alone(tmp_path, name):
    """Log-probabilities in GRPO's loss do not depend on the padding of a shorter prompt: not on the number of ranks."""
    config = with_defaults(name)
    config.save_pretrained(tmp_path)
    module = shipped.load(ROOT / "recipes/grpo.py")
    trainer = module.trial(module.Args(model_name_or_path=str(tmp_path), **TRIED["grpo"])).loss_fn.__self__
    attention, _ = choose("auto", config, torch.float32, False)
    torch.manual_seed(0)
    model = made(transformers.AutoModelForCausalLM, config, attn_implementation=attention).eval()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    add_positions(model)
    rows = [torch.randint(5, 90, (1, length)) for length in (10, 6)]
    padded = torch.cat([torch.nn.functional.pad(row, (10 - row.shape[1], 0)) for row in rows])
    with torch.no_grad():
        found, _, _ = trainer._get_per_token_logps_and_entropies(model, padded, (padded > 0).long(), 4)
        alone = [trainer._get_per_token_logps_and_entropies(model, row, torch.ones_like(row), 4)[0] for row in rows]
    assert torch.allclose(found, torch.cat(alone), atol=1e-5), (found - torch.cat(alone)).abs().max()


DBRX = transformers.DbrxConfig(
    attn_config={"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5}, ffn_config={"moe_num_experts": 16, "moe_top_k": 4}
)
# What a class computes between its last hidden states and its logits, or how it balances experts, that trl does not know.
UNKNOWN_TO_TRL = {
    "layers": transformers.ModernBertDecoderConfig(),
    "layers of BERT": transformers.BertConfig(is_decoder=True),
    "a width": transformers.RoFormerConfig(is_decoder=True, embedding_size=64),
    "a factor, and rows that are no words": transformers.InklingTextConfig(unpadded_vocab_size=200058),
    "a factor that is trained": transformers.DoryConfig(),
    "a cap": transformers.RecurrentGemmaConfig(),
    "a number of experts": DBRX,
    "a balance of pairs": transformers.DogeConfig(is_moe=True),
}
KNOWN = {
    "a known cap": transformers.Gemma2Config(), "a known factor": transformers.CohereConfig(), "another name of experts": transformers.DeepseekV4Config(),
    "another name of the weight": transformers.JetMoeConfig(),
}  # fmt: skip
OUTPUTS = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")


IN_HEAD = {
    "the output layer alone": transformers.LlamaConfig(),
    "a bias": transformers.PhiConfig(),
    "experts": transformers.Qwen3MoeConfig(),
}


@pytest.mark.parametrize("name", [*UNKNOWN_TO_TRL, *KNOWN, *IN_HEAD])
def test_the_head_that_trains_is_that_of_the_class(name, capsys, monkeypatch):
    """What a loss reads are values of the class's logits, and trains what these train."""
    config, is_sum = (UNKNOWN_TO_TRL | KNOWN | IN_HEAD)[name], name in IN_HEAD
    temperature, outputs = (1.0, ("loss", *OUTPUTS[:3])) if is_sum else (0.7, OUTPUTS)
    model, tokens = tiny_and_tokens(config)
    words = model.get_output_embeddings().weight.shape[0]
    monkeypatch.setattr(losses, "BYTES_OF_A_CHUNK", 4 * 4 * words)  # chunks of four targets, in parts of three
    monkeypatch.setattr(losses, "LOGITS_IN_FP32", 3 * words)
    raise_logits(model, tokens)
    labels = tokens.clone()
    labels[0, 3] = -100
    router = router_of(model, tokens)
    mask = labels[:, 1:] != -100
    output = model(input_ids=tokens, use_cache=False, **router)
    logits = output.logits[:, :-1].double() / temperature
    log_probs = logits.log_softmax(-1)
    wanted = {
        "log_probs": log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1), "is_top1": logits.argmax(-1) == tokens[:, 1:],
        "entropy": -(log_probs.exp() * log_probs).sum(-1), "mean_logits": logits.mean(-1),
        "log_sum_sq_probs": (2 * log_probs).logsumexp(-1),
    }  # fmt: skip
    _, own = models_table.gradients(model, [(wanted["log_probs"] * mask).sum() + (output.aux_loss if router else 0)])
    say_once.cache_clear()
    add_head(model, outputs, temperature)
    assert ("whole logits" in capsys.readouterr().out) == (name in UNKNOWN_TO_TRL)
    found = model(input_ids=tokens, labels=labels, fused_lm_head=True, **router)
    for key in OUTPUTS[: 3 if is_sum else 5]:
        assert torch.allclose(found[key].double(), (wanted[key] * mask).double(), rtol=1e-4, atol=1e-4), key
    assert not router or found.aux_loss.item() == pytest.approx(output.aux_loss.item(), rel=1e-5)
    log_probs = -found.loss if is_sum else found.log_probs.sum()
    _, trained = models_table.gradients(model, [log_probs + (found.aux_loss if router else 0)])
    assert trained.keys() == own.keys()
    # Of some parameters, such as biases of keys, the gradient is nothing but rounding.
    one, other = (torch.cat([gradients[key].flatten() for key in sorted(own)]) for gradients in (own, trained))
    assert (one - other).norm() <= 1e-4 * one.norm()


def test_the_sum_in_the_head_without_a_target_and_with_shifted_labels():
    """A micro-batch without targets has a loss of 0 with gradients of 0; ranks that share rows shift the labels themselves."""
    model, tokens = tiny_and_tokens(transformers.LlamaConfig())
    add_head(model, ("loss", "log_probs", "entropy", "is_top1"))
    none = model(input_ids=tokens, labels=torch.full_like(tokens, -100), fused_lm_head=True)
    loss, of_none = models_table.gradients(model, [none.loss])
    assert loss == 0 and not any(value.any() for value in of_none.values())
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    shifted = model(input_ids=tokens, shift_labels=labels, fused_lm_head=True)
    found = model(input_ids=tokens, labels=tokens, fused_lm_head=True)
    assert shifted.loss == found.loss and torch.equal(shifted.log_probs[:, :-1], found.log_probs)
    assert shifted.log_probs.shape == tokens.shape and model(input_ids=tokens).logits.ndim == 3


@pytest.mark.parametrize("given", [None, 0.0, 0.01])
@pytest.mark.parametrize("config, own", [
    (transformers.DeepseekV4Config(), 0.001), (transformers.JetMoeConfig(), 0.01), (DBRX, 0.01), (transformers.DogeConfig(is_moe=True), 0.001),
    (transformers.DogeConfig(), None), (transformers.DeepseekV3Config(), None), (transformers.Glm4MoeLiteConfig(), None), (transformers.AXK1Config(), None),
    (transformers.Qwen3MoeConfig(mlp_only_layers=[*range(24)]), None), (tiny_config("mixtral", router_aux_loss_coef=0.0), 0.0),
    (transformers.LlamaConfig(), None), (FURTHER["Granite 4, dense"], None), (text_part(ROWS["Llama 4"]), None),
], ids=lambda value: getattr(value, "model_type", None))  # fmt: skip
def test_experts_of_any_class_are_balanced_with_a_weight_or_refused(config, own, given):
    """By the loss of the class, with its weight or the given one; a class without such a loss refuses one that is not 0."""
    args = SimpleNamespace(loss_type="nll", router_aux_loss_coef=given)
    if own is None and given:
        refuses(f"--router_aux_loss_coef 0.01: .* {config.model_type} ", SupervisedLoss, args, config)
        return
    loss = SupervisedLoss(args, config)
    model, tokens = tiny_and_tokens(config)
    weight = given if own is not None and given is not None else own or 0.0
    assert loss.balance == weight
    add_head(model, loss.outputs)
    parts = loss.sum_parts(model, {"input_ids": tokens, "labels": tokens})
    assert len(parts) == 1 + bool(weight) and parts.requires_grad
    if weight:
        balance = model(input_ids=tokens, use_cache=False, output_router_logits=True).aux_loss
        assert parts[0].item() == pytest.approx(weight * balance.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["PhiMoE", "OLMoE", "Granite 4, dense", "Jamba, dense", "Llama 4"])
def test_experts_are_balanced_in_pretraining(name):
    """Our own loss has the balance of the class too, and none where the class computes none."""
    config = with_defaults(name)
    attention, _ = choose("auto", config, torch.float32, True)
    model = made(transformers.AutoModelForCausalLM, config, attn_implementation=attention)
    batch = toy.batch_of(1)
    trained, evaluated = (losses.next_token_loss(model.train(mode), batch).item() for mode in (True, False))
    assert (trained > evaluated) == (name not in NOT_BALANCED)


def test_upstream_still_has_other_names():
    """When this fails, `upstream.name_backbone`, or the second name in `weight_of_balance`, can go."""
    assert not re.search(
        r"num_experts\b(?!_per)", inspect.getsource(transformers.GraniteMoeConfig).replace("num_local_experts", "")
    )
    assert "text_config.num_experts" in inspect.getsource(add_fused_lm_head)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(text_part(ROWS["Llama 4"]))
    assert model.base_model is model
    tokens = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    assert model(input_ids=tokens, output_router_logits=True).aux_loss is None


# GPT-OSS: a mask of ours, sinks, experts in one weight. DeepSeek V3: a buffer that is saved, named layers. BART: a buffer,
# positions that count from the left, a scaled embedding.
THROUGH_RANKS = [
    ("GPT-OSS", "FSDP2 x 2"), ("GPT-OSS", "export"), ("GPT-OSS", "generation"), ("DeepSeek V3", "FSDP2 x 2"),
    ("BART", "FSDP2 x 2"), ("BART", "export"), ("BART", "generation"), ("Qwen3.5", "FSDP2 x 2"),
]  # fmt: skip
SLOW = [
    ("GPT-OSS", "kill, resume"), ("GPT-OSS", "LoRA"), ("mT5", "LoRA"), ("DeepSeek V3", "export"), ("BART", "recomputation"),
    ("BART", "kill, resume"), ("mT5", "export"), ("Granite 4", "recomputation"), ("Granite 4", "kill, resume"), ("Jamba", "LoRA"),
]  # fmt: skip


@pytest.mark.parametrize("name, title", [*THROUGH_RANKS, *(pytest.param(*p, marks=pytest.mark.slow) for p in SLOW)])
def test_through_ranks(models, name, title):
    assert cell(models(name), title) == RESULT["cells"][name][title]


@pytest.mark.parametrize("name, title", [pair for pair in REFUSED if pair[1] not in IN_PROCESS])
def test_refusals(models, name, title):
    """What the page says of adapters that are refused is what a run says."""
    args = toy.Args(model_name_or_path=str(models(name).base), use_peft=True, lora_dropout=0.0)
    args.load_in_4bit = title == "4 bits, on a CPU"
    said = refuses("", add_adapters, models(name).load(), args)
    assert RESULT["cells"][name][title].endswith(models_table.first_line(said))


@pytest.mark.parametrize("config, said", [
    (transformers.MarianConfig(), "is a marian, not one of t5, mt5, umt5, bart"),
    (transformers.LlamaConfig(), "is a llama, not one of t5, mt5, umt5, bart"),
    (transformers.T5Config(), r"has no decoder_start_token_id, .* here 0\)"),
])  # fmt: skip
def test_encoder_decoders_that_are_refused(tmp_path, config, said):
    """Other models, and one that does not say how a text begins, are refused before their weights are read."""
    config.save_pretrained(tmp_path)
    refuses(said, load_encoder_decoder, str(tmp_path), "sdpa", dropout_rate=0.0)


def test_texts_longer_than_the_positions_of_a_model(models):
    """A BART has 16 positions; a T5 has no limit. Batches are padded to a multiple of 8."""
    check_length(str(models("BART").base), 16, "max_source_length", 8)
    check_length(str(models("T5").base), 10**6, "max_source_length", 8)
    with pytest.raises(ConfigError, match=r"--max_target_length is 17, but .* 16 or less"):
        check_length(str(models("BART").base), 17, "max_target_length", 8)
    refuses("set it to 10 or less", check_length, str(models("BART").base), 12, "max_source_length", 10)


def test_dropout_of_an_encoder_decoder(models):
    """One rate holds wherever the model has dropout, and no layer is left out at random: ranks would leave out others."""
    for name in ENCODER_DECODERS:
        model = load_encoder_decoder(str(models(name).base), "sdpa", dropout_rate=0.25)
        config = model.config
        kinds = {key: value for key, value in config.to_dict().items() if "drop" in key and "classif" not in key}
        assert kinds and all(value == (0.0 if "layerdrop" in key else 0.25) for key, value in kinds.items()), kinds
        modules = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        assert all(p == 0.25 for p in modules) and (modules or name == "BART")


def test_the_page_is_what_is_generated():
    assert models_table.PAGE.read_text() == page(RESULT), "run `make models`, or tests/models_table.py --page"


def test_every_cell_is_there_and_none_is_empty():
    assert RESULT["cells"].keys() == ROWS.keys() and len(ROWS) >= 50
    for name, cells in RESULT["cells"].items():
        assert cells.keys() == {"attention", *CELLS}
        for title, said in cells.items():
            if title != "attention" and said != WORKS:
                is_without = name in ENCODER_DECODERS and said.startswith(("not packed: ", "not offered: "))
                assert is_without or (name, title) in REFUSED, f"{name}, {title}: {said}"


def test_a_red_cell_fails_the_command(monkeypatch, tmp_path, capsys):
    """A fault, an unexpected refusal and a refusal that no longer comes are red; then nothing is written."""
    checks = dict.fromkeys(("LoRA", "recomputation"), lambda model: None)
    checks["export"] = Mock(side_effect=AssertionError("losses differ by 1"))
    checks["generation"] = Mock(side_effect=ConfigError("no"))
    files = {"RESULT": tmp_path / "result.json", "PAGE": tmp_path / "page.md"}
    replaced = files | {"ForkServer": Mock(), "ROWS": {"GPT-2": ROWS["GPT-2"]}, "CELLS": checks}
    for name, value in replaced.items():
        monkeypatch.setattr(models_table, name, value)
    monkeypatch.setattr(models_table.sys, "argv", ["models_table.py"])
    with pytest.raises(SystemExit) as ended:
        models_table.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and not list(tmp_path.iterdir())
    for red in ("export: .*losses differ by 1", "generation: .*refused: no", "LoRA: .*works now"):
        assert re.search(f"^GPT-2, {red}", said, re.MULTILINE), said
    assert "recomputation" not in said and "3 cells are red" in said


def test_preflight_refuses_them_too(models, at_the_root, tmp_path):
    """An attention that a class does not support, rows that it cannot keep apart, a loss that needs whole logits."""
    gemma, crosses = str(models("Gemma 2").base), tmp_path / "bloom"
    transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4)
    ).save_pretrained(crosses)
    where = ("--output_dir", str(tmp_path / "out"), "--max_steps", "2", "--max_length", "32")
    chess = ("recipes/chess.py", "--train_files", "data/chess/games_20k.parquet", *where)
    c4 = ("recipes/c4.py", "--train_files", "data/en_fr/libreoffice.jsonl", *where, "--model_name_or_path", gemma)
    refused = {
        (
            *chess, "--model_name_or_path", gemma, "--attn_implementation", "sdpa",
        ): "gemma2 does not support it; give eager",
        (*chess, "--model_name_or_path", str(crosses)): "bloom models do not keep attention inside a document",
        c4: "without whole logits, the loss of a tiny gemma2 is .* off; give --whole_logits",
    }  # fmt: skip
    for command, said in refused.items():
        _, problems = check(["accelerate_configs/fsdp_full.yaml", *command])
        assert re.search(said, " ".join(problems)), problems


def test_three_are_refused_where_two_are():
    """A recipe's arguments change nothing in what a strategy refuses, so that two tables say all; but who shares rows."""
    for machine, strategy, (launch_flags, flags) in itertools.product(MACHINES, STRATEGIES, LEVERS.values()):
        found = set()
        for name in RECIPES:
            args, problems = arguments(name, flags, 8)
            if not problems:
                refusals = [generic(said) for said in strategy_problems(strategy, machine, launch_flags, flags, name)]
                whole = [said for said in refusals if "in this recipe a row is whole on each process" in said]
                assert len(whole) == (strategy == "fsdp_long" and not args.shares_rows)
                found.add(tuple(said for said in refusals if said not in whole))
        assert len(found) == 1, (machine, strategy, flags, found)
