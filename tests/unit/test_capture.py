import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dflash_dist.config import TargetConfig
from dflash_dist.errors import UserError
from dflash_dist.target import attention, mixers, packed
from dflash_dist.target.capture import Layout, TargetForward
from dflash_dist.target.load import load_ends, load_full, load_taps, load_tokenizer, text_config
from dflash_dist.target.packing import row_groups, token_offsets
from tests.tiny import HIDDEN, LAYERS, TAPS, VOCAB, make_target, target_config

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_rows_hold_every_token_once_with_little_padding(lengths: list[int]) -> None:
    lengths_N = np.array(lengths)
    groups = row_groups(lengths_N, max_padding_share=0.15)
    places = np.concatenate([g.destination for g in groups])
    assert sorted(places.tolist()) == list(range(sum(lengths)))
    for group in groups:
        rows, width = group.shape
        assert len(group.source) >= 0.85 * rows * width or group.shape == (1, 2)  # one token: see row_groups
        assert (token_offsets(lengths_N)[group.destination] == group.source % width).all()


RIGHT = attention.packed_attention
HYBRIDS = ["hybrid", "qwen3_next", "hybrid_moe"]
ARCHITECTURES = ["llama", "qwen3", "gemma3", "qwen3_moe", *HYBRIDS]


@pytest.mark.parametrize("layout", ["packed", "rows"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_documents_states_are_those_of_it_alone(kind: str, layout: Layout, tmp_path: Path) -> None:
    """At every tap, in float32; documents are shorter and longer than a chunk of the delta rule or a window."""
    folder = make_target(kind, tmp_path)
    settings = TargetConfig(model=str(folder), dtype="float32")
    taps = tuple(range(LAYERS - 1))
    forward = TargetForward(folder, settings, taps, CPU, layout=layout)
    assert forward.layout == layout, forward.not_packed_because
    assert forward.features == HIDDEN * len(taps)
    lengths_N = np.array([7, 31, 3, 1, 130, 30, 64])
    tokens_T = torch.randint(0, VOCAB, (int(lengths_N.sum()),), generator=torch.Generator().manual_seed(0))
    out_TF = torch.full((len(tokens_T), forward.features), torch.nan)
    forward.capture(tokens_T, lengths_N, out_TF)

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for part, ids in zip(out_TF.split(lengths_N.tolist()), tokens_T.split(lengths_N.tolist()), strict=True):
        with torch.no_grad():
            states = whole(input_ids=ids[None], output_hidden_states=True).hidden_states
        for tap, state in zip(taps, part.split(HIDDEN, dim=1), strict=True):
            expected = states[tap + 1][0]
            assert (state - expected).norm() <= 1e-4 * expected.norm(), tap


@pytest.mark.parametrize("kind", ["qwen3", "hybrid"])
def test_a_value_that_is_not_finite_stays_in_its_document(kind: str, tmp_path: Path) -> None:
    folder = make_target(kind, tmp_path)
    forward = TargetForward(folder, TargetConfig(model=str(folder), dtype="float32"), tuple(TAPS), CPU, layout="packed")
    with torch.no_grad():
        forward._model.embed_tokens.weight[5] = torch.inf
    tokens_T = torch.tensor([5, 5, 5, 5, 1, 2, 3, 4, 6, 5, 7])
    out_TF = torch.empty(11, forward.features)
    forward.capture(tokens_T, np.array([4, 4, 3]), out_TF)
    assert out_TF[4:8].isfinite().all() and not out_TF[:4].isfinite().any() and not out_TF[9:].isfinite().any()


def test_packed_is_the_layout_where_kernels_keep_documents_apart(tmp_path: Path) -> None:
    for kind, layout, reason in (
        ("llama", "packed", ""),
        ("hybrid", "rows", "the delta rule has no fused kernel on the CPU"),
        ("gemma2", "rows", "its attention takes softcap"),
    ):
        folder = make_target(kind, tmp_path / kind)
        implementation = "eager" if kind == "gemma2" else "sdpa"
        settings = TargetConfig(model=str(folder), dtype="float32", attention=implementation)
        forward = TargetForward(folder, settings, tuple(TAPS), CPU)
        assert (forward.layout, forward.not_packed_because) == (layout, reason)
        assert forward._model.config._attn_implementation == (
            implementation if kind == "gemma2" else attention.ATTENTION
        )


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2,
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("Mistral", {"sliding_window": 200}, ""),
    "windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 200, "max_window_layers": 2}, ""),
    "window by mask": (
        "Qwen2Moe",
        {"use_sliding_window": True, "sliding_window": 200, "layer_types": ["sliding_attention"] * 4,
         "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        "its window of 200 tokens by a mask alone, as in layer 0",
    ),
    "window of all by mask": ("Phimoe", {"sliding_window": 200, "num_local_experts": 4}, "by a mask alone"),
    "convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "layers of type conv"),
    "mamba": ("Jamba", {"num_experts": 2, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
              "linear attention is of another kind"),
    "mamba 2": ("Bamba", {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "attn_layer_indices": [1, 3]},
                "linear attention is of another kind"),
    "lightning": ("MiniMax", {"num_local_experts": 2, "head_dim": 8, "block_size": 16}, "is of another kind"),
    "sinks": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "its attention takes s_aux"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_give_right_states_in_some_layout(name: str, tmp_path: Path) -> None:
    """A document past the window shows one that is not kept, which the trial's short documents do not."""
    kind, changes, reason = OTHERS[name]
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(
        getattr(transformers, f"{kind}Config")(**(COMMON | changes)), dtype=torch.float32
    ).eval()
    whole.save_pretrained(tmp_path)
    implementation = "eager" if name == "sinks" else "sdpa"
    settings = TargetConfig(model=str(tmp_path), dtype="float32", attention=implementation)
    forward = TargetForward(tmp_path, settings, (0, 1, 2), CPU)
    assert forward.layout == ("rows" if reason else "packed") and reason in forward.not_packed_because
    lengths_N = np.array([40, 600, 3])
    tokens_T = torch.randint(0, VOCAB, (int(lengths_N.sum()),), generator=torch.Generator().manual_seed(0))
    out_TF = torch.empty(len(tokens_T), forward.features)
    forward.capture(tokens_T, lengths_N, out_TF)
    for part, ids in zip(out_TF.split(lengths_N.tolist()), tokens_T.split(lengths_N.tolist()), strict=True):
        with torch.no_grad():
            states = whole(input_ids=ids[None], output_hidden_states=True).hidden_states
        for tap, state in enumerate(part.split(32, dim=1)):
            assert (state - states[tap + 1][0]).norm() <= 1e-4 * states[tap + 1][0].norm(), tap


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"max_position_embeddings": 256, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0,
                                                                      "rope_theta": 1e4}}),
        ("Phi3", {"original_max_position_embeddings": 256, "pad_token_id": 0,
                  "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}),
    ],
)  # fmt: skip
def test_documents_that_would_change_the_positions_of_others_are_refused(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = getattr(transformers, f"{kind}Config")(**(COMMON | changes))
    config.save_pretrained(tmp_path)
    settings = TargetConfig(model=str(tmp_path), dtype="float32")
    forward = TargetForward(tmp_path, settings, (0, 1), CPU, random_weights=True)

    def states(*lengths: int) -> torch.Tensor:
        tokens_T = torch.arange(sum(lengths)) % 100
        out_TF = torch.empty(len(tokens_T), forward.features)
        forward.capture(tokens_T, np.array(lengths), out_TF)
        return out_TF

    torch.testing.assert_close(states(40, 256)[:40], states(40))
    with pytest.raises(UserError, match=r"a document has 257 tokens, .* those past 256 change .*data.max_length=256"):
        states(40, 257)


def test_attention_that_looks_ahead_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its config, and where that does not say so by the trial."""
    settings = TargetConfig(model=str(tmp_path), dtype="float32")
    config = target_config("gemma3")
    config.use_bidirectional_attention = True
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="with use_bidirectional_attention: it is no decoder"):
        TargetForward(tmp_path, settings, (0, 1), CPU, random_weights=True)
    monkeypatch.setattr("dflash_dist.target.load.check_causal", lambda *_: None)
    with pytest.raises(UserError, match=r"states of a Gemma3TextModel are .* away where a document is padded"):
        TargetForward(tmp_path, settings, (0, 1), CPU, random_weights=True)


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        (lambda q, k, v, scale, window: RIGHT(q, k, v, scale, 5), "away from those of padded rows"),
        (lambda q, k, v, scale, window: _over_all(q, k, v, scale), "with the documents beside it"),
        (lambda q, k, v, scale, window: q * torch.nan, "change by nan"),
        (lambda q, k, v, scale, window: q[:, :1], "RuntimeError: "),
    ],
    ids=["window", "leak", "nan", "shape"],
)
def test_an_attention_that_does_otherwise_is_not_used(
    defect: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_target("qwen3", tmp_path)
    monkeypatch.setattr(attention, "packed_attention", defect)
    forward = TargetForward(folder, TargetConfig(model=str(folder), dtype="float32"), tuple(TAPS), CPU)
    assert forward.layout == "rows" and reason in forward.not_packed_because


def _over_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    rows = [x.transpose(0, 1)[None] for x in (query, key, value)]
    out = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("kind", ["qwen3", "hybrid"])
def test_another_mix_of_lengths_compiles_nothing(kind: str, tmp_path: Path) -> None:
    """One graph for each kind of layer, whole, as the GPU compiles it."""
    from torch._dynamo.utils import counters

    folder = make_target(kind, tmp_path)
    forward = TargetForward(folder, TargetConfig(model=str(folder), dtype="float32"), tuple(TAPS), CPU, layout="packed")
    torch._dynamo.reset()
    counters.clear()
    forward.compile_layers(backend="aot_eager")
    assert counters["stats"]["unique_graphs"] == (2 if kind == "hybrid" else 1) and not counters["graph_break"]
    for lengths in ([100, 20], [64, 64, 1], [5], [200], [3, 1, 1]):
        lengths_N = np.array(lengths)
        forward.capture(torch.arange(lengths_N.sum()), lengths_N, torch.empty(int(lengths_N.sum()), forward.features))
    assert counters["stats"]["unique_graphs"] == (2 if kind == "hybrid" else 1)


def test_compiled_layers_that_do_otherwise_are_refused(tmp_path: Path) -> None:
    folder = make_target("qwen3", tmp_path)
    forward = TargetForward(folder, TargetConfig(model=str(folder), dtype="float32"), tuple(TAPS), CPU)

    def wrong(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return lambda *args: [out * 1.1 for out in graph.forward(*args)]

    torch._dynamo.reset()
    with pytest.raises(UserError, match=r"compiled layers .* set target.compile=false"):
        forward.compile_layers(backend=wrong)


def test_the_ops_tell_the_compiler_the_truth(tmp_path: Path) -> None:
    """Shapes, dtypes and strides."""
    make_target("hybrid", tmp_path)
    forward = TargetForward(tmp_path, TargetConfig(model=str(tmp_path), dtype="float32"), tuple(TAPS), CPU)
    tests = ("test_schema", "test_faketensor")
    lengths_N = np.array([5, 7, 70])
    tokens = int(lengths_N.sum())
    with packed.running(forward._model, packed.Pack.of(lengths_N, CPU)):
        query, key, value = (torch.randn(tokens, heads, 16) for heads in (4, 2, 2))
        for window in (0, 20):
            torch.library.opcheck(attention.packed_attention, (query, key, value, 0.25, window), test_utils=tests)
        query, key, value = (torch.randn(1, tokens, heads, 16) for heads in (2, 2, 4))
        gates = -torch.rand(1, tokens, 4), torch.rand(1, tokens, 4)
        torch.library.opcheck(mixers.packed_delta_rule, (query, key, value, *gates), test_utils=tests)
        for normalise in (False, True):
            torch.library.opcheck(mixers.heads_apart, (value[:, :, ::2], normalise), test_utils=tests)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_rows_are_documents_of_one_row_to_the_delta_rule(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU is given them, whose kernels are then those of a pack, for any number of rows."""
    folder = make_target(kind, tmp_path)
    forward = TargetForward(folder, TargetConfig(model=str(folder), dtype="float32"), tuple(TAPS), CPU, layout="rows")
    rule, shapes = mixers._theirs[mixers.DELTA_RULE], []

    def spy(query: torch.Tensor, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        shapes.append(query.shape[:2])
        return rule(query, *inputs, **named)

    monkeypatch.setitem(mixers._theirs, mixers.DELTA_RULE, spy)
    lengths_N = np.array([90, 85, 3])  # rows of two lengths
    tokens_T = torch.arange(178)
    states_TF = []
    for by_fla in (False, True):
        monkeypatch.setattr(forward, "_by_fla", by_fla)
        shapes.clear()
        states_TF.append(torch.empty(178, forward.features))
        forward.capture(tokens_T, lengths_N, states_TF[-1])
        assert set(shapes) == ({(1, 90), (1, 3)} if by_fla else {(2, 90), (1, 3)})
    torch.testing.assert_close(*states_TF, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_delta_rule_is_tuned_on_what_it_will_be_given(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuned kernels are kept by heads, sizes and dtypes."""
    folder = make_target(kind, tmp_path)
    forward = TargetForward(
        folder, TargetConfig(model=str(folder), dtype="bfloat16"), tuple(TAPS), CPU, layout="packed"
    )
    rule, seen = mixers.packed_delta_rule, []

    def spy(*inputs: torch.Tensor) -> torch.Tensor:
        seen.append([(x.dtype, x.shape[2:], x.is_contiguous()) for x in inputs])
        return rule(*inputs)

    monkeypatch.setattr(mixers, "packed_delta_rule", spy)
    mixers.tune_delta_rule(forward._model, np.array([3, 80]), CPU)
    tuned = seen.copy()
    seen.clear()
    forward.capture(torch.arange(9), np.array([4, 5]), torch.empty(9, forward.features, dtype=torch.bfloat16))
    assert len(tuned) == 1 and seen and all(x == tuned[0] for x in tuned + seen)


def test_a_warm_up_that_memory_does_not_hold_is_shortened(tmp_path: Path) -> None:
    folder = make_target("llama", tmp_path)
    forward = TargetForward(folder, TargetConfig(model=str(folder), dtype="float32"), tuple(TAPS), CPU)
    tried: list[int] = []

    def run(lengths_N: np.ndarray, holds: int) -> None:
        tried.append(int(lengths_N.sum()))
        if tried[-1] > holds:
            raise torch.OutOfMemoryError

    forward._halving(lambda lengths_N: run(lengths_N, holds=2500))
    assert tried[0] == 4 * 1024 and tried[-1] <= 2500 < tried[-2]  # the target's positions end at 1,024
    with pytest.raises(torch.OutOfMemoryError):
        forward._halving(lambda lengths_N: run(lengths_N, holds=0))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "hybrid", "gemma2", "gemma3"])
def test_the_last_state_and_the_ends_give_the_targets_own_logits(kind: str, tmp_path: Path) -> None:
    """Final norms with gain w and 1 + w, tied and own heads, scaled embeddings, soft-capped logits."""
    folder = make_target(kind, tmp_path)
    implementation = "eager" if kind == "gemma2" else "sdpa"
    settings = TargetConfig(model=str(folder), dtype="float32", attention=implementation)
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


def test_only_the_tapped_layers_are_loaded(tmp_path: Path) -> None:
    """No head, no later layer."""
    whole = AutoModelForCausalLM.from_pretrained(make_target("hybrid", tmp_path), dtype=torch.float32)
    decoder = load_taps(tmp_path, TargetConfig(model=str(tmp_path), dtype="float32"), 3, CPU)
    loaded, expected = dict(decoder.named_parameters()), dict(whole.model.named_parameters())
    kept = [name for name in expected if not name.startswith("layers.") or int(name.split(".")[1]) < 3]
    assert list(loaded) == kept and all(torch.equal(loaded[name], expected[name]) for name in kept)


def test_random_weights_need_a_config_alone(tmp_path: Path) -> None:
    target_config("qwen3").save_pretrained(tmp_path)
    settings = TargetConfig(model=str(tmp_path), dtype="float32")
    forward = TargetForward(tmp_path, settings, tuple(TAPS), CPU, random_weights=True)
    out_TF = torch.empty(5, forward.features)
    forward.capture(torch.arange(5), np.array([2, 3]), out_TF)
    assert len(forward._layers) == TAPS[-1] + 1 and out_TF.std() > 0
