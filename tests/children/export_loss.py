"""Compute the mean loss of an exported model on packed rows, one game at a time, without using this project.

python export_loss.py EXPORT ROWS
"""

import sys

import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

export, rows = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(export)
assert tokenizer.decode(tokenizer("e2e4 e7e5", add_special_tokens=False)["input_ids"]) == "e2e4 e7e5"
loss_sum, num_targets = 0.0, 0
with torch.no_grad():
    for row in load_from_disk(rows):
        start = 0
        for length in row["lengths"]:
            ids = torch.tensor([row["input_ids"][start : start + length]])
            start += length
            if length > 1:
                loss_sum += model(input_ids=ids, labels=ids).loss.item() * (length - 1)
                num_targets += length - 1
assert "accelerate_recipes" not in sys.modules
print(loss_sum / num_targets)
