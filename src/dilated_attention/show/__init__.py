"""Pictures of a pattern: which keys each query sees, and what follows from it.

`View.of` counts what there is to see; `text` draws it for a terminal, `save` writes a page (.html) or a picture
(.png, .svg). Only pictures need matplotlib.

`cells`: pairs in a cell. `coverage`: rows that some branch covers. `reach`: receptive fields. `kinds`: one head.
`travel`: what goes between ranks. `seen`: all of it. `words`: the sentences, `text`, `picture`, `page`: the drawings.
"""

from dilated_attention.show.save import save
from dilated_attention.show.seen import View
from dilated_attention.show.text import text

__all__ = ["View", "save", "text"]
