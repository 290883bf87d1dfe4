"""Many slides: sorted by length, batched to a memory budget and encoded; each result is written whole.

A result keeps a key, which stands for the weights, the options and the feature file. Where the key is the same, nothing
is computed again.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import dilated_attention
from dilated_attention.models import SlideEncoder
from dilated_attention.models.weights import short
from dilated_attention.show import charts
from dilated_attention.slides import files, maps
from dilated_attention.slides.files import BadFile, Slide

EMBEDDING = "features"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # what no other slide could be written after
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # what a spreadsheet computes, if a text begins with it
Read = tuple[Slide, Tensor, Tensor]  # with its tiles and coordinates
Watch = Callable[[int, int, float, float], None]  # slides and tiles done, share of the tiles, seconds since the start


@dataclass(frozen=True)
class Job:
    model: SlideEncoder
    out: Path
    key: str  # of the weights and the options
    layer: int | None = None  # the embedding after so many layers; None: after all, and the last LayerNorm
    budget: int = 2**32  # bytes
    maps: bool = False  # also draws attention maps, into files beside a result
    thumbnails: Path | None = None  # the folder with pictures of slides, under the maps

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
    # what a tile takes in a layer, about: its hidden row, in float32 and in the model's dtype, and its features
    per_tile = 24 * (job.model.patch_embed.proj.in_features + job.model.encoder.layers[0].ffn.fc1.out_features)
    planned = batches(todo, per_tile, job.budget)
    for batch, ready in zip(planned, _read_ahead(job, planned, outcome), strict=True):
        _finish(job, ready, outcome)
        tiles += sum(slide.tiles for slide in batch)
        watch(len(outcome.encoded), tiles, tiles / total, time.monotonic() - start)


def _is_there(job: Job, slide: Slide) -> bool:
    """Whether all of a result is there. Raises rather than replace a file that is none of ours."""
    result = job.result(slide)
    arrays, about = files.written(result, [EMBEDDING])
    ours = [".h5", *str(about.get("beside", "")).split()] if "key" in about else []
    wanted = [".h5", *(maps.ENDINGS if job.maps else ())]
    there = [ending for ending in wanted if result.with_suffix(ending).exists()]
    if others := [result.with_suffix(ending) for ending in there if ending not in ours]:
        raise BadFile(f"{others[0]} exists and is not a result of this command: name another --out")
    is_whole = getattr(arrays.get(EMBEDDING), "shape", None) == (job.model.embed_dim,)
    return is_whole and there == wanted and str(about["key"]) == job.slide_key(slide)


@contextlib.contextmanager
def _reported(path: Path, outcome: Outcome) -> Iterator[None]:
    """Around one slide: what is wrong with it is written down in one line, and the others go on."""
    try:
        with _memory():
            yield
    except (BadFile, OSError) as error:
        if getattr(error, "errno", None) in DISK:
            raise
        outcome.failed[path] = short(error)


@contextlib.contextmanager
def _memory() -> Iterator[None]:
    """Too little memory is a reason to leave a slide out. On a CPU, torch tells of it by a RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise BadFile(str(error) or "it does not fit in memory") from error
        raise


# --- batches ----------------------------------------------------------------------------------------------------


def batches(slides: Sequence[Slide], per_tile: int, budget: int) -> list[list[Slide]]:
    """Slides of similar length together, the longest first, since what does not fit then shows at once."""
    found: list[list[Slide]] = []
    for slide in sorted(slides, key=lambda slide: (-slide.tiles, slide.name)):
        if not found or (len(found[-1]) + 1) * found[-1][0].tiles * per_tile > budget:
            found.append([])
        found[-1].append(slide)
    return found


def _read_ahead(job: Job, planned: Sequence[list[Slide]], outcome: Outcome) -> Iterator[list[Read]]:
    """The slides of each batch that can be read, with their tiles; the next batch is read meanwhile."""

    def read(batch: list[Slide]) -> list[Read]:
        found: list[Read] = []
        for slide in batch:
            with _reported(slide.path, outcome):
                tiles, coords = files.read(slide)
                if text := files.check_places(slide, coords, job.model.slide_ngrids):
                    outcome.warned.append(f"{slide.path}: {text}")
                found.append((slide, tiles, coords))
        return found

    now = None
    with ThreadPoolExecutor(1) as reader:
        for batch in [*planned, None]:
            coming = None if batch is None else reader.submit(read, batch)
            if now is not None:
                yield now.result()
            now = coming


