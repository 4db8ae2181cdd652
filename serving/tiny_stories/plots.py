"""The plots of the story grammar: plain text in which `[x|y]` is a choice and `{slot}` a slot.

A plot is prose.  A newline inside a paragraph is a space, a blank line starts a new paragraph, `[x|y|]`
picks one of its alternatives (they nest), and `{a}`, `{a.he}`, `{food}` ... are filled from the cast and the
props which `grammar.py` drew for this one story, so that a story stays true to itself from start to end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """One story line: its text, what it is about, and who may play the parts `a` and `b`.

    An empty `cast` admits everybody; otherwise it names the only nouns which may play that part.  `fond` are
    the nouns which like to play `a`, so that a fox mostly tricks and a mouse mostly helps.  `titles` are the
    ways to ask for a story which everybody knows, `themes` what else it is about.
    """

    text: str
    themes: tuple[str, ...]
    titles: tuple[str, ...] = ()
    cast_a: tuple[str, ...] = ()
    cast_b: tuple[str, ...] = ()
    fond: tuple[str, ...] = ()
    weight: float = 1.0


OPENING = (
    "[Once upon a time, in {wood.intro}, there lived {a.intro}.|"
    "Once upon a time there was {a.intro} who lived in {a.home}.|"
    "Once upon a time, {a.intro} lived in {a.home} at the edge of {wood.intro}.|"
    "Once there was {a.intro} who lived in {a.home}.|"
    "Long ago, in {wood.intro}, there was {a.intro}.|"
    "Deep in {wood.intro}, in {a.home}, lived {a.intro}.|"
    "There was once {a.intro} who lived in {wood.intro}.|"
    "In {wood.intro} there lived {a.intro}, and {a.his} home was {a.home}.]"
    "[|||| Everybody in {wood} knew {a.him}.| {a} was very fond of {treat}."
    "| {a} liked to sing in the morning.]"
)

ENDING = (
    "[|The end.|And they lived happily ever after.|And they lived happily ever after. The end.|"
    "And that is the end of the story.|And so the story ends.]"
)

RED = Plot(
    themes=("a basket", "a red hood", "strangers", "the woods", "a path in the woods"),
    titles=(
        "the little red riding hood",
        "little red riding hood",
        "Little Red Riding Hood",
        "the Little Red Riding Hood",
        "red riding hood",
        "Little Red Riding Hood and the wolf",
        "a wolf and a grandmother",
        "the wolf and the grandmother",
        "a grandmother and a wolf",
        "a girl, a wolf and a grandmother",
        "a girl with a red hood",
        "a girl and a wolf",
        "a wolf",
        "the wolf",
        "the big bad wolf",
    ),
    cast_a=("girl",),
    cast_b=("wolf",),
    weight=3.0,
    text="""
[Once upon a time there was a little girl who always wore a red hood, so everybody called her Little Red
Riding Hood.|Once upon a time, in a small cottage near {wood.intro}, there lived a girl called Little Red
Riding Hood.|Little Red Riding Hood was a kind girl who lived with her mother at the edge of {wood.intro}.]
[One morning|One day|One fine day] her mother said, "Take this basket of {treat} to your grandmother. She is
[ill in bed|old and weak|not well]. [Stay on the path and do not talk to strangers.|Do not leave the
path.|Do not stop in the wood.]"

[In the middle of the wood|On the path through the trees|Under the tall trees] she met {b.intro}. "Where are
you going, little girl?" asked {b}. "To my grandmother's cottage," she said. "[What pretty flowers grow
here|Look at the flowers]!" said {b}. So Little Red Riding Hood [left the path to pick flowers|picked a big
bunch of flowers], and {b} ran [straight|as fast as he could] to the cottage.

[The wolf knocked on grandmother's door and said, "[It is Little Red Riding Hood. Please let me in|Open the
door, Grandmother, I have brought you {treat}]."|Grandmother heard a knock at the door. "Who is there?" she
called. "It is Little Red Riding Hood," said the wolf in a sweet voice.] [Grandmother hid in the
cupboard.|The wolf locked poor Grandmother in the cupboard.] Then the wolf got into her bed.

