"""Dense definitions, written from the specification alone: loops over queries, keys, heads and offsets, in float64.

Slow on purpose; the code under test shares nothing with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sees(
    config: dict,
    layer: int,
    query: int,
    key: int,
    anchors: list[int],
    keep: list[bool],
    documents: list[int],
) -> bool:
    """Whether query token `query` of all blocks sees key `key` of [context, all blocks] (section 2.3)."""
    block_size = config["block_size"]
    block, offset = divmod(query, block_size)
    if not keep[block]:
        return False
    sliding = config["layer_types"][layer] == "sliding_attention"
    causal = sliding if config.get("is_causal") is None else config["is_causal"]
    if key >= len(documents):
        key_block, key_offset = divmod(key - len(documents), block_size)
        return key_block == block and (key_offset <= offset or not causal)
    if documents[key] == -1 or documents[key] != documents[anchors[block]] or key >= anchors[block]:
        return False
    return not sliding or key >= anchors[block] + offset - (config["sliding_window"] - 1)


def drafter_block(
    config: dict, weights: dict[str, Tensor], features_TF: Tensor, embeddings_BH: Tensor, anchor: int
) -> Tensor:
    """[B, H] normed output of one block at position `anchor` of one document (section 1.1), for the target's head."""
    size, eps = config["block_size"], config["rms_norm_eps"]
    context = [_norm(weights["fc.weight"] @ feature, weights["hidden_norm.weight"], eps) for feature in features_TF]
    hidden = list(embeddings_BH)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        inputs = [_norm(h, weights[prefix + "input_layernorm.weight"], eps) for h in hidden]
        keys = context[:anchor] + inputs
        for offset in range(size):
            # The document holds the anchor itself too, whose features nobody sees: keys of the block come after it.
            documents = [0] * (anchor + 1)
            seen = [
                key for key in range(anchor + 1 + size) if sees(config, layer, offset, key, [anchor], [True], documents)
            ]
            visible = [key if key < anchor else key - 1 for key in seen]
            attended = _attend(config, weights, prefix + "self_attn.", inputs[offset], anchor + offset, keys, visible)
            hidden[offset] = hidden[offset] + attended
        for offset in range(size):
            x = _norm(hidden[offset], weights[prefix + "post_attention_layernorm.weight"], eps)
            gate = weights[prefix + "mlp.gate_proj.weight"] @ x
            up = weights[prefix + "mlp.up_proj.weight"] @ x
            mlp = weights[prefix + "mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
            hidden[offset] = hidden[offset] + mlp
    return torch.stack([_norm(h, weights["norm.weight"], eps) for h in hidden])


def block_loss(
    logits_BV: Tensor,
    tokens: list[int],
    supervised: list[bool],
    anchor: int,
    gamma: float,
    kind: str = "tokens",
    weights: str = "decay",
    alpha: float = 0.5,
    teacher_TV: Tensor | None = None,
) -> tuple[Tensor, float, int, int, int]:
    """Weighted loss, denominator, correct, valid and accepted of one block in one document (sections 2.1 and 2.4).

    `teacher_TV`: the target's logits at every position; those at position i are about token i + 1.
    """
    losses, entropies, hits = [], [], []
    for offset in range(1, len(logits_BV)):
        position = anchor + offset
        if position >= len(tokens) or not supervised[position]:
            break
        log_q = _log_softmax(logits_BV[offset])
        label = tokens[position]
        if teacher_TV is not None:
            log_p = _log_softmax(teacher_TV[position - 1])
            label = int(log_p.argmax())
        entropies.append(-log_q[label])
        losses.append((torch.exp(log_p) * (log_p - log_q)).sum() if kind == "kl" else -log_q[label])
        hits.append(int(log_q.argmax()) == label)
    if weights == "decay":
        factors = [math.exp(-k / gamma) for k in range(len(losses))]
        denominator = sum(factors)
    else:
        reached, reach = [], 1.0
        for entropy in entropies:
            reach *= (1 - alpha) * math.exp(-float(entropy.detach())) + alpha
            reached.append(reach)
        factors = [sum(reached[k:]) for k in range(len(reached))]
        denominator = len(losses)
    loss = logits_BV.sum() * 0.0 + sum(factor * loss for factor, loss in zip(factors, losses, strict=True))
    accepted = next((k for k, hit in enumerate(hits) if not hit), len(hits))
    return loss, denominator, sum(hits), len(hits), accepted


def _log_softmax(row: Tensor) -> Tensor:
    return row - row.max() - torch.log(torch.exp(row - row.max()).sum())


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * gain


def _rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = len(x) // 2
    out = []
    for i in range(len(x)):
        angle = position * theta ** (-(i % half) / half)
        partner = -x[i + half] if i < half else x[i - half]
        out.append(x[i] * math.cos(angle) + partner * math.sin(angle))
    return torch.stack(out)


def _attend(
    config: dict, weights: dict[str, Tensor], prefix: str, x: Tensor, position: int, keys: list[Tensor], visible: list
) -> Tensor:
    size, eps, theta = config["head_dim"], config["rms_norm_eps"], config["rope_theta"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    query = weights[prefix + "q_proj.weight"] @ x
    heads = []
    for head in range(config["num_attention_heads"]):
        q = _norm(query[head * size : (head + 1) * size], weights[prefix + "q_norm.weight"], eps)
        q = _rotate(q, position, theta)
        rows = slice(head // group * size, (head // group + 1) * size)
        scores, values = [], []
        for key in visible:
            k = _norm(weights[prefix + "k_proj.weight"][rows] @ keys[key], weights[prefix + "k_norm.weight"], eps)
            scores.append((q * _rotate(k, key, theta)).sum() / math.sqrt(size))
            values.append(weights[prefix + "v_proj.weight"][rows] @ keys[key])
        shares = torch.softmax(torch.stack(scores), dim=0)
        heads.append(sum(share * value for share, value in zip(shares, values, strict=True)))
    return weights[prefix + "o_proj.weight"] @ torch.cat(heads)
