"""The DFlash drafter: Qwen3-style layers whose keys and values are the target's tapped states, then the block itself.

Parameters are fp32; the caller wraps calls in `torch.autocast` for bf16. Norms and RoPE are computed in fp32 at least.

Shape suffixes: A blocks, B block size, M = B - 1 masked offsets, T context tokens, Q = A * B queries, S = T + Q keys,
R rows of which others are made, H hidden size, F = K * H features of K taps, n query heads, m key-value heads, d head
size, P positions of any shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dflash_dist.drafter.anchors import BlockTensors
from dflash_dist.drafter.attention import attend
from dflash_dist.drafter.config import DrafterConfig
from dflash_dist.drafter.fused import RMSNorm
from dflash_dist.drafter.linear import Linear, gated_product
from dflash_dist.drafter.mask import BlockLayout, Mask, build_masks

KeyValue = tuple[Tensor, Tensor]
"""Keys (normed and rotated) and values of the context in one layer, each [T, m, d]."""

Rows = Callable[[Tensor], Tensor]
"""Makes rows of other rows: of those that differ those of all block tokens, or of all those that are asked for."""


class Attention(nn.Module):
    """Grouped-query attention of block tokens over context and block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.head_dim = head
        self.q_proj = Linear(hidden, config.num_attention_heads * head)
        self.k_proj = Linear(hidden, config.num_key_value_heads * head)
        self.v_proj = Linear(hidden, config.num_key_value_heads * head)
        self.o_proj = Linear(config.num_attention_heads * head, hidden)
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)

    def key_value(self, x_TH: Tensor, rope: KeyValue) -> KeyValue:
        """Rotated keys and values [T, m, d] of context or block tokens."""
        return self._key_value(self.k_proj(x_TH), self.v_proj(x_TH), rope)

    def _key_value(self, key_TK: Tensor, value_TK: Tensor, rope: KeyValue) -> KeyValue:
        key_Tmd, value_Tmd = (x_TK.unflatten(-1, (-1, self.head_dim)) for x_TK in (key_TK, value_TK))
        return self.k_norm.rotated(key_Tmd, rope), value_Tmd

    def forward(
        self, x_RH: Tensor, norm: RMSNorm, rope: KeyValue, context: KeyValue, mask: Mask, spread: Rows, wanted: Rows
    ) -> Tensor:
        """[.., H] residual stream of the wanted block tokens, with the attention's output.

        `x_RH`: states that are still to be normed, of which `spread` makes those of all block tokens.
        """
        x_QH, query_QK, key_QK, value_QK = map(spread, self.q_proj(x_RH, norm, self.k_proj, self.v_proj))
        query_Qnd = self.q_norm.rotated(query_QK.unflatten(-1, (-1, self.head_dim)), rope)
        key_Qmd, value_Qmd = self._key_value(key_QK, value_QK, rope)
        key_Smd = torch.cat([context[0], key_Qmd])
        value_Smd = torch.cat([context[1], value_Qmd])
        return wanted(x_QH) + self.o_proj(wanted(attend(query_Qnd, key_Smd, value_Smd, mask).flatten(1)))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """[..., H] residual stream with the output for [..., H], which is still to be normed."""
        x, gate, up = self.gate_proj(x, norm, self.up_proj)
        return x + gated_product(gate, up, self.down_proj)


