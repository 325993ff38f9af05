"""The frozen target's forward, with the residual stream captured after each tapped layer.

Where the last hidden state is asked for, it is one more tap behind the others: after the target's own final norm.

Shape suffixes: R rows, L padded length, G real tokens of a row group, T tokens of the pack, N documents of the pack, H
hidden size, F captured features, W values of a row of the wire format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dflash_dist.config import TargetConfig
from dflash_dist.errors import UserError
from dflash_dist.target.attention import checking_windows, use_own_attention
from dflash_dist.target.load import check_longest, load_taps
from dflash_dist.target.mixers import fla_missing, has_own_mixers, tune_delta_rule, use_own_mixers
from dflash_dist.target.packed import NotPackableError, Pack, running, to_device
from dflash_dist.target.packing import RowGroup, one_row, row_groups
from dflash_dist.wire import WireFormat
from dflash_profiling.record import span

Layout = Literal["packed", "rows"]
TRIAL_LENGTHS = np.array([70, 33, 66, 129])
"""Of the documents on which a forward is tried: with parts of chunks of the delta rule; as rows one and, padded, two of
a length, which torch.compile tells apart."""
WARM_UP_LENGTHS = 32 * TRIAL_LENGTHS + 1
"""Of the documents on which kernels are tuned and compiled on a GPU. fla's and the compiler's kernels keep the variant
that was fastest on the first batch they met: on a small one, all are alike, and chance decides."""
AGREEMENT = {torch.float32: 1e-3}
"""Greatest relative difference between packed and padded states. Half types round: a deep model's last taps of random
weights differ by some per cent, and a wrong mask or a leak by about 1."""
AGREEMENT_OF_HALF_TYPES = 0.3
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names by which configs count the experts of a layer."""


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
        random_weights: bool = False,
        layout: Layout | None = None,
    ) -> None:
        """`random_weights`: drawn on the device, from config.json alone. `layout`: how documents are kept apart.

        Without one it is packed where that is fast and, by a trial on this very model, right; else right-padded rows.
        """
        self._model = load_taps(folder, settings, None if last_state else layer_ids[-1] + 1, device, random_weights)
        self._device = device
        self._layers = self._model.layers
        self._layer_ids = layer_ids
        self._last_state = last_state
        hidden_size = self._model.config.get_text_config().hidden_size
        self.dtype: torch.dtype = next(self._model.parameters()).dtype
        self.wire = WireFormat(wire, len(layer_ids) + last_state, hidden_size, self.dtype)
        linear = "linear_attention" in (getattr(self._model.config, "layer_types", None) or [])
        self._hybrid = linear and has_own_mixers(self._model)
        use_own_mixers(self._model)
        self._by_fla = self._hybrid and device.type == "cuda" and fla_missing() is None
        if self._by_fla:
            self._halving(lambda lengths_N: tune_delta_rule(self._model, lengths_N, device))
        self.not_packed_because = "" if layout else self._packing_is_slow()
        """Why documents are padded to rows; empty where they are packed, or where rows were asked for."""
        self.layout: Layout = "rows" if layout == "rows" or self.not_packed_because else "packed"
        self._try_own_attention()
        if device.type == "cuda" and settings.compile:
            self.compile_layers()

    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Has each kind of layer run as one compiled graph. Compiles now; another mix of lengths does not again.

        UserError where compiled layers give other states.
        """
        tokens_T = self._random_tokens(TRIAL_LENGTHS)
        expected_TSH = self._trial(tokens_T, TRIAL_LENGTHS, self.layout)
        for layer in self._layers:
            layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend)
        if self._device.type == "cuda":
            self._halving(lambda lengths_N: self._trial(self._random_tokens(lengths_N), lengths_N, self.layout))
        difference = self._difference(self._trial(tokens_T, TRIAL_LENGTHS, self.layout), expected_TSH)
        if not difference <= self._tolerance:
            raise UserError(
                f"the compiled layers of the target give states {difference:.1e} away from those of the same layers "
                "as they are; set target.compile=false"
            )

    @property
    def features(self) -> int:
        """F: values captured for each token."""
        return self.wire.features

    @torch.no_grad()
    def capture(self, tokens_T: Tensor, lengths_N: np.ndarray, out_TW: Tensor) -> None:
        """Fills `out_TW` [T, W] with the states of the packed documents, in rows of `wire`.

        Where `wire` is full, W = F and tap k takes columns k*H to (k+1)*H. `tokens_T`: int64 ids on the host. A
        document's states do not depend on its neighbours in the pack.
        """
        check_longest(self._model.config, int(lengths_N.max()))
        self._capture(tokens_T, lengths_N, out_TW, self.wire, self.layout)

    def _capture(
        self, tokens_T: Tensor, lengths_N: np.ndarray, out_TW: Tensor, wire: WireFormat, layout: Layout
    ) -> None:
        packed = layout == "packed"
        for group in [one_row(lengths_N)] if packed else row_groups(lengths_N):
            states = self._states(tokens_T, group, Pack.of(lengths_N, self._device) if packed else None)
            source_G, destination_G = (torch.from_numpy(x) for x in (group.source, group.destination))
            with span("gather"):
                wire.pack(states, to_device(source_G, self._device), to_device(destination_G, self._device), out_TW)

    def _states(self, tokens_T: Tensor, group: RowGroup, pack: Pack | None) -> list[Tensor]:
        """The captured states [R, L, H] of all rows: references, as no layer writes into what another gave."""
        ids_RL = torch.zeros(group.shape, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        ids_RL.view(-1)[torch.from_numpy(group.source)] = tokens_T[torch.from_numpy(group.destination)]
        where = {} if pack is None else {"position_ids": pack.positions_1T}
        if pack is not None and self._hybrid:
            where["seq_idx"] = pack.document_1T
        rows = Pack.of(np.full(*group.shape), self._device) if pack is None and self._by_fla else None
        with self._keeping() as states_RLH, running(self._model, pack, rows):
            output = self._model(input_ids=to_device(ids_RL, self._device), use_cache=False, **where)
        return [*states_RLH, output.last_hidden_state] if self._last_state else states_RLH

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[list[Tensor]]:
        """A list that takes the output of each tapped layer as it runs."""
        states_RLH: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            states_RLH.append(output[0] if isinstance(output, tuple) else output)

        handles = [self._layers[layer].register_forward_hook(keep) for layer in self._layer_ids]
        try:
            yield states_RLH
        finally:
            for handle in handles:
                handle.remove()

    def _try_own_attention(self) -> None:
        """Keeps to it where a trial shows the same states by it; else padded rows by Hugging Face's own."""
        implementation = self._model.config._attn_implementation
        tokens_T = self._random_tokens(TRIAL_LENGTHS)
        expected_TSH = self._trial(tokens_T, TRIAL_LENGTHS, "rows")
        self._check_padding(tokens_T, expected_TSH)
        try:
            use_own_attention(self._model)
            with checking_windows(self._model):
                self._check(tokens_T, expected_TSH)
        except Exception as error:  # an architecture not seen yet may fail in any way
            self._model.config._attn_implementation = implementation
            if self.layout == "packed":
                name = "" if isinstance(error, NotPackableError) else f"{type(error).__name__}: "
                self.layout, self.not_packed_because = "rows", name + " ".join(str(error).split())[:300]

    def _check_padding(self, tokens_T: Tensor, states_TSH: Tensor) -> None:
        """UserError where a document's states depend on the padding behind it."""
        documents = zip(tokens_T.split(TRIAL_LENGTHS.tolist()), TRIAL_LENGTHS, strict=True)
        alone_TSH = torch.cat([self._trial(part, np.array([length]), "rows") for part, length in documents])
        if not (difference := self._difference(states_TSH, alone_TSH)) <= self._tolerance:
            raise UserError(
                f"the states of a {type(self._model).__name__} are {difference:.1e} away where a document is padded: "
                "it is not causal, and not supported"
            )

    def _packing_is_slow(self) -> str:
        """Why packed documents would not be run by fused kernels, or an empty text."""
        if self._hybrid and self._device.type != "cuda":
            return "the delta rule has no fused kernel on the CPU"
        if self._hybrid and (missing := fla_missing()):
            return f"fla's kernels cannot be used ({missing})"
        if self._device.type == "cuda" and self.dtype == torch.float32:
            return "attention over packs has no fused kernel in float32"
        return ""

    def _check(self, tokens_T: Tensor, expected_TSH: Tensor) -> None:
        """NotPackableError where documents see each other, or come out otherwise than by Hugging Face's attention."""
        middle = slice(TRIAL_LENGTHS[0], TRIAL_LENGTHS[:2].sum())
        others_T = tokens_T.flip(0)
        others_T[middle] = tokens_T[middle]
        states_TSH, others_TSH = (self._trial(x, TRIAL_LENGTHS, self.layout) for x in (tokens_T, others_T))
        apart = self._difference(others_TSH[middle], states_TSH[middle])
        # The sums of experts depend on what other tokens they are given, in their last bits.
        if not apart <= (self._tolerance if self._has_experts else 0):
            raise NotPackableError(f"a document's states change by {apart:.1e} with the documents beside it")
        if not (difference := self._difference(states_TSH, expected_TSH)) <= self._tolerance:
            raise NotPackableError(f"its states are {difference:.1e} away from those of padded rows")

    def _random_tokens(self, lengths_N: np.ndarray) -> Tensor:
        vocabulary = self._model.config.get_text_config().vocab_size
        return torch.randint(0, vocabulary, (lengths_N.sum(),), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def _trial(self, tokens_T: Tensor, lengths_N: np.ndarray, layout: Layout) -> Tensor:
        """The states [T, S, H] of the documents, as they are."""
        wire = WireFormat("full", self.wire.states, self.wire.hidden, self.dtype)
        out_TF = torch.empty(len(tokens_T), wire.features, dtype=self.dtype, device=self._device)
        self._capture(tokens_T, lengths_N, out_TF, wire, layout)
        return out_TF.unflatten(1, (wire.states, wire.hidden))

    def _halving(self, run: Callable[[np.ndarray], object]) -> None:
        """Runs it on the warm-up's documents, or on shorter ones where memory does not hold those."""
        lengths_N = np.minimum(WARM_UP_LENGTHS, self._model.config.get_text_config().max_position_embeddings)
        while True:
            try:
                run(lengths_N)
                break
            except torch.OutOfMemoryError:
                if lengths_N.sum() <= TRIAL_LENGTHS.sum():
                    raise
                lengths_N = lengths_N // 2
        torch.cuda.empty_cache()

    @property
    def _tolerance(self) -> float:
        return AGREEMENT.get(self.dtype, AGREEMENT_OF_HALF_TYPES)

    @property
    def _has_experts(self) -> bool:
        return any(getattr(self._model.config, name, None) for name in EXPERTS)

    def _difference(self, states_TSH: Tensor, expected_TSH: Tensor) -> float:
        """The relative difference of the worst tap, over the first documents' first tokens too, where leaks would show.

        In half types a token may take another expert for a last bit, and all states behind that are others: there only
        the first tap is looked at.
        """
        if self._has_experts and self.dtype not in AGREEMENT:
            states_TSH, expected_TSH = states_TSH[:, :1], expected_TSH[:, :1]
        parts = [(states_TSH[:n].float(), expected_TSH[:n].float()) for n in (8, len(states_TSH))]
        return max(float(((ours - theirs).norm(dim=(0, 2)) / theirs.norm(dim=(0, 2))).max()) for ours, theirs in parts)
