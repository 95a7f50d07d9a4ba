"""Measure how alike the attention maps of neighbouring layers are, in a deep ViT with and without re-attention.

    python benchmarks/attention_maps.py outputs/vit16/export outputs/deepvit16/export --out benchmarks/results/maps.json

The arguments are exports of recipes/vit.py of the same sizes, the first trained with `--reattention false`. Two maps are
compared by the cosine of the attention of a token in one layer and in the next, mean over tokens, heads and held-out images;
and by their correlation: softmax's maps are positive, so their cosine is high whatever they say, while maps behind a norm,
with which a DeepViT weights its values, have both signs. The script also writes a picture beside --out.

Source: Zhou et al., DeepViT: Towards Deeper Vision Transformer, 2021, section 3.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch
from machine import machine
from matplotlib.figure import Figure
from torch.nn import functional as F
from transformers import AutoModelForImageClassification

from accelerate_recipes.args import parse
from accelerate_recipes.checkpoint.export import arguments_of
from accelerate_recipes.data.images import Images, load_images
from accelerate_recipes.recipe import load
from accelerate_recipes.vision.classifiers import load_image_processor

ROOT = Path(__file__).parents[1]
NUM_IMAGES = 100


@torch.no_grad()
def similarities(export: Path) -> dict[str, list[float]]:
    """Return the mean cosine, and the mean correlation, of the maps of each layer and the next."""
    model = AutoModelForImageClassification.from_pretrained(export).eval()
    names = ("train_files", "heldout_share")
    flags = [word for name in names for word in (f"--{name}", *map(str, as_list(arguments_of(export)[name])))]
    args = parse(load(ROOT / "recipes/vit.py").Args, ["--from_scratch", *flags], world_size=1)
    images = Images(load_images(args)[1], load_image_processor(str(export)))
    pixels = torch.stack([images[row]["pixel_values"] for row in range(NUM_IMAGES)])
    maps: list[torch.Tensor] = []
    for layer in model.deepvit.layers:
        layer.attention.reattention.register_forward_hook(lambda module, given, result: maps.append(result))
    model(pixel_values=pixels)
    centred = [map - map.mean(-1, keepdim=True) for map in maps]
    return {
        name: [F.cosine_similarity(one, other, dim=-1).mean().item() for one, other in pairwise(chosen)]
        for name, chosen in (("cosine", maps), ("correlation", centred))
    }


def as_list(value: object) -> list:
    return value if isinstance(value, list) else [value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exports", nargs=2, type=Path, help="Exports without and with re-attention.")
    parser.add_argument("--out", type=Path, required=True, help="File for the result.")
    flags = parser.parse_args()

    found = {name: similarities(export) for name, export in zip(("ViT", "DeepViT"), flags.exports, strict=True)}
    result = {"machine": machine(torch.device("cpu")), "with_the_next_layer": found}
    flags.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, measure in zip(figure.subplots(1, 2), ("cosine", "correlation"), strict=True):
        for name, values in found.items():
            axes.plot(range(1, len(values[measure]) + 1), values[measure], marker="o", markersize=4, label=name)
        axes.set(xlabel="layer", ylabel=f"{measure} with the next layer's maps")
        axes.legend()
    figure.savefig(flags.out.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
