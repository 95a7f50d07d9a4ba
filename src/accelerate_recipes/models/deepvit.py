"""DeepViT: a vision transformer whose heads mix their attention maps, so that deep layers do not all attend alike.

An export holds a copy of this file; see `configuration_deepvit`.

Source: Zhou et al., DeepViT: Towards Deeper Vision Transformer, 2021.
"""

from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutput

from .configuration_deepvit import DeepViTConfig


class DeepViTEmbeddings(nn.Module):
    """Embeddings of the class token and the patches of an image, in this order, with position embeddings added."""

    def __init__(self, config: DeepViTConfig):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.position_embeddings = nn.Parameter(torch.zeros(1, config.num_tokens, config.hidden_size))
        self.patch_embeddings = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size
        )

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embeddings(pixel_values).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(len(patches), -1, -1)
        return torch.cat([cls, patches], dim=1) + self.position_embeddings


class ReAttention(nn.Module):
    """Mixture of the attention maps of the heads: Norm(Theta^T A), where A = softmax(Q K^T / sqrt d), (B, H, T, T).

    The Norm in the paper is a BatchNorm over the heads. Its statistics depend on how a batch is divided among ranks and
    micro-batches. Here, Norm is a LayerNorm over the heads of each pair of tokens. A token that attends to all T tokens
    equally gives each 1 / T of its attention. The eps of the norm is the square of 1 / T: with a smaller eps, a pair of
    tokens to which no head attends would weigh as much as others.
    """

    def __init__(self, num_heads: int, num_tokens: int):
        super().__init__()
        self.theta = nn.Parameter(torch.eye(num_heads))
        self.norm = nn.LayerNorm(num_heads, eps=(1 / num_tokens) ** 2)

    def forward(self, attention: torch.Tensor) -> torch.Tensor:
        # This computes the norm without moving the heads to the last dimension, which takes twice as long. Theta minus its
        # mean over the output heads gives mixtures whose mean over the heads is zero, so only the variance is left.
        centred = self.theta - self.theta.mean(1, keepdim=True)
        mixed = centred.T @ attention.flatten(2)
        # On a GPU (not on a CPU), autocast would square in fp32, and keep an fp32 copy.
        with torch.autocast("cuda", enabled=False):
            variance = mixed.square().mean(1, keepdim=True, dtype=torch.float32)
        mixed = mixed * (variance + self.norm.eps).rsqrt().to(mixed.dtype)
        mixed = mixed * self.norm.weight[:, None] + self.norm.bias[:, None]
        return mixed.unflatten(-1, attention.shape[-2:])


class DeepViTAttention(nn.Module):
    """Attention that holds its maps in memory, (B, H, T, T): re-attention mixes them, and no fused kernel does that."""

    def __init__(self, config: DeepViTConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.reattention = ReAttention(self.num_heads, config.num_tokens) if config.reattention else nn.Identity()
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden_states.shape
        heads = self.qkv(hidden_states).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        maps = scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
        output = (self.reattention(maps) @ value).transpose(1, 2).reshape(batch, length, width)
        return self.projection(output)


class DeepViTLayer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, config: DeepViTConfig):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = DeepViTAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.attention_norm(hidden_states))
        return hidden_states + self.down(F.gelu(self.up(self.mlp_norm(hidden_states))))


class DeepViTPreTrainedModel(transformers.PreTrainedModel):
    """Settings that transformers needs: names, modules that are not divided, and first weights."""

    config_class = DeepViTConfig
    base_model_prefix = "deepvit"
    main_input_name = "pixel_values"
    _no_split_modules: ClassVar = ["DeepViTLayer"]
    _input_embed_layer = "patch_embeddings"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)
            init.zeros_(module.bias)
        elif isinstance(module, DeepViTEmbeddings):
            init.trunc_normal_(module.position_embeddings, std=self.config.initializer_range)
            init.trunc_normal_(module.cls_token, std=self.config.initializer_range)
        elif isinstance(module, ReAttention):
            # Draw as for a 1 x 1 convolution. If heads began unmixed, the norm would push all of them apart in the same way.
            init.kaiming_uniform_(module.theta, a=5**0.5)
        else:
            super()._init_weights(module)


class DeepViTModel(DeepViTPreTrainedModel):
    """Layers of a DeepViT, from pixels to hidden states."""

    def __init__(self, config: DeepViTConfig):
        super().__init__(config)
        self.embeddings = DeepViTEmbeddings(config)
        self.layers = nn.ModuleList([DeepViTLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states, (B, T, C)."""
        hidden_states = self.embeddings(pixel_values)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


class DeepViTForImageClassification(DeepViTPreTrainedModel):
    """DeepViT with an output layer on the class token."""

    def __init__(self, config: DeepViTConfig):
        super().__init__(config)
        self.deepvit = DeepViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Compute logits, (B, C), of images, (B, 3, H, W); and with `labels`, (B,), the mean loss."""
        logits = self.classifier(self.deepvit(pixel_values)[:, 0])
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits)
