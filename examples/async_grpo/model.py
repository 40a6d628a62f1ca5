"""The policy: a causal transformer of some 100,000 weights, and how it samples and scores responses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.async_grpo.task import SEPARATOR, VOCAB_SIZE


class Block(nn.Module):
    """One pre-norm transformer layer: causal self-attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[rows, length, width]`` to the same shape."""
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(rows, length, width))
        after: Tensor = x + self.mlp(self.norm_mlp(x))
        return after


class Policy(nn.Module):
    """A causal language model over digits; a response is as long as its prompt.

    Args:
        prompt_length: Tokens in a prompt.
        width: Model width; heads are 16 wide.
        layers: Transformer layers.
    """

    def __init__(self, prompt_length: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.prompt_length = prompt_length
        self.token = nn.Embedding(VOCAB_SIZE, width)
        self.position = nn.Embedding(2 * prompt_length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=width // 16) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)
        # A near-uniform first policy: exploration starts from every digit, not from a random preference.
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns next-token log-probabilities ``[rows, length, vocabulary]`` of ``tokens [rows, length]``."""
        positions = torch.arange(tokens.shape[1])
        x = self.blocks(self.token(tokens) + self.position(positions))
        return functional.log_softmax(self.head(self.norm(x)), dim=-1)

    def response_distributions(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Log-probabilities of all tokens at each response place, ``[rows, length, vocabulary]``.

        Args:
            prompts: ``[rows, length]``.
            responses: ``[rows, length]``; each place sees those before it.
        """
        tokens = torch.cat([_open(prompts), responses[:, :-1]], dim=1)
        log_probs: Tensor = self(tokens)[:, self.prompt_length :]
        return log_probs

    def response_log_probs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Log-probability of each response token, ``[rows, length]``, for prompts and responses of that shape."""
        return chosen(self.response_distributions(prompts, responses), responses)

    @torch.no_grad()
    def sample(self, prompts: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Samples one response a row; greedily where ``generator`` is None.

        Returns:
            Responses and their tokens' log-probabilities, both ``[rows, length]``.
        """
        tokens = _open(prompts)
        chosen_log_probs = []
        for _ in range(self.prompt_length):
            log_probs = self(tokens)[:, -1]
            if generator is None:
                token = log_probs.argmax(dim=1, keepdim=True)
            else:
                token = torch.multinomial(log_probs.exp(), 1, generator=generator)
            chosen_log_probs.append(log_probs.gather(1, token))
            tokens = torch.cat([tokens, token], dim=1)
        return tokens[:, self.prompt_length + 1 :], torch.cat(chosen_log_probs, dim=1)


def chosen(distributions: Tensor, tokens: Tensor) -> Tensor:
    """Picks the log-probabilities of ``tokens [rows, length]`` from ``distributions [rows, length, vocabulary]``."""
    return distributions.gather(2, tokens.unsqueeze(2)).squeeze(2)


def mean_entropy(distributions: Tensor) -> Tensor:
    """Entropy of each place in nats, averaged over ``distributions [rows, length, vocabulary]``; a scalar."""
    return -(distributions.exp() * distributions).sum(dim=2).mean()


def _open(prompts: Tensor) -> Tensor:
    """Prompts followed by the separator after which the response begins."""
    return functional.pad(prompts, (0, 1), value=SEPARATOR)
