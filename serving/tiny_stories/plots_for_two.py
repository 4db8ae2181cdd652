"""Plots which any two characters can play: `{a}` is the hero, `{b}` the one who is met on the way."""

from __future__ import annotations

from plots import Plot

SHARING = Plot(
    themes=("sharing", "kindness", "a hungry friend", "food"),
    fond=("bear", "squirrel", "pig", "king"),
    text="""
{OPENING} [One morning|One day|One sunny day] {a} found {food.intro} [under a tree|by the river|on the
path|behind {a.his} {a.house}]. "[How lucky I am|What a find|This is all for me]!" said {a}, and {a.he}
carried {food} home.

[On the way|At the door of the {a.house}] {a.he} met {b.intro}. "I have not eaten for [two days|a long
time]," said {b}. "May I have a little of {food}?" "No," said {a}. "[I found it, and it is mine|Find your
own dinner|There is not enough for two]." {b} [said nothing and walked away|sighed and went away with a sad
face].

That night [the wind blew hard and a branch fell on the roof|the river rose and water came in at the
door|snow fell so thick that the door would not open]. "Help!" cried {a}. [Nobody heard {a.him} but {b}|Only
{b} came]. {b} worked all night [and made everything right again|until {a} was safe and dry]. "Why did you
help me?" asked {a}. "[Because you needed it|That is what friends do]," said {b}.

{a} was ashamed. [{a.he} put {food} on the table and gave {b} the bigger half.|{a.he} cut {food} in two, and
they ate together.] [It tasted better than anything before.|They talked until the moon came up.] [Food
tastes best when it is shared.|From that day on, {a} always shared with others.|And {a} and {b} were friends
for life.]
""",
)

LOST = Plot(
    themes=("getting lost", "the woods", "a dark wood", "finding the way home", "friendship"),
    fond=("rabbit", "girl", "boy", "hen", "hedgehog"),
    text="""
{OPENING} [One day|One afternoon|One autumn day] {a} went into {wood} to [look for {treat}|pick berries|find
{thing.intro}|gather mushrooms]. {a.he} walked [too far|on and on], and [soon it was dark|when {a.he} looked
up, the path was gone]. "[I am lost!|Which way is home?|Oh dear!]" said {a}. [An owl hooted.|The wind made a
sad sound in the trees.|Something moved in the bushes.]

[It was {b.intro}|Out of the dark came {b.intro}]. {a} was afraid at first. "[Do not be afraid. What is the
matter|Why are you crying|What are you doing here so late]?" asked {b}. "I cannot find my way home," said
{a}. "[I know every tree in {wood}|I know the way|I walk here every night]," said {b}. "Come with me, and
[hold my hand|stay close|do not look back]."

They [crossed a little stream|climbed over a fallen tree|walked by the light of the moon] and [sang a song
together|told each other stories|counted the stars]. At last they saw a light. "There is my {a.house}!"
cried {a}. "[Please come in and eat with me|Thank you, dear friend|How can I ever thank you]."

{b} [smiled|laughed]. "[It was nothing|Come and visit me one day|Now you know the way]," said {b}. [And {a}
was never afraid of the dark again.|After that they met every evening at the edge of {wood}.|A friend is the
best light in the dark.]
""",
)

TRICK = Plot(
    themes=("a trick", "being clever", "being greedy", "a clever trick"),
    fond=("fox", "crow", "cat"),
    text="""
{OPENING} {a} [was very clever, and {a.he} liked to play tricks|thought that nobody was as clever as
{a.he}]. Near by lived {b.intro}, who had {food.intro} for the winter.

[One morning|One cold day] {a} went to see {b}. "[I have heard|They say] that you can find {treat} at the
bottom of the [well|lake|old mill]," said {a}. "If you go there now, you can have it all." {b} [believed
every word|thanked {a.him}] and ran off. Then {a} [went into the {b.house}|climbed in at the window] and
took {food}.

But {food} was [heavy|so big] and [the ice on the river was thin|the bridge was old|the path was full of
mud]. In the middle {a} [fell in with a splash|slipped and got stuck]. "Help! Help!" cried {a}. {b} heard
{a.him} and came running. "[What are you doing here with my dinner|So that is where {food} went]?" asked
{b}. "I played a trick on you," said {a}. "I am sorry."

{b} [thought for a while|shook {b.his} head] and then pulled {a.him} out. "[Carry {food} home for me|Help me
all winter], and I will forget it," said {b}. And {a} did. [He who digs a hole for others falls into it.|It
is better to be kind than to be clever.|{a} never played a trick on {b} again.]
""",
)

