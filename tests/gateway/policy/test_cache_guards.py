"""What keeps two questions from one answer."""

import json
import random
from pathlib import Path

import pytest

from gateway.policy.cache_guards import (
    compared,
    differences,
    same_content,
    same_words,
)
from gateway.policy.cache_reading import LONGEST_CHARS, read
from gateway.policy.cache_stems import stem

TRAPS = Path(__file__).parents[3] / "bench" / "cache_traps.jsonl"


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("What is 15% of 80?", "What is 15% of 90?", "number"),
        ("Give me three tips", "Give me five tips", "number"),
        ("Who was president in 1945?", "Who was president in 1954?", "number"),
        ("Is it open on Monday?", "Is it open on Sunday?", "date"),
        ("Set a reminder for 3 pm", "Set a reminder for 3 am", "date"),
        ("Is 200 mg of caffeine a lot?", "Is 200 g of caffeine a lot?", "unit"),
        ("How much is 50 USD in yen?", "How much is 50 GBP in yen?", "unit"),
        ('What does "break a leg" mean?', 'What does "break the ice" mean?', "quoted"),
        ("What does `x += 1` do?", "What does `x -= 1` do?", "code"),
        ("How do I use list.append?", "How do I use list.extend?", "code"),
        ("Is it the capital of Peru?", "Is it the capital of Chile?", "name"),
        ("weather in london", "weather in madrid", "name"),
        ("What does NASA do?", "What does NATO do?", "name"),
        ("Which foods contain gluten?", "Which foods do not contain gluten?", "negation"),
        ("What can dogs eat?", "What can't dogs eat?", "negation"),
        ("Is it legal to film here?", "Is it illegal to film here?", "negation"),
        ("Darf man hier parken?", "Darf man hier nicht parken?", "negation"),
        ("How do I enable dark mode?", "How do I disable dark mode?", "opposite"),
        ("What do I eat before a run?", "What do I eat after a run?", "opposite"),
        ("Flights from London to Rome", "Flights from Rome to London", "order"),
        ("Why do cats chase mice?", "Why do mice chase cats?", "order"),
        ("Divide 10 by 2", "Divide 2 by 10", "order"),
        ("Can I call you something else?", "Can you call me something else?", "order"),
        ("How do I send you a file?", "How do you send me a file?", "order"),
        ("Where was he born?", "When was he born?", "question"),
        ("Wo ist der Bahnhof?", "Waar is het station?", "language"),
        ("Как дела?", "How are you?", "language"),
    ],
)
def test_found(a: str, b: str, reason: str) -> None:
    assert reason in differences(a, b)
    assert differences(b, a) == differences(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("How do I reset my password?", "how can i reset my password"),
        ("Give me 3 tips for sleep", "Give me three tips for sleep"),
        ("Convert 1000 dollars", "Convert 1,000 dollars"),
        ("What can't dogs eat?", "What can dogs not eat?"),
        ("How do I get from Paris to New York?", "How can I get to New York from Paris?"),
        ("Compare Python and Java", "Compare Java and Python"),
        ("What happened on 5 June 1967?", "What happened on June 5, 1967?"),
        ("what does nasa do", "What does NASA do?"),
        ("Is it safe to drink tap water?", "Is tap water safe to drink?"),
        ("You may ask him", "May I ask him"),
        ("The disposable cards, what are they for?", "The disposable cards - what are they for?"),
    ],
)
def test_nothing_found(a: str, b: str) -> None:
    assert differences(a, b) == ()


def test_hand_made_traps() -> None:
    """Of the traps that were not held out all but the listed kinds are found; of the paraphrases
    nearly all pass. Those held out are bench.cache's to count."""
    rows = [json.loads(line) for line in TRAPS.read_text(encoding="utf-8").splitlines()]
    seen = [row for row in rows if not row["held"]]
    missed = [
        row["a"]
        for row in seen
        if not row["same"] and row["kind"] != "topic" and not differences(row["a"], row["b"])
    ]
    blocked = [row["a"] for row in seen if row["same"] and differences(row["a"], row["b"])]
    assert len(missed) <= 2, missed
    assert len(blocked) <= 2, blocked
    assert sum(not row["same"] for row in rows) >= 200
    assert {row["same"] for row in rows if row["held"]} == {0, 1}


def test_another_word_in_its_place_is_counted() -> None:
    assert not same_content(read("How do I train a puppy?"), read("How do I train a kitten?"))
    assert same_content(read("How do I train a puppy?"), read("How can one train puppies"))


def test_other_numbers_never_pass() -> None:
    """Whatever stands around them."""
    draw = random.Random(7)
    words = ["how", "do", "I", "pay", "for", "Rome", "trip", "in", "to", "not", "days", "is", "?"]
    for _ in range(300):
        text = draw.choices(words, k=draw.randint(1, 12))
        place = draw.randint(0, len(text))
        a, b = draw.sample(range(2, 5000), 2)
        left, right = (" ".join([*text[:place], str(n), *text[place:]]) for n in (a, b))
        assert "number" in differences(left, right)


