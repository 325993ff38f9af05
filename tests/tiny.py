"""Tiny random targets with a byte tokenizer, and chats for them: real files, made in a second."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import yaml

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LAYERS, HIDDEN, VOCAB = 8, 32, 288
TAPS = [1, 3, 5]


def make_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def target_config(kind: str) -> Any:
    """The transformers configuration of a tiny target, by a name below; any other is the hybrid Qwen3.5."""
    from transformers import (
        Gemma2Config,
        Gemma3TextConfig,
        GraniteConfig,
        LlamaConfig,
        Qwen3_5MoeTextConfig,
        Qwen3_5TextConfig,
        Qwen3Config,
        Qwen3MoeConfig,
        Qwen3NextConfig,
    )

    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "initializer_range": 0.2,
    }
    if kind == "llama":
        return LlamaConfig(**common, tie_word_embeddings=True)
    if kind == "qwen3":
        return Qwen3Config(**common, tie_word_embeddings=False)
    if kind == "gemma2":
        return Gemma2Config(**common, final_logit_softcapping=2.0)
    if kind == "gemma3":
        return Gemma3TextConfig(**common)
    if kind == "granite":
        return GraniteConfig(**common, embedding_multiplier=12.0, logits_scaling=8.0)
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
    }
    if kind == "qwen3_moe":
        return Qwen3MoeConfig(**common, **experts)
    linear = {
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "layer_types": [("full_attention" if i % 4 == 3 else "linear_attention") for i in range(LAYERS)],
        "tie_word_embeddings": False,
    }
    if kind == "qwen3_next":
        return Qwen3NextConfig(**(common | linear), **experts)
    rope = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
    if kind == "hybrid_moe":
        return Qwen3_5MoeTextConfig(**(common | linear), **experts, rope_parameters=rope)
    return Qwen3_5TextConfig(**(common | linear), rope_parameters=rope)


def make_target(kind: str, folder: Path) -> Path:
    """A folder with random weights, tokenizer and chat template."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(target_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.2, 0.2))  # norms as after training
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_chats(path: Path, rows: int = 60, seed: int = 0) -> Path:
    """A JSONL file of chats of very different lengths."""
    rng = random.Random(seed)
    words = ["tea", "rain", "seven", "stone", "green", "river", "yes", "no", "perhaps", "tomorrow"]

    def say(most: int) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, most)))

    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            messages = []
            for _ in range(rng.randint(1, 2)):
                messages += [{"role": "user", "content": say(4)}, {"role": "assistant", "content": say(12)}]
            file.write(json.dumps({"id": f"chat-{i}", "messages": messages}) + "\n")
    return path


def make_config(folder: Path, target: Path, chats: Path, **sections: dict[str, Any]) -> Path:
    """A configuration for the tiny target; `sections` change single keys."""
    tree: dict[str, Any] = {
        "target": {"model": str(target), "dtype": "float32"},
        "data": {"sources": [str(chats)], "max_length": 160, "held_out_share": 0.1, "workers": 1},
        "schedule": {"token_budget": 320, "batches_per_step": 4},
        "drafter": {"num_layers": 2, "block_size": 4, "target_layer_ids": TAPS, "mask_token_id": 270},
        "objective": {"anchors_per_document": 6, "max_anchors_per_batch": 24},
        "train": {
            "epochs": 2,
            "max_steps": 8,
            "learning_rate": 3e-3,
            "checkpoint_every": 3,
            "validate_every": 4,
            "validation_batches": 2,
        },
        "evaluate": {"prompts": 2, "max_new_tokens": 12},
        "cache_dir": str(folder / "cache"),
        "runs_dir": str(folder / "runs"),
    }
    for section, keys in sections.items():
        tree.setdefault(section, {}).update(keys)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path
