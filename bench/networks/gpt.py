"""A decoder-only transformer in plain torch, of the shape of GPT-2 (Radford et al., Language models
are unsupervised multitask learners, 2019) but for dropout and biases of the head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        result: Tensor = x + self.wide(self.norm2(x))
        return result


class Decoder(nn.Module):
    """Tokens (N, length) to logits (N, length, vocabulary); the head's weights are the input's."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt_small(vocabulary: int, length: int) -> nn.Module:
    """Build 12 layers of 12 heads and 768 features: with 32,000 tokens 110 million parameters."""
    return Decoder(vocabulary, length, width=768, heads=12, depth=12)


def gpt_tiny(vocabulary: int, length: int) -> nn.Module:
    """Build 2 layers of 2 heads and 64 features, for a quick try on a CPU."""
    return Decoder(vocabulary, length, width=64, heads=2, depth=2)
