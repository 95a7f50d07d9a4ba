"""Compare what the recipes read and train here with another commit, bit for bit: `make same BASE=main`.

    make same BASE=main ARGS="sft mixture"        # only the cases whose names contain one of these words

A case is a recipe with its arguments. One that is no run records the batches of training and of evaluation, what the
evaluation finds, the printed lines, rows.txt, the rendered rows of rows.json, the number of steps, and the state of the loader.
A run of a few steps records its batches, losses and weights; both
trees also resume it at a checkpoint that the other commit wrote. The inputs are made once, by this tree. Each tree records in
a process and with caches of its own, on one thread and without the network; each case is forked from it. For each case the
script prints SAME, or OTHER with the first differences. It ends with 1 if there is one. What it makes is removed at its end.

It uses of the library only what no change of its insides touches: recipes by their paths, with `Args` and `main`; `args.parse`;
`train`, which a recipe imports, with the loader that it gets; and `engine.on_this_rank`, through which each batch goes.
"""

import argparse
import contextlib
import csv
import importlib.util
import io
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NUM_BATCHES = 130  # of training, in a case that is no run
# Values and printed lines that differ between two equal runs.
TIMES = {"time", "samples_per_second", "tokens_per_second", "peak_memory_gib", "data_wait"}
OF_TIMES = re.compile(r"\bsec\b|seconds|GiB|cache")
# What a child would import again and again.
IMPORTS = (
    "torch", "datasets", "evaluate", "matplotlib.pyplot", "peft", "PIL.PngImagePlugin", "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer", "torch.distributed.checkpoint.state_dict", "transformers.optimization",
    "transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5",
)  # fmt: skip


