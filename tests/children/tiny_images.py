"""Tiny models of families that see images, and their processors: a token for each character, images of a few patches."""

import copy
import importlib
import json
import string
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny import COMPOSITE, EXPERTS, QWEN_TOKENS, SIZES
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from accelerate_recipes.models.processors import class_of_processor

PAD, UNKNOWN, BEGIN, START, END = "<pad>", "<unk>", "<bos>", "<|im_start|>", "<|im_end|>"
CHARACTERS = string.ascii_letters + string.digits + " \n.,?!:-|<>/_"
# Writes contents that are texts, and those that are parts. IMAGE is what a family's template writes for an image.
TEMPLATE = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ said(message['content']) + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ said(message['content']) + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Fields of a tiny text part, beside SIZES.
TEXT = {
    "initializer_range": 0.2, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 4,
}  # fmt: skip
TILES = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}  # pixels that a large image may be divided into
CROP = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
SQUARE = {"size": {"height": 16, "width": 16}}
PATCHES = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
LLAVA = {
    "tokens": {"image_token": "<image>"},
    "written": "<image>",
    "ids": {"image_token_index": "<image>"},
    "vision": {"image_size": 16, "num_hidden_layers": 2},
}
QWEN = {
    "tokens": {
        "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
    "written": "<|vision_start|><|image_pad|><|vision_end|>",
    "images": ("qwen2_vl", "Qwen2VL", {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}),
    "ids": dict(zip(QWEN_TOKENS, ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"), strict=True)),
    "vision": {"depth": 2},
}  # fmt: skip
DEEP = QWEN | {"vision": {"depth": 2, "deepstack_visual_indexes": [0, 1]}}
GLM = {
    "tokens": {"image_token": "<|image|>", "video_token": "<|video|>"},
    "more": ["<|begin_of_image|>", "<|end_of_image|>"],
    "written": "<|begin_of_image|><|image|><|end_of_image|>",
    "images": (
        "glm4v", "Glm4v", {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 2048}},
    ),
    "ids": {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>"},
    "vision": {
        "depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32, "intermediate_size": 32,
        "image_size": 32, "spatial_merge_size": 2,
    },
    "text": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0,
    }},
}  # fmt: skip
IDEFICS = {
    "tokens": {
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
    "more": [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)],
    "written": "<image>",
    "processor": {"image_seq_len": 4},
    "ids": {"image_token_id": "<image>"},
    "vision": {"image_size": 16, "num_hidden_layers": 2},
    "whole": {"scale_factor": 2, "pad_token_id": 0},
}  # fmt: skip
IDEFICS_SIZES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
# For each family: special tokens by their names, and `more` of them; what its template writes for an image; module, class
# and settings of what processes images; the processor's own settings; fields of the configuration that hold tokens; and
# what differs from COMPOSITE in the parts of the model, and in the whole.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN | {"vision": {"depth": 2, "fullatt_block_indexes": [1], "window_size": 16}},
    "qwen3_vl": DEEP,
    "qwen3_vl_moe": DEEP | {"like": "qwen3_vl", "text": EXPERTS},
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "glm4v": GLM | {"like": None},
    "glm46v": GLM | {"like": None},
    "gemma3": {
        "tokens": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "written": "<start_of_image>",
        "images": ("gemma3", "Gemma3", SQUARE),
        "processor": {"image_seq_length": 4},
        "ids": {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
                "eoi_token_index": "<end_of_image>"},
        "text": {"sliding_window": 16},
        "vision": {"image_size": 16, "num_hidden_layers": 2},
        "whole": {"mm_tokens_per_image": 4},
    },
    "gemma4": {
        "tokens": {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
                   "boa_token": "<|audio>", "eoa_token": "<audio|>"},
        "more": ["<|video|>"],
        "written": "<|image|>",
        "images": ("gemma4", "Gemma4", {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2}),
        "processor": {"image_seq_length": 70},
        "ids": {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
        "vision": {"patch_size": 4, "position_embedding_size": 512},
    },
    "smolvlm": IDEFICS | {"images": ("smolvlm", "SmolVLM", IDEFICS_SIZES)},
    "idefics3": IDEFICS | {"images": ("idefics3", "Idefics3", IDEFICS_SIZES)},
    "internvl": {
        "tokens": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                   "video_token": "<video>"},
        "written": "<IMG_CONTEXT>",
        "images": ("got_ocr2", "GotOcr2", SQUARE | {"crop_to_patches": True, "min_patches": 1, "max_patches": 4}),
        "processor": {"image_seq_length": 4},
        "ids": {"image_token_id": "<IMG_CONTEXT>"},
        "vision": {"image_size": [16, 16], "num_hidden_layers": 2},
        "whole": {"downsample_ratio": 0.5, "image_seq_length": 4},
    },
    "mistral3": {
        "more": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "written": "[IMG]",
        "images": ("pixtral", "Pixtral", {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}}),
        "processor": {"patch_size": 4, "spatial_merge_size": 2},
        "ids": {"image_token_index": "[IMG]"},
        "vision": {"image_size": 64, "num_hidden_layers": 2},
        "whole": {"spatial_merge_size": 2},
    },
    "llava": LLAVA | {"images": ("clip", "CLIP", CROP), "processor": PATCHES},
    "llava_next": LLAVA | {"images": ("llava_next", "LlavaNext", CROP | TILES), "processor": PATCHES, "whole": TILES},
    "llava_onevision": LLAVA | {
        "more": ["<video>"],
        "images": ("llava_onevision", "LlavaOnevision", SQUARE | TILES),
        "processor": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        "ids": {"image_token_index": "<image>", "video_token_index": "<video>"},
        "whole": TILES,
    },
}  # fmt: skip

