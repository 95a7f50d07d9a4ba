"""Make pictures of four garments, questions about them, and a small untrained model; and ask the trained one.

    python data/fashion/questions.py make outputs/demo-vlm     # rows/ and base/
    python data/fashion/questions.py ask outputs/demo-vlm      # answers of export/, and answers.png

A row is a picture with one of its questions. The pictures of the rows to evaluate on show the garments of
`test.parquet`, which are in no other picture.
"""

import io
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import torch
from matplotlib.figure import Figure
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, Idefics3Config
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from accelerate_recipes.disk import read_json_lines
from accelerate_recipes.life.picture import Bars, plot
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer

NUM_PICTURES = {"train": 6000, "test": 200}
SIDE = 28  # pixels of a garment
# In the order of the labels.
GARMENTS = (
    "a T-shirt", "trousers", "a pullover", "a dress", "a coat", "a sandal", "a shirt", "a sneaker", "a bag", "an ankle boot",
)  # fmt: skip
PLACES = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = ("none", "one", "two", "three", "four")
GROUPS = {"shoes": (5, 7, 9), "tops": (0, 2, 4, 6)}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def questions_of(labels: list[int], chance: random.Random) -> list[tuple[str, str]]:
    """Make questions on a picture of garments with these labels, and their answers."""
    found = [(f"What lies at the {place}?", GARMENTS[label]) for place, label in zip(PLACES, labels, strict=True)]
    alone = [i for i in range(4) if labels.count(labels[i]) == 1]
    for i in chance.sample(alone, min(2, len(alone))):
        found.append((f"Where is {GARMENTS[labels[i]]}?", f"at the {PLACES[i]}"))
    for answer in ("yes", "no"):
        kind = chance.choice([kind for kind in range(10) if (kind in labels) == (answer == "yes")])
        found.append((f"Is there {GARMENTS[kind]}?", answer))
    group = chance.choice([*GROUPS])
    found.append((f"How many {group} are there?", NUMBERS[sum(label in GROUPS[group] for label in labels)]))
    return found


def row_of(picture: str, question: str, answer: str) -> dict:
    """Make a conversation on a picture."""
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
    return {
        "messages": [asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}],
        "images": [picture],
    }


