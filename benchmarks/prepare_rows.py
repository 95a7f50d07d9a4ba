"""Measure the CPU time of preparing rows of SFT, beside rendering and encoding alone.

    python benchmarks/prepare_rows.py --out benchmarks/results/prepare_rows.json
    python benchmarks/prepare_rows.py --before ../another_checkout

`alone` renders the conversations one by one, and encodes their texts in batches, nothing else. `prepare` is the command
`prepare recipes/sft.py` without its imports, in one process: from the file to the first rows that it shows. With --before,
another checkout does the same. Conversations are made of the texts of shards (--text), of one to three questions and
answers; each way runs in a process of its own, and they take turns. Templates: `qwen2_5` of trl, of which answers are found
by the rule, and `chatml`, which marks them.
"""

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from statistics import median

from harness import ROOT, machine, make_parser, turns, write_json

TEMPLATES = ("qwen2_5", "chatml")


def cpu_seconds() -> float:
    return sum(used.ru_utime + used.ru_stime for used in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


def make_base(folder: Path, shards: list[str], number: int) -> None:
    """Write conversations, a tokenizer that was trained on the same texts, and a tiny model for each template."""
    import trl
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate_recipes.models.tokenizers import new_bpe_tokenizer

    lines = [line for shard in shards for line in gzip.decompress(Path(shard).read_bytes()).splitlines()]
    texts = [json.loads(line)["text"] for line in lines]
    words, draw = " ".join(texts).split(" "), random.Random(0)

    def said(length: int) -> str:
        first = draw.randrange(len(words) - length)
        return " ".join(words[first : first + length])

    with (folder / "chats.jsonl").open("w", encoding="utf-8") as chats:
        for row in range(number):
            messages = [{"role": "system", "content": "Be brief."}] if row % 3 == 0 else []
            for _ in range(draw.choice([1, 1, 1, 2, 3])):
                messages.append({"role": "user", "content": said(draw.randrange(10, 60))})
                messages.append({"role": "assistant", "content": said(draw.randrange(20, 180))})
            chats.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = new_bpe_tokenizer(texts, 32_000)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=8192, **sizes))
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    files = (Path(trl.__file__).parent / "chat_templates/qwen2_5.jinja", ROOT / "recipes/chat_templates/chatml.jinja")
    for name, file in zip(TEMPLATES, files, strict=True):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)


def measure_alone(folder: Path, name: str) -> dict[str, float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    rows = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").open(encoding="utf-8")]
    start = cpu_seconds()
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in rows]
    rendered, tokens = cpu_seconds(), 0
    for first in range(0, len(texts), 1000):
        ids = tokenizer(texts[first : first + 1000], add_special_tokens=False)["input_ids"]
        tokens += sum(map(len, ids))
    return {"render": rendered - start, "encode": cpu_seconds() - rendered, "tokens": tokens}


def measure_prepare(folder: Path, name: str) -> dict[str, float]:
    from accelerate_recipes import recipe
    from accelerate_recipes.arguments import shipped

    root = Path(recipe.__file__).parents[2]
    script = str(root / "recipes/sft.py")
    shipped.load(script)
    chats, few, out = folder / "chats.jsonl", Path(os.environ["HF_HOME"], "few.jsonl"), os.environ["HF_HOME"] + "/out"
    few.write_text("".join(chats.open(encoding="utf-8").readlines()[:200]), encoding="utf-8")
    start = 0.0
    for file in (few, chats):  # a few rows first, for what is imported late
        start = cpu_seconds()
        base = ["--model_name_or_path", str(folder / name), "--train_files", str(file), "--output_dir", out]
        recipe.prepare_data([script, *base])
    return {"prepare": cpu_seconds() - start}


def run(way: str, folder: Path, name: str, tree: Path) -> dict[str, float]:
    """Measure one way in a process of its own, by the code of a checkout, with empty caches."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home, "found.json")
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "HF_HOME": home, "HF_HUB_OFFLINE": "1"}
        command = [
            sys.executable,
            __file__,
            "--way",
            way,
            "--folder",
            str(folder),
            "--template",
            name,
            "--out",
            str(out),
        ]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    parser = make_parser(__doc__, rows=(20_000, "Conversations."), rounds=(3, "Repetitions of each way."))
    shards = sorted(map(str, (ROOT / "data/c4_pydoc/en").glob("c4-train.*.json.gz")))
    parser.add_argument("--text", nargs="+", default=shards, help="Shards, .json.gz, as those of C4.")
    parser.add_argument("--before", type=Path, help="Another checkout, to compare with.")
    for name in ("way", "folder", "template"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.way:
        measure = measure_alone if flags.way == "alone" else measure_prepare
        write_json(flags.out, measure(Path(flags.folder), flags.template))
        return
    ways = {"alone": ROOT, "prepare": ROOT} | ({"before": flags.before.resolve()} if flags.before else {})
    found = {
        "machine": machine(),
        "rows": flags.rows,
        "seconds": {name: {way: [] for way in ways} for name in TEMPLATES},
    }
    with tempfile.TemporaryDirectory() as folder:
        make_base(Path(folder), flags.text, flags.rows)
        for number in range(flags.rounds):
            for name in TEMPLATES:
                for way in turns([*ways], number):
                    values = run(way, Path(folder), name, ways[way])
                    found["tokens"] = values.pop("tokens", found.get("tokens"))
                    found["seconds"][name][way].append(values)
                    print(name, way, {key: round(value, 2) for key, value in values.items()}, flush=True)
    for name, seconds in found["seconds"].items():
        totals = {way: [sum(values.values()) for values in of_rounds] for way, of_rounds in seconds.items()}
        for way in ways:
            ratio = median(one / alone for one, alone in zip(totals[way], totals["alone"], strict=True))
            print(f"{name}, {way}: {median(totals[way]):.1f} s, {ratio:.2f} times rendering and encoding alone")
            found.setdefault("ratios", {}).setdefault(name, {})[way] = round(ratio, 3)
    write_json(flags.out, found)


if __name__ == "__main__":
    main()
