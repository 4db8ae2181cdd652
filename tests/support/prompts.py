"""Prompts that the bundled model has something to say to."""

from __future__ import annotations

DOCUMENT = "tell me a story of the little red riding hood"
"""The prompt of the LMI document's first request."""

_SENTENCES = (
    "Once upon a time there was a little girl who lived with her mother at the edge of the woods.",
    "Her grandmother had made her a red hood, and she wore it every day.",
    'One sunny day her mother said, "Take this basket of bread and butter to your grandmother."',
    "The girl walked along the path, and the birds sang in the trees.",
    "In the middle of the wood she met a big wolf.",
    '"Where are you going, little girl?" asked the wolf.',
    '"To my grandmother\'s cottage," she said.',
    "The wolf ran ahead, and knocked at the door.",
    "The flowers were yellow and blue, and she picked a big bunch of them.",
    "A woodcutter heard the noise, and came with his axe.",
    "The old woman was ill in bed and very tired.",
    "They all sat down at the table and ate the bread and the butter.",
    "The fox looked out of the bushes and said nothing at all.",
    "It was dark in the forest, and the wind was cold.",
    "The three little pigs lived in a house of bricks.",
    "A kind bear found the lost child and brought her home.",
)


def story(sentences: int, first: int = 0) -> str:
    """A text of `sentences` sentences (about 20 tokens each), different for every `first` of 0 to 15."""
    count = len(_SENTENCES)
    step = 2 * (first // 2) + 1
    return " ".join(_SENTENCES[(first + step * at) % count] for at in range(sentences))


SHORT = (
    DOCUMENT,
    "Once",
    "A wolf",
    "The grandmother was",
    "Once upon a time there was a",
    "tell me a story of the three little pigs",
    "In the dark woods lived an old fox who",
    '"Who is there?" said the',
)

SIXTEEN = (*SHORT, *(story(length, first) for first, length in enumerate((1, 2, 3, 5, 8, 13, 21, 34))))
"""From one token to several hundred."""
