"""Trial of a model that sees images, tiny and with images: does it compute a packed row as each document alone?"""

import copy
import re
from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from accelerate_recipes.errors import ConfigError, one_line
from accelerate_recipes.models.composites import weights_by_part
from accelerate_recipes.models.documents import DOCUMENTS
from accelerate_recipes.models.images import correct, image_model_on_meta, join_documents
from accelerate_recipes.models.mixers import unpack_documents
from accelerate_recipes.models.probes import UNTRIED, mixers_in, randomly_made, shrink
from accelerate_recipes.models.shared_rows import whole_rows

Document = dict[str, torch.Tensor]  # as `join_documents` takes it
NEAR = 1e-3  # relative distance of what should be equal; rounding is below 1e-5, and known leaks are above 4e-2
DEPTH = 2  # layers of a tower


def check_whole(config: PreTrainedConfig, name: str, attention: str, documents: Sequence[Document]) -> None:
    """Check with a tiny model of the configuration of `name` that a packed row has loss and gradients of its documents.

    `documents` are several, with images and without; `attention` is the kernel of the text part. It takes 1 to 10 seconds on
    one thread, by the number of patches.

    Raises:
        ConfigError: names what differs, or why no tiny model could be tried.
    """
    if attention not in ("eager", DOCUMENTS):  # others need a GPU, or a compiler
        attention = "sdpa"
    try:
        config, documents = with_few_words(config, documents)
        model = tiny_whole(config, attention)
        losses, gradients = computed(model, [[document] for document in documents])
        (packed,), of_packed = computed(model, [documents])
    except Exception as error:  # an unusual configuration may raise anything
        raise ConfigError(
            f"{UNTRIED.format(config.model_type)} {name} computes the documents of a packed row with images as it would "
            f"alone: {one_line(error)}; give another model"
        ) from error
    pairs = {"the loss": (sum(losses), packed)}
    pairs |= {f"the gradient of its {part}": (gradients[part], of_packed[part]) for part in gradients}
    far = {what: distance(*some) for what, some in pairs.items()}
    if diffs := [f"{what} by {value:.0%}" for what, value in far.items() if not value <= NEAR]:
        raise ConfigError(
            f"a {config.model_type} as {name} does not compute the documents of a packed row with images as it would alone: "
            f"{', '.join(diffs)} differ; give another model, or another release of transformers ({transformers.__version__})"
        )


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp(min=1e-30))


@whole_rows()
def computed(
    model: PreTrainedModel, rows: Sequence[Sequence[Document]]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Compute a loss of each of some packed rows, and the gradients of their sum, by parts of the model."""
    base = image_model_on_meta(model.config).base_model
    losses: list[torch.Tensor] = []
    model.zero_grad()
    with torch.device("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for row in rows:
            states = model(**join_documents(base, row), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
            lengths = [document["input_ids"].shape[1] for document in row]
            # Any loss will do; it reads each token of a document, at the same place of it, in another direction.
            wanted = [torch.randn(n, states.shape[-1], generator=torch.Generator().manual_seed(n)) for n in lengths]
            losses.append((states * torch.cat(wanted)).sum())
            losses[-1].backward()
    gradients = {
        part: torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        for part, parameters in weights_by_part(model).items()
    }
    return [loss.detach() for loss in losses], gradients


def with_few_words(
    config: PreTrainedConfig, documents: Sequence[Document]
) -> tuple[PreTrainedConfig, Sequence[Document]]:
    """Number anew the tokens of documents, and those that a configuration names: of 262,144, a trial takes 40 seconds."""
    config = copy.deepcopy(config)
    named = {name: value for name, value in vars(config).items() if re.search(r"_token_(id|index)$", name)}
    named = {name: value for name, value in named.items() if isinstance(value, int)}
    ids = torch.cat([document["input_ids"].flatten() for document in documents])
    known = torch.tensor([*named.values(), *ids.tolist()]).unique()
    for name, value in named.items():
        setattr(config, name, int(torch.searchsorted(known, value)))
    # One more is that of the padding.
    words = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(known) + 1)
    shrink(config.get_text_config(), **words)
    renumbered = [document | {"input_ids": torch.searchsorted(known, document["input_ids"])} for document in documents]
    return config, [{name: value for name, value in one.items() if name != "labels"} for one in renumbered]


def tiny_of_text(config: PreTrainedConfig) -> tuple[PreTrainedModel | None, torch.Tensor]:
    """Make a tiny model that sees images, or None, and tokens of a text for it."""
    named = {value for name, value in vars(config).items() if name.endswith(("_token_id", "_token_index"))}
    words = torch.tensor([[number for number in range(100) if number not in named][:12]])
    try:
        config, (document,) = with_few_words(config, [{"input_ids": words}])
        return tiny_whole(config, "eager"), document["input_ids"]
    except Exception:  # an unusual configuration may raise anything
        return None, words


def tiny_whole(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Make a model that sees images, whose text part is tiny, with a tower of few layers and two heads, and random weights.

    It reads images of the same sizes.
    """
    text, vision = config.get_text_config(), config.vision_config
    heads = "num_heads" if hasattr(vision, "num_heads") else "num_attention_heads"
    width = "embed_dim" if hasattr(vision, "embed_dim") else "hidden_size"
    depth = "depth" if hasattr(vision, "depth") else "num_hidden_layers"
    sizes = {
        "out_hidden_size": text.hidden_size, "hidden_size": text.hidden_size, "num_key_value_heads": 2, heads: 2,
        width: 2 * (getattr(vision, width) // getattr(vision, heads)), "intermediate_size": 32, depth: DEPTH,
    }  # fmt: skip
    # Numbers of some layers become those of as many of the first.
    for name, value in vars(vision).items():
        if name.endswith("_indexes") and value:
            sizes[name] = [*range(min(DEPTH, len(value)))]
    for name, value in sizes.items():
        if hasattr(vision, name):
            setattr(vision, name, value)
    model = randomly_made(AutoModelForImageTextToText, config, {"text_config": attention, "vision_config": "sdpa"})
    correct(model)
    unpack_documents(model, mixers_in(model))
    return model