LLAMA = "--config_overrides hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=2"
PAGES = f"{LLAMA} vocab_size=300 max_position_embeddings=128 --max_length 64 --num_validation_rows 10 --max_steps 8"
GAMES = f"<games.parquet --heldout_share 0.1 --num_positions 30 --from_scratch {LLAMA} --max_length 128"
IMAGES = (
    "<images.parquet --heldout_share 0.3 --crop_area 0.5 --mixup_alpha 0.4 --cutmix_alpha 1 --from_scratch --config_overrides "
    "image_size=28 patch_size=7 hidden_size=24 intermediate_size=48 num_hidden_layers=2 num_attention_heads=3"
)
TEXTS = (
    "<translations.jsonl --heldout_share 0.2 --num_eval_pairs 13 --max_source_length 64 --max_target_length 24 --from_scratch "
    "--config_overrides vocab_size=400 d_model=32 d_kv=8 d_ff=64 num_layers=2 num_heads=4"
)
SEEN = "<seen.jsonl --eval_files IN/seen_eval.jsonl --max_length 64 --dataloader_num_workers 0"
PACKED = "--packing true --max_length 128"
DRAWN = "--max_completion_length 6 --num_generations 4 --rewards IN/rewards.py:short --num_eval_prompts 5"
TAUGHT = "@qwen2_5 --max_length 64 --teacher_model_name_or_path IN/wide --max_completion_length 6"
SIZES = "--total_batch_size 16 --per_device_train_batch_size 4 --per_device_eval_batch_size 9"
RUN = "--max_steps 3 --save_steps 2 --learning_rate 1e-2 --logging_steps 1 --async_save false"
# Names, which begin with a recipe, and arguments: @ is a model to begin with, and < a file to train on, of the inputs. A run is also
# resumed, by both trees at the checkpoint of the other commit.
CASES = f"""
sft messages cut: @qwen2_5 <chats.jsonl --max_length 80
sft messages keep_end: @qwen2_5 <chats.jsonl --max_length 80 --truncation_mode keep_end
sft messages everything: @qwen2_5 <sharegpt.jsonl --max_length 100 --assistant_only_loss false
sft messages bfd: @qwen2_5 <chats.jsonl {PACKED}
sft messages bfd_split: @qwen2_5 <chats.jsonl {PACKED} --packing_strategy bfd_split
sft messages wrapped: @qwen2_5 <chats.jsonl {PACKED} --packing_strategy wrapped
sft text bfd: @none <text.jsonl {PACKED}
sft text bfd_split: @none <text.jsonl {PACKED} --packing_strategy bfd_split
sft text wrapped: @none <text.jsonl {PACKED} --packing_strategy wrapped
sft padding free: @qwen2_5 <chats.jsonl --padding_free true --packing true --max_length 200 --eval_packing false
sft shuffled packed: @qwen2_5 <chats.jsonl {PACKED} --shuffle_dataset true
sft shuffled cut: @qwen2_5 <chats.jsonl --max_length 64 --shuffle_dataset true
sft tools: @qwen3 <tools.jsonl --max_length 2000 --heldout_share 0.2
sft tools packed: @qwen3 <tools.jsonl --packing true --max_length 1500
sft sharegpt jsonl: @qwen2_5 <sharegpt.jsonl --max_length 160
sft sharegpt parquet: @qwen2_5 <sharegpt.parquet --max_length 160
sft alpaca: @qwen2_5 <alpaca.csv --max_length 160
sft alpaca texts: @none <alpaca.csv --max_length 64
sft parted: @qwen2_5 <parted.jsonl --max_length 160
sft completion: @qwen2_5 <completion.jsonl --max_length 160
sft repeat: @qwen2_5 <repeat.jsonl --max_length 160
sft text: @none <text.jsonl --max_length 64
sft eval files: @qwen2_5 <chats.jsonl --eval_files IN/eval.jsonl --max_length 160
sft mixture cut: @qwen2_5 --mixture IN/mixture.yaml --max_steps 30 --max_length 160
sft mixture packed: @qwen2_5 --mixture IN/mixture.yaml --max_steps 30 {PACKED}
sft run: @qwen2_5 <chats.jsonl --max_length 64
sft packed run: @qwen2_5 <chats.jsonl {PACKED}
sft dft run: @qwen2_5 <chats.jsonl --max_length 64 --loss_type dft
sft adapters run: @qwen2_5 <chats.jsonl --max_length 64 --use_peft true
sft mixture run: @qwen2_5 --mixture IN/mixture.yaml --max_length 160
kto answers: @sums <labels.jsonl --heldout_share 0.2
kto messages: @qwen2_5 <label_messages.jsonl --max_length 60
kto apo: @sums <labels.jsonl --loss_type apo_zero_unpaired
kto run: @sums <labels.jsonl
dpo texts: @sums <pairs.jsonl
dpo messages cut: @qwen2_5 <pair_messages.jsonl --max_length 60
dpo implicit: @qwen2_5 <pair_conversations.jsonl --max_length 60
dpo hh: @qwen2_5 <hh.jsonl
dpo tools: @qwen3 <pair_tools.jsonl --max_length 2000 --heldout_share 0.3
dpo judged: @sums <judged.jsonl --min_score_margin 0.3 --heldout_share 0.2
dpo run: @sums <pairs.jsonl
grpo texts: @sums <prompts.jsonl {DRAWN}
grpo messages: @qwen3 <prompt_messages.jsonl {DRAWN}
grpo run: @sums <prompts.jsonl {DRAWN} --beta 0.01
distill messages: <chats.jsonl {TAUGHT}
distill prompts: <prompt_messages.jsonl {TAUGHT}
distill run: <chats.jsonl {TAUGHT} --lmbda 0
distill drawn run: <chats.jsonl {TAUGHT}
sft_vlm padded: @qwen2_5_vl {SEEN}
sft_vlm packed: @qwen2_5_vl {SEEN} --packing true
sft_vlm gemma3: @gemma3 {SEEN} --packing true
sft_vlm run: @qwen2_5_vl {SEEN} --packing true
vit images: {IMAGES}
vit run: {IMAGES}
chess games: {GAMES}
chess whole rows: {GAMES} --no_document_mask
chess run: {GAMES}
c4 stream: --dataset_name IN/web {PAGES}
c4 files: <text.jsonl --heldout_share 0.2 {PAGES}
c4 mixture: --mixture IN/texts.yaml {PAGES}
c4 run: --dataset_name IN/web {PAGES}
c4 mixture run: --mixture IN/texts.yaml {PAGES}
t5 pairs: {TEXTS}
t5 run: {TEXTS}
template run: @bert <labelled.jsonl --max_length 16
"""


class Case(NamedTuple):
    """A recipe with its arguments. It `reads` batches without a step, is a `run`, or is `resumed`."""

    name: str
    recipe: str
    flags: str
    kind: str


