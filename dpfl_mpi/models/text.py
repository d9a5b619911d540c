"""A small text classifier: embedding, one block of self-attention (Vaswani et al., NeurIPS 2017) as matrix products, mean over the words, head."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfl_mpi.errors import UserError
from dpfl_mpi.settings import option

HEAD = "head"
MOST = 2**17  # rows of an embedding: with 32 columns a model of 17 MB, of which a rank keeps thirteen per client


@dataclass(frozen=True)
class Options:
    width: int = option(32, "numbers per word", low=1)
    heads: int = option(4, "attention heads; they divide the width", low=1)
    rows: int = option(0, "rows of the embedding: token t has row t modulo rows (0: one per token)", low=0, high=MOST)
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
        share = torch.where(word_SL[:, None, None, :], score, -1e9).softmax(-1)  # of an empty text: equal
        return self.outward((share @ v).transpose(1, 2).reshape(s, length, width))


class Text(nn.Module):
    def __init__(self, length: int, rows: int, classes: int, width: int, heads: int, dropout: float):
        super().__init__()
        self.rows = rows
        self.words = nn.Embedding(rows, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, token_SL: Tensor) -> Tensor:
        word_SL = token_SL > 0
        x = self.dropout(self.words(token_SL % self.rows) + self.places)
        x = x + self.dropout(self.attention(self.norm1(x), word_SL))
        x = x + self.dropout(self.fc2(self.fc1(self.norm2(x)).relu()))
        here = word_SL[..., None].float()
        return self.head(self.norm((x * here).sum(1) / here.sum(1).clamp(min=1)))  # a mean is small: normalised last


def build(
    shape: tuple[int, ...], classes: int, vocabulary: int, width: int, heads: int, rows: int, dropout: float
) -> nn.Module:
    """Return the classifier for texts of `shape` = (L,) tokens."""
    if width % heads:
        raise UserError(f"--model_options.heads is {heads}; it must divide --model_options.width, {width}")
    if not rows and vocabulary > MOST:
        mend = "set --model_options.rows 4096, so that token t has row t modulo 4096, or number the words anew"
        raise UserError(f"--model text: tokens go to {vocabulary - 1}, an embedding has at most {MOST} rows: {mend}")
    return Text(shape[0], rows or vocabulary, classes, width, heads, dropout)