STORM = Plot(
    themes=("a storm", "winter", "snow", "rain", "helping others"),
    fond=("owl", "old woman", "woodcutter", "badger", "wolf"),
    text="""
{OPENING} [One winter night|One stormy night|One cold evening] {a} was sitting by the fire. [The wind howled
round the {a.house}.|Snow was falling outside.|The rain beat on the roof.] Then there was a knock at the
door. Knock, knock, knock! "Who is there?" called {a}.

"[It is only me|Please let me in]," said a small voice. "I am {b.intro}, and I am so cold." {a} [did not
know what to do|looked through the keyhole]. [Everybody said that one should never trust a {b.noun}.|{a.he}
had never had a visitor before.] But {a.he} [had a kind heart|could not leave anyone in the cold], so {a.he}
opened the door.

{b} came in and sat down by the fire. {a} gave {b.him} [a bowl of hot soup|a cup of warm milk|a thick
blanket] and {treat}. "[You are very kind|Nobody was ever so good to me]," said {b}. [They played cards
until midnight.|{b} told stories about far countries.|They listened to the storm and were not afraid.] In
the morning [the sun was shining|the storm was over].

"I have nothing to give you," said {b}. "But I can [mend your roof|cut wood for your fire|sing for you]."
And so {b.he} did. [{b} stayed all winter long.|From then on {b} came to visit every week.] [An open door
makes a friend.|Kindness keeps you warmer than a fire.|And neither of them was ever lonely again.]
""",
)

RACE = Plot(
    themes=("a race", "being proud", "running"),
    fond=("horse", "dog", "prince", "shepherd"),
    text="""
{OPENING} {a} was very proud. "Nobody is as fast as I am," said {a} every day. [Everybody was tired of
hearing it.|The birds in the trees laughed at {a.him}.] At last {b.intro} said, "[Let us run a race|I will
race you], from the [old oak|mill|bridge] to the {a.house}."

[The next morning|On Sunday] they stood side by side. "One, two, three, go!" cried the [owl|crow|old goat].
{a} ran like the wind, and {b} was soon far behind. "[There is plenty of time|I have already won]," said
{a}. So {a.he} sat down under a tree [to eat {treat}|to rest], and [soon {a.he} was fast asleep|{a.he}
closed {a.his} eyes].

{b} did not stop. {b.he} went on, step by step, [up the hill and down the hill|over the stones and through
the mud]. When {a} woke up, [the sun was low|it was nearly evening]. {a.he} ran as fast as {a.he} could, but
{b} was already there. "[You are late|Good evening]," said {b} with a smile.

{a} [was angry at first, and then {a.he} laughed|hung {a.his} head]. "You have won," said {a}. "I will not
be so proud again." [Slow and steady wins the race.|It is better to go on than to be fast.|And they shared
{treat} like good friends.]
""",
)

SICK = Plot(
    themes=("being ill", "soup", "a basket", "helping a friend", "a visit"),
    fond=("goat", "duck", "goose"),
    text="""
{OPENING} {a} had a good friend, {b.intro}, who lived on the other side of {wood}. [One day|One Monday
morning] {a} heard that {b} was ill. "[I will pay a visit|I must go and help]," said {a}. {a.he} put {treat}
and {food.intro} in a basket and set off.

[The way was long.|It was raining.] By the stream {a.he} met a [fat toad|black crow|hungry rat]. "What have
you got in the basket?" it asked. "[Give me some|Let me see]!" "It is for my sick friend," said {a}. "But [I
can give you a little|you may have a small piece]." [The stranger thanked {a.him} and showed {a.him} a short
way through the trees.|It was so surprised that it carried the basket for {a.him}.]

Soon {a} came to the {b.house}. {b} was in bed with a red nose. "[Atchoo|Oh, how nice to see you]!" said
{b}. {a} [lit the fire|opened the window] and cooked a big pot of soup. {b} ate [three bowls|all of it], and
[the colour came back to {b.his} face|slept until the next day].

"I feel much better," said {b}. "[What was in that soup|You are the best doctor of all]?" {a} laughed.
"[Only love|Carrots, and a little love]," said {a}. [A good friend is the best medicine.|And when {a} had a
cold the next week, {b} made the soup.]
""",
)

WELL = Plot(
    themes=("a well", "keeping a promise", "a promise", "something lost"),
    fond=("princess", "queen", "frog"),
    text="""
{OPENING} {a} had {thing.intro}, and {a.he} loved it more than anything. [One day|One hot summer day] {a}
was playing by [the old well|the deep pond]. Splash! {thing} fell into the water. {a} began to cry.

"Why are you crying?" asked a voice. It was {b.intro}. "{thing} is at the bottom, and I cannot get it out,"
said {a}. "I can get it for you," said {b}. "But what will you give me?" "[Anything you want|Whatever you
like]," said {a}. "Then you must [eat supper with me every Sunday|be my friend|let me sit by your fire],"
said {b}. "I promise," said {a}.

{b} [took a deep breath and jumped in|tied a rope to a tree and climbed down]. Soon {b.he} came up with
{thing}. {a} [took it and ran home|forgot to say thank you and ran away]. But that night {a.he} could not
sleep. "[A promise is a promise|I gave my word]," said {a}. So the next morning {a.he} went back to find
{b}.

"I am sorry that I ran away," said {a}. "Will you come home with me?" {b} [was very happy|smiled from ear to
ear]. They ate {treat} together, and [{a} let {b} hold {thing}|they laughed a lot]. [Who keeps a promise
keeps a friend.|A friend is worth more than any treasure.|{a} never broke a promise again.]
""",
)

