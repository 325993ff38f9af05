"""Everything that a run reads, resolved and checked before any rank starts; each rank resolves the same again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_dist.config import Config
from dflash_dist.data.chat import check_vocabulary
from dflash_dist.data.prepare import PrepareReport, prepare_with_report
from dflash_dist.data.schedule import Schedule
from dflash_dist.data.store import TokenStore
from dflash_dist.drafter.config import DrafterConfig, resolve
from dflash_dist.errors import UserError
from dflash_dist.export.plain import read_config
from dflash_dist.target.load import load_tokenizer, text_config
from dflash_dist.target.package import target_folder
from dflash_dist.topology import Topology, check_batches_per_step


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


def resolve_inputs(config: Config, topology: Topology) -> Inputs:
    """The run's inputs, prepared where they are not yet; UserError where the run cannot work."""
    check_batches_per_step(topology, config.schedule.batches_per_step)
    folder = target_folder(config.target.model, Path(config.cache_dir))
    target_config, drafter = resolve_drafter(config, folder)
    store_folder, report = prepare_with_report(config, Path(folder))
    store = TokenStore.open(store_folder)
    check_vocabulary(store.largest_token(), target_config.vocab_size, folder)
    schedule = Schedule(store, config, topology)
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
