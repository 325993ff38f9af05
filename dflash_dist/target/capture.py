"""The frozen target's forward, with the residual stream captured after each tapped layer.

Where the last hidden state is asked for, it is one more tap behind the others: after the target's own final norm.

Shape suffixes: R rows, L padded length, G real tokens of a row group, T tokens of the pack, N documents of the pack, H
hidden size, F captured features, W values of a row of the wire format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dflash_dist.config import TargetConfig
from dflash_dist.target.load import load_taps
from dflash_dist.target.packing import RowGroup, row_groups
from dflash_dist.wire import WireFormat


class TargetForward:
    """Runs documents through the frozen target and writes their captured states, packed, in the format of `wire`."""

    def __init__(
        self,
        folder: Path | str,
        settings: TargetConfig,
        layer_ids: tuple[int, ...],
        device: torch.device,
        last_state: bool = False,
        wire: Literal["full", "fp8"] = "full",
    ) -> None:
        self._model = load_taps(folder, settings, None if last_state else layer_ids[-1] + 1, device)
        self._device = device
        self._layers = self._model.layers
        self._layer_ids = layer_ids
        self._last_state = last_state
        hidden_size = self._model.config.get_text_config().hidden_size
        self.dtype: torch.dtype = next(self._model.parameters()).dtype
        self.wire = WireFormat(wire, len(layer_ids) + last_state, hidden_size, self.dtype)

    @property
    def features(self) -> int:
        """F: values captured for each token."""
        return self.wire.features

    @torch.inference_mode()
    def capture(self, tokens_T: Tensor, lengths_N: np.ndarray, out_TW: Tensor) -> None:
        """Fills `out_TW` [T, W] with the states of the packed documents, in rows of `wire`.

        Where `wire` is full, W = F and tap k takes columns k*H to (k+1)*H. `tokens_T`: int64 ids on the host. A
        document's states do not depend on its neighbours in the pack.
        """
        for group in row_groups(lengths_N):
            self._run_group(tokens_T, group, out_TW)

    def _run_group(self, tokens_T: Tensor, group: RowGroup, out_TW: Tensor) -> None:
        ids_RL = torch.zeros(group.shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        source_G, destination_G = torch.from_numpy(group.source), torch.from_numpy(group.destination)
        ids_RL.view(-1)[source_G] = tokens_T[destination_G]
        states = self._states(self._to_device(ids_RL))
        self.wire.pack(states, self._to_device(source_G), self._to_device(destination_G), out_TW)

    def _states(self, ids_RL: Tensor) -> list[Tensor]:
        """The captured states [R, L, H] of all rows: references, as no layer writes into what another gave."""
        states_RLH: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            states_RLH.append(output[0] if isinstance(output, tuple) else output)

        handles = [self._layers[layer].register_forward_hook(keep) for layer in self._layer_ids]
        try:
            output = self._model(input_ids=ids_RL, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return [*states_RLH, output.last_hidden_state] if self._last_state else states_RLH

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
