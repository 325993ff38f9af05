"""Everything that a run reads, resolved and checked before any rank starts; each rank resolves the same again."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_dist.config import Config
from dflash_dist.data.chat import check_vocabulary
from dflash_dist.data.prepare import PrepareReport, prepare_with_report
from dflash_dist.data.schedule import Schedule
from dflash_dist.data.store import TokenStore
from dflash_dist.drafter.config import DrafterConfig, resolve
from dflash_dist.drafter.loss import Objective
from dflash_dist.errors import UserError
from dflash_dist.export.plain import read_config
from dflash_dist.installed import version_of
from dflash_dist.target.load import check_longest, load_tokenizer, text_config
from dflash_dist.target.package import target_folder
from dflash_dist.target.weights import check_weights
from dflash_dist.topology import Topology, check_batches_per_step
from dflash_dist.typed import convert

COSTS = ("cost_fixed_us", "cost_token_us", "cost_token_squared_us")
"""Keys of `schedule`, and of the costs in a probe's file."""
Costs = dict[str, float | None]
"""The schedule's costs by key; None where one is neither given nor probed."""


@dataclass(frozen=True)
class Inputs:
    """The target, the data and the drafter's shape."""

    target_folder: Path | str
    target_config: Any
    store: TokenStore
    drafter: DrafterConfig
    schedule: Schedule
    store_folder: Path
    report: PrepareReport


def resolve_inputs(
    config: Config,
    topology: Topology,
    device: str = "auto",
    agreed: Callable[[Callable[[], Costs]], Costs] = lambda find: find(),
) -> Inputs:
    """The run's inputs, prepared where they are not yet; UserError where the run cannot work.

    `device`: cpu, cuda or auto, which ranks run on. `agreed` makes what one rank finds the costs of every rank: their
    GPUs and caches may differ, and their schedules must not.
    """
    check_batches_per_step(topology, config.schedule.batches_per_step)
    folder = target_folder(config.target.model, Path(config.cache_dir))
    target_config, drafter = resolve_drafter(config, folder)
    check_weights(Path(folder))  # before the data, which may take long
    store_folder, report = prepare_with_report(config, Path(folder))
    store = TokenStore.open(store_folder)
    check_vocabulary(store.largest_token(), target_config.vocab_size, folder)
    check_longest(target_config, int(store.lengths.max(initial=0)))
    costs: dict[str, Any] = agreed(lambda: schedule_costs(config, folder, drafter, device))
    costed = dataclasses.replace(config.schedule, **costs)
    schedule = Schedule(store, dataclasses.replace(config, schedule=costed), topology)
    if schedule.total_steps == 0:
        raise UserError(
            f"data.sources give {len(store.lengths)} documents, of which none is left for training; add data, or lower "
            f"data.held_out_share={config.data.held_out_share}"
        )
    return Inputs(folder, target_config, store, drafter, schedule, store_folder, report)


def resolve_drafter(config: Config, folder: Path | str) -> tuple[Any, DrafterConfig]:
    """The configurations of the target in `folder` and of the run's drafter; UserError where they do not fit."""
    target_config = text_config(folder, config.target.trust_remote_code)
    drafter = resolve(config.drafter, target_config, _tokenizer_end(config, folder))
    if config.train.init_from is not None:
        _check_init(Path(config.train.init_from), drafter)
    return target_config, drafter


def schedule_costs(config: Config, folder: Path | str, drafter: DrafterConfig, device: str) -> Costs:
    """The costs that the config gives, and those that it leaves open as they were probed on this machine's `device`.

    Rank 0 says which are used. UserError where the probe's file is damaged.
    """
    given: Costs = {name: getattr(config.schedule, name) for name in COSTS}
    gpu = torch.cuda.get_device_name(0) if device != "cpu" and torch.cuda.is_available() else "cpu"
    path = probe_file(config, folder, drafter, gpu)
    if all(value is not None for value in given.values()):
        costs, source = given, "given by the config"
    elif path.exists():
        costs = _probed(path) | {name: cost for name, cost in given.items() if cost is not None}
        source = f"as probed: {path}"
    else:
        costs, source = given, "not probed: batches are compared by their tokens; `dflash-dist probe` measures them"
    if os.environ.get("RANK") == "0":
        shown = ", ".join(f"{name}={value:.6g}" for name, value in costs.items() if value is not None)
        _say_once(f"costs of the schedule: {f'{shown}, ' if shown else ''}{source}")
    return costs


def probe_file(config: Config, folder: Path | str, drafter: DrafterConfig, gpu: str) -> Path:
    """Where `dflash-dist probe` keeps what it measured of the config's target on such a GPU; `cpu` where there is none.

    Another file for every architecture, set of taps and way to run it, whatever the weights; and for every version of
    the packages whose kernels run it.
    """
    settings = dataclasses.asdict(config.target) | {"model": None}
    packages = [version_of(name) for name in ("torch", "transformers", "flash-linear-attention")]
    runs = [settings, drafter.target_layer_ids, Objective.of(config.objective).needs_last_state, packages]
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes() + json.dumps(runs, sort_keys=True).encode())
    name = f"{digest.hexdigest()[:16]}_{re.sub('[^A-Za-z0-9]+', '-', gpu)}.json"
    return Path(config.cache_dir) / "probes" / name


def _probed(path: Path) -> Costs:
    """The costs in a probe's file."""
    try:
        costs = json.loads(path.read_text(encoding="utf-8"))["costs"]
        return {name: convert(float, costs[name], str(path), name) for name in COSTS}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"probe {path} cannot be read ({type(error).__name__}: {error}); remove it, or run `dflash-dist probe`"
        ) from None


@functools.cache
def _say_once(line: str) -> None:
    """Prints on stderr what every resolving of the same inputs would say again."""
    print(line, file=sys.stderr)


def _check_init(folder: Path, drafter: DrafterConfig) -> None:
    """UserError where the drafter in `folder` is not of the shape that the run is to train."""
    given, asked = dataclasses.asdict(DrafterConfig.from_json(read_config(folder))), dataclasses.asdict(drafter)
    free = ("max_position_embeddings", "initializer_range")
    other = [f"{key} {given[key]} instead of {asked[key]}" for key in asked if given[key] != asked[key]]
    other = [text for text in other if not text.startswith(free)]
    if other:
        raise UserError(
            f"train.init_from={folder} is another drafter than the config asks for: {'; '.join(other)}; change the "
            "drafter section or start from another folder"
        )


def _tokenizer_end(config: Config, folder: Path | str) -> int:
    """One past the tokenizer's largest id; read only where the mask token is to be found from it."""
    if config.drafter.mask_token_id is not None:
        return 0
    # Not its length: ids may have gaps.
    return int(max(load_tokenizer(folder, config.target.trust_remote_code).get_vocab().values())) + 1