TRAP = Plot(
    themes=("a trap", "a rescue", "helping others", "somebody small"),
    fond=("mouse", "wolf", "knight", "tailor"),
    text="""
{OPENING} [One day|Early one morning] {a} was walking in {wood} when {a.he} heard a cry. "Help! Help me,
please!" It was {b.intro}, who had [fallen into a deep hole|got stuck in an old trap|been caught in a net].
"[How did that happen|How did you get there]?" asked {a}. "[I was looking for {treat}|I did not see it in
the dark]," said {b}. "Please get me out!"

{a} [was not strong|was all alone], but {a.he} had a good idea. {a.he} [found a long branch and pushed it
into place|fetched a rope from {a.his} {a.house}|called all the mice of {wood} to help]. They pulled and
pulled, and at last {b} was free. "You have saved my life," said {b}. "One day I will help you too."

[Not long after that|A week later] {a} [fell into the river|met an angry dog|was lost in the snow]. "Who
will help me now?" cried {a}. "I will!" said {b}. {b.he} [came running|was there at once] and [pulled
{a.him} out|carried {a.him} home]. "Now we are even," said {b}. "[No|Not at all]," said {a}. "Now we are
friends."

[A good deed is never lost.|Even the smallest friend can be a great help.|Help others, and they will help
you.]
""",
)

NOISE = Plot(
    themes=("a noise in the night", "being afraid", "the night", "the moon"),
    fond=("giant", "donkey", "bird", "troll"),
    text="""
{OPENING} [One night|One dark night] {a} could not sleep. There was a strange noise outside. [Bump, bump,
bump!|Scratch, scratch!|Hoo, hoo!] "[It must be a monster|It must be a ghost|Perhaps it is a dragon]," said
{a}, and {a.he} pulled the blanket over {a.his} head. But the noise [did not stop|came nearer].

At last {a} [lit a candle|took a lamp] and opened the door. "Who is there?" called {a}. "[Please do not hurt
me|Oh, you gave me a fright]!" said a voice. It was {b.intro}, who was [sitting in the garden|hiding behind
the gate]. "What are you doing here?" asked {a}. "[I was looking for {thing.intro}|I wanted to dance in the
moonlight|I have lost my house key]," said {b}. "I did not want to wake you."

{a} began to laugh. "I thought that you were a monster," said {a}. "And I thought that you were one," said
{b}. So they [looked at the moon together|drank hot milk in the kitchen|ate {treat} on the step], and [the
night was not dark any more|they were not afraid any more].

[Things are not so bad when you look at them.|Most monsters are only friends whom you do not know.|After
that, {a} slept very well.]
""",
)

TURNIP = Plot(
    themes=("a garden", "a giant turnip", "working together", "a big turnip"),
    fond=("farmer", "grandmother", "cow"),
    text="""
{OPENING} In the spring {a} planted [a turnip|a pumpkin|a cabbage] in {a.his} garden. {a.he} gave it water
every day. It grew and grew until it was [as big as a house|bigger than a cow]. In the autumn {a} wanted to
pull it out. {a.he} pulled and pulled, but it did not move.

Then {b.intro} came along the road. "[Let me help you|What a big one]!" said {b}. So {a} pulled, and {b}
pulled {a}, but it still did not move. "We need more help," said {b}. They called the [goat|dog|donkey] and
the [cat|hen|duck]. They all pulled together, and still it did not move.

At last a little mouse came. "[You are too small," said {a}.|What can you do?" asked {a}.] "[Let me try|You
will see]," said the mouse. They all pulled once more. One, two, three! Out it came, and they all fell down
in a heap. [How they laughed!|{b} had earth in {b.his} ears.]

That evening {a} cooked a great pot of soup, and there was enough for everybody. [Nobody is too small to
help.|Together we are strong.|And the mouse ate most of all.]
""",
)

WISH = Plot(
    themes=("a wish", "magic", "a star", "a magic fish", "being happy"),
    fond=("fisherman", "miller", "witch", "dragon", "turtle"),
    text="""
{OPENING} {a} was poor, and {a.he} always wanted more. One [evening|morning] {a} met {b.intro} [by the
lake|at the crossroads|under a tall tree]. "I am a magic {b.noun}," said {b}. "I can give you [three
wishes|a wish]. What do you want?"

"I want {thing.intro}," said {a}. And there it was! "[I want a castle too," said {a}. And so it was. But the
castle was cold and empty.|And I want a house of gold," said {a}. And so it was. But the house of gold had
no bed and no stove.] {a} sat there all alone and had nobody to talk to. "[What good is all this|I was
happier before]," said {a}.

So {a.he} went back to find {b}. "Please take it all away," said {a}. "I only want [my old {a.house}|my own
home] and a friend." {b} [smiled|nodded]. "[That is the best wish of all|Now you are wise]," said {b}. There
was a flash of light, and {a} was home again, with {thing} in {a.his} hand and {b} at the table.

[He who has a friend is rich.|Be happy with what you have.|And {a} never wished for anything again.]
""",
)
