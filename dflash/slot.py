"""A slot's memory as tensors, zero-copy, and how documents are laid into it.

Both halves see the same pages through `slot_views`; the target worker fills them with
`write_documents` and `Target.capture`, the trainer hands them to `train_step`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .arch import DrafterArch
from .config import Config
from .step import DTYPES, Batch


def slot_views(buffer: Callable[[str], memoryview], config: Config, arch: DrafterArch) -> Batch:
    """Tensors over the fields of one slot. `buffer(name)` gives the bytes of `<name>.bin`.

    all_TF [T, n_taps*H] and vlh_TH [T, H] in the target's dtype; ids_T, pos_T int64 [T];
    lm_T bool [T]; lens_D int64 [D]; total_tok int64 scalar. Rows from total_tok on are stale.
    """

    def view(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        with warnings.catch_warnings():
            # A reader's pages are mapped read-only, which torch can't express: it warns.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(buffer(name), dtype=dtype).view(shape)

    return _slot(view, config, arch)


def slot_shapes(config: Config, arch: DrafterArch) -> Batch:
    """slot_views without memory, on torch's meta device."""

    def tensor(name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return _slot(tensor, config, arch)


def _slot(tensor: Callable[..., torch.Tensor], config: Config, arch: DrafterArch) -> Batch:
    tokens, hidden = config.ring.max_tokens, arch.hidden_size
    states = DTYPES[config.target.dtype]
    return Batch(
        all_TF=tensor("all", states, tokens, arch.num_taps * hidden),
        vlh_TH=tensor("vlh", states, tokens, hidden) if config.wants_vlh else None,
        ids_T=tensor("ids", torch.int64, tokens),
        lm_T=tensor("lm", torch.bool, tokens),
        lens_D=tensor("lens", torch.int64, config.ring.max_docs),
        pos_T=tensor("pos", torch.int64, tokens),
        total_tok=tensor("total_tok", torch.int64),
    )


def write_documents(slot: Batch, documents: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
    """Pack (token ids, loss mask) pairs one after the other. Returns the number of valid tokens."""
    lens = [len(ids) for ids, _ in documents]
    total = sum(lens)
    assert total <= len(slot.ids_T) and len(lens) <= len(slot.lens_D), "the plan overfilled a slot"
    ids, masks = (np.concatenate(parts) for parts in zip(*documents, strict=True))
    slot.ids_T[:total] = torch.from_numpy(ids.astype(np.int64))
    slot.lm_T[:total] = torch.from_numpy(masks.astype(bool))
    slot.pos_T[:total] = torch.cat([torch.arange(n) for n in lens])
    slot.lens_D.zero_()
    slot.lens_D[: len(lens)] = torch.tensor(lens)
    slot.total_tok.fill_(total)
    return total