TEXTS_OF_PARTS = "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
IMAGES_OF_PARTS = (
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{# Render all text next #}"
)
# As their authors publish them.
PUBLISHED = {
    "llava": (
        "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
        + IMAGES_OF_PARTS + "{% if message['role'] != 'assistant' %}" + TEXTS_OF_PARTS + "{{ content['text'] + ' '}}{% endfor %}"
        "{% else %}" + TEXTS_OF_PARTS + "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "llava_next": (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ '<<SYS>>\n' + message['content'][0]['text'] + "
        "'\n<</SYS>>\n\n' }}{% elif message['role'] == 'user' %}{{ '[INST] ' }}" + IMAGES_OF_PARTS + TEXTS_OF_PARTS
        + "{{ content['text'] }}{% endfor %}{{' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        r"{{ ' ' + message['content'][0]['text'] + '<\s> '}}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    ),
    "llava_onevision": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}" + IMAGES_OF_PARTS
        + "{% if message['role'] != 'assistant' %}" + TEXTS_OF_PARTS + "{{ '\n' + content['text'] }}{% endfor %}{% else %}"
        + TEXTS_OF_PARTS + "{% generation %}{{ '\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}"
        "{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "glm4v": """[gMASK]<sop>
{%- for msg in messages %}
    {%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}
    {%- elif msg.role == 'user' %}
<|user|>{{ '\n' }}

        {%- if msg.content is string %}
{{ msg.content }}
        {%- else %}
            {%- for item in msg.content %}
                {%- if item.type == 'video' or 'video' in item %}
<|begin_of_video|><|video|><|end_of_video|>
                {%- elif item.type == 'image' or 'image' in item %}
<|begin_of_image|><|image|><|end_of_image|>
                {%- elif item.type == 'text' %}
{{ item.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
    {%- elif msg.role == 'assistant' %}
        {%- if msg.metadata %}
<|assistant|>{{ msg.metadata }}
{{ msg.content }}
        {%- else %}
<|assistant|>
{{ msg.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
}  # fmt: skip


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a family, with its chat template."""
    family = FAMILIES[name]
    known = [PAD, UNKNOWN, BEGIN, START, END, *CHARACTERS]
    made = Tokenizer(models.WordLevel({token: number for number, token in enumerate(known)}, unk_token=UNKNOWN))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    usual = {"pad_token": PAD, "unk_token": UNKNOWN, "bos_token": BEGIN, "eos_token": END}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **usual, extra_special_tokens=family.get("tokens", {}))
    found.add_tokens([START, *family.get("more", [])], special_tokens=True)
    found.chat_template = TEMPLATE.replace("IMAGE", family["written"])
    return found


def processor(name: str, text: PreTrainedTokenizerFast | None = None) -> ProcessorMixin:
    """Make the processor of a family, with its tokenizer or another; it reads no videos."""
    text = text or tokenizer(name)
    module, kind, settings = FAMILIES[name]["images"]
    by_pil = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    images = getattr(by_pil, f"{kind}ImageProcessorPil")(**settings)
    made = class_of_processor(PROCESSOR_MAPPING_NAMES[name])
    parts = dict.fromkeys(made.get_attributes()) | {"image_processor": images, "tokenizer": text}
    return made(**parts, **FAMILIES[name].get("processor", {}), chat_template=text.chat_template)


def with_words(name: str, template: str, *words: str, adds: str = "$A") -> ProcessorMixin:
    """Make a processor with another chat template, whose tokenizer joins a space with the word behind it, as Llama's does.

    The tokenizer `adds` tokens around a text $A; its begin token is <s>, and its end token </s>.
    """
    family = FAMILIES[name]
    usual = {"pad_token": PAD, "unk_token": UNKNOWN, "bos_token": "<s>", "eos_token": "</s>"}
    known = {token: number for number, token in enumerate([*usual.values(), *words])}
    read = Tokenizer(models.WordLevel(known, unk_token=UNKNOWN))
    read.pre_tokenizer, read.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace()
    tokens = [(token, known[token]) for token in ("<s>", "</s>")]
    read.post_processor = processors.TemplateProcessing(single=adds, special_tokens=tokens)
    found = PreTrainedTokenizerFast(tokenizer_object=read, **usual, extra_special_tokens=family.get("tokens", {}))
    found.add_tokens(family.get("more", []), special_tokens=True)
    found.chat_template = template
    return processor(name, found)


@cache
def saved_config(name: str) -> PreTrainedConfig:
    family, text = FAMILIES[name], tokenizer(name)
    like = family.get("like", name)
    of_text, of_vision, whole = COMPOSITE[like] if like else ({}, {}, {})
    vision = of_vision | family["vision"]
    vocabulary = {field: len(text) for field in ("vocab_size", "vocab_size_per_layer_input")}
    fields = SIZES | TEXT | of_text | family.get("text", {})
    fields |= {field: size for field, size in vocabulary.items() if field in fields}
    ids = {field: text.convert_tokens_to_ids(token) for field, token in family["ids"].items()}
    whole = whole | family.get("whole", {}) | ids
    return CONFIG_MAPPING[name](text_config=fields, vision_config=vision, **whole)


def config(name: str) -> PreTrainedConfig:
    """Make the configuration of a tiny model of a family."""
    return copy.deepcopy(saved_config(name))


def model(name: str, attention: str | dict[str, str] = "sdpa", seed: int = 0) -> PreTrainedModel:
    """Make a tiny model of a family, with random weights. None is zero, which would hide what it computes with it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForImageTextToText.from_config(config(name), attn_implementation=attention)
        for parameter in made.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter.data, std=0.02)
    return made


def save_base(folder: Path | str, name: str, seed: int = 0) -> Path:
    """Write a tiny model of a family as one that can be fine-tuned: weights, settings, tokenizer and processor."""
    folder = Path(folder)
    model(name, seed=seed).save_pretrained(folder)
    save_processor(folder, name).tokenizer.save_pretrained(folder)
    return folder


def save_processor(folder: Path, name: str) -> ProcessorMixin:
    """Write the settings of the processor of a family; return it."""
    made = processor(name)
    settings = made.to_dict()
    # A published model does not say that PIL processes its images.
    settings["image_processor"]["image_processor_type"] = type(made.image_processor).__name__.removesuffix("Pil")
    settings = {field: value for field, value in settings.items() if value is not None}
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return made


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Make an image of random colours."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))