def write_rows(folder: Path, side: str) -> None:
    """Write pictures, and rows with questions on them."""
    chance = random.Random(side)
    garments: dict[int, list[bytes]] = {}
    for garment in pq.read_table(Path(__file__).parent / f"{side}.parquet").to_pylist():
        garments.setdefault(garment["label"], []).append(garment["image"]["bytes"])
    (folder / side).mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(NUM_PICTURES[side]):
        labels = chance.choices(range(10), k=4)
        picture = Image.new("L", (2 * SIDE, 2 * SIDE))
        for place, label in enumerate(labels):
            garment = Image.open(io.BytesIO(chance.choice(garments[label])))
            picture.paste(garment, (place % 2 * SIDE, place // 2 * SIDE))
        name = f"{side}/{number:05}.png"
        picture.save(folder / name)
        rows += [row_of(name, *question) for question in questions_of(labels, chance)]
    (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_base(folder: Path, texts: Iterable[str]) -> None:
    """Write a new Idefics3 of 1.3 million parameters, with its tokenizer and what reads its images."""
    tokenizer = new_bpe_tokenizer(texts, 512, "$A")
    tokenizer.add_tokens([*SPECIAL], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", TEMPLATE
    images = Idefics3ImageProcessorPil(
        do_image_splitting=False, size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": 2 * SIDE}
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    vision = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 4, "max_position_embeddings": 1024, "vocab_size": len(tokenizer)}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Idefics3Config(
        vision_config=vision | {"image_size": 2 * SIDE, "patch_size": 7, "initializer_range": 0.08},
        text_config=text | ids | {"model_type": "llama", "initializer_range": 0.08, "tie_word_embeddings": True},
        image_token_id=processor.image_token_id, scale_factor=4, tie_word_embeddings=True, **ids,
        initializer_range=0.08,  # pyright: ignore[reportCallIssue]: a field of the parent
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def make(folder: Path) -> None:
    for side in NUM_PICTURES:
        write_rows(folder / "rows", side)
    messages = [message for row in read_json_lines(folder / "rows/train.jsonl") for message in row["messages"]]
    write_base(folder / "base", (text for message in messages for text in (message["role"], text_of(message))))


def text_of(message: dict) -> str:
    return message["content"][-1]["text"]


def answers_of(export: Path, rows: Sequence[dict], folder: Path) -> list[str]:
    """Ask a model the questions of rows, with transformers alone."""
    processor = AutoProcessor.from_pretrained(export, padding_side="left")
    model = AutoModelForImageTextToText.from_pretrained(export)
    found = []
    for first in range(0, len(rows), 100):
        asked = rows[first : first + 100]
        texts = [processor.apply_chat_template(row["messages"][:1], add_generation_prompt=True) for row in asked]
        pictures = [[Image.open(folder / name) for name in row["images"]] for row in asked]
        inputs = processor(text=texts, images=pictures, padding=True, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        found += processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return found


def blind_answers(rows: Sequence[dict], trained: Sequence[dict]) -> list[str]:
    """Answer each question as the rows to train on do most often, which is the best without a look at the picture."""
    answers: dict[str, Counter] = {}
    for row in trained:
        question, answer = map(text_of, row["messages"])
        answers.setdefault(question, Counter())[answer] += 1
    return [answers[text_of(row["messages"][0])].most_common(1)[0][0] for row in rows]


def shares_right(rows: Sequence[dict], answers: Sequence[str]) -> dict[str, float]:
    """Compute the percentage of right answers, by the first words of the questions."""
    right: dict[str, list[bool]] = {}
    for row, answer in zip(rows, answers, strict=True):
        question, expected = map(text_of, row["messages"])
        right.setdefault(" ".join(question.split()[:2]), []).append(answer == expected)
    right["all"] = [one for kind in right.values() for one in kind]
    return {kind: 100 * sum(found) / len(found) for kind, found in right.items()}


def ask(folder: Path) -> None:
    """Ask an export all held-out questions; print how many are right, and draw twelve of them beside the run's curve."""
    rows, trained = (read_json_lines(folder / f"rows/{side}.jsonl") for side in ("test", "train"))
    answers = answers_of(folder / "export", rows, folder / "rows")
    shares = {
        "without the picture": shares_right(rows, blind_answers(rows, trained)),
        "with it": shares_right(rows, answers),
    }
    for name, found in shares.items():
        print(f"Right {name}: " + ", ".join(f"{kind} {share:.1f}%" for kind, share in found.items()))
    figure = Figure(figsize=(14, 7), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2)).tolist()
    for place, number in zip(left.subplots(3, 4).ravel(), range(0, len(rows), len(rows) // 12), strict=False):
        row, answer = rows[number], answers[number]
        question, expected = map(text_of, row["messages"])
        place.imshow(Image.open(folder / "rows" / row["images"][0]), cmap="gray")
        place.axis("off")
        is_right = answer == expected
        said = answer if is_right else f"{answer} (no: {expected})"
        place.set_title(f"{question}\n{said}", fontsize=9, color="black" if is_right else "red")
    curve, chart = right.subplots(2, 1)
    records = read_json_lines(folder / "metrics.jsonl")
    for name in ("loss", "eval_loss"):
        plot(curve, records, name, None)
    curve.set(xlabel="optimizer step", title="Loss (nats per token)", yscale="log")
    curve.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    curve.minorticks_off()
    curve.grid(alpha=0.3)
    curve.legend()
    Bars(shares, f"{len(rows):,} held-out questions", "% right").draw(chart)
    figure.savefig(folder / "answers.png", dpi=80)


if __name__ == "__main__":
    {"make": make, "ask": ask}[sys.argv[1]](Path(sys.argv[2]))
