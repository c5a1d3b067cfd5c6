"""The embedded model's training text, generated: short stories, facts, chats and two-digit additions.

Everything comes from the templates below and the lists in `words.py`; no text of anybody else's is involved. The
same seed gives the same documents on every machine (`random.Random`, no hashing of strings).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import words

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
ALL_ADDITIONS = [(a, b) for a in range(10, 100) for b in range(10, 100)]


# Kinds of facts in `Corpus.fact`, those with many facts more often: capitals, colors, opposites, voices, homes, …
_FACT_KINDS = (0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 5, 5, 6, 6, 7, 8)


def addition_prompt(a: int, b: int) -> str:
    """The fixed format of the addition task; the model continues it with the sum and the end of the text."""
    return f"{a}+{b}="


@dataclass(frozen=True)
class Person:
    """A character of a story with the pronouns that agree with it."""

    name: str
    he: str
    him: str
    his: str


def article(word: str) -> str:
    """`a lamp`, `an apple`."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def capitalise(text: str) -> str:
    return text[0].upper() + text[1:]


def options(text: str) -> list[str]:
    """The alternatives of a `|`-separated list."""
    return text.split("|")


class Corpus:
    """A stream of documents that depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pick = self.random.choice
        self.stories: list[Callable[[], str]] = [
            self.lost_toy,
            self.animal_walk,
            self.cooking,
            self.weather_day,
            self.new_friend,
            self.gift,
            self.scene,
        ]

    def addition(self) -> tuple[str, str]:
        """One two-digit addition, mostly in the fixed format, sometimes asked in a chat: what is given, the answer."""
        a, b = self.random.randint(10, 99), self.random.randint(10, 99)
        kind = self.random.random()
        if kind < 0.75:
            return addition_prompt(a, b), str(a + b)
        opening = f"{IM_START}assistant\n"
        if kind < 0.9:
            return turn("user", addition_prompt(a, b)) + opening, f"{a + b}{IM_END}\n"
        return turn("user", f"What is {a}+{b}?") + opening, f"{addition_prompt(a, b)}{a + b}{IM_END}\n"

    def document(self) -> str:
        """One text of a random kind that is no addition, without the end-of-text marker."""
        kind = self.random.random()
        if kind < 0.30:
            return self.pick(self.stories)()
        if kind < 0.50:
            return " ".join(self.fact()[1] for _ in range(self.random.randint(1, 3)))
        return self.chat()

    # People and animals

    def person(self) -> Person:
        if self.random.random() < 0.5:
            return Person(self.pick(words.GIRLS), "she", "her", "her")
        return Person(self.pick(words.BOYS), "he", "him", "his")

    def two_people(self) -> tuple[Person, Person]:
        one = self.person()
        other = self.person()
        while other.name == one.name:
            other = self.person()
        return one, other

    def animal(self) -> str:
        return self.pick([*words.ANIMALS, *words.QUIET_ANIMALS])

    def toy(self) -> str:
        return f"{self.pick(words.TOY_ADJECTIVES)} {self.pick(words.TOYS)}"

    # Stories

    def scene(self, animal: str | None = None) -> str:
        """One to three sentences about one animal."""
        name = animal or self.animal()
        adjective = f"{self.pick(words.ANIMAL_ADJECTIVES)} " if self.random.random() < 0.5 else ""
        first = f"The {adjective}{name} {self.pick(words.RESTING)} {self.pick(words.SPOTS)}."
        likes, can = self.habits(name)
        rest = [
            f"It was {self.pick(words.GOOD_FEELINGS + words.BAD_FEELINGS)}.",
            f"It wanted to eat {likes}.",
            f"It liked to {can}.",
            f"Then it {self.pick(words.MOVING)} to the {self.pick(words.PLACES)}.",
            "The sun was warm.",
            "It was a quiet day.",
        ]
        return " ".join([first, *self.random.sample(rest, self.random.randint(0, 2))])

    def animal_walk(self, animal: str | None = None) -> str:
        hero = animal or self.animal()
        other = self.pick([name for name in [*words.ANIMALS, *words.QUIET_ANIMALS] if name != hero])
        likes, can = self.habits(hero)
        place = self.pick(words.PLACES)
        opening = self.pick(["One day", "One morning", "Once upon a time", "Last summer"])
        middle = self.pick(
            [
                f'It met {article(other)}. "Come and play with me," said the {other}.',
                f"It was hungry and wanted to eat {likes}. {capitalise(article(other))} gave it some.",
                f"It saw {article(other)} in the {place}. They liked to {can} together.",
            ]
        )
        ending = self.pick(["They became good friends.", "Then it went home and slept.", "It was a very good day."])
        adjective = self.pick(words.ANIMAL_ADJECTIVES)
        return f"{opening}, {article(adjective)} {hero} {self.pick(words.MOVING)} to the {place}. {middle} {ending}"

    def habits(self, animal: str) -> tuple[str, str]:
        if animal in words.ANIMALS:
            return words.ANIMALS[animal][2:]
        return words.QUIET_ANIMALS[animal][1:]

    def lost_toy(self) -> str:
        one, other = self.two_people()
        toy = self.toy()
        noun = toy.split()[-1]
        return (
            f"{one.name} had {article(toy)}. One day {one.he} lost it in the {self.pick(words.PLACES)}. "
            f"{one.name} was {self.pick(words.BAD_FEELINGS)}. {other.name} helped {one.him} to look for it. "
            f"They found the {noun} {self.pick(words.SPOTS)}. "
            + self.pick([f'"Thank you!" said {one.name}.', f"{one.name} was {self.pick(words.GOOD_FEELINGS)} again."])
        )

    def cooking(self) -> str:
        one, other = self.two_people()
        food, fruit = self.pick(words.FOODS), self.pick(words.FRUITS)
        return (
            f"{one.name} wanted to make {food}. {capitalise(one.he)} went to the market and bought {article(fruit)}. "
            f"{other.name} came to help {one.him}. "
            + self.pick(
                [
                    f"They ate the {food} together and were {self.pick(words.GOOD_FEELINGS)}.",
                    f'The {food} was very good. "Can I have some more?" asked {other.name}.',
                ]
            )
        )

    def weather_day(self) -> str:
        one = self.person()
        weather = self.pick(list(words.WEATHERS))
        sentence, clothes = words.WEATHERS[weather]
        return (
            f"It was a {weather} day. {sentence} {one.name} put on {one.his} {clothes} and "
            f"{self.pick(words.MOVING)} to the {self.pick(words.PLACES)}. {capitalise(one.he)} saw "
            f"{article(self.pick(words.ANIMAL_ADJECTIVES))} {self.animal()} {self.pick(words.SPOTS)}."
        )

    def new_friend(self) -> str:
        one, other = self.two_people()
        game = self.pick(words.GAMES)
        return (
            f'{one.name} saw {other.name} in the {self.pick(words.PLACES)}. "Can I play with you?" asked {one.name}. '
            f'"Yes, of course," said {other.name}. They played {game} until it was dark. '
            f"{one.name} was {self.pick(words.GOOD_FEELINGS)}."
        )

    def gift(self) -> str:
        one, other = self.two_people()
        toy = self.toy()
        return (
            f"It was the birthday of {one.name}. {other.name} gave {one.him} {article(toy)}. "
            f'"I like the {toy.split()[-1]} very much," said {one.name}. {capitalise(one.he)} was '
            f"{self.pick(words.GOOD_FEELINGS)} all day."
        )

    # Facts

    def fact(self) -> tuple[str, str]:
        """A question and the sentence that answers it."""
        kind = self.pick(_FACT_KINDS)
        if kind == 0:
            country = self.pick(list(words.CAPITALS))
            city = words.CAPITALS[country]
            return f"What is the capital of {country}?", f"The capital of {country} is {city}."
        if kind == 1:
            thing = self.pick(list(words.COLORS))
            color = words.COLORS[thing]
            subject = f"the {thing}" if thing in ("sky", "sun", "sea", "night") else article(thing)
            if thing in ("grass", "snow", "milk", "coal"):
                subject = thing
            return f"What color is {subject}?", f"{capitalise(subject)} is {color}."
        if kind == 2:
            one, other = self.random.sample(self.pick(options(words.OPPOSITES)).split(), 2)
            return f"What is the opposite of {one}?", f"The opposite of {one} is {other}."
        if kind == 3:
            animal = self.pick(list(words.ANIMALS))
            sound = words.ANIMALS[animal][0]
            subject = article(animal)
            return f"What does {subject} say?", f"{capitalise(subject)} says {sound}."
        if kind == 4:
            animal = self.animal()
            home = words.ANIMALS[animal][1] if animal in words.ANIMALS else words.QUIET_ANIMALS[animal][0]
            subject = article(animal)
            return f"Where does {subject} live?", f"{capitalise(subject)} lives {home}."
        if kind == 5:
            animal = self.animal()
            subject, (likes, can) = article(animal), self.habits(animal)
            if self.random.random() < 0.5:
                return f"What does {subject} eat?", f"{capitalise(subject)} likes to eat {likes}."
            return f"What can {subject} do?", f"{capitalise(subject)} can {can}."
        if kind == 6:
            ring = self.pick([words.DAYS, words.MONTHS, words.NUMBERS[:-1]])
            index = self.random.randrange(len(ring))
            before, after = ring[index - 1], ring[index]
            if ring[0] == "one":
                before, after = words.NUMBERS[index], words.NUMBERS[index + 1]
            return f"What comes after {before}?", f"{capitalise(after)} comes after {before}."
        if kind == 7:
            season = self.pick(list(words.SEASONS))
            return f"What happens in {season}?", f"In {season} {words.SEASONS[season]}."
        count = self.random.randint(3, 10)
        sentence = f"{capitalise(', '.join(words.NUMBERS[:count]))}."
        return f"Count to {words.NUMBERS[count - 1]}.", sentence

    # Chats

    def chat(self) -> str:
        """One to three turns in the chat template, sometimes after a system message."""
        lines = []
        if self.random.random() < 0.25:
            lines.append(turn("system", self.pick(words.SYSTEM_PROMPTS)))
        for _ in range(self.pick([1, 1, 1, 2, 3])):
            question, answer = self.exchange()
            lines += [turn("user", question), turn("assistant", answer)]
        return "".join(lines)

    def exchange(self) -> tuple[str, str]:
        kind = self.random.random()
        if kind < 0.25:
            asked, answers = self.pick(words.SMALL_TALK)
            return self.pick(options(asked)), self.pick(options(answers))
        if kind < 0.82:
            return self.fact()
        if kind < 0.92:
            animal = self.animal()
            if self.random.random() < 0.4:
                return self.pick(["Tell me a story.", "Tell me a story", "A story, please."]), self.pick(self.stories)()
            asked = self.pick(["Tell me a story about {}.", "Write a story about {}."]).format(article(animal))
            return asked, self.animal_walk(animal)
        animal = self.animal()
        return f"Write a sentence about {article(animal)}.", self.scene(animal).split(". ")[0].rstrip(".") + "."


def turn(role: str, content: str) -> str:
    """One message, as the chat template writes it."""
    return f"{IM_START}{role}\n{content}{IM_END}\n"
