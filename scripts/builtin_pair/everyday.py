"""Words and sentences of everyday life, and names that nobody uses.

The pair must decline what it has never met, so it meets many words in many frames; a list of subjects alone
taught it that list.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

NOUNS: tuple[str, ...] = tuple(
    """apartment aunt baby balcony banana bank barber basement bathtub beach beard bed beer bicycle blanket boat
    boss bottle bracelet brother bus butter cactus camera campfire candle carpet carrot castle ceiling cellar
    chair cheese cherry chicken child church cinema coat concert couch cousin cow cup curtain daughter dentist
    desk diet divorce doctor door dress drum duck ear egg engagement exam eye fence flight flower forest fork
    friend furniture garden garlic ghost giraffe glove goat grandfather guitar hair hammer hat hedge hen holiday
    honey hospital hotel house husband island jacket jam jeans job juice kitchen kitten knee knife ladder lake
    lamp landlord lawn lawyer lemon lettuce lipstick mattress meat milk mirror mosquito mountain moustache
    museum mushroom neighbour nephew nose novel nurse onion orange painting parrot passport pension piano pig
    pillow plumber policeman potato pregnancy pumpkin puppy rash raincoat rent restaurant rice ring roof rose
    salary sandwich saucepan scarf school shampoo sheep ship shirt shoe shower sister skateboard skin sofa son
    spider spoon squirrel stomach strawberry suitcase sunburn sweater swimming-pool tea teacher teenager tent
    theatre ticket toaster tomato tooth tractor train tram trousers truck turtle umbrella uncle vacation vase
    violin visa volcano wallet wardrobe wasp wedding whisky wife wine winter-coat yoga zebra""".split()
)
DOINGS: tuple[str, ...] = tuple(
    """bake bathe boil borrow breathe brush buy celebrate chew clean climb comb cook cry cure cut dance decorate
    drink drive dry eat exercise feed fish fix fly forgive freeze fry grow heal hike hunt iron jog kiss knit
    laugh lend love marry meditate mow nap paint peel plant polish pray rent repair ride roast run sell sew
    shave sing ski smell smoke steal steam stitch swim taste teach tidy travel vacuum wash water wear weigh
    yawn""".split()
)
QUALITIES: tuple[str, ...] = tuple(
    """angry beautiful bitter blue boring brave cheap clean clever cold comfortable crazy cute dangerous dark
    dirty dry dusty elegant expensive famous fat fresh friendly frozen funny green grey happy healthy heavy hot
    hungry ill jealous lazy lonely loud lucky modern noisy old pale pink poor popular pretty proud purple quiet
    rare rich ripe romantic rotten sad salty scared shy sick slippery soft sour spicy sticky strong sweet tall
    thin tired toxic ugly violent warm weak wet wild wise wooden yellow young""".split()
)
WHENS: tuple[str, ...] = (
    "every morning", "on Sundays", "at night", "in winter", "before bed", "this weekend", "after work", "in 2021",
    "for a week", "next year", "at my age", "during the holidays", "all the time", "before an exam", "in summer",
)  # fmt: skip
FRAMES: tuple[str, ...] = (
    "Is it {quality} to {doing} a {noun}?", "Why is my {noun} so {quality}?", "How do I {doing} my {noun}?",
    "How often should I {doing} my {noun}?", "Can I {doing} a {noun} {when}?", "Where can I buy a {noun}?",
    "How much does a {quality} {noun} cost?", "What does a {noun} cost {when}?", "Which {noun} is best?",
    "Give me a {quality} {noun}.", "Tell me something about the {noun}.", "Should I {doing} {when}?",
    "My {noun} is {quality}. What can I do?", "my {noun} hurts", "What colour is a {noun}?",
    "My {noun} does not {doing} any more.", "What is the difference between a {noun} and a {noun}?",
    "Is a {noun} {quality}?", "Are {noun}s {quality}?", "How long does a {noun} last?", "who invented the {noun}",
    "I want to {doing} with my {noun} {when}.", "How many {noun}s are there in the world?",
    "What is the best {noun} for a {quality} {noun}?", "Invent a name for my {noun}.", "Do {noun}s {doing}?",
    "How can I stop my {noun} from being {quality}?", "My {noun} wants to {doing}. Should I let it?",
    "Describe a {quality} {noun}.", "Write a {quality} letter to my {noun}.", "What would a {noun} say?",
    "Explain {noun}s to a child.", "Who is the most {quality} {noun}?", "How do you {doing} {when}?",
    "Which {noun} should I take to a {noun}?", "I feel {quality} {when}.", "{noun}", "{quality} {noun}",
    "What do you think about {noun}s?", "Let us {doing} {when}.", "how to {doing} a {quality} {noun}",
    "Is there a {noun} near me?", "Can a {noun} {doing}?", "When is the best time to {doing} a {noun}?",
    "Compare a {noun} with a {noun}.", "What happens if I {doing} a {quality} {noun}?", "a {noun} for my {noun}",
    "Please {doing} my {noun}.", "Five ideas for a {quality} {noun}, please.", "Why do people {doing} {when}?",
    "{Name} is {quality}. Why?", "Who is {Name}?", "Where is {Name}?", "What is {name}?", "Tell me about {Name}.",
    "When was {Name} born?", "Have you been to {Name}?", "How far is it from {Name} to {Name}?",
    "What is the capital of {Name}?", "Who wrote {Name} and the {Name}?", "What is {Name} famous for?",
    "Translate '{noun}' into {Name}.", "How do you say '{noun}' in {Name}?", "In which year did {Name} die?",
    "How do I {doing} in {name}?", "What is a {name} in {Name}?", "Explain the {name} of {Name}.",
    "How do I use {name} with {name}?", "What does {name} mean?", "Is {Name} better than {Name}?",
)  # fmt: skip
LIBRARY_FRAMES: tuple[str, ...] = (
    "What does {}.{} do?", "what is {}.{}", "Explain {}.{}.", "{}.{}", "What does {}.{}() return?",
    "What is {}.{} for?", "Which parameters does {}.{} take?", "Tell me about {}.{}.", "How do I call {}.{}?",
    "What does {1} of {0} do?", "How do I make a {1} with {0}?", "{}.{}?", "When do I need {}.{}?",
    "show me an example of {}.{}", "How do I {1} something in {0}?", "I saw {}.{} in some code, what is it?",
)  # fmt: skip
STARTS = "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr kn pl pr qu sc sh sk sl sp st th tr tw".split()
VOWELS = "a e i o u a e i o u ai ea ee ie oo ou y".split()
ENDS = "b ck d ff g k l ll m n nd ng nt p r rd rk rm rn rt s sh ss st t th x".split()


WORDS = {"noun": NOUNS, "doing": DOINGS, "quality": QUALITIES, "when": WHENS}


def fill_slots(template: str, slots: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    """`template` with every "{slot}" replaced by one of its words."""
    for slot, values in slots.items():
        mark = "{" + slot + "}"
        while mark in template:
            template = template.replace(mark, rng.choice(values), 1)
    return template


def invented_word(rng: random.Random) -> str:
    """Return a word that can be spoken and means nothing."""
    word = ""
    for _ in range(rng.randint(1, 3)):
        word += rng.choice(STARTS) + rng.choice(VOWELS)
    return word + rng.choice(ENDS) if rng.random() < 0.6 else word


def everyday_question(rng: random.Random) -> str:
    """Return a sentence from life in which nothing belongs to programming."""
    question = fill_slots(rng.choice(FRAMES), WORDS, rng)
    while "{name}" in question:
        question = question.replace("{name}", invented_word(rng), 1)
    while "{Name}" in question:
        question = question.replace("{Name}", invented_word(rng).capitalize(), 1)
    return question


def unknown_member(rng: random.Random) -> str:
    """Return a question about a function of a library that does not exist."""
    library = invented_word(rng)
    member = invented_word(rng)
    if rng.random() < 0.4:
        member += rng.choice(("_", "")) + rng.choice((*DOINGS, *NOUNS))
    if rng.random() < 0.2:
        member = member.capitalize()
    return rng.choice(LIBRARY_FRAMES).format(library, member)
