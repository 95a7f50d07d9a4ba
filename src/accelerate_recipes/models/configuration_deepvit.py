"""Configuration of a DeepViT. The model is another file, because its base class takes long to import.

An export of a DeepViT holds copies of both files, and its config.json names them (`auto_map`). So the export loads without
this project: `AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)`. For this reason, the files
import only torch, transformers, and each other, by relative imports: transformers copies what these name.
"""

from typing import Any

import transformers
from transformers import PreTrainedConfig


class DeepViTConfig(PreTrainedConfig):
    """Sizes of a DeepViT. With `reattention` false, it is a plain vision transformer: its maps are those of the softmax."""

    model_type = "deepvit"

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    hidden_size: int = 384
    intermediate_size: int = 1152
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    reattention: bool = True
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        self.auto_map = {
            "AutoConfig": "configuration_deepvit.DeepViTConfig",
            "AutoModelForImageClassification": "deepvit.DeepViTForImageClassification",
        }

    @property
    def num_tokens(self) -> int:
        """Count the patches of an image, plus one token for its class."""
        return 1 + (self.image_size // self.patch_size) ** 2


def register_model() -> None:
    """Let transformers make a DeepViT of its configuration, and `model_class` find the class beside the configuration's."""
    global DeepViTForImageClassification
    from .deepvit import DeepViTForImageClassification

    transformers.AutoModelForImageClassification.register(DeepViTConfig, DeepViTForImageClassification, exist_ok=True)


# A configuration is saved with copies of the file that defines it, and of what that file imports.
DeepViTConfig.register_for_auto_class()
