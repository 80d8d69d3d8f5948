"""Seeded generators of the five domains that tinymoe is trained and tested on.

An item is a prompt, written reasoning steps and a final answer; the model writes everything after the
prompt, and only the text after ``#`` is scored. Training and test items are disjoint by construction: an
item belongs to the test side exactly when a hash of its prompt falls into one residue class, and each side
rejects the other's items. Knows nothing of tokens, tensors or files.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

TEST_RESIDUE_MODULUS = 23
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NAMES = ("brel", "tavo", "mirn", "osk", "yula", "dext", "fenna", "quor")
ROOMS = ("attic", "cellar", "garden", "hall", "kitchen", "library", "stable", "tower")
THINGS = ("lamp", "coin", "rope", "book", "flute", "key", "drum", "map")


@dataclass(frozen=True)
class Item:
    """One exercise: the model reads ``prompt`` and should write ``steps`` and then ``answer``."""

    domain: str
    prompt: str
    steps: str
    answer: str

    @property
    def completion(self) -> str:
        """The text after the prompt, up to and including the newline that ends an item."""
        steps = f" {self.steps}" if self.steps else ""
        return f"{steps} # {self.answer}\n"

    @property
    def is_test(self) -> bool:
        """Whether this item may only be used for testing (one prompt in 23, by hash)."""
        digest = hashlib.blake2b(self.prompt.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % TEST_RESIDUE_MODULUS == 0


def _length(rng: random.Random, level: float, low: int, high: int) -> int:
    """A length between ``low`` and ``high`` whose upper end grows with ``level`` in [0, 1]."""
    top = low + round((high - low) * level)
    return top if level >= 1 or rng.random() < 0.5 else rng.randint(low, top)


def chain(rng: random.Random, level: float = 1.0) -> Item:
    """Arithmetic modulo 100, evaluated from left to right with every step written out; 8 steps at full length."""
    value = rng.randrange(100)
    prompt, steps = [f"chain: {value}"], []
    for _ in range(_length(rng, level, 1, 8)):
        op, operand = rng.choice("+-*"), rng.randint(2, 9)
        prompt.append(f"{op} {operand}")
        result = {"+": value + operand, "-": value - operand, "*": value * operand}[op] % 100
        steps.append(f"{value} {op} {operand} = {result}")
        value = result
    return Item("chain", " ".join(prompt) + " ?", " ; ".join(steps), str(value))


def recall(rng: random.Random, level: float = 1.0) -> Item:
    """Look up three of up to 12 two-letter keys with two-digit values; the keys are restated before the answer."""
    count = _length(rng, level, 2, 12)
    keys: list[str] = []
    while len(keys) < count:
        key = f"{rng.choice(LETTERS)} {rng.choice(LETTERS)}"
        if key not in keys:
            keys.append(key)
    values = {key: f"{rng.randrange(10, 100)}" for key in keys}
    asked = [rng.choice(keys) for _ in range(min(3, count))]
    prompt = "recall: " + " , ".join(f"{k} {v}" for k, v in values.items()) + " ? " + " , ".join(asked)
    steps = " ; ".join(f"{k} {values[k]}" for k in asked)
    return Item("recall", prompt + " ?", steps, " ".join(values[k] for k in asked))


def lists(rng: random.Random, level: float = 1.0) -> Item:
    """One operation on a list of up to 7 letters or digits: reverse, sort, rotate, double, unique, largest, count."""
    alphabet = rng.choice((LETTERS, "0123456789"))
    items = [rng.choice(alphabet) for _ in range(_length(rng, level, 2, 7))]
    name = rng.choice(("reverse", "sort", "rotate", "double", "unique", "largest", "count"))
    if name == "count":
        target = rng.choice(items)
        marks = [x for x in items if x == target]
        return Item("lists", f"count {target} : {' '.join(items)} ?", " ".join(marks), str(len(marks)))
    result = {
        "reverse": lambda: items[::-1],
        "sort": lambda: sorted(items),
        "rotate": lambda: items[1:] + items[:1],
        "double": lambda: [x for x in items for _ in range(2)],
        "unique": lambda: list(dict.fromkeys(items)),
        "largest": lambda: [max(items)],
    }[name]()
    return Item("lists", f"{name} : {' '.join(items)} ?", "", " ".join(result))


def program(rng: random.Random, level: float = 1.0) -> Item:
    """Trace a small program: three variables are set, then up to 5 statements change them; numbers are modulo 100.

    The steps restate all variables after each statement.
    """
    env = {name: rng.randrange(100) for name in "abc"}
    lines = [f"{name} = {value}" for name, value in env.items()]
    steps = [" ".join(f"{name} {value}" for name, value in env.items())]
    for _ in range(_length(rng, level, 1, 5)):
        target, source, op, right = rng.choice("abc"), rng.choice("abc"), rng.choice("+-*"), rng.randint(2, 9)
        left = env[source]
        env[target] = {"+": left + right, "-": left - right, "*": left * right}[op] % 100
        lines.append(f"{target} = {source} {op} {right}")
        state = " ".join(f"{name} {value}" for name, value in env.items())
        steps.append(f"{target} = {left} {op} {right} = {env[target]} : {state}")
    asked = rng.choice("abc")
    prompt = "program: " + " ; ".join(lines) + f" ; print {asked} ?"
    return Item("program", prompt, " ; ".join(steps), str(env[asked]))


def world(rng: random.Random, level: float = 1.0) -> Item:
    """People of an invented house walk, take, send and leave things; up to 10 events and one question."""
    place: dict[str, str] = {}
    held: dict[str, str] = {}
    left: dict[str, str] = {}
    events: list[str] = []
    people = rng.sample(NAMES, 3)
    count = _length(rng, level, 3, 10)
    while len(events) < count:
        who = rng.choice(people)
        mine = sorted(t for t, owner in held.items() if owner == who)
        kind = rng.choice(("go", "go", "take", "send", "leave"))
        if kind == "go" or who not in place:
            place[who] = rng.choice([r for r in ROOMS if r != place.get(who)])
            events.append(f"{who} walks to the {place[who]}")
        elif kind == "take":
            free = [t for t in THINGS if t not in held and left.get(t, place[who]) == place[who]]
            if free and len(held) + len(left) < 4:
                thing = rng.choice(free)
                held[thing] = who
                left.pop(thing, None)
                events.append(f"{who} takes the {thing}")
        elif kind == "send" and mine:
            others = [p for p in people if p != who and p in place]
            if others:
                thing, other = rng.choice(mine), rng.choice(others)
                held[thing] = other
                events.append(f"{who} sends the {thing} to {other}")
        elif kind == "leave" and mine:
            thing = rng.choice(mine)
            del held[thing]
            left[thing] = place[who]
            events.append(f"{who} leaves the {thing} in the {place[who]}")
    things = sorted(set(held) | set(left))
    if things and rng.random() < 0.8:
        thing = rng.choice(things)
        if thing in left:
            steps, answer = f"the {thing} was left in the {left[thing]}", left[thing]
        elif rng.random() < 0.25:
            question = f"who has the {thing} ?"
            return Item("world", f"{' . '.join(events)} . {question}", "", held[thing])
        else:
            owner = held[thing]
            steps, answer = f"{owner} has the {thing} . {owner} is in the {place[owner]}", place[owner]
        question = f"where is the {thing} ?"
    else:
        who = rng.choice(sorted(place))
        steps, answer, question = f"{who} is in the {place[who]}", place[who], f"where is {who} ?"
    return Item("world", f"{' . '.join(events)} . {question}", steps, answer)


DOMAINS: dict[str, Callable[[random.Random, float], Item]] = {
    "chain": chain,
    "recall": recall,
    "lists": lists,
    "program": program,
    "world": world,
}


def generate(domain: str, rng: random.Random, *, test: bool, level: float = 1.0) -> Item:
    """Draw one item of ``domain`` on the training or on the test side.

    ``level`` in [0, 1] scales the length; 1 is the full length that the quality tasks use.
    """
    make = DOMAINS[domain]
    while True:
        item = make(rng, level)
        if item.is_test == test:
            return item
