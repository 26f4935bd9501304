"""A vision transformer of timm's layout, for `global_pool="token"` and `"avg"`."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo import D


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, D))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.norm, self.fc2 = nn.Linear(D, D), nn.GELU(), nn.Identity(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.act(self.fc1(x))))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(D, eps=1e-6), Attention(), LayerScale()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(D, eps=1e-6), Mlp(), LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class TimmViT(nn.Module):
    """The last norm stands before the pooling of one token, or after that of all."""

    def __init__(self, pool: Literal["token", "avg"]) -> None:
        super().__init__()
        self.pool = pool
        self.patch_embed = nn.Conv2d(3, D, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, D)), nn.Parameter(torch.zeros(1, 5, D))
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(D, eps=1e-6) if pool == "token" else nn.Identity()
        self.fc_norm = nn.LayerNorm(D, eps=1e-6) if pool == "avg" else nn.Identity()
        self.head_drop, self.head = nn.Dropout(0.1), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        x = self.norm(self.blocks(self.norm_pre(x)))
        x = x[:, 1:].mean(1) if self.pool == "avg" else x[:, 0]
        return self.head(self.head_drop(self.fc_norm(x)))
