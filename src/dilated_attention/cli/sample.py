"""Write on from a prompt, with a language model that examples/train_lm.py trained.

A folder stands for its newest checkpoint. No code in it runs. The text ends
where the model ends it, or after --max-new-tokens.

Example: dilated-attention sample runs/one --prompt "def forward("
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from dilated_attention.cli import options
from dilated_attention.cli.options import option
from dilated_attention.show import charts

OPTIONS = (
    option("checkpoint", "CHECKPOINT", "The --out of a training, or one file step-….pt in it.", Path),
    option("--prompt", "TEXT", "The beginning of the text.  [default: none, it begins anew]"),
    option("--max-new-tokens", "N", "How many tokens follow at most.", options.count, 200),
    option("--temperature", "T", "0 takes the likeliest token; a larger number draws more freely.",
           options.number, 0.8),
    option("--seed", "N", "The seed: another number draws another text.  [default: 0]", options.index, 0),
    option("--tokenizer", "NAME", "The one of the training, if it had one: a name or a folder."),
    options.DEVICE, options.JSON,
)  # fmt: skip


def run(given: Namespace) -> None:
    import torch

    from dilated_attention.cli.output import print_json
    from dilated_attention.models import LongNetLM, weights
    from dilated_attention.models.generate import BEGIN

    with options.refusing():
        where = options.device(given.device)
        found, said = weights.checkpoint(given.checkpoint)
        model = LongNetLM.of_checkpoint(found, said).to(where)
        trained = found.get("tokenizer")
        if trained and not given.tokenizer:
            raise ValueError(f"{said} was trained with a tokenizer: give --tokenizer {trained}")
        tokenizer, prompt = None, (given.prompt or "").encode(errors="surrogateescape")
        if given.tokenizer:
            known = charts.library("transformers", "--tokenizer needs", "models")
            tokenizer = known.AutoTokenizer.from_pretrained(given.tokenizer)
        ids = [BEGIN, *prompt] if tokenizer is None else tokenizer(prompt.decode(errors="replace"))["input_ids"]
        if not ids or max(ids) >= model.config.vocab_size:
            wanted = "give a --prompt" if not ids else "it was trained with a tokenizer, or with another one"
            raise ValueError(f"{said} cannot write on from this prompt: {wanted}")
    drawn = torch.Generator(where).manual_seed(given.seed)
    how = {"temperature": given.temperature, "generator": drawn, "stop": None if tokenizer else BEGIN}
    new = model.generate_tokens([ids], given.max_new_tokens, **how)[0].tolist()
    every = [*ids, *new]
    text = tokenizer.decode(every) if tokenizer else bytes(x for x in every if x < BEGIN).decode(errors="replace")
    if given.json:
        print_json({"checkpoint": said, "step": found.get("step"), "text": text, "prompt_tokens": ids, "tokens": new})
    else:
        print(text)
