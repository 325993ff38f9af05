import contextlib
import dataclasses
import json

import pytest
from transformers import LlamaConfig, Qwen3Config

from dflash_dist.config import DrafterSettings, load_config
from dflash_dist.drafter.config import DrafterConfig, default_layer_ids, resolve
from dflash_dist.errors import UserError
from dflash_dist.export.speculators import to_plain, to_speculators
from dflash_dist.target.load import load_tokenizer
from dflash_dist.train.inputs import resolve_drafter
from tests.random_models import hybrid_config
from tests.tiny import make_config, make_target

LLAMA = dict(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    initializer_range=0.03,
    rope_parameters={"rope_type": "default", "rope_theta": 123_456.0},
)


def settings(**changes) -> DrafterSettings:
    return dataclasses.replace(DrafterSettings(num_layers=2, block_size=4), **changes)


def resolved(changes: dict | None = None, target: dict | None = None, tokenizer_end: int = 90) -> DrafterConfig:
    return resolve(settings(**(changes or {})), LlamaConfig(**{**LLAMA, **(target or {})}), tokenizer_end)


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (24, 3, (1, 11, 21)),
        (24, 8, (1, 4, 7, 10, 12, 15, 18, 21)),
        (28, 5, (1, 7, 13, 19, 25)),
        (28, 8, (1, 4, 8, 11, 15, 18, 22, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 3, (1, 17, 33)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 8, (1, 6, 11, 16, 22, 27, 32, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 8, (1, 10, 18, 27, 35, 44, 52, 61)),
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 1, (18,)),
    ],
)
def test_default_layer_ids_follow_the_published_table(layers, count, ids):
    assert default_layer_ids(layers, count) == ids


def test_what_is_not_set_comes_from_a_dense_target():
    config = resolved()
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 100)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.rms_norm_eps, config.initializer_range, config.rope_theta) == (1e-5, 0.03, 123_456.0)
    assert (config.max_position_embeddings, config.num_target_layers) == (512, 12)
    assert config.target_layer_ids == (1, 9)
    assert config.mask_token_id == 90
    assert config.layer_types == ("full_attention",) * 2


def test_settings_override_the_target():
    config = resolved(
        dict(
            num_attention_heads=6, num_key_value_heads=3, head_dim=32, intermediate_size=48, mask_token_id=7, num_taps=3
        )
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 32)
    assert (config.intermediate_size, config.mask_token_id, config.target_layer_ids) == (48, 7, (1, 5, 9))


def test_scaled_rope_gives_its_base_alone():
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    config = resolved(target={"rope_parameters": scaled})
    assert config.rope_theta == 5e5
    assert config.to_json()["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}


def test_hybrid_targets_give_their_rope_base_but_not_their_geometry():
    config = resolve(settings(target_layer_ids=(0, 1)), hybrid_config(), 90)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (1, 1, 64)
    assert config.rope_theta == 1e7
    large = hybrid_config(hidden_size=2560)
    config = resolve(settings(target_layer_ids=(0, 1)), large, 90)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)


