"""A small text classifier: embedding, one block of self-attention, mean over the words, head.

The attention (Vaswani et al., NeurIPS 2017) is written as matrix products.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import option

HEAD = "head"
MOST_ROWS = 2**17  # of an embedding: with 32 columns a model of 17 MB


@dataclass(frozen=True)
class Options:
    width: int = option(32, "numbers per word", low=1)
    heads: int = option(4, "attention heads; they divide the width", low=1)
    rows: int = option(0, "token t has row t modulo this (0: one each)", low=0, high=MOST_ROWS)
    dropout: float = option(0.0, "share of the words' numbers that is dropped", low=0, below=1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.inward = nn.Linear(width, 3 * width)
        self.outward = nn.Linear(width, width)

    def forward(self, x_SLD: Tensor, word_SL: Tensor) -> Tensor:
        s, length, width = x_SLD.shape
        q, k, v = self.inward(x_SLD).view(s, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        score = q @ k.transpose(-1, -2) / math.sqrt(width / self.heads)
        # of an empty text all shares are equal
        share = torch.where(word_SL[:, None, None, :], score, -1e9).softmax(-1)
        return self.outward((share @ v).transpose(1, 2).reshape(s, length, width))


class Text(nn.Module):
    def __init__(
        self, length: int, rows: int, classes: int, width: int, heads: int, dropout: float
    ):
        super().__init__()
        self.rows = rows
        self.words = nn.Embedding(rows, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, token_SL: Tensor) -> Tensor:
        word_SL = token_SL > 0
        x = self.dropout(self.words(token_SL % self.rows) + self.places)
        x = x + self.dropout(self.attention(self.norm1(x), word_SL))
        x = x + self.dropout(self.fc2(self.fc1(self.norm2(x)).relu()))
        is_word = word_SL[..., None].float()
        mean = (x * is_word).sum(1) / is_word.sum(1).clamp(min=1)
        return self.head(self.norm(mean))  # normalised, as a mean is small


def build(
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int,
    width: int,
    heads: int,
    rows: int,
    dropout: float,
) -> nn.Module:
    """Return the classifier for texts of `shape` = (L,) tokens."""
    if width % heads:
        raise UserError(
            f"--model_options.heads is {heads}; it must divide --model_options.width, {width}"
        )
    if not rows and vocabulary > MOST_ROWS:
        mend = "set --model_options.rows 4096, so that token t has row t modulo 4096"
        most = f"an embedding has at most {MOST_ROWS} rows"
        mend = f"{mend}, or number the words anew"
        raise UserError(f"--model text: tokens go to {vocabulary - 1}, {most}: {mend}")
    return Text(shape[0], rows or vocabulary, classes, width, heads, dropout)
