"""Many slides: sorted by length, batched to a memory budget and encoded; each result is written whole.

A result keeps a key, which stands for the weights, the options and the feature file. Where the key is the same, nothing
is computed again.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dilated_attention
from dilated_attention import charts
from dilated_attention.models import SlideEncoder
from dilated_attention.slides import files
from dilated_attention.slides.files import BadFile, Slide

EMBEDDING = "features"
Read = tuple[Slide, Tensor, Tensor]  # with its tiles and coordinates
Batch = list[tuple[Slide, tuple[Tensor, Tensor] | BadFile]]  # tiles and coordinates, or what is wrong with the file
Also = Callable[[SlideEncoder, Slide, Tensor, Tensor, Path], dict[str, Any]]
Watch = Callable[[int, int, float, float], None]  # slides and tiles done, share of the tiles, seconds since the start


@dataclass(frozen=True)
class Job:
    model: SlideEncoder
    out: Path
    key: str  # of the weights and the options
    layer: int | None = None  # the embedding after so many layers; None: after all, and the last LayerNorm
    budget: int = 2**32  # bytes
    also: Also | None = None  # makes more arrays for a result
    beside: tuple[str, ...] = ()  # endings of the files that it writes beside a result

    def result(self, slide: Slide) -> Path:
        return self.out / f"{slide.name}.h5"

    def slide_key(self, slide: Slide) -> str:
        return hashed(self.key, *slide.stamp, slide.tiles, slide.tile_size, slide.pixels)


@dataclass
class Outcome:
    encoded: list[Slide] = field(default_factory=list)
    kept: list[Slide] = field(default_factory=list)  # from an earlier run
    failed: dict[Path, str] = field(default_factory=dict)  # why
    warned: list[str] = field(default_factory=list)

    @property
    def slides(self) -> list[Slide]:
        return sorted([*self.kept, *self.encoded], key=lambda slide: slide.name)


def hashed(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def digest(path: Path) -> str:
    """The hash of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def run(job: Job, paths: Sequence[Path], outcome: Outcome, *, tile_size: float | None, watch: Watch) -> None:
    """Encode what is not there yet. ``outcome`` says how far it came, also after an interruption."""
    todo: list[Slide] = []
    for path in paths:
        with _reported(path, outcome):
            slide = files.look(path, tile_size)
            files.check_width(slide, job.model.patch_embed.proj.in_features)
            (outcome.kept if _is_there(job, slide) else todo).append(slide)
    total, tiles, start = sum(slide.tiles for slide in todo), 0, time.monotonic()
    watch(0, 0, 0.0, 0.0)
    for batch in _read_ahead(batches(todo, tile_bytes(job.model), job.budget)):
        _finish(job, batch, outcome)
        tiles += sum(slide.tiles for slide, _ in batch)
        watch(len(outcome.encoded), tiles, tiles / total, time.monotonic() - start)


def _is_there(job: Job, slide: Slide) -> bool:
    found = files.written(job.result(slide), ())
    if found is None or "key" not in found[1]:
        if job.result(slide).exists():
            raise BadFile(f"{job.result(slide)} exists and is not a result of this command: name another --out")
        return False
    whole = all(job.result(slide).with_suffix(ending).exists() for ending in job.beside)
    return whole and bool(found[1]["key"] == job.slide_key(slide))


@contextlib.contextmanager
def _reported(path: Path, outcome: Outcome) -> Iterator[None]:
    """Around one file: what is wrong with it is written down, and the others go on."""
    try:
        yield
    except (BadFile, torch.OutOfMemoryError) as error:
        outcome.failed[path] = " ".join(str(error).split())


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """On a CPU, torch tells of too little memory by another error."""
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


# --- batches ----------------------------------------------------------------------------------------------------


def tile_bytes(model: SlideEncoder) -> int:
    """About how much one tile takes while it goes through a layer."""
    layer: Any = model.encoder.layers[0]
    size, width, inner = model.cls_token.element_size(), model.embed_dim, int(layer.ffn.fc1.out_features)
    features = int(model.patch_embed.proj.in_features) * (4 + size)  # as read, and in the model's dtype
    return features + 10 * size * width + (8 + 2 * size) * inner  # GELU is in float32


def batches(slides: Sequence[Slide], per_tile: int, budget: int) -> list[list[Slide]]:
    """Slides of similar length together, the longest first, since what does not fit then shows at once."""
    found: list[list[Slide]] = []
    for slide in sorted(slides, key=lambda slide: (-slide.tiles, slide.name)):
        if found and (len(found[-1]) + 1) * found[-1][0].tiles * per_tile <= budget:
            found[-1].append(slide)
        else:
            found.append([slide])
    return found


