"""The demo's prompts: hand-written pieces, combined by a fixed rule into short instructions.

    python data/demo/make_prompts.py      one conversation a line, user turns separated by a tab

All of it is this project's own text (Apache-2.0, as the rest). `conversations()` is a constant:
same list, same order, on every machine, and every prefix of it is a mix of all kinds. Answers
come from make_conversations.py.
"""

from __future__ import annotations

import hashlib
import itertools

THINGS = """photosynthesis; gravity; a rainbow; the water cycle; a volcano; an earthquake; the
moon; a magnet; electricity; a computer; the internet; a robot; an algorithm; a database; a web
browser; machine learning; a battery; a bicycle; a bridge; a compass; a thermometer; a
telescope; a microscope; the heart; the brain; the lungs; sleep; a vaccine; a vitamin; protein;
bread; coffee; chocolate; honey; cheese; democracy; a constitution; inflation; a budget; a bank;
a loan; insurance; a library; a museum; an orchestra; a poem; a novel; a metaphor; a verb; an
adjective; a fraction; a prime number; a triangle; probability; an average; a graph; a forest; a
desert; an ocean; a river; an island; a glacier; a whale; a bee; a spider; an owl; a dinosaur; a
seed; a mushroom; recycling; solar power; wind energy; climate; friendship; teamwork; patience"""
LISTS = """healthy breakfast foods; fruits that are red; animals that live in the ocean; ways to
save water; ways to save money; things to pack for a trip; tools found in a kitchen; musical
instruments; sports played with a ball; planets of the solar system; primary colors and mixed
colors; reasons to read books; hobbies for a rainy day; jobs in a hospital; vegetables that grow
underground; ways to make new friends; tips for better sleep; tips for a job interview; benefits
of walking; games for children; countries in Europe; large cities in Asia; rivers of the world;
programming languages; parts of a computer; parts of a plant; kinds of weather; kinds of clouds;
ways to reduce stress; things to do in a park; birds that can swim; desserts without chocolate;
materials used to build houses; rules for safe cycling; uses of paper; ideas for a birthday
gift; topics for a short speech; questions to ask a new neighbor; habits of good students; steps
to plant a tree; things that use electricity; ways to stay warm in winter; ways to stay cool in
summer; foods with a lot of protein; common pets"""
WORDS = """brave; curious; fragile; generous; ancient; silent; rapid; honest; bright; gentle;
stubborn; clever; lonely; cheerful; enormous; tiny; careful; ordinary; famous; humble; loyal;
nervous; polite; proud; rare; sincere; strange; tidy; useful; wise; harvest; journey; shelter;
promise; rumor; shadow; village; courage; memory; mistake; reward; bargain; habit; mystery;
victory"""
SENTENCES = """\
The meeting starts at nine and everyone has to be there.
I can't come to the party because I am sick.
The dog ran across the street and barked at the mailman.
She gave me the book that I wanted to read.
We are going to the beach if the weather is good.
The food was cold and the waiter was slow.
He fixed the old car with the help of his brother.
My sister plays the piano every evening after dinner.
The students finished the test before the bell rang.
It is raining, so take an umbrella with you.
The company wants to hire ten new people this year.
I forgot my keys and had to wait outside for an hour.
The children built a small house out of wood and stones.
Our train was late because of the snow.
The museum is closed on Mondays but open on Sundays.
They painted the kitchen yellow last weekend.
You should send the report to the manager today.
The cat sleeps on the warm chair near the window.
Nobody knew the answer to the last question.
The old bridge was built more than a hundred years ago.
Please tell me when the package arrives.
The farmer sells apples and potatoes at the market.
I think this phone is too expensive.
The team won the game in the last minute."""
CODE = """adds two numbers; returns the larger of two numbers; checks if a number is even;
reverses a string; counts the vowels in a string; computes the factorial of a number; returns
the sum of a list; finds the smallest number in a list; checks if a word is a palindrome;
converts Celsius to Fahrenheit; counts the words in a sentence; removes duplicates from a list;
returns the first n Fibonacci numbers; checks if a number is prime; squares every number in a
list; joins a list of words with spaces; returns the average of a list; prints the numbers from
1 to n; returns the length of the longest word; swaps two variables; sorts a list in descending
order; counts how often a letter appears in a word; merges two dictionaries; computes the area
of a circle; computes the area of a rectangle; makes a string uppercase; returns the last
element of a list; checks if a list is empty; filters the positive numbers of a list; reads a
file and returns its lines; rolls a six-sided die; checks if a year is a leap year"""
PEOPLE = "Anna; Ben; Clara; David; Emma; Felix; Grace; Hugo; Ivy; Jack; Lena; Mark; Nora; Omar"
ITEMS = "apples; pencils; books; marbles; cookies; stamps; tickets; eggs; stickers; coins"
SUMS = (
    "{p} has {a} {i} and buys {b} more. How many {i} does {p} have now?",
    "{p} has {a} {i} and gives {b} of them away. How many {i} are left?",
    "{p} fills {b} boxes with {a} {i} each. How many {i} are there in total?",
    "A shop sells {i} for {b} dollars each. How much do {a} {i} cost?",
)
MAILS = """your boss/asking for a day off; your boss/saying that you are sick today; a
teacher/asking for help with homework; a teacher/saying thank you for the course; a
neighbor/asking to borrow a ladder; a neighbor/apologizing for the loud music; a friend/inviting
them to a birthday party; a friend/asking to meet for coffee; a customer/saying that the order
is late; a customer/thanking them for their order; a colleague/asking for the sales report; a
colleague/congratulating them on a new job; a landlord/reporting a broken heater; a hotel/asking
for the price of a room; a doctor's office/moving an appointment; a library/asking about opening
hours; a bank/asking about a lost card; a gym/canceling a membership; a team/announcing a
meeting on Friday; a team/thanking them for a good year; a restaurant/booking a table for four;
a school/asking about summer classes; a company/applying for an internship; a company/asking for
a refund"""
HEROES = """a small dragon; a lost robot; an old sailor; a shy girl; a clever fox; a tired king;
a curious cat; a young baker; a lonely tree; a brave mouse; a forgetful wizard; a retired
teacher"""
EVENTS = """who finds a map; who is afraid of the dark; who learns to swim; who makes a new
friend; who gets lost in a storm; who plants a garden"""
PAIRS = """a lake and a river; a fruit and a vegetable; a cat and a dog; a novel and a poem; tea
and coffee; a city and a village; weather and climate; a planet and a star; a crocodile and an
alligator; butter and margarine; a debit card and a credit card; a virus and a bacterium;
hardware and software; RAM and a hard disk; a list and a tuple in Python; HTML and CSS; a
compiler and an interpreter; speed and velocity; mass and weight; a mixture and a solution; an
ocean and a sea; a frog and a toad; a moth and a butterfly; a simile and a metaphor; a noun and
a verb; a boat and a ship; a hotel and a hostel; jam and honey; a letter and an email; a violin
and a guitar; running and walking; saving and investing; a wolf and a dog; rain and snow; gold
and silver"""
HOWTO = """boil an egg; make a cup of tea; wash a wool sweater; change a light bulb; tie a tie;
plant tomatoes; clean a window; learn ten new words a day; write a thank-you note; make a paper
plane; pack a suitcase; train a puppy to sit; cook rice; make pancakes; remove a coffee stain;
take a good photo; prepare for an exam; start a conversation; save a document as a PDF; choose a
strong password; back up my photos; fix a flat bicycle tire; make a simple salad; keep flowers
fresh; organize my desk; fall asleep faster; read a map; remember people's names; give a short
speech; start running; water my plants while traveling; wrap a present"""
COUNTRIES = """France; Italy; Spain; Germany; Japan; China; India; Egypt; Kenya; Brazil; Canada;
Mexico; Peru; Chile; Norway; Sweden; Finland; Poland; Greece; Portugal; Turkey; Russia;
Australia; Thailand; Vietnam; South Korea; Ireland; Austria; Hungary; Cuba; Argentina; Morocco"""
REVIEWS = """\
The soup was delicious and the staff were kind.
The screen broke after two days.
I loved every page of this book.
The room was dirty and the bed was hard.
The shoes are light and very comfortable.
The movie was boring and far too long.
Great sound, easy to set up, and a fair price.
The delivery took five weeks and nobody answered my calls.
The guide was funny and knew a lot.
The cake was dry and had no taste.
The jacket kept me warm in the snow.
The app crashes each time I open it.
My children play with this toy every day.
The coffee was cold when it arrived.
The teacher explains everything clearly.
The battery is empty after one hour.
The garden was beautiful and quiet.
The seats were narrow and the bus was late.
The knife is sharp and easy to clean.
The paint came off in the first rain."""
POEMS = """the sea; autumn leaves; a sleeping cat; the first snow; an old house; the night sky;
a cup of tea; my garden; a train ride; summer rain; the morning sun; a good friend; a small
bird; the wind; a mountain lake; a candle; the city at night; a forgotten toy; winter; a paper
boat; the stars; a river; spring flowers; a lighthouse"""
TITLES = """a dog who becomes mayor; two friends who open a bakery; a trip to the moon; a girl
who can talk to trees; a lost treasure; a robot that learns to paint; a haunted library; a race
across the desert; a boy who collects clouds; a village without clocks; a secret garden on a
roof; a ship in a storm; a detective who is always late; a bear who cannot sleep; a school under
the sea; a king who gives away his crown"""
CHOICES = """living in a big city; working from home; riding a bicycle to work; having a pet;
learning to cook; eating only vegetables; buying a used car; studying abroad; getting up early;
shopping online; using public transport; owning a smartphone; being self-employed; watching
television; keeping a diary; traveling alone"""
PASSAGES = """\
Bees visit flowers to collect nectar. While they do so, pollen sticks to their legs. They carry it to the next flower, and the plant can make seeds.
The town built a new park last year. It has a pond, a playground and many benches. Families go there every weekend.
Maria wanted to learn the guitar. She practiced for half an hour each day. After six months she played at her sister's wedding.
Bats hunt at night. They send out high sounds and listen to the echo. In this way they find insects in the dark.
The bakery on the corner opens at six. Its bread is made by hand. People stand in line even in the rain.
Glass is made from sand. The sand is heated until it melts. Then it can be blown or pressed into any shape.
The office will move to a new building in June. Everyone gets a desk near a window. Parking is free for the first three months.
Sharks have lived in the sea for millions of years. They have no bones, only cartilage. Most of them do not attack people.
Tom lost his wallet on the bus. A stranger found it and brought it to the police. Tom sent her flowers to say thank you.
Rice needs a lot of water to grow. Farmers plant it in flooded fields. It feeds more than half of the people on earth.
The river rose quickly after the storm. The firemen put sandbags along the road. By morning the water had gone down.
Lighthouses warn ships of rocks. In the past a keeper lit the lamp each evening. Today most of them work without people."""  # noqa: E501
FOLLOW_UPS = (
    "Now say it in one sentence.",
    "Can you make that shorter?",
    "Give me one example.",
    "Explain that to a child.",
)
KINDS = (
    (
        THINGS,
        "What is {}? Answer in two sentences.",
        "Explain {} in simple words.",
        "Why is {} important? Answer briefly.",
        "Write a short paragraph about {}.",
    ),
    (LISTS, "List three {}.", "Name five {}."),
    (
        WORDS,
        'What does the word "{}" mean?',
        'Use the word "{}" in a sentence.',
        'Give me a word that means the same as "{}".',
    ),
    (
        SENTENCES,
        "Rewrite this sentence in a more formal way: {}",
        "Rewrite this sentence in the past tense: {}",
        "Rewrite this sentence as a question: {}",
        "Rewrite this sentence in a friendly tone: {}",
        "Which words in this sentence are nouns? {}",
    ),
    (CODE, "Write a Python function that {}.", "Show me short Python code that {}."),
    (PAIRS, "What is the difference between {}?", "Compare {} in two sentences."),
    (HOWTO, "How do I {}? Give me short steps.", "Give me one tip: how to {}."),
    (
        COUNTRIES,
        "What is the capital of {}?",
        "Tell me one interesting fact about {}.",
        "What food is {} known for?",
    ),
    (
        REVIEWS,
        "Is this review positive or negative? {}",
        "Write a one-sentence answer to this review: {}",
    ),
    (POEMS, "Write a four-line poem about {}.", "Describe {} in one sentence."),
    (
        TITLES,
        "Suggest a title for a story about {}.",
        "Write the first sentence of a story about {}.",
    ),
    (
        CHOICES,
        "Name one advantage and one disadvantage of {}.",
        "Is {} a good idea? Answer in two sentences.",
    ),
    (PASSAGES, "Summarize this text in one sentence: {}", "Give this text a title: {}"),
)


