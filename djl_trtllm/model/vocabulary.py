"""Check before anything is compiled that a model has a tokenizer, and that its ids are the model's."""

from __future__ import annotations

from djl_trtllm.errors import TokenizerError
from djl_trtllm.model.layout import Layout
from djl_trtllm.model.shape import ModelShape
from djl_trtllm.model.tokenizer import Tokenizer, load_tokenizer
from djl_trtllm.model.weights import bounded


def require_tokenizer(layout: Layout) -> None:
    """Raise TokenizerError if neither the model nor the engine inside it has tokenizer files."""
    if layout.tokenizer_dir is None and layout.bundled_engine is None:
        shown = bounded(sorted(entry.name for entry in layout.path.iterdir()))
        raise TokenizerError(
            f"{layout.path} has no tokenizer: found {shown}; expected tokenizer.json, or tokenizer.model "
            "(SentencePiece), or vocab.json with merges.txt. They are part of the Hugging Face model: copy them beside "
            "config.json, or name a directory or a model that has them with option.tokenizer"
        )


def load_fitting_tokenizer(layout: Layout, *, trust_remote_code: bool) -> Tokenizer | None:
    """The tokenizer beside the model, if it fits; None if it is known only with the engine.

    Raises TokenizerError: there is none, it cannot be loaded, or it is that of another model.
    """
    require_tokenizer(layout)
    if layout.tokenizer_dir is None:
        return None
    tokenizer = load_tokenizer(layout.tokenizer_dir, trust_remote_code=trust_remote_code)
    check_vocabulary(tokenizer, layout)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, layout: Layout) -> None:
    """Raise TokenizerError if texts have ids that the model has no embedding for.

    Tokens that were added to the vocabulary may be beyond the model's, if no ordinary text has them: Gemma 3 of 1B has
    the token of images, and fine-tuned models have a token for padding.
    """
    size = _model_ids(layout)
    if size is None or tokenizer.vocab_size <= size:
        return
    highest = max(tokenizer.raw.get_vocab(with_added_tokens=False).values(), default=-1)
    affixes = [id_ for id_ in tokenizer.encode("") if id_ >= size]
    if highest < size and not affixes:
        return
    found = f"ids up to {highest}" if highest >= size else f"the id {affixes[0]} in every prompt"
    raise TokenizerError(
        f"the tokenizer in {layout.tokenizer_dir} has {found}, and the model in {layout.path} knows ids up to "
        f"{size - 1} (vocab_size {size} in config.json): it is the tokenizer of another model; copy the one that "
        "belongs to the model, or name it with option.tokenizer"
    )


def outside(tokenizer: Tokenizer, layout: Layout) -> int | None:
    """The number of ids that the model knows, if the tokenizer has some beyond them."""
    size = _model_ids(layout)
    return size if size is not None and tokenizer.vocab_size > size else None


def _model_ids(layout: Layout) -> int | None:
    # Not `layout.shape`, which reads the headers of all weight files.
    return ModelShape.from_config(layout.config or {}).vocab_size
