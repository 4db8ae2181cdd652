"""Who and what a story may be about: kinds of characters, the characters drawn from them, and props.

The one idea: a character is drawn once, and carries every word by which the story will call it; a plot only
says `{a.he}` or `{b.home}`, and cannot mix up who is who.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A sort of character: its noun, where it lives, and what it may be like."""

    noun: str
    sex: str
    homes: tuple[str, ...]
    looks: tuple[str, ...]
    plural: str = ""


@dataclass(frozen=True)
class Character:
    """One character of one story; the attributes are the slots which plots may use."""

    noun: str
    intro: str
    he: str
    him: str
    his: str
    home: str
    house: str
    subjects: tuple[str, ...]
    name: str = ""

    def __str__(self) -> str:
        return self.name or f"the {self.noun}"


@dataclass(frozen=True)
class Prop:
    """A thing or a place: `intro` where it is first seen ("a round cheese"), and then "the cheese"."""

    intro: str
    then: str

    def __str__(self) -> str:
        return self.then


HOUSES = (
    "nest",
    "tree",
    "burrow",
    "house",
    "den",
    "cave",
    "barn",
    "stable",
    "hole",
    "cottage",
    "castle",
    "tower",
)
PRONOUNS = {"m": ("he", "him", "his"), "f": ("she", "her", "her")}
SMALL = ("little", "small", "shy", "merry", "clever", "kind", "lonely", "curious")
WILD = ("hungry", "big", "lonely", "clever", "grey", "sly", "old")
GROWN = ("old", "poor", "kind", "clever", "cheerful", "tired")
ROYAL = ("young", "proud", "brave", "clever", "kind", "lonely")
STRANGE = ("little", "friendly", "lonely", "funny", "strange", "big")
NEST = ("a nest in a tall oak", "a hollow tree")
BURROW = ("a warm burrow", "a hollow tree", "a tiny house under a root")
DEN = ("a den under an old oak", "a deep cave", "a den between the rocks")
BARN = ("an old barn", "a small stable")
COTTAGE = ("a small cottage", "a little house by the mill", "a cottage with a red door")
CASTLE = ("a tall castle", "a castle on a hill")
ANYWHERE = ("a small cottage", "a deep cave", "an old tower", "a little house on wheels")


def _kinds(nouns: str, sex: str, homes: tuple[str, ...], looks: tuple[str, ...]) -> list[Kind]:
    """Kinds which differ only in their noun; an irregular plural follows a slash."""
    pairs = (noun.strip().partition("/") for noun in nouns.split(","))
    return [Kind(noun, sex, homes, looks, plural or f"{noun}s") for noun, _, plural in pairs]