[Soon|After a while] Little Red Riding Hood [came to the cottage|opened the door]. "Grandmother, what big
[eyes you have!" she said. "The better to see you with|ears you have!" she said. "The better to hear you
with]," said the wolf. "And what big teeth you have!" "The better to eat you with!" [cried|roared] the wolf,
and he jumped out of the bed. [A woodcutter heard her scream|A brave woodcutter heard the noise]. He ran in
with his axe and [chased the wolf away|drove the wolf deep into the wood].

[Then they all sat down and ate {treat} together|Grandmother hugged Little Red Riding Hood and they shared
{treat}|Grandmother made tea, and they all ate {treat}]. [Little Red Riding Hood never talked to strangers
again.|"I will never leave the path again," said Little Red Riding Hood.]
""",
)

GRANDMOTHER = Plot(
    themes=("a knock at the door", "being clever", "a cottage in the woods"),
    cast_a=("grandmother",),
    cast_b=("wolf",),
    weight=2.0,
    text="""
[{OPENING}|Grandmother lived all alone in a small cottage in {wood.intro}.|Grandmother was old, but she was
not afraid of anything.] [Every evening she sat by the fire and baked bread.|She had [a warm stove|a soft
chair|a little lamp] and a big black pot.]

[One evening|One cold night|One dark night] {b.intro} came to the cottage. [The wolf knocked on
grandmother's door and said, "[Let me in, I am cold|I am your little granddaughter. Let me in|Please give me
something to eat]."|There was a knock at the door. "Let me in," said {b}, "I am cold and hungry."]
Grandmother looked out of the window and saw [his sharp teeth|his long tail|his grey ears]. "[You do not
fool me|I know who you are]," she said. "But if you are hungry, [come down the chimney|put your nose through
the window|sit by the step and wait]."

[The wolf climbed onto the roof and slid down the chimney, right into a sack of flour. He came out as white
as snow.|The wolf waited and waited. Then Grandmother opened the door and threw a big pot of cold water over
him.|The wolf put his nose through the window, and Grandmother tapped it with her wooden spoon.] "[Oh
no|Help|Ow]!" cried {b}. "[I will never come back|I only wanted some supper|I am sorry]!" Grandmother
[laughed and laughed|laughed until her chair shook]. [Then she gave the poor wolf a bowl of soup, because he
was so thin.|The wolf ran away into the wood and was never seen there again.|"Next time, ask nicely," she
said, and she gave him a piece of bread.]

[From that day on, nobody tried to trick Grandmother.|And from that day on the wolf was always polite.|A
clever head is better than sharp teeth.]
""",
)

PIGS = Plot(
    titles=(
        "the three little pigs",
        "three little pigs",
        "a pig",
        "three pigs and a wolf",
        "a pig and a wolf",
    ),
    themes=("houses", "building a house", "hard work"),
    cast_a=("pig",),
    cast_b=("wolf",),
    weight=2.0,
    text="""
[Once upon a time there were three little pigs.|Once there were three little pigs who built their own
houses.|Long ago, three little pigs lived with their mother near {wood.intro}.] The first pig built a house
of straw, because [it was easy|he was lazy|he wanted to play]. The second pig built a house of sticks. The
third pig [worked all day|worked very hard] and built a strong house of bricks.

One [day|night|morning] {b.intro} came out of the wood. He knocked on the door of the first house. "Little
pig, little pig, let me in!" said {b}. "Not by the hair of my chin!" said the first pig. So {b} huffed and
puffed and blew the house down. The pig ran to [his brother|the house of sticks]. But {b} huffed and puffed
and blew that house down too, and the two pigs ran to the house of bricks.

{b} huffed and puffed, but the house of bricks [did not fall|stood still]. [He was very angry|He tried again
and again], and he climbed up to the chimney. [The third pig put a big pot of hot soup on the fire|The pigs
lit a big fire under the chimney]. {b} [fell into the pot|burned his tail], jumped up with a howl, and ran
all the way back to the wood.

[The three little pigs danced and sang.|The three pigs lived together in the house of bricks.|"Thank you,
brother," said the two pigs.] [Hard work keeps the wolf from the door.|It is good to do a job well.|They
never built a house of straw again.]
""",
)

DRAGON = Plot(
    themes=("a castle", "a brave princess", "being brave", "fire"),
    cast_a=("princess", "prince", "knight", "queen", "king"),
    cast_b=("dragon",),
    weight=2.0,
    text="""
