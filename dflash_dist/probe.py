"""`dflash-dist probe`: how fast this machine runs the target, in which shapes of batches, and within what memory.

Of it come the largest token budget and the costs by which the schedule compares batches, kept where `train` finds them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_dist.check import environment
from dflash_dist.check.host import cache_folders
from dflash_dist.config import Config
from dflash_dist.data.batching import pack
from dflash_dist.data.fingerprint import fingerprint_of, ingredients_of
from dflash_dist.data.schedule import shuffled
from dflash_dist.data.store import TokenStore
from dflash_dist.drafter.config import DrafterConfig, resolve
from dflash_dist.drafter.loss import Objective
from dflash_dist.errors import UserError
from dflash_dist.probe_fit import fit_costs, largest_budget, shapes_for
from dflash_dist.probe_process import Job, Loaded, Shape, TargetProcess, Timing
from dflash_dist.target.load import text_config, weightless
from dflash_dist.target.package import local_folder, target_folder
from dflash_dist.topology import check_devices, parse_topology
from dflash_dist.train.inputs import probe_file
from dflash_dist.train.memory import GIB, rank_memory
from dflash_dist.train.run_folder import write_text

LEAST_TOKENS, MOST_TOKENS = 2, 2**26
"""Of a batch: the most is far above what a GPU holds."""
PRODUCT_ROWS = 16_384
"""Tokens, at most, of the matrix product that gives the machine's own rate."""
STORED_DOCUMENTS = 20_000
"""Of a prepared store, as many as are packed to take one batch of them."""


def probe(config: Config, budgets: Sequence[int], device: str, random_weights: bool) -> dict[str, Any]:
    """The figures of the target at each token budget, ready for JSON; written to the file that `train` reads too.

    `random_weights`: of the target only config.json is read. UserError where the target cannot be loaded or nothing
    runs.
    """
    for tokens in budgets:
        if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
            raise UserError(
                f"--budget is {tokens:,}, but a batch to probe has {LEAST_TOKENS} to {MOST_TOKENS:,} tokens; give one "
                "in between"
            )
    device = check_devices(parse_topology("x1"), torch.cuda.device_count(), device)
    os.environ.update(cache_folders(config.cache_dir))
    folder = _target_files(config, random_weights)
    _make_folder(Path(config.cache_dir) / "probes")  # now, as it would be a pity after minutes of work
    target_config = text_config(folder, config.target.trust_remote_code)
    # Which token is the mask does not matter here: no tokenizer is read to find it.
    drafter = resolve(dataclasses.replace(config.drafter, mask_token_id=0), target_config, 0)
    longest = min(config.data.max_length, target_config.max_position_embeddings)
    shapes = [*dict.fromkeys([*shapes_for(budgets, longest), *_stored_mixes(config, folder, budgets)])]
    with TargetProcess(_job(config, folder, target_config, drafter, device, random_weights)) as process:
        figures = _machine_figures(process, config, target_config, drafter, max(budgets))
        loaded = process.load()
        answers = _run_all(process, shapes)
        timings = {shape: answer for shape, answer in answers.items() if isinstance(answer, Timing)}
        if not timings:
            least = min(shapes, key=lambda shape: shape.tokens)
            raise UserError(
                f"no batch of {config.target.model} ran on {loaded.gpu}, not even {least.name} ({least.tokens} "
                f"tokens): {answers[least]}; give a smaller --budget"
            )
        budget, why = largest_budget(process, loaded, timings, config.schedule, longest)
    costs, greatest_error = fit_costs([(shape.lengths, 1e6 * timing.seconds) for shape, timing in timings.items()])
    figures |= {
        "gpu": loaded.gpu,
        "dtype": loaded.dtype,
        "layout": loaded.layout,
        "not_packed_because": loaded.not_packed_because,
        "shapes": [_row(shape, answers[shape], figures) for shape in shapes],
        "largest_budget": budget,
        "largest_budget_note": why if budget is None else why + _beside(config, loaded, budget, target_config, drafter),
        "costs": costs,
        "costs_greatest_error": greatest_error,
        "versions": environment(None, [])["versions"],
    }
    file = probe_file(config, folder, drafter, loaded.gpu)
    write_text(file, json.dumps(figures, indent=1))
    return figures | {"file": str(file)}