class Layer(nn.Module):
    """A pre-norm layer. The context is not passed through its input norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, hidden_RH: Tensor, rope: KeyValue, context: KeyValue, mask: Mask, spread: Rows, wanted: Rows
    ) -> Tensor:
        """[.., H] residual stream after the layer, of the wanted tokens; `spread` makes its rows of those given."""
        hidden = self.self_attn(hidden_RH, self.input_layernorm, rope, context, mask, spread, wanted)
        return self.mlp(hidden, self.post_attention_layernorm)


class DFlashDrafter(nn.Module):
    """The drafter without embedding and head, which are the target's. Parameter names are those of the plain export.

    Training calls the whole: `context` on a pack, then `blocks` on all its anchors with their `masks`. Inference calls
    `context` on newly committed tokens and appends it to a cache, then `blocks` on one block.
    """

    def __init__(self, config: DrafterConfig, attention: Literal["dense", "flex"] = "dense") -> None:
        super().__init__()
        self.config = config
        self.attention: Literal["dense", "flex"] = attention
        self.activation_checkpointing = False
        """Whether layers are run again for their gradients, instead of keeping what lies between."""
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Sets every matrix to normal(0, initializer_range) and every norm to 1, from `seed` alone."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                drawn = torch.empty(parameter.shape).normal_(0.0, self.config.initializer_range, generator=generator)
                parameter.copy_(drawn)

    def modules_of_blocks(self) -> list[list[nn.Module]]:
        """Each layer's large modules that `blocks` alone uses; the other large ones are those of `context`."""
        return [[layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp] for layer in self._layers()]

    def parameters_by_backward(self) -> list[tuple[str, nn.Parameter]]:
        """The named parameters, the large ones in the order in which a backward pass completes their gradients.

        Last come those of `context`, which is the first to run forward.
        """
        of_blocks = {p for modules in self.modules_of_blocks() for module in modules for p in module.parameters()}
        return sorted(reversed(list(self.named_parameters())), key=lambda named: named[1] not in of_blocks)

    def forward(
        self,
        features_TF: Tensor,
        positions_T: Tensor,
        embeddings_ABH: Tensor,
        blocks: BlockTensors,
    ) -> Tensor:
        """`blocks` over the `context` of a whole pack, with their masks.

        The context comes first: while a GPU is at its products, the host launches the many small steps of the masks.
        """
        context = self.context(features_TF, positions_T)
        return self.blocks(embeddings_ABH, blocks.positions_AB, context, self.masks(blocks, len(positions_T)))

    def context(self, features_TF: Tensor, positions_T: Tensor) -> list[KeyValue]:
        """Each layer's context keys and values for the target's tapped states at the given document positions.

        Padding rows must be finite; the mask hides them.
        """
        context_TH = self.hidden_norm(self.fc(features_TF.to(self._input_dtype(features_TF))))
        rope = rope_tables(positions_T, self.config, self.fc.weight.dtype)
        return [layer.self_attn.key_value(context_TH, rope) for layer in self._layers()]

    def masks(self, blocks: BlockTensors, context: int) -> list[Mask]:
        """One mask a layer for blocks of a pack of `context` tokens, with its padding."""
        starts_A = blocks.anchors_A - blocks.positions_AB[:, 0]
        layout = BlockLayout(self.config.block_size, blocks.anchors_A, blocks.keep_A, starts_A, context)
        return build_masks(self.config, self.attention, layout)

    def blocks(
        self, embeddings_ABH: Tensor, positions_AB: Tensor, context: Sequence[KeyValue], masks: Sequence[Mask]
    ) -> Tensor:
        """[A, M, H] normed output of the masked offsets, all but each block's first, ready for the target's head.

        `embeddings_ABH`: the target's, of the block ids: an anchor's, then that of the mask token, the same everywhere.
        """
        block_size = embeddings_ABH.shape[1]
        # What differs: the anchors, and one mask token. The first layer computes its queries, keys and values of these.
        hidden = torch.cat([embeddings_ABH[:, 0], embeddings_ABH[:1, 1]]).to(self._input_dtype(embeddings_ABH))
        spread: list[Rows] = [_all] * len(self.layers)
        spread[0] = functools.partial(_spread, block_size)
        rope = rope_tables(positions_AB.flatten(), self.config, self.fc.weight.dtype)
        # Of the last layer the anchors' output would not be read, only their keys and values.
        wanted: list[Rows] = [_all] * len(self.layers)
        wanted[-1] = functools.partial(_masked, block_size)
        for layer, *inputs in zip(self._layers(), context, masks, spread, wanted, strict=True):
            if self.activation_checkpointing and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, rope, *inputs, use_reentrant=False)
            else:
                hidden = layer(hidden, rope, *inputs)
        return self.norm(hidden.unflatten(0, (len(embeddings_ABH), -1)))  # no view: FSDP hooks the output

    def _layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def _input_dtype(self, x: Tensor) -> torch.dtype:
        """Outside autocast the target's bf16 states are widened to the parameters' type; under it they stay."""
        return x.dtype if torch.is_autocast_enabled(x.device.type) else self.fc.weight.dtype


def rope_tables(positions_P: Tensor, config: DrafterConfig, dtype: torch.dtype) -> KeyValue:
    """Cosines and sines, each [P, d / 2], at the given positions; computed in fp32 at least."""
    dtype = torch.promote_types(dtype, torch.float32)
    half = torch.arange(0, config.head_dim, 2, device=positions_P.device, dtype=dtype)
    angles = positions_P.to(dtype)[..., None] * config.rope_theta ** (-half / config.head_dim)
    return angles.cos(), angles.sin()


def _all(x_Qx: Tensor) -> Tensor:
    return x_Qx


def _spread(block_size: int, x_Rx: Tensor) -> Tensor:
    """The rows of all block tokens from those of the anchors and, last, of the mask token."""
    return _Spread.apply(x_Rx, block_size)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Rx: Tensor, block_size: int) -> Tensor:
        ctx.block_size = block_size
        out_ABx = x_Rx.new_empty(len(x_Rx) - 1, block_size, x_Rx.shape[1])
        out_ABx[:, 0], out_ABx[:, 1:] = x_Rx[:-1], x_Rx[-1]  # torch.cat takes four times as long
        return out_ABx.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient_ABx = gradients[0].unflatten(0, (-1, ctx.block_size))
        return torch.cat([gradient_ABx[:, 0], gradient_ABx[:, 1:].sum((0, 1))[None]]), None


def _masked(block_size: int, x_Qx: Tensor) -> Tensor:
    """The rows of the masked offsets."""
    return x_Qx.unflatten(0, (-1, block_size))[:, 1:].flatten(0, 1)