def test_symmetric_and_silent_about_itself() -> None:
    draw = random.Random(11)
    signs = "ab 12 .,?!'\"`()[]{}<>=+-*/_\\ \n\t$€%é日本の ж not Rome from to"
    for _ in range(400):
        a, b = ("".join(draw.choices(signs, k=draw.randint(0, 60))) for _ in range(2))
        assert differences(a, b) == differences(b, a)
        assert differences(a, a) == ()
        assert compared(read(a), read(a)) == ()


def test_long_texts_equal_only_themselves() -> None:
    long = "word " * LONGEST_CHARS
    assert "length" in differences(long, long + "more")
    assert differences(long, long) == ()


@pytest.mark.parametrize("text", ["'" * 5000, "`" * 5000, "(" * 5000, "a." * 2000, "-" * 5000])
def test_hostile_texts_are_read_in_bounded_steps(text: str) -> None:
    assert read(text).is_cut == (len(text) > LONGEST_CHARS)


def test_same_words() -> None:
    assert same_words(read("What's the capital of Peru?"), read("what is the capital of peru"))
    assert same_words(read("Please tell me a joke"), read("tell me a joke!"))
    assert not same_words(read("Tell me a joke"), read("Tell me a story"))
    assert same_words(read("who is bush ?"), read("Who is Bush"))
    assert same_words(read("what does nasa do"), read("What does NASA do?"))


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("what does US mean", "what does us mean"),
        ("what mood is this: great 😀", "what mood is this: great 😡"),
        ("explain ;", "explain :"),
        ("what does ?? do", "what does ?. do"),
        ("is !x true", "is x true"),
        ("how many commas: a,b,c", "how many commas: a b c"),
        ("how do you say hello in French", "how do you say thanks in French"),
        ("hello", "thanks"),
        ("?", "..."),
    ],
)
def test_what_a_sign_or_a_capital_may_ask_about_is_not_the_same(text: str, other: str) -> None:
    assert not same_words(read(text), read(other))
    assert not same_words(read(other), read(text))


def test_a_minus_is_part_of_a_number() -> None:
    assert differences("what is -5 + 3", "what is 5 + 3") == ("number",)
    assert differences("what is \u22125 + 3", "what is -5 + 3") == ()
    assert differences("pages 4-5", "pages 4-5?") == ()


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("what is 7 - 3", "what is 3 - 7"),
        ("what is 2**3", "what is 3**2"),
        ("What did Alice tell Bob?", "What did Bob tell Alice?"),
        ("what is .5 of ten", "what is 5 of ten"),
        ("is 1e5 big", "is 1e-5 big"),
        ("what is 8 - (3 - 1)", "what is (8 - 3) - 1"),
        ("what is 5!", "what is 5?"),
        ("what does __init__ do", "what does init do"),
        ("what does _ mean", "what does __ mean"),
        ("rm -rf ./x", "rm -rf /x"),
        ("rm -rf .x", "rm -rf x"),
        ("why c?\nif a:\n    b()\n    c()", "why c?\nif a:\n    b()\nc()"),
        ("why c? `if a:\n\tb()\n\tc()`", "why c? `if a:\n\tb()\nc()`"),
    ],
)
def test_what_looks_the_same_word_for_word_and_is_not(text: str, other: str) -> None:
    assert differences(text, other)
    assert differences(other, text)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("what is .5 of ten", "what is 0.5 of ten"),
        ("which is more, 7 or 3", "which is more, 3 or 7"),
        ("trains between Rome and Oslo", "trains between Oslo and Rome"),
        ("is 1e5 big", "is 100000 big"),
    ],
)
def test_numbers_and_names_that_are_the_same(text: str, other: str) -> None:
    assert differences(text, other) == ()


@pytest.mark.parametrize(
    ("word", "other"),
    [("cities", "city"), ("running", "run"), ("boxes", "box"), ("raised", "increase")],
)
def test_stems(word: str, other: str) -> None:
    assert stem(word) == stem(other)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("How do I reset my password?", "What is the best way to reset my password?", True),
        ("What does inflation mean?", "Can you explain inflation?", True),
        ("How many days do I have?", "How many days have I used?", False),
        ("How do I order my card?", "How do I order another card?", False),
        ("How do I verify my identity?", "I have trouble verifying my identity", False),
        ("How do I reset it?", "What is it?", False),
        ("What is it?", "What was it?", False),
        ("Can IT help US travel?", "Can it help us travel?", False),
        ("how do you say hello in French", "how do you say hi in French", False),
        ("is every cat an animal", "is every animal a cat", False),
    ],
)
def test_same_content(a: str, b: str, same: bool) -> None:
    assert same_content(read(a), read(b)) is same
    assert same_content(read(b), read(a)) is same
