import json
import math

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from dflash_dist.cli import app
from dflash_dist.config import EvaluateConfig
from dflash_dist.errors import UserError
from dflash_dist.evaluate.acceptance import evaluate, stop_ids, summarise
from dflash_dist.evaluate.run import bundled_prompts, read_prompts
from dflash_dist.evaluate.speculate import Generation
from dflash_dist.evaluate.table import as_table
from dflash_dist.export.plain import export_plain
from tests.random_models import drafter_config, ends_of, hybrid_config, llama_config, random_drafter, random_target
from tests.tiny import TAPS, make_target, make_tokenizer, target_config


def test_stop_ids_are_those_of_the_generation_config():
    target = random_target(llama_config())
    for value, expected in ((None, set()), (7, {7}), ([7, 9], {7, 9})):
        target.generation_config.eos_token_id = value
        assert stop_ids(target) == expected


def test_the_tokenizer_says_what_ends_an_answer_where_the_generation_config_does_not(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer, target = AutoTokenizer.from_pretrained(tmp_path), random_target(llama_config())
    assert stop_ids(target, tokenizer) == {258}
    target.generation_config.eos_token_id = 7
    assert stop_ids(target, tokenizer) == {7}
    tokenizer.eos_token = target.generation_config.eos_token_id = None
    assert stop_ids(target, tokenizer) == set()


def test_a_prompt_past_the_embedding_table_is_refused(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer, target = AutoTokenizer.from_pretrained(tmp_path), random_target(llama_config())
    drafter = random_drafter(drafter_config(target.config))
    prompts = [[{"role": "user", "content": "tea"}]]
    with pytest.raises(UserError, match=r"gives token id 258 .* embedding table has 100 rows"):
        evaluate(prompts, tokenizer, target, drafter, ends_of(target), EvaluateConfig())


def test_the_summary_counts_by_hand():
    greedy = [Generation([1, 2, 3, 4, 5, 6], 6.0), Generation([1, 2, 3], 2.0), Generation([9], 0.0)]
    drafted = [Generation([1, 2, 3, 4, 5, 6], 1.0, [3, 2]), Generation([1, 2, 4], 1.0, [1, 1]), Generation([9], 0.0)]
    result = summarise(greedy, drafted, 4, greedy=True)
    assert result["tau_pooled"] == 7 / 4
    assert result["tau_macro"] == (2.5 + 1.0) / 2
    assert (result["prompts"], result["greedy_equal"], result["new_tokens"], result["cycles"]) == (3, 2, 10, 4)
    assert result["tokens_per_s"] == 7 / 2
    assert result["speedup"] == pytest.approx((8 / 7) / (2 / 7))
    assert result["histogram"] == [2, 1, 1, 0]
    assert result["acceptance_per_position"] == [2 / 4, 1 / 4, 0.0]
    assert result["acceptance_conditional"] == [2 / 4, 1 / 2, 0.0]
    assert result["tau_per_prompt"] == [2.5, 1.0, None]
    assert summarise(greedy, drafted, 4, greedy=False)["greedy_equal"] is None
    nothing = summarise([Generation([9])], [Generation([9])], 4, greedy=True)
    assert nothing["tau_pooled"] is None
    assert nothing["speedup"] is None


@pytest.mark.parametrize("make_config", [llama_config, hybrid_config], ids=["llama", "hybrid"])
def test_evaluate_measures_chats(tmp_path, make_config):
    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    target = random_target(make_config(vocab_size=288, eos_token_id=258))
    drafter = random_drafter(drafter_config(target.config, mask_token_id=270))
    prompts = [[{"role": "user", "content": text}] for text in ("tea", "rain and stone")]
    done = []
    result = evaluate(
        prompts,
        tokenizer,
        target,
        drafter,
        ends_of(target),
        EvaluateConfig(max_new_tokens=12),
        on_progress=lambda count, total: done.append((count, total)),
    )
    assert (result["prompts"], result["greedy_equal"]) == (2, 2)
    assert 1 <= result["tau_pooled"] <= 4
    assert 1 <= result["tau_macro"] <= 4
    assert result["tokens_per_s"] > 0
    assert result["speedup"] > 0
    assert 2 <= result["new_tokens"] <= 24
    assert len(result["acceptance_per_position"]) == 3
    assert done == [(1, 2), (2, 2)]
    long = [prompts[0], [{"role": "user", "content": "x" * 300}]]
    with pytest.raises(UserError, match=r"prompt 2 of 2 has \d+ tokens.*context holds 256"):
        evaluate(long, tokenizer, target, drafter, ends_of(target), EvaluateConfig())
    with pytest.raises(UserError, match="no prompt"):
        evaluate([], tokenizer, target, drafter, ends_of(target), EvaluateConfig())


def test_the_table_shows_what_was_counted():
    plain = [Generation([1, 2, 3, 4, 5, 6], 6.0), Generation([1, 2, 3], 2.0)]
    drafted = [Generation([1, 2, 3, 4, 5, 6], 1.0, [3, 2]), Generation([1, 2, 4], 1.0, [1, 1])]
    lines = as_table(summarise(plain, drafted, 4, greedy=True)).splitlines()
    assert lines[0].split()[:2] == ["tau", "1.75"]
    assert "1.00 to 2.50" in lines[1]
    assert lines[3].endswith("1 of 2 equal to plain greedy decoding")
    histogram = lines[lines.index("tokens of a cycle") + 1 :][:4]
    assert [(line.count("#"), line.split()[-1]) for line in histogram] == [(30, "2"), (15, "1"), (15, "1"), (0, "0")]
    assert [line.split()[1::2] for line in lines[-3:]] == [["50", "50"], ["25", "50"], ["0", "0"]]
    assert "not measured" in as_table(summarise([Generation([9])], [Generation([9])], 4, greedy=True))
    sampled = summarise([Generation([9])], drafted[:1], 4, greedy=False)
    assert "plain decoding gave no answer of two tokens" in as_table(sampled)


def test_prompts_are_read_from_jsonl_and_text(tmp_path):
    asked = {"role": "user", "content": "tea?"}
    jsonl, text = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    jsonl.write_text(json.dumps({"messages": [asked, {"role": "assistant", "content": "yes"}]}) + "\n\n")
    text.write_text("tea?\n\n{rain}\n")
    assert read_prompts(jsonl) == [[asked]]
    assert read_prompts(text) == [[asked], [{"role": "user", "content": "{rain}"}]]
    text.write_text("\n")
    with pytest.raises(UserError, match=r"prompts\.txt holds no chat; each line is a prompt"):
        read_prompts(text)


def test_the_bundled_prompts_are_chats_that_differ():
    prompts = read_prompts(bundled_prompts())
    assert len(prompts) >= 40
    assert len({json.dumps(chat) for chat in prompts}) == len(prompts)
    assert all(chat[-1]["role"] == "user" for chat in prompts)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("seed", -1)],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(UserError, match=f"^{name} is {value}, but must be"):
        EvaluateConfig(**{name: value})


def test_the_command_samples_with_bundled_prompts_where_none_are_given(tmp_path, monkeypatch):
    target, drafter = make_target("llama", tmp_path / "target"), tmp_path / "drafter"
    export_plain(random_drafter(drafter_config(target_config("llama"), target_layer_ids=tuple(TAPS))), drafter)
    (tmp_path / "two.txt").write_text("tea\nrain\n")
    monkeypatch.setattr("dflash_dist.commands.bundled_prompts", lambda: tmp_path / "two.txt")
    arguments = ["eval", "--drafter", str(drafter), "--target", str(target), "--device", "cpu", "--json"]
    arguments += ["--max-new-tokens", "8", "--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--seed", "3"]
    first, again = (CliRunner().invoke(app, arguments, catch_exceptions=False) for _ in range(2))
    figures, repeated = json.loads(first.stdout), json.loads(again.stdout)
    assert {"tau_pooled", "tau_macro", "prompts", "greedy_equal", "tokens_per_s", "speedup"} <= figures.keys()
    assert figures["greedy_equal"] is None
    assert len(figures["tau_per_prompt"]) == figures["prompts"] == 2
    assert figures["histogram"] == repeated["histogram"]
