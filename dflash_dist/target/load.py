"""Loading the frozen target: its layers up to the last tap, or its two ends alone, or all of it.

Shape suffixes: B blocks or rows, H hidden size, V vocabulary rows.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_dist.config import TargetConfig
from dflash_dist.errors import UserError
from dflash_dist.installed import version_of
from dflash_dist.target.weights import check_weights


class TargetEnds(nn.Module):
    """The target's frozen input embedding and output head, as the drafter uses them."""

    def __init__(self, embedding: nn.Module, head_weight: Tensor, softcap: float | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.head_weight = nn.Parameter(head_weight, requires_grad=False)
        """[V, H]"""
        self.softcap = softcap
        self.requires_grad_(False)

    def embed(self, ids: Tensor) -> Tensor:
        """[..., H] embeddings of int64 ids [...], scaled as the target scales them (Gemma)."""
        return self.embedding(ids)

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """[B, V] logits of the drafter's normed output, soft-capped where the target does so."""
        logits_BV = nn.functional.linear(hidden_BH, self.head_weight.to(hidden_BH.dtype))
        return logits_BV if self.softcap is None else torch.tanh(logits_BV / self.softcap) * self.softcap


def full_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The target's transformers configuration, of a vision wrapper where it is one; UserError if there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers checks some keys and stumbles over others
        if unknown := re.search(r"model type `(.+?)` but Transformers does not recognize", str(error)):
            raise UserError(
                f"target {folder} is of model type {unknown.group(1)}, which transformers "
                f"{version_of('transformers')} does not know; pip install --upgrade 'transformers<6', or take another"
            ) from None
        mend = "get the target's files again, or mend it"
        if "trust_remote_code" in str(error) and not trust_remote_code:
            mend = "read that code, and set target.trust_remote_code=true"
        raise UserError(f"target {folder} has no usable config.json: {_one_line(error)}; {mend}") from None


def text_config(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The configuration of the target's language model; UserError if it is none that a drafter can be made for."""
    config = _supported_config(folder, trust_remote_code).get_text_config()
    asked = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
    missing = [key for key in asked if getattr(config, key, None) is None]
    if missing:
        lacks = f"a {type(config).__name__} without {', '.join(missing)}"
        raise UserError(f"target {folder} is {lacks}: not a language model that a drafter can be made for")
    return config


def _supported_config(folder: Path | str, trust_remote_code: bool) -> Any:
    """`full_config`; UserError where a layer takes more than the state of the one before it (Gemma 3n, some Gemma 4).

    Such a target can neither be cut behind a layer nor be given its embeddings from one table.
    """
    config = full_config(folder, trust_remote_code)
    if config.is_encoder_decoder:
        raise UserError(f"target {folder} is a {config.model_type}, an encoder with a decoder, which is not supported")
    text = config.get_text_config()
    check_causal(text, folder)
    layered = {
        "num_kv_shared_layers": "layers that share keys and values",
        "hidden_size_per_layer_input": "embeddings for each layer",
    }
    for key, what in layered.items():
        if getattr(text, key, None):
            raise UserError(
                f"target {folder} is a {text.model_type} with {what} ({key}={getattr(text, key)}), which is not "
                "supported; take a target without them"
            )
    return config


def check_causal(config: Any, folder: Path | str) -> None:
    """UserError where the language model's config says that a token sees later ones."""
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(
            f"target {folder} is a {config.model_type} with use_bidirectional_attention: it is no decoder that a "
            "drafter could be made for"
        )


def check_longest(config: Any, longest: int) -> None:
    """UserError where a document of `longest` tokens would change the states of shorter ones beside it.

    RoPE of some types takes its frequencies from the longest sequence of a forward. `config`: of the language model.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in parameters.values() if isinstance(kind, dict)] or [parameters]  # by type of layer, or one
    for kind in kinds:
        name = kind.get("rope_type") or "default"
        limit = kind.get("original_max_position_embeddings") or config.max_position_embeddings
        if (name == "longrope" or "dynamic" in name) and longest > limit:
            raise UserError(
                f"a document has {longest} tokens, but with the target's RoPE of type {name} those past {limit} change "
                f"the states of the documents beside them; set data.max_length={limit}"
            )


def load_tokenizer(folder: Path | str, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer; UserError if it has none or no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        raise UserError(f"target {folder} has no usable tokenizer: {_one_line(error)}") from None
    if not tokenizer.chat_template:
        raise UserError(f"the tokenizer of {folder} has no chat template; add chat_template.jinja to the folder")
    return tokenizer


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type named in the config; `auto` is bfloat16 on CUDA and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_taps(
    folder: Path | str,
    settings: TargetConfig,
    layers: int | None,
    device: torch.device,
    random_weights: bool = False,
) -> Any:
    """The frozen decoder with its first `layers` layers alone, or all of them (None): no later layer, no head.

    `random_weights`: drawn on the device; of the folder only config.json is read.
    """
    config = _supported_config(folder, settings.trust_remote_code)
    if layers is not None:
        config = truncated_config(config, layers)
    if random_weights:
        decoder = _random_decoder(config, settings, device)
    else:
        decoder = _load(folder, settings, config, device, head=False).get_decoder()
    _check_layers(decoder, folder)
    return decoder


def _check_layers(decoder: Any, folder: Path | str) -> None:
    if not hasattr(decoder, "layers"):
        raise UserError(
            f"target {folder} is a {type(decoder).__name__}, whose layers cannot be tapped: it has no `layers`"
        )


def _random_decoder(config: Any, settings: TargetConfig, device: torch.device) -> Any:
    from transformers import AutoModel

    with torch.device(device):
        model = AutoModel.from_config(
            config.get_text_config(),
            dtype=torch_dtype(settings.dtype, device),
            attn_implementation=settings.attention,
            trust_remote_code=settings.trust_remote_code,
        )
    return model.get_decoder().eval().requires_grad_(False)


def load_ends(folder: Path | str, settings: TargetConfig, device: torch.device) -> TargetEnds:
    """The embedding and the head. Read through a model of one layer: ties and key prefixes are transformers' care."""
    config = truncated_config(_supported_config(folder, settings.trust_remote_code), 1)
    return ends_of(_load(folder, settings, config, device), folder)


@torch.no_grad()
def ends_of(model: Any, folder: Path | str) -> TargetEnds:
    """The ends of a loaded target; UserError where it does more to its embeddings or logits than we know.

    Such as Granite's multipliers: a drafter trained without them would fit another model. So both ends are compared
    with what the target itself computes for a few tokens.
    """
    decoder = model.get_decoder()
    _check_layers(decoder, folder)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    ends = TargetEnds(model.get_input_embeddings(), model.get_output_embeddings().weight.detach(), softcap)
    seen: dict[str, Tensor] = {}
    hooks = [
        decoder.layers[0].register_forward_pre_hook(
            lambda layer, inputs, named: seen.update(embedded=inputs[0] if inputs else named["hidden_states"]),
            with_kwargs=True,
        ),
        decoder.register_forward_hook(lambda decoder, inputs, output: seen.update(last=output.last_hidden_state)),
    ]
    ids_1T = torch.arange(min(8, ends.head_weight.shape[0]), device=ends.head_weight.device)[None]
    try:
        logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    pairs = {"embedding": (ends.embed(ids_1T), seen["embedded"]), "head": (ends.logits(seen["last"][0]), logits_TV)}
    for end, (ours, theirs) in pairs.items():
        if not (ours.float() - theirs.float()).norm() <= 0.01 * theirs.float().norm():
            raise UserError(
                f"target {folder}: a {type(model).__name__} does more in its {end} than the table, a final soft-cap or "
                "Gemma's scale, and a drafter would not fit it; it is not supported"
            )
    return ends


def load_full(folder: Path | str, settings: TargetConfig, device: torch.device) -> Any:
    """The whole frozen target, for decoding with it."""
    return _load(folder, settings, full_config(folder, settings.trust_remote_code), device)


def weightless(config: Any, layers: int, trust_remote_code: bool, **named: Any) -> tuple[Any, Any]:
    """The model of a language model's config cut to so many layers, on no device, and its config.

    UserError where none can be made, as numbers of the config do not fit each other.
    """
    from transformers import AutoModel

    cut = truncated_config(type(config)(**config.to_dict()), layers)
    try:
        with torch.device("meta"):
            return AutoModel.from_config(cut, trust_remote_code=trust_remote_code, **named), cut
    except ImportError:
        raise
    except Exception as error:  # of any module
        raise UserError(
            f"no {config.model_type} can be made of the target's config.json ({type(error).__name__}: "
            f"{_one_line(error)}); mend it, or get it again"
        ) from error


def truncated_config(config: Any, layers: int) -> Any:
    """`config`, changed in place to a model of the first `layers` layers; lists with one entry a layer are cut too."""
    text = config.get_text_config()
    total = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(text, name, type(value)(value[:layers]))
    text.num_hidden_layers = layers
    return config


def _load(folder: Path | str, settings: TargetConfig, config: Any, device: torch.device, head: bool = True) -> Any:
    """The model with the weights in `folder`, read straight to the device; without its head where not asked for."""
    try:
        with _quiet_transformers():
            model_class, config = _model_class(config, settings, head)
            model, loading = model_class.from_pretrained(
                folder,
                config=config,
                dtype=torch_dtype(settings.dtype, device),
                device_map={"": device} if device.type == "cuda" else None,
                attn_implementation=settings.attention,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are listed, and refused below
                output_loading_info=True,
            )
    except Exception as error:  # of files, of memory, and of any module whose numbers in the config do not fit
        if not isinstance(error, UserError):
            check_attention(folder, settings)
            check_weights(Path(folder))  # which tells the file
        raise UserError(f"target {folder} cannot be loaded: {_one_line(error)}") from None
    if loading["missing_keys"] or loading["mismatched_keys"]:
        wrong = sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]]))
        raise UserError(f"target {folder} lacks {len(wrong)} weights of its config or has them misshapen: {wrong[:3]}")
    return model.eval().requires_grad_(False)


