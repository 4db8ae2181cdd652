"""A story grammar: draw a cast and a plot, fill in the blanks, and always know what the story is about.

The one idea: a story is a plot (`plots.py`, `plots_for_two.py`) whose characters (`cast.py`) are drawn once
and then kept, so it is coherent, and a request for it ("Tell me a story about a fox") can be written after
the fact from what is really in it.  All is drawn from one `random.Random`: a seed is a corpus.

    python serving/tiny_stories/grammar.py --seed 7 --count 3
"""

from __future__ import annotations

import argparse
import random
import re
from dataclasses import dataclass

import plots
import plots_for_two
from cast import FOODS, KINDS, POPULAR, THINGS, TREATS, WOODS, Character, article, draw_character, tidy
from plots import Plot


@dataclass(frozen=True)
class Story:
    """A finished story, and the subjects under which somebody could have asked for it."""

    text: str
    subjects: tuple[str, ...]


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


PLOTS: tuple[Plot, ...] = tuple(
    value for module in (plots, plots_for_two) for value in vars(module).values() if isinstance(value, Plot)
)

REQUESTS = (
    ("tell me a story about {}", 8),
    ("tell me a story of {}", 5),
    ("write a short story about {}", 4),
    ("write a story about {}", 3),
    ("please tell me a story about {}", 2),
    ("can you tell me a story about {}?", 2),
    ("i want to hear a story about {}", 1),
    ("a story about {}", 1),
    ("make up a story about {}", 1),
    ("tell me a fairy tale about {}", 1),
    ("tell me a bedtime story about {}", 1),
    ("tell me the story of {}", 2),
    ("tell me about {}", 1),
    ("do you know a story about {}?", 1),
    ("give me a short story with {}", 1),
)
PLAIN_REQUESTS = (
    "tell me a story",
    "tell me a fairy tale",
    "write a story",
    "please tell me a story",
    "once upon a time",
    "can you tell me a story?",
    "tell me a short story",
)
SYSTEMS = (
    "You are a storyteller.",
    "You are a helpful assistant.",
    "You tell short stories for children.",
    "Tell short and friendly stories.",
    "You are a kind old storyteller.",
)
SMALL_TALK = (
    ("Who lives in the woods?", "The wolf, the fox and the bear live in the woods."),
    ("Who lives in the castle?", "The princess lives in the castle."),
    ("Who are you?", "I am a little model which tells stories."),
    ("What is your name?", "I have no name. I am a little storyteller."),
    ("What can you do?", "I can tell you a story about wolves, bears, princesses and dragons."),
    ("What is in the basket?", "There is bread, honey and a cake in the basket."),
    ("Who ate the porridge?", "Goldilocks ate the porridge of the little bear."),
    ("Who is afraid of the wolf?", "The three little pigs are afraid of the wolf."),
    ("Who helped Little Red Riding Hood?", "The brave woodcutter helped Little Red Riding Hood."),
    ("Who was in grandmother's bed?", "The wolf was in grandmother's bed."),
    ("What did the wolf want?", "The wolf was hungry and wanted to eat."),
    ("Hello", "Hello! Shall I tell you a story?"),
    ("Hi", "Hello! Shall I tell you a story?"),
    ("Hello, how are you?", "I am well, thank you. Shall I tell you a story?"),
    ("Good night", "Good night, and sweet dreams!"),
    ("Thank you", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Did you like the story?", "Yes, I like every story with a good end."),
    ("What is the moral of the story?", "Be kind to others, and they will be kind to you."),
)


def expand(text: str, rng: random.Random) -> str:
    """Choose one alternative of every `[x|y]`, innermost first."""
    while (choice := re.search(r"\[([^\[\]]*)\]", text)) is not None:
        text = text[: choice.start()] + rng.choice(choice[1].split("|")) + text[choice.end() :]
    return text


def asked_for(rng: random.Random, a: Character, b: Character) -> list[str]:
    """The ways to ask for a story by its characters, the likely ones more than once."""
    first, second = rng.choice(a.subjects), rng.choice(b.subjects)
    pairs = [f"{first} and {second}"] * 7 + [f"{second} and {first}"] * 2
    return [first] * 6 + [second] * 3 + pairs + [f"{first} in the woods", f"{first} in the forest"]


def story(rng: random.Random) -> Story:
    """Draw a plot and its cast, and tell it."""
    plot = rng.choices(PLOTS, [plot.weight for plot in PLOTS])[0]
    fond_b = () if plot.cast_b else POPULAR
    a = draw_character(rng, plot.cast_a, plot.fond, named=not plot.titles)
    b = draw_character(rng, plot.cast_b, fond_b, named=not plot.cast_b)
    while b.noun == a.noun or b.name == a.name != "":
        b = draw_character(rng, plot.cast_b, fond_b, named=not plot.cast_b)
    wood, food, thing = rng.choice(WOODS), rng.choice(FOODS), rng.choice(THINGS)
    treat = rng.choice(TREATS)
    text = plot.text.replace("{OPENING}", plots.OPENING) + plots.ENDING
    text = expand(text, rng).format(a=a, b=b, wood=wood, food=food, thing=thing, treat=treat)
    subjects = list(plot.titles) * 2 or asked_for(rng, a, b)
    places = [place for place in ("the woods", "the forest", "a dark wood", "a forest") if place in text]
    props = [phrase for phrase in (food.intro, thing.intro, treat) if phrase in text]
    subjects += places + props + [rng.choice(plot.themes)] * 2
    return Story(tidy(text), tuple(subjects))


def request(rng: random.Random, told: Story) -> str:
    """Ask for this story, in one of many ways, with and without capitals and punctuation."""
    if rng.random() < 0.06:
        text = rng.choice(PLAIN_REQUESTS)
    else:
        text = rng.choices(REQUESTS, [weight for _, weight in REQUESTS])[0][0].format(rng.choice(told.subjects))
    text = text[0].upper() + text[1:] if rng.random() < 0.6 else text
    text = text.lower() if rng.random() < 0.1 else text
    if text[-1] == "?":
        return text if rng.random() < 0.8 else text[:-1]
    return text + rng.choice(("", "", ".", "", ".", "!"))


def from_the_middle(rng: random.Random, told: Story) -> str:
    """The story from one of the sentences of its first half on."""
    starts = [found.end() for found in re.finditer(r'[.!?]"?\s+(?=[A-Z"])', told.text)]
    return told.text[rng.choice(starts[: len(starts) // 2]) :]


def beginning(rng: random.Random, told: Story) -> str:
    """The first words of the story, as somebody writes them who wants to hear the rest."""
    return " ".join(told.text.split()[: rng.randint(4, 14)])


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A short question and its short answer."""
    if rng.random() < 0.3:
        kind = rng.choice(KINDS)
        question, answer = (
            f"Where does {article(kind.noun)} live?",
            f"A {kind.noun} lives in {kind.homes[0]}.",
        )
        return question, tidy(answer)
    question, answer = rng.choice(SMALL_TALK)
    return (question.lower() if rng.random() < 0.2 else question), answer


def conversation(rng: random.Random) -> list[Message]:
    """A chat which ends with an answer: mostly one request and its story."""
    messages = [Message("system", rng.choice(SYSTEMS))] if rng.random() < 0.25 else []
    if rng.random() < 0.15:
        question, answer = small_talk(rng)
        messages += [Message("user", question), Message("assistant", answer)]
    if rng.random() < 0.9 or not messages or messages[-1].role == "system":
        told = story(rng)
        asked = beginning(rng, told) if rng.random() < 0.07 else request(rng, told)
        messages += [Message("user", asked), Message("assistant", told.text)]
        if rng.random() < 0.05:
            question, answer = small_talk(rng)
            messages += [Message("user", question), Message("assistant", answer)]
    return messages


def completion(rng: random.Random) -> str:
    """A plain document: a story, the rest of one, a request with its story, or a question with its answer."""
    form = rng.random()
    if form < 0.05:
        return "\n".join(small_talk(rng))
    told = story(rng)
    if form < 0.30:
        return told.text
    if form < 0.45:
        return from_the_middle(rng, told)
    return f"{request(rng, told)}\n{told.text}"


def document(rng: random.Random) -> str | list[Message]:
    """One training document: plain text, or (three times in ten) a conversation."""
    return conversation(rng) if rng.random() < 0.3 else completion(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print stories of the grammar.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    for _ in range(options.count):
        told = story(rng)
        print(f"{request(rng, told)}\n\n{told.text}\n\n---\n")


if __name__ == "__main__":
    main()
