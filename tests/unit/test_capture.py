import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dflash_dist.config import TargetConfig
from dflash_dist.errors import UserError
from dflash_dist.target.capture import TargetForward
from dflash_dist.target.load import load_ends, load_full, load_tokenizer, text_config
from dflash_dist.target.packing import row_groups, token_offsets
from tests.tiny import HIDDEN, TAPS, VOCAB, make_target

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_rows_hold_every_token_once_with_little_padding(lengths: list[int]) -> None:
    lengths_N = np.array(lengths)
    groups = row_groups(lengths_N, max_padding_share=0.15)
    places = np.concatenate([g.destination for g in groups])
    assert sorted(places.tolist()) == list(range(sum(lengths)))
    for group in groups:
        rows, width = group.shape
        assert len(group.source) >= 0.85 * rows * width
        assert (token_offsets(lengths_N)[group.destination] == group.source % width).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "hybrid"])
def test_packed_states_equal_those_of_each_document_alone(kind: str, tmp_path: Path) -> None:
    folder = make_target(kind, tmp_path)
    settings = TargetConfig(model=str(folder), dtype="float32")
    forward = TargetForward(folder, settings, tuple(TAPS), CPU)
    assert forward.features == HIDDEN * len(TAPS)
    lengths_N = np.array([7, 31, 3, 30, 12])
    tokens_T = torch.randint(0, VOCAB, (int(lengths_N.sum()),), generator=torch.Generator().manual_seed(0))
    out_TF = torch.full((len(tokens_T), forward.features), torch.nan)
    forward.capture(tokens_T, lengths_N, out_TF)

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for part, ids in zip(out_TF.split(lengths_N.tolist()), tokens_T.split(lengths_N.tolist()), strict=True):
        with torch.no_grad():
            states = whole(input_ids=ids[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[tap + 1][0] for tap in TAPS], dim=-1)
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["llama", "qwen3", "hybrid", "gemma2", "gemma3"])
def test_the_last_state_and_the_ends_give_the_targets_own_logits(kind: str, tmp_path: Path) -> None:
    """Final norms with gain w and 1 + w, tied and own heads, scaled embeddings, soft-capped logits."""
    folder = make_target(kind, tmp_path)
    attention = "eager" if kind == "gemma2" else "sdpa"
    settings = TargetConfig(model=str(folder), dtype="float32", attention=attention)
    forward = TargetForward(folder, settings, tuple(TAPS), CPU, last_state=True)
    assert forward.features == HIDDEN * (len(TAPS) + 1)
    lengths_N = np.array([7, 31, 12])
    tokens_T = torch.randint(0, VOCAB, (int(lengths_N.sum()),), generator=torch.Generator().manual_seed(0))
    out_TF = torch.full((len(tokens_T), forward.features), torch.nan)
    forward.capture(tokens_T, lengths_N, out_TF)

    whole, ends = load_full(folder, settings, CPU), load_ends(folder, settings, CPU)
    for part, ids in zip(out_TF.split(lengths_N.tolist()), tokens_T.split(lengths_N.tolist()), strict=True):
        with torch.no_grad():
            output = whole(input_ids=ids[None], output_hidden_states=True)
        assert output.logits.std() > 0.01
        torch.testing.assert_close(ends.logits(part[:, -HIDDEN:]), output.logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part[:, :HIDDEN], output.hidden_states[TAPS[0] + 1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ends.embed(ids), output.hidden_states[0][0], rtol=1e-6, atol=0)


def test_a_target_with_multipliers_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = make_target("granite", tmp_path)
    with pytest.raises(UserError, match=r"a GraniteForCausalLM does more in its embedding than the table"):
        load_ends(folder, TargetConfig(model=str(folder), dtype="float32"), CPU)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("Gemma3nTextConfig", {"num_kv_shared_layers": 2}, "layers that share keys and values .num_kv_shared_layers=2"),
        ("Gemma4TextConfig", {"num_kv_shared_layers": 0}, "embeddings for each layer .hidden_size_per_layer_input="),
    ],
)
def test_layers_that_take_more_than_the_state_before_them_are_refused(
    kind: str, changes: dict[str, int], named: str, tmp_path: Path
) -> None:
    getattr(transformers, kind)(num_hidden_layers=4, **changes).save_pretrained(tmp_path)
    settings = TargetConfig(model=str(tmp_path))
    for read in (
        lambda: text_config(tmp_path),
        lambda: load_ends(tmp_path, settings, CPU),
        lambda: TargetForward(tmp_path, settings, (0, 1), CPU),
    ):
        with pytest.raises(UserError, match=f"{named}.*not supported; take a target without them"):
            read()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "hybrid"])
def test_ends_equal_the_whole_models(kind: str, tmp_path: Path) -> None:
    folder = make_target(kind, tmp_path)
    settings = TargetConfig(model=str(folder), dtype="float32")
    ends, whole = load_ends(folder, settings, CPU), load_full(folder, settings, CPU)
    ids = torch.arange(VOCAB)
    hidden = torch.randn(5, HIDDEN)
    torch.testing.assert_close(ends.embed(ids), whole.get_input_embeddings()(ids), rtol=0, atol=0)
    torch.testing.assert_close(ends.logits(hidden), whole.get_output_embeddings()(hidden), rtol=0, atol=0)
    assert not any(p.requires_grad for p in ends.parameters())


def test_gemma_scales_its_embedding_and_caps_its_logits(tmp_path: Path) -> None:
    from transformers import Gemma2Config

    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=2.0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    ends = load_ends(tmp_path, TargetConfig(model="x", dtype="float32", attention="eager"), CPU)
    assert ends.logits(100 * torch.randn(3, 16)).abs().max() <= 2.0
    embedded = model.model(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(ends.embed(torch.tensor([1, 2])), embedded[0])


def test_a_target_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = make_target("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(UserError, match=r"lacks \d+ weights|cannot be loaded"):
        load_full(folder, TargetConfig(model="x"), CPU)


def test_a_folder_without_a_template_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable config"):
        load_full(tmp_path, TargetConfig(model="x"), CPU)
    folder = make_target("qwen3", tmp_path / "t")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(folder)