def as_text(figures: Mapping[str, Any]) -> str:
    """The figures for people: the table of shapes, and what follows from it."""
    layout = "packed"
    if figures["layout"] == "rows":
        layout = f"as right-padded rows of like length, because {figures['not_packed_because']}"
    product = " x ".join(map(str, figures["matrix_product"]))
    lines = [
        f"{figures['target']} on {figures['gpu']} in {figures['dtype']}, documents {layout}: "
        f"{figures['active_parameters'] / 1e6:,.3f} M parameters in the {figures['layers']} layers that run",
        f"matrix products of {product}: {figures['matrix_tflops']:,.4g} TFLOP/s",
        "",
        f"{'shape':<20}  {'tokens':>10}  {'us/token':>9}  {'Ktok/s':>9}  {'TFLOP/s':>9}  {'MFU':>5}  {'peak GiB':>8}",
    ]
    for row in figures["shapes"]:
        line = f"{row['shape']:<20}  {row['tokens']:>10,}  "
        if row["error"] is None:
            line += f"{row['us_per_token']:>9.4g}  {row['ktok_s']:>9,.4g}  {row['tflops']:>9,.4g}  "
            line += f"{row['mfu']:>5.0%}  {row['peak_gib']:>8.2f}"
        lines.append(line + (row["error"] or ""))
    budget = figures["largest_budget"]
    costs = ", ".join(f"{name}={value:.4g}" for name, value in figures["costs"].items())
    return "\n".join(
        [
            *lines,
            "",
            "TFLOP/s counts two operations a token for each of these parameters (of experts, the active ones), none",
            "for embedding and attention; MFU is its share of the matrix products' rate",
            f"largest token budget: {f'{budget:,}; ' if budget else ''}{figures['largest_budget_note']}",
            f"costs of a batch: {costs}, which fit these times within {figures['costs_greatest_error']:.1%}",
            f"kept in {figures['file']}, where `train` finds the costs",
        ]
    )


def active_parameters(target_config: Any, layers: int, trust_remote_code: bool = False) -> int:
    """Parameters that a token meets in the target's first `layers` layers, without embedding, of experts the active."""
    model, config = weightless(target_config, layers, trust_remote_code)
    embedding = model.get_input_embeddings().weight
    return sum(
        parameter.numel() // len(parameter) * config.num_experts_per_tok if ".experts." in name else parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter is not embedding
    )


def _target_files(config: Config, random_weights: bool) -> Path:
    """The target's folder; for random weights of a hub target one that holds its config.json, and maybe no more."""
    model = config.target.model
    if not random_weights or model.startswith("package:") or local_folder(model):
        return target_folder(model, Path(config.cache_dir))
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except Exception as error:  # the hub client raises errors of many libraries: HTTP, validation, files
        raise UserError(
            f"target {model} is no local folder, and the hub did not give its config.json ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}); check target.model, the network and the access rights"
        ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror}; set cache_dir to another folder, or free some space"
        ) from None


def _job(
    config: Config, folder: Path, target_config: Any, drafter: DrafterConfig, device: str, random_weights: bool
) -> Job:
    return Job(
        folder=folder,
        settings=config.target,
        layer_ids=drafter.target_layer_ids,
        last_state=Objective.of(config.objective).needs_last_state,
        wire=config.schedule.wire,
        device=device,
        random_weights=random_weights,
        vocabulary=target_config.vocab_size,
    )


