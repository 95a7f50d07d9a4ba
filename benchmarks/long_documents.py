"""Measure whether context far back helps: loss by position in held-out documents, with context cut and whole.

    python benchmarks/long_documents.py --model outputs/long/export --out long_documents.json --picture long_documents.png

The same target tokens are predicted twice: from all tokens of the document before them, and from the last --context ones
(a few more, up to --stride, because targets are predicted in blocks; this favours the cut context). Documents are what is
drawn at random, so each counts once: the interval is of the mean over documents of the difference (bootstrap), the test
exchanges the two losses within documents (sign flips, two-sided).
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from machine import machine
from pages import PAGES
from transformers import AutoModelForCausalLM, AutoTokenizer

from accelerate_recipes.data.documents import all_texts

DRAWS = 10_000  # of documents for the interval, of signs for the test
BATCH = 8  # blocks with cut context in a forward pass


def losses(model, rows: torch.Tensor, first: int) -> torch.Tensor:
    """Compute the loss of the tokens of rows (B, T) from position `first` on, in nats: (B, T - first)."""
    logits = model(rows[:, :-1]).logits[:, first - 1 :]
    return F.cross_entropy(logits.transpose(1, 2).float(), rows[:, first:], reduction="none")


@torch.no_grad()
def compare(model, tokens: torch.Tensor, context: int, stride: int) -> np.ndarray:
    """Return the losses of a document's tokens (T,) after the first `context`, whole and cut: (2, T - context)."""
    whole = losses(model, tokens[None], context)[0]
    blocks = tokens.unfold(0, context + stride, stride)
    cut = torch.cat([losses(model, part, context) for part in blocks.split(BATCH)]).flatten()
    return torch.stack([whole[: len(cut)], cut]).numpy()


def paired(differences: np.ndarray, generator: np.random.Generator) -> dict:
    """Describe differences (N,) of N documents: mean, its 95 % interval, and the p-value of there being none."""
    mean = differences.mean()
    drawn = generator.choice(differences, (DRAWS, len(differences))).mean(1)
    flipped = (differences * generator.choice([-1, 1], (DRAWS, len(differences)))).mean(1)
    p = (1 + (abs(flipped) >= abs(mean)).sum()) / (1 + DRAWS)
    return {"mean": float(mean), "interval": np.quantile(drawn, [0.025, 0.975]).tolist(), "p": float(p)}


def draw(path: Path, result: dict) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    parts = result["parts"]
    where = [(part["from"] + part["to"]) / 2 for part in parts]
    for name, label in (("cut", f"last {result['context']} tokens"), ("whole", "whole document before it")):
        left.plot(where, [part[name] for part in parts], marker="o", label=label)
    means = np.array([part["difference"]["mean"] for part in parts])
    bounds = np.array([part["difference"]["interval"] for part in parts]).T
    right.errorbar(where, means, abs(bounds - means), marker="o", capsize=3)
    right.axhline(0, color="black", linewidth=0.8)
    left.set(title=f"Loss in {result['documents']} held-out documents", ylabel="nats per token")
    right.set(title="What the rest of the document saves", ylabel="nats per token, 95 % interval")
    for axes in (left, right):
        axes.set(xlabel="position in the document, tokens")
    left.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--pages", default=str(PAGES / "en/c4-train.00003-of-01024.json.gz"))
    parser.add_argument(
        "--length", type=int, default=4096, help="Tokens of a document that are read; shorter ones are not."
    )
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--stride", type=int, default=128)
    parser.add_argument("--parts", type=int, default=7, help="Ranges of positions.")
    parser.add_argument("--documents", type=int, default=1000, help="At most so many.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    tokenizer, model = (
        AutoTokenizer.from_pretrained(args.model),
        AutoModelForCausalLM.from_pretrained(args.model).eval(),
    )
    tokenized = (tokenizer(text)["input_ids"] for text in all_texts([args.pages], "text"))
    long = [torch.tensor(ids[: args.length]) for ids in tokenized if len(ids) >= args.length][: args.documents]
    found = np.stack([compare(model, tokens, args.context, args.stride) for tokens in long])  # (N, 2, positions)
    generator = np.random.default_rng(0)
    settings = {name: getattr(args, name) for name in ("model", "length", "context", "stride")}
    settings |= {"pages": Path(args.pages).name, "documents": len(long)}
    result = {"machine": machine(torch.device("cpu")), **settings, "parts": []}
    bounds = np.linspace(0, found.shape[2], args.parts + 1).round().astype(int).tolist()
    for start, end in [(0, found.shape[2]), *pairwise(bounds)]:
        whole, cut = found[:, :, start:end].mean(2).T
        part = {
            "from": args.context + start,
            "to": args.context + end,
            "whole": float(whole.mean()),
            "cut": float(cut.mean()),
        }
        part |= {"difference": paired(cut - whole, generator), "better_whole": int((cut > whole).sum())}
        part["by_document"] = {"whole": whole.round(5).tolist(), "cut": cut.round(5).tolist()}
        result["parts"].append(part)
        print({name: value for name, value in part.items() if name != "by_document"}, flush=True)
    result["all"] = result["parts"].pop(0)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.picture:
        draw(args.picture, result)


if __name__ == "__main__":
    main()