def split(text: str) -> list[str]:
    """The pieces of a text: one a line where it holds whole sentences, else separated by `;`."""
    parts = text.split(";") if ";" in text else text.split("\n")
    return [" ".join(part.split()) for part in parts]


def single_turns() -> list[str]:
    """Every prompt of one turn, kind by kind."""
    crossed = [
        template.format(piece)
        for pieces, *templates in KINDS
        for piece in split(pieces)
        for template in templates
    ]
    people, items = split(PEOPLE), split(ITEMS)
    sums = [
        template.format(
            p=people[n % len(people)],
            i=items[(3 * n + k) % len(items)],
            a=9 + (5 * n) % 17,
            b=2 + (3 * n + k) % 7,
        )
        for n, (template, k) in enumerate(itertools.product(SUMS, range(25)))
    ]
    mails = [
        f"Write a short email to {to}, {what}."
        for to, what in (mail.split("/") for mail in split(MAILS))
    ]
    stories = [
        f"Write a {('three-sentence', 'very short')[n % 2]} story about {hero} {event}."
        for n, (hero, event) in enumerate(itertools.product(split(HEROES), split(EVENTS)))
    ]
    return [*crossed, *sums, *mails, *stories]


def conversations() -> list[tuple[str, ...]]:
    """User turns of every conversation, in a fixed mixed order; every tenth has a second turn."""
    turns = sorted(single_turns(), key=lambda text: hashlib.sha256(text.encode()).digest())
    assert len(set(turns)) == len(turns), "a prompt stands twice"
    return [
        (turn, FOLLOW_UPS[n // 10 % len(FOLLOW_UPS)]) if n % 10 == 9 else (turn,)
        for n, turn in enumerate(turns)
    ]


if __name__ == "__main__":
    for turns in conversations():
        print("\t".join(turns))
