import json
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dflash_dist.commands import export_command
from dflash_dist.config import load_config
from dflash_dist.drafter.config import resolve
from dflash_dist.drafter.model import DFlashDrafter
from dflash_dist.errors import UserError
from dflash_dist.export import speculators
from dflash_dist.export.plain import export_plain, load_drafter, serve_commands
from dflash_dist.export.speculators import export_speculators, to_plain
from tests import checkpoints, tiny
from tests.random_models import drafter_config, llama_config, random_drafter

SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8}
MIXED = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}


def export(folder, **changes) -> DFlashDrafter:
    drafter = random_drafter(drafter_config(llama_config(), **changes))
    export_speculators(drafter, folder, "org/target", ["LlamaForCausalLM"])
    return drafter


def test_the_config_holds_every_key_of_the_format(tmp_path):
    export(tmp_path / "drafter")
    tree = json.loads((tmp_path / "drafter/config.json").read_text())
    layers = tree.pop("transformer_layer_config")
    # Taps 0 and 2 are outputs 1 and 3 when counted from the embedding; blocks of 4 draft 3 tokens.
    assert tree == {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": 4,
        "mask_token_id": 99,
        "draft_vocab_size": 100,
        "aux_hidden_state_layer_ids": [1, 3],
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert layers["model_type"] == "qwen3"
    assert (layers["num_hidden_layers"], layers["hidden_size"], layers["vocab_size"]) == (2, 64, 100)
    assert layers["rope_theta"] == layers["rope_parameters"]["rope_theta"] == 10_000.0
    assert layers["tie_word_embeddings"] is False
    assert not {"dflash_config", "architectures", "block_size"} & layers.keys()


def test_the_weights_are_those_of_the_plain_export(tmp_path):
    drafter = export(tmp_path / "speculators")
    export_plain(drafter, tmp_path / "plain")
    theirs, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("speculators", "plain"))
    assert theirs.keys() == plain.keys()
    assert all(torch.equal(theirs[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, False),
        (SLIDING, True),
        (SLIDING | {"is_causal": False}, False),
        (MIXED | {"is_causal": False}, False),
    ],
    ids=["full", "sliding", "sliding bidirectional", "mixed bidirectional"],
)
def test_causality_is_written_for_both_readers_and_survives_loading(changes, causal, tmp_path):
    drafter = export(tmp_path / "drafter", **changes)
    tree = json.loads((tmp_path / "drafter/config.json").read_text())
    assert tree["sliding_window_non_causal"] is not causal
    assert tree["transformer_layer_config"]["is_causal"] is causal
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.config == drafter.config
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, drafter.state_dict()[name].bfloat16().float())


@pytest.mark.parametrize("changes", [MIXED, {"is_causal": True}, MIXED | {"is_causal": True}])
def test_causal_layers_beside_full_ones_are_refused(changes, tmp_path):
    with pytest.raises(UserError, match=r"causal.*--format plain"):
        export(tmp_path / "drafter", **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "done"),
    [("gemma2", "scales its embeddings and soft-caps its logits"), ("gemma3", "scales its embeddings")],
)
def test_what_gemma_does_to_its_ends_is_refused(kind, done, tmp_path):
    drafter = random_drafter(drafter_config(tiny.target_config(kind)))
    with pytest.raises(UserError, match=f"target {done}, which .*--format plain"):
        export_speculators(drafter, tmp_path / "drafter", "org/target", ["GemmaForCausalLM"])
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_reads_back_as_another_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(speculators, "to_plain", lambda tree: to_plain(tree | {"mask_token_id": 1}))
    with pytest.raises(AssertionError, match="does not give the drafter's config"):
        export(tmp_path / "drafter")


def test_an_untrained_drafter_or_an_existing_folder_is_refused(tmp_path):
    drafter = DFlashDrafter(drafter_config(llama_config()))
    drafter.init_weights(0)
    with pytest.raises(UserError, match="untrained"):
        export_speculators(drafter, tmp_path / "drafter", "org/target", [])
    assert list(tmp_path.iterdir()) == []
    export(tmp_path / "drafter")
    with pytest.raises(UserError, match="exists already"):
        export(tmp_path / "drafter")


def test_a_config_without_a_key_is_refused_by_name(tmp_path):
    export(tmp_path / "drafter")
    path = tmp_path / "drafter/config.json"
    tree = json.loads(path.read_text())
    del tree["aux_hidden_state_layer_ids"], tree["transformer_layer_config"]["head_dim"]
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"lacks head_dim, dflash_config\.target_layer_ids;"):
        load_drafter(tmp_path / "drafter")


def test_only_vllm_is_told_to_serve_it(tmp_path):
    export(tmp_path / "drafter")
    (command,) = serve_commands(tmp_path / "drafter", "org/target")
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", "org/target"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": str(tmp_path / "drafter"),
        "num_speculative_tokens": 3,
    }


def test_the_command_exports_a_run_and_names_its_target(tmp_path):
    target = tiny.make_target("llama", tmp_path / "target")
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(tiny.make_config(tmp_path, target, tmp_path / "chats.jsonl"), run / "config.yaml")
    drafter = random_drafter(resolve(load_config(run / "config.yaml").drafter, tiny.target_config("llama"), 259))
    checkpoints.save(run / "checkpoints", drafter, 3)
    lines = export_command(run, tmp_path / "out", "speculators")
    assert lines == [str(tmp_path / "out"), *serve_commands(tmp_path / "out", str(target))]
    assert load_drafter(tmp_path / "out").config == drafter.config
    tree = json.loads((tmp_path / "out/config.json").read_text())
    assert tree["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    lines = export_command(run, tmp_path / "plain", "plain")
    assert [line.split()[0] for line in lines[1:]] == ["python", "vllm"]
