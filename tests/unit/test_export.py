import json
import re
import resource
import shlex

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_dist.drafter.anchors import BlockTensors
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.export import folder as folder_module
from dflash_dist.export.folder import tensor_shapes
from dflash_dist.export.plain import export_plain, load_drafter, serve_commands
from tests.random_models import drafter_config, llama_config, random_drafter

MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}


@pytest.fixture
def drafter() -> DFlashDrafter:
    return random_drafter(drafter_config(llama_config(), **MIXED))


@pytest.fixture
def folder(drafter, tmp_path):
    export_plain(drafter, tmp_path / "out" / "drafter")
    return tmp_path / "out" / "drafter"


def change_weights(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, change) -> None:
    tree = json.loads((folder / "config.json").read_text())
    change(tree)
    (folder / "config.json").write_text(json.dumps(tree))


def test_the_folder_holds_the_published_tensors_in_bf16_and_nothing_else(folder, drafter):
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["drafter"]
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 11 * 2 + 3
    # H 64, K 2, 4 and 2 heads of 16, MLP 96: the table written out by hand.
    expected = {"fc.weight": (64, 128), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    for layer in ("layers.0.", "layers.1."):
        expected |= {
            layer + "input_layernorm.weight": (64,),
            layer + "post_attention_layernorm.weight": (64,),
            layer + "self_attn.q_proj.weight": (64, 64),
            layer + "self_attn.k_proj.weight": (32, 64),
            layer + "self_attn.v_proj.weight": (32, 64),
            layer + "self_attn.o_proj.weight": (64, 64),
            layer + "self_attn.q_norm.weight": (16,),
            layer + "self_attn.k_norm.weight": (16,),
            layer + "mlp.gate_proj.weight": (96, 64),
            layer + "mlp.up_proj.weight": (96, 64),
            layer + "mlp.down_proj.weight": (64, 96),
        }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert expected == tensor_shapes(drafter.config)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert expected.keys() == dict(drafter.named_parameters()).keys()


def test_the_config_is_what_three_engines_read(folder):
    tree = json.loads((folder / "config.json").read_text())
    assert tree["architectures"] == ["DFlashDraftModel"]
    assert tree["model_type"] == "qwen3"
    assert tree["block_size"] == 4
    assert tree["dflash_config"] == {"block_size": 4, "mask_token_id": 99, "target_layer_ids": [0, 2]}
    assert tree["num_target_layers"] == 4
    assert (tree["use_sliding_window"], tree["sliding_window"], tree["max_window_layers"]) == (True, 8, 2)
    assert tree["layer_types"] == ["sliding_attention", "full_attention"]
    assert tree["rope_theta"] == tree["rope_parameters"]["rope_theta"] == 10_000.0
    assert tree["tie_word_embeddings"] is False
    assert tree["dtype"] == tree["torch_dtype"] == "bfloat16"
    assert not {"auto_map", "is_causal", "is_neox_style"} & tree.keys()


def test_export_and_load_give_the_same_drafter(folder, drafter):
    loaded = load_drafter(folder)
    assert loaded.config == drafter.config
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
        assert torch.equal(parameter, drafter.state_dict()[name].bfloat16().float())
    rounded = random_drafter(drafter.config)
    rounded.load_state_dict({name: tensor.bfloat16().float() for name, tensor in drafter.state_dict().items()})
    features, positions = torch.randn(9, 128), torch.arange(9)
    embeddings, places = torch.randn(1, 2, 64)[:, [0, 1, 1, 1]], torch.arange(8, 12)[None]  # an anchor and mask tokens
    block = BlockTensors(torch.tensor([8]), torch.tensor([True]), places, places, places, places > 8, places / 8)
    outputs = []
    for model in (loaded, rounded):
        masks = model.masks(block, 9)
        outputs.append(model.blocks(embeddings, places, model.context(features, positions), masks))
    assert torch.equal(*outputs)


def test_an_existing_folder_is_not_overwritten(folder, drafter):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        export_plain(random_drafter(drafter.config, seed=9), folder)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("place", ["afile/x", "/proc/x", "dangling", "n" * 256], ids=lambda place: place[:10])
def test_places_that_cannot_be_written_are_refused(drafter, tmp_path, place):
    (tmp_path / "afile").write_text("not a folder")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=re.escape(place)):
        export_plain(drafter, tmp_path / place)
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_leaves_nothing(drafter, tmp_path):
    """A limit on the size of files stands in for the disk: writing past it fails the same way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most_bytes in (0, 1000, 60_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
        try:
            with pytest.raises(UserError, match=r"cannot be written.*free some space"):
                export_plain(drafter, tmp_path / "drafter")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []


def test_an_untrained_or_broken_drafter_is_not_exported(drafter, tmp_path):
    untrained = DFlashDrafter(drafter.config)
    untrained.init_weights(0)
    with pytest.raises(UserError, match="untrained"):
        export_plain(untrained, tmp_path / "untrained")
    for value in (float("nan"), float("inf"), 3.4e38):
        with torch.no_grad():
            drafter.layers[1].mlp.up_proj.weight[0, 0] = value
        with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight.*not finite"):
            export_plain(drafter, tmp_path / "broken")
    assert list(tmp_path.iterdir()) == []


def test_what_was_written_wrong_does_not_get_its_name(drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(
        folder_module,
        "save_file",
        lambda tensors, path, metadata: save_file({"norm.weight": tensors["norm.weight"]}, path),
    )
    with pytest.raises(UserError, match="lacks 24"):
        export_plain(drafter, tmp_path / "drafter")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: t.pop("layers.1.self_attn.q_norm.weight"), "lacks 1: layers.1.self_attn.q_norm.weight"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(3)}), "adds 1: embed_tokens.weight"),
        (lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}), "adds 1: model.norm.weight"),
        (lambda t: t.update({"fc.weight": torch.ones(64, 64)}), "fc.weight has shape [64, 64]"),
    ],
)
def test_a_damaged_export_is_refused_by_name(folder, change, part):
    change_weights(folder, change)
    with pytest.raises(UserError) as error:
        load_drafter(folder)
    assert part in str(error.value)


def test_files_that_are_missing_or_cut_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_drafter(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        load_drafter(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_drafter(folder)


def test_a_config_without_a_key_or_for_another_shape_is_refused(folder):
    change_config(folder, lambda tree: tree.pop("num_target_layers"))
    with pytest.raises(UserError, match="lacks num_target_layers"):
        load_drafter(folder)
    change_config(
        folder, lambda tree: tree.update(num_target_layers=4, num_hidden_layers=1, layer_types=["full_attention"])
    )
    with pytest.raises(UserError, match="adds 11"):
        load_drafter(folder)


def test_serve_commands_name_the_block_as_each_engine_counts_it(folder):
    sglang, vllm = (shlex.split(command) for command in serve_commands(folder, "org/target"))
    assert sglang[:3] == ["python", "-m", "sglang.launch_server"]
    options = dict(zip(sglang[3::2], sglang[4::2], strict=True))
    assert options == {
        "--model-path": "org/target",
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": str(folder),
        "--speculative-num-draft-tokens": "4",
        "--attention-backend": "fa3",
    }
    assert vllm[:3] == ["vllm", "serve", "org/target"]
    options = dict(zip(vllm[3::2], vllm[4::2], strict=True))
    assert json.loads(options["--speculative-config"]) == {
        "method": "dflash",
        "model": str(folder),
        "num_speculative_tokens": 3,
    }
    assert options["--attention-backend"] == "flash_attn"
    assert options["--max-num-batched-tokens"] == "32768"