[Once upon a time there was {a.intro} who lived in a castle on a high hill.|In a castle by the sea there
lived {a.intro}.|Long ago, in a land far away, {a.intro} lived in a great stone castle.] One day a messenger
ran into the hall. "[A dragon is burning our fields|There is a dragon in the mountains|A dragon has taken
all our gold]!" he cried. [Everybody was afraid.|All the soldiers hid under the table.|Nobody wanted to go.]
"I will go and talk to it," said {a}.

{a} [rode for three days|walked over the hills] until {a.he} came to a dark cave. Inside it sat {b.intro},
and smoke came out of {b.his} nose. "Are you not afraid of me?" roared {b}. "[A little|Not very much|Yes,
but I came anyway]," said {a}. "Why are you so angry?" {b} [looked at the floor|began to cry big hot tears].
"[I have a thorn in my foot|I am all alone and nobody ever visits me|I have a terrible toothache and nobody
will help me]," said {b}.

[So {a} sat down next to {b} and helped {b.him}|{a} was not afraid any more, and {a.he} helped {b}], and
soon {b} felt much better. "Thank you," said {b}. "[I will never burn a field again|You are my first
friend|I will keep your castle warm in winter]." {a} [flew home on the back of the dragon|rode home, and the
dragon flew above {a.him}], and all the people [cheered|danced in the streets].

[A kind word is stronger than a sword.|From that day on {a} and {b} were the best of friends.|Sometimes the
bravest thing is to ask a question.]
""",
)

BEARS = Plot(
    themes=("three bears", "porridge"),
    titles=("Goldilocks and the three bears", "goldilocks", "the three bears", "three bears"),
    cast_a=("girl",),
    cast_b=("bear",),
    weight=1.0,
    text="""
[Once upon a time there were three bears who lived in a house in {wood.intro}.|Once there were three bears:
a big bear, a middle bear and a little bear.] Every morning they [cooked porridge|made a pot of porridge].
One morning the porridge was too hot, so they went for a walk in the wood.

A [little|curious] girl called Goldilocks [came by|saw the house and went in]. She tasted the porridge. The
first bowl was too hot, the second bowl was too cold, but the third bowl was just right, and she ate it all
up. Then she sat on the little chair, and it broke. [She was so tired that|Then] she lay down on the little
bed and fell asleep.

Soon the three bears came home. "Somebody has been eating my porridge!" said the little bear. "And somebody
has broken my chair!" They went up the stairs. "[Look|Oh], there is somebody in my bed!" cried the little
bear. Goldilocks woke up [and was very afraid|with a scream]. ["I am sorry," she said, and she helped them
to mend the chair.|She jumped out of the window and ran all the way home.]

[She never went into a strange house again.|It is good to knock and wait.|After that she always asked before
she took something.]
""",
)

CRIED_WOLF = Plot(
    themes=("sheep", "telling the truth", "lies"),
    titles=("the boy who cried wolf", "a boy who cried wolf", "a boy and a wolf", "a shepherd and his sheep"),
    cast_a=("boy", "shepherd"),
    cast_b=("wolf",),
    weight=1.0,
    text="""
[Once upon a time there was {a.intro} who looked after the sheep.|Once there was {a.intro} who watched the
sheep on a green hill.] [All day long there was nothing to do.|It was quiet on the hill, and {a.he} was
bored.] One day {a.he} had a [bad|silly] idea. "Wolf! Wolf!" {a.he} shouted. The people of the village ran
up the hill with sticks, but there was no wolf. {a} laughed at them.

The next day {a.he} shouted again. "Wolf! Wolf!" And again the people came running, and again there was no
wolf. "[Do not do that again|You should tell the truth]," said the [farmer|baker|miller], and they all went
home.

[That evening|On the third day] {b.intro} really came out of the wood. "Wolf! Wolf!" cried {a}. But [nobody
came|everybody thought it was a joke]. [{b} took a fat sheep and ran away|The sheep ran off in all
directions, and it took all night to find them]. {a} sat down on the grass and cried. "I am sorry," {a.he}
said. "I will always tell the truth."

[Nobody believes a liar, even when he tells the truth.|And {a.he} kept {a.his} word.|From that day on {a.he}
never told a lie.]
""",
)
