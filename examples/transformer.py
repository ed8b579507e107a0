"""The transformer of --model gpt-small as a workload of one's own: other data, another optimizer.

    python -m bench.sweep --workload examples.transformer:gpt --precision bf16-amp --batch-size 8 16

The texts are drawn so that the next token can be learnt from the last: each is followed by another
one three times in four, and by any one else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench import Workload
from bench.networks.gpt import Decoder
from bench.networks.workloads import NextToken


class OwnTexts(NextToken):
    """An item is a text of ``length`` tokens, which --length sets."""

    def __init__(
        self,
        *,
        vocabulary: int = 32_000,
        length: int = 1024,
        width: int = 768,
        heads: int = 12,
        depth: int = 12,
        tokens: int = 2**22,
        test_tokens: int = 0,
    ) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.tokens, self.test_tokens = tokens, test_tokens
        self.sizes = (width, heads, depth)

    def build_model(self) -> nn.Module:
        return Decoder(self.vocabulary, self.length, *self.sizes)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Tensor:
        shape = (size, self.length + 1)
        first = torch.randint(self.vocabulary, (size, 1), generator=generator, device=device)
        texts = (first + 7 * torch.arange(shape[1], device=device)) % self.vocabulary
        noise = torch.randint(self.vocabulary, shape, generator=generator, device=device)
        kept = torch.rand(shape, generator=generator, device=device) < 0.75
        return torch.where(kept, texts, noise)

    def build_optimizer(self, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        """AdamW that decays matrices only; give its learning rate as --lr."""
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)


def gpt() -> Workload:
    """110 million parameters."""
    return OwnTexts()


def tiny() -> Workload:
    """For a quick try on a CPU."""
    return OwnTexts(
        vocabulary=16, length=32, width=32, heads=2, depth=2, tokens=320 * 32, test_tokens=24 * 32
    )