def chosen(words: list[str]) -> list[Case]:
    """List the cases whose names contain one of the words, or all cases."""
    found = []
    for line in CASES.strip().splitlines():
        name, _, flags = line.partition(": ")
        flags = re.sub(r"@(\w+)", r"--model_name_or_path IN/\1", re.sub(r"<([\w.]+)", r"--train_files IN/\1", flags))
        if name.endswith(" run"):
            found += [Case(f"{name}{end}", name.split()[0], f"{flags} {RUN}", end or "run") for end in ("", " resumed")]
        else:
            found.append(Case(name, name.split()[0], flags, "reads"))
    return [case for case in found if not words or any(word in case.name for word in words)]


def make_inputs(folder: Path) -> None:
    """Write rows and tiny models of all cases."""
    sys.path[:0] = [str(ROOT / name) for name in ("src", "tests", "tests/children")]
    rng, words = random.Random(0), ["be", "brief", "question", "and", "yes", "no", "it", "is", "the", "week", "bern"]

    def text(longest: int) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randrange(1, longest)))

    def write(name: str, rows: list[dict]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    make_models(folder)
    make_conversations(text, write, folder)
    make_sums(write, folder)
    make_of_data(write, folder)


def make_models(folder: Path) -> None:
    import conversations
    import tiny
    import tiny_images
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    for name, end in (("qwen2_5", "<|im_end|>"), ("qwen3", "<|im_end|>")):
        conversations.save_base(folder / name, conversations.template_of(name), end)
    conversations.save_base(folder / "none", None)
    tokenizer = AutoTokenizer.from_pretrained(folder / "qwen2_5")
    tiny.save_base(folder / "wide", tokenizer, hidden_size=48, seed=2)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/arithmetic/tokenizer")
    tiny.save_base(folder / "sums", tokenizer, initializer_range=0.3, max_position_embeddings=32)
    for name in ("qwen2_5_vl", "gemma3"):
        tiny_images.save_base(folder / name, name)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    bert = tiny.tiny_model("bert", AutoModelForMaskedLM, max_position_embeddings=16, pad_token_id=0, **sizes)
    bert.save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")


def make_conversations(text, write, folder: Path) -> None:
    """Write conversations of many forms: short and long, with answers of weight 0, and some that end with a question."""
    import conversations
    import pyarrow as pa
    import pyarrow.parquet as pq

    def chat(number: int, said: str, turns: int) -> dict:
        messages: list[dict] = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
        for turn in range(turns):
            answer = {"role": "assistant", "content": text(9).capitalize() + "."}
            unweighted = {"weight": 0} if number % 50 == 7 and turn == 0 else {}
            messages += [{"role": "user", "content": f"{said}{number} {turn} {text(6)}?"}, answer | unweighted]
        return {"messages": messages[:-1] if number % 90 == 5 else messages}

    back = {"system": "system", "user": "human", "assistant": "gpt"}

    def as_sharegpt(row: dict, number: int) -> dict:
        parts = [{"from": back[message["role"]], "value": message["content"]} for message in row["messages"]]
        return {"conversations": parts, "id": number}

    chats = [chat(i, "", 1 + i % 4 // 2 + i % 7 // 6) for i in range(2600)]
    write("chats.jsonl", chats)
    write("tools.jsonl", [conversations.conversation(i, tools=i % 2 == 0, system=True) for i in range(300)])
    # Rows of a mixture are of one source alone.
    sharegpt = [as_sharegpt(chat(i, "other ", 1 + i % 3), i) for i in range(900)]
    write("sharegpt.jsonl", sharegpt)
    pq.write_table(pa.Table.from_pylist(sharegpt), folder / "sharegpt.parquet")
    with (folder / "alpaca.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, ["instruction", "input", "output"])
        lines.writeheader()
        asked = [(f"{i} {text(12)}", text(9) if i % 2 else "") for i in range(800)]
        lines.writerows({"instruction": task, "input": given, "output": text(20)} for task, given in asked)
    write("completion.jsonl", [{"prompt": f"{i} {text(20)}", "completion": f" {text(20)}"} for i in range(700)])
    repeated = [f"{i} {text(20)}" for i in range(300)]
    write("repeat.jsonl", [{"prompt": asked, "completion": f"{asked} {text(20)}"} for asked in repeated])
    ended = [row["messages"] for row in chats[:500] if row["messages"][-1]["role"] == "assistant"]
    write("parted.jsonl", [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in ended])
    write("text.jsonl", [{"text": f"{i} {text(200)}", "other": i if i < 700 else {"x": None}} for i in range(1500)])
    write("eval.jsonl", [chat(i, "held out ", 1) for i in range(40)])
    (folder / "mixture.yaml").write_text(f"""
sources:
- {{name: few, weight: 4, train_files: [{folder}/sharegpt.parquet], max_epochs: 1.5, heldout_share: 0.3}}
- {{name: chats, weight: 5, train_files: [{folder}/chats.jsonl]}}
- {{name: alpaca, weight: 3, train_files: [{folder}/alpaca.csv]}}
phases:
- {{from: 2, weights: {{chats: 1, alpaca: 3, few: 1}}, lr_factor: 0.5}}
""")
    write("label_messages.jsonl", [{"messages": m, "label": ["up", "down"][i % 3 % 2]} for i, m in enumerate(ended)])
    others = [[{"role": "assistant", "content": text(9)}] for _ in ended]
    pairs = [{"prompt": m[:-1], "chosen": m[-1:], "rejected": other} for m, other in zip(ended, others, strict=True)]
    scores = [{"score_chosen": 0.5 + number % 3, "score_rejected": 0.5} for number in range(len(pairs))]
    write("pair_messages.jsonl", [pair | judged for pair, judged in zip(pairs, scores, strict=True)])
    write("pair_conversations.jsonl", [{name: p["prompt"] + p[name] for name in ("chosen", "rejected")} for p in pairs])
    asked = [f"\n\nHuman: {i} {text(9)}?\n\nAssistant:" for i in range(120)]
    write("hh.jsonl", [{"chosen": f"{begin} {text(9)}", "rejected": f"{begin} {text(20)}"} for begin in asked])
    write("pair_tools.jsonl", conversations.PAIRS)
    write("prompt_messages.jsonl", conversations.PROMPTS)


def make_sums(write, folder: Path) -> None:
    """Write short rows of numbers: judged answers, pairs, prompts and labelled texts."""
    sums, numbers = {a: {"prompt": f"{a}+7="} for a in range(10, 99)}, range(10, 99)
    write("labels.jsonl", [sums[a] | {"completion": str(a)[0] * (1 + a % 4), "label": a % 3 > 0} for a in numbers])
    write("pairs.jsonl", [sums[a] | {"chosen": str(a + 7), "rejected": "1" * (1 + a % 4)} for a in numbers])
    judged = [(a, wrong) for wrong in (3, 2, 0, 1) for a in numbers]
    write("judged.jsonl", [sums[a] | {"completion": str(w) * (w + 1), "score": -w * (a % 5) / 9} for a, w in judged])
    write("prompts.jsonl", [sums[a] | {"solution": str(a + 7)} for a in numbers])
    write("labelled.jsonl", [{"text": f"{a}+7=", "label": ["even", "odd"][a % 2]} for a in numbers])
    shutil.copy(ROOT / "tests/children/rewards.py", folder)


def make_of_data(write, folder: Path) -> None:
    """Write rows with images, and beginnings of the data of this repository."""
    import pyarrow.parquet as pq
    from streaming import write_web
    from tiny_images import picture

    sizes, rows = [(24, 16), (16, 32), (40, 20)], []
    (folder / "pictures").mkdir()
    for number in range(40):
        images = [f"pictures/{number}_{image}.png" for image in range((0, 0, 1, 2, 0)[number % 5])]
        for image, name in enumerate(images):
            picture(*sizes[(number + image) % 3], seed=31 * number + image).save(folder / name)
        asked = [*({"type": "image"} for _ in images), {"type": "text", "text": f"question {number}"}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"answer {number % 7}"}]}
        rows.append({"messages": [{"role": "user", "content": asked}, answer], "images": images})
    write("seen.jsonl", rows[:32])
    write("seen_eval.jsonl", rows[32:])
    pq.write_table(pq.read_table(ROOT / "data/fashion/train.parquet").slice(0, 120), folder / "images.parquet")
    pq.write_table(pq.read_table(ROOT / "data/chess/games_20k.parquet").slice(0, 300), folder / "games.parquet")
    with (ROOT / "data/en_fr/libreoffice.jsonl").open() as lines:
        (folder / "translations.jsonl").write_text("".join(itertools.islice(lines, 150)))
    pages = write_web(folder / "web", 20)
    write("few.jsonl", [{"content": text[:100]} for text in pages[2]])
    (folder / "texts.yaml").write_text(f"""
sources:
- {{name: web, weight: 4, dataset_name: {folder}/web}}
- {{name: few, weight: 3, train_files: [{folder}/few.jsonl], text_column: content, heldout_share: 0.3, max_epochs: 1.5}}
- {{name: notes, weight: 2, train_files: [{folder}/text.jsonl]}}
phases:
- {{from: 2, weights: {{few: 1, notes: 3, web: 1}}, lr_factor: 0.5}}
""")


class Recorded(Exception):
    """Raised when all of a case is recorded."""


def record(tree: Path, inputs: Path, out: Path, words: list[str]) -> None:
    """Record the cases of one tree, each in a forked process, to OUT/NAME.pt."""
    sys.path.insert(0, str(tree / "src"))
    for name in IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import accelerate_recipes

    assert Path(accelerate_recipes.__file__ or "").is_relative_to(tree), accelerate_recipes.__file__
    modules: dict[str, ModuleType | None] = {}
    for case in chosen(words):
        script = tree / f"recipes/{case.recipe}.py"
        if not script.exists():
            continue
        if case.recipe not in modules:
            modules[case.recipe] = load(script)
        if not (pid := os.fork()):
            with (out / f"{case.name}.log").open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            try:
                record_case(case, modules[case.recipe], tree, inputs, out)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(0)
        os.waitpid(pid, 0)
        if not (out / f"{case.name}.pt").exists():
            print(f"{case.name} failed:\n{(out / f'{case.name}.log').read_text()[-3000:]}", flush=True)
    os._exit(0)  # threads of libraries may not end


def load(script: Path) -> ModuleType:
    """Import a recipe; not by its bare name, which may be that of a library."""
    spec = importlib.util.spec_from_file_location(f"recipe_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record_case(case: Case, module: Any, tree: Path, inputs: Path, out: Path) -> None:
    """Run a recipe until it would train, or has trained, and write down what it reads and finds."""
    import torch

    from accelerate_recipes import engine
    from accelerate_recipes.args import parse

    start = time.process_time()
    found: dict[str, Any] = {}
    read: list[dict] = []
    train, on_this_rank = module.train, engine.on_this_rank

    def noted(batch: dict, *rest: Any) -> dict:
        read.append(plain(batch))
        return on_this_rank(batch, *rest)

    def trained(run: Any, loader: Any, **given: Any) -> None:
        found["steps"] = run.total_steps
        if case.kind != "reads":
            records = train(run, loader, **given)
            found["records"] = [{name: value for name, value in r.items() if name not in TIMES} for r in records]
            found["weights"] = plain(run.accelerator.unwrap_model(run.model).state_dict())
            found["batches"] = [*read]
        else:
            loader.start_at(0, run.checkpointer.data_states)
            found["train"] = [plain(batch) for batch in itertools.islice(loader, NUM_BATCHES)]
            found["evaluated"] = plain(given["evaluate_fn"](0))
            found["heldout"] = [*read]
        found["state"] = plain(loader.state())
        raise Recorded

    module.train, engine.on_this_rank = trained, noted
    output = out / case.name
    if case.kind == " resumed":
        saved = inputs.parent / "before" / case.name.removesuffix(case.kind)
        shutil.copytree(saved, output, ignore=shutil.ignore_patterns("checkpoint-3", "lock.json"))
    flags = f"{SIZES} {case.flags}".replace("IN/", f"{inputs}/").split()
    sys.argv = [str(tree / f"recipes/{case.recipe}.py")]
    args = parse(module.Args, [*flags, "--output_dir", str(output)], world_size=1)
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(Recorded):
        module.main(args)
    places = {str(output): "OUTPUT", str(out): "OUT", str(inputs): "IN", str(tree): "TREE"}
    said = re.sub("|".join(map(re.escape, places)), lambda match: places[match[0]], printed.getvalue())
    found["printed"] = [line for line in said.splitlines() if not OF_TIMES.search(line)]
    if (output / "rows.txt").exists():
        found["rows.txt"] = (output / "rows.txt").read_text().splitlines()
    if (output / "rows.json").exists():
        found["rows.json"] = json.loads((output / "rows.json").read_text())["trained"]
    if (output / "rows.png").exists():
        found["rows.png"] = (output / "rows.png").read_bytes()
    torch.save(found | {"seconds": time.process_time() - start}, out / "part")
    (out / "part").rename(out / f"{case.name}.pt")


def plain(value: Any) -> Any:
    """Copy a value without classes of the library, which the other tree may not have."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool | bytes | None) else repr(value)


def difference(one: Any, other: Any, place: str = "") -> str:
    """Name the first difference of two values; empty if there is none."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        of_one, of_other = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (one, other))
        if of_one != of_other:
            return f"{place}: {of_one}, now {of_other}"
        differs = ~((one == other) | ((one != one) & (other != other)))
        if not differs.any():
            return ""
        apart = (one.double() - other.double()).abs().max().item()
        return f"{place}: {differs.sum()} of {one.numel()} numbers differ, by up to {apart:.3g}"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{place}: {sorted(one.keys() - other.keys())} are gone, {sorted(other.keys() - one.keys())} are new"
        pairs = [(f"{place}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, list) and isinstance(other, list):
        pairs = [(f"{place}[{number}]", *both) for number, both in enumerate(zip(one, other, strict=False))]
        pairs += [(f"{place}: number of parts", len(one), len(other))]
    else:
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        pairs = enumerate(itertools.zip_longest(str(one), str(other)))
        begin = max(0, next((number for number, both in pairs if len({*both}) > 1), 0) - 50)
        return "" if same else f"{place}: {str(one)[begin:][:120]!r}, now {str(other)[begin:][:120]!r}"
    return next(filter(None, (difference(a, b, name) for name, a, b in pairs)), "")


def compare(case: Case, before: Path, after: Path) -> bool:
    """Print whether a case is the same in both trees."""
    import torch

    files = [folder / f"{case.name}.pt" for folder in (before, after)]
    if missing := [file.parent.name for file in files if not file.exists()]:
        print(f"OTHER {case.name}: nothing is recorded of {' and '.join(missing)}")
        return False
    one, other = (torch.load(file, weights_only=False) for file in files)
    seconds = [f"{recorded.pop('seconds'):.1f} s" for recorded in (one, other)]
    found = list(filter(None, (difference(one.get(name), other.get(name), name) for name in one | other)))
    numbers = [f"{len(one[name])} {name}" for name in ("train", "heldout", "batches") if name in one]
    said = f"{'OTHER' if found else 'SAME '} {case.name} ({', '.join(numbers + seconds)})"
    print(said, *found, sep="\n        ", flush=True)
    return not found


def apart(out: Path, *words: object) -> None:
    """Run this script in another process, on one thread, without the network, and with caches of its own."""
    out.mkdir()
    foreign = ("ACCELERATE_", "FSDP_", "HF_", "PARALLELISM_", "PYTHONPATH", "XDG_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env |= {"HF_HOME": str(out / "hf"), "XDG_CACHE_HOME": str(out / "xdg"), "HF_HUB_OFFLINE": "1"}
    env |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }
    with (out / "errors.log").open("wb") as log:
        command = [sys.executable, __file__, *map(str, words)]
        if subprocess.run(command, env=env, cwd=out, stderr=log, check=False).returncode:
            sys.exit(f"{command} failed:\n{(out / 'errors.log').read_text()[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="Commit with which this tree is compared.")
    parser.add_argument("words", nargs="*", help="Words of which a case's name contains one; none: all cases.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-") as name:
        folder = Path(name).resolve()
        (folder / "base").mkdir()
        archive = ["git", "-C", str(ROOT), "archive", args.base, "src", "recipes"]
        shipped = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", str(folder / "base")], input=shipped, check=True)
        apart(folder / "in", "--make", folder / "in")
        for tree, out in ((folder / "base", folder / "before"), (ROOT, folder / "after")):
            apart(out, "--record", tree, folder / "in", out, *args.words)
        same = [compare(case, folder / "before", folder / "after") for case in chosen(args.words)]
    print(f"{sum(same)} of {len(same)} cases are the same")
    return int(not all(same))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_inputs(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--record"]:
        tree, inputs, out = map(Path, sys.argv[2:5])
        record(tree, inputs, out, sys.argv[5:])
    else:
        sys.exit(main())