def _machine_figures(
    process: TargetProcess, config: Config, target_config: Any, drafter: DrafterConfig, budget: int
) -> dict[str, Any]:
    """What is known before the target is loaded: its size, and how fast matrix products of its MLP's shape are."""
    last_state = Objective.of(config.objective).needs_last_state
    layers = drafter.num_target_layers if last_state else drafter.target_layer_ids[-1] + 1
    parameters = active_parameters(target_config, layers, config.target.trust_remote_code)  # first: it may refuse
    mlp = getattr(target_config, "intermediate_size", None) or 3 * drafter.hidden_size  # it may have experts alone
    product_MKN = (min(budget, PRODUCT_ROWS), drafter.hidden_size, mlp)
    matrix_tflops = process.matrix_tflops(product_MKN)
    _say(f"matrix products: {matrix_tflops:,.4g} TFLOP/s; loading {config.target.model} ...")
    return {
        "target": config.target.model,
        "layers": layers,
        "active_parameters": parameters,
        "matrix_product": list(product_MKN),
        "matrix_tflops": matrix_tflops,
    }


def _run_all(process: TargetProcess, shapes: Iterable[Shape]) -> dict[Shape, Timing | str]:
    """Each shape's time and memory, or why it did not run; those that may break something come last."""
    answers = {}
    for shape in sorted(shapes, key=lambda shape: (shape.tokens, sum(length**2 for length in shape.lengths))):
        answers[shape] = answer = process.run(shape)
        shown = answer if isinstance(answer, str) else f"{1e6 * answer.seconds / shape.tokens:.4g} us a token"
        _say(f"{shape.name}, {shape.tokens:,} tokens: {shown}")
    return answers


def _stored_mixes(config: Config, folder: Path, budgets: Iterable[int]) -> list[Shape]:
    """A batch at each budget of the config's own documents; none where they are not prepared yet."""
    with contextlib.suppress(UserError):
        stored = Path(config.cache_dir) / "stores" / fingerprint_of(ingredients_of(config, folder))
        store = TokenStore.open(stored)
        documents = shuffled(np.flatnonzero(~store.held_out), config.train.seed, epoch=1)[:STORED_DOCUMENTS]
        mixes = []
        for budget in budgets:
            lengths = np.minimum(store.lengths[documents], budget)
            batch = lengths[pack(lengths, budget, config.schedule.max_documents)[0]]
            mixes.append(Shape(f"own mix of {len(batch)}", tuple(batch.tolist())))
        return mixes
    return []


def _row(shape: Shape, answer: Timing | str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """The shape's line of the table."""
    row: dict[str, Any] = {"shape": shape.name, "tokens": shape.tokens}
    if isinstance(answer, str):
        return row | dict.fromkeys(("us_per_token", "ktok_s", "tflops", "mfu", "peak_gib")) | {"error": answer}
    tokens_s = shape.tokens / answer.seconds
    tflops = 2 * figures["active_parameters"] * tokens_s / 1e12
    return row | {
        "us_per_token": 1e6 / tokens_s,
        "ktok_s": tokens_s / 1000,
        "tflops": tflops,
        "mfu": tflops / figures["matrix_tflops"],
        "peak_gib": answer.peak_bytes / GIB,
        "error": None,
    }


def _beside(config: Config, loaded: Loaded, budget: int, target_config: Any, drafter: DrafterConfig) -> str:
    """What else a rank may hold, depending on the topology, which the probe does not know."""
    slots, message_gib = config.schedule.ring_slots, budget * loaded.bytes_per_token / GIB
    shared = rank_memory(config, parse_topology("x1"), target_config, drafter, "cuda")["target+drafter"]
    drafter_gib = sum(size for part, size in shared.items() if part not in ("target layers", "features")) / GIB
    return (
        f"; schedule.ring_slots={slots} messages of {message_gib:.2f} GiB are counted, and each further drafter rank "
        f"of the node takes as many; with xN the drafter's own {drafter_gib:.1f} GiB and its activations come on top"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
