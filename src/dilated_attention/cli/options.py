"""The options that several commands take, how their numbers are read (64k tokens, 80GB, 10us), and what is checked.

Tokens, segment lengths and rates count by 1024, as people do who say 64k. Bytes follow their units: GB is 1000³ and
GiB is 1024³. Sizes and times need a unit, because nobody means 80 bytes or 10 seconds per hop. The parser
calls the readers, and says which option is wrong. Help needs no torch, and so this file imports none.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilated_attention.show import charts

if TYPE_CHECKING:
    import torch

    from dilated_attention.advice import Workload
    from dilated_attention.pattern import Pattern

BINARY = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4, "b": 10**9}
DECIMAL = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50,
}  # fmt: skip
MICROSECONDS = {"": 10**6, "m": 1000, "u": 1, "µ": 1, "μ": 1}  # the sign, and the Greek letter
NUMBER = r"([0-9]{1,3}(?:,[0-9]{3})+|(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*"
POWER = re.compile(r"\s*([0-9]{1,6})\s*(?:\^|\*\*)\s*([0-9]{1,3})\s*")
DTYPES = ("float64", "float32", "bfloat16", "float16")
COUNTING = "65,536, 2^16, 1e9, 64k (k, M, G and T count by 1024) or 1B (10^9)"


def count(text: str, least: int = 1, most: int | None = None) -> int:
    """Tokens, segment lengths, dilation rates or ranks."""
    what = f"a whole number of {least} {'or more' if most is None else f'to {most:,}'}, such as {COUNTING}"
    power = POWER.fullmatch(text)
    number = int(power[1]) ** int(power[2]) if power else _read(text, BINARY, "(?i:([kmgtb])?)", what, least)
    if number % 1 or not least <= number <= (most or number):
        raise ArgumentTypeError(f"{text!r} is not {what}")
    return int(number)


heads = partial(count, most=2**14)
index = partial(count, least=0)  # of a token or a head


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def written(number: int) -> str:
    """As `count` reads it: 64k for 65536."""
    power = next(power for power in (4, 3, 2, 1, 0) if number % 1024**power == 0)
    return f"{number // 1024**power}{['', 'k', 'M', 'G', 'T'][power]}"


def span(text: str) -> tuple[int, int]:
    """From a token up to another one, which is the first outside: 0:4k."""
    start, stop = text.split(":")
    return index(start), count(stop)


def _read(text: str, factors: Mapping[str, float], unit: str, what: str, least: float) -> float:
    """The number times its unit: a regular expression, whose group is the prefix."""
    found = re.fullmatch(NUMBER + unit, text.strip())
    if found:
        number = float(re.sub("[_,]", "", found[1])) * factors[(found[2] or "").lower()]
        if least <= number < math.inf:
            return number
    raise ArgumentTypeError(f"{text!r} is not {what}")


size = partial(  # in bytes: 80GB are 80 thousand million, 24GiB are 24 times 1024³
    _read, factors=DECIMAL, unit=r"(?=\S)(?i:([kmgtp]i?)?b?)", least=1,
    what="a size of a byte or more with its unit, such as 80GB or 24GiB",
)  # fmt: skip
speed = partial(  # operations per second; fewer than a million are a slip: a unit was left out
    _read, factors=DECIMAL, unit="(?i:([kmgtp])?(?:flops|flop/s)?)", least=10**6,
    what="operations per second such as 400T or 4e14, of 1M or more",
)  # fmt: skip

seconds = partial(_read, factors={"": 1}, unit="()", what="seconds, more than 0", least=1e-9)
number = partial(_read, factors={"": 1}, unit="()", what="a number of 0 or more", least=0)


def bandwidth(text: str) -> float:
    """Bytes per second. Here b and B differ: 400Gb/s, 400Gbps and 400Gbit/s count bits."""
    what = "bytes per second such as 50GB/s, or bits such as 400Gbit/s, of 1 or more"
    number = _read(text, DECIMAL, r"(?=\S)([kKMGTP]i?)?(?:B|b|bit)?(?:/s|ps)?", what, 1)
    return number / 8 if "b" in text else number


def latency(text: str) -> float:
    """Seconds."""
    return _read(text, MICROSECONDS, "([muµμ])?s", "a time with its unit, such as 10us or 0.2ms", 0) / 10**6


Option = tuple[list[str], dict[str, Any]]  # what `add_argument` takes


def option(names: str, metavar: str | None, text: str, read: Any = None, default: Any = None, **more: Any) -> Option:
    """An option or, by a name without dashes, an argument. Help says its default; ``read`` is its type."""
    text += "  [default: %(default)s]" if default else ""
    return names.split(), {"metavar": metavar, "help": text, "type": read, "default": default, **more}


def flag(name: str, text: str) -> Option:
    return [name], {"action": "store_true", "help": text}


def defaults(given: Namespace) -> dict[str, Any]:
    """Of the options, from the argument before them: a length, or what `suggest --json` wrote."""
    source = getattr(given, "suggestion", None)
    if source is None:
        return {"tokens": given.length} if getattr(given, "length", None) else {}
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        return {name: value if value is True else str(value) for name, value in json.loads(text)["options"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"({type(error).__name__}: {error})"
        raise ValueError(f"{source} holds nothing that `suggest --json` wrote {why}") from error


def pattern(given: Namespace) -> Pattern:
    from dilated_attention.pattern import DilatedPattern

    if not given.pattern:
        return DilatedPattern.of(given.rule, given.segment_lengths, given.dilation_rates)
    if given.segment_lengths or given.dilation_rates:
        raise ValueError("--pattern says all branches: leave out -w, -r and --rule")
    found: Pattern = given.pattern
    return found


def patterns(file: Path) -> Any:
    """Those that `fit` wrote."""
    from dilated_attention.models.transformer import read_pattern

    try:
        return read_pattern(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{file} holds no pattern that `fit` wrote ({type(error).__name__}: {error})") from error


def branches(text: str) -> Pattern:
    """A pattern as Python writes it: Window(1023), Strided(64); or Pattern([...], counts="sum")."""
    from dilated_attention.branches import KINDS, Blocks
    from dilated_attention.pattern import Pattern

    made: dict[str, Callable[..., Any]] = {
        "Pattern": Pattern, "Blocks.random": Blocks.random, "Blocks.bigbird": Blocks.bigbird,
        **{kind.__name__: kind for kind in KINDS.values()},
    }  # fmt: skip

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.List | ast.Tuple):
            return [value(one) for one in node.elts]
        if not isinstance(node, ast.Call):
            return ast.literal_eval(node)
        name = ast.unparse(node.func).removeprefix("da.")
        if name not in made:
            raise ValueError(f"there is no {name}: use {', '.join(made)}")
        return made[name](*map(value, node.args), **{str(one.arg): value(one.value) for one in node.keywords})

    try:
        found = value(ast.parse(f"[{text}]", mode="eval").body)
        return found[0] if len(found) == 1 and isinstance(found[0], Pattern) else Pattern(found)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise ArgumentTypeError(f"{text!r} is no pattern ({error}): write it as Window(1023), Strided(64)") from error


SUGGESTION = option(
    "suggestion", "SUGGESTION",
    "A file that `suggest --json` wrote, or - for a pipe from it. Options replace what it says.", nargs="?",
)  # fmt: skip
JSON = flag("--json", "Print JSON, for programs.")
TOKENS = option("-n --tokens", "N", f"The length of the sequence, written as {COUNTING}.", count)
PATTERN = (
    option("-w --segment-lengths", "W,W,...", "The segment lengths, written as for -n.", counts),
    option("-r --dilation-rates", "R,R,...", "The dilation rates, one for each length.", counts),
    option("--pattern", "BRANCHES",
           'Instead of -w, -r and --rule any branches, as in Python: "Window(1023), Prefix(4), Strided(64)", or '
           "\"Pattern([...], counts='sum')\".", branches),
)  # fmt: skip
RULE = option(
    "--rule", "RULE", "How heads share the branches, the pairs of a segment length and a rate: longnet (as in the "
    "paper), torchscale (as in the released code) or head_groups (one branch per head; the default of the modules).",
    default="longnet",
)  # fmt: skip
SHAPE = (
    option("--heads", "H", "The number of query heads.", heads, 8),
    option("--kv-heads", "H", "The number of key/value heads; --heads by default.", heads),
    flag("--causal", "No query sees later tokens."),
)
CALL = (
    option("--head-dim", "D", "The channels of one head.", count, 64),
    option("--batch", "B", "The number of sequences at a time.", count, 1),
    option("--dtype", "DTYPE", f"The dtype: {', '.join(DTYPES)}.", default="bfloat16"),
    option("--ranks", "P", "The number of devices that share the sequence.", count, 1),
    option("--memory", "SIZE", "The memory that one attention call may take on one device, without weights and other "
           "layers: 20GB (1000³) or 24GiB (1024³).", size),
)  # fmt: skip
DEVICE = option("--device", "DEVICE", "cpu, cuda or cuda:1. By default cuda, if there is any.", default="")

MODEL = (  # a language model and text for it
    option("checkpoint", "CHECKPOINT",
           "What examples/train_lm.py wrote, a file or its folder; or a folder of a Hugging Face decoder.", Path),
    option("--data", "FILE", "Text files, or folders, whose .txt, .md and .py files are read.", Path, nargs="+",
           required=True),
    option("-n --tokens", "N", "The text is cut into rows of so many tokens.", count, 2048),
    option("--rows", "B", "At most so many rows, from all over the text.", count, 8),
    option("--tokenizer", "NAME", "The model's: a name or a folder.  [default: in its folder, or bytes]"),
    option("--chart", "FILE", "Also draw an .svg file.", Path), DEVICE, JSON,
)  # fmt: skip


class Refused(Exception):  # noqa: N818 - it says what happened
    """What the user asked for cannot be done. The message is one line that says why and what to do."""


@contextmanager
def refusing() -> Iterator[None]:
    """Around the checking of arguments only: a ValueError in here is the user's, elsewhere it is a fault of ours."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:  # the last of a name that is too long, for example
        raise Refused(str(error)) from error


