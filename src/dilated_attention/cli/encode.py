"""Compute embeddings of slides from their tiles' features.

Reads the files of TRIDENT, GigaPath and STAMP. Slides that are done with the
same weights and options are not computed again. A file that cannot be encoded
is reported and left out; the exit code is then 1. After Ctrl-C, what was
written stays, and the exit code is 130.

Example: dilated-attention encode features/*.h5 --weights slide_encoder.pth --pool mean --out embeddings/
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention.bench.results import escaped
from dilated_attention.cli import options
from dilated_attention.cli.options import count, flag, option
from dilated_attention.show import charts
from dilated_attention.units import GIB, number_text, seconds_text

if TYPE_CHECKING:
    from dilated_attention.slides.encode import Job

OPTIONS = (
    option("features", "FILE", "Feature files (.h5), or folders with such files.", Path, nargs="+"),
    option("--weights", "WEIGHTS", "A .safetensors or .pth file, a folder with one, or a hub id, which is downloaded.",
           required=True),
    option("--pool", "POOL", "mean (of the tiles' outputs) or cls (the output of the class token).", required=True,
           choices=("mean", "cls")),
    option("--out", "FOLDER", "The folder for a .h5 file per slide.", Path, Path("embeddings")),
    option("--table", "FILE", "The .csv file for all embeddings.  [default: embeddings.csv in --out]", Path),
    option("--layer", "N", "Take the embedding after N layers, without the last LayerNorm; 0 is before the first."
           "  [default: after all layers and the LayerNorm]", options.index),
    option("--dtype", "DTYPE", "float32 or bfloat16.  [default: bfloat16 on CUDA, else float32]",
           choices=("float32", "bfloat16")),
    options.DEVICE,
    option("--memory", "SIZE", "About how much memory a batch may take, such as 8GB or 8GiB.  [default: half of the "
           "GPU's free memory; 4GiB on a CPU]", options.size),
    option("--tile-size", "PIXELS", "The side of a tile, for files that do not say.  [default: 256]", count),
    flag("--attention", "Also write attention maps: into the .h5, and as .png and .html."),
    option("--thumbnails", "FOLDER", "Only with --attention. A folder with a picture of each slide, named as its .h5 "
           "file (slide1.png or slide1.jpg for slide1.h5), to draw the maps over. The .h5 file needs the attributes "
           "level0_width and level0_height.", Path),
    option("--heads", "H", "The number of heads that the weights have.", count, 16, dest="num_heads"),
    option("--max-wsi-size", "PIXELS", "The longest side of a slide, as set when the weights were trained. It sets the "
           "segment lengths.", count, 262144),
    option("--slide-ngrids", "CELLS", "Positions along each side of the position grid, as set when the weights were "
           "trained.", count, 1000),
)  # fmt: skip


def run(given: Namespace) -> int:
    out, thumbnails = given.out, given.thumbnails
    with options.refusing():
        paths = _files(given.features)
        if thumbnails and not (given.attention and thumbnails.is_dir()):
            raise ValueError("--thumbnails must be a folder, and needs --attention")
        if thumbnails and thumbnails.resolve() == out.resolve():
            raise ValueError("--thumbnails and --out must be different folders: maps would replace the thumbnails")
        charts.writable(out)
        table = options.file("--table", given.table or out / "embeddings.csv", (".csv",))
    # here and not above: help needs no torch, and these take a while
    import torch

    from dilated_attention.models import SlideEncoder
    from dilated_attention.models import weights as stored
    from dilated_attention.slides import encode as work
    from dilated_attention.slides import files

    files.h5py()
    with options.refusing():
        where = options.device(given.device)
        on_cuda = where.type == "cuda"
        kind = options.dtype(given.dtype or ("bfloat16" if on_cuda else "float32"))
        located = stored.located(given.weights)
        sizes = {name: getattr(given, name) for name in ("max_wsi_size", "slide_ngrids", "num_heads")}
        model = SlideEncoder.from_pretrained(located, global_pool=given.pool == "mean", **sizes).to(where, kind)
        if given.layer is not None and given.layer > model.depth:
            raise ValueError(f"--layer must be from 0 to {model.depth}, the depth of these weights, got {given.layer}")
    budget = given.memory or (torch.cuda.mem_get_info(where)[0] // 2 if on_cuda else 4 * GIB)
    key = work.hashed(work.digest(located), given.pool, given.layer, str(kind), sizes, given.attention, thumbnails)
    job = work.Job(model, out, key, given.layer, budget, given.attention, thumbnails)
    return _run(job, paths, table, given.tile_size)


def _files(given: Sequence[Path]) -> list[Path]:
    """The files, and those in the folders. Each must have a name of its own, which its result gets."""
    found: dict[str, Path] = {}
    for path in given:
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        for file in sorted(path.glob("*.h5")) if path.is_dir() else [path]:
            if file.suffix.lower() not in (".h5", ".hdf5"):
                raise ValueError(f"only .h5 files are read, got {file}")
            if found.setdefault(file.stem, file) != file:
                same = f"these files have the same name, and so would their results: {found[file.stem]}, {file}"
                raise ValueError(f"{same}; encode them in separate runs, each with its own --out")
    if not found:
        raise ValueError(f"there is no .h5 file in {', '.join(map(str, given))}")
    return [*found.values()]


def _run(job: Job, paths: Sequence[Path], table: Path, tile_size: float | None) -> int:
    from dilated_attention.cli.output import watching
    from dilated_attention.slides import encode as work

    outcome, start, code = work.Outcome(), time.monotonic(), 130

    def told(slides: int, tiles: int, share: float, seconds: float) -> None:
        pace = f", {number_text(tiles / seconds)} tiles/s" if tiles else ""
        watch(f"{slides:,} slides{pace}", share, seconds * (1 - share) / share if share else None)

    try:
        with watching() as watch, suppress(KeyboardInterrupt):
            work.run(job, paths, outcome, tile_size=tile_size, watch=told)
            code = 0
        rows = work.write_table(job, outcome, table)
        code = code or int(bool(outcome.failed))
    except OSError as error:  # of writing: what is wrong with a file that is read, is in the outcome
        code = 130
        raise options.Refused(f"cannot write {error.filename or job.out}: {error.strerror or error}") from error
    finally:
        skipped = [f"skipped: {path}: {reason}" for path, reason in outcome.failed.items()]
        for text in [*(f"warning: {text}" for text in outcome.warned), *skipped]:
            print(escaped(text), file=sys.stderr)
        tiles, seconds = sum(slide.tiles for slide in outcome.encoded), seconds_text(time.monotonic() - start)
        rest = f"{len(outcome.kept):,} were encoded before; {len(outcome.failed):,} skipped"
        rest += "; interrupted: run the same command again to continue" * (code == 130)
        print(f"slides encoded: {len(outcome.encoded):,} ({tiles:,} tiles, {seconds}); {rest}")
    print(f"written: {table}, slides: {rows:,}")
    return code
