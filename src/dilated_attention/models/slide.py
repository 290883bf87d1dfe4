"""SlideEncoder: the released slide encoders (Prov-GigaPath, GigaPath-Flash), with their weights and outputs.

Legend: B slides of L tiles; tiles (B, L, in_chans); coords (B, L, 2); x (B, 1 + L, C), the class token first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilated_attention.backends.choose import Backend
from dilated_attention.call import accumulate_dtype
from dilated_attention.checks import check_flag, check_int, checked_probability, checked_scale
from dilated_attention.context_parallel import Over
from dilated_attention.distributed.sequence import gather_sequence
from dilated_attention.functional import errors_reach_group
from dilated_attention.models import explain, positions, weights
from dilated_attention.models.layers import Sequences, mean_of, process_group, stacked
from dilated_attention.models.positions import TileSize
from dilated_attention.pattern import DilatedPattern, Pattern
from dilated_attention.resolve import Options, check_options

PRESETS = {
    "gigapath_slide_enc12l768d": {"in_chans": 1536, "embed_dim": 768, "depth": 12},
    "gigapath_slide_enc12l384d": {"in_chans": 384, "embed_dim": 384, "depth": 12},
    "gigapath_slide_enc24l1024d": {"in_chans": 1536, "embed_dim": 1024, "depth": 24},
    "gigapath_slide_enc12l1536d": {"in_chans": 1536, "embed_dim": 1536, "depth": 12},
}


class SlideEncoder(nn.Module):
    """Turns the tiles of a slide and their coordinates, in pixels of level 0, into one embedding.

    Args:
        in_chans: channels of a tile's features.
        embed_dim, depth, num_heads, mlp_ratio: the sizes of the transformer.
        slide_ngrids: cells of the position grid along each side.
        tile_size: the side of a tile in pixels. It is an attribute, too, and may change between slides.
        max_wsi_size: the largest side of a slide in pixels. With tile_size it sets the segments: see `slide_pattern`.
        dropout, drop_path_rate: in training only.
        global_pool: True: the mean of the tiles' outputs; False: the class token's output.
        checkpoint_activations: keep only each layer's input, and compute the layer again in the backward pass.
        pattern: instead of the one that max_wsi_size and tile_size give, for models of your own.
        backend: of the attention, as in `dilated_attention`.

    Examples:
        >>> model = models.SlideEncoder(24, 32, 2, 4, global_pool=True).eval()
        >>> tiles, coords = torch.randn(1, 50, 24), torch.randint(0, 100, (1, 50, 2)) * 256
        >>> [embedding] = model(tiles, coords)
        >>> embedding.shape
        torch.Size([1, 32])
    """

    takes_half_coords = False

    def __init__(
        self, in_chans: int = 1536, embed_dim: int = 768, depth: int = 12, num_heads: int = 16, mlp_ratio: float = 4.0,
        slide_ngrids: int = 1000, tile_size: int = 256, max_wsi_size: int = 262144, dropout: float = 0.25,
        drop_path_rate: float = 0.1, *, global_pool: bool, checkpoint_activations: bool = False,
        pattern: Pattern | None = None, backend: Backend = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        if check_int("embed_dim", embed_dim) % 4:
            raise ValueError(f"embed_dim must be a multiple of 4, for sines and cosines of x and y, got {embed_dim}")
        check_flag("global_pool", global_pool)
        check_flag("checkpoint_activations", checkpoint_activations)
        pattern = slide_pattern(max_wsi_size, tile_size) if pattern is None else pattern
        check_options(Options(pattern, backend=backend))
        self.embed_dim, self.depth = embed_dim, check_int("depth", depth)
        self.slide_ngrids = check_int("slide_ngrids", slide_ngrids)
        self.tile_size: TileSize = check_int("tile_size", tile_size)
        self.global_pool = global_pool
        self.dropout = checked_probability(dropout, "dropout")
        self.checkpoint_activations = checkpoint_activations
        self.backend: Backend = backend
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.patch_embed: Any = nn.Sequential(OrderedDict(proj=nn.Linear(check_int("in_chans", in_chans), embed_dim)))
        ffn_dim = check_int("embed_dim * mlp_ratio", int(embed_dim * checked_scale(mlp_ratio, "mlp_ratio")))
        layers = stacked(depth, drop_path_rate, embed_dim, num_heads, ffn_dim, pattern, dropout=dropout)
        self.encoder: Any = nn.ModuleDict({"layers": layers, "layer_norm": nn.LayerNorm(embed_dim)})
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.cls_token, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    @classmethod
    def preset(cls, name: str, *, global_pool: bool, **sizes: Any) -> Self:
        """Makes a model with the sizes of a released one, a key of `PRESETS`, and fresh weights.

        ``global_pool`` and ``sizes`` are arguments of the constructor; they override the preset.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown model {name!r}: use one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **sizes}, global_pool=global_pool)

    @classmethod
    def from_pretrained(cls, path_or_hub_id: weights.File, *, global_pool: bool, **sizes: Any) -> Self:
        """Loads the model of a file, in eval mode.

        Args:
            path_or_hub_id: a .safetensors or .pth file, a folder with ``slide_encoder.safetensors`` or
                ``slide_encoder.pth``, or a hub id (``org/name``), which downloads into the hub's cache.
            global_pool, sizes: arguments of the constructor. Width, depth and in_chans are read from the weights. They
                do not tell num_heads, tile_size, max_wsi_size and slide_ngrids: give those of the training if they are
                not the defaults.
        """
        state, said = weights.read(weights.located(path_or_hub_id))
        make = partial(cls, **{**sizes_of(state, said), **sizes}, global_pool=global_pool)
        return weights.load(make, state, said).eval()

    def forward(
        self, tiles: Tensor, coords: Tensor, all_layer_embed: bool = False, *, padding_mask: Tensor | None = None,
        tile_size: TileSize | None = None, per_tile: bool = False, group: Over = None,
    ) -> list[Tensor]:  # fmt: skip
        """Returns a list of embeddings, each (B, embed_dim); by default one, as the released code gives it.

        Args:
            tiles: (B, L, in_chans), or (L, in_chans) for one slide. Their order matters: segments are by index.
            coords: (B, L, 2), or (L, 2) for all slides: x and y of each tile's upper left corner in pixels of level 0.
            all_layer_embed: return depth + 1 embeddings: before the first layer, and after each, without the
                encoder's last LayerNorm.
            padding_mask: (B, L) bool, True = no tile here. Slides are packed: padding costs nothing.
            tile_size: for this call, instead of the attribute: one number for all slides, or a list with one per slide.
            per_tile: the outputs of the tiles, (B, L, embed_dim), instead of embeddings; 0 where there is no tile.
            group: the ranks that share each slide. Tiles and coords are this rank's contiguous shard; every rank gets
                the embedding of the whole slide. In training, average the gradients over the ranks.
        """
        states, rows = self._states(tiles, coords, padding_mask, tile_size, group, keeps_all=all_layer_embed)
        if not all_layer_embed:
            states = [self.encoder.layer_norm(states[-1])]
        if per_tile:
            return [self._tiles(self.norm(state), padding_mask, rows) for state in states]
        return [self.norm(self._pooled(state, rows)) for state in states]

    @torch.no_grad()
    def attention_map(
        self, tiles: Tensor, coords: Tensor, query: explain.Query = "cls", layer: int | None = -1,
        head: int | None = None, *, tile_size: TileSize | None = None,
    ) -> explain.AttentionMap:  # fmt: skip
        """Computes the exact attention weights of one query over all tiles of a slide, in time and memory linear in L.

        ``query``: "cls" or the index of a tile. ``layer`` and ``head`` count from 0, or from the end; None: all, in a
        dimension of their own.
        """
        states = self._explained(tiles, coords, tile_size)
        return explain.attention_map(self.encoder.layers, states, query, layer, head)

    @torch.no_grad()
    def rollout(
        self, tiles: Tensor, coords: Tensor, query: explain.Query | None = None, *, tile_size: TileSize | None = None
    ) -> explain.AttentionMap:
        """Computes attention rollout for one slide: how much each tile contributes to the embedding.

        In each layer one half of a row's weight stays in place, for the residual connection, and the other half goes to
        the keys, averaged over the heads. ``query``: "cls", a tile's index or "mean"; by default what the model pools.
        """
        states = self._explained(tiles, coords, tile_size)
        start = torch.zeros_like(states[0][0, :, 0], dtype=accumulate_dtype(states[0].dtype))
        query = ("mean" if self.global_pool else "cls") if query is None else query
        start[slice(1, None) if query == "mean" else explain.row_of(query, len(start) - 1)] = 1
        return explain.rollout(self.encoder.layers, states, start / start.sum())

    def _explained(self, tiles: Tensor, coords: Tensor, tile_size: TileSize | None) -> list[Tensor]:
        """The inputs of each layer, for one slide."""
        if self.training:
            raise ValueError("the model is in training mode, where dropout changes the attention: call .eval()")
        if len(tiles) != 1 and tiles.dim() == 3:
            raise ValueError(f"give the tiles of one slide, got {len(tiles)} slides")
        return self._states(tiles, coords, None, tile_size, None, keeps_all=True)[0][:-1]

    def _states(
        self, tiles: Tensor, coords: Tensor, padding_mask: Tensor | None, tile_size: TileSize | None, group: Over,
        *, keeps_all: bool,
    ) -> tuple[list[Tensor], Sequences]:  # fmt: skip
        """The rows before the first layer and after each, or only after the last."""
        with errors_reach_group(group, tiles):
            tiles, coords = self._checked(tiles, coords, padding_mask, group)
            size = self.tile_size if tile_size is None else tile_size
            cell = positions.cells(coords, size, self.slide_ngrids, padding_mask, takes_half=self.takes_half_coords)
        x, rows = self._embedded(tiles, cell, padding_mask, group)
        states = [x]
        for layer in self.encoder.layers:
            again = self.checkpoint_activations and torch.is_grad_enabled()
            x = checkpoint(layer, x, rows, use_reentrant=False) if again else layer(x, rows)
            states = [*states, x] if keeps_all else [x]
        return states, rows

    def _checked(
        self, tiles: Tensor, coords: Tensor, padding_mask: Tensor | None, group: Over
    ) -> tuple[Tensor, Tensor]:
        """(B, L, in_chans) and (B, L, 2), or an error that says what is wrong."""
        tiles, in_chans = tiles.unsqueeze(0) if tiles.dim() == 2 else tiles, self.patch_embed.proj.in_features
        if tiles.dim() != 3 or tiles.shape[-1] != in_chans:
            raise ValueError(f"tiles must be (B, L, {in_chans}), got {tuple(tiles.shape)}: those of another encoder?")
        slides, length, _ = tiles.shape
        if coords.shape not in ((length, 2), (slides, length, 2)):
            wanted = f"({slides}, {length}, 2) or ({length}, 2)"
            raise ValueError(f"coords must be {wanted} like the tiles, x and y of each, got {tuple(coords.shape)}")
        is_empty = not length
        if padding_mask is not None:
            if group is not None:
                raise ValueError("padding_mask cannot be given together with a group: pass slides of equal length")
            if padding_mask.dtype != torch.bool or padding_mask.shape != (slides, length):
                got = f"{padding_mask.dtype} of {tuple(padding_mask.shape)}"
                raise ValueError(f"padding_mask must be bool (True = no tile) of {slides, length}, got {got}")
            is_empty = bool(padding_mask.all(1).any())
        if is_empty and Sequences(group=group).firsts:  # over a group, only rank 0 must have some
            raise ValueError("a slide has no tiles, or those of rank 0: give it the first ones, or leave the slide out")
        return tiles, coords.expand(slides, length, 2)

    def _embedded(
        self, tiles: Tensor, cell: Tensor, padding_mask: Tensor | None, group: Over
    ) -> tuple[Tensor, Sequences]:
        """The class token and the tiles, packed in one row if a mask is given."""
        if padding_mask is not None:
            kept = ~padding_mask
            sizes = kept.sum(1).tolist()
            tiles, cell = tiles[kept.to(tiles.device)], cell[kept.cpu()]
        x = self.patch_embed(tiles.to(self.patch_embed.proj.weight.dtype))
        x = x + positions.embedded(cell, self.embed_dim, self.slide_ngrids, self.cls_token)
        token, rows = self.cls_token.to(x.dtype), Sequences(None, group, self.backend)
        if padding_mask is None:  # an empty slice gives the other ranks a gradient of 0
            x = torch.cat([token.expand(len(tiles), -1, -1)[:, : rows.firsts], x], dim=1)
        else:
            x = torch.cat([row for part in x.split(sizes) for row in (token[0], part)]).unsqueeze(0)
            rows = Sequences((0, *accumulate(size + 1 for size in sizes)), None, self.backend)
        return F.dropout(x, self.dropout, self.training), rows

    def _pooled(self, x: Tensor, rows: Sequences) -> Tensor:
        """(B, C): the mean of the tiles, or the class token."""
        group, firsts = process_group(rows.group), rows.firsts
        if group is None:
            slides = rows.apart(x)
            return torch.stack([slide[1:].mean(0) if self.global_pool else slide[0] for slide in slides])
        # from shards: gradients come out right if the trainer averages them over the ranks
        return mean_of(x[:, firsts:], None, group) if self.global_pool else gather_sequence(x[:, :firsts], group)[:, 0]

    def _tiles(self, x: Tensor, padding_mask: Tensor | None, rows: Sequences) -> Tensor:
        """The tiles' rows without the class token, where the tiles were."""
        if padding_mask is None:
            return x[:, rows.firsts :]
        found = x.new_zeros(*padding_mask.shape, x.shape[-1])
        tiles = torch.cat([slide[1:] for slide in rows.apart(x)])
        return found.index_put((~padding_mask.to(x.device),), tiles)


