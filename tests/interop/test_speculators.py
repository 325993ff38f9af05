"""The speculators package loads our second format, and its training step has our loss.

Shape suffixes: A blocks, B block size, T tokens of the pack, F features, H hidden size, V vocabulary rows,
Q = A * B queries, S = T + Q keys.
"""

import importlib.util
import sys
from unittest import mock

import pytest
import torch

from dflash_dist.drafter.loss import SUMS, Objective, block_sums
from dflash_dist.drafter.mask import BlockLayout, LayerKind, visibility
from dflash_dist.export.plain import load_drafter
from dflash_dist.export.speculators import export_speculators
from tests.interop.answers import BLOCK_SIZE, DOCUMENTS_T, GAMMA, LENGTHS, POSITIONS_T, answer_blocks, answer_pack
from tests.random_models import drafter_config, ends_of, llama_config, random_drafter, random_target

# Its loader of training data imports the client of a server, which nothing here talks to.
absent = () if importlib.util.find_spec("openai") else ("openai", "openai.types.chat", "openai.types.completion")
sys.modules.update({name: mock.MagicMock() for name in absent})
core = pytest.importorskip(
    "speculators.models.dflash.core",
    reason="install the speculators package without its requirements: make setup",
)
from speculators import SpeculatorModelConfig  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402

for name in absent:
    del sys.modules[name]

WIDE, NARROW = 64, 9
"""Sliding windows: longer than any document with its block, and shorter than most."""
LAYOUTS = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": WIDE},
    "sliding bidirectional": {
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": WIDE,
        "is_causal": False,
    },
    "mixed bidirectional": {
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": WIDE,
        "is_causal": False,
    },
}


@pytest.fixture(scope="module")
def target():
    """A target whose final norm has gains other than 1."""
    target = random_target(llama_config())
    target.model.norm.weight.copy_(torch.empty(64).uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(4)))
    return target