KINDS: tuple[Kind, ...] = (
    *_kinds("wolf/wolves, fox/foxes, bear", "mf", DEN, WILD),
    *_kinds("rabbit, mouse/mice, hedgehog, squirrel, badger", "mf", BURROW, SMALL),
    *_kinds("owl, crow, duck, goose/geese, bird", "mf", NEST, SMALL),
    *_kinds("cat, dog, goat, donkey, pig, cow, horse, hen", "mf", BARN, SMALL),
    *_kinds("frog, turtle", "mf", ("a hole by the pond", "a house of reeds"), SMALL),
    *_kinds("grandmother, old woman/old women, witch/witches", "f", COTTAGE, ("kind", "old", "wise", "clever")),
    *_kinds("woodcutter, farmer, miller, tailor, shepherd, fisherman/fishermen", "m", COTTAGE, GROWN),
    *_kinds("girl", "f", COTTAGE, SMALL),
    *_kinds("boy", "m", COTTAGE, SMALL),
    *_kinds("princess/princesses, queen", "f", CASTLE, ROYAL),
    *_kinds("prince, king, knight", "m", CASTLE, ROYAL),
    *_kinds(
        "dragon, giant, troll",
        "m",
        ("a deep cave", "a cave in the mountain"),
        ("big", "green", "lonely", "old"),
    ),
)
RARE: tuple[Kind, ...] = tuple(
    _kinds(
        "robot, pirate, elephant, lion, tiger, monkey, penguin, whale, unicorn, ghost, monster, "
        "dinosaur, wizard, fairy/fairies, mermaid, sailor, doctor, teacher, snowman/snowmen, snake, "
        "spider, bee, ant, parrot, kitten, puppy/puppies, crocodile, camel, kangaroo, panda, swan, "
        "soldier, baker, cook, painter, clown, astronaut, alien, vampire, zebra, giraffe, hippo, "
        "octopus/octopuses, seal, otter, deer/deer, moose/moose, sheep/sheep, lamb, "
        "butterfly/butterflies, snail, worm, lizard, eagle, raven, rooster, sparrow, elf/elves, "
        "dwarf/dwarves, goblin, ninja, cowboy, scientist, programmer, engineer, computer, grandfather, "
        "brother, nurse, policeman, driver, king of the sea, cloud, tree, river, stone, star, train, "
        "ship, car, doll, bread man, shoe, teapot",
        "mf",
        ANYWHERE,
        STRANGE,
    )
)
POPULAR = (
    "wolf",
    "fox",
    "bear",
    "rabbit",
    "mouse",
    "owl",
    "cat",
    "hen",
    "frog",
    "princess",
    "woodcutter",
    "boy",
    "girl",
)
NAMES = {
    "m": (
        "Tom",
        "Ben",
        "Max",
        "Jack",
        "Peter",
        "Hugo",
        "Felix",
        "Otto",
        "Finn",
        "Sam",
        "Leo",
        "Bruno",
        "Oscar",
    ),
    "f": (
        "Anna",
        "Lily",
        "Rose",
        "Mia",
        "Ella",
        "Clara",
        "Nora",
        "Lucy",
        "Molly",
        "Ida",
        "Greta",
        "Emma",
        "Daisy",
    ),
}
WOODS = (
    Prop("a dark wood", "the wood"),
    Prop("a deep forest", "the forest"),
    Prop("a green forest", "the forest"),
    Prop("the woods behind the hill", "the woods"),
    Prop("a dark wood by the river", "the wood"),
    Prop("the old woods", "the woods"),
)
FOODS = (
    Prop("a big apple pie", "the pie"),
    Prop("a round cheese", "the cheese"),
    Prop("a loaf of bread", "the bread"),
    Prop("a fat fish", "the fish"),
    Prop("a honey cake", "the cake"),
    Prop("a long sausage", "the sausage"),
)
TREATS = (
    "honey",
    "cakes",
    "apples",
    "bread and butter",
    "berries",
    "honey cakes",
    "cheese",
    "nuts",
    "plum jam",
)
THINGS = (
    Prop("a golden ball", "the golden ball"),
    Prop("a silver key", "the silver key"),
    Prop("a magic ring", "the magic ring"),
    Prop("a little bell", "the little bell"),
    Prop("a wooden flute", "the wooden flute"),
    Prop("a shiny crown", "the shiny crown"),
)
SPEECH = "said|asked|cried|called|shouted|roared|laughed"


def tidy(text: str) -> str:
    """Prose from an expanded plot: paragraphs, one space between words, capitals, and `an` before a vowel."""
    text = "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))
    text = re.sub(r"\b([Aa]) (?=[aeiou])(?!uni|one\b)", r"\1n ", text)
    first = re.compile(rf'(^|\n\n|[.!?] |[.!?]" (?!(?:(?:he|she|it) )?(?:{SPEECH})\b)|(?:^|\s)")([a-z])')
    return first.sub(lambda found: found[1] + found[2].upper(), text)


def article(phrase: str) -> str:
    return tidy(f"x a {phrase}")[2:]


def draw_kind(rng: random.Random, allowed: Sequence[str], fond: Sequence[str]) -> Kind:
    if fond and rng.random() < 0.6:
        allowed = fond
    if allowed:
        noun = rng.choice(allowed)
        return next(kind for kind in KINDS if kind.noun == noun)
    return rng.choice(RARE if rng.random() < 0.2 else KINDS)


def draw_character(
    rng: random.Random, allowed: Sequence[str] = (), fond: Sequence[str] = (), named: bool = True
) -> Character:
    """Somebody of an allowed noun (of any, when none is given), with or without a name."""
    kind = draw_kind(rng, allowed, fond)
    sex = rng.choice(kind.sex)
    look = rng.choice([look for look in kind.looks if look not in kind.noun])
    name = rng.choice(NAMES[sex]) if named and rng.random() < 0.25 else ""
    home = rng.choice(kind.homes)
    he, him, his = PRONOUNS[sex]
    subjects = [article(kind.noun)] * 5 + [f"the {kind.noun}", kind.plural, article(f"{look} {kind.noun}")]
    if name:
        subjects += [f"{article(kind.noun)} {word} {name}" for word in ("named", "called")] + [name]
    return Character(
        noun=kind.noun,
        intro=article(f"{look} {kind.noun}") + (f" named {name}" if name else ""),
        he=he,
        him=him,
        his=his,
        home=home,
        house=next(word for word in home.split() if word in HOUSES),
        subjects=tuple(subjects),
        name=name,
    )