def slide_pattern(max_wsi_size: int = 262144, tile_size: int = 256) -> DilatedPattern:
    """Makes the pattern of the released models: rule torchscale, rates 1, 2, 4, 8 and 16.

    The five segment lengths grow geometrically from 1024 tokens to about (max_wsi_size / tile_size)², the most tiles on
    a slide. Both arguments are in pixels.

    Examples:
        >>> models.slide_pattern()
        DilatedPattern.torchscale(segment_lengths=[1024, 5792, 32768, 185363, 1048576], dilation_rates=[1, 2, 4, 8, 16])
    """
    across = check_int("max_wsi_size", max_wsi_size) // check_int("tile_size", tile_size)
    if across < 32:
        raise ValueError(f"max_wsi_size must be 32 tiles or more, got {max_wsi_size} with tile_size {tile_size}")
    top = int(math.log2(across**2))  # floored, as released
    return DilatedPattern.torchscale([int(2 ** (10 + (top - 10) * step / 4)) for step in range(5)], (1, 2, 4, 8, 16))


def sizes_of(state: weights.State, said: str) -> dict[str, Any]:
    """Width, depth and in_chans of the weights of a slide encoder."""
    embed_dim, in_chans = weights.matrix(state, "patch_embed.proj.weight", said)
    inner, _ = weights.matrix(state, "encoder.layers.0.ffn.fc1.weight", said)
    mlp_ratio = (inner + 0.5) / embed_dim  # the product with embed_dim will be rounded down
    depth = weights.depth(state, "encoder.layers.")
    return {"embed_dim": embed_dim, "in_chans": in_chans, "depth": depth, "mlp_ratio": mlp_ratio}
