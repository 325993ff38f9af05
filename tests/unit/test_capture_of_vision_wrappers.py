"""Targets that see: their text model alone is loaded, and its states are those of the whole model for text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dflash_dist.config import TargetConfig
from dflash_dist.errors import UserError
from dflash_dist.evaluate.speculate import TargetDecoder
from dflash_dist.target.capture import Layout, TargetForward
from dflash_dist.target.load import ends_of, load_ends, load_full, load_taps
from tests.tiny import HIDDEN, VOCAB

CPU = torch.device("cpu")
TAPS = (0, 1, 2)
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024,
    "initializer_range": 0.2, "bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256,
}  # fmt: skip
EYES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "depth": 1, "num_heads": 4, "head_dim": 8, "global_head_dim": 8, "embed_dim": 32,
    "out_hidden_size": HIDDEN, "image_size": 32, "patch_size": 8, "deepstack_visual_indexes": [0],
}  # fmt: skip
"""Of the part that sees, by the names of several families."""
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
WRAPPERS: dict[str, dict[str, Any]] = {
    "Gemma3": {"sliding_window": 40},
    "Gemma4": {"sliding_window": 40, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
               "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Qwen2VL": MROPE,
    "Qwen2_5_VL": MROPE,
    "Qwen3VL": MROPE,
    "Qwen3VLMoe": MROPE | EXPERTS,
    "Qwen3_5": MROPE | HYBRID,
    "Mistral3": {},
    "Llava": {"model_type": "llama"},
    "LlavaNext": {"model_type": "mistral", "sliding_window": 40},
    "LlavaOnevision": {"model_type": "qwen2"},
    "InternVL": {"model_type": "qwen3"},
    "Idefics3": {"model_type": "llama"},
    "AyaVision": {"model_type": "cohere2", "sliding_window": 40},
}  # fmt: skip
"""Changes of the text model's configuration, by the first part of the names of each family's classes."""


def make_wrapper(family: str, folder: Path) -> Any:
    """The whole model, in float32, as it was saved to the folder; skips where transformers has no such family."""
    make_config = getattr(transformers, f"{family}Config", None)
    if make_config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = make_config(
        text_config=TEXT | WRAPPERS[family], vision_config=EYES, image_token_id=280, video_token_id=281
    )
    name = f"{family}ForConditionalGeneration"
    torch.manual_seed(1)
    whole = getattr(transformers, name)._from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(folder)
    return whole


@pytest.mark.parametrize("family", WRAPPERS)
def test_the_text_model_of_a_vision_wrapper_is_loaded_alone(family: str, tmp_path: Path) -> None:
    """For taps up to the last tapped layer; for decoding all of it and the head."""
    whole = make_wrapper(family, tmp_path)
    settings = TargetConfig(model=str(tmp_path), dtype="float32")
    text = dict(whole.get_decoder().named_parameters())
    assert len(list(whole.parameters())) > len(text) + 5, "it has nothing to leave out"

    taps = dict(load_taps(tmp_path, settings, 3, CPU).named_parameters())
    kept = [name for name in text if not name.startswith("layers.3.")]
    assert list(taps) == kept and all(torch.equal(taps[name], text[name]) for name in kept)

    target = load_full(tmp_path, settings, CPU)
    assert {name for name, _ in target.get_decoder().named_parameters()} == text.keys()
    ours = {id(parameter) for parameter in (*target.get_decoder().parameters(), target.get_output_embeddings().weight)}
    beside = [name for name, p in target.named_parameters() if id(p) not in ours and name != "model.image_newline"]
    assert not beside


@pytest.mark.parametrize("layout", ["packed", "rows"])
@pytest.mark.parametrize("family", WRAPPERS)
def test_states_are_those_of_the_whole_vision_wrapper(family: str, layout: Layout, tmp_path: Path) -> None:
    whole = make_wrapper(family, tmp_path)
    settings = TargetConfig(model=str(tmp_path), dtype="float32")
    forward = TargetForward(tmp_path, settings, TAPS, CPU, layout=layout)
    assert forward.layout == layout, forward.not_packed_because
    lengths_N = np.array([7, 31, 1, 90])
    tokens_T = torch.randint(0, 256, (int(lengths_N.sum()),), generator=torch.Generator().manual_seed(0))
    out_TF = torch.full((len(tokens_T), forward.features), torch.nan)
    forward.capture(tokens_T, lengths_N, out_TF)
    for part, ids in zip(out_TF.split(lengths_N.tolist()), tokens_T.split(lengths_N.tolist()), strict=True):
        with torch.no_grad():
            states = whole(input_ids=ids[None], output_hidden_states=True).hidden_states
        for tap, state in zip(TAPS, part.split(HIDDEN, dim=1), strict=True):
            expected = states[tap + 1][0]
            assert expected.std() > 0.01 and (state - expected).norm() <= 1e-4 * expected.norm(), tap


@pytest.mark.parametrize("family", WRAPPERS)
def test_the_ends_of_a_vision_wrapper_and_its_decoding_are_the_whole_models(family: str, tmp_path: Path) -> None:
    whole = make_wrapper(family, tmp_path)
    settings = TargetConfig(model=str(tmp_path), dtype="float32")
    target, ends = load_full(tmp_path, settings, CPU), load_ends(tmp_path, settings, CPU)
    ids_T = torch.arange(20)
    with torch.no_grad():
        output = whole(input_ids=ids_T[None], output_hidden_states=True)
        decoder = TargetDecoder(target)
        logits_TV = torch.cat([decoder.run(part)[0] for part in ids_T.split([12, 7, 1])])
    torch.testing.assert_close(logits_TV, output.logits[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(ends.head_weight, whole.get_output_embeddings().weight)
    torch.testing.assert_close(ends.embed(ids_T), output.hidden_states[0][0], rtol=1e-6, atol=0)
    assert torch.equal(ends_of(target, tmp_path).head_weight, ends.head_weight)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("Blip", "a BlipForConditionalGeneration takes no text without pixel_values"),
        ("InstructBlip", "takes no text without pixel_values and qformer_input_ids"),
        ("PaliGemma", "is a gemma with use_bidirectional_attention"),
        ("Pix2Struct", "is a pix2struct, an encoder with a decoder, which is not supported"),
    ],
)
def test_a_vision_wrapper_that_reads_no_text_alone_is_refused(family: str, reason: str, tmp_path: Path) -> None:
    getattr(transformers, f"{family}Config")().save_pretrained(tmp_path)
    settings = TargetConfig(model=str(tmp_path), dtype="float32")
    with pytest.raises(UserError, match=reason):
        load_ends(tmp_path, settings, CPU)
    with pytest.raises(UserError, match=reason):
        TargetForward(tmp_path, settings, TAPS, CPU)


def test_a_vision_wrapper_without_layers_to_tap_is_refused(tmp_path: Path) -> None:
    from transformers import Kosmos2Config, Kosmos2ForConditionalGeneration

    text = {"vocab_size": VOCAB, "embed_dim": 32, "layers": 4, "ffn_dim": 64, "attention_heads": 4}
    config = Kosmos2Config(text_config=text, vision_config=EYES, latent_query_num=4)
    Kosmos2ForConditionalGeneration._from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    settings = TargetConfig(model=str(tmp_path), dtype="float32")
    for load in (lambda: TargetForward(tmp_path, settings, TAPS, CPU), lambda: load_ends(tmp_path, settings, CPU)):
        with pytest.raises(UserError, match="is a Kosmos2TextForCausalLM, whose layers cannot be tapped"):
            load()


def test_a_part_that_text_turns_out_to_need_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wrapper("Qwen3VL", tmp_path)
    forward = transformers.Qwen3VLModel.forward
    monkeypatch.setattr(
        transformers.Qwen3VLModel, "forward", lambda self, **kwargs: self.visual(0) and forward(self, **kwargs)
    )
    with pytest.raises(UserError, match="runs its Qwen3VLVisionModel for text alone, which is not supported"):
        load_ends(tmp_path, TargetConfig(model=str(tmp_path), dtype="float32"), CPU)
