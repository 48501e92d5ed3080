"""`ModelTraits`: the findings of `is_supported` about a model's architecture."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_paged.core.cache_groups import CacheGroups
from hf_paged.kernels.scaled_rows import SCALE_BYTES
from hf_paged.memory.kv_cache import KVGeometry, PageShape
from hf_paged.memory.spec import AttentionSpec, StateSpec


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the engine has to know about a model's architecture.

    Attributes:
        layers: What each of its layers caches; `None`: nothing of its own.
        why_padded: What went wrong when it was tried in the packed layout; empty if that is how it runs.
        tells_positions: Whether its layers reckon with how much is cached before each token.
        tells_all: Whether the model itself does, too, taking no position ids.
        cross: What each of its layers caches of what an encoder has read; empty of a model without one.
        indexers: Beside that: the keys of what chooses the tokens that a layer attends to. Empty if there is no such.
        runs_packed: Whether its attention runs over the packed batch of real tokens, straight from the pool. If not,
            the model keeps its own attention and is given gathered keys and values.
        runs_padded: If not: whether its forwards may be of any rows beside each other, padded to one width.
            Of a model of neither layout only one with a `regime_length` runs over the pool, a call at a time.
        needs_alike: Whether rows of a padded forward have to be of one length, and begin at one place, since the model
            takes padding for tokens, or for others' tokens.
        one_by_one: Whether it gives several tokens of a row at once another result than single ones, or takes none: in
            steps they run one after another.
        states: What its layers with a state (recurrent, of a convolution) keep, by the layer's number.
        mixers: The classes of the modules that compute them.
        forms_differ: Whether these compute several tokens by another formula than single ones, with another result.
        shares_attention: Whether layers share attention modules, which tell their cache the layer they compute.
        carries_state: Whether these take a state along into several tokens; if not, only into single ones.
        regime_length: Where rows depend on each other: of sequences shorter than this, they don't.
        rows_independent: Whether a row's result never depends on the rows beside it.
        allows_inference_mode: Whether its forward keeps no tensor that it computes: in a later training step a tensor
            made in inference mode would be refused.
    """

    layers: tuple[AttentionSpec | None, ...]
    runs_packed: bool
    rows_independent: bool
    allows_inference_mode: bool = False
    runs_padded: bool = False
    needs_alike: bool = False
    one_by_one: bool = False
    regime_length: int | None = None
    states: dict[int, StateSpec] = field(default_factory=dict)
    mixers: tuple[type[nn.Module], ...] = ()
    carries_state: bool = True
    forms_differ: bool = False
    shares_attention: bool = False
    indexers: tuple[AttentionSpec | None, ...] = ()
    tells_positions: bool = False
    tells_all: bool = False
    why_padded: str = ""
    cross: tuple[AttentionSpec | None, ...] = ()

    @property
    def stored(self) -> tuple[AttentionSpec | None, ...]:
        """All that is cached of a token: of each layer, then of each layer's indexer, then of what an encoder read."""
        return (*self.layers, *self.indexers, *self.cross)

    def stored_in(self, dtype: torch.dtype | None) -> tuple[AttentionSpec | None, ...]:
        """`stored`, as wide as it lies in a pool of this dtype: in int8, a row's scale lies beside its codes."""
        if dtype is not torch.int8:
            return self.stored
        return tuple(layer and layer.widened(SCALE_BYTES) for layer in self.stored)

    @property
    def why_not_scaled(self) -> str | None:
        """Why what is cached can't be codes with a scale a head, as the end of a sentence; `None`: it can."""
        layers = [layer for layer in self.stored if layer is not None]
        if any(layer.is_latent for layer in layers):
            return "its layers cache latents, whose rows are keys and values at once"
        if any(layer.key_dim != layer.value_dim for layer in layers):
            return "its layers' keys and values differ in width"
        odd = [layer.key_dim for layer in layers if layer.key_dim % SCALE_BYTES]
        return f"its head dim is {odd[0]}, no multiple of {SCALE_BYTES}" if odd else None

    @property
    def has_latents(self) -> bool:
        """Whether attention reads what layers cache as latents."""
        return any(layer is not None and layer.is_latent for layer in self.layers)

    @property
    def is_batched(self) -> bool:
        """Whether rows of all callers may share a forward, in either layout."""
        return self.runs_packed or self.runs_padded

    @property
    def runs_stock(self) -> bool:
        """Whether none of its calls runs over the pool."""
        return not self.is_batched and self.regime_length is None

    @property
    def places_by_column(self) -> bool:
        """Whether padding before a token counts in its place, as the model takes no position ids."""
        return self.tells_all and not self.cross

    @property
    def num_layers(self) -> int:
        """The number of layers, including those that store nothing."""
        return len(self.layers)

    def geometry(self, groups: CacheGroups, dtype: torch.dtype, block_size: int) -> KVGeometry:
        """Of a pool of this dtype, whose groups are of `stored_in` it."""
        if not groups.sizes:  # a block for a whole state
            width, size = 64, sum(spec.num_bytes(torch.float32) for spec in self.states.values())
            return KVGeometry.uniform(-(-size // (2 * width * block_size * dtype.itemsize)), 1, width, dtype)
        kinds = {
            group: layer
            for (group, _), layer in zip(groups.places, self.stored_in(dtype), strict=True)
            if layer is not None
        }
        pages = [
            PageShape(size, kind.kv_heads, kind.key_dim, kind.value_dim, kind.is_latent)
            for size, kind in ((size, kinds[group]) for group, size in enumerate(groups.sizes))
        ]
        return KVGeometry(tuple(pages), groups.elements, dtype)


# Settings by which a model's own code draws without a module for it, in its config or one inside.
_DRAWS = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "layerdrop", "dropout", "dropout_rate", "hidden_dropout"),
    *("residual_dropout", "activation_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("encoder_layerdrop", "decoder_layerdrop", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
)


def is_stochastic(model: nn.Module) -> bool:
    """Whether forwards in training mode draw (dropout) or drop the cache (gradient checkpointing)."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return True
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    config: PreTrainedConfig = model.config  # type: ignore[assignment]
    inside = [own for own in vars(config).values() if isinstance(own, PreTrainedConfig)]
    rates = (getattr(own, name, 0.0) for own in (config, *inside) for name in _DRAWS)
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