# --- one batch --------------------------------------------------------------------------------------------------


def _finish(job: Job, batch: list[Read], outcome: Outcome) -> None:
    """Encode a batch and write its results. If it does not fit in memory, its slides go one by one."""
    embeddings: list[Tensor] = []
    if len(batch) > 1:
        with contextlib.suppress(BadFile), _memory():
            embeddings = embed(job.model, batch, job.layer)
    for index, (slide, tiles, coords) in enumerate(batch):
        with _reported(slide.path, outcome):
            embedding = embeddings[index] if embeddings else embed(job.model, [batch[index]], job.layer)[0]
            if not bool(embedding.isfinite().all()):
                raise BadFile(f"its embedding is not finite: features as large as {tiles.abs().max():g} overflow")
            arrays, beside = maps.beside(job.model, slide, tiles, coords, job.thumbnails) if job.maps else ({}, {})
            _write(job, slide, {EMBEDDING: embedding.float().numpy(), **arrays}, beside)
            outcome.encoded.append(slide)


@torch.inference_mode()
def embed(model: SlideEncoder, slides: Sequence[Read], layer: int | None) -> list[Tensor]:
    """The embeddings, on the host. Slides are packed: none depends on the others."""
    said, tiles, coords = zip(*slides, strict=True)
    lengths = torch.tensor([*map(len, tiles)])
    mask = torch.arange(int(lengths.max())) >= lengths[:, None]
    found = model(
        pad_sequence([*tiles], batch_first=True).to(model.cls_token),
        pad_sequence([*coords], batch_first=True),
        all_layer_embed=layer is not None,
        padding_mask=mask if bool(mask.any()) else None,
        tile_size=[slide.tile_size for slide in said],
    )[-1 if layer is None else layer]
    return [*found.cpu()]


def _write(job: Job, slide: Slide, arrays: dict[str, Any], beside: dict[str, bytes]) -> None:
    """The result first: it says which files beside it are ours, also if this is interrupted."""
    before = str(files.written(job.result(slide), ())[1].get("beside", "")).split()
    attributes = {
        "key": job.slide_key(slide), "slide": charts.plain(slide.name), "tiles": slide.tiles,
        "tile_size": slide.tile_size, "layer": "last" if job.layer is None else job.layer,
        "pool": "mean" if job.model.global_pool else "class token", "beside": " ".join({*before, *beside}),
        "dtype": str(job.model.cls_token.dtype).removeprefix("torch."), "version": dilated_attention.__version__,
    }  # fmt: skip
    files.write(job.result(slide), arrays, attributes)
    for ending, content in beside.items():
        charts.write(job.result(slide).with_suffix(ending), content)


# --- the table --------------------------------------------------------------------------------------------------


def write_table(job: Job, outcome: Outcome, file: Path) -> int:
    """One row per slide: its name, tiles and embedding, as .csv. Returns the number of rows."""
    rows: list[Any] = [["slide", "file", "tiles", *(f"e{number}" for number in range(job.model.embed_dim))]]
    for slide in sorted([*outcome.kept, *outcome.encoded], key=lambda slide: slide.name):
        with _reported(slide.path, outcome):
            found: Any = files.written(job.result(slide), [EMBEDDING])[0].get(EMBEDDING)
            if getattr(found, "shape", None) != (job.model.embed_dim,):
                raise BadFile(f"{job.result(slide)} was removed or damaged before {file} was written: run this again")
            texts = (charts.plain(str(text)) for text in (slide.name, slide.path))
            names = (f"'{text}" if text.startswith(FORMULA) else text for text in texts)
            rows.append([*names, slide.tiles, *found.tolist()])
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    charts.write(file, text.getvalue().encode())
    return len(rows) - 1
