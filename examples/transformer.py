"""A decoder-only transformer in plain torch, counted in tokens, with its own optimizer.

    python -m bench.sweep --workload examples.transformer:gpt --precision bf16-amp --batch-size 8 16

The tokens are drawn so that the next one can be learnt from the last: each is followed by another
one three times in four, and by any one else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import Loss, Network, Workload


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


class NextToken(Workload):
    """Predict each next token. An item is a text of ``length`` tokens."""

    unit = "tokens"

    def __init__(
        self,
        *,
        vocabulary: int = 32_000,
        length: int = 1024,
        width: int = 768,
        heads: int = 12,
        depth: int = 12,
        samples: int = 4096,
        test_samples: int = 0,
    ) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.samples, self.test_samples = samples, test_samples
        self.settings = (vocabulary, length, width, heads, depth)

    def build_model(self) -> nn.Module:
        return Decoder(*self.settings)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Tensor:
        shape = (size, self.length + 1)
        first = torch.randint(self.vocabulary, (size, 1), generator=generator, device=device)
        texts = (first + 7 * torch.arange(shape[1], device=device)) % self.vocabulary
        noise = torch.randint(self.vocabulary, shape, generator=generator, device=device)
        kept = torch.rand(shape, generator=generator, device=device) < 0.75
        return torch.where(kept, texts, noise)

    def make_test_batch(self, first: int, size: int, device: torch.device) -> Tensor:
        # a generator for each text: what a batch holds must not depend on its size
        generators = (
            torch.Generator(device).manual_seed(2**31 + item) for item in range(first, first + size)
        )
        return torch.cat([self.make_batch(1, device, generator) for generator in generators])

    def compute_loss(self, network: Network, batch: Tensor) -> Loss:
        logits, right = network(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), right.flatten())
        return Loss(loss, (logits.detach().argmax(dim=2) == right).sum())

    def count_units(self, size: int) -> int:
        return size * self.length

    def keeps_fp32(self, module: nn.Module) -> bool:
        return isinstance(module, nn.LayerNorm)

    def build_optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        """AdamW that decays matrices only; give its learning rate as --lr."""
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)


def gpt() -> Workload:
    """110 million parameters."""
    return NextToken()


def tiny() -> Workload:
    """For a quick try on a CPU."""
    return NextToken(
        vocabulary=16, length=32, width=32, heads=2, depth=2, samples=320, test_samples=24
    )
