"""Writes short stories: an opening, a problem, its solution and an end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from grammar import expand
from words import (
    ANIMALS,
    BOYS,
    COLOURS,
    FOODS,
    GIRLS,
    NAMES,
    OBJECTS,
    PLACES,
    TRAITS,
    invented_name,
)

# Slots: {h} hero, {a} the hero's animal, {he}/{his}/{him} the hero's pronouns; {f}, {b}, {fhe},
# {fhis}, {fhim} the same for the friend; {c} {o} a coloured object, {p} the place where the story
# starts, {q} the place where it goes, {d} a food, {t} and {ft} the traits of the two.

_OPENINGS = (
    "Once upon a time there was a {t} {a} named {h}.",
    "Once upon a time there was a {t} {a} named {h} who lived (by|near) the {p}.",
    "Once upon a time, (in|near) a small house by the {p}, there lived a {t} {a} named {h}.",
    "Once upon a time a {t} {a} named {h} lived (by|near|close to) the {p}.",
    "Long ago, (near|not far from) the {p}, there lived a {t} {a} called {h}.",
    "{h} was a {t} {a} who lived (by|near) the {p}.",
    "There was once a {t} {a} whose name was {h}.",
)
_HABITS = (
    "{he} loved (to sing|to swim|to dance|to climb|to read|to sleep in the sun|to tell jokes) "
    "and (to eat {d}|to look at the clouds|to count the stars).",
    "Every morning {he} (ate {d}|washed {his} face|opened the window) and "
    "(said hello to the sun|went for a walk|sang a song).",
    "{his} house was small and warm, and it always smelled of {d}.",
    "{he} had a {c} {o}, and {he} (loved it very much|took it everywhere).",
    "Everyone liked {him}, because {he} was always (kind|ready to help|full of good ideas).",
)
_FRIENDS = (
    "{his} best friend was {f}, a {ft} {b}.",
    "{he} had a friend named {f}, who was a {ft} {b}.",
    "Next to {him} lived {f}, a {ft} {b}, and the two were good friends.",
    "{h} often played with {f}, a {ft} {b} from the {q}.",
)
_DAYS = (
    "One (morning|day), (the sun was bright|the sky was clear|a cool wind blew|"
    "soft rain fell|snow lay on the ground|mist hung in the air), and {h} walked to the {q}.",
    "One (sunny|windy|cold|warm|quiet) (morning|day|afternoon), {h} went to the {q}.",
    "One day {h} and {f} (walked|went|ran) to the {q} (together|to play|to look for {d}).",
    "On the first day of (spring|summer|autumn|winter), {h} woke up early and went to the {q}.",
)

_LOST_OBJECT = (
    "{h} had a {c} {o}(, and {he} took it everywhere| in {his} bag|).",
    "(But when {he} came to the {q}|When {he} sat down to rest), the {o} was gone!",
    '"Oh no!" (cried|said) {h}. "I have lost my {c} {o}."',
    "{he} looked (under the leaves|behind the stones|in the tall grass) and "
    "(in the mud|behind the trees|along the path), but {he} could not find it.",
    "{h} sat down and began to cry.",
    'Then {f} came by and asked, "(What is wrong|Why are you sad), {h}?"',
    '"I have lost my {o}," said {h}. "(It was a gift from my mother|It is the best thing I have)."',
    '"Do not (worry|cry)," said {f}. "We will look for it together."',
    "They searched (all day|until evening|everywhere).",
    "At last {f} found the {c} {o} (in the grass|under a tree|beside the path|in an old nest|"
    "between two stones).",
    '"Here it is!" (shouted|called) {f}, and {h} (jumped for joy|laughed and danced).',
    '"Thank you, {f}," said {h}. "(You are a true friend|I will never lose it again)."',
)
_FOUND_OBJECT = (
    "On the path lay a {c} {o}.",
    '"(Whose {o} is this|Who has lost a {o})?" (asked|wondered) {h}.',
    "{he} wanted to keep it, because it was so (pretty|shiny|beautiful).",
    'But then {he} thought, "Somebody must (miss it|be sad without it)."',
    "So {h} asked a {b2}, but the {b2} shook {his2} head.",
    "{he} asked (an old tree|the wind|a small bird), but nobody knew.",
    "Then {h} heard somebody cry. It was {f}.",
    '"I have lost my {c} {o}," said {f}. "(I have looked for it all day|I cannot find it)."',
    '"Is it this one?" asked {h}, and held up the {o}.',
    '{f} (laughed with joy|smiled through {fhis} tears). "Yes! (Thank you|You found it)!"',
    "To say thanks, {f} gave {h} some {d}, and they ate it together.",
)
_BROKEN_BRIDGE = (
    "{he} wanted to cross the water, but (the bridge was broken|a storm had broken the bridge).",
    '"How can I get to the other side?" asked {h}. "I want to (visit my mother|buy some {d})."',
    "{he} tried to swim, but the water was too (cold|deep|fast).",
    "{he} tried to jump, but the other side was too far away.",
    'Then {f} came and said, "I have an idea. We can build a new bridge!"',
    "{h} brought wood and {f} brought a long rope.",
    "They worked all day, and when they were tired they ate {d}.",
    "In the evening the new bridge was ready.",
    "{h} hung a {c} {o} on it for luck.",
    "Now everybody could cross the water, and they all thanked {h} and {f}.",
)
_BIRTHDAY = (
    "It was the birthday of {f}, and {h} had no gift.",
    '"What can I give to {f}?" {he} thought. "I have no money at all."',
    "At the market {he} saw (a golden ring|a big cake|a fine hat), but it cost too much.",
    "{h} thought and thought. Then {he} had an idea.",
    "{he} took some wood and some paint, and {he} made a {c} {o}.",
    "It took (all day|all night), and it was not easy.",
    "In the evening {h} went to the party and gave the {o} to {f}.",
    '"A {c} {o}!" said {f}. "Did you make it by hand?"',
    '"Yes," said {h}(, and {his} face grew warm| shyly). "I had no money."',
    '"It is the best gift of all," said {f}, "because you made it for me."',
    "Then they ate {d} and danced until the stars came out.",
)
_STORM = (
    "Suddenly the sky grew dark, and a great storm came.",
    "The wind (blew off|broke) the roof of {f}'s house, and the rain came in.",
    "{f} was (wet and cold|very afraid). {fhe} knocked at {h}'s door.",
    '"Please, may I come in?" asked {f}. "My house is full of water."',
    '"Of course," said {h}. "Sit by the fire. I will make you some hot {d2}."',
    "They sat by the fire and told each other stories while the storm (cried|sang|blew) outside.",
    "{h} gave {f} {his} own bed and slept on the floor.",
    "In the morning the sun was back.",
    "{h} took a {c} {o} and a long rope, and together they mended the roof.",
    '"Thank you," said {f}. "A friend is better than a roof."',
)
_STRANGER = (
    "{h} was hungry. {he} had only a little {d} in {his} bag.",
    "By the path sat {f}, a {ft} {b} with (a long white beard|a torn coat|tired feet).",
    '"I have not eaten for two days," said {f}. "Can you give me something?"',
    "{h} looked at {his} {d}. It was not much.",
    '"Let us share it," {he} said, and {he} gave half of it to {f}.',
    '{f} ate and smiled. "You are kind," {fhe} said. "I will not forget it."',
    "(Later|In the evening) {h} fell into a deep hole and could not get out.",
    '"Help! Help!" {he} called, but nobody came.',
    "Then a rope came down. It was {f}!",
    '"You helped me, so now I help you," said {f}, and pulled {him} out.',
)
_RACE = (
    "That day there was a race, and the prize was a {c} {o}.",
    '"I am the fastest of all," said {f}. "Nobody can win against me."',
    "{h} was not fast, but {he} wanted to try.",
    "They ran over the hill and through the mud. {f} was far in front.",
    "But {f} did not look at the path. {fhe} fell over a stone and hurt {fhis} foot.",
    "{h} came by. Now {he} could win the race!",
    'But {he} stopped and asked, "Are you hurt, {f}?"',
    '"My foot!" cried {f}. "I cannot walk."',
    "So {h} helped {fhim} up, and slowly they walked on together.",
    "They were the last of all, but everybody (clapped|cheered).",
    '"The prize is yours," said {f}. "You won something better than a race."',
)
_DARK = (
    "But {h} had a secret. {he} was afraid of the dark.",
    "That night there was a strange noise outside. Tap, tap, tap!",
    '"Who is there?" (whispered|asked) {h}, but nobody answered.',
    "{he} hid under the bed and (shook with fear|did not move).",
    "Tap, tap, tap! The noise came again.",
    "Then {h} took a deep breath, lit a (lamp|candle) and opened the door.",
    "Outside stood {f}. {fhe} had a {c} {o} in {fhis} hands.",
    '"I could not sleep," said {f}. "I am afraid of the dark."',
    '{h} began to laugh. "So am I!" {he} said.',
    "They sat down in front of the house and looked at the stars, and they were not afraid.",
    '"The night is beautiful," said {h}, "when you are not alone."',
)
_MUSIC = (
    "At the {q} somebody played a {c} {o2}, and the music was beautiful.",
    '"I want to play like that," said {h}.',
    "{f} gave {him} an old {o2}, and {h} began to play.",
    "But it sounded (terrible|like a sick cat|like rain on a tin roof)!",
    "The birds flew away, and a {b2} put {his2} hands over {his2} ears.",
    '"I will never learn it," said {h} sadly.',
    '"You must practise," said {f}. "A little every day."',
    "So {h} played every morning and every evening, and slowly it sounded better.",
    "In the summer there was a big feast at the {p}.",
    "{h} stood up and played a song. Everybody was quiet. Then everybody clapped.",
    '"You see?" said {f}. "You learned it after all."',
)
_GARDEN = (
    "{h} had found some (small|strange|black) seeds, and {he} put them into the ground.",
    "{he} gave them water and waited. But nothing grew.",
    '"Grow!" said {h} to the seeds. But they did not listen.',
    "{he} sang to them and {he} read stories to them, but still nothing grew.",
    '"Maybe they are bad seeds," said {h}, and {he} wanted to give up.',
    '"Wait," said {f}. "Good things need time."',
    "So {h} waited. The rain came and the sun came.",
    "One morning there was a small green leaf!",
    "It grew and grew, and in the autumn the garden was full of {d}.",
    "There was so much that {h} shared it with all the animals, and {f} got the first basket.",
)
_STUCK = (
    'Suddenly {h} heard a voice. "Help! I am stuck!"',
    "It was {f}. {fhe} sat in the deep mud and could not (move|get out).",
    '"I wanted to get my {c} {o}," said {f}, "and now my feet are stuck."',
    '"Hold on!" called {h}. {he} pulled with all {his} strength, but {f} did not move.',
    "Then {he} ran and asked a {b2} for help. They pulled together, but it was not enough.",
    "{he} asked a {b3} as well. They pulled again. One, two, three!",
    "Plop! {f} flew out of the mud, and they all fell over.",
    "They were brown from head to foot, and they laughed so much that it hurt.",
    '"And I still have my {o}!" said {f}.',
    "Then they all washed in the river and ate {d}.",
)
_QUARREL = (
    "There they found a {c} {o} in the grass.",
    '"I saw it first!" said {h}. "No, I saw it first!" said {f}.',
    "{h} pulled on one side, and {f} pulled on the other side.",
    "Crack! The {o} broke into two pieces.",
    "Now they were both (angry|sad). {f} went home, and {h} went home too.",
    "But at home it was too quiet, and the {d} did not taste good.",
    '"A {o} is only a thing," thought {h}, "but {f} is my friend."',
    "So {h} took {his} piece and walked to {f}. Halfway they met.",
    '"I am sorry," said {h}. "I am sorry too," said {f}.',
    "They mended the {o}, and from then on it belonged to both of them.",
)
_LOST_WAY = (
    "A (blue|white|yellow) butterfly flew by, and {h} ran after it.",
    "{he} ran and ran, and when {he} looked up, {he} did not know where {he} was.",
    '"Which way is home?" asked {h}, but the trees said nothing.',
    "It grew dark and cold, and {h} was (afraid|tired and hungry).",
    "Then {he} saw a small light between the trees. It was the house of {f}, a {ft} {b}.",
    '"Come in, {t} {a}," said {f}. "Eat some {d} first. Then we will find your home."',
    "After that {f} took a {c} {o} and showed {him} the way.",
    '"Follow the river," said {fhe}. "All rivers know the way home."',
    "{h} followed the river, and soon {he} saw {his} own house.",
    "The next day {h} came back with a big basket of {d} for {f}.",
)
_TRUTH = (
    "{f} had a {c} {o}, and {h} was allowed to play with it.",
    "But {he} was not careful. The {o} fell on a stone and broke.",
    '"Oh no," thought {h}. "{f} will be so angry!"',
    "{he} hid the pieces under a bush and ran home.",
    'In the evening {f} asked, "Have you seen my {o}?"',
    '"No," said {h}, but {his} heart was heavy.',
    "That night {he} could not sleep. {he} thought about the {o} all the time.",
    "Early in the morning {he} took the pieces and went to {f}.",
    '"I broke it," {he} said, "and I told a lie. I am very sorry."',
    '{f} was quiet for a while. Then {fhe} said, "The {o} was old. But the truth is worth more."',
    "Together they made a new {o}, and it was even better than the old one.",
)
_TREASURE = (
    "In (an old tree|a dark hole|an old bottle) {h} found a map.",
    '"Look!" said {h}. "It shows a treasure (at|near) the {p2}!"',
    "{h} and {f} took a rope, a lamp and some {d}, and they set out at once.",
    "They walked over a hill and through a dark (forest|cave|valley).",
    "On the way they met a {b2} who was hungry, and they gave {him2} some of the {d}.",
    "At the {p2} they began to dig. They dug (all day|for hours), but they found nothing.",
    '"Maybe there is no treasure," said {f}.',
    "Then the {b2} came and helped them dig, and soon they hit something hard.",
    "It was an old box, and in the box lay a {c} {o}.",
    '"It is for all three of us," said {h}, and everybody was glad.',
)
_WINTER = (
    "The summer was long and warm. {h} worked hard and put {d} into {his} house for the winter.",
    '"Come and play!" called {f}. "The winter is far away."',
    '"First the work, then the game," said {h}.',
    "{f} laughed and slept in the sun all day.",
    "Then the snow came, and there was nothing left to eat.",
    "{f} was hungry. {fhe} took {fhis} last thing, a {c} {o}, and went to {h}.",
    '"Will you give me some {d} for my {o}?" {fhe} asked.',
    '"Keep your {o}," said {h}. "There is enough for two. But next summer you will help me."',
    '"I promise," said {f}, and they ate {d} by the fire.',
    "And when the next summer came, {f} worked (the hardest of all|as hard as {h}).",
)
_PLOTS = (
    _LOST_OBJECT,
    _FOUND_OBJECT,
    _BROKEN_BRIDGE,
    _BIRTHDAY,
    _STORM,
    _STRANGER,
    _RACE,
    _DARK,
    _MUSIC,
    _GARDEN,
    _STUCK,
    _QUARREL,
    _LOST_WAY,
    _TRUTH,
    _TREASURE,
    _WINTER,
)
_FEELINGS = (
    "{h} was (very|) (happy|glad|proud|tired but happy).",
    "{h} had never been so (happy|proud|glad).",
    "{h} and {f} (smiled|laughed) all the way home.",
)
_ENDINGS = (
    "That night {h} slept well and dreamed of the {q}.",
    "From that day on, {h} and {f} were the best of friends.",
    "{h} learned that a good friend is worth more than gold.",
    "And if you go to the {q} today, you may still hear them (laugh|sing).",
    "They (never forgot|often talked about) that day, and they lived happily ever after.",
    "{h} went home, ate some {d} and fell asleep with a smile.",
    "The end.",
)
_THIRD_PRONOUNS = {"his2": "his", "him2": "him"}


@dataclass(frozen=True)
class Cast:
    """Who and what a story is about."""

    hero: str
    animal: str
    trait: str
    slots: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class Story:
    """A finished story; `sentences` may each hold more than one sentence."""

    cast: Cast
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def make_cast(rng: random.Random, hero: str | None = None, animal: str | None = None) -> Cast:
    """Choose a hero, a friend, an object and the other slots of a story."""
    if hero is None:
        hero = invented_name(rng) if rng.random() < 0.12 else rng.choice(NAMES)
    friend = rng.choice([name for name in NAMES if name != hero])
    animals = rng.sample(ANIMALS, 5)
    if animal is not None:
        animals = [animal, *[other for other in animals if other != animal][:4]]
    places = rng.sample(PLACES, 3)
    traits = rng.sample(TRAITS, 2)
    colour, thing, food = rng.choice(COLOURS), rng.choice(OBJECTS), rng.choice(FOODS)
    slots = {
        "h": hero,
        "a": animals[0],
        "f": friend,
        "b": animals[1],
        "b2": animals[2],
        "b3": animals[3],
        "c": colour,
        "o": thing,
        "o2": rng.choice(("flute", "drum")),
        "p": places[0],
        "q": places[1],
        "p2": places[2],
        "d": food,
        "d2": rng.choice(("tea", "milk", "soup")),
        "t": traits[0],
        "ft": traits[1],
        **_pronouns(rng, hero, ""),
        **_pronouns(rng, friend, "f"),
        **_THIRD_PRONOUNS,
    }
    return Cast(hero, animals[0], traits[0], slots)


def make_story(rng: random.Random, cast: Cast | None = None, short: bool = False) -> Story:
    """Write one story; a short one keeps the problem and its solution but drops the colour."""
    cast = cast or make_cast(rng)
    plot = rng.choice(_PLOTS)
    templates = [rng.choice(_OPENINGS)]
    introduces_friend = plot is not _STRANGER and plot is not _LOST_WAY
    if not short:
        templates += [rng.choice(_HABITS)] if rng.random() < 0.7 else []
    if introduces_friend:
        templates.append(rng.choice(_FRIENDS))
    # Two plots introduce the friend themselves, so the friend cannot come along from the start.
    templates.append(rng.choice(_DAYS if introduces_friend else _DAYS[:2]))
    templates += plot
    if not short and rng.random() < 0.5:
        templates.append(rng.choice(_FEELINGS))
    templates.append(rng.choice(_ENDINGS))
    return Story(cast, tuple(expand(template, cast.slots, rng) for template in templates))


def _pronouns(rng: random.Random, name: str, prefix: str) -> dict[str, str]:
    female = name in GIRLS or (name not in BOYS and rng.random() < 0.5)
    forms = ("she", "her", "her") if female else ("he", "his", "him")
    return {prefix + key: form for key, form in zip(("he", "his", "him"), forms, strict=True)}
