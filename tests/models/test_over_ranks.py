"""One slide cut over several ranks: the same embeddings and gradients. Ranks import this file: it stays small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dilated_attention import shard_sequence
from dilated_attention.models import SlideEncoder
from dilated_attention.ranks import pool
from tests.models.golden import COORDS, PATTERN, TILES, UNION, gradients, small
from tests.over_ranks import changed, raised, world


def over_ranks(make: Callable[..., SlideEncoder], options: dict[str, Any], tiles: Tensor, coords: Tensor) -> Any:
    """Of this rank: the embeddings, the tiles' outputs, and gradients as averaged by a trainer."""
    model = make(**options)
    mine = shard_sequence(tiles, world()), shard_sequence(coords, world())
    torch.manual_seed(torch.distributed.get_rank())  # ranks need not agree
    layers = model(*mine, all_layer_embed=True, group=world())
    outputs = model(*mine, per_tile=True, group=world())[0].detach()
    sum(x.square().sum() for x in layers).backward()
    found = gradients(model)
    for x in found:
        torch.distributed.all_reduce(x)
        x /= torch.distributed.get_world_size()
    return torch.stack(layers).detach(), outputs, found


@pytest.mark.parametrize("global_pool", [False, True])
def test_a_slide_over_ranks_is_the_slide(global_pool: bool) -> None:
    options: dict[str, Any] = {"global_pool": global_pool, "checkpoint_activations": global_pool}
    if global_pool:
        options["pattern"] = UNION
    model = plain(**options)
    layers = model(TILES, COORDS, all_layer_embed=True)
    sum(x.square().sum() for x in layers).backward()
    outputs = model(TILES, COORDS, per_tile=True)[0].detach()
    found = pool(3).run(over_ranks, plain, options, TILES, COORDS)
    for embeddings, _, grads in found:
        torch.testing.assert_close(embeddings, torch.stack(layers).detach(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(grads, gradients(model), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(torch.cat([x for _, x, _ in found], 1), outputs, atol=1e-12, rtol=1e-12)


def plain(**options: Any) -> SlideEncoder:
    return changed(small(**{"pattern": PATTERN, **options}).double())


def without_a_part_over_ranks(mask: Tensor) -> tuple[list[Tensor], list[str]]:
    """What drop path leaves of slides; and the errors of three wrong calls, of which one is wrong on rank 1 alone."""
    model = small(dropout=0.0, drop_path_rate=1.0, depth=3).double().train()
    torch.manual_seed(torch.distributed.get_rank())
    mine = shard_sequence(TILES, world()), shard_sequence(COORDS, world())
    layers = [x.detach() for x in model(*mine, all_layer_embed=True, group=world())]
    far = COORDS - 10**6 if torch.distributed.get_rank() == 1 else COORDS
    tiles = TILES.float()
    return layers, [
        raised(small(), tiles, COORDS, padding_mask=mask, group=world()),
        raised(small(), tiles[:, :0], COORDS[:, :0], group=world()),
        raised(small(), tiles, far, group=world()),
    ]


def test_ranks_drop_the_same_slides_and_refuse_the_same_calls() -> None:
    (first, _), *others = found = pool(3).run(without_a_part_over_ranks, torch.zeros(2, 41, dtype=torch.bool))
    for other, _ in others:
        torch.testing.assert_close(other, first)
    for rank, (_, (masked, empty, far)) in enumerate(found):
        assert "padding_mask cannot be given together with a group" in masked
        assert "a slide has no tiles, or those of rank 0" in empty
        assert "beyond the grid" in far
        assert rank == 1 or "rank 1" in far
