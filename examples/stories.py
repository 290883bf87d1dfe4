"""Texts in which context is everything: how a name goes on can be known only from where it stood before.

    python examples/stories.py report/stories

In each text, people get new names of two letters, one for each initial: after "K" comes what came after "K" before, up
to 2,000 bytes back. Half of the texts are stories; the others are lists of names, from which it is learned sooner.
"""

import random
import re
import sys
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

TEXTS, SIZE = 1000, 2047  # bytes of each: a row of 2,048 tokens, with the one that begins it
SENTENCES = """# met # at the gate. the old dog barked at # again. it rained, and # went home. # told # a long story.
everyone in the village knew #. # sold two apples to the baker. in the evening # sang a song. a letter came for #.
# lost a shoe by the river. # waited for the last boat. the baker gave some bread to #. # and # played chess"""


def text(index: int) -> str:
    drawn, found, is_story = random.Random(index), "", index % 10 in (0, 1, 2, 3, 9)  # train_lm.py holds out the last
    initials = ascii_uppercase if is_story else drawn.sample(ascii_uppercase, drawn.randint(3, 26))
    people = [initial + drawn.choice(ascii_lowercase) for initial in initials]
    while len(found) < SIZE:
        sentence = drawn.choice(SENTENCES.replace("\n", " ").split(". ")) + ".\n" if is_story else "# "
        found += re.sub("#", lambda _: drawn.choice(people), sentence)
    return found[:SIZE]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(TEXTS):
        (folder / f"{index:04}.txt").write_text(text(index))