@pytest.fixture(scope="module")
def verifier(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    return str(folder)


class Batch:
    """A pack with random features and last states."""

    def __init__(self):
        pack = answer_pack()
        self.blocks = answer_blocks(pack).to("cpu")
        self.tokens_T, self.supervised_T = torch.from_numpy(pack.tokens_T), torch.from_numpy(pack.supervised_T)
        generator = torch.Generator().manual_seed(3)
        self.features_TF = torch.randn(sum(LENGTHS), 2 * 64, generator=generator)
        self.last_TH = torch.randn(sum(LENGTHS), 64, generator=generator)
        """Before the target's final norm."""

    def ours(self, drafter, target, objective):
        """Our sums by name: scalar tensors, the loss with its gradient."""
        inputs = (self.features_TF, POSITIONS_T, self.blocks)
        last_TH = target.model.norm(self.last_TH)
        sums = block_sums(drafter, ends_of(target), *inputs, chunk=5, objective=objective, last_TH=last_TH)
        return dict(zip(SUMS, sums.unbind(), strict=True))

    def theirs(self, model, monkeypatch, loss, weights):
        """The loss that speculators computes at our anchors, padding blocks included."""
        anchors = (self.blocks.anchors_A, self.blocks.keep_A)
        monkeypatch.setattr(core, "select_anchors", lambda loss_mask, count, block_size: anchors)
        batch = {
            "hidden_states": self.features_TF,
            "input_ids": self.tokens_T,
            "loss_mask": self.supervised_T,
            "verifier_last_hidden_states": self.last_TH,
            "document_ids": DOCUMENTS_T,
            "position_ids": POSITIONS_T,
        }
        return model(
            **{name: tensor[None] for name, tensor in batch.items()},
            loss_config=resolve_loss_config(loss, "eager"),
            gamma=GAMMA,
            max_anchors=len(self.blocks.anchors_A),
            per_position_loss_weight=weights,
            dpace_alpha=0.5,
        )[1]


@pytest.fixture
def load_both(verifier, tmp_path):
    """Exports a random drafter and loads it: (ours, speculators' with the target's embedding, head and norm)."""

    def load(**changes):
        config = drafter_config(llama_config(), block_size=BLOCK_SIZE, **changes)
        folder = tmp_path / "drafter"
        export_speculators(random_drafter(config), folder, verifier, ["LlamaForCausalLM"])
        their_config = SpeculatorModelConfig.from_pretrained(folder)
        their_config.transformer_layer_config._attn_implementation = "sdpa"
        model, report = core.DFlashDraftModel.from_pretrained(
            folder, config=their_config, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert model.target_layer_ids == [1, 3]  # the outputs of layers 0 and 2
        model.load_verifier_weights()
        return load_drafter(folder), model

    return load


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_agree_for_argmax_with_dpace(layout, load_both, target, monkeypatch):
    drafter, model = load_both(**LAYOUTS[layout])
    batch = Batch()
    sums = batch.ours(drafter, target, Objective("argmax", "dpace"))
    loss = sums["loss"] / sums["valid"]
    loss.backward()
    expected = batch.theirs(model, monkeypatch, "ce", "dpace")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == dict(drafter.named_parameters()).keys()
    for name, parameter in drafter.named_parameters():
        assert gradients[name].norm() > 0, name
        assert (parameter.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm(), name


@pytest.mark.parametrize(("kind", "loss"), [("argmax", "ce"), ("kl", "kl_div")])
def test_with_decay_only_the_denominator_differs(kind, loss, load_both, target, monkeypatch):
    """The specification (2.4) divides by the sum of the weights; speculators by the count of supervised offsets."""
    drafter, model = load_both()
    batch = Batch()
    with torch.no_grad():
        sums = batch.ours(drafter, target, Objective(kind, "decay"))
        expected = batch.theirs(model, monkeypatch, loss, "fixed-exp-decay")
    assert float(sums["loss"] / sums["valid"]) == pytest.approx(float(expected), rel=1e-5)
    # With gamma 3 and blocks of 8 the weights of a whole block sum to 3.2, against 7 offsets.
    assert 0.4 < sums["weight"] / sums["valid"] < 0.7


def test_a_sliding_window_is_bounded_as_the_engines_do_only_with_us(load_both, target, monkeypatch):
    """The specification (2.3) bounds the context by a + j - (W - 1), as served; speculators by a - W at any offset."""
    batch = Batch()
    anchors_A, keep_A = batch.blocks.anchors_A, batch.blocks.keep_A
    layout = BlockLayout(BLOCK_SIZE, anchors_A, keep_A, anchors_A - POSITIONS_T[anchors_A], sum(LENGTHS))
    rule = visibility(LayerKind(causal=True, window=NARROW), layout)
    their_rule, queries, keys = core.create_anchor_block_mask_mod(
        DOCUMENTS_T, sum(LENGTHS), anchors_A, BLOCK_SIZE, sliding_window=NARROW
    )
    zero, query_Q1, key_1S = torch.tensor(0), torch.arange(queries)[:, None], torch.arange(keys)[None]
    ours_QS, theirs_QS = (mask(zero, zero, query_Q1, key_1S) for mask in (rule, their_rule))
    assert not (ours_QS & ~theirs_QS).any()
    extra_AB = (theirs_QS & ~ours_QS).sum(-1).view(-1, BLOCK_SIZE)[keep_A]
    # The anchor sees one token too many and offset j sees j + 1, where the document has them.
    position_A1 = POSITIONS_T[anchors_A[keep_A]][:, None]
    offsets_B = torch.arange(BLOCK_SIZE)
    first_AB = (position_A1 + offsets_B - (NARROW - 1)).clamp_min(0)
    their_first_A1 = (position_A1 - NARROW).clamp_min(0)
    assert torch.equal(extra_AB, torch.minimum(first_AB, position_A1) - their_first_A1)

    drafter, model = load_both(layer_types=("sliding_attention",) * 2, sliding_window=NARROW)
    with torch.no_grad():
        sums = batch.ours(drafter, target, Objective("argmax", "dpace"))
        unequal = batch.theirs(model, monkeypatch, "ce", "dpace")
        monkeypatch.setattr(core, "create_anchor_block_mask_mod", lambda **arguments: (rule, queries, keys))
        equal = batch.theirs(model, monkeypatch, "ce", "dpace")
    loss = float(sums["loss"] / sums["valid"])
    assert loss == pytest.approx(float(equal), rel=1e-5)
    assert abs(float(unequal) / loss - 1) > 1e-3