def _read_ahead(planned: Sequence[list[Slide]]) -> Iterator[Batch]:
    """Each batch with its tiles, or what is wrong with them; the next one is read meanwhile."""

    def read(batch: list[Slide]) -> Batch:
        return [(slide, _read_one(slide)) for slide in batch]

    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(read, planned[0]) if planned else None
        for following in [*planned[1:], None]:
            now, coming = coming, reader.submit(read, following) if following else None
            if now is not None:
                yield now.result()


def _read_one(slide: Slide) -> tuple[Tensor, Tensor] | BadFile:
    try:
        return files.read(slide)
    except BadFile as error:
        return error


# --- one batch --------------------------------------------------------------------------------------------------


def _finish(job: Job, batch: Batch, outcome: Outcome) -> None:
    """Encode a batch and write its results. If it does not fit in memory, its slides go one by one."""
    good: list[Read] = []
    for slide, content in batch:
        with _reported(slide.path, outcome):
            if isinstance(content, BadFile):
                raise content
            outcome.warned += [
                f"{slide.path}: {text}" for text in files.check_places(slide, content[1], job.model.slide_ngrids)
            ]
            good.append((slide, *content))
    embeddings: list[Tensor] | None = None
    if len(good) > 1:
        with contextlib.suppress(torch.OutOfMemoryError), _memory():
            embeddings = embed(job.model, good, job.layer)
    for index, one in enumerate(good):
        with _reported(one[0].path, outcome), _memory():
            embedding = embeddings[index] if embeddings else embed(job.model, [one], job.layer)[0]
            if not bool(embedding.isfinite().all()):
                raise BadFile(f"its embedding is not finite: features as large as {one[1].abs().max():g} overflow")
            arrays = {EMBEDDING: embedding.float().numpy()}
            if job.also is not None:
                arrays |= job.also(job.model, *one, job.out)
            files.write(job.result(one[0]), arrays, _attributes(job, one[0]))
            outcome.encoded.append(one[0])


@torch.inference_mode()
def embed(model: SlideEncoder, slides: Sequence[Read], layer: int | None) -> list[Tensor]:
    """The embeddings, on the host. Slides are packed: none depends on the others."""
    device = model.cls_token.device
    longest = max(slide.tiles for slide, _, _ in slides)
    padded = [torch.nn.functional.pad(tiles, (0, 0, 0, longest - len(tiles))) for _, tiles, _ in slides]
    places = [torch.nn.functional.pad(coords, (0, 0, 0, longest - len(coords))) for _, _, coords in slides]
    lengths = torch.tensor([slide.tiles for slide, _, _ in slides])
    mask = torch.arange(longest) >= lengths[:, None]
    dtype = model.cls_token.dtype
    found = model(
        torch.stack([tiles.to(device, dtype) for tiles in padded]),
        torch.stack(places),
        all_layer_embed=layer is not None,
        padding_mask=mask if bool(mask.any()) else None,
        tile_size=[slide.tile_size for slide, _, _ in slides],
    )[-1 if layer is None else layer]
    return [*found.cpu()]


def _attributes(job: Job, slide: Slide) -> dict[str, Any]:
    return {
        "key": job.slide_key(slide), "slide": slide.name, "tiles": slide.tiles, "tile_size": slide.tile_size,
        "layer": "last" if job.layer is None else job.layer, "pool": "mean" if job.model.global_pool else "class token",
        "dtype": str(job.model.cls_token.dtype).removeprefix("torch."),
        "version": dilated_attention.__version__,
    }  # fmt: skip


# --- the table --------------------------------------------------------------------------------------------------


def write_table(job: Job, slides: Sequence[Slide], file: Path) -> int:
    """One row per slide: its name, tiles and embedding, as .csv. Returns the number of rows."""
    rows: list[Mapping[str, Any]] = []
    for slide in slides:
        found = files.written(job.result(slide), [EMBEDDING])
        if found is None:
            raise ValueError(f"{job.result(slide)} was removed before {file} was written: run the command again")
        values = found[0][EMBEDDING].tolist()
        numbers = {f"e{index}": value for index, value in enumerate(values)}
        rows.append({"slide": slide.name, "file": str(slide.path), "tiles": slide.tiles, **numbers})
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["slide", "file", "tiles"])
    writer.writeheader()
    writer.writerows(rows)
    charts.write(file, text.getvalue().encode())
    return len(rows)