def dtype(text: str) -> torch.dtype:
    import torch

    kind = text.lower().replace("fp", "float").replace("bf1", "bfloat1")
    if kind not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {text!r}")
    return getattr(torch, kind)  # type: ignore[no-any-return]


def device(text: str) -> torch.device:
    """cpu, or a CUDA device that is there; "" is cuda, if there is one."""
    import torch

    there = torch.cuda.device_count()
    known = ["cpu", *["cuda"][:there], *(f"cuda:{index}" for index in range(there))]
    if text and text not in known:
        raise ValueError(f"--device must be one of {', '.join(known)}, got {text!r}")
    return torch.device(text or known[min(there, 1)])


def file(name: str, path: Path, endings: tuple[str, ...]) -> Path:
    """A file that can be written, whose name says what it is."""
    if path.suffix.lower() not in endings or path.is_dir():
        raise ValueError(f"{name} must be a file, and end in {', '.join(endings)}, got {str(path)!r}")
    charts.writable(path.parent, name)
    return path


def model_and_rows(given: Namespace) -> tuple[Any, bytes, torch.Tensor]:
    """What MODEL names, in bfloat16 on CUDA: a model, and text, of which rows are on its device."""
    from dilated_attention.integrations.stored import stored
    from dilated_attention.models import scoring

    if given.chart is not None:
        file("--chart", given.chart, (".svg",))
    where, text = device(given.device), scoring.read(given.data)
    model = stored(given.checkpoint, given.tokenizer, where, dtype("bfloat16" if where.type == "cuda" else "float32"))
    return model, text, scoring.rows_of(model, text, given.tokens, given.rows).to(where)


def workload(given: Namespace) -> Workload:
    """What `suggest` and `plan` are about; `suggest` has no speeds."""
    from dilated_attention.advice import Workload

    known = Workload.__dataclass_fields__.keys() - {"dtype"}
    said = {name: value for name, value in vars(given).items() if name in known}
    return Workload(**said, dtype=dtype(given.dtype), is_causal=given.causal)
