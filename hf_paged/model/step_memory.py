"""The memory of a step on a GPU beside weights and pool, which a pool sized from free memory must leave."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged.core.config import PagedConfig
from hf_paged.model.bound_model import BoundModel

# The hungriest of transformers' row-wise processors, for each score of a row: the float32 scores (4), their logarithm
# (4), probabilities (4) and distances from the entropy (4), those sorted (4) with int64 indices (8), the scores in that
# order (4), their cumulative sum (4), two masks (2), and the result (4).
SCORE_BYTES = 42
MOST_WANTED = 512  # tokens whose logits graphs keep, of steps that want those of most of their tokens (with drafts)


class StepMemory:
    """Finds out what steps take.

    Attributes:
        for_graphs: What a pool sized from memory has left to CUDA graphs: bytes for what a step computes, and bytes in
            all; `None`: no such pool was made.
    """

    def __init__(self, model: BoundModel, config: PagedConfig) -> None:
        self.for_graphs: tuple[int, int] | None = None
        self._model = model
        self._config = config

    def reserved_bytes(self, num_tokens: int, block_size: int, num_groups: int = 1) -> int:
        """Bytes that steps hold at most beside weights and pool, on a GPU; 0 on CPU (see `activation_bytes`).

        A sum: memory that a forward gives back is in pieces, which the sampler's tensors, the largest there are,
        need not fit in.
        """
        bound = self._model
        dtype, device = bound.placement
        if device.type != "cuda":
            return 0
        rows = self._config.max_num_seqs
        logits = bound.vocab_size, dtype.itemsize
        num_bytes = self.activation_bytes(num_tokens) + sampler_bytes(min(rows, num_tokens), *logits)
        uses_graphs = self._config.cuda_graphs is not False and bound.why_unrecorded is None and bound.runs_known_code
        if uses_graphs:
            max_blocks, records_all = -(-bound.max_context // block_size), bound.may_record_all
            most = max(min(rows, num_tokens), bound.most_recorded(num_tokens) if records_all else 0)
            activations = self.activation_bytes(most)
            wanted = rows + MOST_WANTED if records_all and rows < MOST_WANTED < num_tokens else rows
            taken = graph_bytes(activations, wanted, *logits) + input_bytes(num_tokens, rows, max_blocks, num_groups)
            self.for_graphs = activations, taken
            num_bytes += taken
        # Steps run on the worker's thread and on a lone caller's; the graphs are recorded on a stream of their own.
        return num_bytes + workspace_bytes(device, 2 + uses_graphs)

    @torch.no_grad()
    def activation_bytes(self, num_tokens: int) -> int:
        """Most bytes that the forward of a step of so many tokens holds: measured, on a GPU, by running one, which
        starts torch's peak memory statistics anew; estimated where code of a user's own would see that run.

        0 on CPU, where memory is taken page by page when it is used.
        """
        bound = self._model
        dtype, device = bound.placement
        if device.type != "cuda":
            return 0
        num_logits = min(self._config.max_num_seqs, num_tokens) if bound.chooses_logits else num_tokens
        if not bound.runs_known_code:
            return estimated_bytes(bound.model, num_tokens, num_logits, dtype.itemsize)
        inputs: dict[str, Any] = {"input_ids": torch.zeros(1, num_tokens, dtype=torch.int64, device=device)}
        if bound.chooses_logits:
            inputs["logits_to_keep"] = num_logits
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        bound.run_bare(use_cache=False, **inputs)
        return torch.cuda.max_memory_allocated(device) - before


def estimated_bytes(model: PreTrainedModel, num_tokens: int, num_logits: int, itemsize: int) -> int:
    """About what a forward holds: `itemsize * (6 * num_tokens * (hidden + experts * widest) + num_logits * vocab)`.

    `widest` is the largest size of a linear layer's input or output, `experts` how many of them a token goes through.
    Those of `transformers` hold 2.5 to 6 times their sum, where no attention matrix is made and no state is scanned.
    """
    config = model.config.get_text_config(decoder=True)
    names = ("in_features", "out_features", "nx", "nf")  # those of quantised layers, too
    sizes = [getattr(module, name, None) for module in model.modules() for name in names]
    sizes += [max(weight.shape[-2:]) for weight in model.parameters() if weight.ndim == 3]  # of experts, all in one
    widest = max((size for size in sizes if isinstance(size, int) and size != config.vocab_size), default=0)
    width = config.hidden_size + (getattr(config, "num_experts_per_tok", None) or 1) * widest
    return itemsize * (6 * num_tokens * width + num_logits * config.vocab_size)


def sampler_bytes(rows: int, vocab_size: int, itemsize: int) -> int:
    """Most that choosing the tokens of a step takes: `rows * vocab_size * (2 * itemsize + 42)`.

    The logits, and once more those of the rows of one kind, then what typical sampling makes of them. Top-p sampling
    takes 26 in place of the 42, and about as much again within its sort.

    Args:
        itemsize: Bytes of a logit.
    """
    return rows * vocab_size * (2 * itemsize + SCORE_BYTES)


def graph_bytes(activations: int, wanted: int, vocab_size: int, itemsize: int) -> int:
    """What the graphs of steps keep beside their inputs: `5/4 * activations + wanted * vocab_size * itemsize`.

    What the largest step computes, which all use, and a quarter for what does not fit in where another was; the logits.
    What the driver keeps of each graph, and attention's scratch, which is small beside these, are not counted.

    Args:
        activations: Bytes that a step holds at most.
        wanted: Logits that are kept, in rows.
        itemsize: Bytes of a logit.
    """
    return activations + activations // 4 + wanted * vocab_size * itemsize


def input_bytes(num_tokens: int, rows: int, max_blocks: int, groups: int = 1) -> int:
    """What graphs read: of all shapes, whose tokens are some five times those of the largest together,
    `5 * num_tokens * (48 + 8 * groups)`; and an int32 block table a row twice (as sent, and in its place) for each
    group of layers.
    """
    return 5 * num_tokens * (48 + 8 * groups) + 8 * rows * max_blocks * groups


def workspace_bytes(device: torch.device, num_workspaces: int) -> int:
    """Scratch of cuBLAS, of which torch allocates one for each thread and stream that multiplies matrices.

    32 MiB each from compute capability 9.0 on, 8 MiB and 128 KiB below, or what `CUBLAS_WORKSPACE_CONFIG` says in
    pairs of KiB and how many, `":4096:2:16:8"`.
    """
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG") or (
        ":4096:8" if torch.cuda.get_device_capability(device) >= (9, 0) else ":4096:2:16:8"
    )
    return num_workspaces * sum(int(size) * int(count) * 1024 for size, count in re.findall(r":(\d+):(\d+)", config))