def test_causality_follows_the_engines_rule():
    mixed = dict(layer_types=("sliding_attention", "full_attention"), sliding_window=8)
    config = resolved(mixed)
    assert [config.causal(0), config.causal(1)] == [True, False]
    assert [config.window(0), config.window(1)] == [8, None]
    for explicit in (True, False):
        config = resolved({**mixed, "is_causal": explicit})
        assert [config.causal(0), config.causal(1)] == [explicit, explicit]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (dict(target_layer_ids=(1, 11)), "last layer, 11"),
        (dict(target_layer_ids=(1, 12)), "12 layers; use 0 to 10"),
        (dict(target_layer_ids=(-1, 3)), "use 0 to 10"),
        (dict(target_layer_ids=(5, 2)), "ascend"),
        (dict(target_layer_ids=(2, 2)), "ascend"),
        (dict(target_layer_ids=()), "empty"),
        (dict(mask_token_id=100), "100 rows"),
        (dict(mask_token_id=-1), "mask_token_id"),
        (dict(layer_types=("full_attention",)), "names 1 layers, but there are 2"),
        (dict(layer_types=("full_attention", "round")), "'round'"),
        (dict(layer_types=("full_attention", "sliding_attention")), "drafter.sliding_window"),
        (dict(layer_types=("full_attention", "sliding_attention"), sliding_window=3), "block_size (4)"),
        (dict(block_size=1), "block_size is 1"),
        (dict(num_attention_heads=3, num_key_value_heads=2), "must divide num_attention_heads"),
        (dict(head_dim=15), "even"),
        (dict(num_layers=12), "too shallow for 12 taps"),
    ],
)
def test_what_is_no_drafter_is_refused_in_one_line(changes, part):
    with pytest.raises(UserError) as error:
        resolved(changes)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_full_embedding_table_asks_for_the_mask_token():
    with pytest.raises(UserError, match=r"100 rows and its tokenizer has ids up to 99.*drafter\.mask_token_id"):
        resolved(tokenizer_end=100)
    assert resolved(dict(mask_token_id=3), tokenizer_end=100).mask_token_id == 3


def test_the_mask_token_lies_past_a_gap_in_the_tokenizers_ids(tmp_path):
    target = make_target("llama", tmp_path / "target")
    file = target / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocab = tree["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] = 280
    file.write_text(json.dumps(tree))
    assert len(load_tokenizer(target)) == 259
    path = make_config(tmp_path, target, tmp_path / "chats.jsonl", drafter={"mask_token_id": None})
    assert resolve_drafter(load_config(path), target)[1].mask_token_id == 281


def test_json_round_trip_and_both_generations_of_readers():
    config = resolved(dict(layer_types=("sliding_attention", "full_attention"), sliding_window=8, is_causal=False))
    tree = config.to_json()
    assert DrafterConfig.from_json(tree) == config
    assert tree["block_size"] == tree["dflash_config"]["block_size"] == 4
    assert tree["rope_theta"] == tree["rope_parameters"]["rope_theta"]
    assert "auto_map" not in tree
    assert (tree["use_sliding_window"], tree["sliding_window"], tree["is_causal"]) == (True, 8, False)
    assert "is_causal" not in resolved().to_json()
    hf = Qwen3Config(**tree)
    assert (hf.sliding_window, hf.layer_types, hf.rope_parameters["rope_theta"]) == (8, tree["layer_types"], 123_456.0)


@pytest.mark.parametrize("key", ["head_dim", "num_target_layers", "dflash_config", "layer_types", "rope_theta"])
def test_json_without_a_key_is_refused_by_name(key):
    tree = resolved().to_json()
    del tree[key]
    tree.pop("rope_parameters" if key == "rope_theta" else "", None)
    with pytest.raises(UserError, match="target_layer_ids" if key == "dflash_config" else key):
        DrafterConfig.from_json(tree)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dflash_config", [1]),
        ("layer_types", 5),
        ("rope_parameters", "x"),
        ("hidden_size", True),
        ("vocab_size", 1.5),
        ("rms_norm_eps", float("nan")),
        ("sliding_window", "x"),
        ("is_causal", "no"),
    ],
)
def test_json_with_a_value_of_another_type_is_refused_by_name(key, value):
    with pytest.raises(UserError, match=f"the drafter's config.json: {key} is "):
        DrafterConfig.from_json(resolved().to_json() | {key: value})


@pytest.mark.parametrize("form", ["plain", "speculators"])
@pytest.mark.parametrize("value", ["x", 5, [1], {"a": 1}, -1, 1.5, True], ids=repr)
def test_json_with_any_value_at_any_key_is_read_or_refused(form, value):
    tree = resolved().to_json()
    if form == "speculators":
        tree = to_speculators(resolved(), "target", ["LlamaForCausalLM"])
    for place in (tree, tree["dflash_config" if form == "plain" else "transformer_layer_config"]):
        for key, sound in list(place.items()):
            place[key] = value
            with contextlib.suppress(UserError):
                DrafterConfig.from_json(tree if form == "plain" else to_plain(tree))
            place[key] = sound