def check_attention(folder: Path | str, settings: TargetConfig) -> None:
    """UserError where the target's code does not know `target.attention`, or what that needs is not installed."""
    config = text_config(folder, settings.trust_remote_code)
    try:
        weightless(config, 1, settings.trust_remote_code, attn_implementation=settings.attention)
    except (UserError, ImportError) as error:
        told = error if error.__cause__ is None else error.__cause__
        if re.search("attn_implementation|attention implementation|flash_?attention", str(told), re.IGNORECASE):
            others = [name for name in ("sdpa", "eager") if name != settings.attention]
            raise UserError(
                f"target {folder} does not support target.attention={settings.attention} ({_one_line(told)[:150]}); "
                f"set target.attention={' or '.join(others)}"
            ) from None


def _model_class(config: Any, settings: TargetConfig, head: bool) -> tuple[Any, Any]:
    """The class of the causal language model that `config` describes, or one like it whose head holds no weights.

    And the configuration that it takes: of a vision wrapper its text part, where transformers has a class for that;
    else the class is the wrapper's, which knows the names of all weights, and all of it that is not text is left out.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    kind = type(config)
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=settings.trust_remote_code)
    whole = type(model)
    if sees and (asked := _asked_beside_text(whole)):
        raise UserError(f"a {whole.__name__} takes no text without {' and '.join(asked)}")
    if head and model.config.get_text_config() is model.config:
        return whole, model.config

    def of_text_alone(self: Any, config: Any) -> None:
        whole.__init__(self, config)
        _leave_out(self, {self.get_decoder()} | ({self.get_output_embeddings()} if head else set()))

    members = {"__init__": of_text_alone, "__module__": whole.__module__}
    ties = {} if head else {"_tied_weights_keys": None}
    return type(whole.__name__, (whole,), members | ties), model.config


def _asked_beside_text(model_class: Any) -> list[str]:
    """The arguments that a forward cannot be without, but for the text."""
    _, *parameters = inspect.signature(model_class.forward).parameters.values()
    needed = [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD and x.default is x.empty]
    return [name for name in needed if name != "input_ids"]


class _LeftOut(nn.Module):
    """In the place of a part that text alone does not need."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self._name = type(part).__name__

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise UserError(f"the target runs its {self._name} for text alone, which is not supported")


def _leave_out(module: nn.Module, kept: set[nn.Module]) -> None:
    """Takes the weights from all parts of `module` that neither are nor hold one of the modules `kept`."""
    if module in kept:
        return
    for name, part in module.named_children():
        if kept.isdisjoint(part.modules()):
            setattr(module, name, _LeftOut(part))
        else:
            _leave_out(part, kept)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Layers past the last tap are left out on purpose: no warning about them, no bar a rank."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
