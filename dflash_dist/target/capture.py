"""The frozen target's forward, with the residual stream captured after each tapped layer.

Where the last hidden state is asked for, it is one more tap behind the others: after the target's own final norm.

Shape suffixes: R rows, L padded length, T tokens of the pack, H hidden size, F = K * H features of K taps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dflash_dist.config import TargetConfig
from dflash_dist.target.load import load_taps
from dflash_dist.target.packing import RowGroup, row_groups


class TargetForward:
    """Runs documents through the frozen target and writes their captured states, packed, into a buffer."""

    def __init__(
        self,
        folder: Path | str,
        settings: TargetConfig,
        layer_ids: tuple[int, ...],
        device: torch.device,
        last_state: bool = False,
    ) -> None:
        self._model = load_taps(folder, settings, None if last_state else layer_ids[-1] + 1, device)
        self._device = device
        self._layers = self._model.layers
        self._layer_ids = layer_ids
        self._last_state = last_state
        self.hidden_size: int = self._model.config.get_text_config().hidden_size
        self.dtype: torch.dtype = next(self._model.parameters()).dtype

    @property
    def features(self) -> int:
        """F: values captured for each token."""
        return self.hidden_size * (len(self._layer_ids) + self._last_state)

    @torch.inference_mode()
    def capture(self, tokens_T: Tensor, lengths_N: np.ndarray, out_TF: Tensor) -> None:
        """Fills `out_TF` [T, F] with the states of the packed documents; tap k takes columns k*H to (k+1)*H.

        `tokens_T`: int64 ids on the host. A document's states do not depend on its neighbours in the pack.
        """
        for group in row_groups(lengths_N):
            self._run_group(tokens_T, group, out_TF)

    def _run_group(self, tokens_T: Tensor, group: RowGroup, out_TF: Tensor) -> None:
        rows, width = group.shape
        ids_RL = torch.zeros(rows, width, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        destination = torch.from_numpy(group.destination)
        ids_RL.view(-1)[torch.from_numpy(group.source)] = tokens_T[destination]
        source = self._to_device(torch.from_numpy(group.source))
        destination = self._to_device(destination)
        hidden = self.hidden_size

        def keep(tap: int, output: Tensor | tuple[Tensor, ...]) -> None:
            state_RLH = output[0] if isinstance(output, tuple) else output
            real = state_RLH.reshape(-1, hidden).index_select(0, source).to(out_TF.dtype)
            out_TF[:, tap * hidden : (tap + 1) * hidden].index_copy_(0, destination, real)

        handles = [
            _hook(self._layers[layer], lambda output, tap=tap: keep(tap, output))
            for tap, layer in enumerate(self._layer_ids)
        ]
        try:
            output = self._model(input_ids=self._to_device(ids_RL), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        if self._last_state:
            keep(len(self._layer_ids), output.last_hidden_state)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def _hook(layer: nn.Module, keep: Any) -> Any:
    return layer.register_forward_hook(lambda module, inputs, output: keep(output))
