"""BERT with both heads of its pre-training (Devlin et al., 2018), with the parameter names of common checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class BertSizes:
    """Sizes of a model; `hidden` is a multiple of `heads`, and the inner layer has four times `hidden`."""

    hidden: int
    layers: int
    heads: int
    words: int = 30522
    positions: int = 512
    kinds: int = 2
    dropout: float = 0.1


class Bert(nn.Module):
    """Input: token numbers (N, T), and their segments or None. Output: scores (N, T, words) and (N, 2)."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        if sizes.hidden % sizes.heads:
            raise ValueError(f"hidden size {sizes.hidden} is not a multiple of {sizes.heads} heads")
        self.bert = _group(
            embeddings=_Embeddings(sizes),
            encoder=_group(layer=nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))),
            pooler=_group(dense=nn.Linear(sizes.hidden, sizes.hidden)),
        )
        self.cls = _group(predictions=_Predictions(sizes), seq_relationship=nn.Linear(sizes.hidden, 2))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scores of every word at every position, and of the two orders of the sentences."""
        embeddings = self.bert.get_submodule("embeddings")
        x = embeddings(tokens, segments)
        for layer in self.bert.get_submodule("encoder.layer").children():
            x = layer(x)
        pooled = self.bert.get_submodule("pooler.dense")(x[:, 0]).tanh()
        words = self.bert.get_parameter("embeddings.word_embeddings.weight")
        return self.cls.get_submodule("predictions")(x, words), self.cls.get_submodule("seq_relationship")(pooled)


class _Embeddings(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.words, sizes.hidden)
        self.position_embeddings = nn.Embedding(sizes.positions, sizes.hidden)
        self.token_type_embeddings = nn.Embedding(sizes.kinds, sizes.hidden)
        self.LayerNorm = nn.LayerNorm(sizes.hidden, eps=1e-12)
        self.dropout = sizes.dropout

    def forward(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        kinds = torch.zeros_like(tokens) if segments is None else segments
        x = self.word_embeddings(tokens) + self.position_embeddings(places) + self.token_type_embeddings(kinds)
        return functional.dropout(self.LayerNorm(x), self.dropout, self.training)


class _Layer(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads = sizes.heads
        self.dropout = sizes.dropout
        self.attention = nn.Module()
        parts = {name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")}
        self.attention.add_module("self", _group(**parts))
        self.attention.add_module("output", _Output(hidden, hidden, sizes.dropout))
        self.intermediate = _group(dense=nn.Linear(hidden, 4 * hidden))
        self.output = _Output(4 * hidden, hidden, sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            part(x).view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.attention.get_submodule("self").children()
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0
        )
        x = self.attention.get_submodule("output")(mixed.transpose(1, 2).reshape(batch, length, hidden), x)
        inner = functional.gelu(self.intermediate.get_submodule("dense")(x))
        result: Tensor = self.output(inner, x)
        return result


class _Output(nn.Module):
    def __init__(self, size_in: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(size_in, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = dropout

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        result: Tensor = self.LayerNorm(functional.dropout(self.dense(x), self.dropout, self.training) + shortcut)
        return result


class _Predictions(nn.Module):
    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(sizes.words))
        self.transform = _group(
            dense=nn.Linear(sizes.hidden, sizes.hidden), LayerNorm=nn.LayerNorm(sizes.hidden, eps=1e-12)
        )

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        dense, norm = self.transform.children()
        return functional.linear(norm(functional.gelu(dense(x))), words, self.bias)


def bert_base() -> Bert:
    """Return BERT-Base with its pre-training heads: 110,106,428 parameters in 206 tensors."""
    return Bert(BertSizes(hidden=768, layers=12, heads=12))


def bert_large() -> Bert:
    """Return BERT-Large with its pre-training heads: 336,226,108 parameters in 398 tensors."""
    return Bert(BertSizes(hidden=1024, layers=24, heads=16))


def thin_bert(*, hidden: int = 64, layers: int = 2, heads: int = 4, words: int = 256, positions: int = 64) -> Bert:
    """Return a BERT over bytes, to train in seconds on one core; without dropout."""
    return Bert(BertSizes(hidden, layers, heads, words, positions, dropout=0.0))


def _group(**modules: nn.Module) -> nn.Module:
    group = nn.Module()
    for name, module in modules.items():
        group.add_module(name, module)
    return group
