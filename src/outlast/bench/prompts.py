"""Prompts of a given length: English prose made from a seed, so that every run and every stream has text of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

_PEOPLE = (
    "the night clerk", "an old ferryman", "my sister Ruth", "the new baker", "a surveyor from the coast", "Mr. Okafor",
    "the twins", "the lighthouse keeper", "a tired courier", "the choir's director", "Dr. Lindqvist", "the innkeeper",
    "a boy with a kite", "the harbour master", "our neighbour Ines", "the retired judge",
)  # fmt: skip
_PLACES = (
    "the upper lock", "the reading room", "a field of barley", "the railway bridge", "the cellar of the town hall",
    "the fish market", "the north pier", "an empty school", "the glass house", "the last tram stop", "the mill pond",
    "a bend of the river", "the weather station", "the chapel yard", "the print shop", "the dry dock",
)  # fmt: skip
_THINGS = (
    "a box of brass keys", "the ledger of 1911", "two jars of honey", "a broken sextant", "a letter without a stamp",
    "the map of the drains", "a pair of rowing gloves", "three loaves of rye bread", "the spare wheel", "a caged finch",
    "a coil of wet rope", "the missing chess piece", "a lantern with blue glass", "the seed catalogue",
    "a silver whistle", "an unpaid bill",
)  # fmt: skip
_TIMES = (
    "Before dawn", "At a quarter past six", "On the third of March", "During the storm", "After the bells had stopped",
    "Late that evening", "Once the fog had lifted", "While the kettle sang", "On market day", "In the second week",
    "Just after lunch", "When the tide turned", "The following Tuesday", "As the lamps were lit", "In the dry season",
    "Some hours later",
)  # fmt: skip
_FORMS = (
    "{time}, {who} carried {thing} to {place}, and nobody asked why.",
    "{time}, {who} met {other} at {place}; they spoke of {thing} and of little else.",
    "It was {who} who found {thing} near {place}, {number} days after it had been lost.",
    "{time}, the road to {place} was closed, so {who} went round by {elsewhere}.",
    "There were {number} people at {place} that day, and {who} counted them twice.",
    "Had {who} looked behind {place}, {thing} would have been there for anyone to take.",
    '"Leave {thing} where it is," said {who}, "until {other} has seen it."',
    "{time}, the price of {thing} rose to {number} shillings, which {who} thought absurd.",
    "Nothing in {place} had changed except that {thing} now hung above the door.",
    "{time}, {who} wrote down every word, signed the page, and hid it under {thing}.",
    "Between {place} and {elsewhere} lie {number} miles of sand, as {who} knew well.",
    "For {number} nights {other} waited at {place}, and then {who} came with {thing}.",
)

_OPENING = "These are notes from a small town, kept by several hands.\n\n"
_CLOSING = "\n\nGo on with the notes in the same voice."


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation with the opening of an answer."""


def sentence(rng: random.Random) -> str:
    """One English sentence."""
    who, other = rng.sample(_PEOPLE, 2)
    place, elsewhere = rng.sample(_PLACES, 2)
    text = rng.choice(_FORMS).format(
        who=who, other=other, place=place, elsewhere=elsewhere, thing=rng.choice(_THINGS), time=rng.choice(_TIMES),
        number=rng.randint(3, 97),
    )  # fmt: skip
    return text[0].upper() + text[1:]


def conversation(seed: int, tokens: int, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Messages of about `tokens` tokens, at most a sentence longer; the same for the same seed."""
    rng = random.Random(seed)
    sentences: list[str] = []

    def messages() -> list[dict[str, str]]:
        return [{"role": "user", "content": _OPENING + " ".join(sentences) + _CLOSING}]

    while True:
        missing = tokens - len(tokenizer.encode_chat(messages()))
        if missing <= 0:
            return messages()
        # A sentence has some 20 tokens; the last few are added one at a time.
        sentences += [sentence(rng) for _ in range(max(1, missing // 40))]
