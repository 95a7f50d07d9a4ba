"""Classifiers of texts, tokens or images: loading with the classes of the rows, and the tokenizer of texts."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models import pretrained
from accelerate_recipes.models.loading import on_meta, with_classes
from accelerate_recipes.ranks import print_first


def load_classifier(auto: str, name: str, names: Sequence[str], **settings: Any) -> transformers.PreTrainedModel:
    """Load a model as `auto`, a class of transformers by its name, with the classes `names`, of texts, tokens or images.

    In the output layer, a class has the row of its name in the files, and a class that has none gets a new row. A base that
    does not name its classes calls them LABEL_0, LABEL_1, ...: by their numbers.
    """
    config = pretrained.load_config(name)
    text = config.get_text_config()
    if getattr(text, "pad_token_id", 0) is None:  # decoders find the end of a text by it, and many do not name it
        text.pad_token_id = pretrained.read_tokenizer(name).pad_token_id
    of_base = [label for _, label in sorted(config.id2label.items())]
    made_by = getattr(transformers, auto)
    one_more = on_meta(made_by, with_classes(copy.deepcopy(config), [*names, ""]))
    model = on_meta(made_by, with_classes(config, names))
    shapes = {weight: parameter.shape for weight, parameter in one_more.named_parameters()}
    of_classes = [weight for weight, parameter in model.named_parameters() if parameter.shape != shapes[weight]]
    weights = pretrained.weights_in_files(model, name)
    of_files = {weight: weights.pop(weight) for weight in of_classes if weight in weights}
    place_of = {label: number for number, label in enumerate(occurrences(of_base))}
    kept = {number: place_of[label] for number, label in enumerate(occurrences(names)) if label in place_of}
    rows = {w: values[[*kept.values()]] for w, values in of_files.items() if len(values) == len(of_base)}
    if len(kept) == len(names):
        model = pretrained.with_weights(model, name, weights | rows, settings)
    else:  # transformers draws the whole layer, and says that it is new
        model = pretrained.with_weights(model, name, weights, settings)
        for weight, values in rows.items():
            parameter = model.get_parameter(weight).data
            parameter[[*kept]] = values.to(parameter.dtype)
    if rows:
        print_first(f"Output layer: {len(kept)} of {len(names)} classes have the rows of their names in {name}")
    return model


def classifier_tokenizer(auto: str, name: str, max_length: int) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a base of `auto`, for texts padded to `max_length` tokens; it makes what the model reads.

    Raises:
        ConfigError: for a length beyond the model's positions, and without the padding that tokenizer and model need.
    """
    tokenizer, config = pretrained.read_tokenizer(name), pretrained.load_config(name)
    pretrained.check_length(name, max_length)
    forward = inspect.unwrap(getattr(transformers, auto)._model_mapping[type(config)].forward)
    padding, known = tokenizer.pad_token_id, getattr(config.get_text_config(), "pad_token_id", None)
    if padding is None:
        raise ConfigError(
            f"the tokenizer of {name} has no padding token, and texts are padded to {max_length} tokens; name one of its "
            f"tokens as pad_token in tokenizer_config.json, such as its end token {tokenizer.eos_token!r}"
        )
    if known not in (None, padding) and "pad_token_id" in forward.__code__.co_names:
        raise ConfigError(
            f"the pad_token_id in the config.json of {name} is {known}, and its tokenizer pads with {padding}: a "
            f"{config.model_type} finds the end of a text by it; set it to {padding}"
        )
    read = inspect.signature(forward).parameters
    tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name in read]
    return tokenizer


def occurrences(names: Iterable[object]) -> list[tuple[str, int]]:
    """Number the occurrences of each name: two classes of ImageNet are called "crane". A "LABEL_3" is a class 3."""
    numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
    return [(name, next(numbers[name])) for name in (re.sub(r"^LABEL_(?=\d+$)", "", str(name)) for name in names)]
