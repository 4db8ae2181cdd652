"""How many images a request may have (`option.limit_mm_per_prompt`)."""

import json
from functools import lru_cache

IMAGES = 16
"""The most images of a request by default."""


@lru_cache(maxsize=8)
def most_images(limits: str | None) -> int:
    """The most images of a request, from the option's text. Raises ValueError for a text that it may not have.

    As in vLLM, a limit is a number, or an object whose `count` is one.
    """
    if limits is None:
        return IMAGES
    try:
        read = json.loads(limits)
    except (ValueError, RecursionError):
        read = None
    if type(read) is not dict:
        raise ValueError('expected a JSON object such as {"image": 4}')
    counts = {kind: given.get("count", 0) if type(given) is dict else given for kind, given in read.items()}
    for kind, count in counts.items():
        if type(count) is not int or count < 0:
            raise ValueError(f"expected a whole number for {kind!r}")
        if count and kind != "image":
            raise ValueError(f"only texts and images are served: expected 0 for {kind!r}")
    return int(counts.get("image", IMAGES))
