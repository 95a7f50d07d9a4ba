"""Measure the CPU time of preparing rows: those of SFT beside rendering and encoding alone, pairs and games beside before.

    python benchmarks/prepare_rows.py --out benchmarks/results/prepare_rows.json
    python benchmarks/prepare_rows.py --before ../another_checkout

`alone` renders the conversations one by one, and encodes their texts in batches, nothing else. `prepare` is the command
`prepare recipes/sft.py` without its imports, in one process: from the file to the first rows that it shows. With --before,
another checkout does the same. Conversations are made of the texts of shards (--text), of one to three questions and
answers; each way runs in a process of its own, and they take turns. Templates: `qwen2_5` of trl, of which answers are found
by the rule, and `chatml`, which marks them. `t5` prepares five times the shipped pairs of texts, and `chess` the shipped
games; they are compared with --before.
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
RECIPES = ("t5", "chess")
PAIRS, GAMES = ROOT / "data/en_fr/libreoffice.jsonl", ROOT / "data/chess/games_20k.parquet"


def cpu_seconds() -> float:
    return sum(used.ru_utime + used.ru_stime for used in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


def make_base(folder: Path, shards: list[str], number: int) -> None:
    """Write conversations, a tokenizer that was trained on the same texts, and a tiny model for each template."""
    import trl
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

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
    pairs = PAIRS.read_text(encoding="utf-8")
    (folder / "pairs.jsonl").write_text(5 * pairs, encoding="utf-8")
    ending = new_bpe_tokenizer(pairs.splitlines(), 8000, "$A </s>")
    config = T5Config(vocab_size=len(ending), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0  # pyright: ignore[reportAttributeAccessIssue]
    T5ForConditionalGeneration(config).save_pretrained(folder / "t5")
    ending.save_pretrained(folder / "t5")


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
    import pyarrow.parquet as pq

    from accelerate_recipes import recipe
    from accelerate_recipes.arguments import shipped

    root, home = Path(recipe.__file__).parents[2], Path(os.environ["HF_HOME"])
    script = str(root / f"recipes/{name if name in RECIPES else 'sft'}.py")
    shipped.load(script)
    args = ["--output_dir", str(home / "out")]
    if name == "chess":
        few, rows = home / "few.parquet", GAMES
        pq.write_table(pq.read_table(GAMES).slice(0, 200), few)
        args += ["--from_scratch", "--heldout_share", "0.05", "--data_cache_dir", str(home / "rows")]
    else:
        few, rows = home / "few.jsonl", folder / ("pairs.jsonl" if name == "t5" else "chats.jsonl")
        few.write_text("".join(rows.open(encoding="utf-8").readlines()[:200]), encoding="utf-8")
        args += ["--model_name_or_path", str(folder / name)]
        args += ["--heldout_share", "0.05", "--data_cache_dir", str(home / "rows")] if name == "t5" else []
    start = 0.0
    for file in (few, rows):  # a few rows first, for what is imported late
        start = cpu_seconds()
        recipe.prepare_data([script, "--train_files", str(file), *args])
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
    parser.add_argument("--cases", nargs="+", default=[*TEMPLATES, *RECIPES], help="What is prepared.")
    parser.add_argument("--before", type=Path, help="Another checkout, to compare with.")
    for name in ("way", "folder", "template"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.way:
        measure = measure_alone if flags.way == "alone" else measure_prepare
        write_json(flags.out, measure(Path(flags.folder), flags.template))
        return
    ways = {"alone": ROOT, "prepare": ROOT} | ({"before": flags.before.resolve()} if flags.before else {})
    ways_of = {name: [*ways] if name in TEMPLATES else [*ways][1:] for name in flags.cases}
    found = {
        "machine": machine(),
        "rows": flags.rows,
        "seconds": {name: {way: [] for way in of_name} for name, of_name in ways_of.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        make_base(Path(folder), flags.text, flags.rows)
        for number in range(flags.rounds):
            for name, of_name in ways_of.items():
                for way in turns(of_name, number):
                    values = run(way, Path(folder), name, ways[way])
                    found["tokens"] = values.pop("tokens", found.get("tokens"))
                    found["seconds"][name][way].append(values)
                    print(name, way, {key: round(value, 2) for key, value in values.items()}, flush=True)
    for name, seconds in found["seconds"].items():
        totals = {way: [sum(values.values()) for values in of_rounds] for way, of_rounds in seconds.items()}
        base = "alone" if name in TEMPLATES else [*totals][-1]
        for way in totals:
            ratio = median(one / other for one, other in zip(totals[way], totals[base], strict=True))
            print(f"{name}, {way}: {median(totals[way]):.1f} s, {ratio:.2f} times {base}")
            found.setdefault("ratios", {}).setdefault(name, {})[way] = round(ratio, 3)
    write_json(flags.out, found)


if __name__ == "__main__":
    main()
